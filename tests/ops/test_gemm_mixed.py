"""gemm and linear of a float32 and a 16-bit operand: float32 results of float32's accuracy, and
gradients in the operands' own types, computed in float32."""

import io
import itertools
import math

import pytest
import torch
from samples import ACTIVATIONS, NO_INDUCTOR, SIXTEEN_BIT, gemm_excess, half_ulp
from test_gemm import LAYOUTS, PAIRS, SHAPES, linear_excess, matrix_layouts, normal
from test_linear import GRAD_LIMIT

import my_ops
from my_ops import reference


@pytest.mark.parametrize("shape", [*SHAPES, (600, 640, 640)])
@pytest.mark.parametrize("dtypes", PAIRS)
def test_gemm_values(dtypes, shape, device):
    m, k, n = shape
    a, b = normal((m, k), dtypes[0], device), normal((k, n), dtypes[1], device)
    out = torch.full((m, n), float("nan"), device=device)
    assert my_ops.gemm(a, b, out=out) is out
    for got in (my_ops.gemm(a, b), my_ops.gemm(a, b, precision="highest"), out):
        assert (got.dtype, got.device) == (torch.float32, a.device)
        assert gemm_excess(got, a, b) <= 1


@pytest.mark.parametrize("shape", [(3, 4, 5), (600, 640, 640)])
@pytest.mark.parametrize("dtypes", PAIRS)
def test_the_result_is_that_of_both_in_float32(dtypes, shape, device):
    m, k, n = shape
    a, b = normal((m, k), dtypes[0], device), normal((k, n), dtypes[1], device)
    weight, bias = b.mT.contiguous(), normal((n,), torch.float32, device)
    for precision in (None, "highest", "high"):
        got = my_ops.gemm(a, b, precision=precision)
        assert torch.equal(got, my_ops.gemm(a.float(), b.float(), precision=precision))
        got = my_ops.linear(a, weight, bias, activation="silu", precision=precision)
        args = a.float(), weight.float(), bias
        assert torch.equal(got, my_ops.linear(*args, activation="silu", precision=precision))


@pytest.mark.parametrize("b_layout", LAYOUTS)
@pytest.mark.parametrize("a_layout", LAYOUTS)
@pytest.mark.parametrize("dtypes", PAIRS)
def test_layouts(dtypes, a_layout, b_layout, device):
    a = matrix_layouts(70, 33, dtypes[0], device)[a_layout]
    b = matrix_layouts(33, 65, dtypes[1], device)[b_layout]
    assert gemm_excess(my_ops.gemm(a, b), a, b) <= 1
    out = torch.full((65, 70), float("nan"), device=device).mT
    assert gemm_excess(my_ops.gemm(a, b, out=out), a, b) <= 1
    bias = normal((130,), torch.float32, device)[::2]
    assert linear_excess(my_ops.linear(a, b.mT, bias), a, b.mT, bias, None) <= 1


@pytest.mark.parametrize("dtypes", PAIRS)
def test_profiler_sees_one_conversion_of_repeated_elements(dtypes, device):
    a, b = normal((7, 1, 6), dtypes[0], device), normal((6, 8), dtypes[1], device)
    a, b = a.expand(7, 5, 6), b.expand(7, 6, 8)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(
        activities=activities, record_shapes=True, profile_memory=True, acc_events=True
    ) as profile:
        got = my_ops.gemm(a, b)
    assert gemm_excess(got, a, b) <= 1
    once = [7, 1, 6] if dtypes[1] == torch.float32 else [1, 6, 8]
    casts = [event.input_shapes[0] for event in profile.events() if event.name == "aten::_to_copy"]
    if torch.device(device).type == "cuda":
        assert casts == [once]
    else:  # converted without ATen, into memory that the profiler sees
        events = profile.profiler.kineto_results.events()
        sizes = [event.nbytes() for event in events if event.name() == "[memory]"]
        assert sorted(size for size in sizes if size > 0) == [4 * math.prod(once), 4 * got.numel()]
        assert not casts


@pytest.mark.parametrize("size", [3, 66, 300])
@pytest.mark.parametrize("dtypes", PAIRS)
def test_not_a_number_infinity_and_the_largest(dtypes, size, device):
    a, b = torch.eye(size, dtype=dtypes[0]), torch.ones(size, size, dtype=dtypes[1])
    a[1, 1], a[2, 2] = float("nan"), torch.finfo(dtypes[0]).max
    b[0, 0] = float("inf")
    got = my_ops.gemm(a.to(device), b.to(device)).cpu()
    assert got[1].isnan().all()
    assert got[0, 0] == float("inf")
    assert got[1:, 0].isnan().all()  # 0 * inf
    assert (got[2, 1:] == torch.finfo(dtypes[0]).max).all()
    assert (got[0, 1:] == 1).all()


