"""gemm and linear: precision, prepacked weights, the activations' names."""

import copy
import functools
import pickle
import sys

import pytest
import torch
from samples import FLOATING, gemm_excess
from test_gemm import linear_excess, normal

import my_ops
from my_ops import reference
from my_ops.ops.linear import activation_backward


@pytest.mark.parametrize("precision", ["medium", "", "Highest"])
def test_wrong_precision(precision, device, rejects):
    a = torch.ones(2, 2, device=device)
    for op, call in (("gemm", my_ops.gemm), ("linear", my_ops.linear)):
        with rejects(ValueError, f"{op}: precision must be None or one of .*{precision!r}", a):
            call(a, a, precision=precision)
    with rejects(RuntimeError, "gemm: precision must be highest, high or tf32, got 'low'", a):
        torch.ops.my_ops.gemm(a, a, "low")
    with rejects(RuntimeError, "linear: precision must be highest, high or tf32, got 'low'", a):
        torch.ops.my_ops.linear(a, a, None, "none", None, "low")


def set_everywhere(precision):
    torch.backends.fp32_precision = precision


def set_cublas(precision):
    torch.backends.cuda.matmul.fp32_precision = precision


def allow_tf32(allowed):
    torch.backends.cuda.matmul.allow_tf32 = allowed


def set_defaults():
    set_everywhere("none")
    torch.set_float32_matmul_precision("highest")
    set_cublas("none")


@pytest.fixture
def torch_precision():
    """A function that changes a setting of torch's, which is restored afterwards."""
    set_defaults()
    yield lambda setter, value: setter(value)
    set_defaults()


def precisions_passed(call):
    """The last argument of every my_ops product that ``call`` runs."""
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names = [argument.name for argument in func._schema.arguments]
            if func.namespace == "my_ops" and "precision" in names:
                at = names.index("precision")
                seen.append(args[at] if at < len(args) else None)
            return func(*args, **(kwargs or {}))

    with Watch():
        call()
    return seen


# Settings of torch; each says whether cuBLAS may use TF32.
STRICT = [
    (torch.set_float32_matmul_precision, "highest"),
    (set_cublas, "ieee"),
    (allow_tf32, False),
]
TF32 = [
    (torch.set_float32_matmul_precision, "high"),
    (torch.set_float32_matmul_precision, "medium"),
    (set_cublas, "tf32"),
    (set_everywhere, "tf32"),
    (allow_tf32, True),
]
PASSED = [(setting, None, None) for setting in STRICT]
PASSED += [(setting, "highest", None) for setting in STRICT]
PASSED += [(setting, "high", "high") for setting in STRICT]
PASSED += [(setting, None, "tf32") for setting in TF32]
PASSED += [(setting, "highest", "highest") for setting in TF32]
PASSED += [(setting, "high", "tf32") for setting in TF32]


PASSED_IDS = [f"{setter.__name__}-{value}-{argument}" for (setter, value), argument, _ in PASSED]


@pytest.mark.parametrize("setting, argument, passed", PASSED, ids=PASSED_IDS)
def test_precision_follows_torch_and_reaches_every_product(
    setting, argument, passed, device, torch_precision
):
    torch_precision(*setting)
    a = torch.randn(3, 3, device=device, requires_grad=True)
    out = torch.empty(3, 3, device=device)
    for call in (
        lambda: my_ops.gemm(a, a, precision=argument).sum().backward(),
        lambda: my_ops.linear(a, a, activation="relu", precision=argument).sum().backward(),
        lambda: my_ops.gemm(a.detach(), a.detach(), out=out, precision=argument),
    ):
        seen = precisions_passed(call)
        assert seen and set(seen) == {passed}


@pytest.mark.parametrize(
    ("argument", "passed"), [(None, None), ("highest", None), ("high", "high")]
)
def test_16x9_is_not_tf32(argument, passed, device, monkeypatch):
    """A setting of newer releases of torch: cuBLAS's nine bf16 products have float32's accuracy."""
    monkeypatch.setattr(sys.modules["my_ops.ops.gemm"], "fp32_precision", lambda *_: "16x9")
    a = torch.randn(3, 3, device=device)
    for call in (
        lambda: my_ops.gemm(a, a, precision=argument),
        lambda: my_ops.linear(a, a, activation="relu", precision=argument),
    ):
        seen = precisions_passed(call)
        assert seen and set(seen) == {passed}


