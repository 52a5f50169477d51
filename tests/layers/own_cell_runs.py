"""Layers of own_cells.py in all modes, compared with torch's operations in float64, which
test_own_cell.py compares with a plain loop, and LSTM and GRU compared with their own kernels for
float64; and what processes find that share a cache."""

import os
import subprocess
import sys
from unittest import mock

import own_cells
import torch

import my_ops
from my_ops._private import parameters_by_direction
from my_ops.recurrent import _own_cpu

# As those of test_recurrent_kernels.py: relative to max(1, the largest), in units of eps.
LIMIT = {torch.float32: 80, torch.float64: 80, torch.float16: 5, torch.bfloat16: 5}
MODES = ["plain", "no bias", "ragged", "reset", "ragged and zoneout", "bidirectional and deep"]


def made(name, mode, sizes, dtype, device, heads=1):
    """A layer, and the same in float64."""
    _, _, inputs, hidden = sizes
    more = {"bias": mode != "no bias", "heads": heads}
    if mode.startswith("bidirectional"):
        more |= {"bidirectional": True, "num_layers": 2}
    make = getattr(my_ops.nn, name) if name.isupper() else getattr(own_cells, name).layer
    layer, exact = (make(inputs, hidden, **more, device=device, dtype=dtype) for _ in "12")
    exact.double()
    layer.load_state_dict(exact.state_dict())
    for each in (exact.eval(), layer.eval()):
        each.zoneout = 0.25 if "zoneout" in mode else 0.0
    return layer, exact


def results(layer, x, states, rows, weights):
    """By name, with the gradients of everything."""
    x, states = x.detach().requires_grad_(), [s.detach().requires_grad_() for s in states]
    given = states[0] if len(states) == 1 else tuple(states)
    output, last = layer(x, given, **rows)
    ends = [last] if isinstance(last, torch.Tensor) else list(last)
    parameters = dict(layer.named_parameters())
    asked = {"grad_x": x, **{f"grad_{k}": s for k, s in enumerate(states)}, **parameters}
    grads = torch.autograd.grad([output, *ends], list(asked.values()), weights)
    named = {"output": output, **{f"end_{k}": e for k, e in enumerate(ends)}}
    return named | dict(zip(asked, grads, strict=True))


def fit_slstm(states, weights):
    """Makes n a sum of weights, and c n times a mean of tanhs. In 16 bits rounded values may choose
    the other side of the maximum: the gradient of h is the same, and that of the others is left
    out."""
    states[2].abs_().add_(1)
    states[1].tanh_().mul_(states[2])
    for weight in weights[1:]:
        weight.mul_(weight.element_size() > 2)


def check(name, sizes, mode, dtype, device, heads=1):
    steps, batch, inputs, hidden = sizes
    layer, exact = made(name, mode, sizes, dtype, device, heads)
    directions = len(parameters_by_direction(layer))
    count = len(layer._state_names)

    def drawn(*shape):
        return torch.randn(shape, device=device, dtype=torch.float64).to(dtype)

    x = drawn(steps, batch, inputs)
    states = [drawn(directions, batch, hidden) for _ in range(count)]
    rows = {}
    if "ragged" in mode or mode.startswith("bidirectional"):
        rows["lengths"] = torch.randint(0, steps + 1, (batch,), device=device)
    if mode != "plain":
        rows["reset"] = torch.rand(steps, batch, device=device) < 0.2
    width = hidden * (2 if layer.bidirectional else 1)
    weights = [drawn(steps, batch, width), *(drawn(directions, batch, hidden) for _ in states)]
    if name == "slstm":
        fit_slstm(states, weights[1:])
    got = results(layer, x, states, rows, weights)

    states, weights = ([t.double() for t in tensors] for tensors in (states, weights))
    with mock.patch.object(_own_cpu, "number_of", lambda *_: None):  # step by step
        want = results(exact, x.double(), states, rows, weights)
    limit = LIMIT[dtype] * (4 if layer.num_layers > 1 else 1)
    for key, right in want.items():
        scale = max(1.0, right.abs().max().item()) * torch.finfo(dtype).eps
        error = (got[key].double() - right).abs().max().item()
        assert error <= limit * scale, (key, error / scale)


# ------------------------------------------------------------------------------------------ cache

PROGRAM = """
import torch, sys
sys.path.insert(0, sys.argv[1])
import own_cells
torch.manual_seed(0)
layer = own_cells.gru.layer(3, 40, device=sys.argv[2])
print(layer(torch.ones(6, 2, 3, device=sys.argv[2]))[0].sum().item())
"""


def check_cache_of_processes(folder, device):
    """Of two at a time, of a later one, with a damaged file, and where nothing can be written."""

    def start(cache):
        of_cells = own_cells.__file__.rsplit("/", 1)[0]
        command = [sys.executable, "-c", PROGRAM, of_cells, device]
        env = {**os.environ, "MY_OPS_CACHE": str(cache)}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, env=env, **pipes)

    def said(process):
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        return float(out), err.count("my_ops: compiling gru for this ")

    cache = folder / "cache"
    both = [start(cache), start(cache)]
    first, _ = said(both[0])
    assert said(both[1])[0] == first
    assert said(start(cache)) == (first, 0)
    (file,) = cache.iterdir()
    file.write_bytes(file.read_bytes()[:-100])  # damaged
    assert said(start(cache)) == (first, 1)
    assert said(start(cache)) == (first, 0)
    in_the_way = folder / "file"  # root may write to read-only folders
    in_the_way.touch()
    assert said(start(in_the_way / "cache")) == (first, 1)
