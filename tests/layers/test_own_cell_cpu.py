"""my_ops.cell on the CPU: the library that a C++ compiler makes of a cell at the first call,
compared with a loop of torch's operations in float64, and what happens without a compiler."""

import io
import sys
import threading

import own_cells
import pytest
import torch
from own_cell_runs import LIMIT, MODES, check, check_cache_of_processes, fit_slstm, made, results
from torch.testing import assert_close

import my_ops
from my_ops import _cache
from my_ops.recurrent import _compiled, _own_cpu

COMPILED = [name for name in own_cells.ALL if name != "relu_rnn"]  # which grows
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
@pytest.mark.parametrize("name", ["lstm", "minimal", "two_speeds", "slstm", "peephole"])
def test_modes(name, size, mode):
    check(name, SIZES[size], mode, torch.float32, "cpu")


@pytest.mark.parametrize("mode", ["ragged and zoneout", "bidirectional and deep"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["two_speeds", "slstm", "scaled"])
def test_modes_of_16_bits(name, dtype, mode):
    check(name, SIZES["by rows, many"], mode, dtype, "cpu")


@pytest.mark.parametrize("dtype", LIMIT, ids=str)
@pytest.mark.parametrize("name", [*COMPILED, "relu_rnn"])
def test_step(name, dtype, monkeypatch):
    """The values and the gradients of everything, of one step."""
    step = getattr(own_cells, name).step(4, 19, dtype=dtype)
    x = torch.randn(5, 4, dtype=dtype)
    states = [torch.randn(5, 19, dtype=dtype) for _ in range(1 + len(step.cell.carried))]
    weights = [torch.randn_like(s) for s in states]
    if name == "slstm":
        fit_slstm(states, weights)

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


def of_gate(function):
    """A cell whose h is a function of its gate."""

    @my_ops.cell(gates="a")
    def own(a):
        return function(a)

    return own


def test_what_the_engine_lacks_runs_step_by_step():
    assert _own_cpu.number_of(of_gate(torch.sin)._cell, torch.float32) is None


# The function, and what is taken of values from -1 to 1 to reach its range.
FUNCTIONS = {
    "exp": (torch.exp, lambda t: 100 * t),
    "expm1": (torch.expm1, lambda t: 100 * t**5),
    "log": (torch.log, lambda t: torch.exp(80 * t)),
    "log near 1": (torch.log, lambda t: 1 + t**5),
    "log1p": (torch.log1p, lambda t: torch.expm1(80 * t**3)),
    "softplus": (torch.nn.functional.softplus, lambda t: 20 * t),  # beyond, torch's slope is 1
    "logsigmoid": (torch.nn.functional.logsigmoid, lambda t: 15 * t),
    "sqrt": (torch.sqrt, lambda t: torch.exp(80 * t)),
}
EXTREME = [0.0, -0.0, 1.0, -1.0, 200.0, -200.0, 1e-30, -1e-30, 1e30, -1e30]
EXTREME += [torch.inf, -torch.inf, torch.nan]


def one_step_of(function, x):
    """h, and the gradient of the gate, which is x."""
    step = of_gate(function).step(1, 1, bias=False, dtype=x.dtype)
    torch.nn.init.ones_(step.weight_ih)
    x = x.unsqueeze(1).requires_grad_()
    h = step(x)
    return [t.squeeze(1).detach() for t in (h, *torch.autograd.grad(h.sum(), x))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name, dtype, monkeypatch):
    """To four units in the last place; beyond their ranges as torch's."""
    function, values = FUNCTIONS[name]
    x = values(torch.linspace(-1, 1, 4001, dtype=torch.float64)).to(dtype)
    assert _own_cpu.number_of(of_gate(function)._cell, dtype) is not None
    h, grad = one_step_of(function, x)
    exact = x.double().requires_grad_()
    want = function(exact)
    eps, normal = torch.finfo(dtype).eps, torch.finfo(dtype).tiny
    assert_close(h, want.detach().to(dtype), rtol=4 * eps, atol=normal)
    (of_exact,) = torch.autograd.grad(want.sum(), exact)
    assert_close(grad, of_exact.to(dtype), rtol=8 * eps, atol=8 * eps)

    extreme = torch.tensor(EXTREME, dtype=dtype)
    got = one_step_of(function, extreme)
    monkeypatch.setattr(_own_cpu, "number_of", lambda *_: None)
    assert_close(got, one_step_of(function, extreme), equal_nan=True)
    assert_close(got[0], function(extreme), equal_nan=True)


def test_rows_that_have_ended_are_left_out():
    """A step of them would divide 0 by 0."""
    layer, x = own_cells.slstm.layer(4, 19), torch.randn(6, 4, 4, requires_grad=True)
    lengths = torch.tensor([0, 6, 3, 0])
    output, last = layer(x, lengths=lengths)
    alone, ends = layer(x[:, 1:3], lengths=lengths[1:3])
    assert_close(output[:, 1:3], alone)
    assert_close([t[:, 1:3] for t in last], list(ends))
    assert not any(t[:, [0, 3]].any() for t in (output, *last))
    asked = [x, *layer.parameters()]
    grads = torch.autograd.grad(output.sum() + last[1].sum(), asked)
    want = torch.autograd.grad(alone.sum() + ends[1].sum(), asked)
    assert_close(grads, want)


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


def arguments_of_ops(name, number):
    """Right arguments of the module's ops for a cell, of 7 units and a batch of 2, by op."""
    made = lambda *sizes: torch.randn(sizes)  # noqa: E731
    cell = own_cells.ALL[name]._cell
    gates, carried, saved = cell.gates * 7, len(cell.carried) * 7, cell.saved * 7
    vectors = made(cell.vectors * 7) if cell.vectors else None
    weights = [made(gates, 4), made(gates, 7), vectors, made(gates), made(gates)]
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


@pytest.mark.parametrize("op", arguments_of_ops("two_speeds", 0))
@pytest.mark.parametrize("name", ["two_speeds", "functions"])
def test_ops_of_the_module_refuse(name, op):
    """Whatever argument is of another size or type, and numbers of no cell."""
    number = _own_cpu.number_of(own_cells.ALL[name]._cell, torch.float32)
    call, right = getattr(torch.ops.my_ops, op), arguments_of_ops(name, number)[op]
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
    assert _cache.read(file) is not None
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