@pytest.mark.parametrize("cls", [my_ops.nn.LSTM, my_ops.nn.GRU, my_ops.nn.LLTM])
def test_gradients_of_recurrent_layers_follow_torch(cls, device, torch_precision):
    layer, x = cls(3, 4).to(device), torch.randn(5, 2, 3, device=device, requires_grad=True)
    for setting, passed in ((STRICT[0], None), (TF32[0], "tf32")):
        torch_precision(*setting)
        seen = precisions_passed(lambda: layer(x)[0].sum().backward())
        assert seen and set(seen) == {passed}


def second_gradient(function, *tensors):
    tensors = [t.requires_grad_() for t in tensors]
    grads = torch.autograd.grad(function(*tensors).sin().sum(), tensors, create_graph=True)
    torch.autograd.grad(sum(g.sum() for g in grads), tensors)


def tangent(function, *tensors):
    torch.func.jvp(function, tensors, tuple(map(torch.ones_like, tensors)))


def each_mapped(function, *tensors):
    """Maps each argument alone, and all together."""
    for place in (*range(len(tensors)), None):
        over = [place in (i, None) for i in range(len(tensors))]
        mapped = [t.expand(2, *t.shape) if yes else t for t, yes in zip(tensors, over, strict=True)]
        torch.vmap(function, tuple(0 if yes else None for yes in over))(*mapped)


@pytest.mark.parametrize("transform", [second_gradient, tangent, each_mapped])
@pytest.mark.parametrize("precision", [None, "high"])
def test_precision_reaches_every_product_of_a_transform(precision, transform, device):
    def gemm(a, b):
        return my_ops.gemm(a, b, precision=precision)

    def linear(activation):
        return lambda x, weight, bias, residual: my_ops.linear(
            x, weight, bias, activation=activation, residual=residual, precision=precision
        )

    a, b, bias = torch.randn(3, 3), torch.randn(3, 3), torch.randn(3)
    a, b, bias = (t.to(device) for t in (a, b, bias))
    calls = [(gemm, a, b), (gemm, torch.stack([a, b]), b)]
    calls += [(linear(name), a, b, bias, a) for name in (None, "relu", "gelu", "silu")]
    for function, *tensors in calls:
        seen = precisions_passed(lambda f=function, ts=tensors: transform(f, *ts))
        assert len(seen) >= 2
        assert set(seen) == {precision}


@pytest.mark.slow
@pytest.mark.parametrize("setting", TF32, ids=[f"{setter.__name__}-{v}" for setter, v in TF32])
def test_precision_in_a_compiled_graph(setting, device, torch_precision):
    a = torch.randn(3, 3, device=device)
    graphs = []

    def backend(graph, _):
        graphs.append(graph.code)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(lambda t: my_ops.gemm(t, t), backend=backend, fullgraph=True)
    compiled(a)
    torch_precision(*setting)  # this compiles again
    torch.testing.assert_close(compiled(a), a @ a, rtol=1e-2, atol=1e-2)
    compiled(a)
    assert ["'tf32'" in graph for graph in graphs] == [False, True]


@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("shape", [(0, 3, 4), (3, 4, 0), (7, 33, 65), (600, 640, 640)])
@pytest.mark.parametrize("dtype", FLOATING)
def test_prepacked_weight(dtype, shape, activation, device):
    m, k, n = shape
    x, bias = normal((m, k), dtype, device), normal((n,), dtype, device)
    for weight in (normal((n, k), dtype, device), normal((k, n), dtype, device).T):
        packed = my_ops.prepack(weight)
        for other in (packed, copy.deepcopy(packed), pickle.loads(pickle.dumps(packed))):
            got = my_ops.linear(x, other, bias, activation=activation)
            assert linear_excess(got, x, weight, bias, activation) <= 1
    assert repr(packed).startswith(f"PackedWeight(({n}, {k}), {dtype}")


def test_prepacked_weight_gets_no_gradient(device):
    weight = torch.randn(640, 640, device=device, requires_grad=True)
    x = torch.randn(640, 640, device=device, requires_grad=True)
    grad = torch.randn(640, 640, device=device)
    (got,) = torch.autograd.grad(my_ops.linear(x, my_ops.prepack(weight)), x, grad)
    assert gemm_excess(got, grad, weight) <= 1
    assert not my_ops.linear(x.detach(), my_ops.prepack(weight)).requires_grad


