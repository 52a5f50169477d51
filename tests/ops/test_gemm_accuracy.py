"""How accurate float32 products are, compared with torch.mm's in float32: accuracy.py."""

import math
import random

import pytest
import torch
from accuracy import (
    CONTRACT,
    FAMILIES,
    MEAN_SHARE,
    WORST_SHARE,
    check,
    check_repeated,
    label,
    mean_share,
    operands,
    opposed,
)
from fp32_sm80 import gemm_fp32_sm80
from test_cuda_kernels import FEW_ROWS, SMALL_OUTPUTS

import my_ops

# For normal data on CUDA, where cuBLAS does not slice k to keep the device busy.
LONG_K, LONG_K_MEAN_SHARE = 1024, 1 / 3

KS = [1, 7, 16, 33, 64, 257, 1024, 4096, 16384]
INVERSE_KS = [64, 257, 1024, 2048]


def inverse_operands(k, device):
    """Products that cancel to almost nothing off the diagonal."""
    a = torch.randn(k, k, dtype=torch.float64, device=device) / k**0.5
    a.diagonal().add_(2)  # far from singular
    return a.float(), a.inverse().float()


# ---------------------------------------------------------------------------------- large products

# Where cuBLAS does not slice k, or into so few slices that our error on normal data stays below a
# third of its error.
SIZES = [*((1000, k, 1024) for k in KS), (1000, 1003, 1001)]  # m, k, n
PRODUCTS = [(size, layout) for size in SIZES for layout in ("NN", "NT")]
SIZES = [*((2048, k, 2048) for k in KS), (4096, 1024, 4096), (4096, 4096, 4096)]
PRODUCTS += [(size, layout) for size in SIZES for layout in ("NN", "NT", "TN", "TT")]


@pytest.mark.parametrize(("size", "layout"), PRODUCTS)
@pytest.mark.parametrize("family", CONTRACT)
def test_gemm(family, size, layout, strict_cublas):
    a, b = operands(family, size, "cuda", layout)
    share = mean_share(size[1])
    if family == "normal" and size[1] >= LONG_K:
        share = LONG_K_MEAN_SHARE
    check(my_ops.gemm(a, b), a, b, label(family, size, layout), share, WORST_SHARE)


