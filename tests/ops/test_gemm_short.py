"""Float32 products of many rows with a short k, which split the rows on the way. The plan takes
large ones only; here it is given costs with which it takes them all."""

import pytest
import torch
from accuracy import (
    CONTRACT,
    MEAN_SHARE,
    WORST_SHARE,
    check,
    check_repeated,
    errors,
    label,
    operands,
    opposed,
)
from samples import ACTIVATIONS
from test_explain import answer
from test_gemm import linear_excess

import my_ops
from my_ops import _fit, _gemm_costs

# m, k, n. Few are whole tiles; parts of b that fit into shared memory, and others.
SIZES = [
    (4100, 132, 61),
    (9001, 256, 64),
    (20000, 100, 32),
    (8192, 128, 128),
    (33700, 128, 96),
    (3000, 192, 193),
    (17001, 160, 256),
    (5000, 96, 384),
    (1027, 252, 1100),
]
# Of nearly all zeros most sums are torch.mm's, so that either mean may be the larger by a few
# others. At 0.8 rows have about 24 nonzeros, fewer than average out the bit that parts lack.
MEAN_SHARE_OF_ZEROS = {0.8: 1.25, 0.99: 1.001}
LAYOUTS = ["NN", "NT"]  # of b: the gradient of an input, and a layer's forward


@pytest.fixture
def taken(strict_cublas):
    """The kernel takes every product that it can run."""
    gpu, model = _gemm_costs.current_gpu()
    if not gpu.hopper_code:
        pytest.skip("needs code for 9.0a")
    before = _gemm_costs.costs_of(gpu)
    costs = before | {name: 0.0 for name in before if name.startswith("fp32_short.")}
    _gemm_costs.give(gpu, model, costs, "a test's")
    problems = [_fit.problem_of(dict(zip("mkn", size, strict=True)), gpu) for size in SIZES]
    assert {plan.split(",")[0] for plan in _gemm_costs.Planner(problems).plans(costs)} == {
        "fp32_short"
    }
    yield
    _gemm_costs.give(gpu, model, before, "as before a test")


@pytest.mark.parametrize("gpu", ["h200", "h100"])
def test_large_products_are_ours(gpu):
    """Needs no GPU."""
    for m, n, k in [(147456, 128, 128), (200704, 384, 96), (50176, 192, 192), (100352, 256, 256)]:
        for b in ("", " --b-transposed"):
            plan = answer(f"gemm {m} {n} {k}{b} --gpu {gpu}")[-1]
            assert plan.startswith("  fp32_short"), plan


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ("gemm 147456 128 92", "k is too short for its accuracy"),
        ("gemm 147456 128 260", "k is too long"),
        ("gemm 147456 31 128", "has too few columns for its accuracy"),
        ("gemm 147456 128 130", "needs rows of a that are contiguous and aligned"),
        ("gemm 147456 128 128 --a-transposed", "needs rows of a that are contiguous and aligned"),
        ("gemm 147456 128 128 --batch 2", "supports no batch, and float32 only"),
        ("gemm 1024 128 128", "too small to pay for its launches"),
        ("gemm 147456 128 128 --gpu a100", "needs Hopper and code for 9.0a"),
        ("gemm 147456 128 128 --precision high --tf32", "the library's TF32 is as fast"),
    ],
)
def test_what_it_leaves(asked, why):
    """Needs no GPU."""
    gpu = "" if "--gpu" in asked else " --gpu h200"
    assert f"  fp32_short: no, {why}" in answer(asked + gpu)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("family", CONTRACT)
def test_accuracy(family, size, taken):
    for layout in LAYOUTS:
        a, b = operands(family, size, "cuda", layout)
        check_repeated(a, b, label(family, size, layout))


@pytest.mark.parametrize("share", [0.1, 0.5, 0.8, 0.99])
@pytest.mark.parametrize("size", SIZES)
def test_zeros(size, share, taken):
    """As behind relu or dropout. Rows of few nonzeros are left to fp32 FMAs, as in torch.mm."""
    for layout in LAYOUTS:
        a, b = operands("normal", size, "cuda", layout)
        a = a * (torch.rand_like(a) >= share)
        a[3::7] = 0.0
        what = f"{share} zeros, {label('normal', size, layout)}"
        check(my_ops.gemm(a, b), a, b, what, MEAN_SHARE_OF_ZEROS.get(share, 1.0), WORST_SHARE)


