"""Checks of depthwise convolutions under the switch, which test_fast_fp32.py runs as it does those
of fast_fp32_convolution_checks.py."""

import contextlib
import itertools

import pytest
import torch
from fast_fp32_checks import (
    DEVICE,
    LIMIT,
    ON_CPU,
    ON_CUDA,
    OTHER,
    PLAN,
    counts,
    gains,  # noqa: F401
    leaves,
    randn,
    switched_on,  # noqa: F401
    takes,
)
from fast_fp32_convolution_checks import (
    RULE,
    convolve,
    results,
    stand_ins,
    strict,  # noqa: F401
)

import my_ops

# Large enough to be looked at and, on a GPU, for ours to gain.
BATCH, CHANNELS = (4, 36) if DEVICE == "cpu" else (18, 150)
# Space, kernel, options.
CASES = [
    ((70, 71), (3, 3), {"padding": 1}),
    ((121, 120), (3, 3), {"padding": 1, "stride": 2}),
    ((60, 61), (5, 5), {"padding": 2}),
    ((91, 92), (5, 5), {"stride": 2}),
    ((57, 58), (7, 7), {"padding": 3}),
    ((58, 33), (7, 7), {"padding": (5, 6)}),
    ((70, 71), (2, 4), {"padding": (0, 3)}),
    ((70, 99), (6, 3), {"padding": (2, 1)}),
    ((300, 37), (7, 1), {"padding": (3, 0)}),
    ((7, 700), (7, 7), {"padding": 3}),
    ((1, 5001), (1, 31), {"padding": (0, 15)}),
    ((5000,), (31,), {"padding": 15}),
    ((4999,), (15,), {}),
    ((5003,), (12,), {"padding": 9}),
    ((25000,), (4,), {"padding": 3}),
]
# Of the output and the gradient of the input alone.
DILATED = [
    ((70, 71), (3, 3), {"padding": 2, "dilation": 2}),
    ((80, 79), (7, 7), {"padding": (9, 4), "dilation": (3, 2)}),
    ((70, 90), (5, 2), {"padding": (0, 3), "dilation": (1, 4)}),
    ((5000,), (15,), {"padding": 14, "dilation": 2}),
]


def operands(space, kernel, last=False, batch=BATCH, channels=CHANNELS):
    """The input, the weight and the bias."""
    x, weight = randn(batch, channels, *space), randn(channels, 1, *kernel)
    if last:
        x, weight = (t.to(memory_format=torch.channels_last) for t in (x, weight))
    return x, weight, randn(channels)


def depthwise(x, weight, grad, padding=0, stride=1, wanted=(False, True, False)):
    rank = x.dim() - 2
    both = [[n] * rank if isinstance(n, int) else list(n) for n in (stride, padding)]
    return torch.ops.aten.convolution_backward(
        grad, x, weight, None, *both, [1] * rank, False, [0] * rank, x.size(1), list(wanted)
    )


def gradient_of(given, **options):
    with my_ops.fast_fp32(False):
        return torch.randn_like(convolve(*given, groups=given[0].size(1), **options))


