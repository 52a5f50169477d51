"""reset=: states are zero before a step, in every recurrent op and layer."""

import pytest
import torch
from precision import SEQUENCE_SIZES, check_precision
from samples import CELL, FLOATING, recurrent_inputs
from torch.nn.utils.rnn import pack_padded_sequence

import my_ops
from my_ops import reference

STATES = {name: len(cell.states) for name, cell in CELL.items()}
LAYERS = {
    "lltm": my_ops.nn.LLTM,
    "lstm": my_ops.nn.LSTM,
    "gru": my_ops.nn.GRU,
}
LIMIT = 1e-12  # in float64: sums in another order


def drawn_reset(steps, batch, device):
    """Some rows are reset at the first step, the last row never."""
    reset = torch.rand(steps, batch, device=device) < 0.3
    reset[0, ::2] = True
    reset[:, -1] = False
    return reset


def drawn_lengths(steps, batch, device):
    lengths = torch.randint(0, steps + 1, (batch,), device=device)
    lengths[:1], lengths[-1:] = 0, steps
    return lengths


def with_gradients(function, tensors, masks, create_graph=False):
    leaves = [t.detach().requires_grad_() for t in tensors]
    results = function(*leaves, **masks)
    total = sum((r * (k + 1)).sin().sum() for k, r in enumerate(results))
    return [*results, *torch.autograd.grad(total, leaves, create_graph=create_graph)]


def close(got, want):
    for ours, exact in zip(got, want, strict=True):
        limit = LIMIT * max(1.0, exact.abs().max().item())
        torch.testing.assert_close(ours, exact, rtol=0, atol=limit)


def same(got, want):
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("sizes", SEQUENCE_SIZES)
@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("name", CELL)
def test_values_and_gradients(name, dtype, sizes, ragged, device):
    tensors = recurrent_inputs(name, *sizes, dtype, device)
    masks = {"reset": drawn_reset(*sizes[:2], device)}
    if ragged:
        masks["lengths"] = drawn_lengths(*sizes[:2], device)

    def masked(function):
        return lambda *ts: function(*ts, **masks)

    ours, oracle = (masked(getattr(module, name)) for module in (my_ops, reference))
    check_precision(ours, oracle, tensors, name == "lltm")


@pytest.mark.parametrize("name", CELL)
def test_nowhere_is_none(name, device):
    tensors = recurrent_inputs(name, 6, 5, 3, 8, torch.float64, device)
    never = torch.zeros(6, 5, dtype=torch.bool, device=device)
    function, lengths = getattr(my_ops, name), drawn_lengths(6, 5, device)
    for masks in ({}, {"lengths": lengths}):
        got = with_gradients(function, tensors, {**masks, "reset": never})
        close(got, with_gradients(function, tensors, masks))


@pytest.mark.parametrize("name", CELL)
def test_everywhere_is_each_step_by_itself(name, device):
    tensors = recurrent_inputs(name, 6, 5, 3, 8, torch.float64, device)
    function, count = getattr(my_ops, name), STATES[name]
    always = torch.ones(6, 5, dtype=torch.bool, device=device)
    output, *_ = function(*tensors, reset=always)
    zeros = [torch.zeros_like(s) for s in tensors[1 : 1 + count]]
    for t, x in enumerate(tensors[0]):
        alone, *_ = function(x[None], *zeros, *tensors[1 + count :])
        close([output[t]], [alone[0]])


@pytest.mark.parametrize("name", CELL)
def test_beyond_the_end_it_does_not_matter(name, device):
    tensors = recurrent_inputs(name, 6, 4, 3, 8, torch.float64, device)
    lengths = torch.tensor([0, 2, 5, 6], device=device)
    reset = drawn_reset(6, 4, device)
    beyond = torch.arange(6, device=device)[:, None] >= lengths
    function = getattr(my_ops, name)
    same(
        with_gradients(function, tensors, {"lengths": lengths, "reset": reset | beyond}),
        with_gradients(function, tensors, {"lengths": lengths, "reset": reset & ~beyond}),
    )
    for start, end in zip(
        tensors[1 : 1 + STATES[name]],
        function(*tensors, lengths=lengths, reset=reset | beyond)[1:],
        strict=True,
    ):
        assert torch.equal(start[0], end[0])


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("name", CELL)
def test_what_a_state_held_stays_behind(name, dtype, value, ragged, create_graph, device):
    """At the first step, in results and all gradients; the gradient of the state itself is zero."""
    steps, count = 5, STATES[name]
    tensors = recurrent_inputs(name, steps, 4, 3, 8, dtype, device)
    reset = drawn_reset(steps, 4, device)
    masks = {"reset": reset}
    if ragged:
        masks["lengths"] = torch.tensor([steps, 1, 3, 2], device=device)
    function, found = getattr(my_ops, name), []
    for state in (0.0, value):
        for k in range(count):
            tensors[1 + k][reset[0]] = state
        found.append(with_gradients(function, tensors, masks, create_graph))
    same(found[1], found[0])
    for grad in found[1][1 + count + 1 : 1 + 2 * count + 1]:
        assert not grad[reset[0]].any()


