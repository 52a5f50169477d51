"""Float32 products of an operand with many rows and a narrow one, which split the first on the way:
routers, and gradients of their weights. The first may have 16 bits."""

import pytest
import torch
from accuracy import (
    FAMILIES,
    MEAN_SHARE,
    WORST_SHARE,
    check,
    check_repeated,
    in_layout,
    label,
    operands,
    opposed,
)
from samples import ACTIVATIONS
from test_explain import answer
from test_gemm import linear_excess

import my_ops

# m, k, n. Except in the first of each, neither columns nor k are whole tiles.
TALL = [
    (16384, 2048, 64),
    (15992, 2056, 61),
    (16200, 4104, 121),
    (4008, 8200, 60),
    (1016, 4104, 191),
]
FLAT = [(64, 16384, 4096), (60, 16392, 4104), (123, 16392, 6136)]  # gradients of weights
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LAYOUTS = ["NN", "NT", "TN", "TT"]


@pytest.mark.parametrize("gpu", ["h200", "h100"])
@pytest.mark.parametrize("size", TALL + FLAT)
def test_product_is_ours(size, gpu):
    """Otherwise the tests below compare cuBLAS with itself. Needs no GPU."""
    m, k, n = size
    for layout in LAYOUTS:
        transposed = " --a-transposed" * (layout[0] == "T") + " --b-transposed" * (layout[1] == "T")
        plan = answer(f"gemm {m} {n} {k}{transposed} --gpu {gpu}")[-1]
        assert plan.startswith("  fp32_narrow"), (layout, plan)


def in_dtype(a, b, dtype):
    """The operand with more rows, in dtype."""
    limit = 60000.0 if dtype == torch.float16 else torch.inf
    if a.shape[0] >= b.shape[1]:
        return a.clamp(-limit, limit).to(dtype), b
    return a, b.clamp(-limit, limit).to(dtype)


def check_product(a, b, dtype, what):
    a, b = in_dtype(a, b, dtype)
    what = f"{what}, {dtype}"
    if dtype == torch.float32:
        return check_repeated(a, b, what)
    first = my_ops.gemm(a, b)
    check(first, a.float(), b.float(), what, MEAN_SHARE, WORST_SHARE)
    assert torch.equal(my_ops.gemm(a, b), first), f"{what}: not the same bits again"


@pytest.mark.parametrize("size", TALL + FLAT)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_accuracy(family, dtype, size, strict_cublas):
    for layout in LAYOUTS:
        a, b = operands(family, size, "cuda", layout)
        check_product(a, b, dtype, label(family, size, layout))


@pytest.mark.parametrize("bits", [10, 30])
@pytest.mark.parametrize("size", TALL + FLAT)
def test_opposed_magnitudes(size, bits, strict_cublas):
    """Features in different units, and weights in the inverse ones."""
    for layout in LAYOUTS:
        a, b = opposed(*operands("normal", size, "cuda", layout), bits)
        check_product(a, b, torch.float32, label(f"opposed within 2^{2 * bits}", size, layout))


def odd(t):
    """With the last bit of each significand set, except in zeros."""
    bits = t.view(torch.int16 if t.dtype == torch.bfloat16 else torch.int32)
    return torch.where(t == 0, t, (bits | 1).view(t.dtype))


@pytest.mark.parametrize("size", TALL + FLAT)
@pytest.mark.parametrize("powers", [(-115, 0), (124, -20), (-70, -70)])
def test_extreme_magnitudes(powers, size, strict_cublas):
    """Largest elements close to FLT_MAX, and outputs that are denormal. Of these, FMAs round each
    product to steps of 2^-149 as they add it: to the same sum in any order, but for a product
    half-way between two steps. One of odd significands is not."""
    a, b = operands("normal", size, "cuda", "NT")
    a, b = a * 2.0 ** powers[0], b * 2.0 ** powers[1]
    a[5] = 0.0
    for dtype in (torch.float32, torch.bfloat16):
        x, y = map(odd, in_dtype(a, b, dtype))
        check_product(x, y, dtype, label(f"2^{powers}", size, "NT"))


@pytest.mark.parametrize("size", TALL + FLAT)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_special_values(value, dtype, size, strict_cublas):
    a, b = operands("normal", size, "cuda", "NT")
    a[1, 100] = b[150, 3] = value
    a, b = in_dtype(a, b, dtype)
    got, want = my_ops.gemm(a, b), torch.mm(a.float(), b.float())
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.isinf(), want.isinf())
    assert torch.equal(got[want.isinf()], want[want.isinf()])


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("size", TALL)
@pytest.mark.parametrize("dtype", DTYPES)
def test_epilogue(dtype, size, activation, cuda):
    m, k, n = size
    x, weight = torch.randn(m, k, device="cuda").to(dtype), torch.randn(n, k, device="cuda")
    bias, residual = torch.randn(n, device="cuda"), torch.randn(m, n, device="cuda")
    for more in (
        (None, None),
        (bias, None),
        (bias, residual),
        (None, residual[:, :1].expand(m, n)),
    ):
        got = my_ops.linear(x, weight, more[0], activation=activation, residual=more[1])
        assert linear_excess(got, x, weight, more[0], activation, more[1]) <= 1


@pytest.mark.parametrize("size", [(15992, 2056, 60), (60, 16392, 4104)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts_of_the_output(dtype, size, strict_cublas):
    """Rows and columns of a larger matrix, whose other elements stay as they are."""
    m, _, n = size
    a, b = in_dtype(*operands("normal", size, "cuda", "NT"), dtype)
    want = my_ops.gemm(a, b)
    for whole in (torch.zeros(m + 1, n + 3, device="cuda"), torch.zeros(n + 3, m + 1).cuda().mT):
        out = whole[1:, 2:-1]
        my_ops.gemm(a, b, out=out)
        assert torch.equal(out, want)
        assert whole[0].count_nonzero() == whole[:, :2].count_nonzero() == 0
        assert whole[:, -1].count_nonzero() == 0


@pytest.mark.parametrize("offset", [1, 2, 4])
def test_operands_that_start_anywhere(offset, strict_cublas):
    """Where TMA cannot read the larger one, another kernel does."""
    m, k, n = 16008, 2056, 64
    memory = torch.randn(m * k + 8, device="cuda")
    a = memory[offset : offset + m * k].view(m, k)
    b = in_layout(torch.randn(n, k + 1, device="cuda")[:, 1:].mT, "T")
    check_repeated(a, b, f"offset {offset}")
    check_repeated(a[:, 1:-3], b[1:-3], f"offset {offset}, a column left out")
