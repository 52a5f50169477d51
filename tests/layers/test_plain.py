"""Plain calls of a layer: which ones a single op takes, and that their results and gradients are
those of the ops of each direction."""

import copy
import pickle
import warnings

import pytest
import torch
from torch.nn.utils import prune
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import my_ops
from my_ops._plain import _module, plain_call
from my_ops.recurrent import _plain

LAYERS = {"lstm": my_ops.nn.LSTM, "gru": my_ops.nn.GRU}
ALL = LAYERS | {"lltm": my_ops.nn.LLTM}
CELLS = {"lstm": my_ops.nn.LSTMCell, "gru": my_ops.nn.GRUCell, "lltm": my_ops.nn.LLTMCell}
STEPS, BATCH, INPUTS, HIDDEN = 3, 4, 5, 6


def nodes(results):
    """The nodes of plain calls that computed these."""
    found = [r.grad_fn for r in results if r.grad_fn is not None]
    found += [node for one in found for node, _ in one.next_functions if node is not None]
    return [node for node in found if "Recurrent" in node.name()]


@pytest.fixture(params=["C++", "Python"])
def taken(request, monkeypatch):
    """Plain calls and the runs of their nodes, as they happen, in C++ and in Python."""
    if request.param == "C++" and _module is None:
        pytest.skip("the module does not fit this torch")
    call = _plain.in_python if request.param == "Python" else plain_call("recurrent")
    events = []

    def watched(name, *more):
        results = call(name, *more)
        if results is not None:
            kind = "step" if more[3] == 0 else "layers"
            events.append(kind)
            for node in nodes(results)[:1]:
                node.register_hook(lambda *_: events.append(f"{kind}_backward"))
        return results

    monkeypatch.setattr(_plain, "_call", watched)
    return events


def by_direction(layer):
    """A copy that runs the ops of each direction."""
    other = copy.deepcopy(layer)
    other._plain = other._plain_step = lambda input, states: None
    return other


def state_of(name, layer, dtype, device):
    cells = layer.num_layers * (2 if layer.bidirectional else 1)
    states = torch.randn(2, cells, BATCH, HIDDEN, dtype=dtype, device=device).requires_grad_()
    return states[0] if name == "gru" else tuple(states)


def outputs_of(results):
    output, last = results
    return [output, *(last if isinstance(last, tuple) else [last])]


def gradients(layer, input, hx, weights):
    results = outputs_of(layer(input, hx))
    loss = sum((r * w).sum() for r, w in zip(results, weights, strict=True) if w is not None)
    states = [] if hx is None else list(hx) if isinstance(hx, tuple) else [hx]
    wanted = [input, *states, *layer.parameters()]
    return results, torch.autograd.grad(loss, wanted)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"bias": False},
        {"batch_first": True},
        {"num_layers": 3},
        {"bidirectional": True},
        {"num_layers": 3, "bidirectional": True, "batch_first": True},
    ],
    ids=str,
)
def test_results_and_gradients(name, how, with_state, taken, device):
    if name == "lltm" and not how.get("bias", True):
        pytest.skip("its op takes a bias that is no parameter, so the call is not plain")
    torch.manual_seed(0)
    layer = ALL[name](INPUTS, HIDDEN, **how, device=device, dtype=torch.float64)
    shape = (BATCH, STEPS, INPUTS) if layer.batch_first else (STEPS, BATCH, INPUTS)
    x = torch.randn(shape, dtype=torch.float64, device=device, requires_grad=True)
    hx = state_of(name, layer, torch.float64, device) if with_state else None
    weights = [torch.randn_like(r) for r in outputs_of(layer(x, hx))]
    taken.clear()
    got = gradients(layer, x, hx, weights)
    assert taken == ["layers", "layers_backward"]
    torch.testing.assert_close(got, gradients(by_direction(layer), x, hx, weights))
    with torch.no_grad():
        torch.testing.assert_close(layer(x, hx), by_direction(layer)(x, hx))
    assert taken == ["layers", "layers_backward", "layers"]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_types(name, dtype, taken, device):
    layer = ALL[name](INPUTS, HIDDEN, 2, bidirectional=True, device=device, dtype=dtype)
    x = torch.randn(STEPS, BATCH, INPUTS, dtype=dtype, device=device, requires_grad=True)
    weights = [torch.randn_like(r) for r in outputs_of(layer(x))]
    got, want = (gradients(each, x, None, weights) for each in (layer, by_direction(layer)))
    assert "layers_backward" in taken
    for a, b in zip([*got[0], *got[1]], [*want[0], *want[1]], strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a, b, rtol=8 * torch.finfo(dtype).eps, atol=1e-1 * 2**-3)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("which", [0, 1, -1])
