"""The layers of my_ops.nn: parameters, state dicts, copies, TorchScript, training."""

import copy
import inspect
import io
import pickle
import re

import pytest
import torch
from samples import ACTIVATIONS
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import my_ops
from my_ops import reference

FLOAT32_LIMIT = 2.0**-21  # for sums of a few dozen terms of order 1
HALF_LIMIT = 2.0**-6  # for layers whose parameters have 8 bits

LAYERS = {
    "RoundSTE": lambda: my_ops.nn.RoundSTE(),
    "Linear": lambda: my_ops.nn.Linear(5, 4),
    "Linear-without-bias": lambda: my_ops.nn.Linear(5, 4, bias=False),
    "LinearActivation": lambda: my_ops.nn.LinearActivation(5, 4, activation="gelu"),
    "LinearActivation-without-bias": lambda: my_ops.nn.LinearActivation(
        5, 4, bias=False, activation="silu"
    ),
    "LLTMCell": lambda: my_ops.nn.LLTMCell(5, 4),
    "LLTMCell-without-bias": lambda: my_ops.nn.LLTMCell(5, 4, bias=False),
    "LLTM": lambda: my_ops.nn.LLTM(5, 4),
    "LLTM-without-bias": lambda: my_ops.nn.LLTM(5, 4, bias=False),
}


@pytest.fixture(params=LAYERS)
def layer(request, device):
    return LAYERS[request.param]().to(device)


def inputs_of(layer, device):
    if isinstance(layer, my_ops.nn.LLTM):
        states = tuple(torch.randn(1, 3, 4, device=device) for _ in range(2))
        return torch.randn(6, 3, 5, device=device), states
    if isinstance(layer, my_ops.nn.LLTMCell):
        states = tuple(torch.randn(3, 4, device=device) for _ in range(2))
        return torch.randn(3, 5, device=device), states
    return (torch.randn(3, 5, device=device),)


def flat(result):
    if isinstance(result, torch.Tensor):
        return [result]
    return [leaf for part in result for leaf in flat(part)]


def assert_same(got, want):
    for ours, exact in zip(flat(got), flat(want), strict=True):
        assert torch.equal(ours, exact)


def gradients(layer, args):
    layer.zero_grad()
    sum(leaf.square().sum() for leaf in flat(layer(*args)) if leaf.requires_grad).backward()
    return [p.grad.clone() for p in layer.parameters()]


def test_copies_compute_the_same(layer, device):
    args = inputs_of(layer, device)
    want = layer(*args)
    saved = io.BytesIO()
    torch.save(layer.state_dict(), saved)
    saved.seek(0)
    blank = copy.deepcopy(layer)
    with torch.no_grad():
        for parameter in blank.parameters():
            parameter.zero_()
    blank.load_state_dict(torch.load(saved, weights_only=True))
    for same in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), blank):
        assert_same(same(*args), want)
        assert repr(same) == repr(layer)


def test_torchscript(layer, device):
    args = inputs_of(layer, device)
    saved = io.BytesIO()
    torch.jit.save(torch.jit.script(layer), saved)
    saved.seek(0)
    for scripted in (torch.jit.script(layer), torch.jit.load(saved)):
        assert_same(scripted(*args), layer(*args))
        if list(layer.parameters()):
            # A plain call has an op of its own for the gradients, which may sum in another order.
            for ours, exact in zip(gradients(scripted, args), gradients(layer, args), strict=True):
                torch.testing.assert_close(ours, exact)


def test_torchscript_default_state(device):
    for layer in (my_ops.nn.LLTMCell(5, 4), my_ops.nn.LLTM(5, 4)):
        layer = layer.to(device)
        input = inputs_of(layer, device)[0]
        assert_same(torch.jit.script(layer)(input), layer(input))


