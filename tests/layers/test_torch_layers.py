"""nn.LSTM, GRU, RNN and cells equal torch.nn's in arguments, parameters, calls and results."""

import itertools
import math
import warnings
from functools import partial

import numpy
import pytest
import torch
from samples import FLOATING
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import my_ops
from my_ops.recurrent import rnn

STEPS, BATCH, INPUTS, HIDDEN = 7, 3, 5, 4
LENGTHS = [2, 7, 5]
RNNS = {
    f"RNN_{how}": tuple(partial(kind, nonlinearity=how.lower()) for kind in kinds)
    for kinds in [(my_ops.nn.RNN, torch.nn.RNN)]
    for how in ("TANH", "RELU")
}
LAYERS = {
    "LSTM": (my_ops.nn.LSTM, torch.nn.LSTM),
    "GRU": (my_ops.nn.GRU, torch.nn.GRU),
    **RNNS,
}
CELLS = {
    "LSTMCell": (my_ops.nn.LSTMCell, torch.nn.LSTMCell),
    "GRUCell": (my_ops.nn.GRUCell, torch.nn.GRUCell),
    "RNNCell": (my_ops.nn.RNNCell, torch.nn.RNNCell),
}
FORMS = [
    {"num_layers": layers, "bidirectional": both, "bias": bias, "batch_first": first}
    for layers, both, bias, first in itertools.product((1, 2), *[(False, True)] * 3)
]
FORM = {"num_layers": 2, "bidirectional": True}
LIMIT = 1e-12  # in float64: sums in another order


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """On the CPU small calls of nn.RNN run in its cells' kernels too."""
    all_sizes = rnn.RNN_CPU._replace(
        steps=0, units=0, bfloat16_work=math.inf, bfloat16_units=math.inf
    )
    monkeypatch.setattr(rnn, "RNN_CPU", all_sizes)


def ids(form):
    return "-".join(name if value is True else f"{name}={value}" for name, value in form.items())


def pair(name, device, dtype=torch.float64, **form):
    """Our layer, and torch's with the same parameters."""
    ours, theirs = {**LAYERS, **CELLS}[name]
    layer = ours(INPUTS, HIDDEN, **form, device=device, dtype=dtype)
    like = theirs(INPUTS, HIDDEN, **form, device=device, dtype=dtype)
    like.load_state_dict(layer.state_dict())
    return layer, like


def drawn(name, layer, device, dtype=torch.float64, steps=STEPS, batch=BATCH):
    """Input and state of a layer."""
    shape = (batch, steps, INPUTS) if layer.batch_first else (steps, batch, INPUTS)
    directions = 2 if layer.bidirectional else 1
    rows = (layer.num_layers * directions, batch)
    sizes = [layer.proj_size or HIDDEN, HIDDEN] if name == "LSTM" else [HIDDEN]
    shapes = [shape, *((*rows, size) for size in sizes)]
    x, *states = (torch.randn(s, device=device, dtype=dtype) for s in shapes)
    return x, tuple(states) if name == "LSTM" else states[0]


def flat(results):
    found = []
    for r in results:
        found += flat(r) if isinstance(r, (tuple, list)) else [r]
    return found


def close(got, want, limit=LIMIT):
    for ours, theirs in zip(flat(got), flat(want), strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=limit, atol=limit)


def with_gradients(layer, x, hx):
    x = x.detach().requires_grad_()
    states = [] if hx is None else [s.detach().requires_grad_() for s in flat([hx])]
    given = None if hx is None else states[0] if isinstance(hx, torch.Tensor) else tuple(states)
    results = flat(layer(x, given))
    total = sum((r.sin() * k).sum() for k, r in enumerate(results, 1))
    return results, torch.autograd.grad(total, [x, *states, *layer.parameters()])


# ------------------------------------------------------------------------------ values, gradients


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("form", FORMS, ids=ids)
@pytest.mark.parametrize("name", LAYERS)
def test_results_and_gradients_are_torch_s(name, form, given, device):
    layer, like = pair(name, device, **form)
    x, hx = drawn(name, layer, device)
    hx = hx if given else None
    close(with_gradients(layer, x, hx), with_gradients(like, x, hx))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("one", [False, True])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("name", CELLS)
