"""add_one, custom_add, d_sigmoid, round_ste and fill_index: values, layouts, dtypes, errors."""

import decimal
import math

import pytest
import torch
from samples import (
    ALL,
    FLOATING,
    INTEGERS,
    NOT_REAL,
    ROUNDED_ONCE,
    SIXTEEN_BIT,
    UNSIGNED,
    exact_d_sigmoid,
    layouts,
    special,
    ulps,
    values,
)

import my_ops
from my_ops import reference

SIZES = [0, 1, 31, 1000, 4097, 1 << 20]

# Limits in units in the last place of a float32 or float64 result: see ulp_limit. The reference
# rounds too, in float64.
SUM_ULP = 1.0  # two roundings of the arithmetic, or one of it and one when the result is stored
D_SIGMOID_ULP = 4.0
D_SIGMOID_GRAD_ULP = 8.0  # exp, expm1, five products and quotients

UNARY = {"add_one": SUM_ULP, "d_sigmoid": D_SIGMOID_ULP, "round_ste": 0.0}


def ulp_limit(limit, dtype):
    return min(limit, ROUNDED_ONCE) if dtype in SIXTEEN_BIT else limit


def check_unary(name, x):
    op = getattr(my_ops, name)
    want = exact_d_sigmoid if name == "d_sigmoid" else getattr(reference, name)
    before = x.clone()
    got = op(x)
    assert got.dtype == x.dtype
    assert got.shape == x.shape
    assert got.device == x.device
    assert ulps(got.cpu(), want(x.cpu().double())) <= ulp_limit(UNARY[name], x.dtype)
    torch.testing.assert_close(x, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("name", UNARY)
def test_unary_values(name, dtype, size, device):
    check_unary(name, values(dtype, size, device))


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("name", UNARY)
def test_unary_special_values(name, dtype, device):
    check_unary(name, special(dtype, device))


@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
@pytest.mark.parametrize("name", UNARY)
def test_unary_every_16_bit_number(name, dtype, device):
    numbers = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    check_unary(name, numbers[~numbers.isnan()].to(device))


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("size", SIZES)
def test_custom_add_values(size, dtype, device):
    a, b = values(dtype, size, device), values(dtype, size, device)
    got = my_ops.custom_add(a, b)
    assert got.dtype == dtype
    a, b = a.cpu().double(), b.cpu().double()
    # The first sum is rounded too: if 1 cancels it, its last place is the unit of the error.
    assert ulps(got.cpu(), reference.custom_add(a, b), scale=a + b) <= ulp_limit(SUM_ULP, dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_custom_add_special_values(dtype, device):
    x = special(dtype, device)
    a, b = x[:, None], x[None, :]
    torch.testing.assert_close(
        my_ops.custom_add(a, b), reference.custom_add(a, b), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_wrap_around(dtype, size, device):
    a, b = values(dtype, size, device), values(dtype, size, device)
    ends = torch.tensor([torch.iinfo(dtype).max, torch.iinfo(dtype).min], dtype=dtype)
    a[:2] = ends.to(device)[: a.numel()]
    b[:2] = ends.to(device)[: b.numel()]
    one, total = my_ops.add_one(a), my_ops.custom_add(a, b)
    assert one.dtype == total.dtype == dtype
    wide_a, wide_b = a.cpu().to(torch.int64), b.cpu().to(torch.int64)
    # int64 arithmetic converted back to the dtype, which wraps as in two's complement.
    for got, want in ((one, wide_a + 1), (total, wide_a + wide_b + 1)):
        assert torch.equal(got.cpu().to(torch.int64), want.to(dtype).to(torch.int64))


@pytest.mark.parametrize("number", [0, -1, 41, 2**31, -(2**63)])
def test_add_one_of_a_python_int(number):
    got = my_ops.add_one(number)
    assert type(got) is int
    assert got == number + 1
    assert torch.ops.my_ops.add_one(number) == number + 1


@pytest.mark.parametrize("dtype", ALL)
def test_zero_dimensional(dtype, device):
    x = torch.tensor(2, dtype=dtype, device=device)
    got = my_ops.add_one(x)
    assert got.shape == ()
    assert got.item() == 3
    assert my_ops.custom_add(x, x).item() == 5


@pytest.mark.parametrize("second", ALL)
@pytest.mark.parametrize("first", ALL)
@pytest.mark.parametrize("shapes", [((5,), (5,)), ((2, 3), ()), ((), (4,))])
def test_custom_add_promotes_like_torch(shapes, first, second, device):
    a = torch.randint(0, 9, shapes[0]).to(first).to(device)
    b = torch.randint(0, 9, shapes[1]).to(second).to(device)
    got = my_ops.custom_add(a, b)
    assert got.dtype == torch.result_type(a, b)
    assert torch.equal(got, reference.custom_add(a, b))


@pytest.mark.parametrize("dtype", UNSIGNED)
def test_custom_add_refuses_what_torch_does_not_promote(dtype, device):
    a = torch.zeros(3, dtype=dtype, device=device)
    b = torch.zeros(3, dtype=torch.int16, device=device)
    with pytest.raises(RuntimeError):
        torch.result_type(a, b)
    with pytest.raises(RuntimeError):
        my_ops.custom_add(a, b)


BROADCASTS = [
    ((3,), ()),
    ((), ()),
    ((1,), (7,)),
    ((4, 1), (1, 5)),
    ((4, 5), (5,)),
    ((4, 5), (4, 1)),
    ((2, 1, 3, 1), (5, 1, 4)),
    ((0, 3), (1, 3)),
    ((0, 1), (1, 5)),
    ((1, 1, 1), (0,)),
    ((33, 1, 1000), (1, 7, 1)),
    ((5, 1, 32), (3, 32)),  # whole vectors of every type
    ((2, 1) * 5, (1, 2) * 5),  # ten dimensions of which no two can be merged
    ((2, 1) * 4, (1, 2) * 4),
    ((2, 1, 2, 1, 2, 1, 2, 1, 3), (1, 2, 1, 2, 1, 2, 1, 2, 3)),
]


SIZED = [torch.int8, torch.int16, torch.int32, torch.int64, *FLOATING]  # a kernel for each size


@pytest.mark.parametrize("dtype", SIZED)
@pytest.mark.parametrize("shapes", BROADCASTS)
def test_custom_add_broadcasts(shapes, dtype, device):
    a, b = (torch.randint(0, 99, s).to(dtype).to(device) for s in shapes)
    wide = torch.float32 if dtype == torch.bfloat16 else dtype  # the reference rounds twice in it
    for left, right in ((a, b), (b, a)):
        want = reference.custom_add(left.to(wide), right.to(wide)).to(dtype)
        torch.testing.assert_close(my_ops.custom_add(left, right), want, rtol=0, atol=0)


@pytest.mark.parametrize("layout", layouts("cpu"))
@pytest.mark.parametrize("name", UNARY)
def test_unary_layouts(name, layout, device):
    check_unary(name, layouts(device)[layout])


@pytest.mark.parametrize("layout", layouts("cpu"))
def test_custom_add_layouts(layout, device):
    x = layouts(device)[layout]
    y = torch.randn(x.shape, device=device)
    for a, b in ((x, y), (y, x), (x, x)):
        assert torch.equal(my_ops.custom_add(a, b), reference.custom_add(a, b))


def images(device):
    """(1, 3, 4, 5) in many layouts; the stride of the first dimension has no meaning."""
    image = torch.randn(1, 3, 8, 5, device=device)
    channels_last = image.to(memory_format=torch.channels_last)
    return {
        "contiguous": image[:, :, :4].contiguous(),
        "channels-last": channels_last[:, :, :4].contiguous(memory_format=torch.channels_last),
        "a-part": image[:, :, :4],
        "a-part-of-channels-last": channels_last[:, :, :4],  # and still channels-last
        "all-of-a-larger-batch": torch.randn(2, 3, 4, 5, device=device)[1:],
        "channels-of-more": torch.randn(1, 6, 4, 5, device=device)[:, 3:],
        "a-part-of-width-first": torch.randn(1, 9, 4, 3, device=device).permute(0, 3, 2, 1)[
            ..., :5
        ],
        "expanded": image[:, :, :1, :1].expand(1, 3, 4, 5),
    }


@pytest.mark.parametrize("second", images("cpu"))
@pytest.mark.parametrize("first", images("cpu"))
def test_strides_are_torch_s(first, second, device):
    a, b = images(device)[first], images(device)[second]
    assert my_ops.add_one(a).stride() == torch.neg(a).stride()
    for x, y in ((a, b), (a, b[0, 0]), (a[:, :1], b)):
        assert my_ops.custom_add(x, y).stride() == (x + y).stride()
    assert torch.ops.my_ops.d_sigmoid_backward(a, b).stride() == (a + b).stride()


@pytest.mark.parametrize("offset", range(16))
@pytest.mark.parametrize("dtype", SIZED)
def test_every_alignment(dtype, offset, device):
    x = torch.randint(0, 99, (3000,)).to(dtype).to(device)
    a, b = x[offset : 1480 + offset], x[1500 : 3000 - offset][:1480]
    assert torch.equal(my_ops.add_one(a), reference.add_one(a))
    assert torch.equal(my_ops.custom_add(a, b), (a.double() + b.double() + 1).to(dtype))
    if dtype.is_floating_point:
        assert torch.equal(my_ops.d_sigmoid(a), my_ops.d_sigmoid(a.clone()))
        backward = torch.ops.my_ops.d_sigmoid_backward
        assert torch.equal(backward(a, b), backward(a.clone(), b.clone()))


# Here is the worst of all floats on the CPU: 2.45 units.
@pytest.mark.slow
def test_d_sigmoid_of_every_float_from_2_to_8(device):
    for begin in range(2, 8):
        first, last = torch.tensor([begin, begin + 1.0]).view(torch.int32).tolist()
        z = torch.arange(first, last, dtype=torch.int32).view(torch.float32)
        check_unary("d_sigmoid", z.to(device))


# Where (1 + e)(1 + e) with a rounded 1 + e, of an exact exp and of one that is off by a unit, gave
# results 4.2 and 5.3 units off.
@pytest.mark.parametrize("z", ["0x1.8f202ed31f2adp+2", "0x1.8f0e1115236c6p+2"])
def test_d_sigmoid_in_float64(z, device):
    z = float.fromhex(z)
    numbers = my_ops.d_sigmoid(torch.full((9,), z, dtype=torch.float64, device=device)).tolist()
    with decimal.localcontext() as context:
        context.prec = 50
        e = (-decimal.Decimal(z)).exp()
        want = e / (1 + e) ** 2
        for got in numbers:
            error = abs(decimal.Decimal(got) - want)
            assert error <= decimal.Decimal(D_SIGMOID_ULP) * decimal.Decimal(math.ulp(got))


@pytest.mark.parametrize("dtype", FLOATING)
def test_d_sigmoid_gradient_values(dtype, device):
    z = values(dtype, 4097, device).requires_grad_()
    (got,) = torch.autograd.grad(my_ops.d_sigmoid(z).sum(), z)
    z64 = z.detach().cpu().double()
    want = exact_d_sigmoid(z64) * -torch.tanh(z64 / 2)  # s(1 - s)(1 - 2s)
    assert got.dtype == dtype
    assert ulps(got.cpu(), want) <= ulp_limit(D_SIGMOID_GRAD_ULP, dtype)


@pytest.mark.parametrize("dtype", FLOATING)
def test_round_ste_is_straight_through(dtype, device):
    x = special(dtype, device).requires_grad_()
    grad = torch.randn(x.shape, device=device).to(dtype)
    (got,) = torch.autograd.grad(my_ops.round_ste(x), x, grad)
    assert torch.equal(got, grad)


def test_round_ste_rounds_at_one_half(device):
    below = torch.tensor(0.5, device=device).nextafter(torch.tensor(0.0, device=device))
    x = torch.stack([below, torch.full_like(below, 0.5), -below, torch.full_like(below, 1.5)])
    assert my_ops.round_ste(x).tolist() == [0.0, 1.0, 0.0, 1.0]


INDEX_DTYPES = [*FLOATING, torch.int32, torch.int64]
INDEX_SHAPES = [(0, 0), (0, 5), (5, 0), (1, 1), (31, 33), (1, 4097), (4097, 1), (1000, 1000)]


@pytest.mark.parametrize("shape", INDEX_SHAPES)
@pytest.mark.parametrize("dtype", INDEX_DTYPES)
def test_fill_index_values(dtype, shape, device):
    got = my_ops.fill_index(*shape, dtype=dtype, device=device)
    assert got.device.type == device
    assert got.is_contiguous()
    assert not got.requires_grad
    torch.testing.assert_close(
        got, reference.fill_index(*shape, dtype=dtype, device=device), rtol=0, atol=0
    )


def test_fill_index_defaults():
    got = my_ops.fill_index(2, 3)
    assert (got.dtype, got.device.type) == (torch.float32, "cpu")
    assert got.tolist() == [[0, 1, 2], [1, 2, 3]]
    with torch.device("meta"):
        assert my_ops.fill_index(2, 3).device.type == "meta"


@pytest.mark.parametrize("width", [70_000, (1 << 24) + 16, (1 << 24) + 17])
@pytest.mark.parametrize("dtype", INDEX_DTYPES)
def test_fill_index_beyond_exact_integers(dtype, width, device):
    got = my_ops.fill_index(2, width, dtype=dtype, device=device)
    assert torch.equal(got, reference.fill_index(2, width, dtype=dtype, device=device))


TENSOR_OPS = ["add_one", "custom_add", "d_sigmoid", "round_ste"]


@pytest.mark.parametrize("wrong", [1.5, "x", None, [1], True, torch.float32], ids=repr)
@pytest.mark.parametrize("name", TENSOR_OPS)
def test_wrong_type(name, wrong):
    argument = {"custom_add": "a", "d_sigmoid": "z"}.get(name, "x")
    args = (wrong, torch.zeros(1)) if name == "custom_add" else (wrong,)
    with pytest.raises(
        TypeError, match=rf"^{name}: {argument} must be .*Tensor.*{type(wrong).__name__}"
    ):
        getattr(my_ops, name)(*args)


def test_custom_add_wrong_second_type():
    with pytest.raises(TypeError, match=r"^custom_add: b must be .*Tensor.*float"):
        my_ops.custom_add(torch.zeros(1), 1.0)


@pytest.mark.parametrize("dtype", [*INTEGERS, *NOT_REAL])
@pytest.mark.parametrize("name", ["d_sigmoid", "round_ste"])
def test_wrong_dtype_floating(name, dtype, device, rejects):
    x = torch.ones(3, device=device).to(dtype)
    with rejects(RuntimeError, rf"{name}: [xz] must be of dtype float64, .*, got \w+", x):
        getattr(my_ops, name)(x)


@pytest.mark.parametrize(
    "args, error, match",
    [
        ((1.0, 3), TypeError, "fill_index: height must be an int, got float"),
        ((3, None), TypeError, "fill_index: width must be an int, got NoneType"),
        ((True, 3), TypeError, "fill_index: height must be an int, got bool"),
        ((-1, 3), ValueError, "fill_index: height must not be negative, got -1"),
    ],
)
def test_fill_index_wrong_sizes(args, error, match, device):
    with pytest.raises(error, match=match):
        my_ops.fill_index(*args, device=device)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.uint8, *UNSIGNED, *NOT_REAL])
def test_fill_index_wrong_dtype(dtype, device):
    with pytest.raises(ValueError, match=r"fill_index: dtype must be floating, int32 or int64"):
        my_ops.fill_index(2, 3, dtype=dtype, device=device)


@pytest.mark.parametrize("device", ["xla", "mps", torch.device("lazy", 1)], ids=str)
def test_fill_index_on_devices_without_kernels(device):
    with pytest.raises(NotImplementedError, match=f"fill_index: device must be .* got {device}"):
        my_ops.fill_index(2, 3, device=device)


def test_fill_index_dtype_is_no_dtype():
    with pytest.raises(TypeError, match=r"fill_index: dtype must be a torch\.dtype, got str"):
        my_ops.fill_index(2, 3, dtype="float32")
