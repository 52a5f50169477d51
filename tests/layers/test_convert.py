"""my_ops.convert replaces torch's layers in a model by ours, in place, and undoes it."""

import copy
import pickle
import types
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm
from torch.utils._python_dispatch import TorchDispatchMode

import my_ops
from my_ops.recurrent import _cudnn, _torch_layers

OURS = {
    nn.LSTM: my_ops.nn.LSTM,
    nn.GRU: my_ops.nn.GRU,
    nn.LSTMCell: my_ops.nn.LSTMCell,
    nn.GRUCell: my_ops.nn.GRUCell,
}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(4, 6), nn.ReLU())
        self.lstm = nn.LSTM(6, 5, 2, bidirectional=True, batch_first=True)
        self.gru = nn.GRU(10, 3, dropout=0.0)
        self.cell = nn.LSTMCell(3, 3)
        self.last = nn.GRUCell(3, 2)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x):
        x, _ = self.gru(self.lstm(self.embed(x))[0])
        h, _ = self.cell(x[:, -1])
        return self.norm(self.last(h))


def made(device="cpu"):
    model = Model().to(device, torch.float64).eval()
    return model, torch.randn(3, 7, 4, dtype=torch.float64, device=device)


def kinds(model):
    return {name: type(module) for name, module in model.named_modules()}


def test_every_kind_becomes_ours_and_back(device):
    model, x = made(device)
    before, want = kinds(model), model(x)
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    report = my_ops.convert(model)
    assert kinds(model) == {name: OURS.get(kind, kind) for name, kind in before.items()}
    assert report.converted == {
        "lstm": "LSTM",
        "gru": "GRU",
        "cell": "LSTMCell",
        "last": "GRUCell",
    }
    assert report.skipped == {"embed.0": "fast_fp32() takes its products"}
    torch.testing.assert_close(model(x), want, rtol=1e-12, atol=1e-12)
    assert all(modules[name] is module for name, module in model.named_modules())
    assert all(parameters[name] is p for name, p in model.named_parameters())
    assert not model.lstm.training
    report.undo()
    assert kinds(model) == before
    assert torch.equal(model(x), want)


def test_again_does_nothing():
    model, _ = made()
    first = my_ops.convert(model)
    after = kinds(model)
    second = my_ops.convert(model)
    assert second.converted == {}
    assert str(second) == "embed.0: Linear, skipped: fast_fp32() takes its products"
    second.undo()
    assert kinds(model) == after
    first.undo()
    first.undo()
    assert kinds(model) == kinds(made()[0])


@pytest.mark.parametrize("kind", OURS)
def test_the_model_itself(kind):
    layer = kind(4, 3)
    report = my_ops.convert(layer)
    assert type(layer) is OURS[kind]
    assert report.converted == {"": kind.__name__}
    assert str(report) == f"(the model): {kind.__name__}, converted"
    report.undo()
    assert type(layer) is kind


def test_training_goes_on():
    """An optimizer made before still works, because its state belongs to the parameters."""
    found = []
    for converted in (False, True):
        torch.manual_seed(4)
        model, x = made()
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        for step in range(4):
            if converted and step == 2:
                my_ops.convert(model)
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
        found.append(model(x))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_copies_state_dicts_and_compilation():
    model, x = made()
    plain = copy.deepcopy(model)
    my_ops.convert(model)
    want = model(x)
    plain.load_state_dict(model.state_dict())
    model.load_state_dict(plain.state_dict())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other.lstm) is my_ops.nn.LSTM
        assert torch.equal(other(x), want)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), want, rtol=1e-12, atol=1e-12)


def test_hooks_stay():
    model, x = made()
    calls = []
    for layer in (model.lstm, model.last):
        layer.register_forward_pre_hook(lambda module, args: calls.append("before"))
        layer.register_forward_hook(lambda module, args, result: calls.append("after"))
    my_ops.convert(model)
    model(x)
    assert calls == ["before", "after"] * 2


def test_hooks_that_make_a_parameter_act():
    layers = [nn.GRU(4, 3).double().eval(), nn.LSTM(4, 3).double()]
    spectral_norm(layers[0], "weight_hh_l0")
    prune.l1_unstructured(layers[1], "weight_hh_l0", 0.5)
    x = torch.randn(5, 4, dtype=torch.float64)
    for layer in layers:
        want = layer(x)
        report = my_ops.convert(layer)
        assert list(report.converted) == [""]
        torch.testing.assert_close(layer(x), want, rtol=1e-12, atol=1e-12)