def test_cells_are_torch_s(name, given, one, bias, device):
    cell, like = pair(name, device, bias=bias)
    shape = () if one else (BATCH,)
    x = torch.randn(*shape, INPUTS, device=device, dtype=torch.float64)
    states = [torch.randn(*shape, HIDDEN, device=device, dtype=torch.float64) for _ in range(2)]
    hx = None if not given else tuple(states) if name == "LSTMCell" else states[0]

    def tupled(module):
        def call(x, hx):
            result = module(x, hx)
            return result if isinstance(result, tuple) else (result,)

        call.parameters = module.parameters
        return call

    close(with_gradients(tupled(cell), x, hx), with_gradients(tupled(like), x, hx))
    assert isinstance(cell, type(like))


@pytest.mark.parametrize("form", FORMS, ids=ids)
@pytest.mark.parametrize("name", LAYERS)
def test_one_sequence_without_a_batch(name, form, device):
    layer, like = pair(name, device, **form)
    x, hx = drawn(name, layer, device, batch=1)
    x = x.squeeze(0 if layer.batch_first else 1)
    hx = tuple(s.squeeze(1) for s in hx) if name == "LSTM" else hx.squeeze(1)
    close(layer(x, hx), like(x, hx))
    close(layer(x), like(x))


@pytest.mark.parametrize("enforce_sorted", [True, False])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("form", FORMS, ids=ids)
@pytest.mark.parametrize("name", LAYERS)
def test_packed_sequences(name, form, given, enforce_sorted, device):
    layer, like = pair(name, device, **form)
    x, hx = drawn(name, layer, device)
    hx = hx if given else None
    lengths = sorted(LENGTHS, reverse=True) if enforce_sorted else LENGTHS
    packed = pack_padded_sequence(x, torch.tensor(lengths), layer.batch_first, enforce_sorted)
    (got, got_state), (want, want_state) = layer(packed, hx), like(packed, hx)
    close((got.data, got_state), (want.data, want_state))
    for field in ("batch_sizes", "sorted_indices", "unsorted_indices"):
        ours, theirs = getattr(got, field), getattr(want, field)
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)
    output, state = layer(x, hx, torch.tensor(lengths, device=device))
    padded, _ = pad_packed_sequence(got, layer.batch_first)
    close((output, state), (padded, got_state))


@pytest.mark.parametrize("name", LAYERS)
def test_dropout_draws_as_torch_does(name):
    """On the CPU, where torch also draws one mask between two layers."""
    layer, like = pair(name, "cpu", dropout=0.4, num_layers=3, bidirectional=True)
    x, hx = drawn(name, layer, "cpu")
    results = []
    for module in (layer, like):
        torch.manual_seed(3)
        results.append(module(x, hx))
    close(*results)
    close(layer.eval()(x, hx), like.eval()(x, hx))


@pytest.mark.parametrize("wrong", [-0.5, 1.5, float("nan"), None, "0.5"])
@pytest.mark.parametrize("name", LAYERS)
def test_wrong_dropout_set_later(name, wrong, device):
    """The call raises, as that of torch's layer does."""
    layer, _ = pair(name, device, num_layers=2)
    layer.dropout = wrong
    with pytest.raises((RuntimeError, TypeError, ValueError)):
        layer(*drawn(name, layer, device))


