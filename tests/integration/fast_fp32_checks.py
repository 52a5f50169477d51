"""Checks that test_fast_fp32.py runs in their own process, where torch's kernels stay overridden.

On the CPU fast_fp32_cpu.cpp computes, compiled at the path in FAST_FP32_MODULE; otherwise CUDA
does. The kernels that replace torch's are at the path in FAST_FP32_OVERRIDES; if it has none, in
Python.
"""

import contextlib
import ctypes
import os
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import my_ops
from my_ops import _fast_fp32

MODULE = os.environ.get("FAST_FP32_MODULE")
OVERRIDES = _fast_fp32.OVERRIDES = Path(os.environ["FAST_FP32_OVERRIDES"])
DEVICE = "cpu" if MODULE else "cuda"
KEY = DEVICE.upper()
# Relative to |a| @ |b|: ten times the largest error seen, and a tenth of TF32's.
LIMIT = 2.0**-19
M, N, K = (160, 168, 176) if MODULE else (1024, 1024, 1024)
BATCH = 2 if MODULE else 4
OTHER, PLAN, PRECISION, FAILED = "of another layout", "that torch", "while TF32", "where ours"
ON_CPU = pytest.mark.skipif(not MODULE, reason="asks the stand-in of the CPU")
ON_CUDA = pytest.mark.skipif(bool(MODULE), reason="needs a CUDA device")
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def wrong_calls():
    """Calls that torch refuses, and its messages."""
    a, b = torch.randn(M, K, device=DEVICE), torch.randn(K, N, device=DEVICE)
    batched = torch.randn(BATCH, M, K, device=DEVICE)
    return {
        "mm": lambda: torch.mm(a, a),
        "mm of a vector": lambda: torch.mm(a, b[0]),
        "mm of two dtypes": lambda: torch.mm(a, b.double()),
        "mm of integers": lambda: torch.mm(a.to(torch.uint16), b.to(torch.uint16)),
        "mm of two devices": lambda: torch.mm(a, b.to("meta")),
        "mm, out of another dtype": lambda: torch.mm(a, b, out=a.new_empty(M, N).double()),
        "mm, out written twice": lambda: torch.mm(a, b, out=a.new_empty(1, 1).expand(M, N)),
        "bmm": lambda: torch.bmm(batched, batched),
        "bmm of matrices": lambda: torch.bmm(a, b),
        "addmm": lambda: torch.addmm(a, a, a),
        "addmm of another shape": lambda: torch.addmm(b[0, :-1], a, b),
        "addmm of batches": lambda: torch.addmm(b[0], batched, batched.mT),
        "addmm of two dtypes": lambda: torch.addmm(b[0].double(), a, b),
        "baddbmm": lambda: torch.baddbmm(batched, batched, batched),
        "baddbmm of matrices": lambda: torch.baddbmm(a, a, b),
    }


def said(call):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return call().shape
        except Exception as error:
            return type(error), str(error)


# No kernel is overridden yet.
BEFORE = {name: said(call) for name, call in wrong_calls().items()}
KERNELS_BEFORE = {op: _fast_fp32._registered_at(op, KEY) for op in _fast_fp32.OPS}

if MODULE:
    _fast_fp32._switch = _fast_fp32.Switch(Path(MODULE), KEY)


@pytest.fixture(autouse=True)
def switched_on():
    torch.manual_seed(20)
    with my_ops.fast_fp32():
        yield
    torch.compiler.reset()


@pytest.fixture(scope="session", autouse=True)
def gains():
    with my_ops.fast_fp32():
        a = torch.randn(M, K, device=DEVICE)
        torch.mm(a, a.new_ones(K, N))
    if not my_ops.fast_fp32.report().taken:
        pytest.skip("all products of this GPU are torch's")


def counts():
    return {(op, *rest): times for op, *rest, times in my_ops.fast_fp32.report().taken}