@pytest.mark.parametrize("name", CELL)
def test_forward_mode_and_second_gradients_behind_not_a_number(name, device):
    tensors = recurrent_inputs(name, 4, 3, 3, 5, torch.float64, device)
    reset, count = drawn_reset(4, 3, device), STATES[name]
    tangents = tuple(torch.randn_like(t) for t in tensors)

    def call(*ts):
        return getattr(my_ops, name)(*ts, reset=reset)

    def grads(*ts):
        return torch.func.grad(lambda *us: sum(r.sin().sum() for r in call(*us)), (0, 1, 2))(*ts)

    found = []
    for state in (0.0, float("nan")):
        for k in range(count):
            tensors[1 + k][reset[0]] = state
        pushed = torch.func.jvp(call, tensors, tangents)[1]
        found.append([*pushed, *torch.func.jvp(grads, tensors, tangents)[1]])
    same(found[1], found[0])


@pytest.mark.parametrize("name", CELL)
def test_what_a_tangent_holds_beyond_the_end_stays_there(name, device):
    """Also in the gradients of what forward mode computed."""
    tensors = recurrent_inputs(name, 4, 3, 3, 5, torch.float64, device)
    lengths = torch.tensor([4, 0, 2], device=device)
    beyond = torch.arange(4, device=device)[:, None] >= lengths
    tangents = [torch.randn_like(t) for t in tensors]

    def pushed(*ts):
        call = lambda *us: getattr(my_ops, name)(*us, lengths=lengths)  # noqa: E731
        return torch.func.jvp(call, ts, tuple(tangents))[1]

    def total(*ts):
        return sum(t.sin().sum() for t in pushed(*ts))

    found = []
    for value in (0.0, float("nan")):
        tangents[0][beyond] = value
        grads = torch.func.grad(total, tuple(range(len(tensors))))(*tensors)
        found.append([*pushed(*tensors), *grads])
    same(found[1], found[0])


@pytest.mark.parametrize("of", ["output", "h_n"])
@pytest.mark.parametrize("kind", ["lengths", "reset", "zoneout"])
@pytest.mark.parametrize("name", CELL)
def test_parameters_gradients_of_one_step(name, kind, of, device):
    """From states without a gradient."""
    tensors = recurrent_inputs(name, 1, 4, 3, 8, torch.float64, device)
    start, shares = 1 + STATES[name], torch.rand(1, 4, 8, dtype=torch.float64, device=device)
    masks = {
        "lengths": torch.tensor([1, 0, 1, 0], device=device),
        "reset": torch.tensor([[True, False, True, False]], device=device),
        "zoneout": shares,
    }
    parameters = [t.detach().requires_grad_() for t in tensors[start:]]
    found = []
    for module in (torch.ops.my_ops, reference):
        results = getattr(module, name)(*tensors[:start], *parameters, **{kind: masks[kind]})
        total = results[of == "h_n"].sin().sum()
        found.append(torch.autograd.grad(total, parameters))
    close(*found)


@pytest.mark.parametrize("name", CELL)
@pytest.mark.parametrize("dtype", FLOATING)
def test_not_a_number_in_a_row_ends_with_the_reset(dtype, name, device):
    tensors = recurrent_inputs(name, 6, 3, 4, 8, dtype, device)
    reset = torch.zeros(6, 3, dtype=torch.bool, device=device)
    reset[3, 1] = True
    function = getattr(my_ops, name)
    usual = function(*tensors, reset=reset)
    tensors[0][2, 1] = float("nan")
    output, *last = function(*tensors, reset=reset)
    assert output[2, 1].isnan().all()
    output[2, 1] = usual[0][2, 1]
    same([output, *last], usual)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("name", CELL)
def test_vmap_over_resets(name, own, device):
    """With the same parameters for all, and with each one's ``own``."""
    tensors = recurrent_inputs(name, 5, 3, 4, 6, torch.float64, device)
    resets = torch.stack([drawn_reset(5, 3, device) for _ in range(4)])
    lengths, start = torch.tensor([5, 0, 3], device=device), 1 + STATES[name]
    parameters = [
        torch.stack([p * (k + 1) for k in range(4)]) if own else p for p in tensors[start:]
    ]

    def call(reset, *parameters):
        masks = {"lengths": lengths, "reset": reset}
        return with_vjp(getattr(my_ops, name), (*tensors[:start], *parameters), masks)

    def with_vjp(function, ts, masks):
        results, pull = torch.func.vjp(lambda *us: function(*us, **masks), *ts)
        return *results, *pull(tuple(r.cos() for r in results))

    got = torch.vmap(call, (0, *[0 if own else None] * len(parameters)))(resets, *parameters)
    for k, reset in enumerate(resets):
        want = call(reset, *(p[k] if own else p for p in parameters))
        close([t[k] for t in got], want)


