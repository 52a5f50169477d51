"""nn.LSTM, GRU and their cells equal torch.nn's in arguments, parameters, calls and results."""

import copy
import io
import itertools
import pickle

import pytest
import torch
from samples import FLOATING
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import my_ops

STEPS, BATCH, INPUTS, HIDDEN = 7, 3, 5, 4
LENGTHS = [2, 7, 5]
LAYERS = {"LSTM": (my_ops.nn.LSTM, torch.nn.LSTM), "GRU": (my_ops.nn.GRU, torch.nn.GRU)}
CELLS = {
    "LSTMCell": (my_ops.nn.LSTMCell, torch.nn.LSTMCell),
    "GRUCell": (my_ops.nn.GRUCell, torch.nn.GRUCell),
}
FORMS = [
    {"num_layers": layers, "bidirectional": both, "bias": bias, "batch_first": first}
    for layers, both, bias, first in itertools.product((1, 2), *[(False, True)] * 3)
]
FORM = {"num_layers": 2, "bidirectional": True}
LIMIT = 1e-12  # in float64: sums in another order


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


# ----------------------------------------------------------------------- a torch.nn layer's habits


@pytest.mark.parametrize("form", [{}, FORM, {"bias": False}], ids=ids)
@pytest.mark.parametrize("name", LAYERS)
def test_state_dict_both_ways(name, form, device):
    layer, like = pair(name, device, **form)
    assert list(layer.state_dict()) == list(like.state_dict())
    torch.nn.init.normal_(like.weight_hh_l0)
    layer.load_state_dict(like.state_dict())
    x, hx = drawn(name, layer, device)
    close(layer(x, hx), like(x, hx))


@pytest.mark.parametrize("name", [*LAYERS, *CELLS])
def test_drawn_and_shown_as_torch_does(name):
    kinds = {**LAYERS, **CELLS}[name]
    form = {} if name in CELLS else {**FORM, "batch_first": True}
    made = []
    for kind in kinds:
        torch.manual_seed(1)
        made.append(kind(INPUTS, HIDDEN, bias=name != "GRU", **form))
    layer, like = made
    for (ours, p), (theirs, q) in zip(
        layer.named_parameters(), like.named_parameters(), strict=True
    ):
        assert ours == theirs
        assert torch.equal(p, q)
    assert repr(layer) == repr(like)
    assert isinstance(layer, torch.nn.RNNBase if name in LAYERS else kinds[1])


@pytest.mark.parametrize("name", LAYERS)
def test_has_what_programs_ask_of_torch_s(name, device):
    layer, like = pair(name, device, **FORM)
    for attribute in ("mode", "input_size", "hidden_size", "num_layers", "bias", "batch_first"):
        assert getattr(layer, attribute) == getattr(like, attribute)
    assert (layer.dropout, layer.bidirectional, layer.proj_size) == (0.0, True, 0)
    assert layer.flatten_parameters() is None
    for own, theirs in zip(layer.all_weights, like.all_weights, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(own, theirs, strict=True))
    assert layer.all_weights[1][0] is layer.weight_ih_l0_reverse
    x, hx = drawn(name, layer, device)
    close(layer(input=x, hx=hx), layer(x, hx))
    if name == "LSTM":
        close(layer(x, list(hx)), layer(x, hx))


@pytest.mark.parametrize("name", [*LAYERS, *CELLS])
def test_copies_and_torchscript(name, device):
    layer, _ = pair(name, device, **(FORM if name in LAYERS else {}))
    file, saved = io.BytesIO(), io.BytesIO()
    torch.jit.save(torch.jit.script(layer), file)
    torch.save(layer, saved)
    file.seek(0)
    saved.seek(0)
    others = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.jit.load(file)]
    others.append(torch.load(saved, weights_only=False))
    if name in CELLS:
        calls = [(torch.randn(BATCH, INPUTS, device=device, dtype=torch.float64),)]
    else:
        x, hx = drawn(name, layer, device)
        lengths = torch.tensor([7, 0, 3], device=device)
        reset = torch.rand(STEPS, BATCH, device=device) < 0.3
        calls = [(x,), (x, hx), (x, hx, lengths), (x, hx, None, reset), (x, hx, lengths, reset)]
    for other in others:
        for call in calls:
            got, want = flat([other(*call)]), flat([layer(*call)])
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_compiled_to_one_graph_for_many_sizes(name, masked, device):
    layer, _ = pair(name, device, torch.float32, **FORM, dropout=0.2)
    layer.eval()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for steps, batch in ((7, 3), (5, 4), (9, 2)):
        x, hx = drawn(name, layer, device, torch.float32, steps, batch)
        masks = [None, None]
        if masked:
            lengths = torch.randint(0, steps + 1, (batch,), device=device)
            masks = [lengths, torch.rand(steps, batch, device=device) < 0.3]
        close(compiled(x, hx, *masks), layer(x, hx, *masks), 1e-6)