@contextlib.contextmanager
def takes(*ops):
    """In this context our kernels compute the products of these ops."""
    before = counts()
    yield
    found = [
        op
        for (op, *rest), times in counts().items()
        for _ in range(times - before.get((op, *rest), 0))
    ]
    assert sorted(found) == sorted(ops)


def left(reason):
    return sum(n for why, n in my_ops.fast_fp32.report().left.items() if why.startswith(reason))


@contextlib.contextmanager
def leaves(reason, times):
    """In this context torch's kernels compute the products: this many, for this reason."""
    with takes():
        before = left(reason)
        yield
        assert left(reason) == before + times


def randn(*sizes):
    return torch.randn(sizes, device=DEVICE)


def assert_accurate(found, a, b, added=0.0):
    """found: a @ b + added."""
    exact = a.double() @ b.double() + added
    scale = a.double().abs() @ b.double().abs() + abs(added)
    assert found.dtype == torch.float32
    assert ((found - exact).abs() <= LIMIT * scale).all()


# --------------------------------------------------------------------------------------- each op


@pytest.mark.parametrize("op", _fast_fp32.OPS)
def test_what_replaces_torchs_kernels(op):
    """Python has what torch itself overrides in Python, as well as all ops without the module."""
    in_python = _fast_fp32._is_torchs_python(KERNELS_BEFORE[op])
    compiled = OVERRIDES.exists() and not in_python
    file, _, _ = _fast_fp32._registered_at(op, KEY).name.partition(":")
    assert file == ("fast_fp32.cpp" if compiled else "_fast_fp32.py")


@pytest.mark.parametrize("a_transposed", [False, True])
@pytest.mark.parametrize("b_transposed", [False, True])
def test_mm_and_bmm(a_transposed, b_transposed):
    a = randn(BATCH, K, M).mT if a_transposed else randn(BATCH, M, K)
    b = randn(BATCH, N, K).mT if b_transposed else randn(BATCH, K, N)
    with takes("mm", "bmm"):
        one, all_ = torch.mm(a[0], b[0]), torch.bmm(a, b)
    assert_accurate(one, a[0], b[0])
    assert_accurate(all_, a, b)
    assert one.is_contiguous()
    assert all_.is_contiguous()


@pytest.mark.parametrize("added", [(N,), (1, N), (M, 1), (M, N), (1, 1), ()])
def test_addmm(added):
    added, a, b = randn(*added), randn(M, K), randn(K, N)
    with takes("addmm"):
        found = torch.addmm(added, a, b)
    assert_accurate(found, a, b, added.double())


def test_scalars_of_one():
    added, a, b = randn(N), randn(BATCH, M, K), randn(BATCH, K, N)
    with takes("addmm", "baddbmm"):
        found = torch.addmm(added, a[0], b[0], beta=1.0, alpha=1)
        assert_accurate(found, a[0], b[0], added.double())
        found = torch.baddbmm(added, a, b, beta=1, alpha=1.0)
    assert_accurate(found, a, b, added.double())


@pytest.mark.parametrize("added", [(N,), (BATCH, 1, N), (M, 1), (BATCH, M, N), (BATCH, 1, 1)])
def test_baddbmm(added):
    added, a, b = randn(*added), randn(BATCH, M, K), randn(BATCH, K, N)
    with takes("baddbmm"):
        found = torch.baddbmm(added, a, b)
    assert_accurate(found, a, b, added.double())


def test_baddbmm_of_a_repeated_matrix():
    added, a, b = randn(BATCH, M, N), randn(BATCH, M, K), randn(K, N).expand(BATCH, K, N)
    with takes("baddbmm"):
        found = torch.baddbmm(added, a, b)
    assert_accurate(found, a, b, added.double())
    with takes("bmm"):
        assert_accurate(torch.bmm(a, b), a, b)


def test_every_other_stride_of_what_is_added():
    added, a, b = randn(2 * N)[::2], randn(M, K), randn(K, N)
    with takes("addmm"):
        assert_accurate(torch.addmm(added, a, b), a, b, added.double())
    added = randn(N, M).T
    with takes("addmm"):
        assert_accurate(torch.addmm(added, a, b), a, b, added.double())


