"""my_ops.cell on the CPU: the library that a C++ compiler makes of a cell at the first call,
compared with a loop of torch's operations in float64, and what happens without a compiler."""

import io
import sys
import threading

import own_cells
import pytest
import torch
from own_cell_runs import LIMIT, MODES, check, check_cache_of_processes, made, results
from torch.testing import assert_close

import my_ops
from my_ops.recurrent import _compiled, _own_cpu

COMPILED = ["lstm", "gru", "lltm", "tanh_rnn", "minimal", "janet", "two_speeds"]
# steps, batch, inputs, hidden, by how the plan of csrc/recurrent_cpu.h runs them
SIZES = {
    "by rows": (7, 3, 4, 7),
    "by rows, many": (3, 70, 20, 33),
    "by units": (20, 9, 8, 400),
    "a product each step": (2, 1, 16, 250),
}


@pytest.mark.parametrize("dtype", LIMIT, ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", COMPILED)
def test_engine(name, size, dtype):
    assert _own_cpu.number_of(getattr(own_cells, name)._cell, dtype) is not None
    check(name, SIZES[size], "plain", dtype, "cpu")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["lstm", "minimal", "two_speeds"])
def test_modes(name, size, mode):
    check(name, SIZES[size], mode, torch.float32, "cpu")