class Own(nn.GRUCell):
    pass


class Wrapped(torch.Tensor):
    pass


def replaced_forward(layer):
    layer.forward = lambda x: x
    return layer


def with_own(name, layer):
    setattr(layer, name, 0.5)
    return layer


def quantized(layer):
    layer.qconfig = torch.ao.quantization.default_dynamic_qconfig
    return layer


def wrapped(layer):
    layer.weight_hh = nn.Parameter(layer.weight_hh.detach().as_subclass(Wrapped))
    return layer


def sparse(layer):
    layer.weight_hh = nn.Parameter(layer.weight_hh.detach().to_sparse())
    return layer


@pytest.mark.parametrize(
    "layer, why",
    [
        (Own(4, 3), "subclass of nn.GRUCell"),
        (parametrizations.weight_norm(nn.LSTMCell(4, 3), "weight_hh"), "parametrized"),
        (parametrizations.weight_norm(nn.LSTM(4, 3), "weight_hh_l0"), "parametrized"),
        (replaced_forward(nn.GRU(4, 3)), "its forward was replaced"),
        (quantized(nn.GRU(4, 3)), "being quantized"),
        (nn.LSTM(4, 3, proj_size=2), "it has projections, which run torch's own LSTM"),
        (nn.GRUCell(4, 3, dtype=torch.complex64), "its weight_ih is of dtype complex64"),
        (wrapped(nn.GRUCell(4, 3)), "its weight_hh is a Wrapped"),
        (sparse(nn.GRUCell(4, 3)), "its weight_hh is of layout torch.sparse_coo"),
        (with_own("zoneout", nn.GRU(4, 3)), "it has an attribute zoneout of its own"),
        (with_own("_step", nn.LSTMCell(4, 3)), "it has an attribute _step of its own"),
        (with_own("_direction", nn.LSTM(4, 3)), "it has an attribute _direction of its own"),
        (nn.RNN(4, 3), "my_ops has no RNN"),
        (nn.RNNCell(4, 3), "my_ops has no RNNCell"),
        (nn.Linear(4, 3), "fast_fp32() takes its products"),
    ],
    ids=lambda value: value.rsplit(" ", 1)[-1] if isinstance(value, str) else "",
)
def test_what_is_skipped_and_why(layer, why):
    model = nn.Sequential(nn.LSTM(2, 2), layer)
    kind, report = type(layer), my_ops.convert(model)
    assert type(layer) is kind
    assert report.skipped == {"1": why}
    assert report.converted == {"0": "LSTM"}
    assert str(report) == f"0: LSTM, converted\n1: {kind.__name__}, skipped: {why}"


def test_a_report_of_many():
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(5)], nn.GRU(2, 2))
    assert str(my_ops.convert(model)) == (
        "0, 1, 2 and 2 more: Linear, skipped: fast_fp32() takes its products\n5: GRU, converted"
    )


def test_no_qconfig_is_no_quantization():
    layer = nn.LSTM(4, 3)
    layer.qconfig = None
    assert my_ops.convert(layer).converted


def test_on_meta_before_it_is_loaded():
    with torch.device("meta"):
        layer = nn.LSTM(4, 3)
    my_ops.convert(layer)
    layer = layer.to_empty(device="cpu")
    plain = nn.LSTM(4, 3)
    layer.load_state_dict(plain.state_dict())
    x = torch.randn(5, 2, 4)
    torch.testing.assert_close(layer(x)[0], plain(x)[0])


@pytest.mark.parametrize(
    "chosen, names",
    [
        ({"only": "lstm"}, {"lstm"}),
        ({"only": nn.LSTM}, {"lstm", "inner.0"}),
        ({"only": ["inner", nn.GRUCell]}, {"inner.0", "inner.1", "last"}),
        ({"only": ""}, {"lstm", "inner.0", "inner.1", "last"}),
        ({"only": ()}, set()),
        ({"skip": "inner"}, {"lstm", "last"}),
        ({"skip": [nn.RNNBase]}, {"last"}),
        ({"only": "inner", "skip": nn.GRU}, {"inner.0"}),
    ],
)
def test_modules_that_are_chosen(chosen, names):
    model = nn.Sequential()
    model.lstm, model.last = nn.LSTM(2, 2), nn.GRUCell(2, 2)
    model.inner = nn.ModuleList([nn.LSTM(2, 2), nn.GRU(2, 2)])
    model.inner2 = nn.Linear(2, 2)
    assert set(my_ops.convert(model, **chosen).converted) == names


