"""Checks of complex products under the switch, which test_fast_fp32.py runs with those of
fast_fp32_checks.py."""

import ctypes
import itertools

import pytest
import torch
from accuracy import CONTRACT, FAMILIES, MEAN_SHARE, WORST_SHARE
from fast_fp32_checks import (
    BATCH,
    DEVICE,
    FAILED,
    LIMIT,
    MODULE,
    ON_CPU,
    ON_CUDA,
    OTHER,
    PLAN,
    PRECISION,
    K,
    M,
    N,
    gains,  # noqa: F401
    leaves,
    said,
    switched_on,  # noqa: F401
    takes,
)

import my_ops


def crandn(*sizes):
    return torch.randn(sizes, dtype=torch.complex64, device=DEVICE)


def pairs(t):
    """(..., 2) in float64, of any conjugate."""
    return torch.view_as_real(t.resolve_conj().to(torch.complex128))


def scales(a, b):
    """Of the real and the imaginary part of a @ b: the sums of magnitudes."""
    a, b = pairs(a).abs(), pairs(b).abs()
    (re_a, im_a), (re_b, im_b) = a.unbind(-1), b.unbind(-1)
    return torch.stack((re_a @ re_b + im_a @ im_b, re_a @ im_b + im_a @ re_b), -1)


def assert_accurate(found, a, b, added=None):
    """Each part of found: a @ b + added."""
    exact, scale = a.to(torch.complex128) @ b.to(torch.complex128), scales(a, b)
    if added is not None:
        exact, scale = exact + added, scale + pairs(added).abs()
    assert found.dtype == torch.complex64
    assert ((pairs(found) - pairs(exact)).abs() <= LIMIT * scale).all()


def swapped(*sizes):
    *batch, rows, columns = sizes
    return crandn(*batch, columns, rows)


LAYOUTS = {
    "plain": crandn,
    "conjugate": lambda *sizes: crandn(*sizes).conj(),
    "transposed": lambda *sizes: swapped(*sizes).mT,
    "adjoint": lambda *sizes: swapped(*sizes).mH,
    "every other column": lambda *sizes: crandn(*sizes[:-1], 2 * sizes[-1])[..., ::2],
    "part of a wider one": lambda *sizes: crandn(*sizes[:-1], sizes[-1] + 3)[..., 3:],
}


@pytest.mark.parametrize(("a", "b"), list(itertools.product(LAYOUTS, LAYOUTS)))
def test_mm_and_bmm(a, b):
    a, b = LAYOUTS[a](BATCH, M, K), LAYOUTS[b](BATCH, K, N)
    with takes("mm", "bmm"):
        one, all_ = torch.mm(a[0], b[0]), torch.bmm(a, b)
    assert_accurate(one, a[0], b[0])
    assert_accurate(all_, a, b)
    for found in (one, all_):
        assert found.is_contiguous()
        assert not found.is_conj()


ADDED = [(N,), (1, N), (M, N)]
BATCH_ADDED = [(N,), (BATCH, 1, N), (M, N), (BATCH, M, N)]


@pytest.mark.parametrize("added", ADDED)
def test_addmm(added):
    added, a, b = crandn(*added), crandn(M, K), crandn(K, N).conj()
    with takes("addmm", "addmm"):
        assert_accurate(torch.addmm(added, a, b), a, b, added)
        assert_accurate(torch.addmm(added, a, b, beta=1 + 0j, alpha=1.0), a, b, added)


@pytest.mark.parametrize("added", BATCH_ADDED)
@pytest.mark.parametrize("repeated", [False, True])
def test_baddbmm(added, repeated):
    added, a = crandn(*added), crandn(BATCH, M, K)
    b = crandn(K, N).expand(BATCH, K, N) if repeated else crandn(BATCH, K, N)
    # One product of all rows, to which no part of them repeats.
    other = repeated and added.shape in [(BATCH, 1, N), (M, N)]
    with leaves(OTHER, 1) if other else takes("baddbmm"):
        assert_accurate(torch.baddbmm(added, a, b), a, b, added)


