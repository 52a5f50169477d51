"""Does the test suite see a mistake? Makes random ones, one at a time, and runs the tests.

    python tools/mutants.py --python 100 --cpp 40 --seed 7

Mutants of Python are cosmic-ray's and statements left out; those of C++ are a line's operator,
comparison, constant, statement or order of arguments changed. Each is made in a copy of this tree
in build/mutants, compiled for the CPU, and judged by the tests of its file. Those that live are
printed: a test is missing, or the code says more than it does. Needs what the tests need, and
cosmic-ray.
"""

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import parso.python.tree as tree
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator, operator_names

HERE = Path(__file__).resolve().parents[1]
COPY = HERE / "build/mutants"
TIMEOUT = 900  # seconds: a loop that does not end is seen, too

ELEMENTWISE = "elementwise memory registration c_api autograd vmap integration bounds"
GEMM = "gemm gemm_options registration autograd vmap integration autocast nn bounds"
LLTM = "lltm memory lltm_layer registration autograd vmap autocast integration bounds"
LAYERS = "nn nn_tools lltm_layer lltm_regularisers overrides autocast integration"
TESTS = {  # of the first prefix that fits, those that are likely to fail first
    "my_ops/__main__": "report",
    "my_ops/__init__": "package private_names typing",
    "my_ops/_autocast": "autocast lltm_layer nn",
    "my_ops/_flops": "integration",
    "my_ops/_library": "private_names registration",
    "my_ops/_private": "private_names autograd registration distributed",
    "my_ops/_vmap": "vmap lltm_layer autocast",
    "my_ops/distributed": "distributed",
    "my_ops/nn": LAYERS,
    "my_ops/ops/elementwise": f"{ELEMENTWISE} fake_kernels overrides",
    "my_ops/ops/gemm": f"{GEMM} fake_kernels overrides",
    "my_ops/recurrent/_layers": LAYERS,
    "my_ops/recurrent/_vmap": "vmap lltm_layer autocast",
    "my_ops/recurrent": f"{LLTM} recurrent fake_kernels overrides",
    "my_ops": f"fake_kernels {ELEMENTWISE} gemm gemm_options lltm lltm_layer private_names",
    "csrc/elementwise": f"{ELEMENTWISE} fake_kernels cpp",
    "csrc/gemm": f"{GEMM} fake_kernels cpp",
    "csrc/lltm": f"{LLTM} fake_kernels cpp",
    "csrc/c_api": "c_api",
    "csrc": f"fake_kernels {ELEMENTWISE} gemm lltm lltm_layer cpp",
    "kernels/elementwise": ELEMENTWISE,
    "kernels/recurrent": LLTM,
    "kernels": f"{ELEMENTWISE} lltm",
}
PYTHON = ["my_ops/*.py", "my_ops/*/*.py"]
CPP = ["csrc/binding.h", "csrc/binding_cpu.h", "csrc/bindings.cpp", "csrc/c_api.cpp"]
CPP += ["csrc/*_checks.h", "csrc/*_layout.h", "csrc/*_cpu.cpp", "csrc/lltm_ops.h"]
CPP += ["csrc/lltm_ragged.h", "kernels/*/*_cpu.cpp", "kernels/*/*_cpu.h"]


class LeaveOut(Operator):
    """A statement of one line becomes ``pass``."""

    def mutation_positions(self, node):
        if node.type == "simple_stmt" and node.children[0].type in (
            "expr_stmt", "atom_expr", "raise_stmt", "return_stmt", "assert_stmt", "del_stmt",
        ):  # fmt: skip
            yield node.start_pos, node.end_pos

    def mutate(self, node, index):
        first = node.get_first_leaf()
        node.children[0] = tree.Keyword("pass", first.start_pos, first.prefix)
        return node

    @classmethod
    def examples(cls):
        return ()


def annotations(source):
    """Lines and columns of what is never evaluated."""
    for node in ast.walk(ast.parse(source)):
        for part in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            if part is not None:
                yield (part.lineno, part.col_offset), (part.end_lineno, part.end_col_offset)


def python_mutants(source):
    """By place: functions that return the changed source."""
    operators = [LeaveOut()]
    operators += [o() for o in map(get_operator, operator_names()) if not o.arguments()]
    ignored, found = list(annotations(source)), {}
    nodes = list(ast_nodes(get_ast(source)))
    for operator in operators:
        positions = [start for node in nodes for start, _ in operator.mutation_positions(node)]
        for occurrence, place in enumerate(positions):
            if not any(start <= place < end for start, end in ignored):
                change = lambda o=operator, n=occurrence: mutate_code(source, o, n)  # noqa: E731
                found.setdefault(place, []).append(change)
    return found