@pytest.mark.parametrize("name", LAYERS)
def test_trained_when_compiled(name, device):
    layer, _ = pair(name, device, torch.float32, **FORM)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x, hx = drawn(name, layer, device, torch.float32)
    close(with_gradients(compiled, x, hx), with_gradients(layer, x, hx), 1e-5)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_exported_and_run_at_another_batch_size(name, strict, device):
    layer, _ = pair(name, device, torch.float32, **FORM)
    x, hx = drawn(name, layer, device, torch.float32)
    batch = torch.export.Dim("batch", min=2, max=64)
    state = ({1: batch}, {1: batch}) if name == "LSTM" else {1: batch}
    program = torch.export.export(layer, (x, hx), dynamic_shapes=({1: batch}, state), strict=strict)
    targets = {getattr(node.target, "name", str)() for node in program.graph.nodes}
    assert f"my_ops::{name.lower()}" in targets
    x, hx = drawn(name, layer, device, torch.float32, batch=5)
    close(program.module()(x, hx), layer(x, hx), 1e-6)


@pytest.mark.parametrize("name", LAYERS)
def test_exported_and_run_at_another_length(name, device):
    """With resets in both directions; from two steps on."""
    layer, _ = pair(name, device, torch.float32, **FORM)
    length = torch.export.Dim("length", min=2, max=500)

    def inputs(steps):
        x, hx = drawn(name, layer, device, torch.float32, steps=steps)
        return x, hx, None, torch.rand(steps, BATCH, device=device) < 0.3

    state = (None, None) if name == "LSTM" else None
    shapes = ({0: length}, state, None, {0: length})
    program = torch.export.export(layer, inputs(STEPS), dynamic_shapes=shapes)
    for steps in (2, 9):
        arguments = inputs(steps)
        close(program.module()(*arguments), layer(*arguments), 1e-6)


@pytest.mark.parametrize("name", LAYERS)
def test_batched_gradients(name, device):
    layer, _ = pair(name, device, **FORM)
    x, hx = drawn(name, layer, device)
    output, parameters = layer(x, hx)[0], list(layer.parameters())
    grads = torch.randn(3, *output.shape, dtype=output.dtype, device=device)
    got = torch.autograd.grad(output, parameters, grads, is_grads_batched=True, retain_graph=True)
    for k, grad in enumerate(grads):
        want = torch.autograd.grad(output, parameters, grad, retain_graph=True)
        close([batch[k] for batch in got], want)


def test_methods_of_torch_s_lstm(device):
    layer, like = pair("LSTM", device)
    x, hx = drawn("LSTM", layer, device)
    order = torch.tensor([2, 0, 1], device=device)
    close(layer.permute_hidden(hx, order), like.permute_hidden(hx, order))
    assert layer.get_expected_cell_size(x, None) == like.get_expected_cell_size(x, None)
    layer.check_forward_args(x, hx, None)
    with pytest.raises(RuntimeError, match="Expected hidden"):
        layer.check_forward_args(x, (hx[0][:, :1], hx[1]), None)


