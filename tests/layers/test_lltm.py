"""lltm_cell and lltm: values and gradients, saturation, empty sizes, layouts, errors."""

import math

import pytest
import torch
from precision import (
    SEQUENCE_SIZES,
    assert_float64_close,
    with_gradients,
)
from samples import (
    FLOATING,
    INTEGERS,
    NOT_REAL,
    ROUNDED_ONCE,
    SIXTEEN_BIT,
    arithmetic,
    half_ulp,
    lltm_inputs,
    ulps,
)

import my_ops
from my_ops import reference

SEQUENCE_EPS = 16  # one product for all steps, or many
SATURATED_EPS = 2  # of the arithmetic, in addition to the rounding of 16-bit results

TANH_SLOPE_ULP = 8.0  # exp, expm1, a quotient and three products; 16-bit types round once


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_sequence_equals_the_cell_looped(dtype, device):
    def looped(input, h0, c0, weights, bias):
        h, c, outputs = h0, c0, []
        for step in input:
            h, c = my_ops.lltm_cell(step, weights, bias, h, c)
            outputs.append(h)
        return torch.stack(outputs), h, c

    tensors = lltm_inputs(9, 6, 5, 8, dtype, device)
    grads = [torch.randn(r.shape, device=device, dtype=dtype) for r in looped(*tensors)]
    got, want = (with_gradients(f, tensors, grads) for f in (my_ops.lltm, looped))
    limit = SEQUENCE_EPS * torch.finfo(dtype).eps
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=limit, atol=limit)


def rounded_once(got, want):
    """Whether 16-bit ``got`` is ``want``, computed in float32 and rounded; absolutely below 1."""
    pairs = zip(got, want, strict=True)
    return all(ulps(t, exact, torch.ones_like(exact)) <= ROUNDED_ONCE for t, exact in pairs)


@pytest.mark.parametrize("sizes", SEQUENCE_SIZES)
@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
def test_16_bit_types_round_once_on_the_cpu(dtype, sizes):
    tensors = lltm_inputs(*sizes, dtype, "cpu")
    assert rounded_once(my_ops.lltm(*tensors), reference.lltm(*(t.double() for t in tensors)))


@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
def test_cell_state_of_16_bit_types_is_float32_between_steps(dtype, device):
    """Every step adds the same small number, which a 16-bit cell state would lose."""
    steps, hidden = 512, 3
    weights = torch.zeros(3 * hidden, hidden + 1, dtype=dtype, device=device)
    bias = torch.tensor([0.0, 0.0, 2.0**-9], device=device).repeat_interleave(hidden).to(dtype)
    zeros = torch.zeros(1, hidden, dtype=dtype, device=device)
    cell = torch.ones(1, hidden, dtype=dtype, device=device)
    input = torch.zeros(steps, 1, 1, dtype=dtype, device=device)
    _, _, c_n = my_ops.lltm(input, zeros, cell, weights, bias)
    assert torch.equal(c_n, torch.full_like(c_n, 1 + steps * 2.0**-10))


@pytest.mark.parametrize("steps", [None, 3])
@pytest.mark.parametrize("dtype", FLOATING)
def test_elu_slope_at_zero_is_one(dtype, steps, device):
    tensors = lltm_inputs(steps, 2, 3, 4, dtype, device)
    zeros = [torch.zeros_like(t).requires_grad_() for t in tensors]
    op, oracle, place = (
        (my_ops.lltm_cell, reference.lltm_cell, 2)
        if steps is None
        else (my_ops.lltm, reference.lltm, 4)
    )
    got = torch.autograd.grad(sum(r.sum() for r in op(*zeros)), zeros)[place]
    want = torch.autograd.grad(sum(r.sum() for r in oracle(*zeros)), zeros)[place]
    assert (got[8:] > 0).all()
    assert torch.equal(got, want)  # powers of two times small integers are exact in every type