def test_conjugates_of_what_is_added_and_of_out():
    """torch's, or ours once torch has conjugated them."""
    added, a, b = crandn(M, N).conj(), crandn(M, K), crandn(K, N)
    assert_accurate(torch.addmm(added, a, b), a, b, added)
    out = crandn(M, N)
    assert torch.mm(a, b, out=out.conj()).is_conj()
    assert_accurate(out.conj(), a, b)


@pytest.mark.parametrize("layout", ["plain", "conjugate", "transposed"])
def test_repeated_matrices(layout):
    once, all_ = LAYOUTS[layout](M, K).expand(BATCH, M, K), crandn(BATCH, K, N)
    with takes("bmm", "bmm"):
        assert_accurate(torch.bmm(once, all_), once, all_)
        all_, once = crandn(BATCH, M, K), LAYOUTS[layout](K, N).expand(BATCH, K, N)
        assert_accurate(torch.bmm(all_, once), all_, once)


@pytest.mark.parametrize(
    "added",
    [
        lambda: crandn(M, 1),
        lambda: crandn(1, 1),
        lambda: crandn(2 * N)[::2],
        lambda: crandn(N, M).T,
    ],
)
def test_added_that_stays_with_torch(added):
    added, a, b = added(), crandn(M, K), crandn(K, N)
    with leaves(OTHER, 1):
        assert_accurate(torch.addmm(added, a, b), a, b, added)


@ON_CPU  # the plan leaves it to torch
def test_one_column():
    a, b = crandn(M, 160 * K), crandn(160 * K, 1)
    added = crandn(M, 1)
    with takes("addmm"):
        assert_accurate(torch.addmm(added, a, b), a, b, added)


@pytest.mark.parametrize("scalars", [(1, 1j), (1j, 1), (0.5, 1), (0, 1), (1, 2 - 1j)])
@pytest.mark.parametrize("into_out", [False, True])
def test_other_scalars_stay_with_torch(scalars, into_out):
    beta, alpha = scalars
    a, b, added = crandn(BATCH, M, K), crandn(BATCH, K, N), crandn(N)
    exact = [alpha * a, b, beta * added]
    with takes():
        one = {"out": crandn(M, N)} if into_out else {}
        found = torch.addmm(added, a[0], b[0], beta=beta, alpha=alpha, **one)
        assert_accurate(found, exact[0][0], b[0], exact[2])
        all_ = {"out": crandn(BATCH, M, N)} if into_out else {}
        found = torch.baddbmm(added, a, b, beta=beta, alpha=alpha, **all_)
        assert_accurate(found, *exact)


def test_out():
    a, b, added = crandn(BATCH, K, M).mH, crandn(BATCH, N, K).mH, crandn(N)
    one, all_ = (torch.full_like(crandn(*s, M, N), float("nan")) for s in ((), (BATCH,)))
    with takes("mm", "bmm", "addmm", "baddbmm"):
        assert torch.mm(a[0], b[0], out=one) is one
        assert_accurate(one, a[0], b[0])
        assert torch.bmm(a, b, out=all_) is all_
        assert_accurate(all_, a, b)
        assert torch.addmm(added, a[0], b[0], out=one) is one
        assert_accurate(one, a[0], b[0], added)
        assert torch.baddbmm(added, a, b, out=all_) is all_
        assert_accurate(all_, a, b, added)
    assert {t._use_count() for t in (a, b, one, all_)} == {1}


def test_out_as_torch_alone_takes_it():
    a, b, added = crandn(M, K), crandn(K, N), crandn(M, N)
    before = added.clone()
    columns = crandn(N, M).T
    with takes():
        assert_accurate(torch.mm(a, b, out=columns), a, b)
        assert_accurate(torch.addmm(added, a, b, out=added), a, b, before)


