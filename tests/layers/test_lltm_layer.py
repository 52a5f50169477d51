"""nn.LLTM with more than one layer: layers, directions, ragged batches, packed sequences."""

import copy
import io
import pickle

import pytest
import torch
from samples import FLOATING, SIXTEEN_BIT, lltm_inputs
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence

import my_ops
from my_ops import reference

# Bounds are at most four times the largest error of 150 seeds: relative above 1, absolute below.
LIMIT = 3e-15  # a layer in float64: 9.6e-16
GRADIENT_LIMIT = 2e-14  # 5.4e-15
LONG_LIMIT = {  # forty steps
    torch.float64: 2.5e-14,  # 8.4e-15
    torch.float32: 1e-5,  # 3.4e-6
    torch.float16: 1.5e-3,  # 4.8e-4
    torch.bfloat16: 1.2e-2,  # 3.8e-3
}
# The 16-bit types' error relative to that of rounding the exact result. On the CPU there is only
# that; on CUDA h is also rounded between steps, and the input's share of the gates.
LONG_ROUNDINGS = {"cpu": 1.1, "cuda": 2.5}
LENGTHS = [[7, 7, 7], [7, 3, 1], [0, 5, 7], [0, 0, 0], [1, 0, 6]]
FORMS = {
    "one": {},
    "two-layers": {"num_layers": 2},
    "both-directions": {"bidirectional": True},
    "deep-and-both": {"num_layers": 3, "bidirectional": True},
    "batch-first": {"batch_first": True, "num_layers": 2},
    "no-bias": {"bias": False, "bidirectional": True},
}


def reference_lltm(x, h, c, weights, bias, length):
    """One sequence, (steps, input_size), to its end. The output after that is 0."""
    steps = x.shape[0]
    output, h_n, c_n = reference.lltm(x[:length, None], h[None], c[None], weights, bias)
    beyond = output.new_zeros(steps - length, h.shape[0])
    return torch.cat([output.squeeze(1), beyond]), h_n[0], c_n[0]


def reference_layer(layer, x, state, lengths):
    """nn.LLTM, one sequence at a time with the reference op, time first."""
    directions = 2 if layer.bidirectional else 1
    outputs, h_n, c_n = [], [], []
    for b, length in enumerate(lengths):
        row, h_b, c_b = x[:, b], [], []
        for first in range(0, len(layer.cells), directions):
            parts = []
            for k in range(first, first + directions):
                cell = layer.cells[k]
                forward = k == first
                turned = row if forward else torch.cat([row[:length].flip(0), row[length:]])
                bias = cell.weights.new_zeros(12) if cell.bias is None else cell.bias
                out, h, c = reference_lltm(
                    turned, state[0][k, b], state[1][k, b], cell.weights, bias, length
                )
                parts.append(out if forward else torch.cat([out[:length].flip(0), out[length:]]))
                h_b.append(h)
                c_b.append(c)
            row = torch.cat(parts, 1)
        outputs.append(row)
        h_n.append(torch.stack(h_b))
        c_n.append(torch.stack(c_b))
    output = torch.stack(outputs, 1) + 0.0 * x.sum()  # part of the graph even if no step runs
    return output, (torch.stack(h_n, 1), torch.stack(c_n, 1))


def made(form, device, dtype=torch.float64, **more):
    return my_ops.nn.LLTM(5, 4, **FORMS[form], **more, device=device, dtype=dtype)


def drawn(layer, device, dtype=torch.float64, steps=7, batch=3):
    x = torch.randn(steps, batch, 5, dtype=torch.float64).to(device, dtype)
    shape = (len(layer.cells), batch, 4)
    state = tuple(torch.randn(shape, dtype=torch.float64).to(device, dtype) for _ in range(2))
    return (x.transpose(0, 1) if layer.batch_first else x), state


def flat(result):
    output, (h, c) = result
    return output, h, c


def close(got, want, limit=LIMIT):
    for ours, exact in zip(flat(got), flat(want), strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=limit, atol=limit)


def same(got, want):
    assert all(torch.equal(a, b) for a, b in zip(flat(got), flat(want), strict=True))