@pytest.mark.parametrize("steps", [None, 4])
@pytest.mark.parametrize("size", [100.0, 1000.0])
@pytest.mark.parametrize("dtype", FLOATING)
def test_large_pre_activations(dtype, size, steps, device):
    """Saturated gates: values and gradients are finite and equal the reference's in float64."""
    signs = torch.tensor([-1.0, 1.0])
    bias = (torch.cartesian_prod(signs, signs, signs).T.reshape(-1) * size).to(dtype).to(device)
    *_, hidden = 2, 3, 8
    tensors = list(lltm_inputs(steps, 2, 3, hidden, dtype, device))
    weights, place = (1, 2) if steps is None else (3, 4)
    tensors[weights] = torch.zeros_like(tensors[weights])
    tensors[place] = bias
    op, oracle = (
        (my_ops.lltm_cell, reference.lltm_cell) if steps is None else (my_ops.lltm, reference.lltm)
    )
    double = [t.double() for t in tensors]
    grads = [torch.ones_like(r) for r in oracle(*double)]
    got, want = with_gradients(op, tensors, grads), with_gradients(oracle, double, grads)
    for ours, exact in zip(got, want, strict=True):
        assert ours.isfinite().all()
        stored = half_ulp(dtype) if dtype in SIXTEEN_BIT else 0.0
        limit = SATURATED_EPS * torch.finfo(arithmetic(dtype)).eps + stored  # of the largest term
        scale = exact.abs().max().item()
        torch.testing.assert_close(ours.double(), exact, rtol=0, atol=scale * limit)


@pytest.mark.parametrize("dtype", FLOATING)
def test_slope_of_tanh_keeps_its_digits(dtype, device):
    """For large cells, where 1 - tanh(cell)^2 would be inaccurate."""
    end = -math.log(2 * torch.finfo(dtype).tiny) / 2  # beyond, it is soon subnormal
    cell = torch.linspace(-end, end, 4001, dtype=torch.float64)[:, None].to(dtype).to(device)
    cell = torch.cat([cell, torch.full_like(cell[:1], float("inf"))]).requires_grad_()
    input, weights, h = cell.new_zeros(len(cell), 0), cell.new_zeros(3, 1), torch.zeros_like(cell)
    bias = cell.new_tensor([0.0, 1000.0, 0.0])  # adds nothing to the cell, and outputs all of it
    new_h, _ = my_ops.lltm_cell(input, weights, bias, h, cell)
    (got,) = torch.autograd.grad(new_h.sum(), cell)
    e = torch.exp(-2 * cell.detach().double().abs())
    limit = ROUNDED_ONCE if dtype in SIXTEEN_BIT else TANH_SLOPE_ULP
    assert ulps(got, 4 * e / (1 + e).square()) <= limit


@pytest.mark.parametrize("gate", range(3))
@pytest.mark.parametrize("steps", [None, 3])
@pytest.mark.parametrize("dtype", FLOATING)
def test_not_a_number_in_one_gate_stays(dtype, steps, gate, device):
    tensors = lltm_inputs(steps, 2, 3, 4, dtype, device)
    op, oracle, place = (
        (my_ops.lltm_cell, reference.lltm_cell, 2)
        if steps is None
        else (my_ops.lltm, reference.lltm, 4)
    )
    tensors[place][4 * gate + 1] = float("nan")
    got = op(*tensors)
    assert got[0].isnan().any()
    for ours, exact in zip(got, oracle(*tensors), strict=True):
        assert torch.equal(ours.isnan(), exact.isnan())


def test_no_steps_forward_ad_and_second_gradient(device):
    tensors = lltm_inputs(0, 2, 3, 4, torch.float64, device)
    tangents = tuple(torch.randn_like(t) for t in tensors)
    _, (output_t, h_t, c_t) = torch.func.jvp(my_ops.lltm, tensors, tangents)
    assert output_t.shape == (0, 2, 4)
    assert torch.equal(h_t, tangents[1])
    assert torch.equal(c_t, tangents[2])
    inputs = [t.requires_grad_() for t in tensors]
    grads = [torch.randn_like(r).requires_grad_() for r in my_ops.lltm(*inputs)]
    first = torch.autograd.grad(my_ops.lltm(*inputs), inputs, grads, create_graph=True)
    assert [g.shape for g in first] == [t.shape for t in inputs]
    assert not any(g.any() for g in (first[0], *first[3:]))
    second = torch.autograd.grad(first[1:3], grads[1:], tangents[1:3])
    assert all(torch.equal(ours, t) for ours, t in zip(second, tangents[1:3], strict=True))


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("place", [1, 2])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_state_without_a_step_stays_out_of_the_gradients(value, place, create_graph, device):
    tensors = lltm_inputs(3, 2, 3, 4, torch.float64, device)
    lengths = torch.tensor([0, 3], device=device)
    found = []
    for state in (0.0, value):
        tensors[place].data[0] = state
        inputs = [t.detach().requires_grad_() for t in tensors]
        results = my_ops.lltm(*inputs, lengths=lengths)
        ones = [torch.ones_like(r) for r in results]
        found.append(torch.autograd.grad(results, inputs, ones, create_graph=create_graph))
    for ours, usual in zip(found[1], found[0], strict=True):
        assert torch.equal(ours, usual)