def test_gradients():
    """They are products of conjugates."""
    inputs = [crandn(N), crandn(BATCH, M, K), crandn(BATCH, K, N)]
    inputs = [t.requires_grad_() for t in inputs]
    grad = crandn(BATCH, M, N)
    with takes("baddbmm", "bmm", "bmm"):
        found = torch.autograd.grad(torch.baddbmm(*inputs), inputs, grad)
    assert_accurate(found[1], grad, inputs[2].detach().mH)
    assert_accurate(found[2], inputs[1].detach().mH, grad)
    torch.testing.assert_close(found[0], grad.sum((0, 1)))
    with takes("mm", "mm", "mm"):
        y = torch.mm(inputs[1][0], inputs[2][0])
        found = torch.autograd.grad(y, inputs[1:], grad[0])
    assert_accurate(found[0][0], grad[0], inputs[2][0].detach().mH)
    assert_accurate(found[1][0], inputs[1][0].detach().mH, grad[0])


def test_what_torch_makes_of_them():
    x, weight = crandn(BATCH, M, K), crandn(N, K)
    with takes("mm", "mm", "bmm"):
        assert_accurate(x @ weight.T, x, weight.T)
        assert_accurate(torch.nn.functional.linear(x, weight.conj()), x, weight.mH)
        found = torch.einsum("bmk,bnk->bmn", x, weight.expand(BATCH, N, K))
    assert_accurate(found, x, weight.T)


def test_what_stays_with_torch():
    a, b, small = crandn(M, K), crandn(K, N), crandn(32, 32)
    with takes():
        before = my_ops.fast_fp32.report().left
        torch.mm(a.to(torch.complex128), b.to(torch.complex128))
        assert_accurate(torch.mm(small, small.mH), small, small.mH)
        torch.mm(crandn(256 * M, 1), crandn(1, N))
        assert (torch.mm(a[:, :0], b[:0]) == 0).all()
        assert torch.mm(a[:0], b).shape == (0, N)
        assert my_ops.fast_fp32.report().left == before
    with takes("mm"):
        assert_accurate(torch.mm(torch._neg_view(a), b), -a, b)


def test_a_float_product_of_a_part_of_complex_numbers():
    a, b = crandn(M, K), crandn(K, N)
    with takes("mm", "mm"):
        real, imag = torch.mm(a.real, b.real), torch.mm(a.conj().imag, b.imag)
    for found, (left, right) in ((real, (a.real, b.real)), (imag, (-a.imag, b.imag))):
        exact, scale = left.double() @ right.double(), left.double().abs() @ right.double().abs()
        assert ((found - exact).abs() <= LIMIT * scale).all()


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan"), 1e30])
def test_values_that_are_not_finite(value):
    a, b = crandn(M, K), crandn(K, N)
    torch.view_as_real(a)[1, 2, 0] = torch.view_as_real(b)[3, 4, 1] = value
    with takes("mm"):
        found = torch.mm(a, b.conj())
    (re_a, im_a), (re_b, im_b) = pairs(a).unbind(-1), pairs(b.conj()).unbind(-1)
    exact = torch.stack((re_a @ re_b - im_a @ im_b, re_a @ im_b + im_a @ re_b), -1)
    found, exact = torch.view_as_real(found), exact.float()
    finite = exact.isfinite()
    torch.testing.assert_close(found[~finite], exact[~finite], equal_nan=True, rtol=0, atol=0)
    assert found[finite].isfinite().all()