@pytest.mark.parametrize("lengths", [None, *LENGTHS], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_values_and_gradients(form, lengths, device):
    layer = made(form, device)
    x, state = drawn(layer, device)
    tensors = [x.requires_grad_(), *(s.requires_grad_() for s in state), *layer.parameters()]
    given = None if lengths is None else torch.tensor(lengths, device=device)
    got = layer(x, state, given)
    time_first = x.transpose(0, 1) if layer.batch_first else x
    output, end = reference_layer(layer, time_first, state, lengths or [7] * 3)
    want = (output.transpose(0, 1) if layer.batch_first else output), end
    close(got, want)
    grads = [torch.randn_like(t) for t in flat(got)]
    got_grads = torch.autograd.grad(flat(got), tensors, grads)
    want_grads = torch.autograd.grad(
        flat(want), tensors, grads, allow_unused=True, materialize_grads=True
    )
    for ours, exact in zip(got_grads, want_grads, strict=True):
        torch.testing.assert_close(ours, exact, rtol=GRADIENT_LIMIT, atol=GRADIENT_LIMIT)


LONG_LENGTHS = [40, 0, 4, 1, 40, 7, 39, 20, 30, 3, 40, 2, 17, 33, 25, 12]


def long_and_ragged(dtype, device):
    return *lltm_inputs(40, 16, 33, 64, dtype, device), torch.tensor(LONG_LENGTHS, device=device)


def by_steps(input, h, c, weights, bias, lengths, rounded=None, to=None):
    """The reference in float64; its h or its c is rounded after every step if requested."""
    input, h, c, weights, bias = (t.double() for t in (input, h, c, weights, bias))
    outputs = []
    for t, x in enumerate(input):
        new = dict(zip("hc", reference.lltm_cell(x, weights, bias, h, c), strict=True))
        if rounded:
            new[rounded] = new[rounded].to(to).double()
        runs = (t < lengths).unsqueeze(1)
        h, c = torch.where(runs, new["h"], h), torch.where(runs, new["c"], c)
        outputs.append(torch.where(runs, h, 0.0))
    return torch.stack(outputs), h, c


def check_long(got, want, dtype, device):
    times = LONG_ROUNDINGS[device] if dtype in SIXTEEN_BIT else 1.0
    for ours, exact in zip(got, want, strict=True):
        limit = LONG_LIMIT[dtype] * times
        torch.testing.assert_close(ours.double(), exact, rtol=limit, atol=limit)
        if dtype in SIXTEEN_BIT:
            error, rounding = (
                ((t.double() - exact) / (1 + exact.abs())).square().mean().sqrt()
                for t in (ours, exact.to(dtype))
            )
            assert error <= times * rounding


@pytest.mark.parametrize("dtype", FLOATING)
def test_ragged_in_every_type(dtype, device):
    tensors = long_and_ragged(dtype, device)
    *args, lengths = tensors
    got = my_ops.lltm(*args, lengths=lengths)
    check_long(got, by_steps(*tensors), dtype, device)
    for b, length in enumerate(LONG_LENGTHS):
        assert (got[0][length:, b] == 0).all()
        if length == 0:
            assert torch.equal(got[1][b], args[1][b]) and torch.equal(got[2][b], args[2][b])


@pytest.mark.parametrize(
    "dtype, rounded, to",
    [
        *[(dtype, r, torch.float16) for dtype in (torch.float64, torch.float32) for r in "hc"],
        *[(dtype, "c", dtype) for dtype in SIXTEEN_BIT],  # h is an output, and has their type
    ],
)
def test_a_state_of_16_bits_between_steps_is_out_of_bounds(dtype, rounded, to, device):
    tensors = long_and_ragged(dtype, device)
    got = [t.to(dtype) for t in by_steps(*tensors, rounded, to)]
    with pytest.raises(AssertionError):
        check_long(got, by_steps(*tensors), dtype, device)


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e4])
@pytest.mark.parametrize("row", [0, 1])
def test_an_extreme_state_stays_in_its_row(row, value, dtype, device):
    """Also in a row without a step, which passes its state through."""
    input, h0, c0, weights, bias = lltm_inputs(6, 3, 8, 5, dtype, device)
    lengths = torch.tensor([0, 2, 6], device=device)
    usual = my_ops.lltm(input, h0, c0, weights, bias, lengths=lengths)
    h0[row], c0[row] = value, value
    output, h_n, c_n = my_ops.lltm(input, h0, c0, weights, bias, lengths=lengths)
    others = [b for b in range(3) if b != row]
    assert torch.equal(output[:, others], usual[0][:, others])
    assert torch.equal(h_n[others], usual[1][others])
    assert torch.equal(c_n[others], usual[2][others])
    assert (output[int(lengths[row]) :, row] == 0).all()
    if row == 0:
        torch.testing.assert_close(h_n[0], h0[0], rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(c_n[0], c0[0], rtol=0, atol=0, equal_nan=True)


def test_weights_beyond_float16_shut_too(device):
    input, h0, c0, weights, bias = lltm_inputs(6, 3, 8, 5, torch.float32, device)
    weights = weights * 1e6
    lengths = torch.tensor([0, 2, 6], device=device)
    _, _, c_n = my_ops.lltm(input, h0, c0, weights, bias, lengths=lengths)
    _, _, at_two = my_ops.lltm(input[:2], h0, c0, weights, bias)
    assert torch.equal(c_n[0], c0[0])
    torch.testing.assert_close(c_n[1], at_two[1], rtol=1e-4, atol=0)


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_what_is_beyond_the_end_does_not_matter(scale, dtype, device):
    """Not even with weights and states that open every gate wide."""
    input, h0, c0, weights, bias = lltm_inputs(6, 3, 8, 5, dtype, device)
    weights, bias, h0 = weights * scale, bias * scale, h0 * scale
    lengths = torch.tensor([2, 6, 0], device=device)
    leaves = [t.requires_grad_() for t in (weights, bias, h0, c0)]
    results = []
    for filler in (0.0, float("nan"), float("inf")):
        filled = input.clone()
        for b, length in enumerate(lengths.tolist()):
            filled[length:, b] = filler
        filled.requires_grad_()
        out = my_ops.lltm(filled, h0, c0, weights, bias, lengths=lengths)
        grads = torch.autograd.grad([t.sum() for t in out], [filled, *leaves])
        assert all(g.isfinite().all() for g in grads)
        results.append((*out, *grads))
    for other in results[1:]:
        for got, want in zip(other, results[0], strict=True):
            assert torch.equal(got, want)


def test_ragged_gradcheck(device):
    tensors = [t.requires_grad_() for t in lltm_inputs(4, 3, 2, 2, torch.float64, device)]
    lengths = torch.tensor([4, 0, 2], device=device)
    call = lambda *t: my_ops.lltm(*t, lengths=lengths)  # noqa: E731
    assert torch.autograd.gradcheck(call, tensors)
    assert torch.autograd.gradgradcheck(call, tensors)


@pytest.mark.parametrize("beyond, as_if", [(-3, 0), (-(2**63), 0), (9, 7), (2**63 - 1, 7)])
def test_lengths_out_of_range_are_clamped(beyond, as_if, device):
    layer = made("both-directions", device)
    x, state = drawn(layer, device)
    reset = torch.rand(x.shape[:2], device=device) < 0.3
    for mask in (None, reset):
        got = layer(x, state, torch.tensor([beyond, 2, 7], device=device), mask)
        same(got, layer(x, state, torch.tensor([as_if, 2, 7], device=device), mask))


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("form", FORMS)
def test_no_steps_and_one(form, steps, device):
    layer = made(form, device)
    x, state = drawn(layer, device, steps=steps)
    time_first = x.transpose(0, 1) if layer.batch_first else x
    lengths = torch.full((3,), steps, device=device)
    for got in (layer(x, state), layer(x, state, lengths)):
        output, end = reference_layer(layer, time_first, state, [steps] * 3)
        close(got, (output.transpose(0, 1) if layer.batch_first else output, end))


@pytest.mark.parametrize("enforce_sorted", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_packed_sequence_like_lstm(form, enforce_sorted, device):
    layer = made(form, device)
    x, state = drawn(layer, device)
    lengths = [7, 5, 2] if enforce_sorted else [2, 7, 5]
    packed = pack_padded_sequence(x, torch.tensor(lengths), layer.batch_first, enforce_sorted)
    got, got_state = layer(packed, state)
    want = layer(x, state, torch.tensor(lengths, device=device))
    padded, got_lengths = pad_packed_sequence(got, layer.batch_first)
    assert got_lengths.tolist() == lengths
    close((padded, got_state), want)
    lstm = torch.nn.LSTM(5, 4, **FORMS[form], device=device, dtype=torch.float64)
    like = lstm(packed, state)[0]
    for name in ("batch_sizes", "sorted_indices", "unsorted_indices"):
        ours, theirs = getattr(got, name), getattr(like, name)
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)
    assert got.data.shape == like.data.shape


def test_packed_without_state(device):
    layer = made("deep-and-both", device)
    rows = [torch.randn(n, 5, dtype=torch.float64, device=device) for n in (3, 6, 1)]
    packed = pack_sequence(rows, enforce_sorted=False)
    zero = torch.zeros(6, 3, 4, dtype=torch.float64, device=device)
    calls = []
    layer.register_forward_hook(lambda *_: calls.append(1))
    (got, state), (want, want_state) = layer(packed), layer(packed, (zero, zero))
    assert len(calls) == 2
    assert torch.equal(got.data, want.data) and torch.equal(state[0], want_state[0])
    with pytest.raises(ValueError, match="LLTM: lengths must be None with a PackedSequence"):
        layer(packed, None, torch.tensor([3, 6, 1], device=device))


@pytest.mark.parametrize("form", FORMS)
def test_one_sequence_without_a_batch(form, device):
    layer = made(form, device)
    x, (h, c) = drawn(layer, device, batch=1)
    got = layer(x.squeeze(0 if layer.batch_first else 1), (h.squeeze(1), c.squeeze(1)))
    output, (h_n, c_n) = layer(x, (h, c))
    assert torch.equal(got[0], output.squeeze(0 if layer.batch_first else 1))
    assert torch.equal(got[1][0], h_n.squeeze(1)) and torch.equal(got[1][1], c_n.squeeze(1))


@pytest.mark.parametrize("form", FORMS)
def test_shapes_are_lstm_s(form, device):
    layer = made(form, device)
    lstm = torch.nn.LSTM(5, 4, **FORMS[form], device=device, dtype=torch.float64)
    x, state = drawn(layer, device)
    got, want = flat(layer(x, state)), flat(lstm(x, state))
    assert [t.shape for t in got] == [t.shape for t in want]


@pytest.mark.parametrize("form", FORMS)
def test_copies_and_torchscript(form, device):
    layer = made(form, device)
    x, state = drawn(layer, device)
    lengths = torch.tensor([7, 0, 3], device=device)
    reset = torch.rand(x.shape[:2], device=device) < 0.3
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(layer), file)
    file.seek(0)
    loaded = my_ops.nn.LLTM(5, 4, **FORMS[form], device=device, dtype=torch.float64)
    loaded.load_state_dict(layer.state_dict())
    for other in (
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        torch.jit.load(file),
        loaded,
    ):
        for masks in ((), (lengths,), (None, reset), (lengths, reset)):
            same(other(x, state, *masks), layer(x, state, *masks))