SWAPS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "+": "-", "-": "+"}
SWAPS |= {"*": "/", "/": "*", "%": "*", "&&": "||", "||": "&&", "+=": "-=", "-=": "+=", "&": "|"}
SWAPS |= {"true": "false", "false": "true", "min": "max", "max": "min", "any_of": "all_of"}
NOT_CODE = re.compile(r'//[^\n]*|"(?:\\.|[^"\\\n])*"|^[ \t]*#[^\n]*', re.M)
OPERATOR = re.compile(r"(?<= )([<>=!]=|[<>+*/%&-]|&&|\|\||[+-]=)(?= )|\b(true|false|min|max)\b")
NUMBER = re.compile(r"(?<![\w.])\d+(?![\w.])")
NEGATION = re.compile(r"!(?=[\w(])")
STATEMENT = re.compile(r"(?<=[;{}]\n)[ ]+(?!return|using|const|static|template|typedef|break)"
                       r"[\w:.>-]+(?:<[\w, ]+>)?(?:\(| [-+*/]?= )[^;{}]*;")  # fmt: skip
ARGUMENTS = re.compile(r"(?<=\()([\w.*]+), ([\w.*]+)(?=[,)])")


def cpp_mutants(source):
    blank = NOT_CODE.sub(lambda m: " " * len(m[0]), source)
    found = {}

    def add(match, *texts):
        start, end = match.span()
        for text in texts:
            change = lambda t=text: source[:start] + t + source[end:]  # noqa: E731
            found.setdefault(start, []).append(change)

    for match in OPERATOR.finditer(blank):
        add(match, SWAPS[match[0]])
    for match in NUMBER.finditer(blank):
        add(match, str(int(match[0]) + 1), str(int(match[0]) - 1))
    for match in NEGATION.finditer(blank):
        add(match, "")
    for match in STATEMENT.finditer(blank):
        add(match, "")
    for match in ARGUMENTS.finditer(blank):
        if match[1] != match[2]:
            add(match, f"{match[2]}, {match[1]}")
    return found


def draw(patterns, mutants_of, choose):
    """Endless: (path, source, changed source), each place of each file at most once."""
    places = []
    for path in sorted({path for pattern in patterns for path in HERE.glob(pattern)}):
        source = path.read_text()
        for place, changes in sorted(mutants_of(source).items()):
            places.append((path.relative_to(HERE), source, place, changes))
    choose.shuffle(places)
    for path, source, _, changes in places:
        changed = choose.choice(changes)()
        if changed not in (None, source):
            yield path, source, changed


def shown(path, source, changed):
    before, after = source.splitlines(), changed.splitlines()
    first = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), 0)
    rest = next((i for i, (a, b) in enumerate(zip(before[::-1], after[::-1], strict=False))
                 if a != b), 0)  # fmt: skip
    lines = [f"  - {line.strip()}" for line in before[first : max(len(before) - rest, first + 1)]]
    lines += [f"  + {line.strip()}" for line in after[first : max(len(after) - rest, first)]]
    return "\n".join([f"{path}:{first + 1}", *lines])


def run(*command, **more):
    environment = {**os.environ, "PYTHONPATH": str(COPY), "PYTHONDONTWRITEBYTECODE": "1"}
    environment |= {"MY_OPS_WITH_CUDA": "0", "OMP_NUM_THREADS": "1"}
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=environment, start_new_session=True, **silent, **more) as it:
        try:
            return it.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            os.killpg(it.pid, 9)
            return -9


def build():
    return run(sys.executable, "setup.py", "-q", "build_ext", "--inplace", cwd=COPY) == 0


def tests_pass(names):
    files = [COPY / f"tests/test_{name}.py" for name in names]
    options = ["-c", COPY / "pyproject.toml", "--rootdir", COPY, "-p", "no:cacheprovider"]
    return run(sys.executable, "-m", "pytest", "-q", "-x", *options, *files, cwd=COPY.parent) == 0


def copy_tree():
    names = ["git", "-C", HERE, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(names, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (HERE / name).is_file():
            (COPY / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(HERE / name, COPY / name)
    if not build() or run(sys.executable, "setup.py", "-q", "egg_info", cwd=COPY) != 0:
        raise SystemExit("mutants: the tree itself does not build")
    if not tests_pass(sorted(set(" ".join(TESTS.values()).split()))):
        raise SystemExit("mutants: the tests fail before any change")


def trial(count, patterns, mutants_of, choose):
    """How many of ``count`` mutants are killed; those that do not compile are not mutants."""
    killed = tried = 0
    for path, source, changed in draw(patterns, mutants_of, choose):
        if tried == count:
            break
        (COPY / path).write_text(changed)
        if path.suffix == ".py" or build():
            tests = next(names for prefix, names in TESTS.items() if str(path).startswith(prefix))
            lives = tests_pass(tests.split())
            tried, killed = tried + 1, killed + (not lives)
            print("LIVES " if lives else "killed", shown(path, source, changed), flush=True)
        (COPY / path).write_text(source)
    return killed, tried


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", type=int, default=100, metavar="N")
    parser.add_argument("--cpp", type=int, default=40, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    copy_tree()
    for name, count, patterns, mutants_of in (
        ("Python", options.python, PYTHON, python_mutants),
        ("C++", options.cpp, CPP, cpp_mutants),
    ):
        killed, tried = trial(count, patterns, mutants_of, random.Random(options.seed))
        if tried:
            print(f"{name}: {killed} of {tried} killed, {killed / tried:.0%}, seed {options.seed}")


if __name__ == "__main__":
    main()
