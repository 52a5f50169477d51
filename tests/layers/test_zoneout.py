"""zoneout and weight_dropout of the layers of every cell."""

import numpy
import pytest
import torch
import torch.nn.functional as F

import my_ops

NAMES = ["LLTM", "LSTM", "GRU", "RNN"]
ONE_STATE = ("GRU", "RNN")
LIMIT = 1e-14  # of sums of seven steps in float64


def made(name, device, dtype=torch.float64, hidden=4, **more):
    return getattr(my_ops.nn, name)(5, hidden, device=device, dtype=dtype, **more)


def seeded(layer, *args):
    torch.manual_seed(3)
    output, last = layer(*args)
    return [output, *([last] if isinstance(last, torch.Tensor) else last)]


def parameters_of(layer):
    if isinstance(layer, my_ops.nn.LLTM):
        return [layer.cells[0].weights, layer.cells[0].bias]
    return list(layer.parameters())


def step_by_step(name, parameters, x, shares, lengths, reset):
    """One layer from zero states with the cell's op, in plain loops."""
    op = getattr(torch.ops.my_ops, f"{'rnn_tanh' if name == 'RNN' else name.lower()}_cell")
    states = [x.new_zeros(x.shape[1], shares.shape[2])] * (1 if name in ONE_STATE else 2)
    outputs = []
    for t in range(len(x)):
        runs = (t < lengths)[:, None]
        before = [s.masked_fill(reset[t, :, None] & runs, 0.0) for s in states]
        arguments = (x[t], *parameters, *before)
        after = [op(*arguments)] if name in ONE_STATE else list(op(*arguments))
        after[0] = shares[t] * before[0] + (1 - shares[t]) * after[0]
        states = [torch.where(runs, a, s) for a, s in zip(after, states, strict=True)]
        outputs.append(torch.where(runs, states[0], 0.0))
    return [torch.stack(outputs), *(s[None] for s in states)]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_values_and_gradients(name, training, device):
    layer = made(name, device, zoneout=0.3).train(training)
    x = torch.randn(7, 3, 5, dtype=torch.float64, device=device, requires_grad=True)
    lengths = torch.tensor([7, 0, 3], device=device)
    reset = torch.rand(7, 3, device=device) < 0.3
    got = seeded(layer, x, None, lengths, reset)
    torch.manual_seed(3)
    shares = torch.full((7, 3, 4), 0.3, dtype=torch.float64, device=device)
    if training:
        shares.bernoulli_(0.3)
    want = step_by_step(name, parameters_of(layer), x, shares, lengths, reset)
    grads = [torch.randn_like(t) for t in want]
    inputs = [x, *parameters_of(layer)]
    got += torch.autograd.grad(got, inputs, grads)
    want += torch.autograd.grad(want, inputs, grads)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=LIMIT, atol=LIMIT)


@pytest.mark.parametrize("name", NAMES)
def test_zoneout_keeps_its_share_of_h(name, device):
    layer = made(name, device, torch.float32, 64, zoneout=0.2, bidirectional=True)
    x = torch.randn(50, 8, 5, device=device)
    output = seeded(layer, x)[0]
    assert torch.equal(seeded(layer, x)[0], output)
    assert not torch.equal(layer(x)[0], output)
    forward, backward = output.chunk(2, 2)
    for h in (forward, backward.flip(0)):
        kept = (h[1:] == h[:-1]).double()
        assert abs(kept.mean().item() - 0.2) < 5 * (0.2 * 0.8 / kept.numel()) ** 0.5


@pytest.mark.parametrize("name", NAMES)
def test_draws_under_vmap(name, device):
    layer = made(name, device, zoneout=0.5)
    x = torch.randn(7, 3, 5, dtype=torch.float64, device=device).expand(2, -1, -1, -1)
    one, other = torch.vmap(lambda x: layer(x)[0], randomness="same")(x)
    assert torch.equal(one, other)
    one, other = torch.vmap(lambda x: layer(x)[0], randomness="different")(x)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("name", NAMES)
