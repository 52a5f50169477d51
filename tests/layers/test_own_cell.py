"""my_ops.cell: the layers and steps of cells of one's own, and what a wrong call raises."""

import copy
import inspect
import pickle

import own_cells
import pytest
import torch
import torch.nn.functional as F
from own_cells import ALL
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.testing import assert_close

import my_ops

F64 = torch.float64
STEPS, BATCH, INPUTS, HIDDEN = 6, 3, 4, 5
LENGTHS = [2, 6, 0]


def made(name, device, **more):
    return ALL[name].layer(INPUTS, HIDDEN, device=device, dtype=F64, **more)


def inputs(device, requires_grad=True):
    shape = (STEPS, BATCH, INPUTS)
    return torch.randn(shape, device=device, dtype=F64, requires_grad=requires_grad)


def states_of(name, device, cells=1):
    count = 1 + len(ALL[name].carried)
    made = [torch.rand(cells, BATCH, HIDDEN, device=device, dtype=F64) for _ in range(count)]
    made = [s.requires_grad_() for s in made]
    return made[0] if count == 1 else tuple(made)


def as_list(states):
    return [states] if isinstance(states, torch.Tensor) else list(states)


def one_step(own, parameters, x, states):
    """The function on whole rows, from the parameters by name."""
    of_x = (F.linear(x, parameters["weight_ih"], parameters.get("bias_ih"))).chunk(
        len(own.gates), -1
    )
    of_h = F.linear(states[0], parameters["weight_hh"], parameters.get("bias_hh"))
    values = dict(zip(own.carried, states[1:], strict=True), h=states[0], **parameters)
    for gate, share, product in zip(own.gates, of_x, of_h.chunk(len(own.gates), -1), strict=True):
        values |= {gate: share + product, f"{gate}_x": share, f"{gate}_h": product}
    names = inspect.signature(own.function).parameters
    return as_list(own.function(**{n: values[n] for n in names if n in values}))


def plain_loop(own, layer, x, states, lengths, reset, zoneout=0.0):
    """All layers and directions of a layer, in loops over rows and steps."""
    ends = [[] for _ in states]
    directions = 2 if layer.bidirectional else 1
    for k in range(layer.num_layers):
        outputs = []
        for direction in range(directions):
            suffix = f"_l{k}" + "_reverse" * direction
            named = {
                n.removesuffix(suffix): p for n, p in layer.named_parameters() if n.endswith(suffix)
            }
            rows, ends_of_rows = [], []
            for b in range(x.shape[1]):
                order = list(range(lengths[b]))[:: -1 if direction else 1]
                now = [s[k * directions + direction, b] for s in states]
                row = [x.new_zeros(layer.hidden_size)] * x.shape[0]
                previous = None
                for t in order:
                    # No state passes from a step to a next step that is reset, nor back.
                    cut = t if direction == 0 else previous
                    if cut is not None and reset[cut, b]:
                        now = [torch.zeros_like(s) for s in now]
                    new = one_step(own, named, x[t, b], now)
                    now = [zoneout * now[0] + (1 - zoneout) * new[0], *new[1:]]
                    row[t], previous = now[0], t
                rows.append(torch.stack(row))
                ends_of_rows.append(now)
            outputs.append(torch.stack(rows, 1))
            for end, of_rows in zip(ends, zip(*ends_of_rows, strict=True), strict=True):
                end.append(torch.stack(of_rows))
        x = torch.cat(outputs, -1)
    return [x, *map(torch.stack, ends)]


def gradients(results, tensors, weights):
    return torch.autograd.grad(results, tensors, weights, allow_unused=True)


@pytest.mark.parametrize("form", ["plain", "ragged", "deep", "zoneout"])
@pytest.mark.parametrize("name", ALL)
def test_plain_loop(name, form, device):
    """Values, and the gradients of everything."""
    more = {"bidirectional": True, "num_layers": 2} if form == "deep" else {}
    layer = made(name, device, **more).eval()
    layer.zoneout = 0.25 if form == "zoneout" else 0.0
    x, states = inputs(device), states_of(name, device, 4 if form == "deep" else 1)
    lengths = reset = None
    whole, never = [STEPS] * BATCH, torch.zeros(STEPS, BATCH, dtype=torch.bool)
    if form != "plain":
        lengths = torch.tensor(LENGTHS, device=device)
        reset = torch.rand(STEPS, BATCH, device=device) < 0.3
    output, last = layer(x, states, lengths, reset)
    got = [output, *as_list(last)]
    loop = (LENGTHS, reset) if reset is not None else (whole, never)
    want = plain_loop(ALL[name], layer, x, as_list(states), *loop, layer.zoneout)
    assert_close(got, want)
    weights = [torch.randn_like(t) for t in want]
    tensors = [x, *as_list(states), *layer.parameters()]
    for ours, theirs in zip(
        gradients(got, tensors, weights), gradients(want, tensors, weights), strict=True
    ):
        assert_close(ours, torch.zeros_like(ours) if theirs is None else theirs)


