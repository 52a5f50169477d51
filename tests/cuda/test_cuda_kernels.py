"""What the Hopper kernels promise beyond the general tests: large products and long sequences."""

import pytest
import torch
from fp32_sm80 import gemm_fp32_sm80
from samples import (
    ACTIVATIONS,
    FLOATING,
    gemm_excess,
)
from test_gemm import linear_excess

import my_ops
from my_ops import reference

# The error of the worst element relative to the root mean square, after up to 200 steps.
SEQUENCE_LIMIT = {torch.float32: 2e-5, torch.bfloat16: 6e-2, torch.float16: 8e-3}


def normal(m, n):
    return torch.randn(m, n, device="cuda")


FEW_ROWS = [(2, 5000, 512), (5, 2563, 4096), (16, 4096, 4096), (16, 16384, 256)]  # m, k, n
SMALL_OUTPUTS = [(17, 4096, 96), (32, 5000, 1024), (64, 65536, 64), (50, 4099, 100)]


@pytest.mark.parametrize("powers", [(-115, 0), (-70, -70), (55, 55), (-130, 60)])
@pytest.mark.parametrize("size", FEW_ROWS + SMALL_OUTPUTS)
def test_gemm_float32_few_rows_at_the_ends_of_the_range(size, powers, cuda):
    m, k, n = size
    a, b = normal(m, k) * 2.0 ** powers[0], normal(k, n) * 2.0 ** powers[1]
    a[:, ::3], a[0] = normal(m, a[:, ::3].shape[1]) * 2.0 ** powers[0], 0
    limit = 2.0**-20 * (a.double().abs() @ b.double().abs()) + k * 2.0**-149
    assert ((my_ops.gemm(a, b).double() - a.double() @ b.double()).abs() <= limit).all()


@pytest.mark.parametrize("size", FEW_ROWS + SMALL_OUTPUTS)
def test_gemm_float32_few_rows_special_values(size, cuda):
    m, k, n = size
    a, b = normal(m, k), normal(k, n)
    a[0, 5], b[9, 3] = float("inf"), float("nan")
    a[1, k - 1] = 3.4e38  # the nearest bf16 is Inf
    b[k - 1].clamp_(-0.9, 0.9)
    got, want = my_ops.gemm(a, b), a @ b
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.isposinf(), want.isposinf())
    assert torch.equal(got.isneginf(), want.isneginf())
    limit = 2.0**-20 * (a.double().abs() @ b.double().abs())
    near = (got.double() - want.double()).abs() <= limit
    assert near[want.isfinite()].all()


@pytest.mark.parametrize("b_transposed", [False, True])
@pytest.mark.parametrize("a_transposed", [False, True])
@pytest.mark.parametrize("size", FEW_ROWS + SMALL_OUTPUTS)
def test_gemm_float32_few_rows_layouts(size, a_transposed, b_transposed, cuda):
    m, k, n = size
    a = normal(k, m).mT if a_transposed else normal(m, k)
    b = normal(n, k).mT if b_transposed else normal(k, n)
    first = my_ops.gemm(a, b)
    assert gemm_excess(first, a, b) <= 1
    assert all(torch.equal(my_ops.gemm(a, b), first) for _ in range(20))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("size", [(16, 4096, 512), (48, 4096, 96)])
def test_linear_float32_few_rows(size, activation, cuda):
    m, k, n = size
    x, weight, bias, residual = normal(m, k), normal(n, k) / 64, normal(1, n)[0], normal(m, n)
    got = my_ops.linear(x, weight, bias, activation=activation, residual=residual)
    assert linear_excess(got, x, weight, bias, activation, residual) <= 1


# The kernels for small products: one thread per sum, up to a whole block per sum.

SMALL = [  # m, k, n
    (10, 7, 4),
    (12, 2, 3322),
    (1585, 1, 112),
    (1, 3, 60001),
    (60001, 4, 1),
    (301, 5, 2),
    (24, 8, 40),
    (2, 9, 303),
    (77, 13, 33),
    (40, 16, 128),
    (5, 17, 301),
    (3, 20, 573),
    (88, 2, 1015),
    (17, 692, 1),
    (1, 1873, 36),
    (32, 161, 88),
    (9, 501, 225),
    (2, 8104, 2),
    (2, 7804, 65),
    (1, 524287, 1),
]