def test_draws_of_an_ensemble_with_one_input(name, device):
    members = [made(name, device, num_layers=2, zoneout=0.5, weight_dropout=0.5) for _ in range(2)]
    members[1].load_state_dict(members[0].state_dict())
    state = torch.func.stack_module_state(members)
    x = torch.randn(7, 3, 5, dtype=torch.float64, device=device)

    def output(parameters, buffers):
        return torch.func.functional_call(members[0], (parameters, buffers), (x,))[0]

    one, other = torch.vmap(output, randomness="same")(*state)
    torch.testing.assert_close(one, other, rtol=LIMIT, atol=LIMIT)
    one, other = torch.vmap(output, randomness="different")(*state)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("name", ["LSTM", "GRU"])
def test_weight_dropout(name, device):
    layer = made(name, device, weight_dropout=0.5)
    plain = made(name, device)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(7, 3, 5, dtype=torch.float64, device=device)
    got = seeded(layer, x)
    torch.manual_seed(3)
    plain.weight_hh_l0.data = F.dropout(layer.weight_hh_l0, 0.5).detach()
    assert all(map(torch.equal, got, seeded(plain, x)))
    plain.load_state_dict(layer.state_dict())
    assert all(map(torch.equal, seeded(layer.eval(), x), seeded(plain, x)))


@pytest.mark.parametrize("name", ["LSTM", "GRU"])
def test_gradients_of_weight_dropout(name, device):
    form = {"num_layers": 2, "bidirectional": True}
    layer = made(name, device, weight_dropout=0.5, **form)
    x = torch.randn(7, 3, 5, dtype=torch.float64, device=device)
    parameters = dict(layer.named_parameters())
    torch.manual_seed(3)
    dropped = {n: F.dropout(p, 0.5) if "weight_hh" in n else p for n, p in parameters.items()}
    want, _ = torch.func.functional_call(made(name, device, **form), dropped, (x,))
    got = seeded(layer, x)[0]
    assert torch.equal(got, want)
    grads = (torch.autograd.grad(y.sin().sum(), list(parameters.values())) for y in (got, want))
    for ours, exact in zip(*grads, strict=True):
        torch.testing.assert_close(ours, exact, rtol=LIMIT, atol=LIMIT)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_certain_zoneout(name, training, device):
    """With probability 1 ``h`` stays what it was."""
    layer = made(name, device, zoneout=numpy.float32(1)).train(training)
    x = torch.randn(7, 3, 5, dtype=torch.float64, device=device)
    h = torch.randn(1, 3, 4, dtype=torch.float64, device=device)
    output = layer(x, h if name in ONE_STATE else (h, h))[0]
    assert torch.equal(output, h.expand_as(output))


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_compiles_and_scripts(name, training, device):
    layer = made(name, device, zoneout=0.3, weight_dropout=0.2, num_layers=2).train(training)
    x = torch.randn(7, 3, 5, dtype=torch.float64, device=device)
    want = seeded(layer, x)
    calls = [torch.compile(layer, fullgraph=True, backend="aot_eager")]
    calls += [torch.jit.script(layer)] if name != "RNN" else []
    for call in calls:
        assert all(map(torch.equal, seeded(call, x), want))
    layer.eval()
    exported = torch.export.export(layer, (x,)).module()
    assert all(map(torch.equal, seeded(exported, x), seeded(layer, x)))


@pytest.mark.parametrize("name", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("option", ["zoneout", "weight_dropout"])
def test_wrong_probabilities(name, option):
    rule = rf"{name}: {option} must be a number in \[0, 1\], got"
    for p in (2, -0.1, True, "0.5"):
        with pytest.raises(ValueError, match=f"{rule} {p!r}"):
            made(name, "cpu", **{option: p})
    if name == "LSTM":
        with pytest.raises(ValueError, match="must be 0 with proj_size > 0, got"):
            made(name, "cpu", proj_size=2, **{option: 0.5})
        with pytest.raises(ValueError, match="must be 0 with proj_size > 0, got"):
            setattr(made(name, "cpu", proj_size=2), option, 0.5)
    assert repr(made(name, "cpu", **{option: 0.5})) == f"{name}(5, 4, {option}=0.5)"
