"""gemm: values, layouts, out=. Errors of gemm and linear."""

import pytest
import torch
from samples import (
    FLOATING,
    GEMM_LIMIT,
    INTEGERS,
    NOT_REAL,
    SIXTEEN_BIT,
    arithmetic,
    gemm_excess,
    half_ulp,
)

import my_ops
from my_ops import reference

# The steepest slope of any activation, which is gelu's. It multiplies the error of the argument.
ACTIVATION_SLOPE = 1.13

# The dtypes of a and b: mixed, and these or the same.
PAIRS = [pair for half in SIXTEEN_BIT for pair in ((torch.float32, half), (half, torch.float32))]
ALL_PAIRS = [*((dtype, dtype) for dtype in FLOATING), *PAIRS]

SHAPES = [  # m, k, n
    (0, 3, 4),
    (3, 0, 4),
    (3, 4, 0),
    (0, 0, 0),
    (1, 1, 1),
    (1, 1000, 1),
    (31, 1, 31),
    (1, 31, 1000),
    (64, 64, 64),
    (65, 127, 129),
    (127, 33, 66),
    (257, 255, 63),
    (7, 4097, 9),
    (256, 1000, 512),
    (1000, 31, 1),
]


def normal(shape, dtype, device):
    return torch.randn(shape, dtype=torch.float64).to(dtype).to(device)


def magnitude_of_linear(x, weight, bias):
    """Sum of absolute values of the terms, relative to which the error of the sum is measured."""
    size = x.double().abs() @ weight.double().abs().T
    return size if bias is None else size + bias.double().abs()


def linear_excess(got, x, weight, bias, activation, residual=None):
    """The worst element's error as a share of what is allowed."""
    to64 = [None if t is None else t.double() for t in (x, weight, bias)]
    before, want = reference.linear(*to64), reference.linear(*to64, activation=activation)
    dtype = got.dtype
    stored = half_ulp(dtype) if dtype in SIXTEEN_BIT else 0.0
    allowed = GEMM_LIMIT[arithmetic(dtype)] * magnitude_of_linear(x, weight, bias)
    if activation is not None:  # the value before it may have been stored too
        allowed = ACTIVATION_SLOPE * (allowed + stored * before.abs())
        allowed = allowed + GEMM_LIMIT[arithmetic(dtype)] * want.abs()
    if residual is not None:  # the value before it may have been stored too
        allowed = allowed + (stored + GEMM_LIMIT[arithmetic(dtype)]) * want.abs()
        want = want + residual.double()
        allowed = allowed + half_ulp(dtype) * want.abs()
    allowed = allowed + stored * want.abs() + torch.finfo(dtype).tiny * torch.finfo(dtype).eps
    assert got.shape == want.shape
    assert got.dtype == torch.promote_types(x.dtype, weight.dtype)
    error = (got.double() - want).abs() / allowed
    assert not error.isnan().any()
    return error.max().item() if error.numel() else 0.0


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", FLOATING)
def test_gemm_values(dtype, shape, device):
    m, k, n = shape
    a, b = normal((m, k), dtype, device), normal((k, n), dtype, device)
    got = my_ops.gemm(a, b)
    assert (got.dtype, got.device) == (dtype, a.device)
    assert gemm_excess(got, a, b) <= 1


@pytest.mark.parametrize("sizes", [(1, 1), (3, 3), (3, 1), (1, 3), (3, None), (None, 3), (0, 1)])
@pytest.mark.parametrize("shape", [(5, 7, 3), (65, 33, 70), (0, 3, 2), (4, 0, 2)])
@pytest.mark.parametrize("dtypes", ALL_PAIRS)
def test_gemm_batches_broadcast(dtypes, shape, sizes, device):
    m, k, n = shape
    a_batch, b_batch = [() if size is None else (size,) for size in sizes]
    a, b = normal((*a_batch, m, k), dtypes[0], device), normal((*b_batch, k, n), dtypes[1], device)
    assert gemm_excess(my_ops.gemm(a, b), a, b) <= 1