def test_what_torch_makes_of_them():
    x, weight, bias = randn(BATCH, M, K), randn(N, K), randn(N)
    with takes("mm", "mm", "bmm", "bmm"):
        found = [
            x @ weight.T,
            F.linear(x[0], weight),
            torch.einsum("bmk,bnk->bmn", x, weight.expand(BATCH, N, K)),
            torch.matmul(x, weight.T.expand(BATCH, K, N).contiguous()),
        ]
    for i, result in enumerate(found):
        assert_accurate(result, x[0] if i == 1 else x, weight.T)
    with takes("addmm", "addmm"):
        found = [F.linear(x[0], weight, bias), F.linear(x, weight, bias)]
    assert_accurate(found[0], x[0], weight.T, bias.double())
    assert_accurate(found[1], x, weight.T, bias.double())


def test_out():
    a, b, added = randn(BATCH, M, K), randn(BATCH, K, N), randn(N)
    one, all_ = (torch.full((*s, M, N), float("nan"), device=DEVICE) for s in ((), (BATCH,)))
    with takes("mm", "bmm", "addmm", "baddbmm"):
        assert torch.mm(a[0], b[0], out=one) is one
        assert_accurate(one, a[0], b[0])
        assert torch.bmm(a, b, out=all_) is all_
        assert_accurate(all_, a, b)
        assert torch.addmm(added, a[0], b[0], out=one) is one
        assert_accurate(one, a[0], b[0], added.double())
        assert torch.baddbmm(added, a, b, out=all_) is all_
        assert_accurate(all_, a, b, added.double())


def test_gradients():
    layer = torch.nn.Linear(K, N, device=DEVICE)
    x = randn(M, K).requires_grad_()
    with takes("addmm", "mm", "mm"):
        y = layer(x)
        y.backward(torch.ones_like(y))
    assert_accurate(x.grad, torch.ones_like(y), layer.weight)
    assert_accurate(layer.weight.grad, torch.ones_like(y).T, x)
    assert_accurate(y, x, layer.weight.T, layer.bias.double())


def test_func_and_inference_mode():
    a, b = randn(BATCH, M, K), randn(K, N)
    with takes("mm"), torch.inference_mode():
        found = torch.mm(a[0], b)
        assert found.is_inference()
    assert_accurate(found, a[0], b)
    with takes("bmm"):
        assert_accurate(torch.func.vmap(torch.mm)(a, b.expand(BATCH, K, N).contiguous()), a, b)


# ------------------------------------------------------------------------------------ what is left


def test_what_stays_with_torch():
    a, b, added = randn(M, K), randn(K, N), randn(N)
    small = randn(32, 32)
    with leaves(OTHER, 1):
        torch.mm(a, b, out=randn(N, M).T)
    with takes():
        before = my_ops.fast_fp32.report().left
        torch.mm(a.double(), b.double())
        torch.mm(a.bfloat16(), b.bfloat16())
        torch.mm(randn(M * K, 1), randn(1, N))
        torch.mm(small, small)
        assert my_ops.fast_fp32.report().left == before
        assert_accurate(torch.mm(small, small), small, small)
        assert_accurate(torch.addmm(small, small, small), small, small, small.double())
        torch.addmm(added.bfloat16(), a.bfloat16(), b.bfloat16())
        torch.addmm(added + 0j, a + 0j, b + 0j, alpha=1j)
        torch.mm(a[:, :0], b[:0])
        torch.mm(a.to_sparse(), b)
        with torch.autocast(DEVICE, torch.bfloat16):
            assert torch.mm(a, b).dtype == torch.bfloat16
    with takes("mm"):
        negative = torch.mm(torch._neg_view(a), b)
    assert_accurate(negative, -a, b)


