"""float32 products beside cuBLAS with TF32: where torch allows it, and with precision "high"."""

import itertools
import random

import pytest
import torch
from accuracy import (
    CONTRACT,
    FAMILIES,
    MEAN_SHARE,
    WORST_SHARE,
    check,
    errors,
    label,
    mean_share,
    operands,
    opposed,
)

import my_ops

TF32 = 2.0**-9  # two factors of 11 bits, truncated


def while_cublas_uses_tf32(call):
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        return call()
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


# cuBLAS takes these otherwise: few rows, few columns, short k, sizes in between, many blocks.
CUBLAS_SIZES = [(1, 4096, 4096), (64, 4096, 4096), (4096, 1100, 1), (7, 3000, 500), (20, 50001, 40)]
CUBLAS_SIZES += [(1000, k, 1024) for k in (1, 7, 16, 33, 64, 95, 96)]
CUBLAS_SIZES += [(300, 300, 300), (96, 192, 1000), (257, 2000, 130), (90, 4000, 3000)]
CUBLAS_SIZES += [(20, 100, 5000), (500, 120, 800), (16, 512, 4096), (2000, 150, 16)]
CUBLAS_SIZES += [(700_000, 5, 70), (300_000, 40, 70), (70, 40, 300_000), (2, 5, 9_000_000)]


@pytest.mark.parametrize("size", CUBLAS_SIZES)
@pytest.mark.parametrize("family", CONTRACT)
def test_highest_while_cublas_uses_tf32(family, size, strict_cublas):
    layout = random.choice(["NN", "NT", "TN", "TT"])
    a, b = operands(family, size, "cuda", layout)
    got = while_cublas_uses_tf32(lambda: my_ops.gemm(a, b, precision="highest"))
    check(got, a, b, label(family, size, layout), mean_share(size[1]), WORST_SHARE)


def test_highest_of_other_operands_while_cublas_uses_tf32(strict_cublas):
    a, b = torch.randn(3, 200, 300, device="cuda"), torch.randn(3, 300, 150, device="cuda")
    x, weight = torch.randn(70, 500, device="cuda"), torch.randn(3000, 500, device="cuda")
    residual = torch.randn(70, 3000, device="cuda")
    out = torch.empty(3000, 70, device="cuda").mT

    def call():
        assert errors(torch.mm(x, weight.mT), x, weight.mT)[0] > 1e-6  # TF32's error
        batches = my_ops.gemm(a, b, precision="highest")
        my_ops.gemm(x, weight.mT, out=out, precision="highest")
        y = my_ops.linear(
            x, weight, None, activation="relu", residual=residual, precision="highest"
        )
        return batches, y

    batches, y = while_cublas_uses_tf32(call)
    for z in range(3):
        check(batches[z], a[z], b[z], f"batch {z}", MEAN_SHARE, WORST_SHARE)
    check(out, x, weight.mT, "out=, by columns", MEAN_SHARE, WORST_SHARE)
    want = (x.double() @ weight.double().mT).relu() + residual
    sizes = x.double().abs() @ weight.double().abs().mT + residual.abs()
    assert ((y - want).abs() <= 2.0**-21 * sizes).all()


# One fp16 product, three of them where cuBLAS has more than TF32, and cuBLAS's TF32.
HIGH_SIZES = [(2048, 2048, 2048), (2000, 3001, 1003), (4096, 1024, 4096), (700, 1200, 800)]
HIGH_SIZES += [(100, 300, 200), (1000, 16384, 1024), (1024, 1100, 1024), (1003, 2500, 601)]
HIGH_SHARE = 1.001  # both round to 11 bits; the rest is chance


