"""my_ops.attention: its ops on the CPU, and on a GPU what they add to the tests of the switch."""

import importlib
import math

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import my_ops
from my_ops import reference

OPS = torch.ops.my_ops
module = importlib.import_module("my_ops.ops.attention")  # not the function of this name
CASES = ("plain", "causal", "bias", "broadcast", "row", "scale")
# Of ten roundings, as the switch's.
LIMIT = {torch.float64: 10 * 2.0**-52, torch.float32: 10 * 2.0**-24}


def problem(case, dtype=torch.float64, device="cpu", sizes=(2, 3, 5, 7, 4)):
    """query, key, value and bias, and the options of the op."""
    batch, heads, queries, keys, size = sizes
    query, key, value = (
        torch.randn(batch, heads, n, size, dtype=torch.float64) for n in (queries, keys, keys)
    )
    shapes = {
        "bias": (batch, heads, queries, keys),
        "broadcast": (1, heads, 1, keys),
        "row": (batch, 1, 1, keys),
    }
    bias = torch.randn(shapes[case], dtype=torch.float64) if case in shapes else None
    tensors = [None if t is None else t.to(device, dtype) for t in (query, key, value, bias)]
    return tensors, (case == "causal", 0.3 if case == "scale" else None)


def leaves(tensors):
    return [None if t is None else t.detach().requires_grad_() for t in tensors]


def of_op(tensors, options):
    return OPS.attention(*tensors, *options)


def exact(tensors, options):
    wide = [None if t is None else t.double() for t in tensors]
    return reference.attention(*wide, 0.0, *options)


def apart(got, want):
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("case", CASES)
def test_op_and_gradients_beside_float64(case, dtype):
    tensors, options = problem(case, dtype, sizes=(2, 3, 33, 65, 16))
    given = leaves(tensors)
    wide = leaves([None if t is None else t.double() for t in tensors])
    out, want = of_op(given, options), exact(wide, options)
    grad = torch.randn_like(out)
    assert apart(out, want) < LIMIT[dtype]
    inputs, exacts = ([t for t in ts if t is not None] for ts in (given, wide))
    for ours, theirs in zip(
        torch.autograd.grad(out, inputs, grad),
        torch.autograd.grad(want, exacts, grad.double()),
        strict=True,
    ):
        assert apart(ours, theirs) < LIMIT[dtype]


@pytest.mark.parametrize("case", CASES)
def test_gradients_numerically(case):
    tensors, options = problem(case, sizes=(1, 2, 3, 4, 4))
    given = [t for t in leaves(tensors) if t is not None]

    def call(*tensors):
        return of_op((*tensors, None)[:4], options)

    check = {"check_forward_ad": True}
    assert torch.autograd.gradcheck(call, given, **check)
    assert torch.autograd.gradgradcheck(call, given)


def test_rows_without_keys():
    tensors, options = problem("bias")
    tensors[3][:, 1, 2] = -math.inf
    given = leaves(tensors)
    out = of_op(given, options)
    assert (out[:, 1, 2] == 0).all()
    for grad in torch.autograd.grad(out.square().sum(), given, create_graph=True):
        assert grad.isfinite().all()
    none = [t[:, :, :0] if n in (1, 2) else t for n, t in enumerate(tensors[:3])]
    assert (OPS.attention(*none) == 0).all()


@pytest.mark.parametrize("case", CASES)
def test_what_torch_asks_of_an_op(case):
    tensors, options = problem(case, torch.float32)
    torch.library.opcheck(OPS.attention.default, (*leaves(tensors), *options))
    torch.library.opcheck(OPS.attention_forward.default, (*tensors, *options))


@pytest.mark.parametrize("case", CASES)
def test_mapped(case):
    tensors, options = problem(case)
    stacked = [None if t is None else torch.stack([t, 2 * t, -t], 1) for t in tensors]
    for dims in ((1, 1, 1, 1), (None, 1, None, 1), (1, None, 1, None)):
        used = [s if d == 1 else t for t, s, d in zip(tensors, stacked, dims, strict=True)]
        in_dims = tuple(None if t is None else d for t, d in zip(used, dims, strict=True))
        got = torch.vmap(lambda *ts: of_op(ts, options), in_dims)(*used)
        for n in range(3):
            one = [
                t if d is None or t is None else t.select(1, n)
                for t, d in zip(used, in_dims, strict=True)
            ]
            torch.testing.assert_close(got[n], of_op(one, options))


def test_gradient_of_each_example():
    tensors, options = problem("bias")

    def loss(*one):
        return of_op([t.unsqueeze(0) for t in one], options).square().sum()

    got = torch.vmap(torch.func.grad(loss, (0, 1, 2, 3)))(*tensors)
    given = leaves(tensors)
    want = torch.autograd.grad(of_op(given, options).square().sum(), given)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_compiled_and_exported():
    tensors, _ = problem("bias", torch.float32)

    def loss(query, key, value, bias):
        return OPS.attention(query, key, value, bias).square().sum()

    given = leaves(tensors)
    want = torch.autograd.grad(loss(*given), given)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for ours, theirs in zip(torch.autograd.grad(compiled(*given), given), want, strict=True):
        torch.testing.assert_close(ours, theirs)

    class Call(torch.nn.Module):
        def forward(self, *tensors):
            return my_ops.attention(*tensors)

    program = torch.export.export(Call(), tuple(tensors)).module()
    torch.testing.assert_close(program(*tensors), my_ops.attention(*tensors))