def test_minimal_by_hand(device):
    layer, x = made("minimal", device), inputs(device)
    h = x.new_zeros(BATCH, HIDDEN)
    w_ih, w_hh, b_ih, b_hh = layer.parameters()
    for t in range(STEPS):
        (f_x, g_x), (f_h, g_h) = (x[t] @ w_ih.T + b_ih).chunk(2, 1), (h @ w_hh.T + b_hh).chunk(2, 1)
        f = 1 / (1 + torch.exp(-f_x - f_h))
        h = h - f * h + f * torch.tanh(g_x + f * g_h)
        assert_close(layer(x[: t + 1])[1][0], h)


def test_peephole_by_hand(device):
    layer, x = made("peephole", device, bias=False), inputs(device)
    h, c = x.new_zeros(2, BATCH, HIDDEN)
    p = dict(layer.named_parameters())
    assert list(p) == ["weight_ih_l0", "weight_hh_l0", "p_i_l0", "p_f_l0", "p_o_l0"]
    for t in range(STEPS):
        i, f, g, o = (x[t] @ p["weight_ih_l0"].T + h @ p["weight_hh_l0"].T).chunk(4, 1)
        old = c
        c = torch.sigmoid(f + p["p_f_l0"] * old) * old
        c = c + torch.sigmoid(i + p["p_i_l0"] * old) * torch.tanh(g)
        h = torch.sigmoid(o + p["p_o_l0"] * c) * torch.tanh(c)
    output, (h_n, c_n) = layer(x)
    assert_close([output[-1], h_n[0], c_n[0]], [h, h, c])


TORCHS = {
    "lstm": torch.nn.LSTM,
    "gru": torch.nn.GRU,
    "tanh_rnn": torch.nn.RNN,
    "relu_rnn": lambda *sizes, **more: torch.nn.RNN(*sizes, nonlinearity="relu", **more),
}


@pytest.mark.parametrize("name", TORCHS)
def test_like_torch(name, device):
    """State dicts, draws and results are those of torch's layer."""
    more = {"num_layers": 2, "bidirectional": True, "batch_first": True, "device": device}
    torch.manual_seed(7)
    theirs = TORCHS[name](INPUTS, HIDDEN, dtype=F64, **more)
    torch.manual_seed(7)
    ours = made(name, **more)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=0)
    x = inputs(device)
    found, last = ours(x)
    want, expected = theirs(x)
    assert_close([found, *as_list(last)], [want, *as_list(expected)])
    of_one, last = ours(x[0])
    assert of_one.shape == want.shape[1:] and as_list(last)[0].shape == (4, HIDDEN)


def functional(layer, x, states, parameters):
    names = [n for n, _ in layer.named_parameters()]
    named = dict(zip(names, parameters, strict=True))
    output, last = torch.func.functional_call(layer, named, (x, states))
    return output, *as_list(last)


