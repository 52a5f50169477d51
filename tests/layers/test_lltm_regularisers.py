"""nn.LLTM in training: dropout between layers, DropConnect, zoneout; attributes that change."""

import io

import pytest
import torch
import torch.nn.functional as F

import my_ops

LIMIT = 5e-16  # for one product in float64
ZONEOUT_LIMIT = 1.2e-15  # for seven means in float64: the largest error of 300 seeds is 3.5e-16


def made(device, dtype=torch.float64, hidden=4, **more):
    return my_ops.nn.LLTM(5, hidden, **more, device=device, dtype=dtype)


def drawn(layer, device, dtype=torch.float64, batch=3):
    """Input of seven steps, and state."""
    shape = (len(layer.cells), batch, layer.hidden_size)
    return torch.randn(7, batch, 5, dtype=dtype, device=device), tuple(
        torch.randn(shape, dtype=dtype, device=device) for _ in range(2)
    )


def flat(result):
    output, (h, c) = result
    return output, h, c


def same(got, want):
    assert all(torch.equal(a, b) for a, b in zip(flat(got), flat(want), strict=True))


def seeded(layer, *args):
    torch.manual_seed(3)
    return layer(*args)


def plain(layer, device):
    """The same layer without anything that acts only in training."""
    more = {"num_layers": layer.num_layers, "bidirectional": layer.bidirectional}
    other = made(device, hidden=layer.hidden_size, **more)
    other.load_state_dict(layer.state_dict())
    return other


def check_dropped(got, undropped, p):
    """Each element is 0, with probability p, or the undropped one times 1 / (1 - p)."""
    kept = got != 0
    torch.testing.assert_close(got[kept], undropped[kept] / (1 - p), rtol=LIMIT, atol=0)
    share = 1 - kept.double().mean().item()
    assert abs(share - p) < 4 * (p * (1 - p) / got.numel()) ** 0.5


@pytest.mark.parametrize("p", [0.2, 0.7])
def test_dropout_acts_between_layers_in_training(p, device):
    layer = made(device, hidden=64, num_layers=2, bidirectional=True, dropout=p)
    x, state = drawn(layer, device)
    seen = []  # the inputs of the second layer
    layer.cells[2].register_forward_pre_hook(lambda cell, args: seen.append(args[0]))
    got = seeded(layer, x, state)
    same(seeded(layer, x, state), got)
    assert not torch.equal(layer(x, state)[0], got[0])
    first = made(device, hidden=64, bidirectional=True)
    first.load_state_dict({n: t for n, t in layer.state_dict().items() if n[6] in "01"})
    output, (h, c) = first(x, tuple(s[:2] for s in state))
    check_dropped(seen[0], output, p)
    second = my_ops.nn.LLTM(128, 64, bidirectional=True, device=device, dtype=torch.float64)
    for own, theirs in zip(second.parameters(), list(layer.parameters())[4:], strict=True):
        own.data = theirs.data
    last, (h_last, c_last) = second(seen[0], tuple(s[2:] for s in state))
    same(got, (last, (torch.cat([h, h_last]), torch.cat([c, c_last]))))  # nothing is dropped here
    same(layer.eval()(x, state), plain(layer, device)(x, state))
    with pytest.warns(UserWarning, match="LLTM: dropout acts between layers"):
        made(device, dropout=0.5)


@pytest.mark.parametrize("p", [0.2, 0.7])
def test_weight_dropout_draws_recurrent_weights_once(p, device):
    layer = made(device, hidden=64, weight_dropout=p)
    x, state = drawn(layer, device)
    got = seeded(layer, x, state)
    torch.manual_seed(3)
    weights = layer.cells[0].weights
    dropped = F.dropout(weights[:, :64], p)
    check_dropped(dropped, weights[:, :64], p)
    whole = torch.cat([dropped, weights[:, 64:]], 1)
    output, h, c = my_ops.lltm(x, state[0][0], state[1][0], whole, layer.cells[0].bias)
    same(got, (output, (h[None], c[None])))
    got[0].sum().backward()
    assert torch.equal(weights.grad[:, :64] == 0, dropped == 0)
    same(layer.eval()(x, state), plain(layer, device)(x, state))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("lengths", [None, [7, 0, 3]])