RANDOM_BITS = (6, 12.5), (4, 14.2), (6, 12.5)  # of m, k, n


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("family", CONTRACT)
def test_gemm_of_random_shapes(family, seed, strict_cublas):
    """In many of these shapes cuBLAS slices k: then its sums are shorter and its error smaller."""
    choose = random.Random(f"{family} {seed}")
    while True:
        size = tuple(round(2 ** choose.uniform(*bits)) for bits in RANDOM_BITS)
        if choose.random() < 0.5:
            size = tuple(-(-x // 64) * 64 for x in size)
        if math.prod(size) < 2**36:
            break
    layout = choose.choice(["NN", "NT", "TN", "TT"])
    a, b = operands(family, size, "cuda", layout)
    what = label(family, size, layout)
    check(my_ops.gemm(a, b), a, b, what, mean_share(size[1]), WORST_SHARE)


@pytest.mark.parametrize("layout", ["TN", "TT"])
@pytest.mark.parametrize("family", ["normal", "exp4"])
def test_gemm_transposed_a(family, layout, strict_cublas):
    size = 1000, 1024, 1024
    a, b = operands(family, size, "cuda", layout)
    what = label(family, size, layout)
    check(my_ops.gemm(a, b), a, b, what, MEAN_SHARE, WORST_SHARE)


@pytest.mark.parametrize("family", CONTRACT)
def test_gemm_of_batches(family, strict_cublas):
    size = 500, 1000, 600
    pairs = [operands(family, size, "cuda", layout) for layout in ("NN", "NT", "NN")]
    got = my_ops.gemm(torch.stack([a for a, _ in pairs]), torch.stack([b for _, b in pairs]))
    for product, (a, b) in zip(got, pairs, strict=True):
        check(product, a, b, f"batch, {label(family, size)}", MEAN_SHARE, WORST_SHARE)


@pytest.mark.parametrize("layout", ["NN", "TN"])
@pytest.mark.parametrize("k", [257, 4096])
def test_gemm_full_range(k, layout, strict_cublas):
    size = 1000, k, 1024
    a, b = operands("scaled-elements", size, "cuda", layout)
    what = label("scaled-elements", size, layout)
    check(my_ops.gemm(a, b), a, b, what, MEAN_SHARE, WORST_SHARE)


EXTREME_SIZES = [(1000, 4096, 1024), (2048, 1024, 2048), (3072, 8192, 1024), (300, 5000, 2000)]
EXTREME_SIZES += [(256, 3072, 1024), (700, 1100, 700)]  # k in slices; the smallest tile


@pytest.mark.parametrize("layout", ["NN", "NT", "TN"])
@pytest.mark.parametrize("size", EXTREME_SIZES)
def test_gemm_extreme_range(size, layout, strict_cublas):
    """Rows whose magnitudes span more than bf16 parts hold in every product."""
    m, k, n = size
    a, b = operands("normal", size, "cuda", layout)
    a.copy_(torch.ldexp(a, torch.randint(-110, 11, (m, k), device="cuda")))
    b.copy_(torch.ldexp(b, torch.randint(-60, 61, (k, n), device="cuda")))
    a[5], b[:, 7] = 0.0, 0.0
    check_repeated(a, b, label("extreme range", size, layout))


@pytest.mark.parametrize("layout", ["NN", "NT"])
@pytest.mark.parametrize("size", EXTREME_SIZES)
def test_linear_of_small_outputs_of_extreme_range(size, layout, strict_cublas):
    """Half the outputs come from elements that bf16 parts lose because others in their row are
    larger."""
    m, k, n = size
    x, weight_t = operands("normal", size, "cuda", layout)
    x[:, : k // 2] *= 2.0**60
    x[:, k // 2 :] *= 2.0**-100
    x[3] = 0.0
    weight_t[: k // 2, : n // 2] = 0.0
    weight_t[:, 9] = 0.0
    bias = torch.randn(n, device="cuda") * 2.0**-98
    residual = torch.randn(m, n, device="cuda") * 2.0**-98
    got = my_ops.linear(x, weight_t.mT, bias, activation="relu", residual=residual).double()
    x, weight_t, bias, residual = (t.double() for t in (x, weight_t, bias, residual))
    want = (x @ weight_t + bias).relu() + residual
    sizes = x.abs() @ weight_t.abs() + bias.abs() + residual.abs()
    assert ((got - want).abs() <= 2.0**-20 * sizes).all()


@pytest.mark.parametrize("k", INVERSE_KS)
def test_gemm_cancelling(k, strict_cublas):
    a, b = inverse_operands(k, "cuda")
    check(my_ops.gemm(a, b), a, b, label("inverse", (k, k, k)), MEAN_SHARE, WORST_SHARE)


OPPOSED_BITS = [6, 12, 24]
OPPOSED = [(1000, 1024, 1024), (2048, 2048, 2048), (700, 300, 1001), (512, 12000, 768)]


@pytest.mark.parametrize("bits", OPPOSED_BITS)
@pytest.mark.parametrize("layout", ["NN", "NT", "TT"])
@pytest.mark.parametrize("size", OPPOSED + FEW_ROWS + SMALL_OUTPUTS)
def test_gemm_of_opposed_magnitudes(size, layout, bits, strict_cublas):
    """Features in different units, and weights in the inverse ones."""
    a, b = opposed(*operands("normal", size, "cuda", layout), bits)
    check_repeated(a, b, label(f"opposed within 2^{2 * bits}", size, layout))


@pytest.mark.parametrize("bits", OPPOSED_BITS)
@pytest.mark.parametrize("size", OPPOSED)
def test_linear_prepacked_of_opposed_magnitudes(size, bits, strict_cublas):
    x, weight_t = opposed(*operands("normal", size, "cuda", "NT"), bits)
    got = my_ops.linear(x, my_ops.prepack(weight_t.mT))
    what = label(f"prepacked, opposed within 2^{2 * bits}", size, "NT")
    check(got, x, weight_t, what, MEAN_SHARE, WORST_SHARE)


@pytest.mark.parametrize("family", ["normal", "exp4"])
def test_linear_prepacked(family, strict_cublas):
    size = 512, 1024, 1024
    x, weight_t = operands(family, size, "cuda", "NT")
    got = my_ops.linear(x, my_ops.prepack(weight_t.mT))
    what = f"prepacked {label(family, size, 'NT')}"
    check(got, x, weight_t, what, MEAN_SHARE, WORST_SHARE)


# ------------------------------------------------------- a float32 operand beside one of 16 bits

MIXED_SIZES = [(1000, 1024, 1024), (2048, 2048, 2048), (4096, 4096, 64), (64, 16384, 1024)]
MIXED_SIZES += [(700, 300, 1001), (512, 12000, 768), (64, 4096, 64)]
SIXTEEN_BIT = [torch.float16, torch.bfloat16]
HALVES = ["a", "b"]


def in_16_bits(x, dtype):
    """Values of x that dtype has."""
    return x.clamp(-60000.0, 60000.0).to(dtype)


def check_mixed(a, b, half, dtype, what):
    """Compares with torch.mm of both in float32, and wants the same bits again."""
    a, b = (in_16_bits(a, dtype), b) if half == "a" else (a, in_16_bits(b, dtype))
    first, what = my_ops.gemm(a, b), f"{what}, {half} in {dtype}"
    for got in (first, my_ops.linear(a, b.mT)):
        check(got, a.float(), b.float(), what, MEAN_SHARE, WORST_SHARE)
    assert torch.equal(my_ops.gemm(a, b), first)


@pytest.mark.parametrize("size", MIXED_SIZES)
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
@pytest.mark.parametrize("family", FAMILIES)
def test_gemm_of_a_16_bit_operand(family, dtype, half, size, strict_cublas):
    for layout in ("NN", "NT", "TN", "TT"):
        a, b = operands(family, size, "cuda", layout)
        check_mixed(a, b, half, dtype, label(family, size, layout))


@pytest.mark.parametrize("bits", OPPOSED_BITS)
@pytest.mark.parametrize("size", MIXED_SIZES)
@pytest.mark.parametrize("half", HALVES)
def test_gemm_of_a_16_bit_operand_of_opposed_magnitudes(half, size, bits, strict_cublas):
    for layout in ("NN", "NT", "TN", "TT"):
        a, b = opposed(*operands("normal", size, "cuda", layout), bits)
        what = label(f"opposed within 2^{2 * bits}", size, layout)
        check_mixed(a, b, half, torch.bfloat16, what)


@pytest.mark.parametrize("size", EXTREME_SIZES)
@pytest.mark.parametrize("half", HALVES)
def test_gemm_of_a_16_bit_operand_of_extreme_range(half, size, strict_cublas):
    m, k, n = size
    a, b = operands("normal", size, "cuda")
    a.copy_(torch.ldexp(a, torch.randint(-110, 11, (m, k), device="cuda")))
    b.copy_(torch.ldexp(b, torch.randint(-60, 61, (k, n), device="cuda")))
    a[5], b[:, 7] = 0.0, 0.0
    a, b = (a.bfloat16(), b) if half == "a" else (a, b.bfloat16())
    what = label("extreme range", size)
    check(my_ops.gemm(a, b), a.float(), b.float(), what, MEAN_SHARE, WORST_SHARE)


@pytest.mark.parametrize("size", MIXED_SIZES)
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_gemm_of_a_16_bit_operand_with_special_values(value, dtype, half, size, strict_cublas):
    a, b = operands("normal", size, "cuda")
    a[1, 100] = b[200, 3] = value
    a, b = (a.to(dtype), b) if half == "a" else (a, b.to(dtype))
    got, want = my_ops.gemm(a, b), torch.mm(a.float(), b.float())
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.isinf(), want.isinf())
    assert torch.equal(got[want.isinf()], want[want.isinf()])


@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
def test_prepacked_beside_a_16_bit_operand(dtype, strict_cublas):
    size = 512, 1024, 1024
    x, weight_t = operands("normal", size, "cuda", "NT")
    x = x.to(dtype)
    got = my_ops.linear(x, my_ops.prepack(weight_t.mT))
    what = f"prepacked {label('normal', size, 'NT')}"
    check(got, x.float(), weight_t, what, MEAN_SHARE, WORST_SHARE)


# ------------------------------------- few rows, small outputs, others for which cuBLAS cuts k

SMALL_SIZES = [(m, k, n) for m in (2, 5, 8, 16) for n in (512, 4096) for k in (4096, 16384)]
SMALL_SIZES += [(m, k, n) for m, n in ((64, 64), (32, 96)) for k in (4096, 65536)]
SPLIT_K_SIZES = [*SMALL_SIZES, *FEW_ROWS, *SMALL_OUTPUTS]
SPLIT_K_SIZES += [(512, 512, 512), (640, 4096, 512)]
SPLIT_K = [(size, layout) for size in dict.fromkeys(SPLIT_K_SIZES) for layout in ("NN", "NT")]
SPLIT_K += [((512, 1024, 1024), "TN"), ((640, 1024, 768), "TT"), ((1792, 1024, 1792), "NT")]
SPLIT_K += [((1024, 4096, 2048), "NN"), ((1024, 16384, 1536), "NN"), ((2560, 16384, 2560), "NT")]


@pytest.mark.parametrize(("size", "layout"), SPLIT_K)
@pytest.mark.parametrize("family", CONTRACT)
def test_gemm_where_cublas_cuts_k(family, size, layout, strict_cublas):
    a, b = operands(family, size, "cuda", layout)
    check_repeated(a, b, label(family, size, layout))


# Powers of two on a and on b: largest elements close to FLT_MAX, and outputs that are denormal.
EXTREMES = {"tiny": (-115, 0), "huge": (124, -20), "denormal": (-70, -70)}


@pytest.mark.parametrize(
    ("size", "layout"),
    [*((size, "NN") for size in SMALL_SIZES), ((700, 800, 1024), "NN"), ((700, 2200, 640), "TN")],
)
@pytest.mark.parametrize("extreme", EXTREMES)
def test_gemm_of_extreme_magnitudes(extreme, size, layout, strict_cublas):
    a, b = operands("normal", size, "cuda", layout)
    a, b = (t * 2.0**power for t, power in zip((a, b), EXTREMES[extreme], strict=True))
    assert a.isfinite().all()
    check_repeated(a, b, label(extreme, size, layout))


@pytest.mark.parametrize(
    ("size", "layout"),
    [*((size, "NN") for size in SMALL_SIZES), ((700, 2200, 640), "NN"), ((700, 2200, 640), "TN")],
)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("place", ["a", "b", "both"])
def test_gemm_special_values(place, value, size, layout, strict_cublas):
    a, b = operands("normal", size, "cuda", layout)
    if place != "b":
        a[1, 100] = value
    if place != "a":
        b[2000, 3] = value
    got, want = my_ops.gemm(a, b), torch.mm(a, b)
    assert not want.isfinite().all()
    assert torch.equal(got.isnan(), want.isnan())
    infinite = want.isinf()
    assert torch.equal(got.isinf(), infinite)
    assert torch.equal(got[infinite], want[infinite])


# ------------------------------------------- the kernel of compute capability 8.0, on any device

SM80_KS = [64, 96, 257, 1024, 4096, 16384]
SM80_INVERSE_KS = [257, 1024, 2048]  # products with a single tile never use it


@pytest.mark.parametrize("k", SM80_KS)
@pytest.mark.parametrize("family", CONTRACT)
def test_gemm_fp32_sm80(family, k, strict_cublas):
    size = 1000, k, 1024
    a, b = operands(family, size, "cuda")
    got = gemm_fp32_sm80(a, b)
    check(got, a, b, f"sm80, {label(family, size)}", MEAN_SHARE, WORST_SHARE)


@pytest.mark.parametrize("k", SM80_INVERSE_KS)
def test_gemm_fp32_sm80_cancelling(k, strict_cublas):
    a, b = inverse_operands(k, "cuda")
    got = gemm_fp32_sm80(a, b)
    check(got, a, b, f"sm80, {label('inverse', (k, k, k))}", MEAN_SHARE, WORST_SHARE)


@pytest.mark.parametrize("extreme", EXTREMES)
def test_gemm_fp32_sm80_of_extreme_magnitudes(extreme, strict_cublas):
    size = 700, 800, 1024
    a, b = operands("normal", size, "cuda")
    a, b = (t * 2.0**power for t, power in zip((a, b), EXTREMES[extreme], strict=True))
    got = gemm_fp32_sm80(a, b)
    check(got, a, b, f"sm80, {label(extreme, size)}", WORST_SHARE, WORST_SHARE)


# --------------------------------------------------------------------------------------- the CPU


@pytest.mark.parametrize("layout", ["NN", "NT"])
@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("family", FAMILIES)
def test_gemm_on_the_cpu(family, k, layout):
    size = 200, k, 300
    a, b = operands(family, size, "cpu", layout)
    check(my_ops.gemm(a, b), a, b, f"CPU, {label(family, size, layout)}", MEAN_SHARE, WORST_SHARE)


@pytest.mark.parametrize("k", INVERSE_KS)
def test_gemm_on_the_cpu_cancelling(k):
    a, b = inverse_operands(k, "cpu")
    check(my_ops.gemm(a, b), a, b, f"CPU, {label('inverse', (k, k, k))}", MEAN_SHARE, WORST_SHARE)