@pytest.mark.slow
@pytest.mark.parametrize("ragged", [False, True])
def test_compiled_to_one_graph_for_many_sizes(ragged, device):
    layer = made("deep-and-both", device, torch.float32)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for steps, batch in ((7, 3), (5, 4), (9, 2)):
        x, state = drawn(layer, device, torch.float32, steps, batch)
        lengths = torch.randint(0, steps + 1, (batch,), device=device) if ragged else None
        same(compiled(x, state, lengths), layer(x, state, lengths))


# torch.export.load reads the archive into memory that is not writable (torch 2.10).
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_exported_and_run_at_another_batch_size(device):
    layer = made("two-layers", device, torch.float32)
    x, state = drawn(layer, device, torch.float32)
    batch = torch.export.Dim("batch", min=2, max=64)
    dynamic = ({1: batch}, ({1: batch}, {1: batch}))
    program = torch.export.export(layer, (x, state), dynamic_shapes=dynamic)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    x, state = drawn(layer, device, torch.float32, batch=5)
    same(loaded(x, state), layer(x, state))


@pytest.mark.parametrize(
    "arguments, match",
    [
        ({"num_layers": 0}, "LLTM: num_layers must be a positive int, got 0"),
        ({"dropout": 1.1, "num_layers": 2}, r"LLTM: dropout must be a number in \[0, 1\], got 1.1"),
        ({"dropout": "a"}, r"LLTM: dropout must be a number in \[0, 1\], got 'a'"),
        ({"zoneout": -0.1}, r"LLTM: zoneout must be a number in \[0, 1\], got -0.1"),
        ({"weight_dropout": 2}, r"LLTM: weight_dropout must be a number in \[0, 1\], got 2"),
    ],
)
def test_wrong_construction(arguments, match):
    with pytest.raises(ValueError, match=match):
        my_ops.nn.LLTM(5, 4, **arguments)