def test_frozen_torchscript(layer, device):
    args = inputs_of(layer, device)
    scripted = torch.jit.freeze(torch.jit.script(layer.eval()))
    with torch.no_grad():
        assert_same(scripted(*args), layer(*args))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_linear_exchanges_state_with_torch(activation, bias, device):
    if activation is None:
        layer = ours = my_ops.nn.Linear(5, 4, bias, device)
    else:
        layer = my_ops.nn.LinearActivation(5, 4, bias, device, activation=activation)
        ours = layer.linear
        assert not isinstance(layer, torch.nn.Linear)
        assert not hasattr(layer, "weight")  # some tools check for this instead of the type
    theirs = torch.nn.Linear(5, 4, bias, device)
    assert isinstance(ours, torch.nn.Linear)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 5, device=device)
    want = reference.activate(theirs(x), activation)
    torch.testing.assert_close(layer(x), want, rtol=FLOAT32_LIMIT, atol=FLOAT32_LIMIT)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.int64])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_takes_every_dtype_of_torch(dtype, bias):
    made = {} if dtype is torch.int64 else {"dtype": dtype}
    ours, theirs = my_ops.nn.Linear(4, 3, bias, **made), torch.nn.Linear(4, 3, bias, **made)
    theirs.load_state_dict(ours.state_dict())
    if dtype is torch.int64:
        for layer in (ours, theirs):
            for name, p in list(layer.named_parameters()):
                del layer._parameters[name]
                setattr(layer, name, (10 * p.detach()).to(dtype))
    x = (10 * torch.randn(2, 5, 4)).to(dtype)
    assert torch.equal(ours(x), theirs(x))


def test_linear_initialises_like_torch():
    torch.manual_seed(1)
    ours = my_ops.nn.Linear(5, 4)
    torch.manual_seed(1)
    theirs = torch.nn.Linear(5, 4)
    assert torch.equal(ours.weight, theirs.weight)
    assert torch.equal(ours.bias, theirs.bias)


@pytest.mark.parametrize(
    "wrong, error, got",
    [("tanh", ValueError, "'tanh'"), ("none", ValueError, "'none'"), (None, TypeError, "NoneType")],
)
def test_linear_wrong_activation(wrong, error, got):
    with pytest.raises(error, match=rf"^LinearActivation: activation must be .*, got {got}$"):
        my_ops.nn.LinearActivation(5, 4, activation=wrong)


def positional(function):
    """The names of positional arguments; those after * belong to the layer."""
    kinds = inspect.signature(function).parameters.values()
    return [p.name for p in kinds if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "mode"]


@pytest.mark.parametrize(
    "ours, theirs, own",
    [
        (my_ops.nn.Linear, torch.nn.Linear, []),
        (my_ops.nn.LinearActivation, torch.nn.Linear, []),
        (my_ops.nn.LLTMCell, torch.nn.LSTMCell, []),
        (my_ops.nn.LLTM, torch.nn.LSTM, ["lengths", "reset"]),
        (my_ops.nn.LSTMCell, torch.nn.LSTMCell, []),
        (my_ops.nn.LSTM, torch.nn.LSTM, ["lengths", "reset"]),
        (my_ops.nn.GRUCell, torch.nn.GRUCell, []),
        (my_ops.nn.GRU, torch.nn.GRU, ["lengths", "reset"]),
        (my_ops.nn.RNNCell, torch.nn.RNNCell, []),
        (my_ops.nn.RNN, torch.nn.RNN, ["lengths", "reset"]),
        (my_ops.nn.RoundSTE, torch.nn.Sigmoid, []),
    ],
)
def test_arguments_stand_in_torch_s_order(ours, theirs, own):
    of_base = torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN
    made = theirs if theirs not in of_base else torch.nn.RNNBase
    wanted = positional(made.__init__)
    if ours is my_ops.nn.LLTM:
        wanted = wanted[: wanted.index("proj_size")]  # the rest are keywords
    if ours in (my_ops.nn.GRU, my_ops.nn.RNN):
        wanted.remove("proj_size")
    if ours is my_ops.nn.RNN:  # as torch documents it
        wanted.insert(wanted.index("bias"), "nonlinearity")
    assert positional(ours.__init__) == wanted
    assert positional(ours.forward) == positional(theirs.forward) + own


@pytest.mark.parametrize("kind", [my_ops.nn.LLTMCell, my_ops.nn.LLTM])
@pytest.mark.parametrize("sizes", [(0, 4), (5, 0), (-1, 4), (5, 2.0)])
def test_lltm_wrong_sizes(kind, sizes):
    name = "input_size" if sizes[0] != 5 else "hidden_size"
    wrong = sizes[0] if sizes[0] != 5 else sizes[1]
    error = ValueError if isinstance(wrong, int) else TypeError
    with pytest.raises(error, match=rf"{name} must be a positive int, got {wrong}"):
        kind(*sizes)