def operand(rows, columns, layout, dtype):
    if layout == "transposed":
        return normal(columns, rows).to(dtype).mT
    if layout == "both-strides":
        return normal(2 * rows, 3 * columns).to(dtype)[::2, ::3]
    if layout == "odd-offset":
        return normal(rows, columns + 1).to(dtype)[:, 1:]
    return normal(rows, columns).to(dtype)


@pytest.mark.parametrize("size", SMALL)
@pytest.mark.parametrize("b_layout", ["contiguous", "transposed", "both-strides"])
@pytest.mark.parametrize("a_layout", ["contiguous", "transposed", "both-strides"])
@pytest.mark.parametrize("dtype", FLOATING)
def test_gemm_small_layouts(dtype, a_layout, b_layout, size, cuda):
    """The output is a view; nothing outside it may change."""
    m, k, n = size
    a, b = operand(m, k, a_layout, dtype), operand(k, n, b_layout, dtype)
    for shape, transposed in (((m + 2, n + 9), False), ((n + 9, m + 2), True)):
        whole = torch.full(shape, 7.0, dtype=dtype, device="cuda")
        out = (whole.mT if transposed else whole)[1 : m + 1, 3 : n + 3]
        my_ops.gemm(a, b, out=out)
        assert gemm_excess(out, a, b) <= 1
        out.fill_(7)
        assert (whole == 7).all()


@pytest.mark.parametrize("sizes", [(3, 3), (1, 5), (5, 1)])
@pytest.mark.parametrize("size", [(3, 5, 2), (1, 12, 70), (7, 300, 33), (1, 4096, 3)])
@pytest.mark.parametrize("dtype", FLOATING)
def test_gemm_small_batches(dtype, size, sizes, cuda):
    m, k, n = size
    a, b = (torch.randn(sizes[0], m, k, device=cuda), torch.randn(sizes[1], k, n, device=cuda))
    a, b = a.to(dtype), b.to(dtype)
    assert gemm_excess(my_ops.gemm(a, b), a, b) <= 1
    a, b = a.mT.contiguous().mT, b.mT.contiguous().mT
    assert gemm_excess(my_ops.gemm(a, b), a, b) <= 1


def test_gemm_small_long_batch(cuda):
    """Longer than the second and third dimension of a launch can be."""
    a, b = torch.randn(70000, 2, 1, device=cuda), torch.randn(70000, 1, 3, device=cuda)
    assert gemm_excess(my_ops.gemm(a, b), a, b) <= 1


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("size", SMALL)
@pytest.mark.parametrize("dtype", FLOATING)
def test_linear_small_epilogues(dtype, size, activation, cuda):
    m, k, n = size
    x, weight = normal(m, k).to(dtype), normal(n, k).div(k**0.5).to(dtype)
    bias = normal(n, 1)[:, 0].to(dtype)
    residuals = None, normal(m, n).to(dtype), normal(n, 2 * m).to(dtype)[:, ::2].mT
    for residual in residuals:
        got = my_ops.linear(x, weight, bias, activation=activation, residual=residual)
        assert linear_excess(got, x, weight, bias, activation, residual) <= 1


@pytest.mark.parametrize("size", [(77, 13, 33), (32, 161, 88), (9, 501, 225), (2, 8104, 5)])
@pytest.mark.parametrize("dtype", FLOATING)
def test_gemm_small_special_values(dtype, size, cuda):
    m, k, n = size
    a, b = normal(m, k).to(dtype), normal(k, n).to(dtype)
    a[0, 5], b[9, 3], a[1, k - 1] = float("inf"), float("nan"), float("-inf")
    got, want = my_ops.gemm(a, b), a.double() @ b.double()
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.isposinf(), want.isposinf())
    assert torch.equal(got.isneginf(), want.isneginf())


