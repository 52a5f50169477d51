"""Plain calls in C++, csrc/calls/recurrent.cpp: that they compute what those in Python do, bit for
bit, and what autograd asks of a node."""

import gc
import weakref

import own_cells
import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import my_ops
from my_ops import _plain as _calls
from my_ops.recurrent import _plain

pytestmark = pytest.mark.skipif(_calls._module is None, reason="the module does not fit this torch")

STEPS, BATCH, INPUTS, HIDDEN = 25, 4, 5, 6  # nn.RNN takes our op from 24 steps on
LAYERS = {
    "lstm": my_ops.nn.LSTM,
    "gru": my_ops.nn.GRU,
    "lltm": my_ops.nn.LLTM,
    "rnn": my_ops.nn.RNN,
    "a cell of one state": own_cells.minimal.layer,
    "a cell of three states": own_cells.slstm.layer,
    "a cell with parameters": own_cells.peephole.layer,
}
CELLS = {"lstm": my_ops.nn.LSTMCell, "gru": my_ops.nn.GRUCell, "lltm": my_ops.nn.LLTMCell}
KINDS = {"lstm": 2, "lltm": 2, "a cell of three states": 4, "a cell with parameters": 2}


@pytest.fixture
def called(monkeypatch):
    """Whether each call was plain, as they happen in C++."""
    found = []

    def call(*arguments):
        results = _calls.plain_call("recurrent")(*arguments)
        found.append(results is not None)
        return results

    monkeypatch.setattr(_plain, "_call", call)
    return found


def made(name, one=False, **how):
    torch.manual_seed(58)
    return CELLS[name](INPUTS, HIDDEN, **how) if one else LAYERS[name](INPUTS, HIDDEN, **how)


def tensors_of(name, layer, one, with_states):
    """The input and the states, as a layer or cell takes them."""
    dtype = next(layer.parameters()).dtype
    shape, of_states = (BATCH, INPUTS), (BATCH, HIDDEN)
    if not one:
        shape = (BATCH, STEPS, INPUTS) if layer.batch_first else (STEPS, BATCH, INPUTS)
        of_states = (layer.num_layers * (2 if layer.bidirectional else 1), *of_states)
    count = KINDS.get(name, 1) if with_states else 0
    # Positive, as a state of sLSTM is a divisor.
    states = (torch.rand(of_states).add(0.5).to(dtype).requires_grad_() for _ in range(count))
    return [torch.randn(shape, dtype=dtype, requires_grad=True), *states]


def run(layer, x, *states):
    results = layer(x, states if len(states) > 1 else states[0] if states else None)
    flat = torch.utils._pytree.tree_leaves(results)
    assert all(isinstance(t, torch.Tensor) for t in flat)
    return flat


def gradients(layer, tensors, which=slice(None)):
    results = run(layer, *tensors)[which]
    loss = sum((r.float() * (i + 1)).sin().sum() for i, r in enumerate(results))
    return results, torch.autograd.grad(loss, [*tensors, *layer.parameters()])


def same_bits(got, want):
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


HOW = [
    {},
    {"bias": False},
    {"batch_first": True},
    {"num_layers": 2, "bidirectional": True, "batch_first": True},
    {"dtype": torch.bfloat16},
]


@pytest.mark.parametrize("with_states", [False, True])
@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_those_in_python(name, how, with_states, called, monkeypatch):
    if name == "lltm" and "bias" in how:
        pytest.skip("its op takes a bias that is no parameter, so the call is not plain")
    layer = made(name, **how)
    tensors = tensors_of(name, layer, False, with_states)
    got, of_last = gradients(layer, tensors), gradients(layer, tensors, slice(-1, None))
    assert called == [True, True]
    with torch.no_grad():
        without = run(layer, *tensors)
    with torch.inference_mode():
        same_bits(without, run(layer, *tensors))
    assert called == [True] * 4
    monkeypatch.setattr(_plain, "_call", _plain.in_python)
    want = gradients(layer, tensors)
    assert "_Recurrent" in str(want[0][-1].grad_fn)
    for a, b in ((got, want), (of_last, gradients(layer, tensors, slice(-1, None)))):
        same_bits(a[0], b[0])
        same_bits(a[1], b[1])
    same_bits(without, want[0])


@pytest.mark.parametrize("with_states", [False, True])
@pytest.mark.parametrize("how", [HOW[0], HOW[1], HOW[-1]], ids=str)
@pytest.mark.parametrize("name", CELLS)
def test_steps_are_those_in_python(name, how, with_states, called, monkeypatch):
    if name == "lltm" and "bias" in how:
        pytest.skip("its op takes a bias that is no parameter, so the call is not plain")
    cell = made(name, True, **how)
    tensors = tensors_of(name, cell, True, with_states)
    got = gradients(cell, tensors)
    with torch.no_grad():
        same_bits(run(cell, *tensors), got[0])
    assert called == [True, True]
    monkeypatch.setattr(_plain, "_call", _plain.in_python)
    want = gradients(cell, tensors)
    same_bits(got[0], want[0])
    same_bits(got[1], want[1])


@pytest.mark.parametrize("one", [False, True])
@pytest.mark.parametrize("name", CELLS)
def test_gradients(name, one, called):
    layer = made(name, one, dtype=torch.float64)
    x, *states = (t[:3] if one else t for t in tensors_of(name, layer, one, True))
    tensors = [x if one else x[:2], *states]
    assert torch.autograd.gradcheck(lambda *given: tuple(run(layer, *given)), tensors)
    assert all(called)