@pytest.mark.parametrize("mode", ["ragged and zoneout", "bidirectional and deep"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_modes_of_16_bits(dtype, mode):
    check("two_speeds", SIZES["by rows, many"], mode, dtype, "cpu")


@pytest.mark.parametrize("dtype", LIMIT, ids=str)
@pytest.mark.parametrize("name", [*COMPILED, "relu_rnn"])
def test_step(name, dtype, monkeypatch):
    """The values and the gradients of everything, of one step."""
    step = getattr(own_cells, name).step(4, 19, dtype=dtype)
    x = torch.randn(5, 4, dtype=dtype)
    states = [torch.randn(5, 19, dtype=dtype) for _ in range(1 + len(step.cell.carried))]
    weights = [torch.randn_like(s) for s in states]

    def run(of):
        module, given = of(step), [of(t).detach().requires_grad_() for t in (x, *states)]
        new = module(given[0], given[1] if len(states) == 1 else tuple(given[1:]))
        new = [new] if isinstance(new, torch.Tensor) else list(new)
        asked = [*given, *module.parameters()]
        return [*new, *torch.autograd.grad(new, asked, [of(w) for w in weights])]

    got = run(lambda t: t)
    monkeypatch.setattr(_own_cpu, "number_of", lambda *_: None)
    want = run(lambda t: t.double())
    for ours, right in zip(got, want, strict=True):
        scale = max(1.0, right.abs().max().item()) * torch.finfo(dtype).eps
        assert (ours.double() - right).abs().max().item() <= LIMIT[dtype] * scale


def test_what_the_engine_lacks_runs_step_by_step():
    for name in ("slstm", "peephole"):
        assert _own_cpu.number_of(getattr(own_cells, name)._cell, torch.float32) is None


@pytest.mark.parametrize("sizes", [(0, 3, 4, 5), (3, 0, 4, 5)])
def test_nothing(sizes):
    layer, _ = made("two_speeds", "plain", sizes, torch.float32, "cpu")
    steps, batch, inputs, hidden = sizes
    x, states = torch.randn(steps, batch, inputs), [torch.randn(1, batch, hidden)] * 3
    weights = [torch.ones(steps, batch, hidden), *map(torch.ones_like, states)]
    found = results(layer, x, states, {}, weights)
    assert found["grad_x"].shape == x.shape
    if steps == 0:
        assert_close(found["grad_1"], weights[2])


def arguments_of_ops(number):
    """Right arguments of the module's ops for two_speeds, of 7 units and a batch of 2, by op."""
    made = lambda *sizes: torch.randn(sizes)  # noqa: E731
    cell = own_cells.two_speeds._cell
    gates, carried, saved = cell.gates * 7, len(cell.carried) * 7, cell.saved * 7
    weights = [made(gates, 4), made(gates, 7), made(gates), made(gates)]
    of_h = [made(3, 2, 7), made(2, 7)] if cell.reads_h else [None, None]
    rows = [torch.tensor([3, 1]), torch.zeros(3, 2, dtype=torch.bool), torch.rand(3, 2, 7)]
    last = [made(2, 7), made(2, carried)]
    return {
        "own_cell": [number, made(3, 2, 4), *last, *weights, *rows, True],
        "own_cell_backward": [
            *(number, made(3, 2, 7), *last, made(3, 2, saved), made(3, 2, carried)),
            *(*of_h, made(2, carried), weights[1], *rows),
        ],
        "own_cell_step": [number, made(2, 4), *last, *weights, True],
        "own_cell_step_backward": [number, *last, made(2, saved), of_h[1], made(2, carried)],
    }


@pytest.mark.parametrize("op", arguments_of_ops(0))
def test_ops_of_the_module_refuse(op):
    """Whatever argument is of another size or type, and numbers of no cell."""
    number = _own_cpu.number_of(own_cells.two_speeds._cell, torch.float32)
    call, right = getattr(torch.ops.my_ops, op), arguments_of_ops(number)[op]
    call(*right)
    for at, value in enumerate(right):
        if isinstance(value, torch.Tensor):
            wrong = [value[..., :-1], value.unsqueeze(0), value.to(torch.float16)]
        else:
            wrong = [-1, 10**9] if at == 0 else []
        for other in wrong:
            with pytest.raises(RuntimeError, match=f"{op}: "):
                call(*right[:at], other, *right[at + 1 :])
    for like in (torch.int64, torch.float64):
        with pytest.raises(RuntimeError, match=f"{op}: "):
            call(*(a.to(like) if isinstance(a, torch.Tensor) else a for a in right))


def test_one_name_of_two_cells():
    def defined(scale):
        @my_ops.cell(gates="a")
        def again(a, scale=scale):
            return scale * torch.tanh(a)

        return again.layer(2, 3)

    first, second = defined(1.0), defined(0.5)
    second.load_state_dict(first.state_dict())
    x = torch.randn(1, 2, 2)
    assert_close(second(x)[0], 0.5 * first(x)[0])


def test_torch_compile_sees_one_op(monkeypatch):
    @my_ops.cell(gates="a")
    def traced(a):
        return torch.tanh(a) * 0.75

    layer, x = traced.layer(3, 4), torch.randn(5, 2, 3)
    exported = torch.export.export(layer, (x,))
    assert not any(key[0] == traced._cell.name for key in _own_cpu._numbers)  # not compiled yet
    called = {str(n.target) for n in exported.graph.nodes if n.op == "call_function"}
    assert not any("own_cell" in name for name in called)
    assert_close(exported.module()(x)[0], layer(x)[0])


# --------------------------------------------------------------------------------------- compiler


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """Nothing is compiled, and the folder is another."""
    monkeypatch.setenv("MY_OPS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(_own_cpu, "_numbers", {})
    monkeypatch.setattr(_own_cpu, "_refused", set())
    monkeypatch.delenv("CXX", raising=False)
    _own_cpu._compiler.cache_clear()
    yield tmp_path / "cache"
    _own_cpu._compiler.cache_clear()


VERSION = "test $1 = --version ||"


def program(folder, text):
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("compiler", "says"),
    [
        (None, "no C++ compiler: CXX, c++, g++ and clang++ name none"),
        ("/nowhere/c++ -x", "the C++ compiler does not run: "),
        ("exit 3", "compiler fails"),
        (
            "test $1 = --version || { echo 'a.cpp:1: error: no'; exit 1; } >&2",
            "fails: a.cpp:1: error",
        ),
        ("test $1 = --version || { cat > /dev/null; for o; do :; done; echo > $o; }", "not load: "),
    ],
)
def test_without_a_compiler(fresh, monkeypatch, tmp_path, capfd, compiler, says):
    if compiler is None:
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        named = compiler.startswith("/")
        monkeypatch.setenv("CXX", compiler if named else program(tmp_path, compiler))
    for _ in range(2):
        for dtype in (torch.float32, torch.float64):
            check("lstm", (5, 3, 4, 6), "ragged", dtype, "cpu")
    lines = [line for line in capfd.readouterr().err.splitlines() if "step by step" in line]
    assert len(lines) == 1
    assert lines[0].startswith("my_ops: lstm runs step by step: ") and says in lines[0]


def test_line(fresh, capfd):
    layer = own_cells.janet.layer(2, 3)
    for _ in range(2):
        layer(torch.randn(2, 2, 2))
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("my_ops: compiling janet for this CPU")
    (file,) = fresh.iterdir()
    assert _compiled.read(file) is not None
    _own_cpu._numbers.clear()
    layer(torch.randn(2, 2, 2))
    assert capfd.readouterr().err == ""


def test_without_stderr(fresh, monkeypatch):
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    own_cells.janet.layer(2, 3)(torch.randn(2, 2, 2))


@pytest.mark.slow
def test_cache_of_processes(tmp_path):
    check_cache_of_processes(tmp_path, "cpu")


class Rows(torch.utils.data.Dataset):
    """Items that a compiled cell computes in the loader's processes."""

    def __init__(self, layer):
        self.layer = layer

    def __len__(self):
        return 4

    def __getitem__(self, k):
        with torch.no_grad():
            return self.layer(torch.full((2, 1, 2), float(k)))[0]


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_after_a_fork(fresh):
    layers = [own_cells.minimal.layer(2, 3), own_cells.janet.layer(2, 3)]
    layers[0](torch.zeros(1, 1, 2))  # compiled before, the other after the fork
    release, held = threading.Event(), threading.Event()

    def hold():
        with _compiled.lock:
            held.set()
            release.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    options = {"num_workers": 2, "multiprocessing_context": "fork", "timeout": 120}
    try:  # while another thread compiles
        loaders = (
            torch.utils.data.DataLoader(Rows(layer), batch_size=None, **options) for layer in layers
        )
        found = [list(loader) for loader in loaders]
    finally:
        release.set()
        thread.join()
    for layer, items in zip(layers, found, strict=True):
        assert_close(items, [Rows(layer)[k] for k in range(4)])


def test_threads_compile_once(fresh, capfd):
    layer, x = own_cells.tanh_rnn.layer(2, 3), torch.randn(2, 2, 2)
    threads = [threading.Thread(target=layer, args=(x,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert capfd.readouterr().err.count("compiling tanh_rnn") == 1
