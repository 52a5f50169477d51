"""Checks of convolutions under the switch, which test_fast_fp32.py runs in their own process, as it
does those of fast_fp32_checks.py. Only compiled kernels replace torch's convolutions."""

import contextlib
import ctypes

import pytest
import torch
import torch.nn.functional as F
from fast_fp32_checks import (
    DEVICE,
    LIMIT,
    MODULE,
    ON_CPU,
    ON_CUDA,
    OTHER,
    PLAN,
    PRECISION,
    gains,  # noqa: F401
    leaves,
    randn,
    switched_on,  # noqa: F401
    takes,
)

import my_ops

CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d}
LAST = {1: None, 2: torch.channels_last, 3: torch.channels_last_3d}
# Points, enough for the stand-in's least product even of one image of every other point.
SPACE = {1: (5000,), 2: (100, 81), 3: (26, 27, 28)} if DEVICE == "cpu" else {
    1: (40000,), 2: (201, 200), 3: (40, 41, 42)
}  # fmt: skip
CHANNELS, OUTPUTS = (40, 56) if DEVICE == "cpu" else (512, 640)
RULE = "while TF32 is allowed in convolutions"


@pytest.fixture(autouse=True)
def strict():
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


def operands(space, batch=1, last=False, bias=True):
    rank = len(space)
    x, weight = randn(batch, CHANNELS, *space), randn(OUTPUTS, CHANNELS, *[1] * rank)
    if last and rank == 1:
        x = x.mT.contiguous().mT
    elif last:
        x, weight = (t.to(memory_format=LAST[rank]) for t in (x, weight))
    return x, weight, randn(OUTPUTS) if bias else None


def convolve(x, *others, transposed=False, **options):
    return (TRANSPOSED if transposed else CONVOLUTIONS)[x.dim() - 2](x, *others, **options)


def results(x, weight, bias, stride=1, grad=None, **options):
    """The output, and the gradients of all operands for a gradient of the output."""
    inputs = [t.detach().requires_grad_() for t in (x, weight, bias) if t is not None]
    y = convolve(*inputs, stride=stride, **options)
    grad = torch.linspace(-1, 1, y.numel(), device=DEVICE).view_as(y) if grad is None else grad
    return [y, *torch.autograd.grad(y, inputs, grad.to(y.dtype))]