@pytest.mark.parametrize("dtypes", PAIRS)
def test_numbers_that_16_bits_lack(dtypes, device):
    """The float32 operand keeps its bits, and the result its range."""
    fine = 1 + 2.0**-23
    values = [torch.tensor([[fine if dtype == torch.float32 else 0.5]]) for dtype in dtypes]
    a, b = (v.to(dtype).to(device) for v, dtype in zip(values, dtypes, strict=True))
    assert my_ops.gemm(a, b).item() == 0.5 * fine
    half = next(dtype for dtype in dtypes if dtype != torch.float32)
    large = 2.0**15 if half == torch.float16 else 2.0**127
    operands = [torch.full((1, 8), large, dtype=dtype, device=device) for dtype in dtypes]
    assert my_ops.linear(*operands).item() == torch.tensor(8 * large**2).item()  # inf for bfloat16


@pytest.mark.parametrize("activation", [None, "gelu_tanh"])
@pytest.mark.parametrize("shape", [*SHAPES, (640, 300, 640)])
@pytest.mark.parametrize("dtypes", PAIRS)
def test_linear_values(dtypes, shape, activation, device):
    m, k, n = shape
    x, weight = normal((m, k), dtypes[0], device), normal((n, k), dtypes[1], device)
    bias, residual = (normal(s, torch.float32, device) for s in ((n,), (m, n)))
    for more in ((None, None), (bias, None), (bias, residual)):
        got = my_ops.linear(x, weight, more[0], activation=activation, residual=more[1])
        assert linear_excess(got, x, weight, more[0], activation, more[1]) <= 1


@pytest.mark.parametrize("leading", [(), (1,), (0,), (2, 3), (2, 0, 3), (2, 1, 2, 3)])
@pytest.mark.parametrize("dtypes", PAIRS)
def test_linear_leading_shapes(dtypes, leading, device):
    x, weight = normal((*leading, 5), dtypes[0], device), normal((4, 5), dtypes[1], device)
    got = my_ops.linear(x, weight, activation="silu")
    assert got.is_contiguous()
    assert linear_excess(got, x, weight, None, "silu") <= 1


@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("shape", [(0, 3, 4), (7, 33, 65), (600, 640, 640)])
@pytest.mark.parametrize("dtypes", PAIRS)
def test_prepacked_weight(dtypes, shape, activation, device):
    m, k, n = shape
    x, bias = normal((m, k), dtypes[0], device), normal((n,), torch.float32, device)
    weight = normal((n, k), dtypes[1], device)
    got = my_ops.linear(x, my_ops.prepack(weight), bias, activation=activation)
    assert linear_excess(got, x, weight, bias, activation) <= 1


# ------------------------------------------------------------------------------------ gradients


def assert_in_own_dtype(grads, exact, leaves):
    """A 16-bit gradient is rounded once."""
    for ours, theirs, leaf in zip(grads, exact, leaves, strict=True):
        assert ours.dtype == leaf.dtype
        limit = GRAD_LIMIT[torch.float32]
        rounding = half_ulp(leaf.dtype) if leaf.dtype in SIXTEEN_BIT else 0.0
        torch.testing.assert_close(ours.double(), theirs, rtol=limit + rounding, atol=limit)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("leading", [(9,), (2, 5)])
@pytest.mark.parametrize("dtypes", PAIRS)
def test_linear_gradients(dtypes, leading, activation, device):
    x, weight = normal((*leading, 65), dtypes[0], device), normal((33, 65), dtypes[1], device)
    bias, residual, grad = (
        normal(s, torch.float32, device) for s in ((33,), (*leading, 33), (*leading, 33))
    )

    def first(function, tensors, slopes):
        leaves = [t.detach().requires_grad_() for t in tensors]
        result = function(*leaves[:3], activation=activation, residual=leaves[3])
        return torch.autograd.grad(result, leaves, slopes)

    tensors = x, weight, bias, residual
    got = first(my_ops.linear, tensors, grad)
    want = first(reference.linear, [t.double() for t in tensors], grad.double())
    assert_in_own_dtype(got, want, tensors)