@pytest.mark.parametrize("size", SMALL)
@pytest.mark.parametrize("dtype", FLOATING)
def test_gemm_small_repeats_bitwise(dtype, size, cuda):
    m, k, n = size
    a, b = normal(m, k).to(dtype), normal(k, n).to(dtype)
    first = my_ops.gemm(a, b)
    assert all(torch.equal(my_ops.gemm(a, b), first) for _ in range(50))


# The kernel of compute capability 8.0, which the plan chooses on no other GPU.


@pytest.mark.parametrize("size", [(1, 1, 1), (128, 32, 128), (127, 131, 129), (300, 999, 200)])
@pytest.mark.parametrize("a_step", [1, 3])
@pytest.mark.parametrize("a_transposed", [False, True])
@pytest.mark.parametrize("b_transposed", [False, True])
def test_gemm_fp32_sm80_layouts(a_transposed, b_transposed, a_step, size, cuda):
    m, k, n = size
    a = normal(k, m * a_step).mT[::a_step] if a_transposed else normal(m, k * a_step)[:, ::a_step]
    b = normal(n, k).mT if b_transposed else normal(k, n)
    got = gemm_fp32_sm80(a, b)
    assert gemm_excess(got, a, b) <= 1
    # The shared memory of 8.6, 8.9 and 12.0.
    assert torch.equal(gemm_fp32_sm80(a, b, shared_bytes=99 * 1024), got)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 3.4e38, 1e-42])
def test_gemm_fp32_sm80_extreme_values(value, strict_cublas):
    a, b = normal(260, 200), normal(200, 300)
    a[5, 7] = a[200, 3] = b[9, 11] = value
    got, want = gemm_fp32_sm80(a, b), a @ b
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4, equal_nan=True)


def test_gemm_fp32_sm80_repeats_bitwise(cuda):
    a = normal(700, 700)
    first = gemm_fp32_sm80(a, a)
    assert all(torch.equal(gemm_fp32_sm80(a, a), first) for _ in range(100))


@pytest.mark.parametrize("size", [(640, 640, 640), (1000, 1003, 1001)])
@pytest.mark.parametrize("a_transposed", [False, True])
@pytest.mark.parametrize("b_transposed", [False, True])
def test_gemm_float32_layouts(a_transposed, b_transposed, size, cuda):
    m, k, n = size
    a = normal(k, m).mT if a_transposed else normal(m, k)
    b = normal(n, k).mT if b_transposed else normal(k, n)
    assert gemm_excess(my_ops.gemm(a, b), a, b) <= 1
    batch = torch.stack([a, a + 1])
    assert gemm_excess(my_ops.gemm(batch, b), batch, b) <= 1


def test_gemm_float32_special_values(cuda):
    size = 640
    a, b = normal(size, size), normal(size, size)
    a[3, 5], a[7, 9], a[11] = float("inf"), float("nan"), 1e-42
    b[20, 30] = 1e37
    got, want = my_ops.gemm(a, b), a @ b
    assert got[3].isinf().sum() == want[3].isinf().sum()
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.isposinf(), want.isposinf())
    finite = want.isfinite()
    scale = (a.nan_to_num().double().abs() @ b.double().abs())[finite]
    assert ((got.double() - want.double())[finite].abs() <= 2.0**-20 * scale + 1e-43).all()


def test_gemm_float32_repeats_bit_for_bit(cuda):
    a, b = normal(1000, 1003), normal(1003, 1001)
    first = my_ops.gemm(a, b)
    assert all(torch.equal(my_ops.gemm(a, b), first) for _ in range(100))


@pytest.mark.parametrize("size", [(1000, 1024, 4096), (2048, 1024, 2112)])  # one sum, promoted
def test_gemm_float32_high_repeats_bit_for_bit(size, strict_cublas):
    m, k, n = size
    a, b = normal(m, k), normal(k, n)
    first = my_ops.gemm(a, b, precision="high")
    assert all(torch.equal(my_ops.gemm(a, b, precision="high"), first) for _ in range(10))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("size", [(700, 640, 1000), (701, 643, 1003), (2049, 1027, 2111)])