@pytest.mark.parametrize("argument", ["only", "skip"])
def test_choices_that_are_refused(argument):
    model = nn.Sequential(nn.LSTM(2, 2))
    with pytest.raises(ValueError, match=f"convert: {argument}: the model has no module 'lstm'"):
        my_ops.convert(model, **{argument: "lstm"})
    for wrong in (3, [model[0]], int):
        with pytest.raises(
            TypeError, match=f"convert: {argument} must have names and classes of modules, got "
        ):
            my_ops.convert(model, **{argument: wrong})
    assert type(model[0]) is nn.LSTM


def test_a_model_is_asked_for():
    with pytest.raises(TypeError, match=r"convert: model must be a torch\.nn\.Module, got dict"):
        my_ops.convert({})


def test_undo_after_a_parametrization_was_removed():
    layer = nn.LSTM(4, 3)
    report = my_ops.convert(layer)
    parametrizations.weight_norm(layer, "weight_hh_l0")
    report.undo()
    parametrize.remove_parametrizations(layer, "weight_hh_l0")
    assert type(layer) is my_ops.nn.LSTM
    report.undo()
    assert type(layer) is nn.LSTM


class Hooked:
    """As tools do that put a module's parameters where they are needed: they wrap its forward, and
    put back the one that they found."""

    def __init__(self, layer):
        self.layer, self.found = layer, layer.forward
        layer.forward = lambda *args: self.found(*args)

    def remove(self):
        self.layer.forward = self.found


@pytest.mark.parametrize("kind", OURS)
def test_a_forward_that_is_wrapped_after_the_conversion(kind):
    layer, x = kind(4, 3), torch.randn(5, 4)
    want, keys = layer(x), set(layer.__dict__)
    report = my_ops.convert(layer)
    hook = Hooked(layer)
    report.undo()
    assert type(layer) is OURS[kind]
    torch.testing.assert_close(layer(x), want)
    hook.remove()
    report.undo()
    assert type(layer) is kind
    assert torch.equal(flat(layer(x)), flat(want))
    assert set(layer.__dict__) == keys


def flat(results):
    """The first tensor of nested results."""
    return results if isinstance(results, torch.Tensor) else flat(results[0])


@pytest.mark.parametrize("kind", OURS)
def test_a_forward_that_was_wrapped_before(kind):
    layer = kind(4, 3)
    hook = Hooked(layer)
    assert my_ops.convert(layer).skipped == {"": "its forward was replaced"}
    hook.remove()
    my_ops.convert(layer)
    assert type(layer) is OURS[kind]
    assert "forward" not in layer.__dict__


class Compiled:
    """Like a method of a compiled class, which has no ``__func__``."""

    def __init__(self, layer):
        self.__self__ = layer

    def __call__(self, x):
        return x


@pytest.mark.parametrize("kind", OURS)
@pytest.mark.parametrize(
    "forward",
    [
        lambda layer: copy.deepcopy(layer).forward,  # the same function, of another layer
        lambda layer: types.MethodType(lambda self, x: x, layer),
        Compiled,
    ],
    ids=["of_another", "another", "compiled"],
)
def test_another_method_as_forward(kind, forward):
    layer = kind(4, 3)
    layer.forward = forward(layer)
    assert my_ops.convert(layer).skipped == {"": "its forward was replaced"}
    assert type(layer) is kind


@pytest.mark.parametrize("kind", OURS)
def test_undo_leaves_no_trace(kind):
    layer = kind(4, 3)
    before = set(layer.__dict__)
    report = my_ops.convert(layer)
    if isinstance(layer, nn.RNNBase):
        layer.dropout = layer.zoneout = layer.weight_dropout = 0.5
    report.undo()
    assert set(layer.__dict__) == before


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_revert(copied):
    model, x = made()
    before, want = kinds(model), model(x)
    my_ops.convert(model)
    other = copied(model)
    report = my_ops.revert(other)
    assert kinds(other) == before
    assert report.converted == {
        "lstm": "LSTM", "gru": "GRU", "cell": "LSTMCell", "last": "GRUCell",
    }  # fmt: skip
    assert torch.equal(other(x), want)
    assert set(other.lstm.__dict__) == set(made()[0].lstm.__dict__)
    report.undo()
    assert kinds(other) == kinds(model)
    torch.testing.assert_close(other(x), want, rtol=1e-12, atol=1e-12)