def test_prepacked_weight_that_changed(device, rejects):
    weight, x = torch.randn(4, 3, device=device), torch.randn(2, 3, device=device)
    packed = my_ops.prepack(weight)
    weight.add_(1)
    with rejects(RuntimeError, "linear: weight must not change after prepack", x, weight):
        my_ops.linear(x, packed)
    with torch.inference_mode():
        inside = my_ops.prepack(torch.ones(4, 3, device=device))
        assert torch.equal(my_ops.linear(x, inside), x.sum(1, keepdim=True).expand(2, 4))


@pytest.mark.slow
def test_prepack_compiles(device):
    weight, x = torch.randn(640, 640, device=device), torch.randn(640, 640, device=device)
    packed = my_ops.prepack(weight)
    for function, want in (
        (lambda x, weight: my_ops.linear(x, packed), my_ops.linear(x, packed)),
        (  # inside, nothing is packed
            lambda x, weight: my_ops.linear(x, my_ops.prepack(weight)),
            torch.ops.my_ops.linear(x, weight),
        ),
    ):
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(x, weight), want)


def test_prepack_wrong_arguments(device, rejects):
    x = torch.ones(3, device=device)
    with rejects(TypeError, "prepack: weight must be a torch.Tensor, got int", x):
        my_ops.prepack(1)
    with rejects(RuntimeError, r"prepack: weight must be \(out_features, in_features\), got", x):
        my_ops.prepack(x)
    with rejects(RuntimeError, "prepack: weight must be .*float.*, got", x):
        my_ops.prepack(x.int())


HOPPER = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="weights are packed on compute capability 9.0",
)


@HOPPER
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("n, k", [(580, 580), (640, 640), (2048, 4100)])
def test_packed_weight_is_the_same_on_every_hopper_gpu(n, k, transposed, cuda):
    """Its size is that of its parts and exponents. It has no scratch, which would depend on the
    device."""
    weight = torch.randn(k, n, device=cuda).mT if transposed else torch.randn(n, k, device=cuda)
    sizes = 1, 2 * 2 * n * -(-k // 64) * 64, 4 * n
    packed = torch.ops.my_ops.prepack(weight)
    assert packed.numel() == sum(-(-size // 256) * 256 for size in sizes)
    x = torch.randn(max(n, k), k, device=cuda)
    got = torch.ops.my_ops.linear(x, weight, packed=packed)
    assert linear_excess(got, x, weight, None, None) <= 1


@HOPPER
def test_packed_wrong_arguments(cuda, rejects):
    weight, x = torch.randn(640, 640, device=cuda), torch.randn(700, 640, device=cuda)
    packed = torch.ops.my_ops.prepack(weight)
    for wrong, match in (
        (
            packed.repeat_interleave(2)[::2],
            r"contiguous and start .* 256 bytes, got strides \(2,\)",
        ),
        (torch.cat([packed[:1], packed])[1:], "start at a multiple of 256 bytes.* 1 bytes beyond"),
        (packed[256:], "packed must be what prepack made of weight"),
        (packed.view(torch.int8), "packed must be what prepack made of weight"),
        (packed.cpu(), "packed must be on the device of x"),
    ):
        with rejects(RuntimeError, f"linear: .*{match}", x, weight):
            torch.ops.my_ops.linear(x, weight, packed=wrong)


def test_every_layer_knows_the_same_activations(device, rejects):
    """C++, the fake kernel and Python each have a list. Each refuses an activation that is in
    none."""
    *names, last = reference.ACTIVATIONS
    x = torch.ones(2, 2, device=device)
    for like in (x, x.to("meta")):
        with rejects(RuntimeError, rf"be {', '.join(names)} or {last}, got 'tanh'$", like):
            torch.ops.my_ops.linear(like, like, None, "tanh")
    for activate in (reference.activate, functools.partial(activation_backward, x)):
        with pytest.raises(ValueError, match="unknown activation 'tanh'"):
            activate(x, "tanh")


def test_an_activation_needs_no_gradient_of_its_own(device, monkeypatch):
    monkeypatch.setattr(reference, "activate", lambda x, name: {"tanh": torch.tanh}[name](x))
    x, grad = torch.randn(2, 7, dtype=torch.float64, device=device)
    x.requires_grad_()
    got, want = activation_backward(grad, x, "tanh"), grad * (1 - x.tanh() ** 2)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x)[0] for y in (got, want)))