def test_autocast():
    tensors, options = problem("plain", torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert of_op(tensors, options).dtype == torch.bfloat16
        assert my_ops.attention(*tensors[:3]).dtype == torch.bfloat16


WRONG = [
    (0, lambda t: t[0], "query must be (batch, heads, queries, size), got (3, 5, 4)"),
    (1, lambda t: t[:1], "key must be (batch, heads, keys, size) = (2, 3, 7, 4), got (1, 3, 7, 4)"),
    (2, lambda t: t[:, :, 1:], "value must be (batch, heads, keys, size) = (2, 3, 7, 4), got"),
    (2, lambda t: t.float(), "value must have the dtype of query"),
    (3, lambda t: t[:, :2], "bias must broadcast to (batch, heads, queries, keys) = (2, 3, 5, 7)"),
    (3, lambda t: t.float(), "bias must have the dtype of query"),
]


@pytest.mark.parametrize("at, change, message", WRONG)
def test_wrong_operands(at, change, message):
    tensors, options = problem("bias")
    tensors[at] = change(tensors[at])
    for device in ("cpu", "meta"):
        with pytest.raises(RuntimeError) as error:
            of_op([t.to(device) for t in tensors], options)
        assert str(error.value).startswith(f"attention: {message}")


@pytest.mark.parametrize("queries, rows", [(5, 32), (32, 32), (33, 64), (5, 0)])
def test_rows_of_logsumexp(queries, rows):
    """Gradients take the sums of no row, or of rows in whole groups, and no other number."""
    tensors, options = problem("plain", sizes=(2, 3, queries, 7, 4))
    out = torch.randn(2, 3, queries, 4, dtype=torch.float64)

    def shapes(rows):
        given = [out, *tensors, out, out.new_zeros(2, 3, rows)]
        given = [None if t is None else t.to("meta") for t in given]
        return [g.shape for g in OPS.attention_backward(*given, *options, False)[:3]]

    assert shapes(rows) == [t.shape for t in tensors[:3]]
    for wrong in (queries + 1 if rows == queries else queries, 96):
        with pytest.raises(RuntimeError, match="attention_backward: logsumexp must be"):
            shapes(wrong)


def test_bias_excludes_causal():
    tensors, _ = problem("bias")
    with pytest.raises(RuntimeError, match="attention: is_causal must be False with a bias"):
        of_op(tensors, (True, None))


def test_no_tensor():
    q, k, v = problem("plain")[0][:3]
    with pytest.raises(TypeError, match=r"attention: key must be a torch\.Tensor, got int"):
        my_ops.attention(q, 1, v)
    with pytest.raises(TypeError, match=r"attention: attn_mask must be a torch\.Tensor, got str"):
        my_ops.attention(q, k, v, "causal")


def masks():
    seen = torch.rand(5, 7) < 0.6
    return {"bool": seen, "bool rows": seen[:, :1], "bias": torch.randn(3, 5, 7).double()}


@pytest.mark.parametrize("through", ["torch", "ops"])
@pytest.mark.parametrize("mask", [None, "bool", "bool rows", "bias"])
@pytest.mark.parametrize("groups", [3, 1])
def test_function_as_torchs(monkeypatch, through, mask, groups):
    """Whether torch serves the call or our ops do, which is so for some on CUDA only."""
    if through == "ops":
        monkeypatch.setattr(module, "_takes", lambda *_: True)
    torch.manual_seed(0)
    query, key, value = problem("plain")[0][:3]
    key, value = key[:, :groups], value[:, :groups]
    given, theirs = leaves([query, key, value]), leaves([query, key, value])
    options = {"attn_mask": masks().get(mask), "scale": 0.4, "enable_gqa": groups == 1}
    got, want = (
        call(*tensors, **options)
        for call, tensors in (
            (my_ops.attention, given),
            (F.scaled_dot_product_attention, theirs),
        )
    )
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(got, reference.attention(query, key, value, **options))
    for ours, torchs in zip(
        torch.autograd.grad(got.square().sum(), given),
        torch.autograd.grad(want.square().sum(), theirs),
        strict=True,
    ):
        torch.testing.assert_close(ours, torchs)


cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
LARGE = (2, 32, 300, 330, 64)


def taken(device="cuda"):
    with my_ops.fast_fp32():  # so that the report has the counts
        counts = {}
        for one in my_ops.fast_fp32.report().taken:
            counts[one.op] = counts.get(one.op, 0) + one.times
        return counts


def torchs(*tensors, **options):
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], set_priority=True):
        return F.scaled_dot_product_attention(*tensors, **options)


