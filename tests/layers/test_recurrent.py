"""Every cell, and what only those with torch's parameters have (OF_TORCH): values, gradients,
saturation, empty sizes."""

import functools
import itertools

import precision
import pytest
import torch
from precision import CELL_SIZES, SEQUENCE_SIZES, check_precision, with_gradients
from samples import (
    CELL,
    FLOATING,
    OF_TORCH,
    ROUNDED_ONCE,
    SIXTEEN_BIT,
    as_tuple,
    recurrent_inputs,
    ulps,
)

import my_ops
from my_ops import reference

SATURATED_EPS = 4  # of the arithmetic, relative to the largest element


def pair(name, steps=1):
    """The function and its reference, of one step if ``steps`` is None."""
    name = f"{name}_cell" if steps is None else name
    return tupled(getattr(my_ops, name)), tupled(getattr(reference, name))


def tupled(function):
    return lambda *tensors, **masks: as_tuple(function(*tensors, **masks))


def check(name, tensors, steps=1, **masks):
    function, oracle = (functools.partial(f, **masks) for f in pair(name, steps))
    check_precision(function, oracle, tensors, name)


@pytest.mark.parametrize("sizes", CELL_SIZES)
@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("name", CELL)
def test_cell_values_and_gradients(name, dtype, sizes, device):
    check(name, recurrent_inputs(name, None, *sizes, dtype, device), steps=None)


@pytest.mark.parametrize("sizes", SEQUENCE_SIZES)
@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("name", CELL)
def test_sequence_values_and_gradients(name, dtype, sizes, device):
    check(name, recurrent_inputs(name, *sizes, dtype, device))


@pytest.mark.parametrize("sizes", [(12, 2, 5, 300), (20, 1, 5, 300), (4, 3, 5, 300)])
@pytest.mark.parametrize(
    "name, dtype",
    [("lltm", torch.float64), *itertools.product(OF_TORCH, (torch.float64, torch.float32))],
)
def test_few_rows_on_the_cpu(name, dtype, sizes):
    """Threads share the units; those of one or three rows only if there is more than one thread.
    LLTM in float64: in float32, chance decides how its largest errors of few rows compare."""
    check(name, recurrent_inputs(name, *sizes, dtype, "cpu"))


@pytest.mark.parametrize("sizes", [(1, 70, 33, 300), (2, 300, 17, 200), (9, 70, 45, 300)])
@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("name", OF_TORCH)
def test_many_rows_on_the_cpu(name, dtype, sizes):
    """Each thread packs some columns of the weights, for up to 512 rows at a time."""
    check(name, recurrent_inputs(name, *sizes, dtype, "cpu"))


@pytest.mark.parametrize("name", OF_TORCH)
def test_many_rows_of_a_state_without_memory_of_its_own(name):
    tensors = recurrent_inputs(name, None, 70, 33, 40, torch.float32, "cpu")
    states = [t[:, :1].expand_as(t) if t.shape == (70, 40) else t for t in tensors]
    assert any(t.stride(-1) == 0 for t in states)
    check(name, states, steps=None)


@pytest.mark.parametrize("hidden", [1024, 1100])
@pytest.mark.parametrize("name", OF_TORCH)
def test_products_have_the_precision_that_torch_allows(name, hidden, strict_cublas):
    """Of layers that run step by step, the smaller one only while torch allows TF32."""
    function, oracle = pair(name)
    tensors = recurrent_inputs(name, 2, 512, 1100, hidden, torch.float32, "cuda")
    double = [t.double() for t in tensors]
    grads = [torch.randn_like(result) for result in oracle(*double)]
    want = with_gradients(oracle, double, grads)
    strict = precision.errors(with_gradients(function, tensors, grads), want)
    torch.backends.cuda.matmul.allow_tf32 = True
    rounded = precision.errors(with_gradients(function, tensors, grads), want)
    for one, other in zip(strict, rounded, strict=True):
        assert 20 * one.mean() < other.mean()
    check(name, tensors)  # the reference's products are in TF32 now


