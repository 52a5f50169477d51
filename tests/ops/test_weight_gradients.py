"""How accurate float32 weight gradients are: products with a long k, contiguous in neither operand.
Their exponents are guessed from a sample of k. Data that suit no sample are split again."""

import math

import pytest
import torch
from accuracy import (
    CONTRACT,
    MEAN_SHARE,
    WORST_SHARE,
    check,
    check_repeated,
    in_layout,
    label,
    normal,
    operands,
    opposed,
)
from test_explain import answer

import my_ops

WEIGHT_GRADIENTS = [(512, 4096, 384), (511, 4100, 701), (768, 8192, 768), (301, 5003, 1001)]
WEIGHT_GRADIENTS += [(256, 16384, 1024), (300, 9001, 500)]  # slices of at most 1024
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
    a, b = opposed(*operands("normal", size, "cuda", "TN"), bits)
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