@pytest.mark.parametrize("name", LAYERS)
def test_an_ensemble_by_vmap(name, device):
    layers = [pair(name, device, **FORM)[0] for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(layers)
    x, hx = drawn(name, layers[0], device)
    reset = torch.rand(STEPS, BATCH, device=device) < 0.3

    def loss(parameters, buffers, x):
        output, _ = torch.func.functional_call(
            layers[0], (parameters, buffers), (x, hx, None, reset)
        )
        return output.sin().sum()

    got = torch.vmap(torch.func.grad(loss), (0, 0, None))(parameters, buffers, x)
    for k, layer in enumerate(layers):
        total = layer(x, hx, None, reset)[0].sin().sum()
        want = torch.autograd.grad(total, list(layer.parameters()))
        close([got[n][k] for n, _ in layer.named_parameters()], want)


@pytest.mark.parametrize("name", LAYERS)
def test_a_gradient_of_each_sample(name, device):
    layer, _ = pair(name, device)
    x, _ = drawn(name, layer, device)
    own = dict(layer.named_parameters())

    def loss(own, row):
        return torch.func.functional_call(layer, own, (row,))[0].sin().sum()

    got = torch.vmap(torch.func.grad(loss), (None, 1))(own, x)
    for b in range(BATCH):
        want = torch.autograd.grad(layer(x[:, b])[0].sin().sum(), list(own.values()))
        close([g[b] for g in got.values()], want)


@pytest.mark.parametrize("name", LAYERS)
def test_autocast(name, device):
    layer, _ = pair(name, device, torch.float32, **FORM)
    x, hx = drawn(name, layer, device, torch.float32)
    want = layer(x, hx)
    with torch.autocast(device, torch.bfloat16):
        got = layer(x, hx)
    assert {t.dtype for t in flat(got)} == {torch.bfloat16}
    for ours, exact in zip(flat(got), flat(want), strict=True):
        torch.testing.assert_close(ours.float(), exact, rtol=0.05, atol=0.05)
    flat(got)[0].float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in layer.parameters())


@pytest.mark.parametrize("name", LAYERS)
def test_what_acts_on_parameters_by_name(name, device):
    """Parametrizations, pruning and replaced parameters, as in DropConnect."""
    layer, _ = pair(name, device)
    x, hx = drawn(name, layer, device)
    parametrizations.weight_norm(layer, "weight_hh_l0")
    for scale in (1, 2):
        with torch.no_grad():
            layer.parametrizations.weight_hh_l0.original0.mul_(scale)
        normed, like = layer.weight_hh_l0.detach(), pair(name, device)[1]
        like.load_state_dict(
            {n: normed if n == "weight_hh_l0" else getattr(layer, n) for n in like.state_dict()}
        )
        close(layer(x, hx), like(x, hx))

    layer, like = pair(name, device)
    prune.l1_unstructured(layer, "weight_hh_l0", 0.5)
    prune.l1_unstructured(like, "weight_hh_l0", 0.5)
    close(layer(x, hx), like(x, hx))

    layer, like = pair(name, device)
    for module in (layer, like):
        weight = module.weight_hh_l0
        del module.weight_hh_l0
        module.weight_hh_l0 = weight.detach() * 0.5
    close(layer(x, hx), like(x, hx))


@pytest.mark.parametrize("name", LAYERS)
def test_shared_memory_of_gradients(name, device):
    """The two biases of LSTM have equal gradients, but each has its own memory."""
    layer, _ = pair(name, device)
    x, hx = drawn(name, layer, device)
    tensors = [layer.bias_ih_l0, layer.bias_hh_l0]
    grads = torch.autograd.grad(layer(x, hx)[0].sum(), tensors)
    assert grads[0].data_ptr() != grads[1].data_ptr()


@pytest.mark.parametrize("name", [*LAYERS, *CELLS])
def test_in_a_traced_model(name):
    layer, _ = pair(name, "cpu", torch.float32)
    model = torch.nn.Sequential(torch.nn.Linear(INPUTS, INPUTS), layer)
    traced = torch.fx.symbolic_trace(model)
    x = torch.randn(STEPS, INPUTS)
    assert all(torch.equal(a, b) for a, b in zip(flat([traced(x)]), flat([model(x)]), strict=True))


