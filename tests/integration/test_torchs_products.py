"""Which products eager calls leave to torch, and that nothing else about them changes."""

from importlib import import_module

import pytest
import torch
import torch.nn.functional as F
from samples import FLOATING, SIXTEEN_BIT
from torch.utils._python_dispatch import TorchDispatchMode

import my_ops


class Called(TorchDispatchMode):
    """Records whether an op of my_ops was called."""

    def __init__(self):
        super().__init__()
        self.ours = False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.ours |= function.namespace == "my_ops"
        return function(*args, **(kwargs or {}))


def calls_ours(function, *args, **kwargs):
    with Called() as called:
        result = function(*args, **kwargs)
    return called.ours, result


def tensors(dtype, device, rows=(5,), k=16, n=24):
    shapes = ((*rows, k), (n, k), (n,))
    return [torch.randn(shape, device=device).to(dtype).requires_grad_() for shape in shapes]


def layer_of(weight, bias):
    layer = my_ops.nn.Linear(*weight.shape[::-1], device=weight.device, dtype=weight.dtype)
    layer.weight, layer.bias = (torch.nn.Parameter(t.detach()) for t in (weight, bias))
    return layer


@pytest.mark.parametrize("rows", [(), (5,), (2, 5), (2, 3, 5), (0,)])
@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
def test_linear_is_torchs(dtype, rows, device):
    """With a bias that is added before the result is rounded, for every shape of x."""
    x, weight, bias = tensors(dtype, device, rows)
    want = F.linear(x.reshape(-1, 16), weight, bias).view(*rows, 24)
    grad = torch.randn_like(want)
    for call in (my_ops.linear, lambda x, weight, bias: layer_of(weight, bias)(x)):
        for given in (x, x.mT.contiguous().mT if x.dim() > 1 else x):
            ours, got = calls_ours(call, given, weight, bias)
            assert not ours
            assert torch.equal(got, want)
            backward_ours, (grad_x,) = calls_ours(torch.autograd.grad, got, x, grad)
            assert not backward_ours
            assert grad_x.shape == x.shape


@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
def test_gemm_is_torchs(dtype, device):
    x, weight, _ = tensors(dtype, device)
    for a, b in (
        (x, weight.mT),
        (x.expand(3, 5, 16), weight.mT.expand(3, 16, 24)),
        (weight, x.mT[:, :0]),
    ):
        ours, got = calls_ours(my_ops.gemm, a, b)
        assert not ours
        assert torch.equal(got, a @ b)


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("op", ["gemm", "linear"])
def test_plain_calls_on_the_cpu_are_torchs(op, dtype):
    """Found by the profiler, because a dispatch mode would see other calls than there are without
    it."""
    x, weight, bias = tensors(dtype, "cpu")
    arguments = (x, weight.mT) if op == "gemm" else (x, weight, bias)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        getattr(my_ops, op)(*arguments)
    assert "my_ops" not in " ".join(event.name for event in profile.events())


@pytest.mark.parametrize("enabled", [torch.bfloat16, torch.float16])
def test_under_autocast(enabled, device):
    x, weight, bias = tensors(torch.float32, device)
    with torch.autocast(device, enabled):
        for given in (x, x.to(enabled)):
            for call in (my_ops.linear, lambda x, weight, bias: layer_of(weight, bias)(x)):
                ours, got = calls_ours(call, given, weight, bias)
                assert not ours
                assert torch.equal(got, F.linear(given, weight, bias))
        ours, got = calls_ours(my_ops.gemm, x, weight.mT)
        assert not ours
        assert got.dtype == enabled
        assert calls_ours(my_ops.linear, x.double(), weight.double())[0]
    with torch.autocast(device, enabled, enabled=False):
        assert calls_ours(my_ops.linear, x, weight, bias)[0]


def test_what_stays_ours(device):
    x, weight, bias = tensors(torch.bfloat16, device)
    for options in ({"activation": "relu"}, {"residual": x @ weight.T}, {"precision": "high"}):
        assert calls_ours(my_ops.linear, x, weight, bias, **options)[0]
    assert calls_ours(my_ops.linear, x, my_ops.prepack(weight))[0]
    assert calls_ours(my_ops.gemm, x, weight.mT, precision="highest")[0]
    assert calls_ours(
        my_ops.gemm, x.detach(), weight.detach().mT, out=torch.empty_like(x @ weight.T)
    )[0]
    for k, n in ((15, 24), (16, 23)):  # rows that are not aligned
        x, weight, bias = tensors(torch.bfloat16, device, k=k, n=n)
        assert calls_ours(my_ops.linear, x, weight, bias)[0]
        assert calls_ours(layer_of(weight, bias), x)[0]
        assert calls_ours(my_ops.gemm, x, weight.mT)[0]
    a, _, b = (t.detach() for t in tensors(torch.bfloat16, device, rows=(16,), k=7, n=16))
    b = torch.randn(16, 8, device=device).bfloat16()
    assert calls_ours(my_ops.gemm, a.mT, b)[0]  # its contiguous rows have 7 elements
    assert not calls_ours(my_ops.gemm, a.mT.contiguous(), b)[0]


