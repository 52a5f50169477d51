"""my_ops.convert replaces torch's layers in a model by ours, in place, and undoes it."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm

import my_ops

OURS = {
    nn.Linear: my_ops.nn.Linear,
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
    assert report.swapped == {
        "embed.0": "Linear",
        "lstm": "LSTM",
        "gru": "GRU",
        "cell": "LSTMCell",
        "last": "GRUCell",
    }
    assert report.left == {}
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
    assert (second.swapped, second.left) == ({}, {})
    assert str(second) == "nothing to convert"
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
    assert report.swapped == {"": kind.__name__}
    assert str(report) == f"(the model): {kind.__name__} to my_ops"
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
    for layer in (model.lstm, model.embed[0]):
        layer.register_forward_pre_hook(lambda module, args: calls.append("before"))
        layer.register_forward_hook(lambda module, args, result: calls.append("after"))
    my_ops.convert(model)
    model(x)
    assert calls == ["before", "after"] * 2


def test_hooks_that_make_a_parameter_act():
    layers = [nn.Linear(4, 3).double().eval(), nn.LSTM(4, 3).double()]
    spectral_norm(layers[0])
    prune.l1_unstructured(layers[1], "weight_hh_l0", 0.5)
    x = torch.randn(5, 4, dtype=torch.float64)
    for layer in layers:
        want = layer(x)
        report = my_ops.convert(layer)
        assert list(report.swapped) == [""]
        torch.testing.assert_close(layer(x), want, rtol=1e-12, atol=1e-12)


class Own(nn.Linear):
    pass


class Wrapped(torch.Tensor):
    pass


def replaced_forward(layer):
    layer.forward = lambda x: x
    return layer


def without_weight(layer):
    """As in a hypernetwork, which sets it before each call."""
    del layer.weight
    return layer


def with_zoneout(layer):
    layer.zoneout = 0.5
    return layer


def quantized(layer):
    layer.qconfig = torch.ao.quantization.default_dynamic_qconfig
    return layer


def wrapped(layer):
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Wrapped))
    return layer


def sparse(layer):
    layer.weight = nn.Parameter(layer.weight.detach().to_sparse())
    return layer


@pytest.mark.parametrize(
    "layer, why",
    [
        (Own(4, 3), "as it is of a subclass of Linear, Own"),
        (parametrizations.weight_norm(nn.Linear(4, 3)), "as it is parametrized"),
        (parametrizations.weight_norm(nn.LSTM(4, 3), "weight_hh_l0"), "as it is parametrized"),
        (replaced_forward(nn.GRU(4, 3)), "as its forward was replaced"),
        (quantized(nn.Linear(4, 3)), "as it is being quantized"),
        (nn.LSTM(4, 3, proj_size=2), "as it has projections, which run torch's own LSTM"),
        (nn.Linear(4, 3, dtype=torch.complex64), "as its weight is of dtype complex64"),
        (wrapped(nn.Linear(4, 3)), "as its weight is a Wrapped"),
        (sparse(nn.Linear(4, 3)), "as its weight is of layout torch.sparse_coo"),
        (nn.Linear(16, 8).bfloat16(), "as its products of 16 bits are torch's own"),
        (without_weight(nn.Linear(4, 3)), "as it has no weight"),
        (with_zoneout(nn.GRU(4, 3)), "as it has an attribute zoneout of its own"),
    ],
    ids=lambda value: value.rsplit(" ", 1)[-1] if isinstance(value, str) else "",
)
def test_what_is_left_and_why(layer, why):
    model = nn.Sequential(nn.Linear(2, 2), layer)
    kind, report = type(layer), my_ops.convert(model)
    assert type(layer) is kind
    assert report.left == {"1": why}
    assert report.swapped == {"0": "Linear"}
    assert str(report) == f"0: Linear to my_ops\n1: left, {why}"


@pytest.mark.parametrize("layer", [nn.Linear(16, 9), nn.Linear(15, 8)])
def test_products_of_odd_sizes_become_ours(layer):
    my_ops.convert(layer.half())
    assert type(layer) is my_ops.nn.Linear


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


def test_undo_takes_our_options_away():
    layer = nn.GRU(4, 3)
    report = my_ops.convert(layer)
    layer.zoneout = layer.weight_dropout = 0.5
    report.undo()
    my_ops.convert(layer)
    assert layer.zoneout == layer.weight_dropout == 0.0
    x = torch.randn(5, 2, 4)
    assert torch.equal(layer(x)[0], layer(x)[0])
