"""my_ops.cell: what a function may call, what a wrong one raises, and its header in C++."""

import inspect
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from own_cells import ALL
from torch.testing import assert_close

import my_ops
from my_ops.recurrent._expressions import Graph

F64 = torch.float64


def test_what_is_saved():
    """The fewest values from which backward follows, and by arithmetic what is carried."""
    counts = {"lstm": 4, "gru": 4, "lltm": 3, "tanh_rnn": 1, "minimal": 3, "slstm": 6, "janet": 3}
    assert {name: ALL[name]._cell.saved for name in counts} == counts


def test_what_arithmetic_leaves_out():
    """Nothing is computed of zeros, ones and signs that cancel."""
    graph = Graph()
    a, b = graph.leaf("a"), graph.leaf("b")
    minus_a, minus_b = graph.make("neg", a), graph.make("neg", b)
    difference = graph.make("sub", a, b)
    for op, *operands, simple in [
        ("add", a, 0.0, a), ("add", 0.0, a, a), ("sub", a, 0.0, a), ("sub", 0.0, a, minus_a),
        ("mul", a, 1.0, a), ("mul", 1.0, a, a), ("div", a, 1.0, a), ("neg", minus_a, a),
        ("add", a, minus_b, difference), ("add", minus_b, a, difference),
    ]:  # fmt: skip
        assert graph.make(op, *operands) is simple


UNARY = {
    "abs cos exp expm1 sigmoid sin tanh square relu neg": lambda x: x,
    "log log1p sqrt rsqrt reciprocal": lambda x: x * x + 0.1,
}
OF_F = "elu hardtanh leaky_relu logsigmoid relu silu softplus softsign"
BINARY = "add sub mul div maximum minimum logaddexp"
CALLS = {
    **{
        n: (lambda x, y, n=n, to=to: getattr(torch, n)(to(x)) + y)
        for ns, to in UNARY.items()
        for n in ns.split()
    },
    **{f"F.{n}": (lambda x, y, n=n: getattr(F, n)(x) * y) for n in OF_F.split()},
    **{f"of two: {n}": (lambda x, y, n=n: getattr(torch, n)(x, y)) for n in BINARY.split()},
    "arithmetic": lambda x, y: 2 / (3 + x * x) - (1 - y) ** 3 + (-x) / 4 + x**2.0 * +y,
    "pow": lambda x, y: (x * x + 0.1) ** 1.5 + torch.pow(y * y + 1, -0.5) + (y * y + 1) ** 0.5,
    "methods": lambda x, y: x.sigmoid().mul(y).clamp(-0.5, 0.7).sub(x, alpha=2),
    "where": lambda x, y: torch.where(x > y, x * y, torch.where(x <= 0.3, 1.0, 2.0) * y),
    "comparisons": lambda x, y: torch.where(x != y, x, y) + torch.where(x < 1, y, 0.5 * x),
    "clamps": lambda x, y: torch.clamp(x, min=y) + y.clamp(max=0.3) + x.clip(-1, 1),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3) + torch.addcmul(x, x, y, value=0.5),
    "options": lambda x, y: F.elu(x, 0.5) + F.softplus(y, 2.0) + torch.add(x, y, alpha=3),
    "tensors": lambda x, y: torch.tensor(2.0, dtype=F64) * x - y * torch.tensor([0.5]),
    "constant": lambda x, y: x.maximum(torch.tensor(0.2)) + y * 0 + 1,
}


@pytest.mark.parametrize("call", CALLS)
def test_functions(call, device):
    """The same values and gradients as the functions have on tensors. The definition checks both on
    other values."""
    function = CALLS[call]

    @my_ops.cell(gates="x y")
    def own(x, y):
        return function(x, y)

    step = own.step(2, 50, dtype=F64, device=device)
    input = torch.randn(4, 2, device=device, dtype=F64, requires_grad=True)
    z = F.linear(input, step.weight_ih, step.bias_ih + step.bias_hh)
    # Constants of a cell are on the CPU.
    got, want = step(input), function(*z.cpu().chunk(2, 1)).to(device)
    assert_close(got, want)
    grad = torch.randn_like(want)
    assert_close(torch.autograd.grad(got, input, grad), torch.autograd.grad(want, input, grad))


