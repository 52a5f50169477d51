"""What torch.compile makes of the ops: elementwise ops are fused with their neighbours, and
products that a library computes are called as torch's own."""

import itertools
import re
from uuid import uuid4

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
    exact_d_sigmoid,
    layouts,
    leaves,
    named,
    special,
    ulps,
    values,
)
from torch._inductor import decomposition, lowering
from torch._inductor.utils import run_and_get_code, run_fw_bw_and_get_code

import my_ops
from my_ops import _inductor, _private

pytestmark = pytest.mark.slow

FLOAT32_LIMIT = 2.0**-19  # for sums of a few products, and for fused kernels
D_SIGMOID_ULP = 8.0  # and of its gradient: an exponential, five products and quotients

OURS, PRODUCT = r"= torch\.ops\.my_ops\.", r"extern_kernels\.\w+\("
KERNEL = r"^\s+(cpp_fused\w*\(|triton_\w+\.run\()"


@pytest.fixture
def compiled():
    """Calls a function compiled to one graph, and counts lines of its code, including
    backward's."""

    def call(function, *tensors):
        run = run_fw_bw_and_get_code if tensors[0].requires_grad else run_and_get_code
        result, code = run(lambda: torch.compile(function, fullgraph=True)(*tensors))
        lines = [line for text in code for line in text.splitlines() if "#" not in line]
        return result, [
            sum(bool(re.search(pattern, line)) for line in lines)
            for pattern in (OURS, PRODUCT, KERNEL)
        ]

    with torch.compiler.config.patch(cache_key_tag=uuid4().hex):  # compiled again
        yield call


FUSED = "add_one", "custom_add", "d_sigmoid", "round_ste"
ELEMENTWISE = [op for op in DIFFERENTIABLE if op.name in FUSED]


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
@pytest.mark.parametrize("dtype", [*SIXTEEN_BIT, torch.int8, torch.uint16])
def test_compiled_sums_are_rounded_once(dtype, device, compiled):
    a, b = values(dtype, 999, device), values(dtype, 999, device)
    got, calls = compiled(lambda a, b: (my_ops.add_one(a), my_ops.custom_add(a, b)), a, b)
    for ours, exact in zip(got, (my_ops.add_one(a), my_ops.custom_add(a, b)), strict=True):
        assert torch.equal(ours, exact)
    assert calls == [0, 0, 1]


@pytest.mark.skipif(**NO_INDUCTOR)
def test_fill_index_fuses(device, compiled):
    x = torch.randn(3, 5, device=device)
    got, calls = compiled(lambda x: x * my_ops.fill_index(3, 5, device=x.device), x)
    assert torch.equal(got, x * my_ops.fill_index(3, 5, device=device))
    assert calls == [0, 0, 1]


@pytest.mark.skipif(**NO_INDUCTOR)
def test_fill_index_of_the_dispatcher(device, compiled):
    """Its dtype is float32, whatever torch's default is, as not compiled."""
    function = lambda x: torch.ops.my_ops.fill_index(3, 5, device=x.device)  # noqa: E731
    x = torch.zeros((), device=device)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        want = function(x)
        got, _ = compiled(function, x)
    finally:
        torch.set_default_dtype(default)
    assert got.dtype == want.dtype == torch.float32
    assert torch.equal(got, want)


@pytest.mark.skipif(**NO_INDUCTOR)
@pytest.mark.parametrize(
    **named([op for op in DIFFERENTIABLE if op.name.startswith(("gemm", "linear"))])
)
def test_products_on_the_cpu_are_torchs(op, compiled):
    """In forward and backward, the code calls only torch's products."""
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
        (torch.bfloat16, 17, None, 1),  # rows that are not aligned
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
@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("rows, ours", [(1 << 15, True), (1 << 16, False)])
@pytest.mark.parametrize("dtype", [*SIXTEEN_BIT, torch.float32])
def test_large_products_in_16_bits_are_torchs(dtype, rows, ours, dynamic):
    """Those of rows that Inductor pads, with their gradients."""
    functions = []

    def backend(graph, _):
        functions.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    layer = my_ops.nn.Linear(1000, 1003, device="meta", dtype=dtype)
    x = torch.empty(rows, 1000, device="meta", dtype=dtype)
    torch.compiler.reset()
    torch.compile(layer, backend=backend, fullgraph=True, dynamic=dynamic)(x)
    (function,) = functions
    known = torch.ops.my_ops.linear.default
    assert function == (known if ours or dtype is torch.float32 else torch.nn.functional.linear)