@pytest.mark.parametrize("wrong", [True, 2.0, "1", None])
def test_a_number_of_layers_that_is_no_int(wrong):
    with pytest.raises(TypeError, match=rf"num_layers must be a positive int, got {wrong!r}"):
        my_ops.nn.LLTM(5, 4, num_layers=wrong)


def test_wrong_call(device, rejects):
    layer = made("two-layers", device)
    x, (h, c) = drawn(layer, device)
    three = torch.tensor([1, 2, 3], device=device)
    for error, arguments, match in (
        (
            RuntimeError,
            (x[0, 0],),
            r"input must be \(steps, batch, input_size\) or \(steps, input_size\), got \(5,\)",
        ),
        (RuntimeError, (x[:, :, :4],), r"LLTM: input must .* = \(7, 3, 5\), got \(7, 3, 4\)"),
        (RuntimeError, (x, (h[:1], c)), r"LLTM: h_0 must be .*= \(2, 3, 4\), got \(1, 3, 4\)"),
        (RuntimeError, (x, (h, c[:, :2])), r"LLTM: c_0 must be .*, got \(2, 2, 4\)"),
        (RuntimeError, (x[:, 0], (h, c)), r"ons, hidden_size\) = \(2, 4\), got \(2, 3, 4\)"),
        (RuntimeError, (x, (h, c), three[:2]), r"LLTM: lengths must .*h,\) = \(3,\), got \(2,\)"),
        (RuntimeError, (x, (h, c), three[:, None]), r"LLTM: lengths must be \(b.*, got \(3, 1\)"),
        (RuntimeError, (x, (h, c), three.int()), "LLTM: lengths .* int64, got int32"),
        (TypeError, (None,), "LLTM: input must be a torch.Tensor, got NoneType"),
        (TypeError, (x, h), r"LLTM: hx must be a pair of tensors \(h_0, c_0\), got Tensor"),
        (TypeError, (x, (h, c, c)), "LLTM: hx must be a pair of tensors .*, got 3 of them"),
        (TypeError, (x, (h, None)), "LLTM: c_0 must be a torch.Tensor, got NoneType"),
        (TypeError, (x, (h, c), "321"), "LLTM: lengths must be a torch.Tensor, got str"),
    ):
        with rejects(error, match, x, h, c):
            layer(*arguments)
    packed = pack_padded_sequence(x, [5, 7, 6], enforce_sorted=False)
    for state, match in ((h, "LLTM: hx must be a pair"), ((h, None), "LLTM: c_0 must be a torch")):
        with rejects(TypeError, match, x, h, c):
            layer(packed, state)
    own = h[0], c[0], layer.cells[0].weights, layer.cells[0].bias
    with rejects(TypeError, "lltm: lengths must be a torch.Tensor, got list", x):
        my_ops.lltm(x, *own, lengths=[1, 2, 3])
    with rejects(RuntimeError, r"lltm: lengths must be \(batch,\) = \(3,\), got \(2,\)", x):
        my_ops.lltm(x, *own, lengths=three[:2])
    with rejects(RuntimeError, "lltm: lengths must be of dtype int64, got int32", x):
        my_ops.lltm(x, *own, lengths=three.int())