TIES = {
    "maximum": lambda x, y: torch.maximum(x, y),
    "minimum": lambda x, y: torch.minimum(x, y),
    "relu": lambda x, y: torch.relu(x - y),
    "abs": lambda x, y: torch.abs(x - y),
    "clamp": lambda x, y: torch.clamp(x, 0.0, 2.0) * (y + 1),
}


@pytest.mark.parametrize("call", TIES)
def test_gradient_at_a_kink(call):
    function = TIES[call]

    @my_ops.cell(gates="x y")
    def own(x, y):
        return function(x, y)

    z = [torch.zeros(3, dtype=F64, requires_grad=True) for _ in "xy"]
    want = torch.autograd.grad(function(*z).sum(), z)
    h = torch.zeros(3, dtype=F64)
    _, _, saved = own._cell.forward(tuple(t.detach() for t in z), h, ())
    got, _, _ = own._cell.backward(saved, (), (), h, torch.ones(3, dtype=F64), ())
    assert_close(got, want)


@pytest.mark.parametrize(
    "where", [torch.inference_mode, torch.no_grad, lambda: torch.device("meta")]
)
def test_definition_in_any_region(where):
    def made(a, b):
        return torch.where(a > 0, 1.0, torch.tensor(2.0)) * b

    with where():
        own = define(made, gates="a b", carried="")
    step = own.step(2, 3)
    output = step(torch.ones(1, 2))
    assert output.requires_grad and output.dtype == torch.float32


# -------------------------------------------------------------------------------------- errors


def define(function, gates="f g", carried="c", parameters=""):
    return my_ops.cell(gates=gates, carried=carried, parameters=parameters)(function)


@pytest.mark.parametrize(
    "function, names, rule",
    [
        (lambda f, g: g, {}, "the function must take c"),
        (lambda f, c: (f, c), {}, "the function must take gate g as g, or as g_x and g_h"),
        (lambda f, g_x, c: (f, c), {}, "the function must take gate g as g, or as g_x and g_h"),
        (lambda f, g, c, q: (f, c), {}, "q is neither a gate, a share of one"),
        (lambda f, g, *c: (f, c), {}, "arguments must have names, got *c"),
        (lambda f, g, c: f * g * c, {}, "the function must return h, c, got 1 of 2 values"),
        (lambda f, g, c: (f * g, c, c), {}, "the function must return h, c, got 3 of 2 values"),
        (lambda f, g, c: (f, c), {}, "g does not enter the results"),
        (lambda f, g, c: (f * g > c, c), {}, "the result h must not be a comparison"),
        (lambda f, g, c: (f * g, c), {"carried": "c f"}, "f is named twice"),
        (lambda f, g, c: (f * g, c), {"carried": "c h"}, "the name 'h' is taken, or not one"),
        (lambda f, g, c: (f * g, c), {"gates": "f, g"}, "the name 'f,' is taken, or not one"),
        (lambda f, g, c: (f * g, c), {"gates": ""}, "gates must be 1 to 8 names, got 0"),
        (lambda f, g, c: (f * g, c), {"parameters": "train"}, "the name 'train' is taken by an"),
        (lambda f, g, c: (f * g, c), {"parameters": "p"}, "the function must take p"),
        (
            lambda f_x, f_h, g, c: (f_x * f_h * g, c),
            {},
            "gates whose shares are apart must come last: f",
        ),
        (
            lambda f, g, gate: (f * g, gate),
            {"carried": "gate"},
            "another name is needed: gates is an argument of its ops",
        ),
    ],
)
def test_wrong_definition(function, names, rule):
    function.__name__ = "wrong"
    with pytest.raises(ValueError, match="^" + re.escape(f"my_ops.cell: wrong: {rule}")):
        define(function, **names)


