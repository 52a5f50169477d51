"""The layers with torch's tools: hooks, pruning, reparametrisation, meta, quantization, FX."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import aot_module
from torch import nn
from torch.func import functional_call, stack_module_state
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import fusion, parametrizations, parametrize, prune, skip_init
from torch.utils.mkldnn import to_mkldnn

import my_ops

LIMIT = 2.0**-20  # for float32 sums of a few terms of order 1, in another order

LAYERS = {
    "Linear": lambda **more: my_ops.nn.Linear(5, 4, **more),
    "LinearActivation": lambda **more: my_ops.nn.LinearActivation(5, 4, activation="silu", **more),
    "LLTMCell": lambda **more: my_ops.nn.LLTMCell(5, 4, **more),
    "LLTM": lambda **more: my_ops.nn.LLTM(5, 4, 2, bidirectional=True, **more),
}
HOLDERS = {  # the module inside the layer that holds a weight
    "Linear": "",
    "LinearActivation": "linear",
    "LLTMCell": "",
    "LLTM": "cells.1",
}


@pytest.fixture(params=LAYERS)
def kind(request):
    return request.param


@pytest.fixture
def make(kind, device):
    return lambda **more: LAYERS[kind](**{"device": device, **more})


@pytest.fixture
def x(kind, device):
    return torch.randn((3, 5) if kind == "LLTMCell" else (6, 3, 5), device=device)


def first(result):
    return result if isinstance(result, torch.Tensor) else result[0]


def parts(layer, kind):
    """The module that holds a weight, and the weight's name."""
    holder = layer.get_submodule(HOLDERS[kind])
    return holder, "weights" if hasattr(holder, "weights") else "weight"


# ------------------------------------------------------------------------------- hooks, weights


def test_hooks_run_once_a_call(kind, make, x):
    layer = make()
    plain = first(layer(x))
    holder, _ = parts(layer, kind)
    for register in (
        holder.register_forward_pre_hook,
        holder.register_forward_hook,
        holder.register_full_backward_pre_hook,
        holder.register_full_backward_hook,
    ):
        calls = []
        handle = register(lambda *_, calls=calls: calls.append(1))
        first(layer(x.requires_grad_())).sum().backward()
        assert calls == [1]
        handle.remove()
    for act in (
        lambda: holder.register_forward_pre_hook(lambda _, args: (2 * args[0], *args[1:])),
        lambda: holder.register_forward_hook(lambda _, __, out: _map(lambda t: 2 * t, out)),
    ):
        handle = act()
        assert not torch.equal(first(layer(x)), plain)
        handle.remove()
        assert torch.equal(first(layer(x)), plain)


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_hooks_of_all_modules_see_the_linear_of_an_activation(kind):
    layer, seen = my_ops.nn.LinearActivation(5, 4, activation="silu"), set()
    register = getattr(nn.modules.module, f"register_module_{kind}_hook")
    handle = register(lambda module, *_: seen.add(module))
    try:
        layer(torch.randn(3, 5, requires_grad=True)).sum().backward()
    finally:
        handle.remove()
    assert seen == {layer, layer.linear}


def _map(function, out):
    return function(out) if isinstance(out, torch.Tensor) else tuple(function(t) for t in out)


class Shifted(my_ops.nn.Linear):
    def forward(self, input):
        return super().forward(input) + 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        lambda layer: setattr(layer, "linear", Shifted(5, 4, device=layer.linear.weight.device)),
        lambda layer: setattr(layer, "linear", nn.Linear(5, 4, device=layer.linear.weight.device)),
        lambda layer: setattr(layer.linear, "forward", lambda x: x[..., :4]),
        lambda layer: layer.linear.register_forward_hook(lambda _, __, out: out + 1),
        lambda layer: layer.linear.register_forward_pre_hook(lambda _, args: (args[0] + 1,)),
        lambda layer: setattr(layer, "activation", "relu"),
    ],
    ids=["subclass", "replaced", "patched", "hook", "pre-hook", "activation"],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_the_activation_acts_on_what_its_linear_gives(compiled, change, device):
    layer = my_ops.nn.LinearActivation(5, 4, activation="silu", device=device)
    x = torch.randn(3, 5, device=device)
    before = layer(x)
    change(layer)
    call = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    got = call(x)
    want = (F.relu if layer.activation == "relu" else F.silu)(layer.linear(x))
    torch.testing.assert_close(got, want, rtol=LIMIT, atol=LIMIT)
    assert not torch.equal(got, before)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Linear", "LinearActivation"])