def test_lengths_on_another_device(cuda, rejects):
    layer = made("one", cuda)
    x, state = drawn(layer, cuda)
    lengths = torch.tensor([1, 2, 3])
    torch.testing.assert_close(layer(x, state, lengths)[0], layer(x, state, lengths.to(cuda))[0])
    there = lengths.to(cuda)
    with rejects(RuntimeError, "LLTM: lengths must be on the device of input, got cuda:0 and cpu"):
        copy.deepcopy(layer).cpu()(x.cpu(), None, there)
    own = layer.cells[0].weights, layer.cells[0].bias
    with rejects(RuntimeError, "lltm: lengths must be on the device of input, got cpu and", x):
        my_ops.lltm(x, state[0][0], state[1][0], *own, lengths=lengths)


def test_shows_what_differs_from_the_defaults():
    assert repr(my_ops.nn.LLTM(5, 4)).startswith("LLTM(\n  5, 4\n")
    with_all = my_ops.nn.LLTM(5, 4, 2, False, True, 0.1, True, weight_dropout=0.2, zoneout=0.3)
    assert (
        "5, 4, num_layers=2, bias=False, batch_first=True, dropout=0.1, bidirectional=True, "
        "weight_dropout=0.2, zoneout=0.3"
    ) in repr(with_all)


@pytest.mark.parametrize("bias", [True, False])
def test_has_what_programs_ask_of_an_lstm(bias, device):
    layer = made("both-directions", device, bias=bias)
    lstm = torch.nn.LSTM(5, 4, bidirectional=True, bias=bias)
    for name in ("input_size", "hidden_size", "num_layers", "batch_first", "dropout", "bias"):
        assert getattr(layer, name) == getattr(lstm, name)
    assert layer.proj_size == lstm.proj_size == 0
    assert layer.flatten_parameters() is None
    names = ["weights", "bias"] if bias else ["weights"]
    for cell, own in zip(layer.cells, layer.all_weights, strict=True):
        assert len(own) == len(names)
        assert all(p is getattr(cell, name) for p, name in zip(own, names, strict=True))
    x, state = drawn(layer, device)
    same(layer(input=x, hx=state), layer(x, state))
    same(layer(x, list(state)), layer(x, state))
