"""my_ops.cell on CUDA: the kernels that are compiled at the first call, compared with a float64
loop of torch's operations, and the cache of their machine code."""

import os
import subprocess
import sys

import own_cells
import pytest
import torch

from my_ops._private import parameters_by_direction
from my_ops.recurrent import _nvrtc, _own_kernels

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
if _own_kernels._module() is None:
    pytest.skip("a build for the CPU", allow_module_level=True)

# As those of test_recurrent_kernels.py: relative to max(1, the largest), in units of eps.
LIMIT = {torch.float32: 80, torch.float16: 5, torch.bfloat16: 5}
COMPILED = ["lstm", "gru", "lltm", "tanh_rnn", "minimal", "janet"]
# steps, batch, inputs, hidden
SIZES = {
    "warp": (7, 3, 4, 7),
    "block": (9, 70, 8, 126),
    "cluster": (12, 2, 16, 250),
    "grid": (6, 20, 32, 700),
}
MODES = ["plain", "no bias", "ragged", "reset", "ragged and zoneout", "bidirectional and deep"]


def made(name, mode, sizes, dtype):
    """A layer, and the same in float64, which runs torch's operations: test_own_cell.py compares it
    with a plain loop."""
    _, _, inputs, hidden = sizes
    more = {"bias": mode != "no bias"}
    if mode.startswith("bidirectional"):
        more |= {"bidirectional": True, "num_layers": 2}
    exact = (
        getattr(own_cells, name).layer(inputs, hidden, **more, device="cuda", dtype=dtype).double()
    )
    layer = getattr(own_cells, name).layer(inputs, hidden, **more, device="cuda", dtype=dtype)
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


def check(name, sizes, mode, dtype):
    steps, batch, inputs, hidden = sizes
    layer, exact = made(name, mode, sizes, dtype)
    directions = len(parameters_by_direction(layer))
    count = 1 + len(layer.cell.carried)

    def drawn(*shape):
        return torch.randn(shape, device="cuda", dtype=torch.float64).to(dtype)

    x = drawn(steps, batch, inputs)
    states = [drawn(directions, batch, hidden) for _ in range(count)]
    rows = {}
    if "ragged" in mode or mode.startswith("bidirectional"):
        rows["lengths"] = torch.randint(0, steps + 1, (batch,), device="cuda")
    if mode != "plain":
        rows["reset"] = torch.rand(steps, batch, device="cuda") < 0.2
    width = hidden * (2 if layer.bidirectional else 1)
    weights = [drawn(steps, batch, width), *(drawn(directions, batch, hidden) for _ in states)]
    got = results(layer, x, states, rows, weights)

    states, weights = ([t.double() for t in tensors] for tensors in (states, weights))
    want = results(exact, x.double(), states, rows, weights)
    limit = LIMIT[dtype] * (4 if layer.num_layers > 1 else 1)
    for key, right in want.items():
        scale = max(1.0, right.abs().max().item()) * torch.finfo(dtype).eps
        error = (got[key].double() - right).abs().max().item()
        assert error <= limit * scale, (key, error / scale)


def family(name, sizes, dtype, backward):
    """The first word of the name of the kernel that runs."""
    steps, batch, _, hidden = sizes
    _own_kernels.kernel_of.cache_clear()
    _own_kernels._loaded.clear()
    cell = getattr(own_cells, name)._cell
    assert _own_kernels.kernel_of(cell, dtype, 0, backward, steps, batch, hidden)
    ((_, kernel),) = _own_kernels._loaded
    return kernel.decode().removeprefix("my_ops::cuda::").split("_")[0]


@pytest.mark.parametrize("dtype", LIMIT, ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", COMPILED)
def test_kernels(name, size, dtype):
    check(name, SIZES[size], "plain", dtype)


def test_a_kink():
    check("relu_rnn", SIZES["warp"], "plain", torch.float32)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["lstm", "minimal"])
