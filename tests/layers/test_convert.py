"""my_ops.convert replaces torch's layers in a model by ours, in place, and undoes it."""

import copy
import pickle
import types

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm

import my_ops

OURS = {nn.LSTM: my_ops.nn.LSTM, nn.GRU: my_ops.nn.GRU, nn.RNN: my_ops.nn.RNN}
CELLS = {
    nn.LSTMCell: my_ops.nn.LSTMCell,
    nn.GRUCell: my_ops.nn.GRUCell,
    nn.RNNCell: my_ops.nn.RNNCell,
}
OF_LINEAR, OF_CELLS = "fast_fp32() takes its products", "torch's own costs the host less"


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
    assert report.converted == {"lstm": "LSTM", "gru": "GRU"}
    assert report.skipped == {"embed.0": OF_LINEAR, "cell": OF_CELLS, "last": OF_CELLS}
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
    assert str(second) == (
        f"embed.0: Linear, skipped: {OF_LINEAR}\n"
        f"cell: LSTMCell, skipped: {OF_CELLS}\nlast: GRUCell, skipped: {OF_CELLS}"
    )
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
    for layer in (model.lstm, model.gru):
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


class Own(nn.GRU):
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
    layer.weight_hh_l0 = nn.Parameter(layer.weight_hh_l0.detach().as_subclass(Wrapped))
    return layer


def sparse(layer):
    layer.weight_hh_l0 = nn.Parameter(layer.weight_hh_l0.detach().to_sparse())
    return layer


@pytest.mark.parametrize(
    "layer, why",
    [
        (Own(4, 3), "subclass of nn.GRU"),
        (parametrizations.weight_norm(nn.LSTM(4, 3), "weight_hh_l0"), "parametrized"),
        (replaced_forward(nn.GRU(4, 3)), "its forward was replaced"),
        (quantized(nn.GRU(4, 3)), "being quantized"),
        (nn.LSTM(4, 3, proj_size=2), "it has projections, which run torch's own LSTM"),
        (nn.GRU(4, 3, dtype=torch.complex64), "its weight_ih_l0 is of dtype complex64"),
        (wrapped(nn.GRU(4, 3)), "its weight_hh_l0 is a Wrapped"),
        (sparse(nn.GRU(4, 3)), "its weight_hh_l0 is of layout torch.sparse_coo"),
        (with_own("zoneout", nn.GRU(4, 3)), "it has an attribute zoneout of its own"),
        (with_own("_direction", nn.LSTM(4, 3)), "it has an attribute _direction of its own"),
        (nn.Linear(4, 3), OF_LINEAR),
        (nn.LSTMCell(4, 3), OF_CELLS),
        (nn.GRUCell(4, 3), OF_CELLS),
        (nn.RNNCell(4, 3), OF_CELLS),
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
    assert my_ops.convert(layer).converted
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
        ({"only": ["inner", nn.GRU]}, {"inner.0", "inner.1", "last"}),
        ({"only": ""}, {"lstm", "inner.0", "inner.1", "last"}),
        ({"only": ()}, set()),
        ({"skip": "inner"}, {"lstm", "last"}),
        ({"skip": [nn.LSTM]}, {"inner.1", "last"}),
        ({"only": "inner", "skip": nn.GRU}, {"inner.0"}),
    ],
)
def test_modules_that_are_chosen(chosen, names):
    model = nn.Sequential()
    model.lstm, model.last = nn.LSTM(2, 2), nn.GRU(2, 2)
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
    assert report.converted == {"lstm": "LSTM", "gru": "GRU"}
    assert torch.equal(other(x), want)
    assert set(other.lstm.__dict__) == set(made()[0].lstm.__dict__)
    report.undo()
    assert kinds(other) == kinds(model)
    torch.testing.assert_close(other(x), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", CELLS)
def test_revert_of_cells(kind):
    cell, x = CELLS[kind](4, 3), torch.randn(2, 4)
    want = cell(x)
    report = my_ops.revert(cell)
    assert type(cell) is kind
    torch.testing.assert_close(cell(x), want)
    assert set(cell.__dict__) == set(kind(4, 3).__dict__)
    report.undo()
    assert type(cell) is CELLS[kind]


def test_revert_skips_what_torch_has_not():
    ours = my_ops.nn.LSTM, my_ops.nn.GRU
    model = nn.Sequential(ours[0](4, 3, zoneout=0.5), ours[1](3, 3, heads=3), ours[1](3, 3))
    report = my_ops.revert(model)
    assert report.skipped == {"0": "it has zoneout", "1": "it has heads"}
    assert [type(layer) for layer in model] == [*ours, nn.GRU]
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
