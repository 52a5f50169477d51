"""What torch.compile makes of the ops: elementwise ones are fused with their neighbours, products
of a library are called as torch's own."""

import re
import subprocess
import sys
import textwrap

import pytest
import torch
from samples import (
    DIFFERENTIABLE,
    FLOATING,
    INTEGERS,
    NO_INDUCTOR,
    ROUNDED_ONCE,
    SIXTEEN_BIT,
    UNSIGNED,
    arithmetic,
    layouts,
    leaves,
    named,
    special,
    ulps,
    values,
)
from torch._inductor import decomposition
from torch._inductor.utils import fresh_cache, run_and_get_code, run_fw_bw_and_get_code

import my_ops
from my_ops import _inductor, _private, reference
from my_ops.ops._common import UNARY

FLOAT32_LIMIT = 2.0**-19  # of sums of a few products, and of fused kernels
D_SIGMOID_ULP, D_SIGMOID_GRAD_ULP = 4.0, 8.0  # as of the kernels: test_elementwise.py

OURS, PRODUCT = r"= torch\.ops\.my_ops\.", r"extern_kernels\.\w+\("
KERNEL = r"^\s+(cpp_fused\w*\(|triton_\w+\.run\()"


@pytest.fixture
def compiled():
    """Calls a function compiled to one graph; counts lines of its code, backward's included."""

    def call(function, *tensors):
        run = run_fw_bw_and_get_code if tensors[0].requires_grad else run_and_get_code
        result, code = run(lambda: torch.compile(function, fullgraph=True)(*tensors))
        lines = [line for text in code for line in text.splitlines() if "#" not in line]
        return result, [
            sum(bool(re.search(pattern, line)) for line in lines)
            for pattern in (OURS, PRODUCT, KERNEL)
        ]

    with fresh_cache():
        yield call


ELEMENTWISE = [op for op in DIFFERENTIABLE if op.name in ("custom_add", *UNARY)]


@pytest.mark.skipif(**NO_INDUCTOR)
@pytest.mark.parametrize(**named(ELEMENTWISE))
def test_elementwise_ops_fuse_with_their_neighbours(op, device, compiled):
    def function(*tensors):
        return (op(*(2 * t for t in tensors))[0] + 1).square()

    tensors = op.tensors(5, torch.float32, device)
    got, calls = compiled(function, *tensors)
    torch.testing.assert_close(got, function(*tensors), rtol=FLOAT32_LIMIT, atol=FLOAT32_LIMIT)
    assert calls == [0, 0, 1]


@pytest.mark.skipif(**NO_INDUCTOR)
def test_fill_index_fuses(device, compiled):
    x = torch.randn(3, 5, device=device)
    got, calls = compiled(lambda x: x * my_ops.fill_index(3, 5, device=x.device), x)
    assert torch.equal(got, x * my_ops.fill_index(3, 5, device=device))
    assert calls == [0, 0, 1]


@pytest.mark.skipif(**NO_INDUCTOR)
@pytest.mark.parametrize(
    **named([op for op in DIFFERENTIABLE if op.name.startswith(("gemm", "linear"))])
)
def test_products_on_the_cpu_are_torchs(op, compiled):
    """Forward and backward: whatever the code calls is torch's."""
    tensors = leaves(op.tensors(5, torch.float32, "cpu"))
    got, (ours, products, _) = compiled(lambda *ts: op(*ts)[0] * 2, *tensors)
    assert ours == 0
    assert products == 3  # the result, two gradients
    want = op(*tensors)[0] * 2
    torch.testing.assert_close(got, want, rtol=FLOAT32_LIMIT, atol=FLOAT32_LIMIT)
    grad = torch.randn_like(want)
    for ours, exact in zip(
        torch.autograd.grad(torch.compile(lambda *ts: op(*ts)[0] * 2)(*tensors), tensors, grad),
        torch.autograd.grad(want, tensors, grad),
        strict=True,
    ):
        torch.testing.assert_close(ours, exact, rtol=FLOAT32_LIMIT, atol=FLOAT32_LIMIT)


@pytest.mark.skipif(**NO_INDUCTOR)
@pytest.mark.parametrize(
    "dtype, k, activation, ours",
    [
        (torch.bfloat16, 16, None, 0),
        (torch.float16, 16, None, 0),
        (torch.bfloat16, 17, None, 1),  # rows that are no whole vectors
        (torch.bfloat16, 16, "silu", 1),  # one kernel
        (torch.float32, 16, None, 1),
    ],
)
def test_products_on_cuda(dtype, k, activation, ours, cuda, compiled):
    x, weight = (torch.randn(n, k, device="cuda", dtype=dtype) for n in (32, 24))
    bias = torch.randn(24, device="cuda", dtype=dtype)
    layer = lambda *ts: my_ops.linear(*ts, activation=activation)  # noqa: E731
    got, calls = compiled(layer, x, weight, bias)
    torch.testing.assert_close(got, layer(x, weight, bias), rtol=2.0**-7, atol=2.0**-5)
    assert calls[0] == ours
    got, calls = compiled(my_ops.gemm, x, weight.mT)
    torch.testing.assert_close(got, my_ops.gemm(x, weight.mT), rtol=2.0**-7, atol=2.0**-5)
    assert calls[0] == (ours if activation is None else 0)


@pytest.mark.skipif(**NO_INDUCTOR)
def test_without_inductors_tables(device, monkeypatch, compiled):
    """The op's own kernel is called."""
    x = torch.randn(5, device=device)
    compiled(my_ops.d_sigmoid, x)
    for table in _private.inductor_tables():
        monkeypatch.delitem(table, torch.ops.my_ops.d_sigmoid.default)
    torch.compiler.reset()
    with fresh_cache():
        got, calls = compiled(lambda x: my_ops.d_sigmoid(x) + 1, x)
    assert torch.equal(got, my_ops.d_sigmoid(x) + 1)
    assert calls == [1, 0, 1]
    monkeypatch.delattr(decomposition, "decompositions")
    monkeypatch.delattr(decomposition, "select_decomp_table")
    assert _private.inductor_tables() == [{}, {}]