@pytest.mark.parametrize("name", LAYERS)
def test_dropout_acts_between_layers(name, device):
    """Values and gradients are those of single layers with torch's dropout between them."""
    if name in RNNS and device == "cuda":
        pytest.skip("cuDNN draws its own numbers")
    layer, _ = pair(name, device, dropout=0.4, num_layers=3)
    x, _ = drawn(name, layer, device)
    singles = []
    for k in range(3):
        single = LAYERS[name][0](HIDDEN if k else INPUTS, HIDDEN, device=device, dtype=x.dtype)
        for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            setattr(single, f"{kind}_l0", getattr(layer, f"{kind}_l{k}"))
        singles.append(single)

    def one_by_one(y):
        for k, single in enumerate(singles):
            y, _ = single(torch.nn.functional.dropout(y, 0.4) if k else y)
        return y

    results = []
    for run in (lambda x: layer(x)[0], one_by_one):
        torch.manual_seed(3)
        leaf = x.detach().requires_grad_()
        output = run(leaf)
        results.append(
            (output, torch.autograd.grad(output.sin().sum(), [leaf, *layer.parameters()]))
        )
    close(*results)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_projections_are_torch_s_own(batch_first, given, device):
    form = {**FORM, "proj_size": 2, "batch_first": batch_first}
    layer, like = pair("LSTM", device, **form)
    x, hx = drawn("LSTM", layer, device)
    hx = hx if given else None
    close(with_gradients(layer, x, hx), with_gradients(like, x, hx))
    packed = pack_padded_sequence(x, torch.tensor(LENGTHS), batch_first, enforce_sorted=False)
    (got, got_state), (want, want_state) = layer(packed, hx), like(packed, hx)
    close((got.data, got_state), (want.data, want_state))
    assert torch.equal(got.unsorted_indices, want.unsorted_indices)
    lengths = torch.tensor(LENGTHS, device=device)
    with pytest.raises(ValueError, match="LSTM: lengths and reset must be None with proj_size > 0"):
        layer(x, hx, lengths)
    reset = torch.zeros(x.shape[:2], dtype=torch.bool, device=device)
    for input in (x, packed):
        with pytest.raises(ValueError, match="lengths and reset must be None with proj_size > 0"):
            layer(input, hx, None, reset)


@pytest.mark.filterwarnings("ignore:RNN module weights")  # cuDNN's
@pytest.mark.parametrize("hidden", [5, 64, 520])
@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("name", LAYERS)
def test_parameters_at_any_address(name, dtype, hidden, device):
    """As in torch's own layers on CUDA, which may keep all parameters in one buffer."""
    layer = LAYERS[name][0](INPUTS, hidden, device=device, dtype=dtype)
    x = torch.randn(STEPS, BATCH, INPUTS, device=device).to(dtype)
    usual = with_gradients(layer, x, None)
    for p in layer.parameters():
        p.data = torch.cat([p.data.new_zeros(1), p.data.flatten()])[1:].view_as(p)
        assert p.data_ptr() % 16
    limit = 16 * torch.finfo(dtype).eps
    for ours, exact in zip(*map(flat, (with_gradients(layer, x, None), usual)), strict=True):
        size = max(1.0, exact.abs().max().item())
        torch.testing.assert_close(ours, exact, rtol=0, atol=limit * size)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_of_gradients(name, device):
    layer, _ = pair(name, device)
    x, hx = drawn(name, layer, device, steps=3, batch=2)
    names, parameters = zip(*layer.named_parameters(), strict=True)
    states = flat([hx])
    tensors = [t.detach().requires_grad_() for t in (x, *states, *parameters)]
    lengths = torch.tensor([1, 3], device=device)
    reset = torch.tensor([[True, False], [False, False], [True, True]], device=device)

    def call(x, *rest):
        given, own = rest[: len(states)], dict(zip(names, rest[len(states) :], strict=True))
        state = given if name == "LSTM" else given[0]
        return tuple(flat(torch.func.functional_call(layer, own, (x, state, lengths, reset))))

    assert gradcheck(call, tensors, check_forward_ad=True)
    assert gradgradcheck(call, tensors)