@pytest.mark.parametrize(
    "batches", [((), ()), ((3,), ()), ((3,), (1,)), ((1,), (3,)), ((3,), (3,))]
)
@pytest.mark.parametrize("dtypes", PAIRS)
def test_gemm_gradients_once_and_twice(dtypes, batches, device):
    """Of small integers, so that sums are exact in any order. torch needs a cast."""

    def whole(shape, dtype):
        return torch.randint(-2, 3, shape).to(dtype).to(device)

    def gradients(function):
        leaves = [t.detach().requires_grad_() for t in (a, b)]
        result = function(*leaves)
        first = torch.autograd.grad(result, leaves, grad.expand_as(result), create_graph=True)
        squares = sum(g.float().square().sum() for g in first)
        return result, *first, *torch.autograd.grad(squares, leaves)

    a, b = whole((*batches[0], 5, 9), dtypes[0]), whole((*batches[1], 9, 7), dtypes[1])
    grad = whole((5, 7), torch.float32)
    want = gradients(lambda a, b: torch.matmul(a.float(), b.float()))
    for ours, exact in zip(gradients(my_ops.gemm), want, strict=True):
        assert ours.dtype == exact.dtype
        assert torch.equal(ours, exact)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtypes", PAIRS)
def test_linear_gradients_twice(dtypes, activation, device):
    """Through the gradient of the float32 operand, which is not rounded. That of the 16-bit one is
    then a sum of two, each rounded, as torch's is of an operand that is used twice."""
    single = dtypes.index(torch.float32)
    tensors = [normal(s, d, device) for s, d in zip(((5, 9), (7, 9)), dtypes, strict=True)]
    tensors.append(normal((7,), torch.float32, device))
    grad = normal((5, 7), torch.float32, device)

    def second(function, tensors, grad):
        leaves = [t.detach().requires_grad_() for t in tensors]
        result = function(*leaves, activation=activation)
        (first,) = torch.autograd.grad(result, leaves[single], grad, create_graph=True)
        return torch.autograd.grad(first.sin().sum(), leaves, materialize_grads=True)

    got = second(my_ops.linear, tensors, grad)
    want = second(reference.linear, [t.double() for t in tensors], grad.double())
    for ours, theirs, leaf in zip(got, want, tensors, strict=True):
        assert ours.dtype == leaf.dtype
        eps = (
            torch.finfo(leaf.dtype).eps if leaf.dtype in SIXTEEN_BIT else GRAD_LIMIT[torch.float32]
        )
        limit = eps * theirs.abs().max().item()
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=limit)


@pytest.mark.parametrize("batch", [(), (3,)], ids=["matrix", "batch"])
@pytest.mark.parametrize("dtypes", PAIRS)
def test_gradients_of_transposed_operands_are_transposed_in_memory(dtypes, batch, device):
    a = normal((*batch, 5, 9), dtypes[0], device).mT.requires_grad_()
    b = normal((*batch, 7, 5), dtypes[1], device).mT.requires_grad_()
    grad = normal((*batch, 9, 7), torch.float32, device)
    for ours, leaf in zip(
        torch.autograd.grad(my_ops.gemm(a, b), (a, b), grad), (a, b), strict=True
    ):
        assert ours.stride() == leaf.stride()


@pytest.mark.parametrize(
    "sizes", [(0, 4, 5), (3, 0, 5), (3, 4, 0), (0, 0, 0), (999, 0, 70), (999, 70, 0)]
)
@pytest.mark.parametrize("dtypes", PAIRS)
def test_gradients_of_empty_problems(dtypes, sizes, device):
    m, k, n = sizes
    x, weight = torch.ones(m, k, dtype=dtypes[0]), torch.ones(n, k, dtype=dtypes[1])
    leaves = [t.to(device).requires_grad_() for t in (x, weight)]
    grads = torch.autograd.grad(my_ops.linear(*leaves, activation="gelu").sum(), leaves)
    for ours, leaf in zip(grads, leaves, strict=True):
        assert (ours.dtype, ours.shape) == (leaf.dtype, leaf.shape)
        assert not ours.any()


@pytest.mark.parametrize("dtypes", PAIRS)
def test_a_gradient_is_summed_in_float32(dtypes, device):
    """Of a repeated operand too: in 16 bits the sum would stop growing, or lose its end."""
    a, b = torch.ones(4096, 1, 1, dtype=dtypes[0]), torch.ones(1, 1, dtype=dtypes[1])
    leaves = [t.to(device).requires_grad_() for t in (a, b)]
    grad = torch.full((4096, 1, 1), 1 + 2.0**-12, device=device)
    for function, slope in ((my_ops.gemm, grad), (my_ops.linear, grad)):
        found = torch.autograd.grad(function(*leaves), leaves, slope)[1]
        assert found.item() == torch.tensor(4097.0).to(dtypes[1]).item()