def test_gradient_of_one_result(name, which, device):
    layer = ALL[name](INPUTS, HIDDEN, 2, bidirectional=True, device=device, dtype=torch.float64)
    x = torch.randn(STEPS, BATCH, INPUTS, dtype=torch.float64, device=device, requires_grad=True)
    weights = [None] * (2 if name == "gru" else 3)
    weights[which] = 1.0
    got, want = (gradients(each, x, None, weights)[1] for each in (layer, by_direction(layer)))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("sizes", [(0, BATCH), (STEPS, 0), (1, 1)])
def test_few(name, sizes, taken, device):
    layer = ALL[name](INPUTS, HIDDEN, 2, bidirectional=True, device=device)
    x = torch.randn(*sizes, INPUTS, device=device, requires_grad=True)
    weights = [torch.ones_like(r) for r in outputs_of(layer(x))]
    got, want = (gradients(each, x, None, weights) for each in (layer, by_direction(layer)))
    torch.testing.assert_close(got, want)
    assert "layers_backward" in taken


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("which", ["input", "state", "weights"])
def test_some_gradients(name, which, taken, device):
    """What was not asked for is not computed, and the rest is the same."""
    layer = LAYERS[name](INPUTS, HIDDEN, 2, device=device, dtype=torch.float64)
    x = torch.randn(STEPS, BATCH, INPUTS, dtype=torch.float64, device=device)
    hx = state_of(name, layer, torch.float64, device)
    if which == "input":
        x.requires_grad_()
    got, want = (
        torch.autograd.grad(
            sum(r.sum() for r in outputs_of(each(x, hx))),
            {
                "input": [x],
                "state": list(hx) if name == "lstm" else [hx],
                "weights": [each.weight_hh_l1],
            }[which],
        )
        for each in (layer, by_direction(layer))
    )
    torch.testing.assert_close(got, want)
    assert "layers_backward" in taken


@pytest.mark.parametrize("name", LAYERS)
def test_nothing_that_requires_a_gradient(name, taken, device):
    """A frozen layer's call is plain in a region with gradients, and saves nothing."""
    layer = LAYERS[name](INPUTS, HIDDEN, device=device).requires_grad_(False)
    x = torch.randn(STEPS, BATCH, INPUTS, device=device)
    output, _ = layer(x)
    assert taken == ["layers"] and not output.requires_grad
    layer.requires_grad_()
    with torch.no_grad():
        assert torch.equal(layer(x)[0], output)
    assert taken == ["layers"] * 2


class Doubled(torch.Tensor):
    pass


class Modes:
    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    class Function(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))


def jvp(layer, x):
    return torch.func.jvp(lambda x: layer(x)[0], (x,), (x,))


def forward_mode(layer, x):
    with torch.autograd.forward_ad.dual_level():
        return layer(x)


def within(context):
    def call(layer, x):
        with context(x.device.type):
            return layer(x)

    return call