@pytest.mark.parametrize("name", LAYERS)
def test_second_gradients(name, called):
    how = {"num_layers": 2, "bidirectional": True, "batch_first": True}
    if name in ("lstm", "gru", "lltm"):
        pytest.skip("test_plain.py has it")
    layer = made(name, **how, dtype=torch.float64)
    x, *states = tensors_of(name, layer, False, True)
    x = x.detach()[:, :3].requires_grad_()
    if name == "rnn":  # of few steps it is torch's
        layer = own_cells.tanh_rnn.layer(INPUTS, HIDDEN, **how, dtype=torch.float64)
    call = lambda *given: tuple(run(layer, *given))  # noqa: E731
    assert torch.autograd.gradgradcheck(call, (x, *states), fast_mode=True)
    assert all(called)


@pytest.mark.parametrize("one", [False, True])
@pytest.mark.parametrize("name", CELLS)
def test_forward_mode_over_a_gradient(name, one, called):
    layer = made(name, one, dtype=torch.float64)
    tensors = tensors_of(name, layer, one, False)
    x = tensors[0]
    result = run(layer, *tensors)[0]
    grad = torch.randn_like(result)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(grad, torch.ones_like(grad))
        (got,) = torch.autograd.grad(result, x, dual, retain_graph=True)
        got = forward_ad.unpack_dual(got).tangent
    # Linear in the gradient of the result.
    torch.testing.assert_close(got, torch.autograd.grad(result, x, torch.ones_like(grad))[0])
    assert called == [True]


@pytest.mark.parametrize("one", [False, True])
@pytest.mark.parametrize("name", CELLS)
def test_what_a_node_holds(name, one, called):
    """Its tensors until backward has run, once, or as often as the graph is retained."""
    layer = made(name, one)
    x, *states = tensors_of(name, layer, one, True)
    through = x * 1
    held = weakref.ref(through)
    result = run(layer, through, *states)[0]
    del through
    gc.collect()
    wanted = [x, *states, *layer.parameters()]
    first = torch.autograd.grad(result.sum(), wanted, retain_graph=True)
    assert held() is not None
    same_bits(torch.autograd.grad(result.sum(), wanted), first)
    assert held() is None
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        result.sum().backward()
    node = weakref.ref(result)
    del result
    assert node() is None
    assert called == [True]


@pytest.mark.parametrize("one", [False, True])
@pytest.mark.parametrize("name", CELLS)
def test_hooks(name, one, called):
    layer = made(name, one)
    tensors = tensors_of(name, layer, one, True)
    want = gradients(layer, tensors)[1]
    packed, unpacked, seen = [], [], []
    pack, unpack = (lambda t: packed.append(1) or t.clone()), (lambda t: unpacked.append(1) or t)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        results = run(layer, *tensors)
    assert packed and not unpacked
    node = results[0].grad_fn
    assert node.name() == "RecurrentBackward"
    node.register_prehook(lambda grads: seen.append("before"))
    node.register_hook(lambda *_: seen.append("after"))
    tensors[0].register_hook(lambda grad: seen.append("input") or 2 * grad)
    loss = sum((r * (i + 1)).sin().sum() for i, r in enumerate(results))
    got = torch.autograd.grad(loss, [*tensors, *layer.parameters()])
    assert seen == ["before", "after", "input"]
    assert len(unpacked) == len(packed)
    same_bits(got, [2 * want[0], *want[1:]])
    assert all(called)


def test_a_hook_that_raises(called):
    layer = made("lstm")
    x = torch.randn(STEPS, BATCH, INPUTS, requires_grad=True)

    def fail(t):
        raise KeyError("on purpose")

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, fail):
        result = run(layer, x)[0]
    with pytest.raises(KeyError, match="on purpose"):
        result.sum().backward()
    with (
        torch.autograd.graph.saved_tensors_hooks(fail, lambda t: t),
        pytest.raises(KeyError, match="on purpose"),
    ):
        run(layer, x)


def test_what_is_no_call():
    """None, and no harm, for objects of Python that no layer gives."""
    call = _calls.plain_call("recurrent")
    cell = made("gru", True)
    right = ["gru", 1, HIDDEN, 0, 0, False, False, torch.randn(BATCH, INPUTS), *cell.parameters()]
    assert call(*right) is not None
    for at in (1, 2, 3, 4, 7, 8):
        assert call(*right[:at], None, *right[at + 1 :]) is None
    for count in range(8, 10):  # without both weights
        assert call(*right[:count]) is None
    assert call("no such cell", *right[1:]) is None


class Refused(Exception):
    pass


class Refusing(TorchDispatchMode):
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if "backward" in str(op):
            raise Refused(op)
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("one", [False, True])
def test_what_a_mode_raises_in_backward(one):
    layer = made("lstm", one)
    results = layer(*tensors_of("lstm", layer, one, False))
    with Refusing(), pytest.raises(Refused):
        results[0].sum().backward()


@pytest.mark.parametrize("place", [0, 1, 2])
def test_carried_values_of_another_dtype(place):
    """They are joined, which would make them one dtype."""
    layer = made("a cell of three states")
    x, *states = tensors_of("a cell of three states", layer, False, True)
    states[place] = states[place].half()
    with pytest.raises((RuntimeError, ValueError), match="must have the dtype of input"):
        layer(x, tuple(states))