@pytest.mark.skipif(**NO_INDUCTOR)
def test_products_of_sizes_that_depend_on_data(device):
    def function(x, kept, weight):
        return my_ops.linear(x[kept.nonzero().squeeze(-1)], weight)

    x, weight = (torch.randn(n, 33, dtype=torch.bfloat16, device=device) for n in (40, 17))
    kept = torch.arange(40, device=device) % 3 == 0
    torch.compiler.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
        got = compiled(x, kept, weight)
    torch.testing.assert_close(got, function(x, kept, weight), rtol=2.0**-7, atol=2.0**-5)


@pytest.mark.skipif(**NO_INDUCTOR)
def test_large_products_that_do_not_fit_are_refused():
    """By our op, when they are traced."""
    x = torch.empty(1 << 16, 1001, device="meta", dtype=torch.bfloat16)
    for weight in (x.new_empty(1003, 1000), x.new_empty(1003, 1001, dtype=torch.float16)):
        torch.compiler.reset()
        with pytest.raises(Exception, match="linear: "):
            torch.compile(my_ops.linear, backend="eager", fullgraph=True)(x, weight)


@pytest.mark.parametrize("strict", [True, False])
def test_exported_products_keep_the_op(strict):
    """A program may have sizes for which torch's would be chosen."""
    layer = my_ops.nn.Linear(1000, 1003, dtype=torch.bfloat16)
    x = torch.randn(64, 1000, dtype=torch.bfloat16)
    rows = {0: torch.export.Dim("rows", max=1 << 20)}
    program = torch.export.export(layer, (x,), dynamic_shapes=(rows,), strict=strict)
    assert torch.ops.my_ops.linear.default in [node.target for node in program.graph.nodes]


@pytest.mark.skipif(**NO_INDUCTOR)
@pytest.mark.parametrize("dtypes", list(itertools.permutations((torch.float32, torch.bfloat16))))
def test_products_of_two_types_are_ours_on_cuda(dtypes, cuda, compiled):
    x, weight = (
        torch.randn(n, 16, device="cuda").to(dtype)
        for n, dtype in zip((32, 24), dtypes, strict=True)
    )
    for function in (my_ops.linear, lambda x, weight: my_ops.gemm(x, weight.mT)):
        got, (ours, products, _) = compiled(function, x, weight)
        assert torch.equal(got, function(x, weight))
        assert (ours, products) == (1, 0)


@pytest.mark.skipif(**NO_INDUCTOR)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("calls", [True, False])
def test_products_by_our_kernels(calls, dtype, compiled, monkeypatch):
    """Here on the CPU. With an Inductor that cannot be told to call ours, they are torch's."""
    monkeypatch.setattr(_inductor, "_is_librarys", lambda *_: False)
    if not calls:
        monkeypatch.setattr(_inductor, "declinable", _private.declinable)
        monkeypatch.setattr(lowering, "FALLBACK_ALLOW_LIST", None)
    x, weight = torch.randn(5, 4), torch.randn(3, 4).to(dtype)

    def function(x, weight):
        return my_ops.linear(x, weight, activation="silu") + my_ops.gemm(x.mT.mT, weight.mT)

    got, (ours, products, _) = compiled(function, *leaves((x, weight)))
    torch.testing.assert_close(got, function(x, weight), rtol=FLOAT32_LIMIT, atol=FLOAT32_LIMIT)
    if calls:
        assert (ours, products) == (6, 0)  # two results, four gradients
    else:
        assert ours == 0


