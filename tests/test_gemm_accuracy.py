"""How accurate float32 products are, compared with torch.mm's in float32, both against float64.

An error is |got - a @ b| / (|a| @ |b|), element by element. Its mean is at most that of torch.mm
(1.5 times for short k), and its maximum at most 1.5 times.
"""

import itertools
import math
import random

import pytest
import torch
from fp32_sm80 import gemm_fp32_sm80
from test_cuda_kernels import FEW_ROWS, SMALL_OUTPUTS
from test_explain import answer

import my_ops

MEAN_SHARE = 1.0
SHORT_K, SHORT_K_MEAN_SHARE = 64, 1.5  # below this k, sums have few roundings to average out
WORST_SHARE = 1.5
TF32 = 2.0**-9  # two factors of 11 bits, truncated
# For normal data on CUDA, where cuBLAS does not slice k to keep the device busy.
LONG_K, LONG_K_MEAN_SHARE = 1024, 1 / 3

KS = [1, 7, 16, 33, 64, 257, 1024, 4096, 16384]
INVERSE_KS = [64, 257, 1024, 2048]


def normal(rows, k, device):
    return torch.randn(rows, k, device=device)


def one_hot(rows, k, device):
    places = torch.randint(k, (rows, 1), device=device)
    return (torch.arange(k, device=device) == places).float()


def scaled_rows(rows, k, device):
    exponents = torch.randint(-60, 61, (rows, 1), device=device)
    return torch.ldexp(normal(rows, k, device), exponents)


def scaled_elements(rows, k, device):
    """Magnitudes too far apart for scaling a row: they need the path for the full range."""
    exponents = torch.randint(-30, 31, (rows, k), device=device)
    return torch.ldexp(normal(rows, k, device), exponents)


# Data for a, and for b transposed, except that one-hot rows pick from normal data.
FAMILIES = {
    "normal": normal,
    "uniform": lambda rows, k, device: torch.rand(rows, k, device=device),
    "exp2": lambda rows, k, device: normal(rows, k, device).exp2(),
    "exp4": lambda rows, k, device: (4 * normal(rows, k, device)).exp(),
    "one-hot": one_hot,
    "scaled-rows": scaled_rows,
    "scaled-elements": scaled_elements,
}
CONTRACT = [family for family in FAMILIES if family != "scaled-elements"]


def in_layout(rows_of_k, letter):
    """(rows, k): row-major for N, column-major for T."""
    return rows_of_k.contiguous() if letter == "N" else rows_of_k.mT.contiguous().mT


def operands(family, size, device, layout="NN"):
    m, k, n = size
    right = "normal" if family == "one-hot" else family
    a = in_layout(FAMILIES[family](m, k, device), layout[0])
    return a, in_layout(FAMILIES[right](n, k, device).mT, layout[1])


def inverse_operands(k, device):
    """Products that cancel to almost nothing off the diagonal."""
    a = torch.randn(k, k, dtype=torch.float64, device=device) / k**0.5
    a.diagonal().add_(2)  # far from singular
    return a.float(), a.inverse().float()


def errors(got, a, b):
    """Mean and maximum. An element whose products are all 0 must be 0."""
    assert got.dtype == torch.float32
    a, b = a.double(), b.double()
    error = (got.double() - a @ b).abs() / (a.abs() @ b.abs()).clamp(min=1e-300)
    return error.mean().item(), error.max().item()


def check(got, a, b, what, mean_share, worst_share):
    """Compares with torch.mm's errors. ``what`` is for the message."""
    assert got.shape == (a.shape[0], b.shape[1])
    ours, theirs = errors(got, a, b), errors(torch.mm(a, b), a, b)
    message = f"{what}: ours {ours}, torch.mm's {theirs} (mean, maximum)"
    assert ours[0] <= mean_share * theirs[0], f"mean, {message}"
    assert ours[1] <= worst_share * theirs[1], f"maximum, {message}"


def mean_share(k):
    return SHORT_K_MEAN_SHARE if k < SHORT_K else MEAN_SHARE


def label(family, size, layout="NN"):
    m, k, n = size
    return f"{family}, {m} x {n} outputs, k = {k}, {layout}"


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


def check_repeated(a, b, what):
    first = my_ops.gemm(a, b)
    check(first, a, b, what, MEAN_SHARE, WORST_SHARE)
    for _ in range(3):
        assert torch.equal(my_ops.gemm(a, b), first), f"{what}: not the same bits again"


@pytest.mark.parametrize(("size", "layout"), SPLIT_K)
@pytest.mark.parametrize("family", CONTRACT)
def test_gemm_where_cublas_cuts_k(family, size, layout, strict_cublas):
    a, b = operands(family, size, "cuda", layout)
    check_repeated(a, b, label(family, size, layout))


# ------------------------------------------------ weight gradients: a long k, contiguous in neither

# Their exponents are guessed from a sample of k. Data that suit no sample are split again.
WEIGHT_GRADIENTS = [(512, 4096, 384), (511, 4100, 701), (768, 8192, 768), (301, 5003, 1001)]
WEIGHT_GRADIENTS += [(766, 2500, 701)]  # k is not sliced


@pytest.mark.parametrize("gpu", ["h200", "h100"])
@pytest.mark.parametrize("size", WEIGHT_GRADIENTS)
def test_weight_gradient_is_ours(size, gpu):
    """Otherwise the tests below compare cuBLAS with itself. Needs no GPU."""
    m, k, n = size
    assert answer(f"gemm {m} {n} {k} --a-transposed --gpu {gpu}")[-1].startswith("  fp32_sm90,")