def test_traced_to_one_op(make, x):
    layer, graphs = make(), []

    def keep(graph, _):
        graphs.append(graph)
        return graph

    def call(parameters, x):
        return functional_call(layer, parameters, (x,))

    with torch.no_grad():
        aot_module(layer, keep)(x)
        torch.compile(layer, fullgraph=True, backend=keep)(x)
        for mode in ("real", "fake"):
            graphs.append(make_fx(call, tracing_mode=mode)(dict(layer.named_parameters()), x))
        for strict in (True, False):
            graphs.append(torch.export.export(layer, (x,), strict=strict))
    for graph in graphs:
        called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
        assert called == [torch.ops.my_ops.linear.default]
    assert len(graphs) == 6
    scripted = [node.kind() for node in torch.jit.script(layer).inlined_graph.nodes()]
    assert [kind for kind in scripted if not kind.startswith("prim::")] == ["my_ops::linear"]


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


REPARAMETRISED = {
    "prune": lambda m, name: prune.l1_unstructured(m, name, 0.5),
    "weight_norm": nn.utils.weight_norm,
    "spectral_norm": nn.utils.spectral_norm,
    "new-weight_norm": parametrizations.weight_norm,
    "new-spectral_norm": parametrizations.spectral_norm,
    "parametrization": lambda m, name: parametrize.register_parametrization(m, name, Doubled()),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("way", REPARAMETRISED)
def test_reparametrised_weights_are_computed_each_call(way, kind, make, x):
    layer, plain = make(), make()
    names = list(plain.state_dict())
    REPARAMETRISED[way](*parts(layer, kind))
    layer.eval()  # in training, spectral_norm continues its power iteration
    for factor in (1.0, 1.5):
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.mul_(factor)
        got = first(layer(x))
        at = {name: name.rpartition(".") for name in names}
        plain.load_state_dict(
            {n: getattr(layer.get_submodule(a), b) for n, (a, _, b) in at.items()}
        )
        torch.testing.assert_close(got, first(plain(x)), rtol=LIMIT, atol=LIMIT)
        got.sum().backward()
        assert all(p.grad is not None for p in layer.parameters())
    if way == "prune":
        holder, name = parts(layer, kind)
        assert (getattr(holder, name) == 0).sum() == getattr(holder, name).numel() // 2


# ---------------------------------------------------------- parameters from elsewhere, and copies


def filled(layer):
    return {name: torch.randn_like(t) for name, t in layer.state_dict().items()}


@pytest.mark.parametrize("bias", [True, False])
def test_nothing_is_left_uninitialised(bias, kind, make, x, device):
    """Every way to fill the parameters of a layer that was created without values."""
    plain = make(bias=bias)
    state = filled(plain)
    plain.load_state_dict(state)
    want = first(plain(x))
    with torch.device("meta"):
        meta = LAYERS[kind](bias=bias)
    for layer in (meta, make(bias=bias, device="meta")):
        assert {t.device.type for t in layer.state_dict().values()} == {"meta"}
        assert first(layer(x.to("meta"))).shape == want.shape
    assigned, emptied, drawn = (copy.deepcopy(meta) for _ in range(3))
    assigned.load_state_dict(state, assign=True)
    emptied.to_empty(device=device)
    emptied.load_state_dict(state)
    for layer in (assigned, emptied):
        assert torch.equal(first(layer(x)), want)
    drawn.to_empty(device=device)
    more = {"activation": "silu"} if kind == "LinearActivation" else {}
    more |= {"num_layers": 2, "bidirectional": True} if kind == "LLTM" else {}
    for layer in (drawn, skip_init(type(plain), 5, 4, bias=bias, device=device, **more)):
        for module in layer.modules():
            if list(module.parameters(recurse=False)):
                module.reset_parameters()
        assert first(layer(x)).abs().max() < 10  # uninitialised memory is NaN here


def test_functional_calls_and_ensembles(make, x):
    layers = [make() for _ in range(3)]
    want = [first(layer(x)) for layer in layers]
    blank = copy.deepcopy(layers[0]).to("meta")

    def call(parameters, x):
        return first(functional_call(blank, parameters, (x,)))

    for layer, output in zip(layers, want, strict=True):
        assert torch.equal(call(dict(layer.named_parameters()), x), output)
    stacked, _ = stack_module_state(layers)
    got = torch.vmap(call, (0, None))(stacked, x)
    torch.testing.assert_close(got, torch.stack(want), rtol=LIMIT, atol=LIMIT)
    grads = torch.vmap(torch.func.grad(lambda p: call(p, x).sum()))(stacked)
    for k, layer in enumerate(layers):
        want = torch.autograd.grad(first(layer(x)).sum(), list(layer.parameters()))
        for (name, _), exact in zip(layer.named_parameters(), want, strict=True):
            torch.testing.assert_close(grads[name][k], exact, rtol=LIMIT, atol=4 * LIMIT)


def test_a_whole_module_is_saved_and_subclassed(kind, make, x):
    layer = make()
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    assert torch.equal(first(torch.load(file, weights_only=False)(x)), first(layer(x)))

    class Own(type(layer)):
        def forward(self, *args):
            return first(super().forward(*args))

    own = Own(5, 4, **({"activation": "silu"} if kind == "LinearActivation" else {}))
    own = own.to(x.device)
    assert copy.deepcopy(own)(x).shape == own(x).shape


# ------------------------------------------------------------------- tools that look for a Linear


class Quantized(torch.Tensor):
    """A weight of int8 with a scale, which supports only torch's linear, like torchao's."""

    @staticmethod
    def __new__(cls, values, scale):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, device=values.device)

    def __init__(self, values, scale):
        self.values, self.scale = values, scale

    def dequantized(self):
        return self.values.float() * self.scale

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is F.linear:
            x, weight, bias = args
            return F.linear(x, weight.dequantized(), bias)
        return super().__torch_function__(function, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        if op is torch.ops.aten.detach.default:
            return cls(args[0].values, args[0].scale)
        raise NotImplementedError(op)


class Dispatched(Quantized):
    """The same for the ops inside torch's linear, like semi-structured sparse weights."""

    __torch_function__ = nn.Parameter.__torch_function__  # none

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        if op.namespace != "aten":
            raise NotImplementedError(op)
        if op is torch.ops.aten.detach.default:
            return cls(args[0].values, args[0].scale)
        whole = [t.dequantized() if isinstance(t, cls) else t for t in args]
        return op(*whole, **(kwargs or {}))


@pytest.mark.parametrize("weight", [Quantized, Dispatched])
@pytest.mark.parametrize("kind", ["Linear", "LinearActivation"])
def test_a_weight_that_knows_torch_s_linear_alone(weight, make, x, kind):
    layer = make()
    holder, _ = parts(layer, kind)
    scale = holder.weight.detach().abs().max() / 127
    values = (holder.weight.detach() / scale).round().to(torch.int8)
    holder.weight = nn.Parameter(weight(values, scale), requires_grad=False)
    got = layer(x)
    holder.weight = nn.Parameter(values.float() * scale)
    torch.testing.assert_close(got, layer(x), rtol=LIMIT, atol=LIMIT)


@pytest.mark.filterwarnings("ignore:.*nested")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_input_goes_to_torch_s_linear(layout, device):
    rows = [torch.randn(n, 5, device=device) for n in (2, 3)]
    nested = torch.nested.nested_tensor(rows, layout=layout)
    for layer in (
        my_ops.nn.Linear(5, 4, device=device),
        my_ops.nn.LinearActivation(5, 4, activation="silu", device=device),
    ):
        for got, row in zip(layer(nested).unbind(), rows, strict=True):
            torch.testing.assert_close(got, layer(row), rtol=LIMIT, atol=LIMIT)


@pytest.mark.filterwarnings("ignore:Sparse CS")
@pytest.mark.parametrize("kind", ["sparse", "sparse_csr", "sparse_csc", "mkldnn"])
def test_sparse_and_mkldnn_inputs_go_to_torch_s_linear(kind):
    """They are no subclasses of a tensor."""
    x = torch.randn(3, 5).relu()
    for layer in (
        my_ops.nn.Linear(5, 4),
        my_ops.nn.LinearActivation(5, 4, activation="gelu"),
    ):
        got = layer(getattr(x, f"to_{kind}")())
        got = got.to_dense() if kind == "mkldnn" else got
        torch.testing.assert_close(got, layer(x), rtol=LIMIT, atol=LIMIT)


@pytest.mark.filterwarnings("ignore:Sparse CS")
@pytest.mark.parametrize("kind", ["sparse_csr", "sparse_csc"])
def test_sparse_weights_go_to_torch_s_linear(kind):
    layer, x = my_ops.nn.Linear(5, 4), torch.randn(3, 5)
    want = layer(x)
    layer.weight = nn.Parameter(getattr(layer.weight.detach(), f"to_{kind}")())
    torch.testing.assert_close(layer(x), want, rtol=LIMIT, atol=LIMIT)


@pytest.mark.parametrize("kind", ["Linear", "LinearActivation"])
@pytest.mark.parametrize("by", ["trace", "export"])
def test_exports_to_onnx_have_torchs_operators(by, kind, make, x, monkeypatch):
    """Its exporters, which trace a layer in one of two ways, know no others."""
    layer = make()

    def has_ours():
        if by == "trace":
            return "my_ops::" in str(torch.jit.trace(layer, x, check_trace=False).inlined_graph)
        return "my_ops." in str(torch.export.export(layer, (x,)).graph)

    assert has_ours()
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    assert not has_ours()


def model():
    return nn.Sequential(
        my_ops.nn.LinearActivation(5, 16, activation="gelu"), my_ops.nn.Linear(16, 4)
    ).eval()


@pytest.mark.filterwarnings("ignore:torch.*quant.* deprecated")
@pytest.mark.parametrize("scripted", [False, True])
def test_quantize_dynamic(scripted):
    """It takes torch.nn.Linear by its exact type, which a Linear can be given."""
    if torch.backends.quantized.engine == "none":
        pytest.skip("this torch is built without a quantized engine")
    plain, quantized = model(), model()
    quantized.load_state_dict(plain.state_dict())
    for layer in quantized.modules():
        if type(layer) is my_ops.nn.Linear:
            layer.__class__ = nn.Linear
    quantized = torch.ao.quantization.quantize_dynamic(quantized, {nn.Linear})
    kinds = [type(layer).__name__ for layer in (quantized[0].linear, quantized[1])]
    assert kinds == ["Linear", "Linear"] and not list(quantized.parameters())
    x = torch.randn(7, 5)
    call = torch.jit.script(quantized) if scripted else quantized
    assert 0 < (call(x) - plain(x)).abs().max() < 0.05  # steps of 1/127 of the largest


def test_mkldnn():
    plain = model()
    x = torch.randn(7, 5)
    got = to_mkldnn(copy.deepcopy(plain))(x.to_mkldnn()).to_dense()
    torch.testing.assert_close(got, plain(x), rtol=LIMIT, atol=LIMIT)


def test_fused_batch_norm():
    linear, norm = my_ops.nn.Linear(5, 4), nn.BatchNorm1d(4)
    norm(torch.randn(9, 4))
    x = torch.randn(7, 5)
    want = norm.eval()(linear.eval()(x))
    got = fusion.fuse_linear_bn_eval(linear, norm)(x)
    torch.testing.assert_close(got, want, rtol=LIMIT, atol=4 * LIMIT)
    with pytest.raises(AttributeError):
        fusion.fuse_linear_bn_eval(model()[0], norm)


@pytest.mark.parametrize("inference", [False, True])
def test_transformer_encoder_layer(inference, device):
    """In evaluation it reads the weights of linear1 and linear2, for a path that calls neither."""
    sizes = {"d_model": 8, "nhead": 2, "dim_feedforward": 16, "batch_first": True}
    plain = nn.TransformerEncoderLayer(**sizes, activation=F.silu, device=device).eval()
    x = torch.randn(2, 3, 8, device=device)
    ours = copy.deepcopy(plain)
    ours.linear1 = my_ops.nn.Linear(8, 16, device=device)
    ours.linear2 = my_ops.nn.Linear(16, 8, device=device)
    ours.load_state_dict(plain.state_dict())
    fused = nn.TransformerEncoderLayer(**sizes, activation=nn.Identity(), device=device).eval()
    fused.load_state_dict(plain.state_dict())
    fused.linear1 = my_ops.nn.LinearActivation(8, 16, activation="silu", device=device)
    fused.linear1.linear.load_state_dict(plain.linear1.state_dict())
    with torch.inference_mode(inference):
        for layer in (ours, fused):
            torch.testing.assert_close(layer(x), plain(x), rtol=8 * LIMIT, atol=8 * LIMIT)
        ours.linear1 = fused.linear1
        ours.activation_relu_or_gelu = 1  # the default of nn.TransformerEncoderLayer
        with pytest.raises(AttributeError, match=r"LinearActivation.*weight"):
            ours(x)


# --------------------------------------------------------------------------------- torch.fx


@pytest.mark.parametrize("kind", ["Linear", "LinearActivation"])
def test_fx_traces_a_linear_layer(make, x):
    layer = make()
    traced = torch.fx.symbolic_trace(layer)
    called = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert called == [my_ops.linear]
    assert torch.equal(traced(x), layer(x))


@pytest.mark.parametrize("kind", ["LLTMCell", "LLTM"])
def test_fx_takes_a_recurrent_layer_as_it_is(kind, make, x):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = make()

        def forward(self, x, state):
            output, _ = self.layer(x, state)
            return output + first(self.layer(x))

    model = Model()
    shape = (3, 4) if kind == "LLTMCell" else (4, 3, 4)
    state = tuple(torch.randn(shape, device=x.device) for _ in range(2))
    traced = torch.fx.symbolic_trace(model)
    called = [node.target for node in traced.graph.nodes if node.op == "call_module"]
    assert called == ["layer", "layer"]
    assert torch.equal(traced(x, state), model(x, state))
    with pytest.raises(torch.fx.proxy.TraceError, match=f"{kind}: trace the model that holds"):
        torch.fx.symbolic_trace(model.layer)