@pytest.mark.parametrize("hidden", range(1, 41))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", CELL)
def test_every_small_hidden_size(name, dtype, hidden, device):
    """Sizes that are not multiples of any vector width, with one or more rows."""
    batch = 1 + hidden % 13
    check(name, recurrent_inputs(name, 2, batch, 3, hidden, dtype, device))


@pytest.mark.parametrize("biases", [(True, False), (False, True), (False, False)])
@pytest.mark.parametrize("steps", [None, 5])
@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("name", OF_TORCH)
def test_either_bias_may_be_missing(name, dtype, steps, biases, device):
    tensors = list(recurrent_inputs(name, steps, 3, 4, 7, dtype, device))
    at = 3 if steps is None else 3 + len(OF_TORCH[name].states)
    missing = {at + k for k, given in enumerate(biases) if not given}
    given = [t for k, t in enumerate(tensors) if k not in missing]

    def complete(function):
        def call(*ts):
            rest = iter(ts)
            return function(*(None if k in missing else next(rest) for k in range(len(tensors))))

        return call

    check_precision(*map(complete, pair(name, steps)), given, name)


@pytest.mark.parametrize("sizes", SEQUENCE_SIZES)
@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
@pytest.mark.parametrize("name", OF_TORCH)
def test_one_step_of_16_bit_types_rounds_once_on_the_cpu(name, dtype, sizes):
    tensors = recurrent_inputs(name, 1, *sizes[1:], dtype, "cpu")
    function, oracle = pair(name)
    for ours, exact in zip(function(*tensors), oracle(*(t.double() for t in tensors)), strict=True):
        assert ulps(ours, exact, torch.ones_like(exact)) <= ROUNDED_ONCE