@pytest.fixture
def without_ours(monkeypatch):
    """Calls of gemm and linear fail, also where no mode would see them."""

    def fails(*_):
        raise AssertionError("the op was called")

    for module, name in (
        ("nn.linear", "linear"),
        ("ops.gemm", "gemm_op"),
        ("ops.linear", "_linear"),
    ):
        monkeypatch.setattr(import_module(f"my_ops.{module}"), name, fails)


@pytest.mark.parametrize("rows", [(), (5,), (2, 3, 5), (0,)])
@pytest.mark.parametrize("dtype", FLOATING)
def test_layers_on_the_cpu_are_torchs(dtype, rows, without_ours):
    x, weight, bias = tensors(dtype, "cpu", rows, k=7, n=3)
    layer = layer_of(weight, bias)
    got, want = layer(x), F.linear(x, weight, bias)
    assert torch.equal(got, want)
    grad = torch.randn_like(want)
    ours = torch.autograd.grad(got, (x, layer.weight, layer.bias), grad)
    assert all(map(torch.equal, ours, torch.autograd.grad(want, (x, weight, bias), grad)))
    other = torch.float32 if dtype != torch.float32 else torch.bfloat16
    with pytest.raises(AssertionError, match="was called"):
        layer(x.to(other))


@pytest.mark.parametrize("dtype", FLOATING)
def test_products_of_gradients_on_the_cpu_are_torchs(dtype, without_ours):
    x, weight, _ = tensors(dtype, "cpu", (2, 5), k=7, n=3)
    product = import_module("my_ops.ops.gemm").product
    assert torch.equal(product(weight, x[0].mT), weight @ x[0].mT)
    linear_product = import_module("my_ops.ops.linear").linear_product
    assert torch.equal(linear_product(x, weight), F.linear(x, weight))


def test_a_dispatch_mode_sees_ours():
    x, weight, bias = tensors(torch.float32, "cpu")
    assert calls_ours(layer_of(weight, bias), x)[0]
    assert calls_ours(import_module("my_ops.ops.gemm").product, weight, x.mT)[0]


def wrong_arguments(device):
    x, weight, bias = (t.detach() for t in tensors(torch.bfloat16, device))
    meta = [t.to("meta") for t in (x, weight, bias)]
    for wrong in (x[0, 0], x[:, :8], x.half(), x.float(), meta[0]):
        yield "linear", wrong, weight, bias
    for wrong in (weight[0], weight[None], weight[:, :8], weight.half(), meta[1]):
        yield "linear", x, wrong, bias
    for wrong in (bias[:1], bias[0], bias[:8], bias[None], bias.half(), bias.float(), meta[2]):
        yield "linear", x, weight, wrong
    a, b = x, weight.mT
    for wrong in (a[0], a[:, :8], a[None, None], a.half(), meta[0]):
        yield "gemm", wrong, b
    for wrong in (b[0], b[:8], b.half(), meta[1].mT):
        yield "gemm", a, wrong
    yield "gemm", a.expand(2, *a.shape), b.expand(3, *b.shape)


@pytest.mark.parametrize("which", range(len([*wrong_arguments("cpu")])))
def test_wrong_arguments_in_the_same_words(which, device):
    name, *args = [*wrong_arguments(device)][which]
    with pytest.raises(RuntimeError) as expected:
        getattr(torch.ops.my_ops, name)(*args)
    calls = [getattr(my_ops, name)]
    if name == "linear":
        _, weight, bias = args
        one_device = len({t.device for t in args}) == 1
        # A layer takes everything that torch.nn's does, such as a bias that broadcasts, or meta
        # tensors.
        if weight.dim() == 2 and bias.shape == weight.shape[:1] and one_device:
            calls.append(lambda x, weight, bias: layer_of(weight, bias)(x))
    for call in calls:
        with pytest.raises(RuntimeError) as raised:
            call(*args)
        assert str(raised.value) == str(expected.value)
