"""nn.LLTM beyond one layer: layers, directions, ragged batches, packed sequences, regularisers."""

import copy
import io
import pickle

import pytest
import torch
from samples import FLOATING, lltm_inputs
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence

import my_ops
from my_ops import reference

LIMIT = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 8e-3, torch.bfloat16: 6e-2}
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
    """One sequence, (steps, input_size), to its end; the output is 0 beyond."""
    steps = x.shape[0]
    output, h_n, c_n = reference.lltm(x[:length, None], h[None], c[None], weights, bias)
    beyond = output.new_zeros(steps - length, h.shape[0])
    return torch.cat([output.squeeze(1), beyond]), h_n[0], c_n[0]


def reference_layer(layer, x, state, lengths):
    """nn.LLTM, sequence by sequence over the reference op, time first."""
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
                out, h, c = reference_lltm(
                    turned, state[0][k, b], state[1][k, b], cell.weights, cell.bias, length
                )
                parts.append(out if forward else torch.cat([out[:length].flip(0), out[length:]]))
                h_b.append(h)
                c_b.append(c)
            row = torch.cat(parts, 1)
        outputs.append(row)
        h_n.append(torch.stack(h_b))
        c_n.append(torch.stack(c_b))
    output = torch.stack(outputs, 1) + 0.0 * x.sum()  # part of the graph even where no step runs
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


def close(got, want, dtype=torch.float64):
    for ours, exact in zip(flat(got), flat(want), strict=True):
        limit = LIMIT[dtype]
        torch.testing.assert_close(ours.double(), exact.double(), rtol=limit, atol=limit)


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
        torch.testing.assert_close(ours, exact, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", FLOATING)
def test_ragged_in_every_type(dtype, device):
    input, h0, c0, weights, bias = lltm_inputs(9, 6, 33, 17, dtype, device)
    lengths = torch.tensor([9, 0, 4, 1, 9, 7], device=device)
    output, h_n, c_n = my_ops.lltm(input, h0, c0, weights, bias, lengths=lengths)
    exact = [t.double() for t in (input, h0, c0, weights, bias)]
    for b, length in enumerate(lengths.tolist()):
        want = reference_lltm(exact[0][:, b], exact[1][b], exact[2][b], *exact[3:], length)
        for ours, right in zip((output[:, b], h_n[b], c_n[b]), want, strict=True):
            torch.testing.assert_close(ours.double(), right, rtol=LIMIT[dtype], atol=LIMIT[dtype])
        if length == 0:
            assert torch.equal(h_n[b], h0[b]) and torch.equal(c_n[b], c0[b])
        assert (output[length:, b] == 0).all()


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e4])
@pytest.mark.parametrize("row", [0, 1])
def test_an_extreme_state_stays_in_its_row(row, value, dtype, device):
    """Also in a row without a step, which hands its state through."""
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


@pytest.mark.parametrize("beyond, as_if", [(-3, 0), (9, 7)])
def test_lengths_out_of_range_are_clamped(beyond, as_if, device):
    layer = made("both-directions", device)
    x, state = drawn(layer, device)
    got = layer(x, state, torch.tensor([beyond, 2, 7], device=device))
    close(got, layer(x, state, torch.tensor([as_if, 2, 7], device=device)))


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
    (got, state), (want, want_state) = layer(packed), layer(packed, (zero, zero))
    assert torch.equal(got.data, want.data) and torch.equal(state[0], want_state[0])
    with pytest.raises(ValueError, match="LLTM: lengths must be None beside a PackedSequence"):
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
        for given in (None, lengths):
            got, want = other(x, state, given), layer(x, state, given)
            assert all(torch.equal(a, b) for a, b in zip(flat(got), flat(want), strict=True))


@pytest.mark.parametrize("ragged", [False, True])
def test_compiled_to_one_graph_for_many_sizes(ragged, device):
    layer = made("deep-and-both", device, torch.float32)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for steps, batch in ((7, 3), (5, 4), (9, 2)):
        x, state = drawn(layer, device, torch.float32, steps, batch)
        lengths = torch.randint(0, steps + 1, (batch,), device=device) if ragged else None
        close(compiled(x, state, lengths), layer(x, state, lengths), torch.float32)


# torch.export.load itself reads the archive into memory that is not writable (torch 2.10).
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
    close(loaded(x, state), layer(x, state), torch.float32)


def test_dropout_acts_between_layers_in_training(device):
    layer = made("two-layers", device, dropout=0.5)
    plain = made("two-layers", device)
    plain.load_state_dict(layer.state_dict())
    x, state = drawn(layer, device)
    torch.manual_seed(3)
    first = layer(x, state)
    torch.manual_seed(3)
    close(layer(x, state), first)
    assert not torch.equal(layer(x, state)[0], first[0])
    assert torch.equal(first[1][0][0], plain(x, state)[1][0][0])  # the first layer is as it was
    close(layer.eval()(x, state), plain(x, state))
    with pytest.warns(UserWarning, match="LLTM: dropout acts between layers"):
        made("one", device, dropout=0.5)