@pytest.mark.parametrize("result", [0, 1])
@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("name", OF_TORCH)
def test_one_step_without_the_gradient_of_h0(name, dtype, result, device):
    """The same gradients as with it, of the output or of h_n."""
    tensors = recurrent_inputs(name, 1, 5, 6, 7, dtype, device)
    grad, found = torch.randn(5, 7).to(device, dtype), []
    for without in (True, False):
        leaves = [t.detach().requires_grad_(not without or k != 1) for k, t in enumerate(tensors)]
        asked = [leaf for k, leaf in enumerate(leaves) if k != 1]
        of = pair(name)[0](*leaves)[result]
        found.append(torch.autograd.grad(of, asked, grad.view_as(of)))
    for ours, want in zip(*found, strict=True):
        bound = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(ours, want, rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
def test_cell_state_of_16_bit_types_is_float32_between_steps(dtype, device):
    """Every step adds the same small number, which a 16-bit cell state would lose."""
    steps, hidden = 512, 3
    gates = torch.tensor([-6.0, 30.0, 30.0, 0.0], device=device)  # i is small, f and g are one
    bias = gates.repeat_interleave(hidden).to(dtype)
    zeros = torch.zeros(1, hidden, dtype=dtype, device=device)
    cell = torch.ones(1, hidden, dtype=dtype, device=device)
    input = torch.zeros(steps, 1, 1, dtype=dtype, device=device)
    weights = [torch.zeros(4 * hidden, n, dtype=dtype, device=device) for n in (1, hidden)]
    _, _, c_n = my_ops.lstm(input, zeros, cell, *weights, bias)
    want = 1 + steps * torch.sigmoid(gates[0].double())
    assert ulps(c_n, want.expand_as(c_n)) <= ROUNDED_ONCE


@pytest.mark.parametrize("steps", [None, 4])
@pytest.mark.parametrize("size", [100.0, 1000.0])
@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("name", OF_TORCH)
def test_large_pre_activations(name, dtype, size, steps, device):
    """Saturated gates: values and gradients are finite and equal the reference's in float64."""
    tensors = list(recurrent_inputs(name, steps, 2, 3, 8, dtype, device))
    at = 3 if steps is None else 3 + len(OF_TORCH[name].states)
    for k in (at - 2, at - 1, at + 1):
        tensors[k] = torch.zeros_like(tensors[k])
    signs = torch.where(torch.rand(tensors[at].shape) < 0.5, -size, size)
    tensors[at] = signs.to(dtype).to(device)
    function, oracle = pair(name, steps)
    double = [t.double() for t in tensors]
    grads = [torch.ones_like(r) for r in oracle(*double)]
    got, want = with_gradients(function, tensors, grads), with_gradients(oracle, double, grads)
    for ours, exact in zip(got, want, strict=True):
        assert ours.isfinite().all()
        limit = SATURATED_EPS * torch.finfo(dtype).eps * max(1.0, exact.abs().max().item())
        torch.testing.assert_close(ours.double(), exact, rtol=0, atol=limit)


@pytest.mark.parametrize("steps", [None, 3])
@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("name", CELL)
def test_not_a_number_stays_in_its_row(name, dtype, steps, device):
    tensors = recurrent_inputs(name, steps, 2, 3, 4, dtype, device)
    tensors[0][..., 0, 1] = float("nan")
    function, oracle = pair(name, steps)
    for ours, exact in zip(function(*tensors), oracle(*tensors), strict=True):
        assert torch.equal(ours.isnan(), exact.isnan())
        assert ours[..., 0, :].isnan().all()


@pytest.mark.parametrize(
    "sizes",
    [(0, 2, 3, 4), (3, 0, 3, 4), (0, 0, 3, 4), (3, 2, 0, 4), (3, 2, 3, 0)],
    ids=["no-steps", "no-batch", "neither", "no-input", "no-hidden"],
)
@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("name", CELL)
def test_empty_sequences(name, dtype, sizes, device):
    check(name, recurrent_inputs(name, *sizes, dtype, device))


@pytest.mark.parametrize("sizes", [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("name", CELL)
def test_empty_cells(name, dtype, sizes, device):
    check(name, recurrent_inputs(name, None, *sizes, dtype, device), steps=None)


@pytest.mark.parametrize("name", CELL)
def test_no_steps_returns_the_initial_state(name, device):
    tensors = recurrent_inputs(name, 0, 2, 3, 4, torch.float32, device)
    output, *last = getattr(my_ops, name)(*tensors)
    assert output.shape == (0, 2, 4)
    for end, start in zip(last, tensors[1:], strict=False):
        assert torch.equal(end, start)
        end.zero_()
        assert start.ne(0).all()  # a copy, not the caller's tensor


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("name", OF_TORCH)
def test_what_is_beyond_the_end_does_not_matter(name, dtype, device):
    tensors = list(recurrent_inputs(name, 6, 3, 8, 5, dtype, device))
    lengths = torch.tensor([2, 6, 0], device=device)
    results = []
    for filler in (0.0, float("nan"), float("inf")):
        tensors[0] = tensors[0].clone()
        for b, length in enumerate(lengths.tolist()):
            tensors[0][length:, b] = filler
        leaves = [t.detach().requires_grad_() for t in tensors]
        out = getattr(my_ops, name)(*leaves, lengths=lengths)
        grads = torch.autograd.grad([t.sum() for t in out], leaves)
        assert all(g.isfinite().all() for g in grads)
        results.append((*out, *grads))
    for other in results[1:]:
        for got, want in zip(other, results[0], strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("name", OF_TORCH)
def test_ragged_rows_are_as_if_alone(name, dtype, device):
    tensors = recurrent_inputs(name, 6, 3, 8, 5, dtype, device)
    lengths = torch.tensor([2, 6, 0], device=device)
    oracle, states = getattr(reference, name), len(OF_TORCH[name].states)

    check(name, tensors, lengths=lengths)
    output, *last = getattr(my_ops, name)(*tensors, lengths=lengths)
    assert not output[2:, 0].any()
    assert not output[:, 2].any()
    assert all(torch.equal(last[k][2], tensors[1 + k][2]) for k in range(states))
    alone = oracle(tensors[0][:2].double(), *(t.double() for t in tensors[1:]))
    for k in range(states):
        assert torch.allclose(last[k][0].double(), alone[1 + k][0], atol=0.05, rtol=0)