@pytest.mark.parametrize("name", ALL)
def test_second_gradient_and_forward_mode(name, device):
    layer = ALL[name].layer(2, 2, device=device, dtype=F64)
    x = torch.randn(2, 2, 2, device=device, dtype=F64, requires_grad=True)
    parameters = [p.detach().clone().requires_grad_() for p in layer.parameters()]
    count = 1 + len(ALL[name].carried)
    states = [torch.rand(1, 2, 2, device=device, dtype=F64).requires_grad_() for _ in range(count)]

    def run(x, *tensors):
        given = tensors[0] if count == 1 else tensors[:count]
        return functional(layer, x, given, tensors[count:])

    tensors = (x, *states, *parameters)
    assert torch.autograd.gradcheck(run, tensors, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(run, tensors)


@pytest.mark.parametrize("name", ALL)
def test_vmap(name, device):
    """Over inputs, and over parameters with their gradients."""
    layer, states = made(name, device), states_of(name, device)
    x = torch.randn(2, STEPS, BATCH, INPUTS, device=device, dtype=F64)
    stacked = [torch.stack([p, 2 * p]).detach() for p in layer.parameters()]
    each = [p[0] for p in stacked]
    got = torch.vmap(lambda x: functional(layer, x, states, each))(x)
    want = [torch.stack(r) for r in zip(*(functional(layer, y, states, each) for y in x))]  # noqa: B905
    assert_close(list(got), want)

    def loss(x, *parameters):
        return functional(layer, x, states, parameters)[0].square().sum()

    grad = torch.func.grad(loss, tuple(range(1 + len(stacked))))
    got = torch.vmap(grad)(x, *stacked)
    pairs = [grad(x[k], *(p[k] for p in stacked)) for k in range(2)]
    assert_close(list(got), [torch.stack(r) for r in zip(*pairs, strict=True)])


@pytest.mark.parametrize("name", ALL)
def test_step(name, device):
    """Steps one after the other are the layer, with the same gradients."""
    layer, x = made(name, device), inputs(device)
    step = ALL[name].step(INPUTS, HIDDEN, device=device, dtype=F64)
    step.load_state_dict({k.removesuffix("_l0"): v for k, v in layer.state_dict().items()})
    hx = None
    for t in range(STEPS):
        hx = step(x[t], hx)
    got, (_, last) = as_list(hx), layer(x)
    want = [s[0] for s in as_list(last)]
    assert_close(got, want)
    weights = [torch.randn_like(t) for t in want]
    own = dict(step.named_parameters())
    tensors = [x, *(own[n.removesuffix("_l0")] for n, _ in layer.named_parameters())]
    theirs = [x, *layer.parameters()]
    assert_close(gradients(got, tensors, weights), gradients(want, theirs, weights))
    alone = as_list(step(x[0, 0]))
    assert_close(alone, [s[0] for s in as_list(step(x[0]))])


@pytest.mark.parametrize("name", ["minimal", "lstm", "slstm"])
def test_packed(name, device):
    layer, x, states = made(name, device), inputs(device), states_of(name, device)
    lengths = torch.tensor([2, 6, 3])
    reset = torch.rand(STEPS, BATCH, device=device) < 0.3
    packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
    output, last = layer(packed, states, reset=reset)
    want, ends = layer(x, states, lengths, reset)
    assert_close(pad_packed_sequence(output)[0], want)
    assert_close(as_list(last), as_list(ends))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits(name, dtype, device):
    """The arithmetic is float32's; results and gradients have the type. Autocast does the same."""
    exact = made(name, device)
    layer = copy.deepcopy(exact).to(dtype)
    exact.load_state_dict(layer.state_dict())
    x = inputs(device, False).to(dtype)
    (got, last), (want, _) = layer(x), exact(x.double())
    assert {t.dtype for t in (got, *as_list(last))} == {dtype}
    eps = torch.finfo(dtype).eps
    assert_close(got.double(), want, rtol=eps, atol=eps)
    got.sum().backward()
    want.sum().backward()
    for ours, theirs in zip(layer.parameters(), exact.parameters(), strict=True):
        assert ours.grad.dtype == dtype
        scale = theirs.grad.abs().max()
        assert (ours.grad - theirs.grad).abs().max() <= 8 * eps * scale
    of_float = copy.deepcopy(exact).float()
    with torch.autocast(device, dtype):
        cast, _ = of_float(x.float())
    assert cast.dtype == dtype
    assert_close(cast, got)


@pytest.mark.parametrize("name", ["minimal", "peephole", "slstm"])
def test_compile(name, device):
    layer, x = made(name, device), inputs(device)
    lengths = torch.tensor(LENGTHS, device=device)
    results = []
    for run in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        output, _ = run(x, None, lengths)
        output.square().sum().backward()
        results.append([output, x.grad, *(p.grad for p in layer.parameters())])
        x.grad = None
        layer.zero_grad()
    assert_close(*results)


@pytest.mark.parametrize("name", ["minimal", "peephole", "slstm", "janet"])
def test_op_checks(name, device):
    """torch's own checks of ops: schemas, aliases, fake kernels, gradients while compiling."""
    described = ALL[name]._cell
    layer, x = made(name, device), inputs(device)
    parameters = [p.detach().requires_grad_() for p in layer.all_weights[0]]
    states = [s[0].detach() for s in as_list(states_of(name, device))]
    op = getattr(torch.ops.my_ops, described.name).default
    torch.library.opcheck(op, (x, *states, *parameters))
    step = getattr(torch.ops.my_ops, f"{described.name}_cell").default
    torch.library.opcheck(step, (x[0].detach().requires_grad_(), *parameters, *states))
    for steps in (0, 2):  # of no step, the last states are those before the first
        results = getattr(torch.ops.my_ops, f"{described.name}_forward").default
        torch.library.opcheck(results, (x[:steps].detach(), *states, *parameters))


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch's own reader
def test_export(tmp_path, device):
    layer, x = made("slstm", device).requires_grad_(False), inputs(device, False)
    torch.export.save(torch.export.export(layer, (x,)), tmp_path / "layer.pt2")
    loaded = torch.export.load(tmp_path / "layer.pt2").module()
    assert_close(loaded(x)[0], layer(x)[0])


def test_copies(tmp_path):
    layer = made("peephole", "cpu", num_layers=2)
    x = inputs("cpu")
    torch.save(layer, tmp_path / "layer.pt")
    loaded = torch.load(tmp_path / "layer.pt", weights_only=False)
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), loaded):
        assert copied.cell is own_cells.peephole
        assert_close(copied(x), layer(x), rtol=0, atol=0)
        assert copied.weight_ih_l0 is not layer.weight_ih_l0
    assert pickle.loads(pickle.dumps(own_cells.peephole)) is own_cells.peephole
    assert layer.half().p_i_l0.dtype == torch.float16
    text = repr(layer)
    assert text == "CellLayer(4, 5, num_layers=2, cell=peephole)"
    assert repr(own_cells.peephole.step(4, 5)) == "CellStep(4, 5, cell=peephole)"