@pytest.mark.parametrize("bits", [10, 30])
@pytest.mark.parametrize("size", SIZES)
def test_opposed_magnitudes(size, bits, taken):
    """Features in different units, and weights in the inverse ones."""
    for layout in LAYOUTS:
        a, b = opposed(*operands("normal", size, "cuda", layout), bits)
        check_repeated(a, b, f"opposed within 2^{2 * bits}, {label('normal', size, layout)}")


@pytest.mark.parametrize("size", SIZES)
def test_a_few_tiny_elements(size, taken):
    """In the rows where they are, and where b is nonzero only opposite them."""
    k = size[1]
    a, b = operands("normal", size, "cuda", "NT")
    a[::5, : k // 2] *= 2.0**-40
    b[k // 2 :, ::3] = 0.0
    check_repeated(a, b, label("tiny", size))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("powers", [(-115, 0), (100, -90), (-60, 60), (124, -20)])
def test_scales_far_apart(powers, size, taken):
    """Each row of the operands has its own exponent, so the result is scaled exactly."""
    a, b = operands("normal", size, "cuda", "NT")
    want = errors(my_ops.gemm(a, b), a, b)
    a, b = a * 2.0 ** powers[0], b * 2.0 ** powers[1]
    check(my_ops.gemm(a, b), a, b, label(f"2^{powers}", size), MEAN_SHARE, WORST_SHARE)
    if min(sum(powers), *powers) > -100:
        assert errors(my_ops.gemm(a, b), a, b) == pytest.approx(want, rel=1e-3)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_special_values(value, size, taken):
    a, b = operands("normal", size, "cuda", "NT")
    a[1, 70] = b[50, 0] = value
    got, want = my_ops.gemm(a, b), torch.mm(a, b)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.isinf(), want.isinf())
    assert torch.equal(got[want.isinf()], want[want.isinf()])


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("size", SIZES)
def test_epilogue(size, activation, taken):
    m, k, n = size
    x, weight = torch.randn(m, k, device="cuda"), torch.randn(n, k, device="cuda")
    bias, residual = torch.randn(n, device="cuda"), torch.randn(m, n, device="cuda")
    x[5, 3] = 1e-30  # looked at again
    x[m // 2] = 0.0
    x[m // 2, 4] = 1.0
    for more in (
        (None, None),
        (bias, None),
        (bias, residual),
        (None, residual[:, :1].expand(m, n)),
    ):
        got = my_ops.linear(x, weight, more[0], activation=activation, residual=more[1])
        assert linear_excess(got, x, weight, more[0], activation, more[1]) <= 1


@pytest.mark.parametrize("size", SIZES)
def test_strides(size, taken):
    """Rows within larger matrices, whose other elements stay as they are."""
    m, k, n = size
    wide = torch.randn(m, k + 8, device="cuda")
    a, b = wide[:, 4:-4], torch.randn(k, n + 3, device="cuda")[:, 1:-2]
    want = my_ops.gemm(a.contiguous(), b.contiguous())
    for columns in (n + 3, -(-n // 4) * 4 + 8):
        for before in (2, 4):
            whole = torch.zeros(m + 2, max(columns, n + before + 1), device="cuda")
            out = whole[1:-1, before : before + n]
            my_ops.gemm(a, b, out=out)
            assert torch.equal(out, want)
            out.zero_()
            assert whole.count_nonzero() == 0


def test_more_tiles_than_bits(taken):
    """Of those that are computed again there is a bit for each of 1024 that a block computes."""
    m, k, n = 132 * 128 * 1025, 96, 32
    a = torch.ones(m, k, device="cuda")
    a[0] = a[-1] = 0.0
    a[0, 0] = a[-1, 1] = 1.0
    b = torch.randn(k, n, device="cuda")
    got = my_ops.gemm(a, b)
    assert torch.equal(got[0], b[0])
    assert torch.equal(got[-1], b[1])
    assert (got[1:-1] - b.double().sum(0)).abs().max() < 1e-4