def test_linear_float32_epilogues(size, precision, activation, cuda):
    m, k, n = size
    x, weight, bias = normal(m, k), normal(n, k) / 16, normal(1, n)[0]
    unit = 2.0**-20 if precision == "highest" else 2.0**-10
    limit = unit * (x.double().abs() @ weight.double().abs().mT + bias.double().abs() + 1)
    for residual in (None, normal(m, n), normal(n, 2 * m)[:, ::2].mT):
        got = my_ops.linear(
            x, weight, bias, activation=activation, residual=residual, precision=precision
        )
        want = reference.linear(
            *(t.double() for t in (x, weight, bias)),
            activation=activation,
            residual=None if residual is None else residual.double(),
        )
        assert ((got.double() - want).abs() <= limit).all()


SEQUENCES = [  # steps, batch, inputs, hidden
    (1, 1, 3, 32),
    (7, 3, 5, 100),
    (200, 16, 64, 512),
    (64, 17, 31, 777),
    (100, 1, 16, 256),
    (40, 64, 64, 1024),
    (130, 33, 8, 128),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", SEQUENCES)
def test_lltm_long_sequences(size, dtype, cuda):
    """Compared with the reference in float64. The weights are small, so the recurrence is not
    chaotic."""
    steps, batch, inputs, hidden = size
    bound = 0.25 * hidden**-0.5
    weights = torch.empty(3 * hidden, hidden + inputs, device="cuda").uniform_(-bound, bound)
    shapes = [(steps, batch, inputs), (batch, hidden), (batch, hidden)]
    tensors = [torch.randn(shape, device="cuda") / 2 for shape in shapes]
    tensors += [weights, torch.randn(3 * hidden, device="cuda") / 8]
    ours = [t.to(dtype).requires_grad_() for t in tensors]
    exact = [t.detach().double().requires_grad_() for t in ours]
    got, want = my_ops.lltm(*ours), reference.lltm(*exact)
    grads = [torch.randn_like(t) for t in got]
    got += torch.autograd.grad(got, ours, grads)
    want += torch.autograd.grad(want, exact, [grad.double() for grad in grads])
    for value, true in zip(got, want, strict=True):
        scale = true.square().mean().sqrt().clamp(min=1)
        assert ((value.double() - true).abs().max() / scale) <= SEQUENCE_LIMIT[dtype]


@pytest.mark.parametrize("place", ["input", "h0", "c0", "weights"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("hidden", [24, 90, 64, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lltm_ends_on_any_value(dtype, hidden, value, place, cuda):
    """Blocks wait for each other's numbers, so no number may look like one that has not arrived."""
    shapes = {"input": (20, 4, 8), "h0": (4, hidden), "c0": (4, hidden)}
    shapes |= {"weights": (3 * hidden, hidden + 8), "bias": (3 * hidden,)}
    tensors = {name: torch.randn(s, device="cuda").to(dtype) / 8 for name, s in shapes.items()}
    tensors[place].view(-1)[5] = value
    tensors = {name: t.requires_grad_() for name, t in tensors.items()}
    output, _, _ = my_ops.lltm(**tensors)
    torch.autograd.grad(output, list(tensors.values()), torch.randn_like(output))
    torch.cuda.synchronize()
    assert output.isnan().any() or value == float("inf")  # infinite gates may saturate


@pytest.mark.parametrize("steps, hidden", [(30, 64), (30, 512), (260, 512)])
def test_lltm_repeats_bit_for_bit(steps, hidden, cuda):
    x = torch.randn(steps, 9, 8, device="cuda")
    layer = my_ops.nn.LLTM(8, hidden, device="cuda")

    def run():
        output, state = layer(x)
        grads = torch.autograd.grad(output.square().sum(), list(layer.parameters()))
        return [output, *state, *grads]

    first = run()
    for _ in range(100):
        assert all(torch.equal(a, b) for a, b in zip(run(), first, strict=True))