# --------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("name", LAYERS)
def test_wrong_construction_is_torch_s(name):
    def error(kind, **wrong):
        try:
            kind(**{"input_size": INPUTS, "hidden_size": HIDDEN, **wrong})
        except (ValueError, TypeError) as error:
            return type(error), str(error)
        return None

    ours, theirs = LAYERS[name]
    for wrong in ({"num_layers": 0}, {"hidden_size": 0}, {"dropout": 2}):
        told = error(theirs, **wrong)
        assert told is not None and error(ours, **wrong) == told, wrong
    for wrong in ({"input_size": 0}, {"bias": 1}, {"batch_first": None}):  # torch 2.10 takes some
        assert error(ours, **wrong) == error(theirs, **wrong), wrong
    for kind in LAYERS[name]:
        with pytest.warns(UserWarning, match="non-zero dropout expects"):
            kind(INPUTS, HIDDEN, dropout=0.5)


@pytest.mark.parametrize("name", LAYERS)
def test_wrong_states(name, device):
    """Those that torch's layers refuse, by the same class of error."""
    layer, like = pair(name, device, **FORM)
    x, hx = drawn(name, layer, device)
    state = "h_0" if name == "LSTM" else "hx"
    name = layer._name
    wrong = tuple(s[:1] for s in hx) if name == "LSTM" else hx[:1]
    rule = r"must be \(num_layers \* directions, {}hidden_size\) ="
    for module, said in ((layer, f"^{name}: {state} {rule.format('batch, ')}"), (like, None)):
        with pytest.raises(RuntimeError, match=said):
            module(x, wrong)
    for module, said in ((layer, f"^{name}: {state} {rule.format('')}"), (like, None)):
        with pytest.raises(RuntimeError, match=said):
            module(x[:, 0], hx)


@pytest.mark.parametrize("name", LAYERS)
def test_wrong_call(name, device, rejects):
    layer, _ = pair(name, device)
    x, hx = drawn(name, layer, device)
    three = torch.tensor([1, 2, 3], device=device)
    reset = torch.zeros(STEPS, BATCH, dtype=torch.bool, device=device)
    wrong_hx = (x, [hx]) if name == "LSTM" else (x, (hx,))
    said = "hx must be a pair" if name == "LSTM" else "hx must be a torch.Tensor, got tuple"
    for error, arguments, match in (
        (RuntimeError, (x[0, 0],), r"input must be .* or \(steps, input_size\), got \(5,\)"),
        (RuntimeError, (x[..., :4],), r"input must .*size\) = \(7, 3, 5\), got \(7, 3, 4\)"),
        (RuntimeError, (x.repeat(1, 1, 2),), rf"{layer._name}: input must .*, got \(7, 3, 10\)"),
        (RuntimeError, (x[:, 0, :4],), r"be \(steps, input_size\) = \(7, 5\), got \(7, 4\)"),
        (RuntimeError, (x, hx, three[:2]), r"lengths must be \(batch,\) = \(3,\), got \(2,\)"),
        (RuntimeError, (x, hx, three.int()), "lengths must be of dtype int64, got int32"),
        (RuntimeError, (x, hx, None, reset.T), r"reset must be \(steps, batch\) = \(7, 3\), got"),
        (RuntimeError, (x, hx, None, reset[0]), r"reset must be \(steps, batch\) = \(7, 3\), got"),
        (RuntimeError, (x[:, 0], None, None, reset), r"reset must .*s,\) = \(7,\), got \(7, 3\)"),
        (RuntimeError, (x, hx, None, reset.int()), "reset must be of dtype bool, got int32"),
        (TypeError, (None,), "input must be a torch.Tensor, got NoneType"),
        (TypeError, wrong_hx, said),
        (TypeError, (x, hx, "321"), "lengths must be a torch.Tensor, got str"),
        (ValueError, (x, hx, [3, 2, 8]), "lengths must be integers from 0 to steps = 7, got 8"),
        (ValueError, (x, hx, [3, -1, 1]), "lengths must be integers from 0 to steps = 7, got -1"),
        (TypeError, (x, hx, [3, 2.0, 1]), "lengths must be integers from 0 to steps = 7, got 2.0"),
        (RuntimeError, (x, hx, [3, 2]), r"lengths must be \(batch,\) = \(3,\), got \(2,\)"),
        (TypeError, (x, hx, None, [True]), "reset must be a torch.Tensor, got list"),
        (RuntimeError, (x.float(), hx), "must have the dtype of input"),
    ):
        with rejects(error, match, x, reset):
            layer(*arguments)
    packed = pack_padded_sequence(x, torch.tensor(LENGTHS), enforce_sorted=False)
    with rejects(ValueError, f"{layer._name}: lengths must be None with a PackedSequence", x):
        layer(packed, hx, three)


