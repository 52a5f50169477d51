"""my_ops.cell on CUDA: the kernels that are compiled at the first call, compared with a float64
loop of torch's operations, and the cache of their machine code."""

import own_cells
import pytest
import torch
from own_cell_runs import LIMIT, MODES, check, check_cache_of_processes, made

import my_ops
from my_ops.recurrent import _nvrtc, _own_kernels
from my_ops.recurrent._compiled import CannotCompile

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
if _own_kernels._module() is None:
    pytest.skip("a build for the CPU", allow_module_level=True)

TYPES = [dtype for dtype in LIMIT if dtype != torch.float64]
COMPILED = ["lstm", "gru", "lltm", "tanh_rnn", "minimal", "janet", "peephole", "scaled"]
COMPILED += ["functions", "slstm"]
# steps, batch, inputs, hidden
SIZES = {
    "warp": (7, 3, 4, 7),
    "block": (9, 70, 8, 126),
    "cluster": (12, 2, 16, 250),
    "grid": (6, 20, 32, 700),
}

HEADS = {  # of these numbers of heads
    "warp": ((7, 3, 4, 21), 3),
    "block": ((9, 70, 8, 378), 3),
    "cluster": ((12, 2, 16, 500), 2),
    "grid": ((6, 20, 32, 600), 2),
}


def family(name, sizes, dtype, backward, heads=1):
    """The first word of the name of the kernel that runs."""
    steps, batch, _, hidden = sizes
    _own_kernels.kernel_of.cache_clear()
    _own_kernels._loaded.clear()
    cell = getattr(own_cells, name)._cell
    assert _own_kernels.kernel_of(cell, dtype, 0, backward, steps, batch, hidden, heads)
    ((_, kernel),) = _own_kernels._loaded
    return kernel.decode().removeprefix("my_ops::cuda::").split("_")[0]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", COMPILED)
def test_kernels(name, size, dtype):
    check(name, SIZES[size], "plain", dtype, "cuda")


@pytest.mark.parametrize("name", ["relu_rnn", "indrnn"])
def test_a_kink(name):
    """In 16 bits, rounding moves values across it."""
    check(name, SIZES["warp"], "plain", torch.float32, "cuda")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["lstm", "minimal"])
def test_modes(name, size, mode):
    check(name, SIZES[size], mode, torch.float32, "cuda")


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


def test_float64_runs_step_by_step():
    x = torch.randn(5, 3, 4, device="cuda", dtype=torch.float64)
    layer, exact = made("lstm", "plain", (5, 3, 4, 6), torch.float64, "cuda")
    assert _own_kernels.kernel_of(layer.cell._cell, torch.float64, 0, False, 5, 3, 6, 1) is None
    torch.testing.assert_close(layer(x)[0], exact(x)[0])


@pytest.fixture
def launched(monkeypatch):
    """The launches so far."""
    found = []
    launch = _own_kernels._launch
    monkeypatch.setattr(_own_kernels, "_launch", lambda *a: found.append(a) or launch(*a))
    return found


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("size", HEADS)
@pytest.mark.parametrize("name", ["gru", "peephole", "scaled", "slstm", "tanh_rnn"])
def test_heads(name, size, dtype, launched):
    sizes, heads = HEADS[size]
    check(name, sizes, "plain", dtype, "cuda", heads)
    assert len(launched) == 2


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", HEADS)
@pytest.mark.parametrize("name", ["lstm", "minimal"])
def test_modes_of_heads(name, size, mode, launched):
    sizes, heads = HEADS[size]
    dtype = torch.float16 if size == "block" else torch.float32
    check(name, sizes, mode, dtype, "cuda", heads)
    assert len(launched) == (8 if mode.startswith("bidirectional") else 2)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("size", HEADS)
def test_heads_reach_families(size, backward):
    if size in ("cluster", "grid") and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs compute capability 9.0")
    sizes, heads = HEADS[size]
    assert family("lstm", sizes, torch.float16, backward, heads) == size


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["LSTM", "GRU"])
def test_heads_of_shipped_layers(name, mode, dtype, launched):
    sizes, heads = HEADS["block"]
    check(name, sizes, mode, dtype, "cuda", heads)
    assert len(launched) == (8 if mode.startswith("bidirectional") else 2)


def test_heads_of_shipped_layers_that_do_not_run_at_once(launched):
    """Then the shipped kernels run, one head after the other; and so they do in float64."""
    heads = torch.cuda.get_device_properties(0).multi_processor_count // 22 + 1  # blocks
    check("LSTM", (4, 3, 8, heads * 700), "plain", torch.float16, "cuda", heads)
    check("GRU", (4, 3, 8, 12), "plain", torch.float64, "cuda", 2)
    layer = my_ops.nn.GRU(8, 12, heads=2, device="cuda", dtype=torch.float64)
    with torch.autocast("cuda"):  # which leaves float64
        layer(torch.randn(4, 3, 8, device="cuda", dtype=torch.float64))
    assert not launched


def test_heads_that_do_not_run_at_once(launched):
    """So many units that the GPU does not hold the weights of all: a launch for each head."""
    heads = torch.cuda.get_device_properties(0).multi_processor_count // 22 + 1  # blocks
    check("minimal", (4, 3, 8, heads * 700), "ragged and zoneout", torch.float16, "cuda", heads)
    assert len(launched) == 2 * heads


def test_rows_that_end_in_a_cell_that_no_gates_shut(launched):
    """Step by step, and in the kernel without lengths."""
    check("slstm", SIZES["warp"], "ragged", torch.float32, "cuda")
    assert not launched
    check("slstm", SIZES["warp"], "plain", torch.float32, "cuda")
    assert len(launched) == 2


def test_second_gradients_and_graphs():
    layer, _ = made("minimal", "plain", (5, 3, 4, 6), torch.float32, "cuda")
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


@pytest.mark.slow
def test_cache_of_processes(tmp_path):
    check_cache_of_processes(tmp_path, "cuda")


def test_no_compiler(monkeypatch, capfd):
    def missing():
        raise CannotCompile("NVRTC does not load: test")

    monkeypatch.setattr(_nvrtc, "_library", missing)
    monkeypatch.setattr(_nvrtc, "read", lambda path: None)
    monkeypatch.setattr(_own_kernels, "_loaded", {})
    monkeypatch.setattr(_own_kernels, "_refused", set())
    _own_kernels.kernel_of.cache_clear()
    layer, exact = made("lstm", "plain", (5, 3, 4, 6), torch.float32, "cuda")
    x = torch.randn(5, 3, 4, device="cuda")
    for _ in range(2):
        torch.testing.assert_close(layer(x)[0].double(), exact(x.double())[0])
    _own_kernels.kernel_of.cache_clear()
    assert capfd.readouterr().err.count("runs step by step: NVRTC does not load: test") == 1