def matrix_layouts(rows, columns, dtype, device):
    # Small integers, because sums of repeated numbers are then exact; random ones would drift one
    # way.
    wide = torch.randint(-4, 5, (2 * rows + 3, 3 * columns + 5)).to(dtype).to(device)
    return {
        "contiguous": wide[:rows, :columns].contiguous(),
        "transposed": wide[:columns, :rows].contiguous().T,
        "row-pitch": wide[2 : rows + 2, 1 : columns + 1],
        "transposed-row-pitch": wide.flatten()[: columns * (rows + 3)]
        .view(columns, rows + 3)[:, 3:]
        .T,
        "both-strides": wide[: 2 * rows : 2, : 3 * columns : 3],
        "repeated-row": wide[:1, :columns].expand(rows, columns),
        "repeated-column": wide[:rows, :1].expand(rows, columns),
        "odd-offset": wide.flatten()[1 : 1 + rows * columns].view(rows, columns),
    }


LAYOUTS = list(matrix_layouts(2, 2, torch.float32, "cpu"))


@pytest.mark.parametrize("b_layout", LAYOUTS)
@pytest.mark.parametrize("a_layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATING)
def test_gemm_layouts(dtype, a_layout, b_layout, device):
    a = matrix_layouts(70, 33, dtype, device)[a_layout]
    b = matrix_layouts(33, 65, dtype, device)[b_layout]
    assert gemm_excess(my_ops.gemm(a, b), a, b) <= 1


@pytest.mark.parametrize("dtypes", ALL_PAIRS)
def test_gemm_batch_layouts(dtypes, device):
    a = normal((6, 5, 4), dtypes[0], device)
    views = [a, a.transpose(0, 1), a.mT, a[::2], a[1:, :, 1:], a[:1].expand(3, 5, 4), a[:0]]
    for view in views:
        b = normal((view.shape[2], 7), dtypes[1], device)
        assert gemm_excess(my_ops.gemm(view, b), view, b) <= 1
        b = normal((3, view.shape[1]), dtypes[1], device)
        assert gemm_excess(my_ops.gemm(b, view), b, view) <= 1


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dtype", FLOATING)
def test_gemm_repeated_row_beside_a_repeated_batch(dtype, rows, device):
    """The batch is folded into the rows, whose stride is 0 too."""
    a, b = normal((1, 5), dtype, device), normal((1, 5, 2), dtype, device).expand(11, 5, 2)
    a = a.as_strided((rows, 5), (0, 1))
    out = torch.empty(11, rows, 2, dtype=dtype, device=device)
    for got in (my_ops.gemm(a, b), my_ops.gemm(a, b, out=out)):
        assert gemm_excess(got, a, b) <= 1


@pytest.mark.parametrize("k", [64, 1024, 8192])
def test_gemm_16_bit_sums_in_float32(k, device):
    a, b = torch.full((3, k), 1.0), torch.full((k, 5), 2.0**-7)
    for dtype in SIXTEEN_BIT:  # summed in bfloat16, 2 and more would not grow further
        got = my_ops.gemm(a.to(dtype).to(device), b.to(dtype).to(device))
        assert torch.equal(got.cpu(), torch.full((3, 5), k * 2.0**-7, dtype=dtype))


@pytest.mark.parametrize("size", [3, 66, 300])
@pytest.mark.parametrize("dtype", FLOATING)
def test_gemm_not_a_number_and_infinity(dtype, size, device):
    a, b = torch.eye(size, dtype=dtype), torch.ones(size, size, dtype=dtype)
    a[1, 1], a[2, 2] = float("nan"), torch.finfo(dtype).max
    b[0, 0] = float("inf")
    got = my_ops.gemm(a.to(device), b.to(device)).cpu()
    if device == "cpu":  # ATen's 16-bit products turn some infinities into NaN
        torch.testing.assert_close(got, torch.mm(a, b), rtol=0, atol=0, equal_nan=True)
        return
    assert got[1].isnan().all()
    assert got[0, 0] == float("inf")
    assert got[1:, 0].isnan().all()  # 0 * inf
    assert (got[2, 1:] == torch.finfo(dtype).max).all()
    assert (got[0, 1:] == 1).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", FLOATING)
def test_gemm_out(dtype, shape, device):
    m, k, n = shape
    a, b = normal((m, k), dtype, device), normal((k, n), dtype, device)
    out = torch.full((m, n), float("nan"), dtype=dtype, device=device)
    assert my_ops.gemm(a, b, out=out) is out
    assert gemm_excess(out, a, b) <= 1


@pytest.mark.parametrize("sizes", [(70, 33, 65), (5, 3, 4)])
@pytest.mark.parametrize("layout", [n for n in LAYOUTS if not n.startswith("repeated")])
@pytest.mark.parametrize("dtype", FLOATING)
def test_gemm_out_into_a_view(dtype, layout, sizes, device):
    m, k, n = sizes
    a, b = normal((m, k), dtype, device), normal((k, n), dtype, device)
    out = matrix_layouts(m, n, dtype, device)[layout]
    whole = out if out._base is None else out._base
    outside = torch.ones_like(whole, dtype=torch.bool)
    outside.as_strided(out.shape, out.stride(), out.storage_offset()).fill_(False)
    before = whole.clone()
    my_ops.gemm(a, b, out=out)
    assert gemm_excess(out, a, b) <= 1
    assert torch.equal(whole[outside], before[outside])


@pytest.mark.parametrize("dtype", FLOATING)
def test_gemm_out_batched_view(dtype, device):
    a, b = normal((3, 5, 4), dtype, device), normal((4, 6), dtype, device)
    out = torch.full((5, 6, 3), float("nan"), dtype=dtype, device=device).permute(2, 0, 1)
    my_ops.gemm(a, b, out=out)
    assert gemm_excess(out, a, b) <= 1


def test_gemm_out_beside_its_inputs_in_one_storage(device):
    memory = torch.randn(3, 4, 4, device=device)
    a, b, out = memory.unbind()
    my_ops.gemm(a, b, out=out)
    assert gemm_excess(memory[2], a, b) <= 1


# --------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("wrong", [1.5, "x", None, [1]], ids=repr)
@pytest.mark.parametrize("place", ["a", "b", "out"])
def test_gemm_wrong_type(place, wrong):
    if place == "out" and wrong is None:
        pytest.skip("None is the default")
    args = {"a": torch.zeros(2, 2), "b": torch.zeros(2, 2), place: wrong}
    with pytest.raises(TypeError, match=f"^gemm: {place} must be .*Tensor.*{type(wrong).__name__}"):
        my_ops.gemm(**args)


@pytest.mark.parametrize("dtype", [*INTEGERS, *NOT_REAL])
def test_gemm_and_linear_wrong_dtype(dtype, device, rejects):
    a = torch.ones(2, 2, device=device).to(dtype)
    for name, argument in (("gemm", "a"), ("linear", "x")):
        with rejects(RuntimeError, rf"{name}: {argument} must be of dtype float64, .*got \w+", a):
            getattr(my_ops, name)(a, a)


def test_mixed_dtypes(device, rejects):
    a, b = torch.ones(2, 2, device=device), torch.ones(2, 2, device=device).double()
    mixed = "or one must be float32 and the other float16 or bfloat16, got float64 and float32"
    of_result = "must have the dtype of the result, got float64 and float32"
    for call, match in (
        (lambda: my_ops.gemm(a, b), f"gemm: b must have the dtype of a, {mixed}"),
        (lambda: my_ops.gemm(a, a, out=b), f"gemm: out {of_result}"),
        (lambda: my_ops.linear(a, b), f"linear: weight must have the dtype of x, {mixed}"),
        (lambda: my_ops.linear(a, a, b[0]), f"linear: bias {of_result}"),
    ):
        with rejects(RuntimeError, match, a, b):
            call()


@pytest.mark.parametrize(
    "a, b, match",
    [
        ((3,), (3, 4), r"gemm: a must be \(m, k\) or \(batch, m, k\), got \(3,\)"),
        ((2, 3), (3,), r"gemm: b must be \(k, n\) or \(batch, k, n\), got \(3,\)"),
        ((1, 1, 2, 3), (3, 4), r"gemm: a must be .*got \(1, 1, 2, 3\)"),
        ((), (), r"gemm: a must be .*got \(\)"),
        ((2, 3), (4, 5), r"gemm: b must have .*rows.*got \(2, 3\) and \(4, 5\)"),
        ((2, 3), (1, 5), r"gemm: b must have .*rows.*got \(2, 3\) and \(1, 5\)"),
        ((2, 2, 3), (3, 3, 4), r"gemm: the batch of b .*got \(2, 2, 3\) and \(3, 3, 4\)"),
        ((2, 2, 3), (0, 3, 4), r"gemm: the batch of b .*got \(2, 2, 3\) and \(0, 3, 4\)"),
    ],
)
def test_gemm_wrong_shape(a, b, match, device, rejects):
    a, b = torch.ones(a, device=device), torch.ones(b, device=device)
    with rejects(RuntimeError, match, a, b):
        my_ops.gemm(a, b)


@pytest.mark.parametrize("shape", [(2, 5), (4, 2), (1, 2, 4), (8,), (2, 1), ()])
def test_gemm_out_wrong_shape(shape, device, rejects):
    a, b = torch.ones(2, 3, device=device), torch.ones(3, 4, device=device)
    out = torch.ones(shape, device=device)
    shown = str(shape).replace("(", r"\(").replace(")", r"\)")
    with rejects(RuntimeError, rf"gemm: out must be of shape \(2, 4\), got {shown}", a, b, out):
        my_ops.gemm(a, b, out=out)


def test_gemm_out_overlaps(device, rejects):
    a, b = torch.ones(4, 4, device=device), torch.ones(4, 4, device=device)
    memory = torch.ones(40, device=device)
    ahead = memory[:16].view(4, 4)
    for args, out, match in (
        ((a, b), a, "gemm: out must not overlap a"),
        ((a, b), b, "gemm: out must not overlap b"),
        ((a, b), b.T, "gemm: out must not overlap b"),
        ((ahead, b), memory[15:31].view(4, 4), "gemm: out must not overlap a"),
        ((a, b), a[0].expand(4, 4), "gemm: out must not "),
        ((a, b), memory[:1].expand(4, 4), "gemm: out must not hold two elements at one address"),
        (
            (a, b),
            memory.as_strided((4, 4), (3, 1)),
            r"gemm: out must not hold .* got strides \(3, 1",
        ),
    ):
        with rejects(RuntimeError, match, *args, memory):
            my_ops.gemm(*args, out=out)


@pytest.mark.parametrize("batch", [(), (3,)], ids=["matrix", "batch"])
@pytest.mark.parametrize("dtype", FLOATING)
def test_gradients_of_transposed_operands_are_transposed_in_memory(dtype, batch, device):
    a = normal((*batch, 5, 9), dtype, device).mT.requires_grad_()
    b = normal((*batch, 7, 5), dtype, device).mT.requires_grad_()
    grad = normal((*batch, 9, 7), dtype, device)
    got_a, got_b = torch.autograd.grad(my_ops.gemm(a, b), (a, b), grad)
    assert got_a.stride() == a.stride()
    assert got_b.stride() == b.stride()
    assert gemm_excess(got_a, grad, b.detach().mT) <= 1
    assert gemm_excess(got_b, a.detach().mT, grad) <= 1


def test_gemm_out_with_gradient_is_refused(device, rejects):
    a, b, out = (torch.ones(2, 2, device=device) for _ in range(3))
    for leaf in (a, b, out):
        leaf.requires_grad_()
        with rejects(RuntimeError, "gemm: out= does not support automatic diff.*", a, b, out):
            my_ops.gemm(a, b, out=out)
        with torch.no_grad():
            my_ops.gemm(a, b, out=out)
        leaf.requires_grad_(False)


@pytest.mark.parametrize(
    "shapes, match",
    [
        (((2, 3), (4, 2), None), r"linear: weight must .*in_features.*got \(2, 3\) and \(4, 2\)"),
        (((), (4, 2), None), r"linear: x must have at least one dimension, got \(\)"),
        (((2, 3), (3,), None), r"linear: weight must be \(out_features, in_features\), got \(3,\)"),
        (((2, 3), (1, 4, 3), None), r"linear: weight must be .*, got \(1, 4, 3\)"),
        (((2, 3), (4, 3), (3,)), r"linear: bias must be \(out_features,\) = \(4,\), got \(3,\)"),
        (((2, 3), (4, 3), (1, 4)), r"linear: bias must be .*\(4,\), got \(1, 4\)"),
        (((2, 3), (4, 3), (1,)), r"linear: bias must be .*\(4,\), got \(1,\)"),
        (((2, 3), (4, 3), ()), r"linear: bias must be .*\(4,\), got \(\)"),
    ],
)
def test_linear_wrong_shape(shapes, match, device, rejects):
    tensors = [None if s is None else torch.ones(s, device=device) for s in shapes]
    with rejects(RuntimeError, match, *[t for t in tensors if t is not None]):
        my_ops.linear(*tensors)


def test_linear_wrong_activation(device, rejects):
    x = torch.ones(2, 2, device=device)
    with rejects(ValueError, "linear: activation must be .*relu.*, got 'tanh'", x):
        my_ops.linear(x, x, activation="tanh")
    with rejects(TypeError, "linear: activation must be a str or None, got int", x):
        my_ops.linear(x, x, activation=1)
    for args, name in (((1, x), "x"), ((x, 1), "weight"), ((x, x, 1), "bias")):
        with rejects(TypeError, f"linear: {name} must be a torch.Tensor.*, got int", x):
            my_ops.linear(*args)


def test_linear_wrong_residual(device, rejects):
    x, y = torch.ones(2, 3, device=device), torch.ones(4, 3, device=device)
    for shape in ((2, 3), (4,), (1, 2, 4)):
        residual = torch.ones(shape, device=device)
        with rejects(
            RuntimeError,
            r"linear: residual must be of the shape of the output = \(2, 4\)",
            x,
            residual,
        ):
            my_ops.linear(x, y, residual=residual)
    with rejects(RuntimeError, "linear: residual must have the dtype of the result, got", x):
        my_ops.linear(x, y, residual=torch.ones(2, 4, device=device, dtype=torch.float64))
    with rejects(TypeError, "linear: residual must be a torch.Tensor, got int", x):
        my_ops.linear(x, y, residual=1)


def test_mixed_devices(cuda, rejects):
    a, b = torch.ones(2, 2, device=cuda), torch.ones(2, 2)
    for call, match in (
        (lambda: my_ops.gemm(a, b), "gemm: b must be on the device of a, got cpu and cuda:0"),
        (lambda: my_ops.gemm(b, a), "gemm: b must be on the device of a, got cuda:0 and cpu"),
        (lambda: my_ops.gemm(a, a, out=b), "gemm: out must be on the device of a, got cpu"),
        (lambda: my_ops.linear(a, b), "linear: weight must be on the device of x, got cpu"),
        (lambda: my_ops.linear(a, a, b[0]), "linear: bias must be on the device of x, got cpu"),
    ):
        with rejects(RuntimeError, match, a, b):
            call()


@pytest.mark.parametrize("shape", [(0,), (3, 0), (2, 3, 0), (2, 1, 3, 0)])
def test_linear_of_no_features(shape, device):
    """An empty sum: the bias is the result, for any number of rows."""
    x, weight = torch.zeros(shape, device=device), torch.zeros(4, 0, device=device)
    bias = torch.randn(4, device=device)
    assert torch.equal(my_ops.linear(x, weight, bias), bias.expand(*shape[:-1], 4))


# Two of 154,000 random products of such data, one of 56 x 486 x 1699 and one of 252 x 5 x 1540, had
# errors 3 % above (2 sqrt(k) + 6) 2^-24 of the sum of absolute values. torch's have the same.
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(
    ("batch", "m", "k", "n", "b_transposed"),
    [
        *[(2, 56, 1699, 486, True), (2, 56, 486, 1699, True)],
        *[(8, 252, 1540, 5, False), (8, 252, 5, 1540, False)],
    ],
)
def test_gemm_of_wide_range_is_as_accurate_as_torchs(batch, m, k, n, b_transposed, seed, device):
    torch.manual_seed(seed)
    a, b = (
        (4 * torch.randn(batch, rows, columns, device=device)).exp()
        for rows, columns in ((m, k), (n, k) if b_transposed else (k, n))
    )
    b = b.mT if b_transposed else b
    if seed % 2:
        b = torch.ldexp(b, torch.randint(-40, 41, (batch, k, 1), device=device))
    want = a.double() @ b.double()  # positive, so it is also the sum of absolute values
    ours, theirs = (
        ((f(a, b).double() - want).abs() / want).max().item() for f in (my_ops.gemm, torch.bmm)
    )
    assert ours <= 1.1 * theirs