def test_revert_skips_what_torch_has_not():
    model = nn.Sequential(my_ops.nn.LSTM(4, 3, zoneout=0.5), my_ops.nn.GRU(3, 3))
    report = my_ops.revert(model)
    assert report.skipped == {"0": "it has zoneout"}
    assert [type(layer) for layer in model] == [my_ops.nn.LSTM, nn.GRU]
    with pytest.raises(TypeError, match=r"revert: model must be a torch\.nn\.Module, got list"):
        my_ops.revert([])


def test_undo_takes_our_options_away():
    layer = nn.GRU(4, 3)
    report = my_ops.convert(layer)
    layer.zoneout = layer.weight_dropout = 0.5
    report.undo()
    my_ops.convert(layer)
    assert layer.zoneout == layer.weight_dropout == 0.0
    x = torch.randn(5, 2, 4)
    assert torch.equal(layer(x)[0], layer(x)[0])


# ------------------------------------------------------------------- what still goes to cuDNN


HALF, FLOAT = torch.float16, torch.float32


@pytest.mark.parametrize(
    "mode, dtype, hidden, steps, batch, directions, grad, faster",
    [
        ("LSTM", FLOAT, 256, 128, 8000, 1, False, False),
        ("LSTM", FLOAT, 256, 128, 8000, 1, True, True),
        ("LSTM", FLOAT, 256, 128, 511, 2, True, False),
        ("LSTM", FLOAT, 256, 128, 512, 2, True, True),
        ("GRU", FLOAT, 256, 128, 1 << 20, 1, True, False),
        ("GRU", FLOAT, 768, 16, 1023, 1, False, False),
        ("GRU", FLOAT, 768, 16, 1024, 1, False, True),
        ("LSTM", FLOAT, 1025, 1, 3, 1, False, False),
        ("LSTM", FLOAT, 1025, 1, 4, 1, False, True),
        ("GRU", FLOAT, 4096, 9, 15, 1, True, False),
        ("GRU", FLOAT, 4096, 9, 16, 1, True, True),
        ("GRU", FLOAT, 4096, 9, 1, 2, True, True),
        ("LSTM", FLOAT, 96, 128, 64, 1, False, True),
        ("LSTM", FLOAT, 96, 127, 64, 1, False, False),
        ("LSTM", FLOAT, 96, 64, 64, 2, False, True),
        ("LSTM", FLOAT, 96, 1, 64, 1, True, True),
        ("LSTM", FLOAT, 64, 128, 64, 1, True, False),
        ("GRU", FLOAT, 128, 128, 256, 1, False, False),
        ("GRU", FLOAT, 128, 128, 256, 2, False, True),
        ("GRU", FLOAT, 129, 128, 256, 2, False, False),
        ("LSTM", HALF, 1025, 9, 32, 2, True, True),
        ("LSTM", HALF, 1025, 9, 31, 2, True, False),
        ("LSTM", HALF, 1025, 9, 99, 1, True, False),
        ("LSTM", HALF, 1024, 9, 1024, 2, True, True),
        ("LSTM", HALF, 1024, 9, 1023, 2, True, False),
        ("LSTM", HALF, 1023, 9, 1024, 2, True, False),
        ("LSTM", HALF, 128, 9, 1024, 2, False, True),
        ("LSTM", HALF, 128, 9, 1023, 2, False, False),
        ("LSTM", HALF, 129, 9, 1024, 2, False, False),
        ("LSTM", HALF, 128, 9, 1024, 2, True, False),
        ("GRU", HALF, 128, 9, 1024, 2, False, False),
        ("LSTM", torch.bfloat16, 128, 9, 1024, 2, False, False),
        ("LSTM", torch.float64, 1025, 9, 99, 2, True, False),
    ],
)
def test_where_cudnn_is_faster(mode, dtype, hidden, steps, batch, directions, grad, faster):
    call = _cudnn.Call(mode, dtype, hidden, steps, batch, 1, directions, False, grad)
    assert _cudnn.faster_on_gpu(call, tf32=True) is faster
    assert _cudnn.faster_on_gpu(call, tf32=False) is (faster and dtype == HALF)