@pytest.mark.parametrize("dtypes", PAIRS)
def test_forward_mode(dtypes, device):
    a, b = normal((5, 9), dtypes[0], device), normal((9, 7), dtypes[1], device)
    tangents = normal((5, 9), dtypes[0], device), normal((9, 7), dtypes[1], device)
    want, slope = torch.func.jvp(
        torch.matmul, (a.double(), b.double()), tuple(t.double() for t in tangents)
    )
    for function in (my_ops.gemm, lambda a, b: my_ops.linear(a, b.mT)):
        got, tangent = torch.func.jvp(function, (a, b), tangents)
        assert got.dtype == tangent.dtype == torch.float32
        for ours, theirs in ((got, want), (tangent, slope)):
            limit = GRAD_LIMIT[torch.float32]
            torch.testing.assert_close(ours.double(), theirs, rtol=limit, atol=limit)


# ------------------------------------------------------------------------------------- programs


@pytest.mark.parametrize("dtypes", PAIRS)
def test_vmap(dtypes, device):
    xs, weight = normal((3, 5, 9), dtypes[0], device), normal((7, 9), dtypes[1], device)
    weights = torch.stack([weight, -weight, weight + 1])
    bias = normal((3, 7), torch.float32, device)
    cases = [
        (lambda x, w: my_ops.gemm(x, w.mT), (0, None), (xs, weight)),
        (lambda x, w: my_ops.gemm(x, w.mT), (None, 0), (xs[0], weights)),
        (my_ops.linear, (0, 0, 0), (xs, weights, bias)),
        (my_ops.linear, (0, None, 0), (xs, weight, bias)),
        (my_ops.linear, (0, None, None), (xs, weight, bias[0])),
    ]
    for function, in_dims, args in cases:
        got = torch.vmap(function, in_dims)(*args)
        assert got.dtype == torch.float32
        for i in range(3):
            one = (t if d is None else t[i] for t, d in zip(args, in_dims, strict=True))
            torch.testing.assert_close(got[i], function(*one), rtol=2.0**-16, atol=2.0**-16)


@pytest.mark.parametrize("dtypes", PAIRS)
def test_autocast_casts_both(dtypes, device):
    a, b = normal((5, 9), dtypes[0], device), normal((9, 7), dtypes[1], device)
    for dtype in SIXTEEN_BIT:
        with torch.autocast(device, dtype):
            got = my_ops.gemm(a, b)
            layer = my_ops.linear(a, b.mT)
        assert torch.equal(got, my_ops.gemm(a.to(dtype), b.to(dtype)))
        assert got.dtype == layer.dtype == dtype
    with torch.autocast(device, torch.bfloat16, enabled=False):
        assert my_ops.gemm(a, b).dtype == torch.float32


class Router(torch.nn.Module):
    """In float32, of 16-bit tokens."""

    def __init__(self, device):
        super().__init__()
        self.gate = my_ops.nn.Linear(16, 8, device=device)
        self.act = my_ops.nn.LinearActivation(16, 8, device=device, activation="silu")

    def forward(self, x):
        return self.gate(x) + self.act(x) + torch.ops.my_ops.gemm(x, self.gate.weight.t())


def routed(router, x):
    gate, act = router.gate, router.act.linear
    y, z = reference.linear(x, gate.weight, gate.bias), reference.linear(x, act.weight, act.bias)
    return y + torch.nn.functional.silu(z) + reference.linear(x, gate.weight)


ROUTER_LIMIT = 2.0**-18


@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
def test_layers_of_float32_take_16_bit_input(dtype, device):
    """As modules, in TorchScript, and exported."""
    router, x = Router(device), normal((2, 5, 16), dtype, device)
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(router), buffer)
    buffer.seek(0)
    programs = [router, torch.jit.load(buffer), torch.export.export(router, (x,)).module()]
    for program in programs:
        got = program(x)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, routed(router, x), rtol=ROUTER_LIMIT, atol=ROUTER_LIMIT)


@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
def test_16_bit_layers_take_float32_input_if_the_bias_is_float32(dtype, device, rejects):
    x, layer = normal((5, 16), torch.float32, device), my_ops.nn.Linear(16, 8, False, device, dtype)
    got = layer(x)
    assert linear_excess(got, x, layer.weight, None, None) <= 1
    biased = my_ops.nn.Linear(16, 8, device=device, dtype=dtype)
    with rejects(RuntimeError, "linear: bias must have the dtype of the result, got", x):
        biased(x)