@pytest.mark.parametrize("size", HIGH_SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_high(family, size, strict_cublas):
    check_high(family, size, random.choice(["NN", "NT", "TN", "TT"]))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("family", FAMILIES)
def test_high_of_random_shapes(family, seed, strict_cublas):
    choose = random.Random(f"high {family} {seed}")
    size = tuple(round(2 ** choose.uniform(9, 12.5)) for _ in range(3))
    if choose.random() < 0.5:
        size = tuple(-(-x // 64) * 64 for x in size)
    check_high(family, size, choose.choice(["NN", "NT", "TN", "TT"]))


@pytest.mark.parametrize("bits", [6, 12, 24])
@pytest.mark.parametrize("size", HIGH_SIZES)
def test_high_of_opposed_magnitudes(size, bits, strict_cublas):
    """Features in different units, and weights in the inverse ones."""
    for layout in ("NN", "NT", "TN", "TT"):
        a, b = opposed(*operands("normal", size, "cuda", layout), bits)
        check_high_of(a, b, label(f"opposed within 2^{2 * bits}", size, layout))


def check_high(family, size, layout):
    check_high_of(*operands(family, size, "cuda", layout), label(family, size, layout))


def check_high_of(a, b, what):
    """The error is not larger than that of cuBLAS with TF32."""
    theirs = errors(while_cublas_uses_tf32(lambda: torch.mm(a, b)), a, b)
    for got in (
        my_ops.gemm(a, b, precision="high"),
        while_cublas_uses_tf32(lambda: my_ops.gemm(a, b, precision="high")),
        while_cublas_uses_tf32(lambda: my_ops.gemm(a, b)),
    ):
        ours = errors(got, a, b)
        message = f"high, {what}: ours {ours}, TF32's {theirs}"
        assert ours[0] <= HIGH_SHARE * theirs[0], f"mean, {message}"
        assert ours[1] <= WORST_SHARE * theirs[1], f"maximum, {message}"


@pytest.mark.parametrize("batch", [None, 3])
@pytest.mark.parametrize("sizes", [(400, 500, 300), (1, 9000, 600), (600, 9000, 1), (600, 1, 900)])
def test_high_of_any_layout(sizes, batch, strict_cublas):
    """cuBLAS takes these, in TF32 although torch does not allow it, unless out is by columns."""
    m, k, n = sizes
    batches = [] if batch is None else [batch]

    def laid_out(rows, columns, how):
        x = torch.randn(*batches, rows, columns, device="cuda")
        if how == "by columns":
            return x.mT.contiguous().mT
        if how == "spaced":
            return x.repeat_interleave(2, -1)[..., ::2]
        return x[..., :1].expand_as(x) if how == "repeated" else x

    layouts = ("by rows", "by columns", "spaced", "repeated")
    for how_a, how_b in itertools.product(layouts, repeat=2):
        a, b = laid_out(m, k, how_a), laid_out(k, n, how_b)
        size = a.double().abs() @ b.double().abs()
        whole = torch.full((*batches, m, n + 3), 7.0, device="cuda")
        for out in (None, whole[..., 1:-2], torch.empty(*batches, n, m, device="cuda").mT):
            got = my_ops.gemm(a, b, out=out, precision="high")
            error = (got.double() - a.double() @ b.double()).abs()
            assert (error <= TF32 * size).all()
            if min(m, k, n) > 1 and out is None:
                assert error.max() > 2.0**-20 * size.mean() / k**0.5  # not float's accuracy
        whole[..., 1:-2].fill_(7)
        assert (whole == 7).all()
    assert not torch.backends.cuda.matmul.allow_tf32


@pytest.mark.parametrize("size", [(2048, 2048, 2048), (2000, 3001, 1003), (300, 4096, 4096)])
def test_high_prepacked(size, strict_cublas):
    x, weight_t = operands("uniform", size, "cuda", "NT")
    theirs = errors(while_cublas_uses_tf32(lambda: torch.mm(x, weight_t)), x, weight_t)
    packed = my_ops.prepack(weight_t.mT)
    for got in (
        my_ops.linear(x, packed, precision="high"),
        while_cublas_uses_tf32(lambda: my_ops.linear(x, packed)),
    ):
        ours = errors(got, x, weight_t)
        message = f"prepacked, high, {label('uniform', size, 'NT')}: {ours}, TF32's {theirs}"
        assert ours[0] <= HIGH_SHARE * theirs[0], f"mean, {message}"
        assert ours[1] <= WORST_SHARE * theirs[1], f"maximum, {message}"