@pytest.mark.skipif(**NO_INDUCTOR)
def test_inductor_in_use_before_my_ops_is_imported():
    """Its table has been copied by then. And a meta tensor does not load it."""
    script = """
        import sys, torch
        if sys.argv[1] == "before":
            torch.compile(torch.sin)(torch.ones(3))
        import my_ops
        my_ops.add_one(torch.ones(3, device="meta"))
        assert ("torch._inductor" in sys.modules) == (sys.argv[1] == "before")
        from torch._inductor.utils import fresh_cache, run_and_get_code
        with fresh_cache():
            _, (code,) = run_and_get_code(torch.compile(my_ops.add_one), torch.ones(3))
        assert "torch.ops.my_ops.add_one" not in code
    """
    for when in ("before", "after"):
        command = [sys.executable, "-c", textwrap.dedent(script), when]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


@pytest.mark.skipif(**NO_INDUCTOR)
def test_compiled_d_sigmoid_is_as_accurate(device, compiled):
    z = values(torch.float32, 1 << 12, device)
    z64 = z.cpu().double()
    slope = torch.sigmoid(z64) * torch.sigmoid(-z64)
    (got, got_slope), calls = compiled(
        lambda z: (torch.ops.my_ops.d_sigmoid_backward(z, z), my_ops.d_sigmoid(z)), z
    )
    assert ulps(got.cpu(), z64 * slope * -torch.tanh(z64 / 2)) <= D_SIGMOID_GRAD_ULP
    assert ulps(got_slope.cpu(), slope) <= D_SIGMOID_ULP
    assert calls == [0, 0, 1]


# ------------------------------------------------------ the expressions of ATen, not compiled


@pytest.mark.parametrize("dtype", FLOATING + INTEGERS)
def test_sums(dtype, device):
    a, b = values(dtype, 100, device), values(dtype, 100, device)
    one, total = _inductor._add_one(a), _inductor._custom_add(a, b)
    if dtype in UNSIGNED:
        assert one is total is NotImplemented
        return
    assert torch.equal(one, my_ops.add_one(a))
    assert torch.equal(total, my_ops.custom_add(a, b))
    assert one.dtype == total.dtype == dtype
    for other in (torch.float16, torch.int64):
        total, want = (add(a, b.to(other)) for add in (_inductor._custom_add, my_ops.custom_add))
        torch.testing.assert_close(total, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", FLOATING)
def test_d_sigmoid_and_round_ste(dtype, device):
    z, grad = values(dtype, 1000, device), values(dtype, 1000, device)
    z64 = z.double()
    want = torch.sigmoid(z64) * torch.sigmoid(-z64) * -torch.tanh(z64 / 2) * grad.double()
    own = arithmetic(dtype) == dtype
    got = _inductor._d_sigmoid_backward(grad, z)
    assert ulps(got, want) <= (D_SIGMOID_GRAD_ULP if own else ROUNDED_ONCE)
    for x in (z, special(dtype, device)):
        got = _inductor._d_sigmoid(x)
        limit = D_SIGMOID_ULP if own else ROUNDED_ONCE
        assert ulps(got, reference.d_sigmoid(x.double())) <= limit
        rounded = _inductor._round_ste(x)
        torch.testing.assert_close(rounded, my_ops.round_ste(x), rtol=0, atol=0, equal_nan=True)


def test_layouts_of_elementwise_results(device):
    for x in layouts(device).values():
        if x.numel() == 0:
            continue
        assert _inductor._add_one(x).stride() == my_ops.add_one(x).stride()
        assert _inductor._d_sigmoid(x).stride() == my_ops.d_sigmoid(x).stride()
        assert _inductor._round_ste(x).stride() == my_ops.round_ste(x).stride()
        for other in (x, x.flatten()[:1], x.double()):
            want = my_ops.custom_add(x, other)
            assert _inductor._custom_add(x, other).stride() == want.stride()


@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
def test_products_that_stay_ours(dtype):
    """Of rows that are no whole vectors, where it is no library of the CPU's that is called."""
    a, b = (torch.empty(shape, dtype=dtype, device="meta") for shape in ((9, 16), (16, 8)))
    assert _inductor._gemm(a, b).shape == (9, 8)
    assert _inductor._gemm(a, b[:, :7]) is NotImplemented
    assert _inductor._gemm(a[:, :9], b[:9]) is NotImplemented
    assert _inductor._gemm(a.float(), b.float()) is NotImplemented
    assert _inductor._linear(a, b.mT).shape == (9, 8)
    assert _inductor._linear(a, b.mT, None, "relu") is NotImplemented
    assert _inductor._linear(a, b.mT, None, "none", a[:, :8]) is NotImplemented


def test_batches(device):
    pairs = [((3, 4, 8), (3, 8, 5)), ((1, 4, 8), (3, 8, 5)), ((3, 4, 8), (1, 8, 5))]
    pairs += [((4, 8), (3, 8, 5)), ((3, 4, 8), (8, 5))]
    for shape_a, shape_b in pairs:
        a, b = torch.randn(shape_a), torch.randn(shape_b)
        got, want = _inductor._gemm(a, b), my_ops.gemm(a, b)
        assert got.stride() == want.stride()
        torch.testing.assert_close(got, want, rtol=FLOAT32_LIMIT, atol=FLOAT32_LIMIT)