@pytest.mark.parametrize("name", CELLS)
def test_wrong_call_of_a_cell(name, device, rejects):
    cell, _ = pair(name, device)
    x = torch.randn(BATCH, INPUTS, device=device, dtype=torch.float64)
    h = torch.randn(BATCH, HIDDEN, device=device, dtype=torch.float64)
    hx = (h, h[:2]) if name == "LSTMCell" else h[:2]
    for error, arguments, match in (
        (RuntimeError, (x[None],), rf"{name}: input must be \(batch, input_size\) or \(input_si"),
        (TypeError, (None,), f"{name}: input must be a torch.Tensor, got NoneType"),
        (RuntimeError, (x, hx), r"_cell: old_\w+ must be \(batch, hidden_size\) = "),
        (RuntimeError, (x[:, :3],), r"_cell: input must be \(batch, input_size\)"),
    ):
        with rejects(error, match, x, h):
            cell(*arguments)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_lengths_as_pack_padded_sequence_takes_them(name, batch_first, device):
    """A list, or a tensor on the CPU."""
    layer = LAYERS[name][0](INPUTS, HIDDEN, batch_first=batch_first, device=device)
    x, state = drawn(name, layer, device, torch.float32)
    want = layer(x, state, torch.tensor(LENGTHS, device=device))
    by_numpy = list(numpy.array(LENGTHS, numpy.int32))
    for lengths in (LENGTHS, tuple(LENGTHS), by_numpy, torch.tensor(LENGTHS)):
        close(layer(x, state, lengths), want, 0)
    assert layer(x[:0] if batch_first else x[:, :0], lengths=[])[0].numel() == 0
    one = x[0] if batch_first else x[:, 0]
    close(layer(one, None, [2]), layer(one, None, torch.tensor([2], device=device)), 0)


def test_lengths_on_the_cpu_of_a_layer_on_meta():
    layer = my_ops.nn.LSTM(INPUTS, HIDDEN, device="meta")
    x = torch.empty(STEPS, BATCH, INPUTS, device="meta")
    assert layer(x, lengths=[1, 2, 3])[0].is_meta
    assert layer(x, lengths=torch.tensor([1, 2, 3]))[0].is_meta


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("name", [n for n in (*LAYERS, *CELLS) if n != "RNN_RELU"])  # no order
def test_complex_numbers_are_torch_s(name, dtype):
    """On the CPU: on CUDA torch has no cells of complex numbers."""
    device = "cpu"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of complex modules
        layer, like = pair(name, device, dtype, **(FORM if name in LAYERS else {}))
    shape = (STEPS, BATCH, INPUTS) if name in LAYERS else (BATCH, INPUTS)
    x = torch.randn(shape, dtype=dtype, device=device)
    got, want = layer(x), like(x)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    for result in (got, want):
        flat([result])[0].abs().sum().backward()
    for (_, p), (_, q) in zip(layer.named_parameters(), like.named_parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    if name in LAYERS:
        packed = pack_padded_sequence(x, torch.tensor(LENGTHS), enforce_sorted=False)
        torch.testing.assert_close(layer(packed)[0].data, like(packed)[0].data, rtol=0, atol=0)
        refused = f"{name.lower()}: input must be of dtype float64, "
        with pytest.raises(RuntimeError, match=refused):
            layer(x, lengths=LENGTHS)
        for option in ("weight_dropout", "zoneout"):
            setattr(layer, option, 0.5)
            with pytest.raises(RuntimeError, match=f"{refused}|not implemented for 'Complex"):
                layer(x)  # torch draws no zoneout of them
            setattr(layer, option, 0.0)