def exact(x, weight, grad, padding=0, stride=1):
    """In float64. Taps in the padding add nothing, not even to NaN."""
    found = torch.zeros(weight.shape, dtype=torch.float64)
    x, grad = x.double(), grad.double()
    before_each = [padding] * (x.dim() - 2) if isinstance(padding, int) else padding
    for tap in itertools.product(*map(range, weight.shape[2:])):
        of_x, of_grad = [slice(None)] * 2, [slice(None)] * 2
        sizes = zip(x.shape[2:], grad.shape[2:], before_each, tap, strict=True)
        for size, outputs, before, at in sizes:
            first = max(0, -((at - before) // stride))
            end = max(first, min(outputs, (size - 1 + before - at) // stride + 1))
            of_grad.append(slice(first, end))
            begin = first * stride - before + at
            of_x.append(slice(begin, begin + (end - first) * stride, stride))
        product = x[tuple(of_x)] * grad[tuple(of_grad)]
        found[(slice(None), 0, *tap)] = product.sum([d for d in range(x.dim()) if d != 1]).cpu()
    return found


@contextlib.contextmanager
def takes_at_least(least, of=3):
    """In this context our kernels compute so many of so many passes, all with the stand-in."""
    before = sum(counts().values())
    yield
    found = sum(counts().values()) - before
    assert (least if DEVICE == "cuda" else of) <= found <= of


def least_of(kernel, last):
    """Of three passes. On CUDA torch may be as fast as ours if a kernel is not square, or in the
    others than the gradient of the weight with the channels last."""
    return 0 if len({*kernel}) > 1 else 1 if last else 3


def assert_exact(found, x, weight, grad, **options):
    """But for what is Inf or NaN, with errors relative to the products of the magnitudes."""
    want = exact(x, weight, grad, **options)
    size = exact(*(t.abs().nan_to_num(0, 0) for t in (x, weight, grad)), **options)
    found, finite = found.cpu(), want.isfinite()
    assert found.dtype == torch.float32
    assert torch.equal(found.isfinite(), finite)
    assert torch.equal(found.isnan(), want.isnan())
    assert ((found - want).abs() <= LIMIT * size)[finite].all()


def assert_results_exact(found, given, grad, **options):
    """The output and the gradient of the input, but for what is Inf or NaN."""
    options["groups"] = given[0].size(1)
    with my_ops.fast_fp32(False):
        wide, sizes = (
            results(*operands_, grad=grad_, **options)
            for operands_, grad_ in (
                ([t.double() for t in given], grad.double()),
                ([t.double().abs().nan_to_num(0, 0) for t in given], grad.abs().nan_to_num(0, 0)),
            )
        )
    for ours, want, size in zip(found[:2], wide, sizes, strict=False):
        finite = want.isfinite()
        assert ours.dtype == torch.float32
        assert torch.equal(ours.isfinite(), finite)
        assert torch.equal(ours.isnan(), want.isnan())
        assert ((ours - want).abs() <= LIMIT * size)[finite].all()


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("space", "kernel", "options"), [*CASES, *DILATED])
def test_passes(space, kernel, options, last):
    if last and len(space) == 1:
        pytest.skip("torch has no channels_last in 1-D")
    given = operands(space, kernel, last)
    grad, how = gradient_of(given, **options), {**options, "groups": CHANNELS}
    dilated = "dilation" in options
    least, of = (0, 2) if dilated else (least_of(kernel, last), 3)
    with takes_at_least(least, of):
        found = results(*given, grad=grad, **how)
    assert_results_exact(found, given, grad, **options)
    if not dilated:
        assert_exact(found[2], *given[:2], grad, **options)
    with takes_at_least(least, of):
        again = results(*given, grad=grad, **how)
    assert all(torch.equal(a, b) for a, b in zip(found[:3], again[:3], strict=True))
    with my_ops.fast_fp32(False):
        torchs = results(*given, grad=grad, **how)
    torch.testing.assert_close(found[3], torchs[3])
    assert [t.stride() for t in found[:2]] == [t.stride() for t in torchs[:2]]
    assert found[2].is_contiguous() == torchs[2].is_contiguous()


def test_without_a_bias():
    x, weight, _ = operands((70, 71), (5, 5))
    with takes("convolution"):
        found = convolve(x, weight, padding=2, groups=CHANNELS)
    with my_ops.fast_fp32(False):
        want = convolve(x.double(), weight.double(), padding=2, groups=CHANNELS)
    torch.testing.assert_close(found.double(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("batch", "channels"), [(1, 40), (50, 1200), (2, 33), (1, 2)])
def test_few_and_many(batch, channels, last):
    size = int((2.0 ** (22.1 if DEVICE == "cpu" else 28) / (49 * batch * channels)) ** 0.5) + 1
    x, weight, _ = operands((size, size + 1), (7, 7), last, batch, channels)
    grad = gradient_of((x, weight), padding=3)
    with takes("convolution"):
        found = depthwise(x, weight, grad, padding=3)[1]
    assert_exact(found, x, weight, grad, padding=3)
    bias = randn(channels)
    with takes_at_least(3):
        found = results(x, weight, bias, grad=grad, padding=3, groups=channels)
    assert_results_exact(found, (x, weight, bias), grad, padding=3)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("of", ["sum", "other layout", "every other"])
def test_other_strides_of_the_gradient(of, last):
    given = operands((70, 71), (3, 3), last)
    grad = gradient_of(given, padding=1)
    if of == "sum":
        grad = randn(1).expand_as(grad)
    elif of == "other layout":
        grad = grad.contiguous(memory_format=(torch.channels_last, torch.contiguous_format)[last])
    else:
        grad = torch.stack([grad, grad], -1)[..., 0]
    with takes_at_least(1):
        _, of_x, of_weight, _ = results(*given, grad=grad, padding=1, groups=CHANNELS)
    with my_ops.fast_fp32(False):
        torchs = results(*given, grad=grad, padding=1, groups=CHANNELS)
    torch.testing.assert_close(of_x, torchs[1])
    assert_exact(of_weight, *given[:2], grad, padding=1)


def test_only_the_gradients_that_are_needed():
    x, weight, _ = operands((70, 71), (3, 3))
    grad = gradient_of((x, weight), padding=1)
    for wanted in itertools.product([False, True], repeat=3):
        bias = [CHANNELS] if wanted[2] else None
        options = [1, 1], [1, 1], [1, 1], False, [0, 0], CHANNELS, list(wanted)
        with takes(*["convolution"] * sum(wanted[:2])):
            found = torch.ops.aten.convolution_backward(grad, x, weight, bias, *options)
        with my_ops.fast_fp32(False):
            torchs = torch.ops.aten.convolution_backward(grad, x, weight, bias, *options)
        for own, theirs, is_wanted in zip(found, torchs, wanted, strict=True):
            if is_wanted:
                scale = theirs.abs().max().item()
                torch.testing.assert_close(own, theirs, rtol=0, atol=1e-5 * scale)


def test_second_gradients():
    given = operands((70, 71), (3, 3))

    def penalty(x, weight, _):
        x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
        y = convolve(x, weight, padding=1, groups=CHANNELS).square().sum()
        slopes = torch.autograd.grad(y, (x, weight), create_graph=True)
        return torch.autograd.grad(sum(t.square().sum() for t in slopes), (x, weight))

    found = penalty(*given)
    with my_ops.fast_fp32(False):
        want = penalty(*(t.double() for t in given))
    for ours, value in zip(found, want, strict=True):
        assert (ours - value).abs().max() <= 2**-16 * value.abs().max()


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    ("space", "kernel", "options"), [CASES[0], CASES[1], CASES[3], CASES[5], CASES[11], CASES[13]]
)
def test_inf_and_nan(space, kernel, options, last):
    """They reach the taps that touch them, and those alone."""
    if last and len(space) == 1:
        pytest.skip("torch has no channels_last in 1-D")
    x, weight, bias = operands(space, kernel, last)
    grad = gradient_of((x, weight), **options)
    grad[0, 0].flatten()[0], grad[1, 1].flatten()[-1] = torch.nan, torch.inf
    x[2, 2].flatten()[0], x[1, 3].flatten()[-1] = torch.inf, torch.nan
    with takes("convolution"):
        found = depthwise(x, weight, grad, **options)[1]
    assert not found.isfinite().all()
    assert_exact(found, x, weight, grad, **options)
    if last and DEVICE == "cuda":
        return  # the others may be cuDNN's
    with takes_at_least(least_of(kernel, last)):
        found = results(x, weight, bias, grad=grad, **options, groups=CHANNELS)
    assert_results_exact(found, (x, weight, bias), grad, **options)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    ("space", "kernel", "options"), [CASES[1], CASES[4], DILATED[0], CASES[13]]
)
def test_inf_and_nan_in_the_weight(space, kernel, options, last):
    """They reach the points that they touch, and no other where they touch the padding."""
    if last and len(space) == 1:
        pytest.skip("torch has no channels_last in 1-D")
    x, weight, bias = operands(space, kernel, last)
    grad, options = gradient_of((x, weight), **options), {**options, "groups": CHANNELS}
    weight[0].flatten()[0], weight[1].flatten()[-1] = torch.inf, torch.nan
    before = sum(counts().values())
    found = results(x, weight, bias, grad=grad, **options)[:2]
    if sum(counts().values()) - before < (2 if "dilation" in options else 3):
        pytest.skip("torch computes one of them as fast")
    ones, infinite = [torch.ones_like(t) for t in (x, grad)], (~weight.isfinite()).float()
    finite = weight.nan_to_num(0, 0)
    with my_ops.fast_fp32(False):
        touched = results(ones[0], infinite, torch.zeros_like(bias), grad=ones[1], **options)
        given = x.double(), finite.double(), bias.double()
        want = results(*given, grad=grad.double(), **options)
        size = results(*(t.abs() for t in given), grad=grad.double().abs(), **options)
    for ours, of, value, most in zip(found, touched, want, size, strict=False):
        assert torch.equal(ours.isfinite(), of < 0.5)
        assert ((ours - value).abs() <= LIMIT * most)[of < 0.5].all()


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("data", ["half zeros", "positive", "wide"])
def test_hostile_values(data, last):
    """Not less accurate than torch's."""
    x, weight, _ = operands((70, 71), (5, 5), last)
    grad = gradient_of((x, weight), padding=2)
    if data == "half zeros":
        x = x.relu()
    elif data == "positive":
        x, grad = x.abs() + 1, grad.abs() + 1
    else:
        x, grad = (
            t * torch.exp2(torch.randint(-30, 30, t.shape, device=DEVICE).float())
            for t in (x, grad)
        )
    bias = torch.zeros(CHANNELS, device=DEVICE)
    given, how = (x, weight, bias), {"padding": 2, "groups": CHANNELS}
    with takes_at_least(1 if last else 3):
        found = results(*given, grad=grad, **how)
    with my_ops.fast_fp32(False):
        torchs = results(*given, grad=grad, **how)
        want = results(*(t.double() for t in given), grad=grad.double(), **how)
        sizes = results(*(t.double().abs() for t in given), grad=grad.double().abs(), **how)
    for ours, theirs, value, size in zip(found[:3], torchs, want, sizes, strict=False):
        errors, allowed = ((t - value).abs() / size.clamp(min=1e-30) for t in (ours, theirs))
        assert errors.max() <= LIMIT
        if DEVICE == "cuda":
            assert errors.mean() <= 1.5 * allowed.mean()
            assert errors.max() <= 2 * allowed.max()


def test_hands_off_while_tf32_is_allowed():
    given = operands((70, 71), (3, 3))
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=True), leaves(RULE, 3):
        results(*given, padding=1, groups=CHANNELS)


def test_what_is_left():
    x, weight, bias = operands((70, 71), (3, 3))
    cut = randn(*x.shape[:3], x.size(3) + 1)[..., 1:]
    with leaves(OTHER, 3):
        results(cut, weight, bias, groups=CHANNELS)
    with leaves(OTHER, 1):  # torch gives the output the weight's order
        convolve(x, weight.to(memory_format=torch.channels_last), bias, groups=CHANNELS)
    with leaves(OTHER, 1):
        grad = gradient_of((x, weight), dilation=2)
        options = [1, 1], [0, 0], [2, 2], False, [0, 0], CHANNELS, [False, True, False]
        torch.ops.aten.convolution_backward(grad, x, weight, None, *options)


@ON_CPU
def test_what_the_backend_leaves():
    given = operands((70, 71), (3, 3))
    for left, reason in ((1, PLAN), (-2, "where ours")):
        with stand_ins(left, windows=False), leaves(reason, 3):
            results(*given, groups=CHANNELS)


@ON_CUDA
@pytest.mark.parametrize("options", [{"stride": 3}, {"stride": (1, 2)}])
def test_strides_without_a_kernel(options):
    given = operands((70, 71), (3, 3))
    with leaves(PLAN, 3):
        results(*given, groups=CHANNELS, **options)


def test_what_is_not_even_looked_at():
    x, weight, bias = operands((70, 71), (3, 3))
    calls = {
        "groups": lambda: results(x, randn(CHANNELS, 2, 3, 3), bias, groups=CHANNELS // 2),
        "multiplier": lambda: results(x, randn(2 * CHANNELS, 1, 3, 3), None, groups=CHANNELS),
        "transposed": lambda: results(x, weight, bias, groups=CHANNELS, transposed=True),
        "another dtype": lambda: results(x.double(), weight.double(), None, groups=CHANNELS),
        "small": lambda: results(x[:, :, :4, :4].contiguous(), weight, bias, groups=CHANNELS),
        "no images": lambda: results(x[:0], weight, bias, groups=CHANNELS),
    }
    for name, call in calls.items():
        with takes():
            before = my_ops.fast_fp32.report().left
            call()
            assert my_ops.fast_fp32.report().left == before, name


def test_where_torch_must_be_deterministic():
    given = operands((70, 71), (7, 7))
    torch.use_deterministic_algorithms(True)
    try:
        with takes(*["convolution"] * 3):
            results(*given, padding=3, groups=CHANNELS)
    finally:
        torch.use_deterministic_algorithms(False)


@ON_CUDA
def test_in_a_graph():
    x, weight, bias = operands((57, 58), (7, 7), last=True)
    grad = gradient_of((x, weight), padding=3)

    def run():
        y = convolve(x, weight, bias, padding=3, groups=CHANNELS)
        return [y, *depthwise(x, weight, grad, padding=3, wanted=(True, True, False))[:2]]

    want = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for _ in range(2):
        for t in found:
            t.zero_()
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


@ON_CUDA
def test_compiled():
    layer = torch.nn.Conv2d(CHANNELS, CHANNELS, 7, padding=3, groups=CHANNELS).to(DEVICE)
    x = randn(BATCH, CHANNELS, 57, 58)
    with takes(*["convolution"] * 2):
        layer(x).square().sum().backward()
    want, layer.weight.grad = layer.weight.grad, None
    compiled = torch.compile(layer, fullgraph=True)
    with takes(*["convolution"] * 2):
        compiled(x).square().sum().backward()
    torch.testing.assert_close(layer.weight.grad, want, rtol=1e-4, atol=1e-2)