@pytest.mark.parametrize(
    "line, kind, rule",
    [
        ("f = torch.cumsum(f, 0)", ValueError, "cumsum is not known here: a cell computes"),
        ("f = f.mean()", AttributeError, "a value of one unit has no mean"),
        ("f = f @ g", TypeError, "unsupported operand"),
        ("f = f if f > 0 else g", TypeError, "a condition must not choose what runs"),
        ("f = math.exp(f)", TypeError, "a value of one unit is no number of Python"),
        ("f = f[0]", TypeError, "a value of one unit is no number of Python"),
        ("f = f * torch.ones(5)", ValueError, "mul must be of one unit or a number, got a tensor"),
        ("f = f * 'a'", TypeError, "mul must be of one unit or a number, got 'a'"),
        ("f = f + (f > 0)", ValueError, "a comparison is only an argument of torch.where"),
        ("f = torch.where(f, g, c)", ValueError, "the first argument of torch.where must be a"),
        ("f = f ** g", TypeError, "pow does not take these arguments: the exponent must be a"),
        ("f = torch.softmax(f, dim=-1)", ValueError, "softmax is not known here"),
        ("f = torch.tanh(f, out=g)", TypeError, "tanh does not take these arguments"),
        ("f = F.dropout(f)", ValueError, "dropout is not known here"),
        ("return f * g, 'c'", TypeError, "the result c must be of one unit or a number, got 'c'"),
    ],
)
def test_wrong_line(line, kind, rule, tmp_path):
    """The message names the line of the user's file, and shows it."""
    source = (
        "import math\n\nimport torch\nimport torch.nn.functional as F\n\n\ndef wrong(f, g, c):\n"
    )
    source += f"    c = c + f\n    {line}\n    return f * g, c\n"
    path = tmp_path / "mine.py"
    path.write_text(source)
    names = {}
    exec(compile(source, str(path), "exec"), names)
    with pytest.raises(kind) as raised:
        define(names["wrong"])
    text = str(raised.value)
    assert rule in text
    if "unsupported operand" not in rule:
        assert text.startswith("my_ops.cell: wrong: ")
        shown = text.splitlines()[-1]
        assert shown == f"  {path}, line {7 if line.startswith('return') else 9}: {line}" or (
            line.startswith("return") and f"{path}" not in text
        )


def test_function_that_changes():
    """The check against autograd sees it."""
    calls = []

    def wrong(f, g, c):
        calls.append(0)
        return f * len(calls), g + c

    with pytest.raises(ValueError, match=r"^my_ops\.cell: wrong: its trace differs"):
        define(wrong)


def test_function_without_finite_values():
    with pytest.raises(ValueError, match="not finite for any of 64 random values"):
        define(lambda f, g, c: (torch.log(-f * f) + g, c))


def test_not_a_function():
    with pytest.raises(TypeError, match=r"^my_ops\.cell: must be applied to a function, got int$"):
        define(3)


# ----------------------------------------------------------------------------------------- in C++

SOURCE = Path(__file__).resolve().parents[2]
NEEDS_COMPILER = pytest.mark.skipif(
    not shutil.which("c++") or not (SOURCE / "kernels").exists(),
    reason="needs a C++ compiler and the source tree",
)


def header_of(name, new_name="own"):
    made = ALL[name]
    return made.header().replace(f"{made.name.capitalize()}Cell", f"{new_name.capitalize()}Cell")


@pytest.mark.slow
@NEEDS_COMPILER
@pytest.mark.parametrize("name", ["lstm", "gru", "lltm"])
def test_header_is_the_shipped_one(name, tmp_path):
    """In the kernels of the CPU: every one compiles, and a step and its gradient are the same."""
    (tmp_path / "own.h").write_text(header_of(name))
    program = tmp_path / "own"
    shipped = [f'-DSHIPPED_HEADER="recurrent/cells/{name}.h"', f"-DSHIPPED={name.capitalize()}Cell"]
    command = ["c++", "-std=c++20", "-O1", "-Wall", "-Werror", "-fno-trapping-math", *shipped]
    command += [f"-I{tmp_path}", f"-I{SOURCE}/include", f"-I{SOURCE}/kernels"]
    others = ("recurrent/cpu/product_cpu.cpp", "common/convert_cpu.cpp")
    driver = Path(__file__).with_name("own_cell.cpp")
    sources = [driver, *(SOURCE / "kernels" / name for name in others)]
    subprocess.run([*command, *map(str, sources), "-o", str(program)], check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=True)
    single, double, shut = map(float, done.stdout.split())
    assert single <= 4 * torch.finfo(torch.float32).eps
    assert double <= 4 * torch.finfo(F64).eps
    assert shut == 0