def test_modes(name, size, mode):
    check(name, SIZES[size], mode, torch.float32)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("size", "dtype"), [("warp", torch.float32), ("block", torch.float16)])
def test_sizes_reach_families(size, dtype, backward):
    assert family("lstm", SIZES[size], dtype, backward) == size


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("size", ["cluster", "grid"])
def test_sizes_reach_families_of_hopper(size, backward):
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs compute capability 9.0")
    assert family("lstm", SIZES[size], torch.float32, backward) == size


def test_what_the_kernels_lack_runs_step_by_step():
    x = torch.randn(5, 3, 4, device="cuda")
    for name, dtype in (("slstm", torch.float32), ("peephole", torch.float32), ("lstm", None)):
        dtype = dtype or torch.float64
        layer, exact = made(name, "plain", (5, 3, 4, 6), dtype)
        cell = layer.cell._cell
        assert _own_kernels.kernel_of(cell, dtype, 0, False, 5, 3, 6) is None
        torch.testing.assert_close(layer(x.to(dtype))[0].double(), exact(x.double())[0])


def test_second_gradients_and_graphs():
    layer, _ = made("minimal", "plain", (5, 3, 4, 6), torch.float32)
    x = torch.randn(5, 3, 4, device="cuda", requires_grad=True)
    (grad,) = torch.autograd.grad(layer(x)[0].square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.square().sum(), x)
    assert second.isfinite().all() and second.any()
    graph, still = torch.cuda.CUDAGraph(), x.detach().clone()
    with torch.no_grad(), torch.cuda.graph(graph):
        captured = layer(still)[0]
    still.copy_(2 * x.detach())
    graph.replay()
    torch.testing.assert_close(captured, layer(2 * x.detach())[0].detach())


# ------------------------------------------------------------------------------------------ cache

PROGRAM = """
import torch, sys
sys.path.insert(0, sys.argv[1])
import own_cells
torch.manual_seed(0)
layer = own_cells.gru.layer(3, 40, device="cuda")
print(layer(torch.ones(6, 2, 3, device="cuda"))[0].sum().item())
"""


def start(cache):
    command = [sys.executable, "-c", PROGRAM, own_cells.__file__.rsplit("/", 1)[0]]
    env = {**os.environ, "MY_OPS_CACHE": str(cache)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=env, **pipes)


def said(process):
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return float(out), err.count("my_ops: compiling gru for this GPU")


@pytest.mark.slow
def test_cache_of_processes(tmp_path):
    cache = tmp_path / "cache"
    both = [start(cache), start(cache)]  # at a time
    first, _ = said(both[0])
    assert said(both[1])[0] == first
    assert said(start(cache)) == (first, 0)
    (file,) = cache.iterdir()
    file.write_bytes(file.read_bytes()[:-100])  # corrupt
    assert said(start(cache)) == (first, 1)
    assert said(start(cache)) == (first, 0)
    in_the_way = tmp_path / "file"  # root may write to read-only folders
    in_the_way.touch()
    assert said(start(in_the_way / "cache")) == (first, 1)


def test_no_compiler(monkeypatch, capfd):
    def missing():
        raise _nvrtc.CannotCompile("NVRTC does not load: test")

    monkeypatch.setattr(_nvrtc, "_library", missing)
    monkeypatch.setattr(_nvrtc, "_read", lambda path: None)
    monkeypatch.setattr(_own_kernels, "_loaded", {})
    monkeypatch.setattr(_own_kernels, "_refused", set())
    _own_kernels.kernel_of.cache_clear()
    layer, exact = made("lstm", "plain", (5, 3, 4, 6), torch.float32)
    x = torch.randn(5, 3, 4, device="cuda")
    for _ in range(2):
        torch.testing.assert_close(layer(x)[0].double(), exact(x.double())[0])
    _own_kernels.kernel_of.cache_clear()
    assert capfd.readouterr().err.count("runs step by step: NVRTC does not load: test") == 1