def test_zoneout_keeps_h(lengths, training, device):
    layer = made(device, zoneout=0.3).train(training)
    x, state = drawn(layer, device)
    h, c = state[0][0], state[1][0]
    got = seeded(layer, x, state, None if lengths is None else torch.tensor(lengths, device=device))
    torch.manual_seed(3)
    shares = torch.full((7, 3, 4), 0.3, dtype=torch.float64, device=device)
    if training:
        shares.bernoulli_(0.3)
    outputs = []
    for t in range(7):
        new_h, new_c = my_ops.lltm_cell(x[t], layer.cells[0].weights, layer.cells[0].bias, h, c)
        new_h = shares[t] * h + (1 - shares[t]) * new_h
        runs = torch.tensor([t < n for n in lengths or [7] * 3], device=device)[:, None]
        h, c = torch.where(runs, new_h, h), torch.where(runs, new_c, c)
        outputs.append(torch.where(runs, h, 0.0))
    for ours, want in zip(flat(got), (torch.stack(outputs), h[None], c[None]), strict=True):
        torch.testing.assert_close(ours, want, rtol=ZONEOUT_LIMIT, atol=ZONEOUT_LIMIT)


@pytest.mark.parametrize("steps", [0, 7])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("zoneout", [0.0, 0.3])
def test_zoneout_has_autocast_s_dtype(zoneout, training, steps, device):
    layer = made(device, torch.float32, zoneout=zoneout).train(training)
    x, state = drawn(layer, device, torch.float32)
    with torch.autocast(device, torch.bfloat16):
        got = flat(layer(x[:steps], state))
    assert [t.dtype for t in got] == [torch.bfloat16] * 3
    assert [t.shape for t in got] == [(steps, 3, 4), (1, 3, 4), (1, 3, 4)]


CHANGES = {  # attributes, and the draws that make a change visible
    "dropout": ({"num_layers": 2}, {"dropout": 0.5}),
    "weight_dropout": ({}, {"weight_dropout": 0.5}),
    "zoneout": ({}, {"zoneout": 0.5}),
    "all": ({"num_layers": 2}, {"dropout": 0.1, "weight_dropout": 0.2, "zoneout": 0.3}),
    "batch_first": ({}, {"batch_first": True}),
}


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_attributes_may_change_after_construction(change, compiled, device):
    always, after = CHANGES[change]
    layer, want = made(device, **always), made(device, **always, **after)
    want.load_state_dict(layer.state_dict())
    x, state = drawn(layer, device, batch=7)
    call = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    unchanged = seeded(call, x, state)
    for name, value in after.items():
        setattr(layer, name, value)
    for training in (True, False):
        layer.train(training), want.train(training)
        same(seeded(call, x, state), seeded(want, x, state))
    assert not torch.equal(seeded(layer.train(), x, state)[0], unchanged[0])
    for name in after:
        if name != "batch_first":
            rule = rf"LLTM: {name} must be a number in \[0, 1\], got 2"
            with pytest.raises(ValueError, match=rule):
                setattr(layer, name, 2)
        setattr(layer, name, type(after[name])())
    same(seeded(call, x, state), unchanged)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_torchscript_draws_the_same(change, training, device):
    always, more = CHANGES[change]
    layer = made(device, **always, **more, bidirectional=True).train(training)
    x, state = drawn(layer, device, batch=7)
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(layer), file)
    file.seek(0)
    lengths = torch.tensor([7, 0, 3, 1, 7, 2, 5], device=device)
    for scripted in (torch.jit.script(layer), torch.jit.load(file)):
        for given in (None, lengths):
            same(seeded(scripted, x, state, given), seeded(layer, x, state, given))


@pytest.mark.parametrize("wrong", [1.01, -0.1, float("nan"), False, True, "0.5", None])
@pytest.mark.parametrize("name", ["dropout", "weight_dropout", "zoneout"])
def test_no_probability(name, wrong):
    with pytest.raises(ValueError, match=rf"LLTM: {name} must be a number in \[0, 1\], got"):
        my_ops.nn.LLTM(3, 4, num_layers=2, **{name: wrong})


def test_certain_dropout(device):
    """With probability 1 the second layer sees zeros only."""
    layer = made(device, num_layers=2, dropout=1)
    x, state = drawn(layer, device)
    seen = []  # the inputs of the second layer
    layer.cells[1].register_forward_pre_hook(lambda cell, args: seen.append(args[0]))
    layer(x, state)
    assert not seen[0].any()