def test_errors_are_torchs():
    a, b = crandn(M, K), crandn(K, N)
    wrong = {
        "mm": lambda: torch.mm(a, b[1:]),
        "mm of two dtypes": lambda: torch.mm(a, b.real),
        "mm of two dtypes, the other way": lambda: torch.mm(a.real, b),
        "addmm of two dtypes": lambda: torch.addmm(b[0].real, a, b),
        "mm, out of another dtype": lambda: torch.mm(a, b, out=torch.empty(M, N, device=DEVICE)),
        "addmm of another shape": lambda: torch.addmm(b[0, :-1], a, b),
        "baddbmm of matrices": lambda: torch.baddbmm(a, a, b),
    }
    with takes():
        ours = {name: said(call) for name, call in wrong.items()}
    my_ops.fast_fp32(False)
    assert ours == {name: said(call) for name, call in wrong.items()}


@ON_CPU
def test_torch_forms_what_ours_cannot():
    refuse = ctypes.CDLL(MODULE).refuse
    a, b = crandn(K, M).mH, crandn(K, N)
    for reason, order in ((PLAN, 1), (PRECISION, 2), (FAILED, -2)):
        refuse(order)
        try:
            with leaves(reason, 2):
                assert_accurate(torch.mm(a, b), a, b)
                assert_accurate(torch.addmm(b[0], a, b), a, b, b[0])
        finally:
            refuse(-1)


# ------------------------------------------------------------------------------------- on a GPU


@ON_CUDA
def test_hands_off_while_tf32_is_allowed():
    a, b = crandn(M, K), crandn(K, N)
    matmul = torch.backends.cuda.matmul
    before, matmul.allow_tf32 = matmul.allow_tf32, True
    try:
        with leaves(PRECISION, 1):
            torch.mm(a, b)
    finally:
        matmul.allow_tf32 = before


@ON_CUDA
def test_cuda_graph():
    a, b = crandn(K, M).mH, crandn(K, N)
    torch.mm(a, b)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with takes("mm"), torch.cuda.graph(graph):
        found = torch.mm(a, b)
    b.copy_(crandn(K, N))
    graph.replay()
    assert_accurate(found, a, b)


def mean_and_worst(found, a, b):
    exact = pairs(a.to(torch.complex128) @ b.to(torch.complex128))
    error = (pairs(found) - exact).abs() / scales(a, b).clamp(min=1e-300)
    return [(part.mean().item(), part.max().item()) for part in error.unbind(-1)]


SIZES = [(1024, 1024, 1024), (1000, 1003, 1001), (2048, 2048, 2048), (1024, 8192, 512)]


def complex_rows(family, rows, k):
    """(rows, k), whose pairs are rows of 2k of a family."""
    real = FAMILIES[family](rows, 2 * k, DEVICE)
    if family == "scaled-rows":
        real = torch.ldexp(real, torch.tensor(-4, device=DEVICE))  # no sum of 2k is infinite
    return torch.view_as_complex(real.view(rows, k, 2))


@ON_CUDA
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("family", [*CONTRACT, "opposed parts", "opposed along k"])
def test_errors_are_at_most_those_of_cublas(family, size):
    """Of real and imaginary parts, for which the sums of magnitudes count."""
    m, k, n = size
    left = family if family in CONTRACT else "normal"
    right = "normal" if left == "one-hot" else left
    a, b = complex_rows(left, m, k), complex_rows(right, n, k).T
    if family == "opposed parts":
        a.real.mul_(2**12), b.imag.mul_(2**12)
    if family == "opposed along k":
        units = torch.randint(-6, 7, (k,), device=DEVICE)
        a, b = a * torch.exp2(units), b * torch.exp2(-units)[:, None]
    with takes("mm"):
        ours = torch.mm(a, b)
    with my_ops.fast_fp32(False):
        theirs = torch.mm(a, b)
    for part, own, torchs in zip(
        ("real", "imaginary"), mean_and_worst(ours, a, b), mean_and_worst(theirs, a, b), strict=True
    ):
        message = f"{part}: ours {own}, torch.mm's {torchs} (mean, maximum)"
        assert own[0] <= MEAN_SHARE * torchs[0], message
        assert own[1] <= WORST_SHARE * torchs[1], message