def assert_as_exact(found, operands_, **how):
    """Errors are relative to the products of the magnitudes. Strides are torch's."""
    with my_ops.fast_fp32(False):
        exact = results(*(t if t is None else t.double() for t in operands_), **how)
        if "grad" in how:
            how["grad"] = how["grad"].abs()
        scale = results(*(t if t is None else t.double().abs() for t in operands_), **how)
    for ours, value, size in zip(found, exact, scale, strict=True):
        assert ours.dtype == torch.float32
        assert (ours - value).abs().max() <= LIMIT * size.abs().max()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_values_and_gradients(rank, last, batch, stride, bias):
    given = operands(SPACE[rank], batch, last, bias)
    grad = randn(batch, OUTPUTS, *(-(-size // stride) for size in SPACE[rank]))
    with takes(*["convolution"] * 3):
        found = results(*given, stride, grad)
    assert_as_exact(found, given, stride=stride, grad=grad)
    with my_ops.fast_fp32(False):
        torchs = results(*given, stride, grad)
    if DEVICE == "cuda" or rank < 3:  # on the CPU torch has no channels_last in 3-D
        assert [t.stride() for t in found] == [t.stride() for t in torchs]


@pytest.mark.parametrize(
    ("space", "batch"),
    [((4, 4), 128), ((24, 24), 8)] if DEVICE == "cpu" else [((8, 8), 128), ((80, 80), 8)],
)
def test_gradients_by_copies_and_by_sums(space, batch):
    """Few points of many channels, and the reverse."""
    given = operands(space, batch)
    grad = randn(batch, OUTPUTS, *space)
    with takes(*["convolution"] * 3):
        found = results(*given, grad=grad)
    assert_as_exact(found, given, grad=grad)


def test_expanded_gradient():
    x, weight, bias = (t.requires_grad_() for t in operands(SPACE[2], 2))
    y = F.conv2d(x, weight, bias)
    y.sum().backward()
    torch.testing.assert_close(bias.grad, torch.full_like(bias, y.numel() / OUTPUTS))
    want = weight.sum(0).view(1, -1, 1, 1).expand_as(x)
    torch.testing.assert_close(x.grad, want, rtol=1e-4, atol=1e-4)
    want = x.sum((0, 2, 3)).view(1, -1, 1, 1).expand_as(weight)
    torch.testing.assert_close(weight.grad, want, rtol=1e-3, atol=1e-2)


def test_only_the_gradients_that_are_needed():
    x, weight, bias = operands(SPACE[2], 2)
    weight.requires_grad_()
    with takes("convolution", "convolution"):
        F.conv2d(x, weight, bias).square().sum().backward()
    assert weight.grad is not None
    assert x.grad is bias.grad is None


def test_second_gradients():
    given = operands((60, 61), 2)

    def penalty(x, weight, bias):
        x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
        y = F.conv2d(x, weight, bias).square().sum()
        (slope,) = torch.autograd.grad(y, x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), (x, weight))

    found = penalty(*given)
    with my_ops.fast_fp32(False):
        exact = penalty(*(t.double() for t in given))
    for ours, value in zip(found, exact, strict=True):
        assert (ours - value).abs().max() <= 2**-16 * value.abs().max()


def test_modules_and_transforms():
    x, weight, bias = operands(SPACE[2], 2)
    layer = torch.nn.Conv2d(CHANNELS, OUTPUTS, 1, device=DEVICE)
    with takes("convolution"), torch.inference_mode():
        y = layer(x)
        assert y.is_inference()
    torch.testing.assert_close(y, F.conv2d(x, layer.weight, layer.bias))
    with takes("convolution"):
        mapped = torch.func.vmap(F.conv2d, (0, None, None))(x[:, None], weight, bias)
    torch.testing.assert_close(mapped[:, 0], F.conv2d(x, weight, bias))


def test_hands_off_while_tf32_is_allowed():
    given = operands(SPACE[2], 2)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=True), leaves(RULE, 3):
        results(*given)


@contextlib.contextmanager
def stand_ins(left, windows):
    """Products of the stand-in are left for this reason, and its windows are computed, or not."""
    module = ctypes.CDLL(MODULE)
    module.refuse(left)
    module.compute_windows(windows)
    try:
        yield
    finally:
        module.refuse(-1)
        module.compute_windows(0)


@ON_CPU
def test_points_that_the_products_plan_leaves_are_asked_of_windows():
    """Each is counted once: as taken or, if windows leave it too, for the products' reason."""
    x, weight, bias = operands(SPACE[2], 2)
    with stand_ins(1, windows=True), takes("convolution"):
        before = my_ops.fast_fp32.report().left
        assert (F.conv2d(x, weight, bias) == 0).all()
        assert my_ops.fast_fp32.report().left == before
    with stand_ins(1, windows=False), leaves(PLAN, 1):
        F.conv2d(x, weight, bias)
    with stand_ins(2, windows=True), leaves(PRECISION, 1):  # not a matter of speed
        F.conv2d(x, weight, bias)
    with stand_ins(-2, windows=True), leaves("where ours", 1):
        F.conv2d(x, weight, bias)


@ON_CPU
def test_windows_that_are_left():
    x, weight, bias = operands(SPACE[2], 2)
    wide = randn(OUTPUTS, CHANNELS, 3, 3)
    for call in (
        lambda: F.conv2d(x, wide, bias),
        lambda: F.conv2d(x, weight, bias, padding=1),
        lambda: F.conv_transpose2d(x, weight.transpose(0, 1), bias),
    ):
        with leaves(OTHER, 1):
            call()


def test_what_is_not_even_looked_at():
    x, weight, bias = operands(SPACE[2], 2)
    calls = {
        "groups": lambda: F.conv2d(x, weight[:, : CHANNELS // 2], bias, groups=2),
        "transposed groups": lambda: F.conv_transpose2d(
            x, randn(CHANNELS, OUTPUTS // 2, 1, 1), bias, groups=2
        ),
        "another dtype": lambda: F.conv2d(x.double(), weight.double(), bias.double()),
        "small": lambda: F.conv2d(x[:, :, :2, :2], weight, bias),
    }
    for name, call in calls.items():
        with takes():
            before = my_ops.fast_fp32.report().left
            call()
            assert my_ops.fast_fp32.report().left == before, name


def test_other_strides_stay_with_torch():
    x, weight, bias = operands(SPACE[2], 2)
    cut = randn(*x.shape[:3], x.size(3) + 1)[..., 1:]
    with leaves(OTHER, 1):
        F.conv2d(cut, weight, bias)
    with leaves(OTHER, 1):  # torch gives the output the weight's order
        y = F.conv2d(x, weight.to(memory_format=torch.channels_last), bias)
    with my_ops.fast_fp32(False):
        want = F.conv2d(x, weight.to(memory_format=torch.channels_last), bias)
    assert y.stride() == want.stride()


def test_errors_are_torchs():
    x, weight, bias = operands(SPACE[2], 2)
    for call in (
        lambda: F.conv2d(x, weight[:, 1:], bias),
        lambda: F.conv2d(x, weight, bias[1:]),
        lambda: F.conv2d(x, weight, bias.double()),
        lambda: F.conv2d(x[0, 0], weight, bias),
        lambda: F.conv2d(x, weight, bias, stride=0),
    ):
        said = []
        for on in (False, True):
            with my_ops.fast_fp32(on), takes(), pytest.raises(Exception) as error:
                call()
            said.append((error.type, str(error.value)))
        assert said[0] == said[1]


def test_nothing_to_compute():
    """Without outputs, images or points: torch's own result or error, not a crash."""
    x, weight, bias = operands(SPACE[2], 2)
    for call in (
        lambda: F.conv2d(x, weight[:0], bias[:0]),
        lambda: F.conv2d(x[:0], weight, bias),
        lambda: F.conv2d(x[:, :, :0], weight, bias, stride=2),
        lambda: F.conv2d(x[:, :, :0], weight.new_zeros(4096, CHANNELS, 1, 1), stride=2),
    ):
        found = []
        for on in (False, True):
            with my_ops.fast_fp32(on), takes():
                try:
                    found.append(call().shape)
                except RuntimeError as error:
                    found.append(str(error))
        assert found[0] == found[1]


@ON_CUDA
def test_compiled():
    layer = torch.nn.Sequential(torch.nn.Conv2d(CHANNELS, OUTPUTS, 1), torch.nn.ReLU()).to(DEVICE)
    x = randn(2, CHANNELS, *SPACE[2])
    want = layer(x).square().mean()
    compiled = torch.compile(layer, fullgraph=True)
    with takes(*["convolution"] * 2):
        found = compiled(x).square().mean()
        found.backward()
    torch.testing.assert_close(found, want)


# Of windows, with the kernel that only CUDA has: images, channels, outputs, space, kernel, options.
WINDOWS = [
    (16, 64, 64, (57, 58), (3, 3), {"padding": 2, "dilation": 2}),
    (8, 136, 200, (61, 40), (3, 3), {"padding": (0, 2), "dilation": (1, 2)}),
    (32, 128, 128, (64, 65), (3, 3), {"padding": 1}),
    (9, 130, 257, (50, 51), (5, 4), {"padding": (4, 3), "dilation": 2}),
    (16, 192, 256, (63, 64), (3, 3), {"padding": 1, "stride": 2}),
    (16, 320, 320, (30, 71), (1, 7), {"stride": (1, 3)}),
    (16, 64, 256, (112, 113), (3, 3), {"padding": 1, "stride": 2}),
    (16, 256, 512, (57, 58), (2, 2), {"stride": 2}),  # patches
    (16, 512, 1024, (57, 58), (4, 4), {"stride": 4}),
    (12, 255, 512, (40, 41), (5, 4), {"stride": (3, 2), "padding": (2, 3), "dilation": (1, 2)}),
    (12, 320, 512, (41, 40), (3, 3), {"stride": 2, "padding": 2, "dilation": 2}),
    (16, 1024, 1024, (44, 44), (2, 1), {"stride": (3, 2)}),  # points that no window reads
    (8, 256, 384, (3001,), (5,), {"padding": 4, "dilation": 2}),
    (8, 512, 768, (1599,), (10,), {"stride": 5}),
    (16, 512, 512, (1599,), (3,), {"stride": 2}),
]
TRANSPOSED_WINDOWS = [
    (8, 256, 136, (33, 32), (4, 4), {"stride": 2, "padding": 1}),
    (8, 256, 255, (33, 32), (4, 4), {"stride": 2, "padding": 1}),
    (16, 384, 256, (33, 32), (3, 3), {"stride": 2, "padding": 1, "output_padding": 1}),
    (16, 512, 256, (33, 32), (2, 2), {"stride": 2}),
    (16, 512, 256, (33, 32), (2, 4), {"stride": (2, 3), "padding": (0, 1), "output_padding": 1}),
    (16, 256, 384, (41, 40), (3, 3), {"padding": 1, "dilation": 2}),
    (16, 512, 256, (500,), (16,), {"stride": 8, "padding": 4}),
]


def spread_out(x, spread):
    """spread: of the exponents."""
    return x * torch.exp2(torch.randint(-spread, spread, x.shape, device=DEVICE).float())


def window_operands(images, channels, outputs, space, kernel, last, spread=0, transposed=False):
    x = randn(images, channels, *space)
    if spread:
        x = spread_out(x, spread)
    both = (channels, outputs) if transposed else (outputs, channels)
    weight, bias = randn(*both, *kernel), randn(outputs)
    if last:
        x, weight = (t.to(memory_format=torch.channels_last) for t in (x, weight))
    return x, weight, bias


def gradient_of(given, options):
    with my_ops.fast_fp32(False):
        return torch.randn_like(convolve(*given, **options))


@ON_CUDA
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    ("images", "channels", "outputs", "space", "kernel", "options"),
    [
        *WINDOWS,
        *((*case, {**options, "transposed": True}) for *case, options in TRANSPOSED_WINDOWS),
    ],
)
def test_windows(images, channels, outputs, space, kernel, options, last):
    if last and len(space) == 1:
        pytest.skip("torch has no channels_last in 1-D")
    given = window_operands(
        images, channels, outputs, space, kernel, last, transposed="transposed" in options
    )
    grad = gradient_of(given, options)
    with takes(*["convolution"] * 3):
        found = results(*given, grad=grad, **options)
    assert_as_exact(found, given, grad=grad, **options)
    with my_ops.fast_fp32(False):
        torchs = results(*given, grad=grad, **options)
    assert [t.stride() for t in found] == [t.stride() for t in torchs]
    again = results(*given, grad=grad, **options)
    assert all(torch.equal(a, b) for a, b in zip(found[:3], again[:3], strict=True))


@ON_CUDA
@pytest.mark.parametrize("spread", [10, 30, 60])
def test_windows_of_wide_range(spread):
    """Outputs whose windows have elements of any size are as accurate, element by element."""
    given = window_operands(16, 128, 192, (30, 31), (3, 3), False, spread)
    options = {"padding": 2, "dilation": 2}
    grad = gradient_of(given, options)
    with takes(*["convolution"] * 3):
        found = results(*given, grad=grad, **options)
    with my_ops.fast_fp32(False):
        exact = results(*(t.double() for t in given), grad=grad.double(), **options)
        sizes = results(*(t.double().abs() for t in given), grad=grad.double().abs(), **options)
        strict = results(*given, grad=grad, **options)
    for ours, torchs, value, size in zip(found[:3], strict, exact, sizes, strict=False):
        error, allowed = ((t - value).abs() / size for t in (ours, torchs))
        assert error.mean() <= allowed.mean()
        assert error.max() <= 1.5 * allowed.max()


@ON_CUDA
@pytest.mark.parametrize("spread", [0, 10, 30, 60])
def test_strided_gradient_of_wide_range(spread):
    """So are the points of each class."""
    given = window_operands(16, 256, 320, (45, 46), (3, 3), False)
    options = {"stride": 2, "padding": 1}
    grad = gradient_of(given, options)
    if spread:
        grad = spread_out(grad, spread)
    with takes(*["convolution"] * 3):
        found = results(*given, grad=grad, **options)[1]
    with my_ops.fast_fp32(False):
        exact = results(*(t.double() for t in given), grad=grad, **options)[1]
        size = results(*(t.double().abs() for t in given), grad=grad.abs(), **options)[1]
    assert ((found - exact).abs() <= LIMIT * size).all()


@ON_CUDA
@pytest.mark.parametrize("value", [1.0, torch.nan])
def test_points_that_no_window_reads(value):
    """Their gradient is zero, and in a transposed convolution they are the bias. NaN: by FMAs."""
    x, weight, _ = window_operands(16, 1024, 1024, (44, 44), (2, 1), False)
    bias, grad = randn(1024), torch.full((16, 1024, 15, 22), value, device=DEVICE)
    rows, columns = (torch.arange(44, device=DEVICE) % n for n in (3, 2))
    unread = (rows == 2)[:, None] | (columns == 1)
    with takes(*["convolution"] * 2):
        y = F.conv2d(x.requires_grad_(), weight, stride=(3, 2))
        (found,) = torch.autograd.grad(y, x, grad)
    assert (found[:, :, unread] == 0).all()
    assert (found[:, :, ~unread] != 0).any(1).all()
    with takes("convolution"):
        found = F.conv_transpose2d(grad, weight, bias, (3, 2), output_padding=(0, 1))
    assert torch.equal(found[:, :, unread], bias[:, None].expand_as(found[:, :, unread]))


@ON_CUDA
def test_windows_of_inf_and_nan():
    x, weight, bias = window_operands(16, 128, 192, (30, 31), (3, 3), False)
    x[3, 5, 20, 20], x[4, 6, 7, 8] = torch.nan, torch.inf
    with takes("convolution"):
        found = F.conv2d(x, weight, bias, padding=1)
    exact = F.conv2d(*(t.double().cpu() for t in (x, weight, bias)), padding=1)
    torch.testing.assert_close(found.cpu(), exact.float(), rtol=1e-4, atol=1e-3, equal_nan=True)


@ON_CUDA
def test_strided_gradient_of_inf_and_nan():
    given = window_operands(16, 256, 320, (45, 46), (3, 3), False)
    options = {"stride": 2, "padding": 1}
    grad = gradient_of(given, options)
    grad[3, 5, 20, 20], grad[4, 6, 7, 8] = torch.nan, torch.inf
    with takes(*["convolution"] * 3):
        found = results(*given, grad=grad, **options)[1]
    exact = results(*(t.double().cpu() for t in given), grad=grad.cpu(), **options)[1]
    torch.testing.assert_close(found.cpu(), exact.float(), rtol=1e-4, atol=1e-3, equal_nan=True)


def weight_gradient(grad, x, weight, stride=1, padding=0, dilation=1):
    both = ([n] * 2 for n in (stride, padding, dilation))
    options = *both, False, [0, 0], 1, [False, True, False]
    return torch.ops.aten.convolution_backward(grad, x, weight, None, *options)[1]


@ON_CUDA
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    ("channels", "outputs", "space", "kernel", "options"),
    [
        (64, 64, (57, 58), (3, 3), {"padding": 2, "dilation": 2}),
        (40, 96, (112, 113), (7, 7), {"stride": 2, "padding": 3}),  # 40 channels count as 64
    ],
)
def test_weight_gradient_of_inf_and_nan(channels, outputs, space, kernel, options, last):
    """By FMAs, in slices of the windows. What does not touch these is as exact as ever."""
    x, weight, _ = window_operands(16, channels, outputs, space, kernel, last)
    grad = gradient_of((x, weight), options)
    x[3, 5, 20, 20], x[4, 6, 7, 8] = torch.nan, torch.inf
    with takes("convolution", "convolution"):
        found, again = (weight_gradient(grad, x, weight, **options) for _ in range(2))
    assert torch.equal(found.view(torch.int32), again.view(torch.int32))
    found, of = found.cpu(), [t.double().cpu() for t in (grad, x, weight)]
    exact = weight_gradient(*of, **options)
    size = weight_gradient(*(t.abs().nan_to_num(0, 0) for t in of), **options)
    finite = exact.isfinite()
    assert 0 < finite.sum() < finite.numel()
    assert ((found - exact).abs() <= LIMIT * size)[finite].all()
    torch.testing.assert_close(found[~finite], exact[~finite].float(), equal_nan=True)


@ON_CUDA
def test_windows_in_small_tensors_and_zeros():
    x, weight, bias = window_operands(16, 128, 192, (30, 31), (3, 3), False)
    with takes("convolution"):
        found = F.conv2d(torch.zeros_like(x), weight, bias)
    assert torch.equal(found, bias.view(1, -1, 1, 1).expand_as(found))
    with takes("convolution"):
        found = F.conv2d(x * 2.0**-90, weight)
    exact = F.conv2d(x.double(), weight.double())
    size = F.conv2d(x.double().abs(), weight.double().abs())
    assert ((found * 2.0**90 - exact).abs() <= LIMIT * size).all()


@ON_CUDA
@pytest.mark.parametrize("of", ["input", "gradient"])
def test_weight_gradient_of_a_channel_far_below_the_others(of):
    """Of few points an image, so that no block has many of its elements."""
    x, weight, _ = window_operands(4096, 512, 512, (2, 2), (3, 3), False)
    grad = randn(4096, 512, 2, 2)
    (x if of == "input" else grad)[:, 7] *= 2.0**-40
    with takes("convolution", "convolution", "convolution"):
        found = results(x, weight, None, grad=grad, padding=1)[2]
    with my_ops.fast_fp32(False):
        exact = results(x.double(), weight.double(), None, grad=grad, padding=1)[2]
        size = results(x.double().abs(), weight.double(), None, grad=grad.abs(), padding=1)[2]
    assert ((found - exact).abs() <= LIMIT * size).all()


@ON_CUDA
def test_random_windows():
    """Whether taken or left to torch, with any layout of the gradient."""
    random = torch.Generator().manual_seed(5)

    def one(*choices):
        return choices[int(torch.randint(len(choices), (), generator=random))]

    for _ in range(40):
        space = one(((40,), (2000,)), ((33, 34), (64, 60), (7, 100)))
        space = one(*space)
        kernel = tuple(one(1, 2, 3, 5) for _ in space)
        options = {name: tuple(one(*some) for _ in space) for name, some in (
            ("stride", (1, 1, 2, 3, 5)), ("padding", (0, 1, 2, 4)), ("dilation", (1, 1, 2)),
        )}  # fmt: skip
        if transposed := one(False, False, True):
            options |= {"transposed": True, "padding": one(0, 1)}
        last = len(space) == 2 and one(False, True)
        channels, outputs = one(3, 60, 128, 250), one(2, 64, 100, 256)
        given = window_operands(
            one(1, 8, 32), channels, outputs, space, kernel, last, transposed=transposed
        )
        grad = gradient_of(given, options)
        if one(False, True):
            grad = grad[:, :1].expand_as(grad)
        found = results(*given, grad=grad, **options)
        assert_as_exact(found, given, grad=grad, **options)


@ON_CUDA
def test_windows_that_stay_torchs():
    x, weight, bias = window_operands(16, 128, 192, (30, 31), (3, 3), False)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=True), leaves(RULE, 1):
        F.conv2d(x, weight, bias)
    with leaves(OTHER, 1):
        F.conv2d(x[..., 1:], weight, bias)
    with leaves("that torch", 1):
        F.conv2d(x[:1], weight, bias)
    with leaves(OTHER, 1):
        F.conv3d(x[:, :, None], weight[:, :, None], bias)


# Of points, few channels: images, channels, outputs, size, stride, and how many passes are ours,
# otherwise and with the channels last.
POINTS = [
    (64, 64, 64, 56, 1, (1, 1)),  # the gradient of the weight
    (32, 64, 256, 56, 1, (2, 3)),  # and forward; that of the input by fp32_short
    (32, 256, 64, 56, 1, (2, 3)),  # and that of the input; forward by fp32_short
    (32, 128, 1024, 57, 2, (3, 3)),  # forward by windows, the gradients by products
]


@ON_CUDA
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("images", "channels", "outputs", "size", "stride", "taken"), POINTS)
def test_points_that_windows_take(images, channels, outputs, size, stride, taken, last):
    given = window_operands(images, channels, outputs, (size, size - 1), (1, 1), last)
    grad = gradient_of(given, {"stride": stride})
    before = my_ops.fast_fp32.report()
    found = results(*given, grad=grad, stride=stride)
    after = my_ops.fast_fp32.report()
    ours = sum(times for *_, times in after.taken) - sum(times for *_, times in before.taken)
    assert ours == taken[last]
    assert ours + sum(after.left.values()) - sum(before.left.values()) == 3
    assert_as_exact(found, given, grad=grad, stride=stride)
    with my_ops.fast_fp32(False):
        torchs = results(*given, grad=grad, stride=stride)
    assert [t.stride() for t in found] == [t.stride() for t in torchs]


@ON_CUDA
def test_a_workspace_far_larger_than_the_tensors_stays_torchs():
    """Here of 20 channels, which count as 64, and of the slices' sums."""
    x, weight, _ = window_operands(64, 20, 96, (112, 112), (11, 11), False)
    with leaves("of convolutions that would", 1):
        weight_gradient(randn(64, 96, 56, 56), x, weight, stride=2, padding=5)


@ON_CUDA
def test_compiled_windows():
    layer = torch.nn.Sequential(
        torch.nn.Conv2d(128, 192, 3, padding=2, dilation=2), torch.nn.ReLU()
    ).to(DEVICE)
    x = randn(16, 128, 30, 31).requires_grad_()
    compiled = torch.compile(layer, fullgraph=True)
    with takes(*["convolution"] * 3):
        found = compiled(x).square().mean()
        found.backward()
    with my_ops.fast_fp32(False):
        torch.testing.assert_close(found, layer(x).square().mean())


@ON_CUDA
def test_windows_in_a_graph():
    x, weight, bias = window_operands(16, 128, 192, (30, 31), (3, 3), False)
    want = F.conv2d(x, weight, bias)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = F.conv2d(x, weight, bias)
    found.zero_()
    graph.replay()
    assert torch.equal(found, want)