def test_facts_of_headers():
    facts = {}
    for name in ("lstm", "gru", "lltm", "janet", "relu_rnn", "minimal", "scaled", "slstm"):
        text = ALL[name].header()
        facts[name] = [int(n) for n in re.findall(r"k\w+ = (\d)", text)]
        facts[name] += [b == "true" for b in re.findall(r"k\w+ = (true|false)", text)]
    assert facts == {  # gates, apart, vectors, carried, saved; reads h, reads previous, bounded
        "lstm": [4, 0, 0, 1, 4, False, True, True],
        "gru": [3, 1, 0, 0, 4, True, False, True],
        "lltm": [3, 0, 0, 1, 3, False, False, True],
        "janet": [2, 0, 0, 1, 3, False, True, False],
        "relu_rnn": [1, 0, 0, 0, 1, True, False, False],
        "minimal": [2, 1, 0, 0, 3, True, False, True],
        "scaled": [2, 1, 1, 0, 4, True, False, True],
        "slstm": [4, 0, 0, 3, 6, False, True, False],
    }


S, T = torch.sigmoid, torch.tanh


@pytest.mark.parametrize(
    "function, bounded",
    [
        (lambda f, g, h: h + S(f) * (T(g) - h), True),
        (lambda f, g, h: (T(g) - h) * S(f) + h, True),
        (lambda f, g, h: h + S(f) * (T(g) - 2 * h), False),
        (lambda f, g, h: h + S(f) * (g - h), False),
        (lambda f, g, h: h + T(f) * (T(g) - h), False),
        (lambda f, g, h: h - S(f) * (T(g) - h), False),
        (lambda f, g, h: (1 - S(f)) * h + S(f) * T(g), True),
        (lambda f, g, h: T(g) * S(f) + h * (1 - S(f)), True),
        (lambda f, g, h: (1 - S(f)) * h + S(f) * g, False),
        (lambda f, g, h: (2 - S(f)) * h + S(f) * T(g), False),
        (lambda f, g, h: S(f) * h + S(f) * T(g), False),
        (lambda g, h: -T(g) * h, True),
        (lambda g, h: h * S(g), True),
        (lambda g, h: (1 - S(g)) * h, True),
        (lambda g, h: (1 - T(g)) * h, False),
        (lambda g, h: 2 * (S(g) * h), False),
        (lambda g, h: torch.where(h > 0, T(g), -0.5), True),
        (lambda g, h: torch.where(h > 0, T(g), 1.5), False),
        (lambda g, h: torch.where(h > 0, T(g), -1.5), False),
        (lambda g, h: -torch.where(h > 0, T(g), -1.5), False),
        (lambda g, h: torch.where(h > 0, g, T(g)), False),
        (lambda g, h: 0.5 * h + S(g) * T(g), False),
        (lambda g, h: (1 - S(g)) * h + S(g) * 1.5, False),
    ],
)
def test_the_bound_that_a_header_states(function, bounded):
    """Whether h stays within 1 or what it was, on which kernels rely."""
    gates = " ".join(name for name in inspect.signature(function).parameters if name != "h")
    assert f"kBounded = {str(bounded).lower()}" in define(function, gates, carried="").header()


def test_words_of_cpp_in_a_header():
    """Names that C++ or the header has for something else get another."""

    @my_ops.cell(gates="int z", carried="saved")
    def odd(int, z, saved):
        saved = torch.lerp(saved, z.abs(), torch.sigmoid(int))
        return torch.tanh(saved), saved

    text = odd.header()
    assert "const T int_2 = z[0];" in text and "const T z_2 = z[1];" in text
    assert "const T saved_2 = carried[0];" in text
    assert "const T abs_z = z_2 < T(0) ? -z_2 : z_2;" in text


def test_header_of_a_function_without_kernel():
    own = define(lambda f, g: torch.sin(-f * f) * g, carried="")
    with pytest.raises(ValueError, match="no header: the kernels have no sin, only arithmetic"):
        own.header()


def test_cells_whose_ended_rows_run_step_by_step_on_cuda():
    """No input keeps what they carry."""
    lacking = {name for name, made in ALL.items() if made._cell.shares is None}
    assert lacking == {"functions", "slstm", "crossed"}
