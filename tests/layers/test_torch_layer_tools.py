"""nn.LSTM, GRU, RNN and cells with torch's tools: state dicts, copies, TorchScript, compilation,
export, vmap, autocast, and whatever acts on parameters."""

import copy
import io
import pickle

import pytest
import torch
from test_torch_layers import (
    BATCH,
    CELLS,
    FORM,
    HIDDEN,
    INPUTS,
    LAYERS,
    RNNS,
    STEPS,
    close,
    drawn,
    flat,
    ids,
    kernels,  # noqa: F401  a fixture
    pair,
    with_gradients,
)
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

import my_ops


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
    torch.save(layer, saved)
    saved.seek(0)
    others = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
    others.append(torch.load(saved, weights_only=False))
    if name not in RNNS:
        torch.jit.save(torch.jit.script(layer), file)
        file.seek(0)
        others.append(torch.jit.load(file))
    if name in CELLS:
        calls = [(torch.randn(BATCH, INPUTS, device=device, dtype=torch.float64),)]
    else:
        x, hx = drawn(name, layer, device)
        lengths = torch.tensor([7, 0, 3], device=device)
        reset = torch.rand(STEPS, BATCH, device=device) < 0.3
        calls = [(x,), (x, hx), (x, hx, lengths), (x, hx, None, reset), (x, hx, lengths, reset)]
    for other in others:
        if name in RNNS:  # as after a copy of torch's, else cuDNN warns
            other.flatten_parameters()
        for call in calls:
            got, want = flat([other(*call)]), flat([layer(*call)])
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # of sizes that are compared
@pytest.mark.parametrize("how", [torch.jit.script, torch.jit.trace])
@pytest.mark.parametrize("given", [1, 2])
@pytest.mark.parametrize("name", RNNS)
def test_rnn_in_torchscript_is_torch_s(name, given, how, device):
    """So such a program needs no my_ops."""
    layer, _ = pair(name, device, **FORM)
    calls = [drawn(name, layer, device, batch=batch)[:given] for batch in (BATCH, 5)]
    example = () if how is torch.jit.script else (calls[0],)
    program = how(layer, *example)
    assert "my_ops::" not in str(program.inlined_graph)
    for call in calls:
        close(program(*call), layer(*call))


@pytest.mark.parametrize("name", RNNS)
def test_what_rnn_in_torchscript_lacks(name):
    masks = [3, 7, 1], torch.zeros(STEPS, BATCH, dtype=torch.bool)
    for options, given in (
        ({}, {"lengths": torch.tensor(masks[0])}),
        ({}, {"reset": masks[1]}),
        ({"zoneout": 0.5}, {}),
        ({"weight_dropout": 0.5}, {}),
        ({"heads": 2}, {}),
    ):
        layer = torch.jit.script(LAYERS[name][0](INPUTS, HIDDEN, **options))
        with pytest.raises(torch.jit.Error, match="RNN: lengths, reset, weight_dropout, zoneout"):
            layer(torch.randn(STEPS, BATCH, INPUTS), None, **given)


