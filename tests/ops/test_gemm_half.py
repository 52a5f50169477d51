"""The 16-bit kernel, used if rows are not whole 16-byte vectors, and for layers."""

import math

import pytest
import torch
from samples import (
    ACTIVATIONS,
    SIXTEEN_BIT,
    TILE_SIZES,
    gemm_excess,
    half_ulp,
    special,
)
from test_cuda_kernels import normal, operand
from test_gemm import linear_excess

import my_ops
from my_ops import reference

HALF_SIZES = [  # m, k, n
    (512, 643, 520),
    (513, 640, 519),
    (1000, 1003, 1001),
    (515, 2051, 1530),
    (2801, 643, 3071),
    (300, 72, 900),
    (70, 71, 3000),
]


@pytest.mark.parametrize("size", HALF_SIZES)
@pytest.mark.parametrize("b_layout", ["contiguous", "transposed", "odd-offset"])
@pytest.mark.parametrize("a_layout", ["contiguous", "transposed", "both-strides"])
@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
def test_gemm_half_layouts(dtype, a_layout, b_layout, size, cuda):
    """The output is a view; nothing outside it may change."""
    m, k, n = size
    a, b = operand(m, k, a_layout, dtype), operand(k, n, b_layout, dtype)
    whole = torch.full((m + 2, n + 9), 7.0, dtype=dtype, device="cuda")
    for first in (1, 8):
        whole.fill_(7)
        out = whole[1 : m + 1, first : first + n]
        my_ops.gemm(a, b, out=out)
        assert gemm_excess(out, a, b) <= 1
        out.fill_(7)
        assert (whole == 7).all()