NOT_PLAIN = {
    "lengths": lambda layer, x: layer(x, None, [STEPS] * BATCH),
    "reset": lambda layer, x: layer(x, None, None, x[..., 0] > 9),
    "packed": lambda layer, x: layer(torch.nn.utils.rnn.pack_padded_sequence(x, [STEPS] * BATCH)),
    "no batch": lambda layer, x: layer(x[:, 0]),
    "subclass": lambda layer, x: layer(x.as_subclass(Doubled)),
    "autocast": within(lambda device: torch.autocast(device, torch.bfloat16)),
    "dispatch mode": within(lambda _: Modes.Dispatch()),
    "function mode": within(lambda _: Modes.Function()),
    "vmap": lambda layer, x: torch.vmap(lambda x: layer(x)[0])(x[None]),
    "grad": lambda layer, x: torch.func.grad(lambda x: layer(x)[0].sum())(x),
    "jvp": jvp,
    "forward mode": forward_mode,
    "jit.trace": lambda layer, x: torch.jit.trace(layer, (x,), check_trace=False),
    "jit.script": lambda layer, x: torch.jit.script(layer)(x),
    "compile": lambda layer, x: torch.compile(layer, backend="eager", fullgraph=True)(x),
    "export": lambda layer, x: torch.export.export(layer, (x,)),
}


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("reason", NOT_PLAIN)
def test_calls_that_are_not_plain(name, reason, taken, device):
    layer = LAYERS[name](INPUTS, HIDDEN, 2, device=device)
    x = torch.randn(STEPS, BATCH, INPUTS, device=device)
    NOT_PLAIN[reason](layer, x)
    assert taken == []
    layer(x)
    assert taken == ["layers"]


def frozen(layer):
    layer.weight_hh_l0.requires_grad_(False)
    return layer


NOT_PLAIN_LAYERS = {
    "dropout": ("lstm gru", {"num_layers": 2, "dropout": 0.5}, None),
    "weight dropout": ("lstm gru", {"weight_dropout": 0.5}, None),
    "zoneout": ("lstm gru", {"zoneout": 0.5}, None),
    "projection": ("lstm", {"proj_size": 2}, None),
    "a frozen parameter": ("lstm gru", {}, frozen),
    "complex": ("lstm gru", {"dtype": torch.complex64}, None),
    "subclass": (
        "lstm gru",
        {},
        lambda layer: torch.nn.utils.parametrize.register_parametrization(
            layer, "weight_hh_l0", AsSubclass(), unsafe=True
        ),
    ),
}


class AsSubclass(torch.nn.Module):
    def forward(self, weight):
        return weight.as_subclass(Doubled)


@pytest.mark.parametrize(
    ("name", "reason"),
    [(name, reason) for reason, (of, *_) in NOT_PLAIN_LAYERS.items() for name in of.split()],
)
def test_layers_that_are_not_plain(name, reason, taken, device):
    if reason == "complex" and device == "cuda":
        pytest.skip("torch has no such kernels for CUDA")
    _, how, change = NOT_PLAIN_LAYERS[reason]
    warnings.filterwarnings("ignore", "LSTM with projections")  # torch's own, of its own op
    layer = LAYERS[name](INPUTS, HIDDEN, **how, device=device)
    if change is not None:
        change(layer)
    x = torch.randn(STEPS, BATCH, INPUTS, dtype=how.get("dtype"), device=device)
    layer(x)
    assert taken == []


def test_dropout_counts_in_training_only(taken, device):
    layer = my_ops.nn.GRU(INPUTS, HIDDEN, 2, dropout=0.5, device=device).eval()
    layer(torch.randn(STEPS, BATCH, INPUTS, device=device))
    assert taken == ["layers"]


@pytest.mark.parametrize("name", ALL)
def test_second_gradients(name, taken, device):
    how = {"num_layers": 2, "bidirectional": True, "batch_first": True}
    layer = ALL[name](2, 2, **how, device=device, dtype=torch.float64)
    x = torch.randn(2, 2, 2, dtype=torch.float64, device=device, requires_grad=True)
    parameters = [p.detach().requires_grad_() for p in layer.parameters()]
    names = [n for n, _ in layer.named_parameters()]

    def call(x, *parameters):
        with torch.nn.utils.stateless._reparametrize_module(
            layer, dict(zip(names, parameters, strict=True))
        ):
            # An input that is computed from a parameter gets its own share of the gradient.
            return tuple(outputs_of(layer(x * parameters[0].sum())))

    assert torch.autograd.gradgradcheck(call, (x, *parameters), fast_mode=True)
    assert "layers" in taken