def outliers(x):
    """One element of each row is far larger than the rest."""
    places = torch.randint(x.shape[1], (x.shape[0], 1), device=x.device)
    return x.scatter(1, places, x.gather(1, places) * 1e4)


def dead_rows(x):
    """Half of the elements are zero, as behind relu, and all of some rows."""
    x = x.relu()
    x[::7] = 0.0
    return x


def few_nonzeros(x):
    """Rows with too few nonzeros for fp16 parts, which the sample may miss."""
    return x * (torch.rand_like(x) < 40 / x.shape[1])


UNEVEN = {
    "plain": lambda x: x,
    "outliers": outliers,
    "dead rows": dead_rows,
    "few nonzeros": few_nonzeros,
    "first k only": lambda x: x * (torch.arange(x.shape[1], device=x.device) < 200),
    "growing": lambda x: x * torch.linspace(-20, 20, x.shape[1], device=x.device).exp2(),
}


@pytest.mark.parametrize("size", WEIGHT_GRADIENTS)
@pytest.mark.parametrize("family", CONTRACT)
def test_weight_gradient(family, size, strict_cublas):
    a, b = operands(family, size, "cuda", "TN")
    check_repeated(a, b, label(family, size, "TN"))


@pytest.mark.parametrize("size", WEIGHT_GRADIENTS)
@pytest.mark.parametrize("of_a", UNEVEN)
@pytest.mark.parametrize("of_b", ["plain", "outliers", "dead rows"])
def test_weight_gradient_of_uneven_data(of_a, of_b, size, strict_cublas):
    m, k, n = size
    a = in_layout(UNEVEN[of_a](normal(m, k, "cuda")), "T")
    b = in_layout(UNEVEN[of_b](normal(n, k, "cuda")).mT, "N")
    check_repeated(a, b, label(f"{of_a} by {of_b}", size, "TN"))


@pytest.mark.parametrize("bits", [6, 12, 24])
@pytest.mark.parametrize("size", WEIGHT_GRADIENTS)
def test_weight_gradient_of_opposed_magnitudes(size, bits, strict_cublas):
    """Rows of a batch in different units, and gradients in the inverse ones."""
    a, b = operands("normal", size, "cuda", "TN")
    units = torch.randint(-bits, bits + 1, (size[1],), device="cuda")
    a, b = torch.ldexp(a.mT, units[:, None]).mT, torch.ldexp(b, -units[:, None])
    check_repeated(a, b, label(f"opposed within 2^{2 * bits}", size, "TN"))


@pytest.mark.parametrize("family", ["normal", "exp4"])
def test_weight_gradient_of_batches(family, strict_cublas):
    size = 768, 4096, 640
    pairs = [operands(family, size, "cuda", "TN") for _ in range(3)]
    a, b = torch.stack([a.mT for a, _ in pairs]).mT, torch.stack([b for _, b in pairs])
    for product, (x, y) in zip(my_ops.gemm(a, b), pairs, strict=True):
        check(product, x, y, f"batch, {label(family, size, 'TN')}", MEAN_SHARE, WORST_SHARE)


@pytest.mark.parametrize(("offset", "gap"), [(1, 0), (0, 3), (0, 4), (2, 4), (3, 1)])
def test_weight_gradient_of_views(offset, gap, strict_cublas):
    """Starts and pitches of every alignment. Outliers: most tiles are split twice."""

    def view(x):
        whole = torch.full((offset + x.shape[0] * (x.shape[1] + gap),), math.nan, device=x.device)
        lines = whole[offset:].view(x.shape[0], -1)[:, : x.shape[1]]
        return lines.copy_(x)

    m, k, n = 516, 4100, 640
    x, y = outliers(normal(m, k, "cuda")).mT.contiguous(), normal(k, n, "cuda")
    want = my_ops.gemm(x.mT, y)
    check(want, x.mT, y, label("outliers", (m, k, n), "TN"), MEAN_SHARE, WORST_SHARE)
    assert torch.equal(my_ops.gemm(view(x).mT, view(y)), want)


def test_weight_gradient_of_repeated_lines(strict_cublas):
    """Strides of 0 along k, and from matrix to matrix."""
    x, y = normal(2500, 516, "cuda"), torch.randn(3, 2500, 640, device="cuda")
    line = x[:1].expand(2500, -1)
    assert torch.equal(my_ops.gemm(line.mT, y[0]), my_ops.gemm(line.contiguous().mT, y[0]))
    want = my_ops.gemm(torch.stack([x] * 3).mT, y)
    for a in (x.mT, x.mT.expand(3, -1, -1)):
        assert torch.equal(my_ops.gemm(a, y), want)
    want = my_ops.gemm(y.mT, torch.stack([x] * 3))
    assert torch.equal(my_ops.gemm(y.mT, x.expand(3, -1, -1)), want)


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


# --------------------------------------------------------------- where torch lets cuBLAS use TF32


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


def check_high(family, size, layout):
    """The error is not larger than that of cuBLAS with TF32."""
    a, b = operands(family, size, "cuda", layout)
    theirs = errors(while_cublas_uses_tf32(lambda: torch.mm(a, b)), a, b)
    for got in (
        my_ops.gemm(a, b, precision="high"),
        while_cublas_uses_tf32(lambda: my_ops.gemm(a, b, precision="high")),
        while_cublas_uses_tf32(lambda: my_ops.gemm(a, b)),
    ):
        ours = errors(got, a, b)
        message = f"high, {label(family, size, layout)}: ours {ours}, TF32's {theirs}"
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