@pytest.mark.slow
@pytest.mark.skipif(**NO_INDUCTOR)
@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
def test_compiled(dtype, device):
    router, x = Router(device), normal((5, 16), dtype, device).requires_grad_()
    grad = normal((5, 8), torch.float32, device)
    parameters = [x, router.gate.weight, router.act.linear.bias]
    compiled = torch.compile(router, fullgraph=True)
    got, want = compiled(x), routed(router, x)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=ROUTER_LIMIT, atol=ROUTER_LIMIT)
    ours, theirs = (torch.autograd.grad(y, parameters, grad) for y in (got, want))
    for one, exact in zip(ours, theirs, strict=True):
        assert one.dtype == exact.dtype
        # torch rounds the gradient of each use of x, and the sum of two
        limit = max(4 * torch.finfo(one.dtype).eps, 4 * ROUTER_LIMIT)
        torch.testing.assert_close(one, exact, rtol=limit, atol=limit)


@pytest.mark.slow
@pytest.mark.skipif(**NO_INDUCTOR)
@pytest.mark.parametrize("dtypes", PAIRS)
def test_compiled_gemm(dtypes, device):
    compiled = torch.compile(my_ops.gemm, fullgraph=True, dynamic=True)
    for batches in (((), ()), ((3,), (1,)), ((), (3,))):
        a = normal((*batches[0], 5, 16), dtypes[0], device)
        b = normal((*batches[1], 16, 8), dtypes[1], device)
        assert gemm_excess(compiled(a, b), a, b) <= 1


# torch 2.15 copies the inputs, reads the copies' .grad, and would hide the warning.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("dtypes", PAIRS)
def test_opcheck(dtypes, device):
    a, b = normal((5, 9), dtypes[0], device), normal((9, 7), dtypes[1], device)
    bias, out = normal((7,), torch.float32, device), torch.empty(5, 7, device=device)
    torch.library.opcheck(torch.ops.my_ops.gemm.out, (a, b, out))
    leaves = [t.detach().requires_grad_() for t in (a, b)]
    torch.library.opcheck(torch.ops.my_ops.gemm.default, (*leaves,))
    leaves = [t.detach().requires_grad_() for t in (a, b.mT, bias)]
    torch.library.opcheck(torch.ops.my_ops.linear.default, (*leaves, "gelu"))


def test_wrong_dtypes(device, rejects):
    """All other mixtures; tests/wrong_arguments.py has the messages of fake kernels."""
    ones = {d: torch.ones(2, 2, dtype=d, device=device) for d in (torch.float64, *PAIRS[0])}
    ones[torch.float16], ones[torch.bfloat16] = (
        ones[torch.float32].half(),
        ones[torch.float32].bfloat16(),
    )
    allowed = {frozenset(pair) for pair in PAIRS}
    for (dtype, a), (other, b) in itertools.permutations(ones.items(), 2):
        if frozenset((dtype, other)) in allowed:
            continue
        said = [str(d).removeprefix("torch.") for d in (other, dtype)]
        rule = "or one must be float32 and the other float16 or bfloat16, got"
        match = f"must have the dtype of [ax], {rule} {said[0]} and {said[1]}$"
        for call in (my_ops.gemm, my_ops.linear):
            with rejects(RuntimeError, match, a, b):
                call(a, b)
    single, half = ones[torch.float32], ones[torch.bfloat16]
    for call in (
        lambda: my_ops.gemm(half, single, out=half.clone()),
        lambda: my_ops.linear(half, single, half[0]),
        lambda: my_ops.linear(half, single, residual=half),
        lambda: my_ops.linear(half, single, residual=half, activation="relu"),
    ):
        with rejects(
            RuntimeError, "the dtype of the result, got bfloat16 and float32", half, single
        ):
            call()


def test_out_that_overlaps_the_other_type(device, rejects):
    memory = torch.ones(16, device=device)
    a, b = memory.view(torch.bfloat16)[:16].view(4, 4), torch.ones(4, 4, device=device)
    with rejects(RuntimeError, "gemm: out must not overlap a in memory", memory):
        my_ops.gemm(a, b, out=memory.view(4, 4))
    with rejects(RuntimeError, "gemm: out must not overlap b in memory", memory):
        my_ops.gemm(b, a, out=memory.view(4, 4))