@pytest.mark.parametrize("steps", [None, 3])
@pytest.mark.parametrize("dtype", FLOATING)
def test_bias_as_a_row(dtype, steps, device):
    tensors = list(lltm_inputs(steps, 2, 3, 4, dtype, device))
    op, place = (my_ops.lltm_cell, 2) if steps is None else (my_ops.lltm, 4)
    grads = [torch.ones_like(r) for r in op(*tensors)]
    flat = with_gradients(op, tensors, grads)
    tensors[place] = tensors[place].unsqueeze(0)
    row = with_gradients(op, tensors, grads)
    grad_bias = len(grads) + place
    assert row[grad_bias].shape == (1, 12)
    row[grad_bias] = row[grad_bias][0]
    for ours, theirs in zip(row, flat, strict=True):
        assert torch.equal(ours, theirs)


def strided(t):
    """The same values, with strides that all differ from the contiguous ones."""
    wide = torch.full([2 * size + 1 for size in reversed(t.shape)], 1e30, device=t.device)
    view = wide.to(t.dtype)[(slice(1, None, 2),) * t.dim()].permute(*reversed(range(t.dim())))
    return view.copy_(t)


@pytest.mark.parametrize("steps", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_strided_inputs(dtype, steps, device):
    tensors = lltm_inputs(steps, 5, 6, 7, dtype, device)
    op = my_ops.lltm_cell if steps is None else my_ops.lltm
    grads = [torch.randn(r.shape, device=device).to(dtype) for r in op(*tensors)]
    want = with_gradients(op, tensors, grads)
    got = with_gradients(op, [strided(t) for t in tensors], [strided(grad) for grad in grads])
    limit = 4 * torch.finfo(dtype).eps  # at most another order of summation
    for ours, theirs in zip(got, want, strict=True):
        scale = theirs.abs().max().item() * limit
        torch.testing.assert_close(ours, theirs, rtol=0, atol=scale)


@pytest.mark.parametrize("hidden", [7, 300])  # the CPU runs small and large weights differently
@pytest.mark.parametrize("lengths", [None, [3, 0, 2, 1, 3]])
def test_strided_states(lengths, hidden, device):
    tensors = lltm_inputs(3, 5, 6, hidden, torch.float32, device)
    ends = None if lengths is None else torch.tensor(lengths, device=device)
    op = lambda *ts: my_ops.lltm(*ts, lengths=ends)  # noqa: E731
    grads = [torch.randn_like(r) for r in op(*tensors)]
    states = [strided(t) for t in tensors[1:3]]
    got = with_gradients(op, [tensors[0], *states, *tensors[3:]], [strided(grad) for grad in grads])
    for ours, usual in zip(got, with_gradients(op, tensors, grads), strict=True):
        assert torch.equal(ours, usual)


def test_expanded_states(device):
    input, h0, _, weights, bias = lltm_inputs(4, 5, 3, 2, torch.float64, device)
    row = h0[:1].expand(5, 2)
    tensors = input[:1].expand(4, 5, 3), row, row, weights, bias
    assert_float64_close(my_ops.lltm(*tensors), reference.lltm(*tensors), tensors)


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 2)])
def test_gradient_of_some_results(used, device):
    tensors = lltm_inputs(4, 3, 2, 5, torch.float64, device)
    got, want = [], []
    for function, into in ((my_ops.lltm, got), (reference.lltm, want)):
        inputs = [t.detach().requires_grad_() for t in tensors]
        results = function(*inputs)
        into += torch.autograd.grad(sum((results[u] ** 2).sum() for u in used), inputs)
    assert_float64_close(got, want, tensors)


# --------------------------------------------------------------------------------------- errors

CELL = ("input", "weights", "bias", "old_h", "old_cell")
LAYER = ("input", "h0", "c0", "weights", "bias")


def arguments(op, device, **changed):
    names, steps = (CELL, None) if op == "lltm_cell" else (LAYER, 5)
    tensors = lltm_inputs(steps, 2, 3, 4, torch.float32, device)
    return dict(zip(names, tensors, strict=True)) | changed