@pytest.mark.parametrize("name", LAYERS)
def test_mapped_gradients(name, taken, device):
    layer = LAYERS[name](INPUTS, HIDDEN, 2, device=device, dtype=torch.float64)
    x = torch.randn(STEPS, BATCH, INPUTS, dtype=torch.float64, device=device, requires_grad=True)
    output = layer(x)[0]
    grads = torch.randn(3, *output.shape, dtype=torch.float64, device=device)
    wanted = [x, *layer.parameters()]
    got = torch.autograd.grad(output, wanted, grads, is_grads_batched=True, retain_graph=True)
    assert taken == ["layers", "layers_backward"]
    each = [torch.autograd.grad(output, wanted, g, retain_graph=True) for g in grads]
    torch.testing.assert_close(got, tuple(torch.stack(g) for g in zip(*each, strict=True)))


@pytest.mark.parametrize("name", LAYERS)
def test_what_watches_a_layer(name, taken, device):
    """Hooks of modules, tensors and nodes, of saved tensors, copies and pickles."""
    layer = LAYERS[name](INPUTS, HIDDEN, 2, device=device)
    layer = pickle.loads(pickle.dumps(copy.deepcopy(layer)))
    x = torch.randn(STEPS, BATCH, INPUTS, device=device, requires_grad=True)
    seen = []
    layer.register_forward_hook(lambda *_: seen.append("forward"))
    layer.register_full_backward_hook(lambda *_: seen.append("backward"))
    layer.weight_ih_l0.register_hook(lambda _: seen.append("tensor"))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        output = layer(x)[0]
    output.grad_fn.register_hook(lambda *_: seen.append("node"))
    output.sum().backward()
    assert sorted(seen) == ["backward", "forward", "node", "tensor"]
    assert taken == ["layers", "layers_backward"]
    want = torch.autograd.grad(by_direction(layer)(x)[0].sum(), x)[0]
    torch.testing.assert_close(x.grad, want)


@pytest.mark.parametrize("batch_first", [False, True])
def test_an_output_that_was_overwritten(batch_first, device):
    layer = my_ops.nn.GRU(INPUTS, HIDDEN, batch_first=batch_first, device=device)
    output = layer(torch.randn(STEPS, BATCH, INPUTS, device=device))[0]
    output.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@pytest.mark.parametrize("name", LAYERS)
def test_parametrizations_and_pruning(name, taken, device):
    layer = LAYERS[name](INPUTS, HIDDEN, device=device, dtype=torch.float64)
    torch.nn.utils.parametrizations.weight_norm(layer, "weight_hh_l0")
    prune.l1_unstructured(layer, "weight_ih_l0", 0.5)
    x = torch.randn(STEPS, BATCH, INPUTS, dtype=torch.float64, device=device, requires_grad=True)
    results = outputs_of(layer(x))
    weights = [torch.randn_like(r) for r in results]
    got = gradients(layer, x, None, weights)
    layer._plain = lambda input, states: None
    torch.testing.assert_close(got, gradients(layer, x, None, weights))
    assert taken == ["layers", "layers", "layers_backward"]


@pytest.mark.parametrize("name", LAYERS)
def test_compiled_autograd(name, taken):
    layer = LAYERS[name](INPUTS, HIDDEN, 2, bidirectional=True)
    x = torch.randn(STEPS, BATCH, INPUTS, requires_grad=True)
    want = gradients(layer, x, None, [1.0, None, None][: 2 + (name == "lstm")])[1]
    output = layer(x)[0]
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        output.sum().backward()
    got = [x.grad, *(p.grad for p in layer.parameters())]
    torch.testing.assert_close(tuple(got), want)