@pytest.mark.parametrize("into_out", [False, True])
@pytest.mark.parametrize("scalars", [(0.5, 1), (1, 2), (2, 0.5), (0, 1), (1, 0), (True, 1)])
@pytest.mark.parametrize("op", ["addmm", "baddbmm"])
def test_other_scalars_stay_with_torch(op, scalars, into_out):
    a, b, added = randn(BATCH, M, K), randn(BATCH, K, N), randn(N)
    if op == "addmm":
        a, b = a[0], b[0]
    beta, alpha = scalars
    more = {"out": a.new_empty(*a.shape[:-1], N)} if into_out else {}
    before = counts()
    found = getattr(torch, op)(added, a, b, beta=beta, alpha=alpha, **more)
    assert_accurate(found, float(alpha) * a, b, float(beta) * added.double())
    assert counts() == before or beta is True


def test_nothing_else_holds_a_result():
    a, b = randn(BATCH, M, K), randn(BATCH, K, N)
    one, all_ = a.new_empty(M, N), a.new_empty(BATCH, M, N)
    with takes("mm", "bmm", "addmm", "baddbmm", "mm", "bmm", "addmm", "baddbmm"):
        results = [
            *(torch.mm(a[0], b[0]), torch.bmm(a, b)),
            *(torch.addmm(b[0, 0], a[0], b[0]), torch.baddbmm(b[0, 0], a, b)),
        ]
        torch.mm(a[0], b[0], out=one)
        torch.bmm(a, b, out=all_)
        torch.addmm(b[0, 0], a[0], b[0], out=one)
        torch.baddbmm(b[0, 0], a, b, out=all_)
    assert {t._use_count() for t in (a, b, one, all_, *results)} == {1}


@pytest.mark.skipif(
    not hasattr(torch.Tensor, "refine_names") or not OVERRIDES.exists(),
    reason="names are of torch before 2.13, whose kernels in Python do not know them",
)
@pytest.mark.filterwarnings("ignore:Named tensors")
def test_named_dimensions():
    a, b = randn(M, K).refine_names("rows", "k"), randn(K, N).refine_names("k", "columns")
    with takes():
        assert torch.mm(a, b).names == ("rows", "columns")
        assert torch.addmm(randn(M, N), a, b).names == ("rows", "columns")
        with pytest.raises(RuntimeError, match="names"):
            torch.mm(a, b.rename("k", "rows"))


def test_out_as_torch_alone_takes_it():
    a, b = randn(M, K), randn(K, N)
    columns = randn(N, M).T
    with takes():
        torch.mm(a, b, out=columns)
        assert_accurate(columns, a, b)
        with pytest.warns(UserWarning, match="resized"):
            torch.mm(a, b, out=randn(3))
        added = randn(M, N)
        before = added.clone()
        torch.addmm(added, a, b, out=added)
        assert_accurate(added, a, b, before.double())


def test_errors_are_torchs():
    for name, call in wrong_calls().items():
        assert said(call) == BEFORE[name], name
    my_ops.fast_fp32(False)
    for name, call in wrong_calls().items():
        assert said(call) == BEFORE[name], name


@ON_CPU
def test_torch_forms_what_ours_cannot():
    refuse = ctypes.CDLL(MODULE).refuse
    a, b = randn(M, K), randn(K, N)
    for reason, order in ((PLAN, 1), (PRECISION, 2), (FAILED, -2)):
        refuse(order)
        try:
            with leaves(reason, 2):
                assert_accurate(torch.mm(a, b), a, b)
                assert_accurate(torch.addmm(b[0], a, b), a, b, b[0].double())
        finally:
            refuse(-1)


@ON_CUDA
def test_hands_off_while_tf32_is_allowed():
    a, b = randn(M, K), randn(K, N)
    matmul = torch.backends.cuda.matmul
    for allow in (
        lambda on: setattr(matmul, "allow_tf32", on),
        lambda on: setattr(matmul, "fp32_precision", "tf32" if on else "ieee"),
    ):
        allow(True)
        try:
            with leaves(PRECISION, 1):
                torch.mm(a, b)
        finally:
            allow(False)
    with takes("mm"):
        torch.mm(a, b)