def test_some_parameters_are_frozen(device):
    """Of the parameters of units and the biases, gradients of those alone that ask for one."""
    layer, x = made("peephole", device), inputs(device)
    named = dict(layer.named_parameters())
    want = dict(zip(named, torch.autograd.grad(layer(x)[0].sum(), named.values()), strict=True))
    for kept in ("p_i_l0", "bias_ih_l0", "bias_hh_l0"):
        for name, parameter in named.items():
            parameter.requires_grad_(name == kept)
        (got,) = torch.autograd.grad(layer(x)[0].sum(), named[kept])
        assert_close(got, want[kept])


def test_parameters_are_made_as_asked():
    of = own_cells.peephole
    for make in (of.layer, of.step):
        module = make(INPUTS, HIDDEN, device="meta", dtype=torch.bfloat16)
        assert {(p.device.type, p.dtype) for p in module.parameters()} == {("meta", torch.bfloat16)}


def test_one_definition_twice_and_another():
    """Notebooks define cells again. A layer keeps the cell that it was made of."""

    def define(slope):
        @my_ops.cell(gates="a")
        def again(a):
            return torch.tanh(a) * slope

        return again

    first, same, other = define(1.5), define(1.5), define(2.5)
    assert first._cell is same._cell and first._cell.name != other._cell.name
    layers = [d.layer(INPUTS, HIDDEN, dtype=F64) for d in (first, other)]
    layers[1].load_state_dict(layers[0].state_dict())
    x = inputs("cpu")[:1]
    assert_close(layers[0](x)[0] / 1.5, layers[1](x)[0] / 2.5)
    with pytest.raises((AttributeError, pickle.PicklingError)):
        pickle.dumps(layers[0])


def test_wrong_calls(device):
    layer, x = made("slstm", device), inputs(device)
    h = torch.zeros(1, BATCH, HIDDEN, device=device, dtype=F64)
    with pytest.raises(TypeError, match=r"^slstm\.layer: hx must be a tuple of 4 tensors \(h_0, "):
        layer(x, (h, h))
    with pytest.raises(TypeError, match=r"^slstm\.layer: n_0 must be a torch\.Tensor, got int$"):
        layer(x, (h, h, 3, h))
    with pytest.raises(RuntimeError, match=r"^slstm\.layer: m_0 must be \(num_layers"):
        layer(x, (h, h, h, h[:, :, :1]))
    with pytest.raises(RuntimeError, match=r"^slstm\.layer: input must be \(steps, batch, "):
        layer(x[..., :2])
    with pytest.raises(RuntimeError, match=r"^cell_slstm_\w+: weight_ih must have the dtype"):
        layer(x.float(), None)
    with pytest.raises(TypeError, match=r"^slstm\.step: hx must be a tuple of 4 tensors"):
        own_cells.slstm.step(INPUTS, HIDDEN, dtype=F64)(x[0], h[0])
    with pytest.raises(ValueError, match=r"^slstm\.layer: zoneout must be a number in \[0, 1\]"):
        made("slstm", device, zoneout=2.0)