# --------------------------------------------------------------------------------------- layers


def made(name, device, **form):
    return LAYERS[name](5, 4, **form, device=device, dtype=torch.float64)


def flat(results):
    output, states = results
    return [output, *(states if isinstance(states, tuple) else [states])]


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("name", CELL)
def test_segments_are_as_if_run_one_by_one(name, both, layers, device):
    """In either direction: no state passes from a segment to the next, nor back."""
    layer = made(name, device, num_layers=layers, bidirectional=both)
    ends = [0, 3, 4, 9]
    rows = [torch.randn(n, 2, 5, dtype=torch.float64, device=device) for n in (3, 1, 5)]
    reset = torch.zeros(9, 2, dtype=torch.bool, device=device)
    reset[ends[:-1]] = True
    got = torch.cat([layer(row)[0] for row in rows])
    close([layer(torch.cat(rows), None, None, reset)[0]], [got])
    longer = torch.cat([*rows, torch.full_like(rows[1], 7.0)])
    more = torch.cat([reset, torch.ones_like(reset[:1])])
    lengths = torch.tensor([9, 9], device=device)
    close([layer(longer, None, lengths, more)[0][:9]], [got])


@pytest.mark.parametrize("name", CELL)
def test_layouts(name, device):
    form = {"bidirectional": True, "num_layers": 2}
    layer = made(name, device, **form)
    first = made(name, device, **form, batch_first=True)
    first.load_state_dict(layer.state_dict())
    x = torch.randn(6, 3, 5, dtype=torch.float64, device=device)
    reset = drawn_reset(6, 3, device)
    want = flat(layer(x, None, None, reset))
    got = flat(first(x.transpose(0, 1), None, None, reset.T))
    close([got[0].transpose(0, 1), *got[1:]], want)
    for b in range(3):
        one = flat(layer(x[:, b], None, None, reset[:, b]))
        close(one, [want[0][:, b], *(s[:, b] for s in want[1:])])


@pytest.mark.parametrize("steps, batch", [(0, 1), (3, 4)])
@pytest.mark.parametrize("hidden", [2, 3, 4])
@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("name", CELL)
def test_gradients_in_any_layout_of_reset(name, dtype, hidden, steps, batch, device):
    layer = LAYERS[name](5, hidden, dtype=dtype, device=device)
    x = torch.randn(steps, batch, 5, dtype=dtype, device=device)
    reset = torch.rand(steps, batch, device=device) < 0.3
    found = []
    for strides in ((batch, 1), (1, steps), (9, 1)):
        laid_out = torch.empty_strided((steps, batch), strides, dtype=torch.bool, device=device)
        output = layer(x, reset=laid_out.copy_(reset))[0]
        found.append(torch.autograd.grad(output.sum(), list(layer.parameters())))
    for grads in found[1:]:
        assert all(map(torch.equal, grads, found[0]))


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("enforce_sorted", [False, True])
@pytest.mark.parametrize("name", CELL)
def test_packed_sequences(name, enforce_sorted, batch_first, device):
    layer = made(name, device, bidirectional=True, batch_first=batch_first)
    x = torch.randn(6, 3, 5, dtype=torch.float64, device=device)
    reset = drawn_reset(6, 3, device)
    lengths = torch.tensor([6, 3, 1] if enforce_sorted else [3, 1, 6])
    x, reset = (x.transpose(0, 1), reset.T) if batch_first else (x, reset)
    packed = pack_padded_sequence(x, lengths, batch_first, enforce_sorted)
    got = flat(layer(packed, None, None, reset))
    want = flat(layer(x, None, lengths.to(device), reset))
    like = pack_padded_sequence(want[0], lengths, batch_first, enforce_sorted)
    close([got[0].data, *got[1:]], [like.data, *want[1:]])


@pytest.mark.parametrize("training", [False, True])
def test_zoneout_keeps_nothing_of_what_was_reset(training, device):
    layer = made("lltm", device, zoneout=0.5).train(training)
    x = torch.randn(4, 3, 5, dtype=torch.float64, device=device)
    reset = torch.zeros(4, 3, dtype=torch.bool, device=device)
    reset[2] = True
    results = []
    for k in (0.0, 5.0):
        state = torch.full((1, 3, 4), k, dtype=torch.float64, device=device)
        torch.manual_seed(2)
        results.append(layer(x, (state, state), None, reset))
    assert not torch.equal(results[0][0][:2], results[1][0][:2])
    same([results[0][0][2:], *results[0][1]], [results[1][0][2:], *results[1][1]])


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("name", CELL)
def test_no_synchronisation(name, cuda):
    layer = made(name, cuda, num_layers=2, bidirectional=True)
    x = torch.randn(6, 3, 5, dtype=torch.float64, device=cuda, requires_grad=True)
    lengths, reset = torch.tensor([6, 0, 3], device=cuda), drawn_reset(6, 3, cuda)
    layer(x, None, lengths, reset)[0].sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x, None, lengths, reset)[0].sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