# --------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("name", LAYERS)
def test_wrong_construction_is_torch_s(name):
    for wrong in (
        {"num_layers": 0},
        {"hidden_size": 0},
        {"input_size": 0},
        {"dropout": 2},
        {"bias": 1},
        {"batch_first": None},
    ):
        given, found = {"input_size": INPUTS, "hidden_size": HIDDEN, **wrong}, []
        for kind in LAYERS[name]:
            with pytest.raises((ValueError, TypeError)) as error:
                kind(**given)
            found.append((error.type, str(error.value)))
        assert found[0] == found[1]
    for kind in LAYERS[name]:
        with pytest.warns(UserWarning, match="non-zero dropout expects"):
            kind(INPUTS, HIDDEN, dropout=0.5)


@pytest.mark.parametrize("name", LAYERS)
def test_wrong_states_are_torch_s_errors(name, device):
    layer, like = pair(name, device, **FORM)
    x, hx = drawn(name, layer, device)
    wrong = [s[:1] for s in hx] if name == "LSTM" else hx[:1]
    found = []
    for module in (layer, like):
        with pytest.raises(RuntimeError) as error:
            module(x, tuple(wrong) if name == "LSTM" else wrong)
        found.append(str(error.value))
    assert found[0] == found[1]
    with pytest.raises(RuntimeError, match=f"{name}: hx must have 2 dimensions, .*, got 3"):
        layer(x[:, 0], hx)


@pytest.mark.parametrize("name", LAYERS)
def test_wrong_call(name, device, rejects):
    layer, _ = pair(name, device)
    x, hx = drawn(name, layer, device)
    three = torch.tensor([1, 2, 3], device=device)
    reset = torch.zeros(STEPS, BATCH, dtype=torch.bool, device=device)
    wrong_hx = (x, [hx]) if name == "LSTM" else (x, (hx,))
    said = "hx must be a pair" if name == "LSTM" else "hx must be a torch.Tensor, got tuple"
    for error, arguments, match in (
        (ValueError, (x[0, 0],), "input must have 3 dim.* 2 without a batch, got 1"),
        (ValueError, (x[..., :4],), r"input must have input_size = 5 .*got \[7, 3, 4\]"),
        (ValueError, (x, hx, three[:2]), r"lengths must be \(batch,\) = \(3,\), got \[2\]"),
        (ValueError, (x, hx, three.int()), "lengths must be of dtype int64, got torch.int32"),
        (ValueError, (x, hx, None, reset.T), r"reset must be \(steps, batch\) = \[7, 3\], got"),
        (ValueError, (x, hx, None, reset[0]), r"reset must be \(steps, batch\) = \[7, 3\], got"),
        (ValueError, (x[:, 0], None, None, reset), r"reset must be \(steps,\) = \[7\], got \[7, 3"),
        (ValueError, (x, hx, None, reset.int()), "reset must be of dtype bool, got torch.int32"),
        (TypeError, (None,), "input must be a torch.Tensor, got NoneType"),
        (TypeError, wrong_hx, said),
        (TypeError, (x, hx, [3, 2, 1]), "lengths must be a torch.Tensor, got list"),
        (TypeError, (x, hx, None, [True]), "reset must be a torch.Tensor, got list"),
        (RuntimeError, (x.float(), hx), "must have the dtype of input"),
    ):
        with rejects(error, match, x, reset):
            layer(*arguments)
    packed = pack_padded_sequence(x, torch.tensor(LENGTHS), enforce_sorted=False)
    with rejects(ValueError, f"{name}: lengths must be None with a PackedSequence", x):
        layer(packed, hx, three)


@pytest.mark.parametrize("name", CELLS)
def test_wrong_call_of_a_cell(name, device, rejects):
    cell, _ = pair(name, device)
    x = torch.randn(BATCH, INPUTS, device=device, dtype=torch.float64)
    h = torch.randn(BATCH, HIDDEN, device=device, dtype=torch.float64)
    hx = (h, h[:2]) if name == "LSTMCell" else h[:2]
    for error, arguments, match in (
        (ValueError, (x[None],), f"{name}: input must have 2 dimensions, or 1 without a batch"),
        (TypeError, (None,), f"{name}: input must be a torch.Tensor, got NoneType"),
        (RuntimeError, (x, hx), r"_cell: old_\w+ must be \(batch, hidden_size\) = "),
        (RuntimeError, (x[:, :3],), r"_cell: weight_ih must be \(\d \* hidden_size, input_size\)"),
    ):
        with rejects(error, match, x, h):
            cell(*arguments)
