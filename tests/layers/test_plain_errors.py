"""What plain calls of recurrent layers and cells raise, and the checks of their ops."""

import copy

import pytest
import torch

import my_ops
from my_ops._plain import _module
from my_ops.recurrent import _plain

LAYERS = {"lstm": my_ops.nn.LSTM, "gru": my_ops.nn.GRU, "lltm": my_ops.nn.LLTM}
CELLS = {"lstm": my_ops.nn.LSTMCell, "gru": my_ops.nn.GRUCell, "lltm": my_ops.nn.LLTMCell}
STEPS, BATCH, INPUTS, HIDDEN = 3, 4, 5, 6


def freed(t):
    other = t.clone()
    other.untyped_storage().resize_(0)
    return other


WRONG = {
    "meta": lambda t: t.to("meta"),
    "dtype": lambda t: t.double(),
    "integers": lambda t: t.long(),
    "sparse": lambda t: t.to_sparse(),
    "freed": freed,
    "fewer rows": lambda t: t[1:],
    "fewer columns": lambda t: t[..., 1:],
    "no rows": lambda t: t[:0],
    "more dimensions": lambda t: t[None],
    "no dimension": lambda t: t.flatten()[0],
}


def arguments_of(layer, name):
    """The input and the states, as a layer or a cell takes them."""
    if isinstance(layer, tuple(CELLS.values())):
        x, states = torch.randn(BATCH, INPUTS), torch.randn(2, BATCH, HIDDEN)
    else:
        x, states = torch.randn(STEPS, BATCH, INPUTS), torch.randn(2, 2, BATCH, HIDDEN)
    return [x, *states[: 1 if name == "gru" else 2]]


def call(layer, x, *states):
    return layer(x, states if len(states) > 1 else states[0] if states else None)


@pytest.fixture(autouse=True, params=["C++", "Python"])
def calls(request, monkeypatch):
    if request.param == "Python":
        monkeypatch.setattr(_plain, "_call", _plain.in_python)
    elif _module is None:
        pytest.skip("the module does not fit this torch")


def error_of(layer, arguments):
    with pytest.raises(Exception) as caught:
        call(layer, *arguments)
    return type(caught.value), str(caught.value)


def same_errors(layer, arguments):
    """Of a call, and of the ops of each direction or of a step."""
    found = error_of(layer, arguments)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_plain, "_call", lambda *arguments: None)
        assert found == error_of(layer, arguments)


KINDS = [(name, one) for name in LAYERS for one in (False, True)]


def made(name, one):
    return CELLS[name](INPUTS, HIDDEN) if one else LAYERS[name](INPUTS, HIDDEN, 2)


@pytest.mark.parametrize(("name", "one"), KINDS)
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("gradients", [False, True])
def test_wrong_states(name, one, wrong, gradients):
    """Those of a plain call are not replaced by an op that nobody called."""
    if wrong == "freed" and not one:
        pytest.skip("torch has an error of its own for the part of a state that a cell gets")
    layer = made(name, one)
    for at in range(1, 2 if name == "gru" else 3):
        arguments = arguments_of(layer, name)
        arguments[at] = WRONG[wrong](arguments[at])
        with torch.set_grad_enabled(gradients):
            same_errors(layer, arguments)


@pytest.mark.parametrize(("name", "one"), KINDS)
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("gradients", [False, True])
def test_wrong_parameters(name, one, wrong, with_state, gradients):
    layer = made(name, one)
    arguments = arguments_of(layer, name)[: None if with_state else 1]
    for own, parameter in list(layer.named_parameters()):
        if parameter.dim() == 1 and wrong in ("fewer columns", "more dimensions"):
            continue  # its only dimension; and LLTM takes a bias of one row
        changed = copy.deepcopy(layer)
        *path, last = own.split(".")
        module = changed.get_submodule(".".join(path))
        delattr(module, last)
        value = WRONG[wrong](parameter.detach())
        module.register_parameter(
            last, torch.nn.Parameter(value, requires_grad=value.is_floating_point())
        )
        with torch.set_grad_enabled(gradients):
            same_errors(changed, arguments)


@pytest.mark.parametrize("name", LAYERS)
def test_a_freed_input(name):
    layer = LAYERS[name](INPUTS, HIDDEN)
    with pytest.raises(RuntimeError, match=f"^{name}: input must have a storage that holds its"):
        layer(freed(torch.randn(STEPS, BATCH, INPUTS)))


