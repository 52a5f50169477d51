"""Ops of cells of one's own with the weights of several heads: what the dispatcher does with them,
and the kernels of a step."""

import own_cells
import pytest
import torch
from torch.func import functional_call, jvp, vmap
from torch.utils.flop_counter import FlopCounterMode

from my_ops.ops._common import ops
from my_ops.recurrent import _own_cpu

STEPS, BATCH, INPUTS, HIDDEN, HEADS = 5, 3, 4, 6, 2
CELLS = ["slstm", "minimal", "scaled", "peephole", "tanh_rnn"]


def arguments(name, device, dtype=torch.float64, one_head=False):
    cell = getattr(own_cells, name)._cell

    def drawn(*shape):
        return torch.randn(shape, device=device, dtype=dtype)

    rows = cell.gates * HIDDEN
    states = [drawn(BATCH, HIDDEN) for _ in cell.states]
    if name == "slstm":
        states[2].abs_().add_(1)
    weight = drawn(rows, HIDDEN // HEADS)
    if one_head:
        weight = dense(weight, cell.gates)
    vectors = [drawn(HIDDEN) for _ in range(cell.vectors)]
    return (
        drawn(STEPS, BATCH, INPUTS),
        *states,
        drawn(rows, INPUTS),
        weight,
        *vectors,
        drawn(rows),
        drawn(rows),
    )


def dense(blocks, gates):
    units = HIDDEN // HEADS
    whole = blocks.new_zeros(gates, HEADS, units, HEADS, units)
    for k in range(HEADS):
        whole[:, k, :, k] = blocks.view(gates, HEADS, units, units)[:, k]
    return whole.view(gates * HIDDEN, HIDDEN)


def of_one_head(name, given):
    """The same with a dense recurrent weight."""
    cell = getattr(own_cells, name)._cell
    at = 2 + len(cell.states)
    return *given[:at], dense(given[at], cell.gates), *given[at + 1 :]


def close(got, want):
    torch.testing.assert_close(tuple(got), tuple(want), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("formulas", [False, True])
@pytest.mark.parametrize("name", CELLS)
def test_results(name, formulas, device, monkeypatch):
    """Of forward and backward: the kernels of each head, or the formulas of all, give what one head
    gives, in its layout."""
    if formulas:
        monkeypatch.setattr(_own_cpu, "number_of", lambda *_: None)
    cell = getattr(own_cells, name)._cell
    given = arguments(name, device)
    got = getattr(ops, f"{cell.name}_forward")(*given)
    want = getattr(ops, f"{cell.name}_forward")(*of_one_head(name, given))
    close(got, want)
    count = 1 + len(cell.states)
    output, gates, sequences = want[0], want[count], want[count + 1 :]
    states = given[1:count]
    read = [output, *sequences, *states] if cell.reads_h else [*sequences, *states[1:]]
    grads = [torch.randn_like(t) for t in want[:count]]
    weights = [g[1 + count] for g in (given, of_one_head(name, given))]
    backward = getattr(ops, f"{cell.name}_backward")
    close(*(backward(*grads, gates, *read, w, None, None, None) for w in weights))


@pytest.mark.parametrize("name", CELLS)
def test_a_step(name, device):
    cell = getattr(own_cells, name)._cell
    given = arguments(name, device)
    x, states, rest = given[0][0], given[1 : 1 + len(cell.states)], given[1 + len(cell.states) :]
    dense_rest = of_one_head(name, given)[1 + len(cell.states) :]
    step = getattr(ops, f"{cell.name}_cell_forward")
    close(step(x, *rest, *states), step(x, *dense_rest, *states))


@pytest.mark.parametrize("step", [False, True])
@pytest.mark.parametrize("name", CELLS)
def test_gradients(name, step, device):
    """First and second ones, in both modes."""
    cell = getattr(own_cells, name)._cell
    given = arguments(name, device)
    if step:
        at = 1 + len(cell.states)
        given = given[0][0], *given[at:], *given[1:at]
    op = getattr(ops, f"{cell.name}_cell" if step else cell.name)
    given = [t.requires_grad_() for t in given]
    mode = {"fast_mode": True}
    assert torch.autograd.gradcheck(op, given, **mode, check_batched_grad=True)
    assert torch.autograd.gradcheck(op, given, **mode, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(op, given, **mode)


@pytest.mark.parametrize("name", ["minimal", "peephole"])
def test_vmap(name, device):
    """Over the rows, and over the parameters."""
    op = getattr(ops, getattr(own_cells, name)._cell.name)
    given = arguments(name, device)
    others = arguments(name, device)
    count = 1 + len(getattr(own_cells, name)._cell.states)
    rows = [torch.stack(pair) for pair in zip(given[:count], others[:count], strict=True)]
    mapped = vmap(op, (*[0] * count, *[None] * (len(given) - count)))
    got = mapped(*rows, *given[count:])
    want = [op(*given), op(*others[:count], *given[count:])]
    close(got, map(torch.stack, zip(*want, strict=True)))
    got = vmap(op)(*(torch.stack(pair) for pair in zip(given, others, strict=True)))
    close(got, map(torch.stack, zip(op(*given), op(*others), strict=True)))


@pytest.mark.parametrize("name", ["minimal", "peephole"])
def test_opcheck(name, device):
    cell = getattr(own_cells, name)._cell
    for op in (cell.name, f"{cell.name}_forward"):
        given = [t.requires_grad_() for t in arguments(name, device)]
        torch.library.opcheck(getattr(ops, op).default, given)


def test_autocast_and_flops(device):
    cell = own_cells.minimal._cell
    given = arguments("minimal", device, torch.float32)
    with torch.autocast(device, torch.bfloat16):
        output, _ = getattr(ops, cell.name)(*given)
    assert output.dtype == torch.bfloat16
    given = [t.requires_grad_() for t in given]
    with FlopCounterMode(display=False) as counter:
        output, _ = getattr(ops, cell.name)(*given)
    rows = cell.gates * HIDDEN
    product = 2 * STEPS * BATCH * rows
    assert counter.get_total_flops() == product * (INPUTS + HIDDEN // HEADS)


def test_wrong_weights(device):
    cell = own_cells.minimal._cell
    given = list(arguments("minimal", device))
    at = 2 + len(cell.states)
    for shape in ((12, 4), (12, 0), (11, 3), (12, 3, 1)):
        given[at] = torch.zeros(shape, device=device, dtype=torch.float64)
        with pytest.raises(RuntimeError, match=r"weight_hh must be \(2 \* hidden_size, hidden_s"):
            getattr(ops, cell.name)(*given)


def test_layers_of_an_ensemble(device):
    """torch.func over the parameters of layers of heads."""
    layers = [own_cells.scaled.layer(4, 6, heads=2, device=device).double() for _ in range(3)]
    stacked = {
        key: torch.stack([dict(layer.named_parameters())[key] for layer in layers])
        for key in dict(layers[0].named_parameters())
    }
    x = torch.randn(5, 3, 4, device=device, dtype=torch.float64)
    got = vmap(lambda p: functional_call(layers[0], p, (x,))[0])(stacked)
    close([got], [torch.stack([layer(x)[0] for layer in layers])])
    ones, small = torch.ones_like(x), 1e-5
    _, tangent = jvp(lambda x: layers[0](x)[0], (x,), (ones,))
    ahead, behind = (layers[0](x + step * ones)[0] for step in (small, -small))
    torch.testing.assert_close(tangent, (ahead - behind) / (2 * small), rtol=1e-6, atol=1e-8)