@pytest.mark.parametrize("kind", [my_ops.nn.LLTMCell, my_ops.nn.LLTM])
def test_lltm_parameters(kind, device):
    layer = kind(5, 64, device=device)
    prefix = "" if kind is my_ops.nn.LLTMCell else "cells.0."
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {
        f"{prefix}weights": (192, 69),
        f"{prefix}bias": (192,),
    }
    bound = 64**-0.5
    for parameter in layer.parameters():
        assert parameter.abs().max() <= bound
        assert parameter.abs().max() > 0.8 * bound
    without = kind(5, 64, bias=False, device=device)
    assert [name for name, _ in without.named_parameters()] == [f"{prefix}weights"]
    assert list(without.state_dict()) == [f"{prefix}weights"]
    assert list(without.buffers()) == []
    before = copy.deepcopy(layer.state_dict())
    layer.reset_parameters()
    for name, parameter in layer.named_parameters():
        assert (parameter != before[name]).all()
        assert 0.8 * bound < parameter.abs().max() <= bound


@pytest.mark.parametrize("bias", [True, False])
def test_lltm_cell_computes_the_op(bias, device):
    cell = my_ops.nn.LLTMCell(5, 4, bias=bias, device=device)
    input, (h, c) = inputs_of(cell, device)
    vector = cell.bias if bias else torch.zeros(12, device=device)
    assert_same(cell(input, (h, c)), my_ops.lltm_cell(input, cell.weights, vector, h, c))
    zero = torch.zeros(3, 4, device=device)
    assert_same(cell(input), cell(input, (zero, zero)))


@pytest.mark.parametrize("bias", [True, False])
def test_lltm_cell_without_a_batch(bias, device):
    cell = my_ops.nn.LLTMCell(5, 4, bias, device)
    input, (h, c) = inputs_of(cell, device)
    for call in (cell, torch.jit.script(cell)):
        assert_same(
            call(input[0], (h[0], c[0])), tuple(t[0] for t in cell(input[:1], (h[:1], c[:1])))
        )
        assert_same(call(input[0]), tuple(t[0] for t in cell(input[:1])))