def test_weight_dropout_draws_recurrent_weights_once(device):
    layer = made("one", device, weight_dropout=0.5)
    x, state = drawn(layer, device)
    torch.manual_seed(3)
    got = layer(x, state)
    torch.manual_seed(3)
    weights = layer.cells[0].weights
    dropped = torch.nn.functional.dropout(weights[:, :4], 0.5)
    weights = torch.cat([dropped, weights[:, 4:]], 1)
    output, h, c = my_ops.lltm(x, state[0][0], state[1][0], weights, layer.cells[0].bias)
    close(got, (output, (h[None], c[None])))
    got[0].sum().backward()
    assert (layer.cells[0].weights.grad[:, :4] == 0).any()
    plain = made("one", device)
    plain.load_state_dict(layer.state_dict())
    close(layer.eval()(x, state), plain(x, state))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("lengths", [None, [7, 0, 3]])
def test_zoneout_step_by_step(lengths, training, device):
    layer = made("one", device, zoneout=0.3).train(training)
    x, state = drawn(layer, device)
    h, c = state[0][0], state[1][0]
    torch.manual_seed(3)
    got = layer(x, state, None if lengths is None else torch.tensor(lengths, device=device))
    torch.manual_seed(3)
    outputs = []
    for t in range(7):
        new_h, new_c = my_ops.lltm_cell(x[t], layer.cells[0].weights, layer.cells[0].bias, h, c)
        kept = torch.rand_like(new_h) < 0.3 if training else 0.3
        new_h = torch.where(kept, h, new_h) if training else 0.3 * h + 0.7 * new_h
        runs = torch.tensor([t < n for n in lengths or [7] * 3], device=device)[:, None]
        h, c = torch.where(runs, new_h, h), torch.where(runs, new_c, c)
        outputs.append(torch.where(runs, h, 0.0))
    close(got, (torch.stack(outputs), (h[None], c[None])))
    assert layer(x[:0], state)[0].shape == (0, 3, 4)


@pytest.mark.parametrize(
    "arguments, match",
    [
        ({"num_layers": 0}, "LLTM: num_layers must be a positive int, got 0"),
        ({"num_layers": True}, "LLTM: num_layers must be a positive int, got True"),
        ({"dropout": 1.0, "num_layers": 2}, r"LLTM: dropout must be in \[0, 1\), got 1.0"),
        ({"dropout": "a"}, r"LLTM: dropout must be in \[0, 1\), got 'a'"),
        ({"zoneout": -0.1}, r"LLTM: zoneout must be in \[0, 1\), got -0.1"),
        ({"weight_dropout": 2}, r"LLTM: weight_dropout must be in \[0, 1\), got 2"),
    ],
)
def test_wrong_construction(arguments, match):
    with pytest.raises(ValueError, match=match):
        my_ops.nn.LLTM(5, 4, **arguments)


def test_wrong_call(device, rejects):
    layer = made("two-layers", device)
    x, (h, c) = drawn(layer, device)
    three = torch.tensor([1, 2, 3], device=device)
    for arguments, match in (
        ((x[0, 0],), "LLTM: input must have 3 dimensions, or 2 without a batch, got 1"),
        ((x[:, :, :4],), r"LLTM: input must have input_size = 5 .*got \[7, 3, 4\]"),
        ((x, (h[:1], c)), r"LLTM: h_0 and c_0 must be .*= \[2, 3, 4\], got \[1, 3, 4\]"),
        ((x, (h, c[:, :2])), r"LLTM: h_0 and c_0 must be .*and \[2, 2, 4\]"),
        ((x, (h, c), three[:2]), r"LLTM: lengths must be \(batch,\) = \(3,\), got \[2\]"),
        ((x, (h, c), three.int()), "LLTM: lengths must be of dtype int64, got torch.int32"),
    ):
        with rejects(ValueError, match, x, h, c):
            layer(*arguments)
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
    with rejects(ValueError, "LLTM: lengths must be on the device of input, got cpu and cuda", x):
        layer(x, state, lengths)
    own = layer.cells[0].weights, layer.cells[0].bias
    with rejects(RuntimeError, "lltm: lengths must be on the device of input, got cpu and", x):
        my_ops.lltm(x, state[0][0], state[1][0], *own, lengths=lengths)


def test_shows_what_differs_from_the_defaults():
    assert repr(my_ops.nn.LLTM(5, 4)).startswith("LLTM(\n  5, 4\n")
    with_all = my_ops.nn.LLTM(5, 4, 2, False, True, 0.1, True, 0.2, 0.3)
    assert (
        "5, 4, num_layers=2, bias=False, batch_first=True, dropout=0.1, bidirectional=True, "
        "weight_dropout=0.2, zoneout=0.3"
    ) in repr(with_all)