@pytest.mark.parametrize("b_layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("a_layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("sizes", TILE_SIZES, ids=str)
@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
def test_half_tiles(dtype, sizes, a_layout, b_layout, cuda):
    m, k, n, activation = sizes
    a, b = operand(m, k, a_layout, dtype), operand(k, n, b_layout, dtype)
    if activation is None:
        assert gemm_excess(my_ops.gemm(a, b), a, b) <= 1
    else:
        got = my_ops.linear(a, b.mT, activation=activation)
        assert linear_excess(got, a, b.mT, None, activation) <= 1


@pytest.mark.parametrize("sizes", [(200_000, 65, 64), (100_000, 65, 192), (60_000, 67, 320)])
@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
def test_half_tiles_in_a_row(dtype, sizes, cuda):
    """A block stages an odd number of parts of each tile; the next must wait for their stores."""
    m, k, n = sizes
    a, b = normal(m, k).to(dtype), normal(k, n).to(dtype)
    for _ in range(5):
        assert gemm_excess(my_ops.gemm(a, b), a, b) <= 1


HALF_LINEAR = [  # m, k, n
    (512, 643, 520),
    (129, 200, 1003),
    (601, 651, 777),
    (600, 320, 512),
    (333, 328, 1000),
    (16, 1024, 4096),
    (4099, 520, 16),
    (1010, 8, 808),
    (2800, 2048, 3064),
    (2800, 643, 3064),
    (2801, 643, 3071),
]
BEHIND_CUBLAS = [(600, 1032, 512), (1111, 328, 1000), (127, 333, 520), (601, 59, 777)]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("size", HALF_LINEAR + BEHIND_CUBLAS)
@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
def test_linear_half_epilogues(dtype, size, activation, cuda):
    m, k, n = size
    x, weight = normal(m, k).to(dtype), normal(n, k).div(8).to(dtype)
    dense, offset = normal(m, n).to(dtype), normal(1, m * n + 1).to(dtype)[0, 1:].view(m, n)
    for bias in (None, normal(n, 1)[:, 0].to(dtype)):
        for residual in (None, dense, offset, normal(n, 2 * m).to(dtype)[:, ::2].mT):
            got = my_ops.linear(x, weight, bias, activation=activation, residual=residual)
            assert linear_excess(got, x, weight, bias, activation, residual) <= 1
    inner = x.view(3, m // 3, k) if m % 3 == 0 else x[None]
    got = my_ops.linear(inner, weight, bias, activation=activation)
    assert torch.equal(got.view(m, n), my_ops.linear(x, weight, bias, activation=activation))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
def test_linear_half_of_an_unaligned_weight(dtype, transposed, activation, cuda):
    """There cuBLAS rounds a product before it adds a bias, which shows where the two cancel."""
    m, k, n = 24, 40, 21808
    x, weight = normal(m, k).to(dtype), normal(1, n * k + 1).to(dtype)[0, 1:]
    weight = weight.view(k, n).mT if transposed else weight.view(n, k)
    bias = -(x[0].double() @ weight.double().mT).to(dtype)
    got = my_ops.linear(x, weight, bias, activation=activation)
    assert linear_excess(got, x, weight, bias, activation) <= 1


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("size", HALF_LINEAR + BEHIND_CUBLAS)
@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
def test_linear_half_activations_of_special_values(dtype, size, activation, cuda):
    m, k, n = size
    values = special(dtype, cuda)
    bias = values.repeat(-(-n // len(values)))[:n]
    x, weight = torch.zeros(m, k, device=cuda, dtype=dtype), normal(n, k).to(dtype)
    got = my_ops.linear(x, weight, bias, activation=activation)
    want = reference.activate(bias.double(), activation).to(dtype).expand(m, n)
    if (dtype, activation) == (torch.bfloat16, "gelu_tanh"):  # cuBLAS's own differs at both ends
        usual = (bias != -math.inf) & ~(bias.isfinite() & (bias > torch.finfo(dtype).max / 2))
        got, want = got[:, usual], want[:, usual]
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.isinf(), want.isinf())


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("size", [(700, 512), (700, 513), (700, 1032)])  # m, k
@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
def test_linear_half_activations_keep_their_digits(dtype, size, activation, cuda):
    """Also where gelu and similar functions are small relative to their argument."""
    m, k = size
    x = torch.linspace(-9, 9, m * k, device=cuda).view(m, k).to(dtype)
    one = torch.eye(k, device=cuda, dtype=dtype)
    zero = torch.zeros(k, device=cuda, dtype=dtype)
    want = reference.activate(x.double(), activation)
    fused = (dtype, activation) == (torch.bfloat16, "gelu_tanh")  # cuBLAS fuses it
    smallest = 2.0**-18 if fused else 2.0**-25
    for bias in (None, zero):
        got = my_ops.linear(x, one, bias, activation=activation).double()
        limit = 1.1 * half_ulp(dtype) * want.abs() + smallest
        assert ((got - want).abs() <= limit).all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
def test_linear_half_of_an_empty_sum(dtype, activation, cuda):
    x, weight = torch.ones(600, 0, dtype=dtype, device=cuda), normal(512, 0).to(dtype)
    bias = normal(512, 1)[:, 0].to(dtype)
    got = my_ops.linear(x, weight, bias, activation=activation)
    assert linear_excess(got, x, weight, bias, activation) <= 1


@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
def test_gemm_half_special_values(dtype, cuda):
    a, b = normal(700, 701).to(dtype), normal(701, 702).to(dtype)
    a[3, 5], a[7, 9], a[11], a[699, 700] = float("inf"), float("nan"), 1e-6, float("-inf")
    b[20, 30], b[700, 701] = torch.finfo(dtype).max, torch.finfo(dtype).max
    got, want = my_ops.gemm(a, b).double(), a.double() @ b.double()
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got[want.isinf()], want[want.isinf()])
    assert got[want.abs() < 0.99 * torch.finfo(dtype).max].isfinite().all()


@pytest.mark.parametrize("k", [200, 333])  # read in place, copied
@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
def test_gemm_half_batches(dtype, k, cuda):
    a = normal(5 * 301, k).to(dtype).view(5, 301, k)
    b = normal(5 * 277, k).to(dtype).view(5, 277, k)
    for y in (b, b[:1].expand(5, 277, k)):
        got = my_ops.gemm(a, y.mT)
        for z in range(5):
            assert gemm_excess(got[z], a[z], y[z].mT) <= 1
    whole = torch.full((5, 303, 280), 7.0, dtype=dtype, device=cuda)
    out = whole[:, 1:302, 2:279]
    my_ops.gemm(a, b.mT, out=out)
    assert torch.equal(out, my_ops.gemm(a, b.mT))
    out.fill_(7)
    assert (whole == 7).all()


@pytest.mark.parametrize("size", [(2, 1, 1170, 6552), (None, 12, 5186, 12656), (14, 2, 1984, 64)])
@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
def test_batches_with_a_common_matrix_are_summed_in_float(dtype, size, cuda):
    """As rows of one product in 16 bits, cuBLAS might not."""
    batch, m, k, n = size
    a = torch.randn(m, k, device=cuda) if batch is None else torch.randn(batch, m, k, device=cuda)
    a, b = a.to(dtype), torch.randn(1, k, n, device=cuda).to(dtype)
    whole = torch.full((batch or 1, m, n + 3), 7.0, dtype=dtype, device=cuda)
    out = whole[..., 1:-2]
    for got in (my_ops.gemm(a, b), my_ops.gemm(a, b, out=out)):
        for z, one in enumerate(got):
            assert gemm_excess(one, a if batch is None else a[z], b[0]) <= 1
    out.fill_(7)
    assert (whole == 7).all()


def test_gemm_half_repeats_bitwise(cuda):
    a = normal(701, 701).bfloat16()
    first = my_ops.gemm(a, a)
    assert all(torch.equal(my_ops.gemm(a, a), first) for _ in range(100))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("size", [(2800, 2048, 3064), (2801, 643, 3071)])
@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
def test_linear_half_keeps_nan_and_repeats_bitwise(dtype, size, activation, cuda):
    m, k, n = size
    x, weight, residual = normal(m, k).to(dtype), normal(n, k).to(dtype), normal(m, n).to(dtype)
    x[5] = float("nan")
    for added in (None, residual):
        first = my_ops.linear(x, weight, activation=activation, residual=added)
        assert first[5].isnan().all()
        assert first.isnan().sum() == n
        for _ in range(50):
            again = my_ops.linear(x, weight, activation=activation, residual=added)
            assert torch.equal(again.nan_to_num(), first.nan_to_num())


@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
def test_linear_half_epilogue_warps(dtype, cuda):
    """Two calls, checked in some rows only: short enough for compute-sanitizer."""
    m, k, n = 2800, 2048, 3064
    x, weight = normal(m, k).to(dtype), normal(n, k).div(8).to(dtype)
    residual, rows = normal(m, n).to(dtype), slice(0, m, 97)
    got = my_ops.linear(x, weight, activation="silu")
    assert linear_excess(got[rows], x[rows], weight, None, "silu") <= 1
    got = my_ops.linear(x, weight, activation="silu", residual=residual)
    assert linear_excess(got[rows], x[rows], weight, None, "silu", residual[rows]) <= 1