@pytest.mark.parametrize("bias", [True, False])
def test_lltm_computes_the_op_with_lstm_shapes(bias, device):
    layer = my_ops.nn.LLTM(5, 4, bias=bias, device=device)
    input, (h, c) = inputs_of(layer, device)
    vector = layer.cells[0].bias if bias else torch.zeros(12, device=device)
    output, (h_n, c_n) = layer(input, (h, c))
    lstm = torch.nn.LSTM(5, 4, device=device)
    want_output, (want_h, want_c) = lstm(input, (h, c))
    assert (output.shape, h_n.shape, c_n.shape) == (want_output.shape, want_h.shape, want_c.shape)
    want = my_ops.lltm(input, h[0], c[0], layer.cells[0].weights, vector)
    assert_same((output, h_n[0], c_n[0]), want)
    zero = torch.zeros(1, 3, 4, device=device)
    assert_same(layer(input), layer(input, (zero, zero)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_layers_move_and_convert(dtype, layer, device):
    args = inputs_of(layer, device)
    want = flat(layer(*args))
    converted = layer.to(dtype)
    got = flat(converted(*[_to(part, dtype) for part in args]))
    limit = HALF_LIMIT if dtype == torch.bfloat16 else FLOAT32_LIMIT
    for ours, exact in zip(got, want, strict=True):
        assert ours.dtype == dtype
        if not isinstance(layer, my_ops.nn.RoundSTE):  # a rounded input may cross one half
            torch.testing.assert_close(ours.float(), exact, rtol=limit, atol=limit)


def _to(part, dtype):
    return part.to(dtype) if isinstance(part, torch.Tensor) else tuple(t.to(dtype) for t in part)


def test_training_lowers_the_loss_like_the_reference(device):
    """The same model with the reference ops, from the same weights, has the same losses."""
    ours_layer = my_ops.nn.LLTM(3, 8)
    ours_head = my_ops.nn.LinearActivation(8, 2, activation="gelu")
    inputs, target = torch.randn(7, 4, 3, device=device), torch.randn(7, 4, 2, device=device)

    def forward(layer, head):
        return head(layer(inputs)[0])

    def plain(layer, head):
        zero = torch.zeros(4, 8, device=device)
        output, _, _ = reference.lltm(inputs, zero, zero, *layer.cells[0].parameters())
        return reference.linear(output, *head.parameters(), activation="gelu")

    def losses(model):
        layers = [copy.deepcopy(m).to(device) for m in (ours_layer, ours_head)]
        optimizer = torch.optim.SGD([p for m in layers for p in m.parameters()], lr=0.1)
        for _ in range(20):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(*layers), target)
            loss.backward()
            optimizer.step()
            yield loss.item()

    got, want = list(losses(forward)), list(losses(plain))
    assert got[-1] < got[0]
    assert got == pytest.approx(want, rel=FLOAT32_LIMIT)


def test_round_ste_trains_what_is_below_it(device):
    below = my_ops.nn.Linear(3, 5, device=device)
    hidden = below(torch.randn(4, 3, device=device))
    bits = my_ops.nn.RoundSTE()(hidden)
    assert set(bits.unique().tolist()) <= {0.0, 1.0}
    grad = torch.randn_like(bits)
    got = torch.autograd.grad(bits, below.bias, grad)[0]
    torch.testing.assert_close(got, grad.sum(0), rtol=FLOAT32_LIMIT, atol=FLOAT32_LIMIT)


H, C = torch.randn(3, 4), torch.randn(3, 4)
WRONG_CELL_CALLS = [
    ((None,), TypeError, "LLTMCell: input must be a torch.Tensor, got NoneType"),
    (
        (torch.randn(2, 3, 5),),
        RuntimeError,
        r"LLTMCell: input must be \(batch, input_size\) or \(input_size,\), got \(2, 3, 5\)",
    ),
    ((torch.randn(3, 5), H), TypeError, r"LLTMCell: hx must be a pair .*\(h_0, c_0\), got Tensor"),
    ((torch.randn(3, 5), (H,)), TypeError, r"LLTMCell: hx must be a pair .*, got 1 of them"),
    ((torch.randn(3, 5), (H, C, C)), TypeError, r"LLTMCell: hx must be a pair .*, got 3 of them"),
    (
        (torch.randn(3, 5), (H, None)),
        TypeError,
        "LLTMCell: c_0 must be a torch.Tensor, got NoneType",
    ),
    ((torch.randn(3, 5), (1.0, C)), TypeError, "LLTMCell: h_0 must be a torch.Tensor, got float"),
]


@pytest.mark.parametrize(
    "arguments, error, match", WRONG_CELL_CALLS, ids=[match for *_, match in WRONG_CELL_CALLS]
)
def test_wrong_calls_of_a_cell(arguments, error, match):
    with pytest.raises(error, match=match):
        my_ops.nn.LLTMCell(5, 4)(*arguments)


@pytest.mark.parametrize("sizes", [(1, 2, 4), (1, 4, 4), (2, 4), (4,), (2, 3, 4)])
@pytest.mark.parametrize("enforce_sorted", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN", "LLTM"])
def test_the_state_beside_a_packed_sequence(kind, batch_first, enforce_sorted, sizes, device):
    """It is checked before its rows are sorted, which would leave out some, or read beyond it."""
    layer = getattr(my_ops.nn, kind)(5, 4, batch_first=batch_first).to(device)
    x = torch.randn(3, 7, 5, device=device) if batch_first else torch.randn(7, 3, 5, device=device)
    lengths = torch.tensor([7, 4, 2] if enforce_sorted else [4, 2, 7])
    packed = pack_padded_sequence(x, lengths, batch_first, enforce_sorted)
    state = torch.zeros(sizes, device=device)
    with pytest.raises(RuntimeError, match=r"hidden_size\) = \(1, 3, 4\), got \("):
        layer(packed, state if kind in ("GRU", "RNN") else (state, state))


def test_the_state_beside_a_packed_sequence_with_projections(device):
    layer = my_ops.nn.LSTM(5, 4, proj_size=2).to(device)
    packed = pack_padded_sequence(torch.randn(7, 3, 5, device=device), [4, 2, 7], False, False)
    state = torch.zeros(1, 4, 2, device=device), torch.zeros(1, 4, 4, device=device)
    with pytest.raises(
        RuntimeError, match=r"h_0 must .*proj_size\) = \(1, 3, 2\), got \(1, 4, 2\)"
    ):
        layer(packed, state)


@pytest.mark.parametrize("sizes", [(6,), (6, 2, 5)])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN", "LLTM"])
def test_packed_data_of_wrong_dimensions(kind, sizes, device):
    packed = PackedSequence(torch.randn(sizes, device=device), torch.tensor([3, 2, 1]))
    got = re.escape(str(sizes))
    said = rf"{kind}: the data of a PackedSequence must be \(elements, input_size\), got {got}"
    with pytest.raises(RuntimeError, match=said):
        getattr(my_ops.nn, kind)(5, 4).to(device)(packed)