@pytest.mark.skipif(**NO_INDUCTOR)
def test_without_inductors_tables(device, monkeypatch, compiled):
    """The op's own kernel is called."""
    x = torch.randn(5, device=device)
    compiled(my_ops.d_sigmoid, x)
    for table in _private.inductor_tables():
        monkeypatch.delitem(table, torch.ops.my_ops.d_sigmoid.default)
    torch.compiler.reset()
    got, calls = compiled(lambda x: my_ops.d_sigmoid(x) + 1, x)
    assert torch.equal(got, my_ops.d_sigmoid(x) + 1)
    assert calls == [1, 0, 1]
    monkeypatch.delattr(decomposition, "decompositions")
    monkeypatch.delattr(decomposition, "select_decomp_table")
    assert _private.inductor_tables() == [{}, {}]


@pytest.mark.skipif(**NO_INDUCTOR)
def test_inductor_in_use_before_my_ops_is_imported(run_python):
    """By then Inductor has copied its table. A meta tensor does not load Inductor."""
    script = """
        import sys, torch, uuid
        if sys.argv[1] == "before":
            torch.compile(torch.sin)(torch.ones(3))
        import my_ops
        my_ops.add_one(torch.ones(3, device="meta"))
        assert ("torch._inductor" in sys.modules) == (sys.argv[1] == "before")
        from torch._inductor.utils import run_and_get_code
        with torch.compiler.config.patch(cache_key_tag=uuid.uuid4().hex):
            _, (code,) = run_and_get_code(torch.compile(my_ops.add_one), torch.ones(3))
        assert "torch.ops.my_ops.add_one" not in code
    """
    for when in ("before", "after"):
        run_python(script, when)


@pytest.mark.skipif(**NO_INDUCTOR)
def test_compiled_d_sigmoid_is_as_accurate(device, compiled):
    z = torch.empty(1 << 12, device=device).uniform_(-4, 4)  # Triton's exp has 2^-24 |z|
    z64 = z.cpu().double()
    slope = torch.sigmoid(z64) * torch.sigmoid(-z64)
    (got, got_slope), calls = compiled(
        lambda z: (torch.ops.my_ops.d_sigmoid_backward(z, z), my_ops.d_sigmoid(z)), z
    )
    assert ulps(got.cpu(), z64 * slope * -torch.tanh(z64 / 2)) <= D_SIGMOID_ULP
    assert ulps(got_slope.cpu(), slope) <= D_SIGMOID_ULP
    assert calls == [0, 0, 1]


# ------------------------------------------------------ the expressions of ATen, not compiled


@pytest.mark.parametrize("dtype", FLOATING + INTEGERS)
def test_sums(dtype, device):
    a, b = values(dtype, 100, device), values(dtype, 100, device)
    one, total = _inductor._add_one(a), _inductor._custom_add(a, b)
    assert torch.equal(one, my_ops.add_one(a))
    assert one.dtype == total.dtype == dtype
    if dtype not in SIXTEEN_BIT:  # ATen rounds these twice if they are not fused
        assert torch.equal(total, my_ops.custom_add(a, b))
    for other in (torch.float32, torch.int64) if dtype not in UNSIGNED else ():
        if dtype in SIXTEEN_BIT and other == torch.int64:
            continue
        total, want = (add(a, b.to(other)) for add in (_inductor._custom_add, my_ops.custom_add))
        torch.testing.assert_close(total, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", FLOATING)
def test_d_sigmoid_and_round_ste(dtype, device):
    z, grad = values(dtype, 1000, device), values(dtype, 1000, device)
    z64 = z.double()
    want = torch.sigmoid(z64) * torch.sigmoid(-z64) * -torch.tanh(z64 / 2) * grad.double()
    own = arithmetic(dtype) == dtype
    got = _inductor._d_sigmoid_backward(grad, z)
    assert ulps(got, want) <= (D_SIGMOID_ULP if own else ROUNDED_ONCE)
    for x in (z, special(dtype, device)):
        got = _inductor._d_sigmoid(x)
        limit = D_SIGMOID_ULP if own else ROUNDED_ONCE
        assert ulps(got, exact_d_sigmoid(x.double())) <= limit
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
    """Rows that are not aligned, when no CPU library is called."""
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