# ----------------------------------------------------------------------------------------- ops


def backward_of_layers(name, bidirectional):
    """The arguments of recurrent_layers_backward, after the name."""
    layer = LAYERS[name](INPUTS, HIDDEN, 2, bidirectional=bidirectional).requires_grad_(False)
    cells, count = 4 if bidirectional else 2, 1 if name == "gru" else 2
    x = torch.randn(STEPS, BATCH, INPUTS)
    states = [torch.randn(cells, BATCH, HIDDEN) for _ in range(count)]
    parameters = [p for weights in layer.all_weights for p in weights]
    run = torch.ops.my_ops.recurrent_layers
    results = run(name, x, states, parameters, 2, bidirectional, True)
    grads, saved = results[: 1 + count], results[1 + count :]
    grads += [None] * (3 - len(grads))
    return [*grads, x, states, parameters, 2, bidirectional, saved, True, True, True]


def backward_of_step(name, _):
    cell = CELLS[name](INPUTS, HIDDEN).requires_grad_(False)
    x, *states = arguments_of(cell, name)
    parameters = list(cell.parameters())
    *new, gates = getattr(torch.ops.my_ops, f"{name}_cell_forward")(x, *parameters, *states)
    grads = [*new, None][:2]
    return [*grads, gates, x, states, parameters, True, True, True]


OF_OPS = {"layers_backward": backward_of_layers, "step_backward": backward_of_step}
PLACES = {name: change for name, change in WRONG.items() if name != "no dimension"}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("op", OF_OPS)
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("wrong", PLACES)
def test_every_tensor_of_a_gradient_is_checked(name, op, bidirectional, wrong):
    """No kernel reads outside of a tensor that has another size."""
    right = OF_OPS[op](name, bidirectional)
    run = getattr(torch.ops.my_ops, f"recurrent_{op}")
    run(name, *right)
    for at, given in enumerate(right):
        for k, one in enumerate(given if isinstance(given, list) else [given]):
            if not isinstance(one, torch.Tensor):
                continue
            if one.dim() == 1 and wrong in ("fewer columns", "more dimensions"):
                continue
            arguments = list(right)
            changed = PLACES[wrong](one)
            if isinstance(given, list):
                arguments[at] = [*given[:k], changed, *given[k + 1 :]]
            else:
                arguments[at] = changed
            with pytest.raises(RuntimeError, match=r" must |Could not run "):
                run(name, *arguments)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("op", OF_OPS)
def test_fake_checks_are_those_of_the_kernels(name, op):
    """The same error of meta tensors alone, where torch runs the fake kernel."""
    right = OF_OPS[op](name, True)
    run = getattr(torch.ops.my_ops, f"recurrent_{op}")

    def to_meta(value):
        if isinstance(value, list):
            return [to_meta(v) for v in value]
        return value.to("meta") if isinstance(value, torch.Tensor) else value

    def error(arguments):
        with pytest.raises(RuntimeError) as caught:
            run(name, *arguments)
        return str(caught.value)

    for wrong in ("fewer rows", "more dimensions", "dtype"):
        for at, given in enumerate(right):
            if isinstance(given, list):
                for k, one in enumerate(given):
                    if one.dim() > 1 or wrong == "dtype":
                        arguments = list(right)
                        arguments[at] = [*given[:k], PLACES[wrong](one), *given[k + 1 :]]
                        assert error(arguments) == error(list(map(to_meta, arguments)))
                if (op, at) != ("layers_backward", 4):  # without states they are zeros
                    without = [*right[:at], [], *right[at + 1 :]]
                    assert error(without) == error(list(map(to_meta, without)))


def test_a_plain_call_that_fails_is_made_again(monkeypatch):
    """By the ops of each direction, which raise what there is to raise, or succeed."""
    layer = my_ops.nn.LSTM(INPUTS, HIDDEN)
    x = torch.randn(STEPS, BATCH, INPUTS)
    want = layer(x)
    calls = []

    def fail(*_):
        calls.append(1)
        raise RuntimeError("on purpose")

    monkeypatch.setattr(_plain, "_call", _plain.in_python)
    monkeypatch.setattr(_plain, "_layers", fail)
    torch.testing.assert_close(layer(x), want)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), want)
    assert calls == [1, 1]
