"""heads of the layers of every cell: the recurrent weights are block-diagonal."""

import copy
import io

import own_cells
import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence

import my_ops
from my_ops.recurrent.own_cell import CellLayer

LAYERS = {
    "LSTM": (my_ops.nn.LSTM, 4),
    "GRU": (my_ops.nn.GRU, 3),
    "RNN": (my_ops.nn.RNN, 1),
    "peephole": (own_cells.peephole.layer, 4),
    "minimal": (own_cells.minimal.layer, 2),
}
HIDDEN, HEADS, LIMIT = 12, 3, 1e-13  # of sums of seven steps in float64


@pytest.fixture(autouse=True, params=["each", "all"])
def at_once(request, monkeypatch, device):
    """Cells of one's own run the heads in one call of their ops: on CUDA, and here everywhere."""
    if request.param == "all":
        name = getattr(request.node, "callspec", None) and request.node.callspec.params.get("name")
        if device == "cuda" or name in ("LSTM", "GRU"):
            pytest.skip("as the device and the layer do without")
        for layer in (CellLayer, my_ops.nn.RNN):
            monkeypatch.setattr(layer, "_at_once", lambda self, *given: self._direction(*given))


def dense(blocks, gates):
    """The recurrent weight of one head that has these blocks on each gate's diagonal."""
    units = HIDDEN // HEADS
    whole = blocks.new_zeros(gates, HEADS, units, HEADS, units)
    for k in range(HEADS):
        whole[:, k, :, k] = blocks.view(gates, HEADS, units, units)[:, k]
    return whole.view(gates * HIDDEN, HIDDEN)


def pair(name, device, dtype=torch.float64, **more):
    """A layer of heads, and one of a single head that computes the same."""
    make, gates = LAYERS[name]
    options = {"device": device, "dtype": dtype, **more}
    ours, whole = make(5, HIDDEN, 2, heads=HEADS, **options), make(5, HIDDEN, 2, **options)
    state = {
        key: dense(value, gates) if "weight_hh" in key else value
        for key, value in ours.state_dict().items()
    }
    whole.load_state_dict(state)
    return ours, whole


def flat(results):
    output, last = results
    return [output, *([last] if isinstance(last, torch.Tensor) else last)]


def random_states(layer, directions, device):
    shape = (2 * directions, 4, HIDDEN)
    count = 1 if isinstance(layer, my_ops.nn.GRU) else len(layer._state_names)
    made = [torch.randn(shape, dtype=torch.float64, device=device) for _ in range(count)]
    return made[0] if count == 1 else tuple(made)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_values_and_gradients(name, bidirectional, device):
    """Each head is the cell with its own units, as blocks of a dense weight are."""
    ours, whole = pair(name, device, bidirectional=bidirectional, bias=bidirectional)
    x = torch.randn(7, 4, 5, dtype=torch.float64, device=device, requires_grad=True)
    hx = random_states(ours, 1 + bidirectional, device)
    lengths = torch.tensor([7, 0, 3, 5], device=device)
    reset = torch.rand(7, 4, device=device) < 0.3
    got, want = (flat(layer(x, hx, lengths, reset)) for layer in (ours, whole))
    torch.testing.assert_close(got, want, rtol=LIMIT, atol=LIMIT)
    grads = [torch.randn_like(t) for t in want]
    got = torch.autograd.grad(got, [x, *ours.parameters()], grads)
    want = torch.autograd.grad(want, [x, *whole.parameters()], grads)
    for g, w in zip(got, want, strict=True):
        if g.shape != w.shape:  # of a recurrent weight: the blocks on the diagonal
            gates = LAYERS[name][1]
            g, w = dense(g, gates), torch.where(dense(torch.ones_like(g), gates) == 1, w, 0.0)
        torch.testing.assert_close(g, w, rtol=LIMIT, atol=LIMIT)


@pytest.mark.parametrize("name", LAYERS)
def test_options(name, device):
    """zoneout and DropConnect act on each head, packed and batch-first input are as ever."""
    ours, whole = pair(name, device, batch_first=True, zoneout=0.4)
    x = torch.randn(4, 7, 5, dtype=torch.float64, device=device)
    packed = pack_padded_sequence(x, torch.tensor([7, 2, 3, 5]), True, False)
    for training in (True, False):
        got, want = [], []
        for layer, found in ((ours, got), (whole, want)):
            torch.manual_seed(3)
            output, *last = flat(layer.train(training)(packed))
            found += [output.data, *last]
        torch.testing.assert_close(got, want, rtol=LIMIT, atol=LIMIT)
    dropped = copy.deepcopy(ours).train()
    dropped.weight_dropout = 1.0
    dropped.zoneout = ours.zoneout = 0.0
    with torch.no_grad():
        ours.weight_hh_l0.zero_()
        ours.weight_hh_l1.zero_()
    torch.testing.assert_close(flat(dropped(x)), flat(ours(x)), rtol=0, atol=0)