@pytest.mark.parametrize("name", LAYERS)
def test_fake_kernels(name):
    """The shapes of fake results are those of the real ones."""
    layer = LAYERS[name](INPUTS, HIDDEN, 2, bidirectional=True)
    x, parameters = torch.randn(STEPS, BATCH, INPUTS), list(layer.parameters())
    states = [torch.zeros(4, BATCH, HIDDEN)] * (2 if name == "lstm" else 1)
    for save in (False, True):
        call = (name, x, states, parameters, 2, True, save)
        torch.library.opcheck(
            torch.ops.my_ops.recurrent_layers, call, test_utils=("test_schema", "test_faketensor")
        )
    _, *ends = results = torch.ops.my_ops.recurrent_layers(*call)
    ends, saved = ends[: len(states)], results[1 + len(states) :]
    grads = [results[0], *ends, *[None] * (2 - len(states))]
    for needs in ((True, True, True), (False, True, False), (True, False, False)):
        torch.library.opcheck(
            torch.ops.my_ops.recurrent_layers_backward,
            (name, *grads, x, states, parameters, 2, True, saved, *needs),
            test_utils=("test_schema", "test_faketensor"),
        )


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("save", [False, True])
def test_fake_results_of_one_direction(name, save):
    """Their shapes. What is saved then includes the output, so opcheck would refuse the op."""
    layer = LAYERS[name](INPUTS, HIDDEN, 2)
    tensors = torch.randn(STEPS, BATCH, INPUTS), [], list(layer.parameters())
    in_meta = [t.to("meta") if isinstance(t, torch.Tensor) else [p.to("meta") for p in t]
               for t in tensors]  # fmt: skip
    shapes = [
        [r.shape for r in torch.ops.my_ops.recurrent_layers(name, *given, 2, False, save)]
        for given in (tensors, in_meta)
    ]
    assert shapes[0] == shapes[1]


WRONG = {
    "cell": ((("cell", "rnn"),), "cell must be the name of a recurrent op, got 'rnn'"),
    "rank": ((("input", torch.zeros(4, 5)),), r"input must be \(steps, batch, input_size\)"),
    "parameters": ((("parameters", []),), "parameters must be those of 1 cells, got 0"),
    "states": ((("states", [torch.zeros(1, BATCH, HIDDEN)] * 2),), "states must be 1 tensors"),
    "layers": ((("layers", 0),), "layers must be positive, got 0"),
    "state": (
        (("states", [torch.zeros(2, BATCH, HIDDEN)]),),
        r"states must be \(layers \* directions, batch, hidden_size\)",
    ),
    "rank of a state": (
        (("states", [torch.zeros(1, BATCH)]),),
        r"states must be \(layers \* directions, batch, hidden_size\)",
    ),
}


@pytest.mark.parametrize("which", WRONG)
def test_wrong_arguments(which):
    changes, message = WRONG[which]
    layer = my_ops.nn.GRU(INPUTS, HIDDEN)
    arguments = {"cell": "gru", "input": torch.zeros(STEPS, BATCH, INPUTS), "states": []}
    arguments |= {"parameters": list(layer.parameters()), "layers": 1, "bidirectional": False}
    arguments |= dict(changes)
    in_meta = {
        name: [t.to("meta") for t in value] if isinstance(value, list) else value
        for name, value in arguments.items()
    } | {"input": arguments["input"].to("meta")}
    for given in (arguments, in_meta):
        with pytest.raises(RuntimeError, match=f"recurrent_layers: {message}"):
            torch.ops.my_ops.recurrent_layers(**given, save=False)


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_cells(name, dtype, with_state, taken, device):
    cell = CELLS[name](INPUTS, HIDDEN, device=device, dtype=dtype)
    x = torch.randn(BATCH, INPUTS, device=device, dtype=dtype, requires_grad=True)
    hx = None
    if with_state:
        states = torch.randn(2, BATCH, HIDDEN, dtype=dtype, device=device).requires_grad_()
        hx = states[0] if name == "gru" else tuple(states)

    def run(cell):
        new = cell(x, hx)
        new = [new] if name == "gru" else list(new)
        wanted = [x, *([] if hx is None else [states]), *cell.parameters()]
        loss = sum((s * (i + 1)).sum() for i, s in enumerate(new))
        return new, torch.autograd.grad(loss, wanted)

    got = run(cell)
    assert taken == ["step", "step_backward"]
    tolerance = {} if dtype == torch.float64 else {"rtol": 2**-6, "atol": 2**-6}
    torch.testing.assert_close(got, run(by_direction(cell)), **tolerance)
    assert taken == ["step", "step_backward"]


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("which", ["input", "state", "weights", "hidden only"])
def test_some_gradients_of_cells(name, which, taken, device):
    cell = CELLS[name](INPUTS, HIDDEN, device=device, dtype=torch.float64)
    x = torch.randn(BATCH, INPUTS, device=device, dtype=torch.float64, requires_grad=True)
    states = torch.randn(2, BATCH, HIDDEN, dtype=torch.float64, device=device).requires_grad_()

    def run(cell):
        new = cell(x, states[0] if name == "gru" else tuple(states))
        new = [new] if name == "gru" else list(new)
        own = list(cell.parameters())
        wanted = {"input": [x], "state": [states], "weights": own[:1], "hidden only": [x]}[which]
        return torch.autograd.grad(sum(s.sum() for s in new[: 1 if "only" in which else 2]), wanted)

    torch.testing.assert_close(run(cell), run(by_direction(cell)))
    assert taken == ["step", "step_backward"]


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("bias", [False, True])
def test_second_gradients_of_cells(name, bias, taken, device):
    cell = CELLS[name](2, 2, bias, device=device, dtype=torch.float64)
    x = torch.randn(3, 2, dtype=torch.float64, device=device, requires_grad=True)
    h, c = torch.randn(2, 3, 2, dtype=torch.float64, device=device)
    h.requires_grad_()

    def call(x, h):
        return cell(x, h * x.sum() if name == "gru" else (h * x.sum(), c))

    assert torch.autograd.gradgradcheck(call, (x, h))