@pytest.mark.parametrize(
    "mode, grad, hidden, rows",
    [
        *[("LSTM", False, 129, 16384), ("LSTM", False, 256, 16384), ("LSTM", False, 257, 4096)],
        *[("LSTM", False, 384, 4096), ("LSTM", False, 385, 2048), ("LSTM", False, 512, 2048)],
        *[("LSTM", False, 513, 1024), ("LSTM", False, 640, 1024), ("LSTM", False, 641, 256)],
        *[("LSTM", False, 768, 256), ("LSTM", False, 769, 512), ("LSTM", False, 1024, 512)],
        *[("LSTM", True, 192, None), ("LSTM", True, 193, 1024), ("LSTM", True, 384, 1024)],
        *[("LSTM", True, 385, 512), ("LSTM", True, 512, 512), ("LSTM", True, 513, 256)],
        *[("LSTM", True, 1024, 256), ("LSTM", True, 1025, 16)],
        *[("GRU", False, 256, 16384), ("GRU", False, 257, 4096), ("GRU", False, 384, 4096)],
        *[("GRU", False, 385, 2048), ("GRU", False, 512, 2048), ("GRU", False, 513, 1024)],
        *[("GRU", False, 768, 1024), ("GRU", False, 769, 512), ("GRU", False, 1024, 512)],
        *[("GRU", True, 384, None), ("GRU", True, 385, 512), ("GRU", True, 640, 512)],
        *[("GRU", True, 641, 256), ("GRU", True, 1024, 256), ("GRU", True, 1025, 16)],
    ],
)
def test_from_how_many_rows_cudnn_is_faster(mode, grad, hidden, rows):
    """On both sides of each limit; of two directions, where a batch has twice as many rows."""

    def faster(batch, directions=1):
        call = _cudnn.Call(mode, FLOAT, hidden, 1, batch, 1, directions, False, grad)
        return _cudnn.faster_on_gpu(call, tf32=True)

    if rows is None:
        assert not faster(1 << 20)
        return
    assert faster(rows)
    assert not faster(rows - 1)
    assert faster(rows // 2, 2)
    assert faster(rows // 2 - 1, 2) == (hidden > 1024)


def test_where_cudnn_is_faster_in_later_layers():
    def faster(hidden=193, batch=1024, layers=2, directions=2, grad=True):
        call = _cudnn.Call("GRU", FLOAT, hidden, 64, batch, layers, directions, False, grad)
        return _cudnn.faster_on_gpu(call, tf32=True)

    assert faster()
    assert not faster(hidden=192)
    assert not faster(batch=1023)
    assert not faster(layers=1)
    assert not faster(directions=1)
    assert not faster(grad=False)


@pytest.mark.parametrize(
    "dtype, hidden, batch, several, grad, bound",
    [
        (FLOAT, 128, 4, (2, 1, False), False, True),
        (FLOAT, 128, 4, (1, 2, False), False, True),
        (FLOAT, 128, 4, (1, 1, True), False, True),
        (FLOAT, 128, 4, (1, 1, False), False, False),
        (FLOAT, 129, 4, (2, 1, False), False, False),
        (FLOAT, 128, 4, (2, 1, False), True, False),
        (FLOAT, 128, 5, (2, 1, False), True, True),
        (FLOAT, 128, 64, (2, 1, False), True, True),
        (FLOAT, 128, 65, (2, 1, False), True, False),
        (FLOAT, 128, 65, (2, 1, False), False, False),
        (FLOAT, 64, 65, (2, 1, False), False, True),
        (HALF, 128, 4, (2, 1, False), False, True),
        (torch.bfloat16, 128, 4, (2, 1, False), False, False),
        (torch.float64, 128, 4, (2, 1, False), False, False),
    ],
)
def test_where_the_host_bounds(dtype, hidden, batch, several, grad, bound):
    """``several``: layers, directions, whether packed."""
    call = _cudnn.Call("GRU", dtype, hidden, 64, batch, *several, grad)
    assert _cudnn.bound_by_host(call) is bound


@pytest.fixture
def forced(monkeypatch):
    """Converted layers call torch's op. The list has an element for each call."""
    calls = []
    monkeypatch.setattr(
        _torch_layers,
        "parameters_for_cudnn",
        lambda layer, *_: calls.append(1) or layer._in_a_row(),
    )
    return calls


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("how", ["batch", "batch_first", "one", "packed", "unsorted"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_torchs_op_gives_what_torchs_layer_does(
    kind, how, with_state, training, bias, device, forced
):
    dropout = 0.4 if device == "cpu" else 0.0  # cuDNN draws from a state of its own
    options = {"bidirectional": True, "dropout": dropout, "bias": bias}
    layer = kind(3, 4, 2, batch_first=how == "batch_first", device=device, **options)
    layer.train(training)
    theirs = copy.deepcopy(layer)
    for each in (layer, theirs):
        each.flatten_parameters()
    my_ops.convert(layer)
    batch = () if how == "one" else (5,)
    x = torch.randn(5, 6, 3) if how == "batch_first" else torch.randn(6, *batch, 3)
    x = x.to(device)
    if how in ("packed", "unsorted"):
        lengths = torch.tensor([6, 4, 4, 2, 1] if how == "packed" else [2, 6, 1, 4, 4])
        x = nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=how == "packed")
    hx = None
    if with_state:
        hx = torch.randn(4, *batch, 4, device=device)
        hx = (hx, torch.randn_like(hx)) if kind is nn.LSTM else hx
    found = []
    for each in (layer, theirs):
        torch.manual_seed(1)
        output, last = each(x, hx)
        found.append((tuple(output), last))
    assert forced
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_torchs_op_gets_contiguous_states(kind, device, forced, monkeypatch):
    """cuDNN refuses others; which calls go there must not decide what a layer takes."""
    layer = kind(3, 4, 2, device=device)
    my_ops.convert(layer)
    name = layer.mode.lower()
    op = getattr(torch, name)

    def cudnn(*arguments):
        states = next(a for a in arguments[1:] if isinstance(a, (list, tuple)) or a.dim() == 3)
        assert all(s.is_contiguous() for s in torch.atleast_1d(states))
        return op(*arguments)

    state = torch.randn(2, 1, 8, device=device)[..., ::2].expand(2, 5, 4)
    hx = (state, state) if kind is nn.LSTM else state
    x = torch.randn(6, 5, 3, device=device)
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([6, 4, 4, 2, 1]))
    monkeypatch.setattr(torch, name, cudnn)
    for given in (x, packed):
        layer(given, hx)
    assert len(forced) == 2


def test_what_torchs_layers_do_not_take_is_ours(device, forced):
    layer = nn.LSTM(3, 4, device=device)
    my_ops.convert(layer)
    x = torch.randn(6, 5, 3, device=device)
    layer(x, lengths=torch.full((5,), 6, device=device))
    layer(x, reset=torch.zeros(6, 5, dtype=torch.bool, device=device))
    for option in ("zoneout", "weight_dropout"):
        setattr(layer, option, 0.5)
        layer(x)
        setattr(layer, option, 0.0)
    assert not forced
    layer(x)
    assert forced


class Ops(TorchDispatchMode):
    """Records the names of the ops that run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.names.add(op.name())
        return op(*args, **(kwargs or {}))


def runs_cudnn(call):
    with Ops() as ops:
        call()
    ours = any(name.startswith("my_ops::") for name in ops.names)
    theirs = "aten::_cudnn_rnn" in ops.names
    assert ours != theirs
    return theirs


def converted(kind, *sizes, **options):
    layer = kind(*sizes, device="cuda", **options)
    my_ops.convert(layer)
    return layer


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_cudnn_gives_what_it_gave(kind, packed, cuda, monkeypatch):
    """With gradients, and without a copy of the weights, of which torch warns."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    layer = kind(24, 1032, num_layers=2, bidirectional=True)
    my_ops.convert(layer)
    layer.to(cuda)
    theirs = kind(24, 1032, num_layers=2, bidirectional=True, device=cuda)
    theirs.load_state_dict(layer.state_dict())
    x = torch.randn(3, 8, 24, device=cuda)
    if packed:
        x = nn.utils.rnn.pack_padded_sequence(
            x, torch.tensor([3, 1, 2, 3, 3, 1, 2, 2]), enforce_sorted=False
        )
    assert runs_cudnn(lambda: layer(x))
    found = []
    for each in (layer, theirs):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            output, last = each(x)
        data = output.data if packed else output
        data.square().sum().backward()
        states = last if kind is nn.LSTM else (last,)
        found.append([data, *states, *(p.grad for p in each.parameters())])
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_other_calls_of_a_converted_layer_are_ours(cuda, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    x = torch.randn(2, 16, 24, device=cuda)
    layer = converted(nn.LSTM, 24, 1032)
    assert runs_cudnn(lambda: layer(x))
    small = torch.randn(2, 3, 24, device=cuda)
    assert not runs_cudnn(lambda: layer(small))
    fresh = my_ops.nn.LSTM(24, 1032, device=cuda)
    assert not runs_cudnn(lambda: fresh(x))
    lengths = torch.full((16,), 2, device=cuda)
    assert not runs_cudnn(lambda: layer(x, lengths=lengths))
    reset = torch.zeros(2, 16, dtype=torch.bool, device=cuda)
    assert not runs_cudnn(lambda: layer(x, reset=reset))
    with torch.autocast(cuda):
        assert not runs_cudnn(lambda: layer(x))
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        assert not runs_cudnn(lambda: layer(x))
    with torch.backends.cudnn.flags(enabled=False):
        assert not runs_cudnn(lambda: layer(x))
    torch.backends.cuda.matmul.allow_tf32 = True
    assert not runs_cudnn(lambda: layer(x))
    torch.backends.cuda.matmul.allow_tf32 = False
    assert not runs_cudnn(lambda: layer.eval()(x))  # cuDNN has no backward there
    with torch.no_grad():
        assert runs_cudnn(lambda: layer(x))
    layer.train().zoneout = 0.1
    assert not runs_cudnn(lambda: layer(x))
    layer.zoneout = 0.0
    assert runs_cudnn(lambda: layer(x))
    with pytest.raises(RuntimeError, match="lstm: h0 must have the dtype of input"):
        layer(x, (torch.zeros(1, 16, 1032, device=cuda).double(),) * 2)
    empty = layer(x[:0])[0]
    assert empty.shape == (0, 16, 1032)
    packed = nn.utils.rnn.pack_padded_sequence(x[..., :3], torch.full((16,), 2))
    with pytest.raises(RuntimeError, match=r"LSTM: input must be .* 24\), got \(2, 16, 3\)"):
        layer(packed)
    layer.eval().requires_grad_(False)
    own = {name: p.clone().requires_grad_() for name, p in layer.named_parameters()}
    assert not runs_cudnn(lambda: torch.func.functional_call(layer, own, (x,)))


@pytest.mark.parametrize("packed", [False, True])
def test_short_layers_that_the_host_bounds(packed, cuda, captures):
    """A graph costs no time of the host."""
    layer = converted(nn.GRU, 8, 16, bidirectional=not packed)
    x = torch.randn(4, 3, 8, device=cuda)
    if packed:
        x = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([4, 2, 1]))
    assert not runs_cudnn(lambda: layer(x))
    with torch.no_grad():
        assert runs_cudnn(lambda: layer(x))
        assert not runs_cudnn(lambda: layer.double()(x.to(torch.float64)))
        if not packed:
            layer.float()
            want, graph = layer(x)[0], torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                assert not runs_cudnn(lambda: layer(x))
                got = layer(x)[0]
            graph.replay()
            torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)  # in TF32


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Converting a tensor to a Python:torch.jit.TracerWarning")
def test_torchs_tools_on_a_layer_that_calls_cudnn(cuda, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    layer = converted(nn.GRU, 8, 1032)
    x = torch.randn(2, 16, 8, device=cuda)
    want = my_ops.nn.GRU(8, 1032, device=cuda)
    want.load_state_dict(layer.state_dict())
    want, close = want(x)[0], {"rtol": 1e-5, "atol": 1e-5}
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x)[0], want, **close)
    exported = torch.export.export(layer, (x,)).module()
    torch.testing.assert_close(exported(x)[0], want, **close)
    torch.testing.assert_close(torch.jit.script(layer)(x)[0], want, **close)
    torch.testing.assert_close(torch.jit.trace(layer, (x,), check_trace=False)(x)[0], want, **close)
    pair = torch.stack([x, x])
    found = torch.vmap(lambda one: layer(one)[0])(pair)
    torch.testing.assert_close(found, torch.stack([want, want]), **close)
    _, tangent = torch.func.jvp(lambda one: layer(one)[0].sum(), (x,), (torch.ones_like(x),))
    assert tangent.isfinite()
    copied = copy.deepcopy(layer)
    copied.flatten_parameters()
    assert runs_cudnn(lambda: copied(x))
    loaded = pickle.loads(pickle.dumps(layer))
    loaded.flatten_parameters()
    assert runs_cudnn(lambda: loaded(x))