@pytest.mark.parametrize(
    "op, place", [("lltm_cell", n) for n in CELL] + [("lltm", n) for n in LAYER]
)
def test_wrong_type(op, place):
    with pytest.raises(TypeError, match=f"^{op}: {place} must be a torch.Tensor.*, got list"):
        getattr(my_ops, op)(**arguments(op, "cpu", **{place: [1.0]}))


@pytest.mark.parametrize(
    "op, place", [("lltm_cell", n) for n in CELL[1:]] + [("lltm", n) for n in LAYER[1:]]
)
def test_mixed_dtypes(op, place, device, rejects):
    args = arguments(op, device)
    args[place] = args[place].double()
    match = f"{op}: {place} must have the dtype of input, got float64 and float32"
    with rejects(RuntimeError, match, *args.values()):
        getattr(my_ops, op)(**args)


@pytest.mark.parametrize("dtype", [*INTEGERS, *NOT_REAL])
@pytest.mark.parametrize("op", ["lltm_cell", "lltm"])
def test_wrong_dtype(op, dtype, device, rejects):
    args = {name: t.abs().to(dtype) for name, t in arguments(op, device).items()}
    with rejects(RuntimeError, rf"{op}: input must be of dtype float64, .*got \w+", *args.values()):
        getattr(my_ops, op)(**args)


WRONG_SHAPES = [
    ("lltm_cell", "input", (3,), r"input must be \(batch, input_size\), got \(3,\)"),
    ("lltm_cell", "input", (1, 2, 3), r"input must be .*, got \(1, 2, 3\)"),
    ("lltm_cell", "input", (5, 3), r"old_h must be .* = \(5, 4\), got \(2, 4\)"),
    ("lltm_cell", "old_h", (4,), r"old_h must be \(batch, hidden_size\), got \(4,\)"),
    ("lltm_cell", "old_cell", (2, 5), r"old_cell must be .* = \(2, 4\), got \(2, 5\)"),
    ("lltm_cell", "old_cell", (1, 4), r"old_cell must be .* = \(2, 4\), got \(1, 4\)"),
    ("lltm_cell", "weights", (12, 6), r"input must be .* = \(2, 2\), got \(2, 3\)"),
    ("lltm_cell", "weights", (7, 12), r"weights must be .* = \(12, 7\), got \(7, 12\)"),
    ("lltm_cell", "bias", (4,), r"bias must be .*\(12,\), got \(4,\)"),
    ("lltm_cell", "bias", (12, 1), r"bias must be .*, got \(12, 1\)"),
    ("lltm_cell", "bias", (), r"bias must be .*, got \(\)"),
    ("lltm", "input", (2, 3), r"input must be \(steps, batch, input_size\), got \(2, 3\)"),
    ("lltm", "input", (5, 2, 4), r"input must be .* = \(5, 2, 3\), got \(5, 2, 4\)"),
    ("lltm", "h0", (1, 2, 4), r"h0 must be \(batch, hidden_size\), got \(1, 2, 4\)"),
    ("lltm", "h0", (3, 4), r"h0 must be .* = \(2, 4\), got \(3, 4\)"),
    ("lltm", "c0", (2, 3), r"c0 must be .* = \(2, 4\), got \(2, 3\)"),
    ("lltm", "weights", (12,), r"weights must be .* = \(12, 7\), got \(12,\)"),
    ("lltm", "bias", (2, 12), r"bias must be .*, got \(2, 12\)"),
]


@pytest.mark.parametrize("op, place, shape, match", WRONG_SHAPES)
def test_wrong_shape(op, place, shape, match, device, rejects):
    args = arguments(op, device, **{place: torch.ones(shape, device=device)})
    with rejects(RuntimeError, f"{op}: {match}", *args.values()):
        getattr(my_ops, op)(**args)


@pytest.mark.parametrize(
    "op, place", [("lltm_cell", n) for n in CELL[1:]] + [("lltm", n) for n in LAYER[1:]]
)
def test_mixed_devices(op, place, cuda, rejects):
    args = arguments(op, cuda)
    args[place] = args[place].cpu()
    match = f"{op}: {place} must be on the device of input, got cpu and cuda:0"
    with rejects(RuntimeError, match, *args.values()):
        getattr(my_ops, op)(**args)