NOT_PLAIN_STEPS = {
    "no batch": lambda cell, x: cell(x[0]),
    "subclass": lambda cell, x: cell(x.as_subclass(Doubled)),
    "autocast": NOT_PLAIN["autocast"],
    "dispatch mode": NOT_PLAIN["dispatch mode"],
    "function mode": NOT_PLAIN["function mode"],
    "vmap": lambda cell, x: torch.vmap(cell)(x[None]),
    "forward mode": forward_mode,
    "compile": NOT_PLAIN["compile"],
    "jit.script": NOT_PLAIN["jit.script"],
    "complex": lambda cell, x: type(cell)(INPUTS, HIDDEN, device=x.device, dtype=torch.complex64)(
        x.to(torch.complex64)
    ),
}


@pytest.mark.parametrize("name", ["lstm", "gru"])
@pytest.mark.parametrize("reason", NOT_PLAIN_STEPS)
def test_steps_that_are_not_plain(name, reason, taken, device):
    if reason == "complex" and device == "cuda":
        pytest.skip("torch has no such kernels for CUDA")
    cell = CELLS[name](INPUTS, HIDDEN, device=device)
    x = torch.randn(BATCH, INPUTS, device=device)
    NOT_PLAIN_STEPS[reason](cell, x)
    assert taken == []
    cell(x)
    assert taken == ["step"]


@pytest.mark.parametrize("rows", [4, 80])
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ALL)
def test_gradients_are_the_same_without_those_of_the_state(name, dtype, steps, rows, device):
    """Which need a product with the recurrent weights that nothing else reads."""
    torch.manual_seed(58)
    layer = ALL[name](INPUTS, 37, bidirectional=True, device=device, dtype=dtype)
    x = torch.randn(steps, rows, INPUTS, device=device, dtype=dtype, requires_grad=True)
    states = torch.randn(2, 2, rows, 37, device=device, dtype=dtype)
    found = []
    for needed in (False, True):
        given = states.clone().requires_grad_(needed)
        output = layer(x, given[0] if name == "gru" else tuple(given))[0]
        wanted = [x, *layer.parameters(), *[given] * needed]
        found.append(torch.autograd.grad(output.square().sum(), wanted))
    without, whole = found
    assert all(map(torch.equal, without, whole[:-1]))
    assert whole[-1].abs().sum() > 0


def test_hooked_cells_of_a_layer(taken, device):
    """The modules of LLTM are called if anything watches them."""
    layer = my_ops.nn.LLTM(INPUTS, HIDDEN, 2, device=device)
    x = torch.randn(STEPS, BATCH, INPUTS, device=device)
    layer(x)
    assert taken == ["layers"]
    calls = []
    layer.cells[1].register_forward_hook(lambda *_: calls.append(1))
    layer(x)
    assert calls == [1]
    assert taken == ["layers"]