def check_beside_torch(call, tensors, options):
    """Beside float64, no less accurate than torch's."""
    grad, results = torch.randn_like(tensors[0]), []
    options = {"is_causal": options[0], "scale": options[1]}
    for one, dtype in (
        (call, torch.float32),
        (torchs, torch.float32),
        (reference.attention, torch.float64),
    ):
        given = leaves([None if t is None else t.to(dtype) for t in tensors])
        out = one(*given, **options)
        inputs = [t for t in given if t is not None]
        results.append([out, *torch.autograd.grad(out, inputs, grad.to(dtype))])
    for ours, theirs, one in zip(*results, strict=True):
        assert apart(ours, one) <= 1.2 * apart(theirs, one) + LIMIT[torch.float32] / 10


@cuda
@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu(case):
    """By our kernels, with the switch off."""
    tensors, options = problem(case, torch.float32, "cuda", LARGE)
    hopper = torch.cuda.get_device_capability()[0] == 9
    before = taken()
    check_beside_torch(my_ops.attention, tensors, options)
    after = taken()
    for op in ("attention", "attention_backward"):
        assert after.get(op, 0) == before.get(op, 0) + hopper


@cuda
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_on_a_gpu(backend):
    tensors, _ = problem("bias", torch.float32, "cuda", LARGE)
    given = leaves(tensors)

    def loss(*tensors):
        return my_ops.attention(*tensors).square().sum()

    want = torch.autograd.grad(loss(*given), given)
    compiled, before = torch.compile(loss, backend=backend, fullgraph=True), taken()
    for ours, theirs in zip(torch.autograd.grad(compiled(*given), given), want, strict=True):
        torch.testing.assert_close(ours, theirs)
    if torch.cuda.get_device_capability()[0] == 9:
        assert taken() != before


@cuda
@pytest.mark.parametrize("size", [1, 6, 16])
@pytest.mark.parametrize("case", ["plain", "bias", "broadcast", "one key", "no keys"])
def test_op_of_any_strides_on_a_gpu(case, size):
    """Those that torch's efficient attention refuses too: rows with gaps, or at odd places."""
    keys = {"one key": 1, "no keys": 0}.get(case, 33)
    tensors, options = problem(case, torch.float32, "cuda", (2, 3, 5, keys, size))

    def spread(t):
        if t is None:
            return None
        return torch.empty(3, *t.shape, 2, device="cuda")[1, ..., 1].copy_(t)

    for given in (
        [spread(t) for t in tensors],
        [None if t is None else t.mT.contiguous().mT for t in tensors],
    ):
        given, wide = leaves(given), leaves([None if t is None else t.double() for t in given])
        out, want = of_op(given, options), exact(wide, options)
        torch.testing.assert_close(out, want.float())
        grad = torch.randn_like(out)
        inputs, exacts = ([t for t in ts if t is not None] for ts in (given, wide))
        for ours, theirs in zip(
            torch.autograd.grad(out, inputs, grad),
            torch.autograd.grad(want, exacts, grad.double()),
            strict=True,
        ):
            torch.testing.assert_close(ours, theirs.float(), rtol=1e-4, atol=1e-5)


@cuda
@pytest.mark.parametrize("sizes", [(1, 2, 3, 4, 4), (2, 32, 301, 333, 64), (2, 32, 10, 333, 64)])
@pytest.mark.parametrize("case", CASES)
def test_ops_that_torch_serves_on_a_gpu(case, sizes, monkeypatch):
    """torch's efficient attention in place of our kernels, as on other GPUs."""
    monkeypatch.setattr(module, "has_fast_fp32", lambda: False)
    tensors, options = problem(case, torch.float32, "cuda", sizes)
    before = taken()
    check_beside_torch(OPS.attention, tensors, options)
    assert taken() == before


@cuda
def test_second_gradients_and_graphs_on_a_gpu():
    tensors, _ = problem("plain", torch.float32, "cuda", LARGE)
    given = leaves(tensors[:3])
    wide = leaves([t.double() for t in tensors[:3]])
    seconds = []
    for call, inputs in ((my_ops.attention, given), (reference.attention, wide)):
        first = torch.autograd.grad(call(*inputs).square().sum(), inputs, create_graph=True)
        seconds.append(torch.autograd.grad(sum(g.square().sum() for g in first), inputs))
    for ours, theirs in zip(*seconds, strict=True):
        assert apart(ours, theirs) < 1e-5
    query, key, value = tensors[:3]
    want = my_ops.attention(query, key, value)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = my_ops.attention(query, key, value)
    graph.replay()
    assert torch.equal(got, want)


@pytest.mark.parametrize("call", [my_ops.attention, torch.ops.my_ops.attention])
def test_a_query_that_repeats_a_row(call, device):
    """torch's own gives other results on the CPU, for a batch of one whose stride is 1."""
    key, value = torch.randn(2, 1, 2, 7, 4, device=device)
    query = torch.randn(64, device=device).as_strided((1, 2, 3, 4), (1, 4, 0, 1))
    torch.testing.assert_close(call(query, key, value), call(query.contiguous(), key, value))