def of_ops(name):
    """The dtype in which a layer's call, which may be cuDNN's, agrees with its ops: cuDNN's RNN in
    float32 is several units in the last place off."""
    return torch.float64 if name in RNNS else torch.float32


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_compiled_to_one_graph_for_many_sizes(name, masked, dropout, device):
    """All in the first call. There, torch itself makes another graph if it meets a float."""
    layer, _ = pair(name, device, of_ops(name), **FORM, dropout=dropout)
    layer.eval()
    counter, graphs = CompileCounterWithBackend("aot_eager"), []
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    for steps, batch in ((7, 3), (5, 4), (9, 2)):
        x, hx = drawn(name, layer, device, of_ops(name), steps, batch)
        masks = [None, None]
        if masked:
            lengths = torch.randint(0, steps + 1, (batch,), device=device)
            masks = [lengths, torch.rand(steps, batch, device=device) < 0.3]
        close(compiled(x, hx, *masks), layer(x, hx, *masks), 1e-6)
        graphs.append(counter.frame_count)
    assert graphs[0] == graphs[-1] <= (2 if dropout else 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_trained_when_compiled(name, device):
    layer, _ = pair(name, device, of_ops(name), **FORM)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x, hx = drawn(name, layer, device, of_ops(name))
    close(with_gradients(compiled, x, hx), with_gradients(layer, x, hx), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_exported_and_run_at_another_batch_size(name, strict, device):
    layer, _ = pair(name, device, of_ops(name), **FORM)
    x, hx = drawn(name, layer, device, of_ops(name))
    batch = torch.export.Dim("batch", min=2, max=64)
    state = ({1: batch}, {1: batch}) if name == "LSTM" else {1: batch}
    program = torch.export.export(layer, (x, hx), dynamic_shapes=({1: batch}, state), strict=strict)
    targets = {getattr(node.target, "name", str)() for node in program.graph.nodes}
    assert f"my_ops::{name.lower()}" in targets
    x, hx = drawn(name, layer, device, of_ops(name), batch=5)
    close(program.module()(x, hx), layer(x, hx), 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_exported_and_run_at_another_length(name, device):
    """With lengths and resets in both directions; from two steps on."""
    layer, _ = pair(name, device, torch.float32, **FORM)
    length = torch.export.Dim("length", min=2, max=500)

    def inputs(steps):
        x, hx = drawn(name, layer, device, torch.float32, steps=steps)
        lengths = torch.tensor([steps, 0, 1], device=device)
        return x, hx, lengths, torch.rand(steps, BATCH, device=device) < 0.3

    state = (None, None) if name == "LSTM" else None
    shapes = ({0: length}, state, None, {0: length})
    program = torch.export.export(layer, inputs(STEPS), dynamic_shapes=shapes)
    for steps in (2, 9):
        arguments = inputs(steps)
        close(program.module()(*arguments), layer(*arguments), 1e-6)


@pytest.mark.parametrize("name", LAYERS)
def test_batched_gradients(name, device):
    layer, _ = pair(name, device, **FORM)
    if name in RNNS and device == "cuda":
        pytest.skip("cuDNN's gradients")
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


@pytest.mark.parametrize("name", CELLS)
def test_an_ensemble_of_cells_by_vmap(name, device):
    cells = [pair(name, device)[0] for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(cells)
    x = torch.randn(BATCH, INPUTS, dtype=torch.float64, device=device)
    h = torch.randn(2, BATCH, HIDDEN, dtype=torch.float64, device=device)
    hx = tuple(h) if name == "LSTMCell" else h[0]

    def loss(parameters, buffers):
        after = torch.func.functional_call(cells[0], (parameters, buffers), (x, hx))
        return sum(state.sin().sum() for state in flat([after]))

    got = torch.vmap(torch.func.grad(loss))(parameters, buffers)
    for k, cell in enumerate(cells):
        total = sum(state.sin().sum() for state in flat([cell(x, hx)]))
        want = torch.autograd.grad(total, list(cell.parameters()))
        close([got[n][k] for n, _ in cell.named_parameters()], want)


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
    layer, like = pair(name, device, torch.float32, **FORM)
    x, hx = drawn(name, layer, device, torch.float32)
    want, dtypes = layer(x, hx), {torch.bfloat16}
    with torch.autocast(device, torch.bfloat16):
        got = layer(x, hx)
        if name in RNNS and device == "cuda":  # cuDNN's
            dtypes = {t.dtype for t in flat(like(x, hx))}
    assert {t.dtype for t in flat(got)} == dtypes
    for ours, exact in zip(flat(got), flat(want), strict=True):
        torch.testing.assert_close(ours.float(), exact, rtol=0.05, atol=0.05)
    flat(got)[0].float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in layer.parameters())


@pytest.mark.filterwarnings("ignore:RNN module weights")  # cuDNN's
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


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_shared_memory_of_gradients(name, ragged, device):
    """The two biases of LSTM have equal gradients, but each has its own memory, whether one op
    computes them or not."""
    layer, _ = pair(name, device)
    x, hx = drawn(name, layer, device)
    tensors = [layer.bias_ih_l0, layer.bias_hh_l0]
    lengths = torch.tensor([7, 0, 3], device=device) if ragged else None
    grads = torch.autograd.grad(layer(x, hx, lengths)[0].sum(), tensors)
    assert grads[0].data_ptr() != grads[1].data_ptr()


OURS = ["LLTMCell", "LSTMCell", "GRUCell", "RNNCell", "LLTM", "LSTM", "GRU", "RNN"]


def traced_beside_eager(layer, x):
    model = torch.nn.Sequential(torch.nn.Linear(INPUTS, INPUTS), layer)
    traced = torch.fx.symbolic_trace(model)
    assert all(torch.equal(a, b) for a, b in zip(flat([traced(x)]), flat([model(x)]), strict=True))


@pytest.mark.parametrize("name", OURS)
def test_in_a_traced_model(name):
    traced_beside_eager(getattr(my_ops.nn, name)(INPUTS, HIDDEN), torch.randn(STEPS, INPUTS))


@pytest.mark.parametrize(
    "name, traced",
    [
        *((name, traced) for name in LAYERS for traced in ("hx", "lengths", "reset")),
        *((name, "hx") for name in CELLS),
    ],
)
def test_traced_beside_a_constant_input(name, traced):
    layer, _ = pair(name, "cpu", torch.float32)
    x = torch.randn(BATCH, INPUTS) if name in CELLS else torch.randn(STEPS, BATCH, INPUTS)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, given):
            if traced == "hx" and "LSTM" in name:
                given = given, given
            return self.layer(x, **{traced: given})

    given = {
        "hx": torch.randn(BATCH, HIDDEN) if name in CELLS else torch.randn(1, BATCH, HIDDEN),
        "lengths": torch.arange(BATCH) % STEPS,
        "reset": torch.rand(STEPS, BATCH) < 0.3,
    }[traced]
    graph = torch.fx.symbolic_trace(Model())
    assert [node.target for node in graph.graph.nodes if node.op == "call_module"] == ["layer"]
    results = zip(flat([graph(given)]), flat([Model()(given)]), strict=True)
    assert all(torch.equal(a, b) for a, b in results)


@pytest.mark.parametrize("name", OURS)
def test_hooks_act_once_in_a_traced_model(name):
    layer = getattr(my_ops.nn, name)(INPUTS, HIDDEN)
    seen = []
    layer.register_forward_pre_hook(lambda layer, args: (2 * args[0],))
    layer.register_forward_hook(lambda layer, args, result: seen.append(args[0]))
    traced_beside_eager(layer, torch.randn(STEPS, INPUTS))
    assert len(seen) == 2
    assert all(isinstance(t, torch.Tensor) for t in seen)


@pytest.mark.parametrize("name", OURS)
def test_a_subclass_in_a_traced_model(name):
    class Doubling(getattr(my_ops.nn, name)):
        def forward(self, input):
            return super().forward(2 * input)

    traced_beside_eager(Doubling(INPUTS, HIDDEN), torch.randn(STEPS, INPUTS))


@pytest.mark.parametrize("name", OURS[4:])
def test_packed_data_in_a_traced_model(name):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = getattr(my_ops.nn, name)(INPUTS, HIDDEN)

        def forward(self, data):
            packed = torch.nn.utils.rnn.PackedSequence(data, torch.tensor([3, 2]))
            return self.layer(packed)[0].data

    model, data = Model(), torch.randn(5, INPUTS)
    assert torch.equal(torch.fx.symbolic_trace(model)(data), model(data))


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_of_a_recomputed_layer(name, device):
    """Zoneout is drawn again as it was."""
    layer = LAYERS[name][0](INPUTS, HIDDEN, zoneout=0.3, device=device)
    x = torch.randn(STEPS, BATCH, INPUTS, device=device, requires_grad=True)

    def gradients(run):
        torch.manual_seed(2)
        return torch.autograd.grad(run(x)[0].square().sum(), [x, *layer.parameters()])

    recomputed = gradients(lambda x: checkpoint(layer, x, use_reentrant=False))
    for ours, exact in zip(recomputed, gradients(layer), strict=True):
        assert torch.equal(ours, exact)