@pytest.mark.parametrize("name", LAYERS)
def test_second_gradients(name, device):
    make, _ = LAYERS[name]
    layer = make(2, 4, heads=2, dtype=torch.float64, device=device)
    x = torch.randn(3, 2, 2, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradgradcheck(
        lambda x, *_: layer(x)[0], (x, *layer.parameters()), fast_mode=True
    )


@pytest.mark.parametrize("name", LAYERS)
def test_a_step(name, device):
    """Of a cell of one's own: the layer's first step."""
    if name not in ("peephole", "minimal"):
        pytest.skip("LSTMCell, GRUCell and RNNCell have one head")
    layer, _ = pair(name, device)
    options = {"dtype": torch.float64, "device": device}
    step = layer.cell.step(5, HIDDEN, heads=HEADS, **options)
    step.load_state_dict(
        {k.removesuffix("_l0"): v for k, v in layer.state_dict().items() if k.endswith("_l0")}
    )
    x = torch.randn(4, 5, **options)
    last = step(x)
    h = last[0] if isinstance(last, tuple) else last
    want = flat(layer(x.unsqueeze(0)))[1][0]
    torch.testing.assert_close(h, want, rtol=LIMIT, atol=LIMIT)
    assert f"heads={HEADS}" in repr(step)


@pytest.mark.parametrize("name", ["LSTM", "GRU"])
def test_script(name, device):
    ours, _ = pair(name, device, bidirectional=True, zoneout=0.2)
    ours.eval()
    x = torch.randn(7, 4, 5, dtype=torch.float64, device=device)
    torch.testing.assert_close(flat(torch.jit.script(ours)(x)), flat(ours(x)), rtol=0, atol=0)


@pytest.mark.parametrize("name", LAYERS)
def test_compiled_copied_and_saved(name, device):
    ours, _ = pair(name, device)
    x = torch.randn(7, 4, 5, dtype=torch.float64, device=device)
    want = flat(ours(x))
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(flat(compiled(x)), want, rtol=LIMIT, atol=LIMIT)
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    for other in (copy.deepcopy(ours), torch.load(file, weights_only=False)):
        torch.testing.assert_close(flat(other(x)), want, rtol=0, atol=0)
        assert f"heads={HEADS}" in repr(other)


@pytest.mark.parametrize("name", LAYERS)
def test_parameters(name, device):
    """The recurrent weight has a row for each unit of a gate, and a column for each of its head.
    All are drawn as torch draws them, and one head draws nothing else than before."""
    make, gates = LAYERS[name]
    layer = make(5, HIDDEN, heads=HEADS, device=device)
    assert layer.weight_hh_l0.shape == (gates * HIDDEN, HIDDEN // HEADS)
    assert all(0 < p.abs().max() <= HIDDEN**-0.5 for p in layer.parameters())
    torch.manual_seed(3)
    one = make(5, HIDDEN, heads=1, device=device)
    torch.manual_seed(3)
    for a, b in zip(one.parameters(), make(5, HIDDEN, device=device).parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(
    ("heads", "error", "rule"),
    [
        (5, ValueError, "heads must be positive and divide hidden_size = 12, got 5"),
        (0, ValueError, "heads must be positive and divide hidden_size = 12, got 0"),
        (-3, ValueError, "heads must be positive and divide hidden_size = 12, got -3"),
        (2.0, TypeError, "heads must be an int, got 2.0"),
        (True, TypeError, "heads must be an int, got True"),
    ],
)
def test_wrong_heads(name, heads, error, rule):
    make, _ = LAYERS[name]
    with pytest.raises(error, match=rule):
        make(5, HIDDEN, heads=heads)
    if name == "minimal":
        with pytest.raises(error, match=rule):
            own_cells.minimal.step(5, HIDDEN, heads=heads)


def test_no_projections():
    with pytest.raises(ValueError, match="LSTM: heads must be 1 with proj_size > 0, got 2"):
        my_ops.nn.LSTM(5, HIDDEN, proj_size=4, heads=2)
