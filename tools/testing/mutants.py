"""Does the test suite notice a mistake? Makes random ones, one at a time, and runs the tests.

    python tools/testing/mutants.py --python 100 --cpp 40 --seed 7 --since v0.1.0

Mutants of Python are those of cosmic-ray, statements left out, tests negated or without one of
their conditions, other defaults of parameters, and calls without an optional argument. Mutants of
C++ change a line's operator, comparison, constant, condition, statement or order of arguments.
Lines that changed since a commit, or the last release, come first. Each mutant is made in a copy of
this tree in build/mutants, and compiled for the CPU. The tests that run its line are run, and then
those of its file. Survivors are printed: a test is missing, or the code has no effect. Needs what
the tests need, and cosmic-ray and coverage.
"""

import argparse
import ast
import contextlib
import hashlib
import itertools
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import parso.python.tree as tree
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator, operator_names

HERE = Path(__file__).resolve().parents[2]
COPY = HERE / "build/mutants"
FOUND = HERE / "build/mutants.json"  # written by watch_tests.py
LOG = HERE / "build/mutants.log"
ENVIRONMENT = os.environ | {
    "PYTHONPATH": f"{COPY}{os.pathsep}{COPY / 'tools/testing'}",
    "PYTHONDONTWRITEBYTECODE": "1",
    "MY_OPS_WITH_CUDA": "0",
    "OMP_NUM_THREADS": "1",
    "WATCH_TESTS": str(FOUND),
    "WATCH_SOURCE": str(COPY / "my_ops"),
}

EVERY_OP = "registration autograd compile vmap storage array_bounds"
ELEMENTWISE = f"elementwise memory c_api integration bounds faults {EVERY_OP}"
GEMM = "error_classes gemm gemm_options gemm_mixed gemm_half gemm_narrow gemm_short gemm_tf32"
GEMM += " gemm_accuracy linear bounds weight_gradients torchs_products integration autocast nn"
GEMM += f" {EVERY_OP}"
LLTM = f"error_classes lltm memory lltm_layer autocast integration bounds {EVERY_OP}"
OF_TORCH = f"recurrent torch_layers torch_layer_tools zoneout autocast {EVERY_OP}"
LAYERS = "error_classes nn nn_tools lltm_layer lltm_regularisers overrides autocast integration"
PLAIN = "plain plain_errors plain_in_cpp plain_calls"
OWN_CELL = "own_cell_definition own_cell heads heads_ops own_cell_cpu own_cell_nvrtc"
OWN_CELL += " own_cell_kernels own_cell_built"
OF_OWN_CELLS = (
    "_block_cells",
    "_carried",
    "_derived",
    "_expressions",
    "_header",
    "_heads",
    "_nvrtc",
    "_own_",
    "_trace",
    "own_cell",
)
TESTS = {  # the first prefix that fits counts
    "my_ops/__main__": "report run tune",
    "my_ops/__init__": "package private_names report fast_fp32 typing",
    "my_ops/_autocast": "autocast lltm_layer nn",
    "my_ops/_cache": f"gemm_costs {OWN_CELL}",
    "my_ops/_convert": "convert convert_cudnn",
    "my_ops/_errors": "memory fake_kernels",
    "my_ops/_explain": "explain",
    "my_ops/_fast_fp32": "fast_fp32",
    "my_ops/_fit": "tune",
    "my_ops/_flops": "integration",
    "my_ops/_gemm_costs": "gemm_costs tune explain",
    "my_ops/_inductor": "inductor registration",
    "my_ops/_install_hint": "report",
    "my_ops/_library": "private_names registration package",
    "my_ops/_run": "run",
    "my_ops/_plain": PLAIN,
    "my_ops/_private": "private_names autograd registration distributed",
    "my_ops/_tuned": "gemm_costs tune",
    "my_ops/_tune": "tune",
    "my_ops/_vmap": "vmap lltm_layer autocast",
    "my_ops/build": "build own_cell_built",
    "my_ops/distributed": "distributed train_distributed",
    "my_ops/nn": LAYERS,
    "my_ops/ops/_": "fake_kernels elementwise gemm lltm registration",
    "my_ops/ops/attention": f"attention fake_kernels {EVERY_OP}",
    "my_ops/ops/elementwise": f"{ELEMENTWISE} fake_kernels overrides",
    "my_ops/ops/gemm": f"{GEMM} fake_kernels overrides",
    "my_ops/ops/linear": f"{GEMM} fake_kernels overrides",
    **{f"my_ops/recurrent/{name}": OWN_CELL for name in OF_OWN_CELLS},
    "my_ops/recurrent/_calls": f"{LAYERS} torch_layers torch_layer_tools reset",
    "my_ops/recurrent/_torchs_calls": "convert_cudnn convert",
    "my_ops/recurrent/_layers": LAYERS,
    "my_ops/recurrent/_plain": PLAIN,
    "my_ops/recurrent/_terms": f"cells {OWN_CELL} lltm recurrent",
    "my_ops/recurrent/_torch_layers": "torch_layers torch_layer_tools nn reset heads",
    "my_ops/recurrent/_vmap": "vmap lltm_layer autocast reset",
    "my_ops/recurrent/_weights_backward": "weights_backward torch_layer_tools",
    "my_ops/recurrent/lstm": f"{OF_TORCH} fake_kernels overrides",
    "my_ops/recurrent/gru": f"{OF_TORCH} fake_kernels overrides",
    "my_ops/recurrent/rnn": f"rnn {OF_TORCH} overrides convert heads nn",
    "my_ops/recurrent": f"{LLTM} fake_kernels overrides {OF_TORCH} reset cells",
    "my_ops/reference": "gemm lltm recurrent elementwise",
    "my_ops": f"fake_kernels {ELEMENTWISE} gemm gemm_options lltm lltm_layer private_names",
    "csrc/calls": f"{PLAIN} {ELEMENTWISE}",
    "csrc/elementwise": f"{ELEMENTWISE} fake_kernels cpp",
    "csrc/gemm_costs": "gemm_costs tune",
    "csrc/gemm": f"{GEMM} fake_kernels cpp",
    "csrc/lltm": f"{LLTM} fake_kernels cpp",
    "csrc/lstm": f"{OF_TORCH} fake_kernels",
    "csrc/gru": f"{OF_TORCH} fake_kernels",
    "csrc/recurrent": f"{LLTM} fake_kernels cpp recurrent reset weights_backward zoneout",
    "csrc/own_cell": OWN_CELL,
    "csrc/c_api": "c_api explain",
    "csrc/fast_fp32": "fast_fp32",
    "csrc/overrides": "fast_fp32",
    "csrc": f"fake_kernels {ELEMENTWISE} gemm lltm lltm_layer cpp",
    "kernels/common": f"numeric_cpu {ELEMENTWISE} gemm lltm own_cell_cpu",
    "kernels/elementwise": ELEMENTWISE,
    "kernels/recurrent": f"{LLTM} recurrent reset recurrent_kernels own_cell_cpu",
    "kernels": f"{ELEMENTWISE} lltm",
}
PYTHON = ["my_ops/*.py", "my_ops/*/*.py"]
CPP = ["csrc/binding.h", "csrc/binding_cpu.h", "csrc/bindings.cpp", "csrc/c_api.cpp"]
CPP += ["csrc/*_checks.h", "csrc/*_layout.h", "csrc/*_cpu.cpp", "csrc/recurrent_cpu.h"]
CPP += ["csrc/recurrent_*s.h", "csrc/recurrent_ragged.h", "kernels/**/*_cpu.cpp"]
CPP += ["csrc/gemm_costs.cpp", "csrc/fast_fp32.h", "csrc/overrides/*.cpp"]  # compiled by a test
CPP += ["kernels/**/*_cpu.h", "kernels/recurrent/cpu/[esw]*.h", "kernels/recurrent/cells/[lg]*.h"]


class LeaveOut(Operator):
    """Replaces a one-line statement by ``pass``."""

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


ALIAS = re.compile(r"[A-Z][a-z]+ = \w+\[")  # a type, used only in annotations


def ignored(source):
    """Lines and columns of code that is never evaluated or makes no difference."""
    for node in ast.walk(ast.parse(source)):
        parts = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        if isinstance(node, ast.Assign) and ALIAS.match(ast.unparse(node)):
            parts.append(node)
        for decorator in getattr(node, "decorator_list", []):
            if isinstance(decorator, ast.Name) and decorator.id == "staticmethod":
                parts.append(decorator)  # read from a class, it is a function anyway
        for part in filter(None, parts):
            start = part.lineno, part.col_offset - (part in getattr(node, "decorator_list", []))
            yield start, (part.end_lineno, part.end_col_offset)


def decisions(source):
    """Changes of conditions, defaults and calls: which part, in which node, and what that becomes.
    Of a call's arguments only the last and those with a name are optional."""
    module = ast.parse(source)
    skipped = {
        part for node in ast.walk(module) if isinstance(node, ast.JoinedStr)
        for part in ast.walk(node)
    }  # fmt: skip
    for node in ast.walk(module):
        if node in skipped:  # before Python 3.12 these have no exact position
            continue
        tests = getattr(node, "ifs", [])
        if isinstance(node, (ast.If, ast.IfExp, ast.While, ast.Assert)):
            tests = [node.test]
        for test in tests:
            yield test, test, f"(not ({ast.unparse(test)}))"
        if isinstance(node, ast.BoolOp):
            for part in node.values:
                others = [value for value in node.values if value is not part]
                kept = others[0] if len(others) == 1 else ast.BoolOp(node.op, others)
                yield part, node, f"({ast.unparse(kept)})"
        if isinstance(node, ast.arguments):
            for default in filter(None, [*node.defaults, *node.kw_defaults]):
                yield default, default, "0" if ast.unparse(default) == "None" else "None"
        if isinstance(node, ast.Call) and len(node.args) + len(node.keywords) > 1:
            for part in [*node.args[-1:], *node.keywords]:
                args = [value for value in node.args if value is not part]
                keywords = [value for value in node.keywords if value is not part]
                yield part, node, ast.unparse(ast.Call(node.func, args, keywords))


def of_decisions(source):
    """Positions and functions that return the changed source."""
    text = source.encode()
    lines = [0, *itertools.accumulate(len(line) for line in text.splitlines(keepends=True))]
    for part, node, new in decisions(source):
        start = lines[node.lineno - 1] + node.col_offset
        end = lines[node.end_lineno - 1] + node.end_col_offset
        change = lambda a=start, b=end, n=new: (text[:a] + n.encode() + text[b:]).decode()  # noqa: E731
        yield (part.lineno, part.col_offset), change


def python_mutants(source):
    """By position: functions that return the changed source."""
    operators = [LeaveOut()]
    operators += [o() for o in map(get_operator, operator_names()) if not o.arguments()]
    found, without = {}, list(ignored(source))
    nodes = list(ast_nodes(get_ast(source)))
    changes = list(of_decisions(source))
    for operator in operators:
        positions = [start for node in nodes for start, _ in operator.mutation_positions(node)]
        for occurrence, place in enumerate(positions):
            change = lambda o=operator, n=occurrence: mutate_code(source, o, n)  # noqa: E731
            changes.append((place, change))
    for place, change in changes:
        if not any(start <= place < end for start, end in without):
            found.setdefault(place, []).append(change)
    return found


SWAPS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "+": "-", "-": "+"}
SWAPS |= {"*": "/", "/": "*", "%": "*", "&&": "||", "||": "&&", "+=": "-=", "-=": "+=", "&": "|"}
SWAPS |= {"true": "false", "false": "true", "min": "max", "max": "min", "any_of": "all_of"}
NOT_CODE = re.compile(r'//[^\n]*|"(?:\\.|[^"\\\n])*"|^[ \t]*#[^\n]*', re.M)
# Code that is not compiled for the CPU, and how threads share work, which only changes the time.
NO_EFFECT = re.compile(r"^[^\n]*(?:cuda::|kCosts\.(?:grain|cache)|_a_thread)[^\n]*", re.M)
OPERATOR = re.compile(r"(?<= )([<>=!]=|[<>+*/%&-]|&&|\|\||[+-]=)(?= )|\b(true|false|min|max)\b")
# Left out with its operator, between spaces or brackets: the condition before or after it.
BEFORE = re.compile(r"(?<=[(,] )[^&|(),;{}]+ (?:&&|\|\|) |(?<=\()[^&|(),;{}]+ (?:&&|\|\|) ")
AFTER = re.compile(r" (?:&&|\|\|) [^&|(),;{}]+(?=[);])")
TEST = re.compile(r"(?<=\bif \()[^;{}]+?(?=\) (?:return|break|continue|throw|\{))")
NUMBER = re.compile(r"(?<![\w.])\d+(?![\w.])")
NEGATION = re.compile(r"!(?=[\w(])")
STATEMENT = re.compile(r"(?<=[;{}]\n)[ ]+(?!return|using|const|static|template|typedef|break)"
                       r"[\w:.>-]+(?:<[\w, ]+>)?(?:\(| [-+*/]?= )[^;{}]*;")  # fmt: skip
ARGUMENTS = re.compile(r"(?<=\()([\w.*]+), ([\w.*]+)(?=[,)])")


def cpp_mutants(source):
    blank, found = source, {}
    for pattern in (NOT_CODE, NO_EFFECT):
        blank = pattern.sub(lambda m: " " * len(m[0]), blank)

    def add(match, *texts):
        start, end = match.span()
        for text in texts:
            change = lambda t=text: source[:start] + t + source[end:]  # noqa: E731
            line = source.count("\n", 0, start) + 1
            found.setdefault((line, start), []).append(change)

    for match in OPERATOR.finditer(blank):
        add(match, SWAPS[match[0]])
    for match in NUMBER.finditer(blank):
        add(match, str(int(match[0]) + 1), str(int(match[0]) - 1))
    for match in TEST.finditer(blank):
        add(match, f"!({match[0]})")
    for pattern in (NEGATION, STATEMENT, BEFORE, AFTER):
        for match in pattern.finditer(blank):
            add(match, "")
    for match in ARGUMENTS.finditer(blank):
        if match[1] != match[2]:
            add(match, f"{match[2]}, {match[1]}")
    return found


def git(*arguments):
    done = subprocess.run(["git", "-C", HERE, *arguments], capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else ""


HUNK = re.compile(r"^(?:\+\+\+ b/(.+)|@@ \S+ \+(\d+)(?:,(\d+))? @@.*)$", re.M)


def changed_lines(since):
    """By path: the lines that differ from this commit's."""
    found, path = {}, None
    for name, first, count in HUNK.findall(git("diff", "-U0", "-M", since)):
        path = name or path
        if first:
            found.setdefault(path, set()).update(range(int(first), int(first) + int(count or 1)))
    return found


def draw(patterns, mutants_of, choose, first):
    """Yields (path, source, changed source) without end; each position in each file at most once,
    those in the lines ``first`` before others."""
    places = []
    for path in sorted({path for pattern in patterns for path in HERE.glob(pattern)}):
        source = path.read_text()
        for place, changes in sorted(mutants_of(source).items()):
            places.append((path.relative_to(HERE), source, place, changes))
    choose.shuffle(places)
    places.sort(key=lambda of: of[2][0] not in first.get(str(of[0]), ()))
    for path, source, _, changes in places:
        changed = choose.choice(changes)()
        if changed not in (None, source):
            yield path, source, changed


def first_change(source, changed):
    lines = zip(source.splitlines(), changed.splitlines(), strict=False)
    return next((i for i, (a, b) in enumerate(lines) if a != b), 0)


def shown(path, source, changed):
    before, after = source.splitlines(), changed.splitlines()
    first = first_change(source, changed)
    rest = next((i for i, (a, b) in enumerate(zip(before[::-1], after[::-1], strict=False))
                 if a != b), 0)  # fmt: skip
    lines = [f"  - {line.strip()}" for line in before[first : max(len(before) - rest, first + 1)]]
    lines += [f"  + {line.strip()}" for line in after[first : max(len(after) - rest, first)]]
    return "\n".join([f"{path}:{first + 1}", *lines])


def run(*command, cwd=COPY, seconds=3600.0):
    """Whether the command succeeds within this processor time, or on a busy machine within ten
    times as much wall-clock time. Processes that it leaves are ended, and its output is in LOG."""
    limit = math.ceil(seconds)
    with LOG.open("a") as log:
        child = subprocess.Popen(
            [sys.executable, *map(str, command)],
            cwd=cwd,
            env=ENVIRONMENT,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (limit, limit)),
        )
    try:
        return child.wait(10 * limit) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def build():
    return run("setup.py", "-q", "build_ext", "--inplace")


def tests_pass(tests, *options, **limit):
    ids = COPY.parent / "mutants.txt"
    ids.write_text("".join(f"{COPY / test}\n" for test in tests))
    options = ["-q", "-c", COPY / "pyproject.toml", "--rootdir", COPY, *options, f"@{ids}"]
    return run("-m", "pytest", "-p", "no:cacheprovider", *options, cwd=COPY.parent, **limit)


def copy_tree():
    """Copies the files that git tracks or does not ignore. Returns what is known about the tests
    for this state of the tree, or None, and a hash of the state."""
    names = ["git", "-C", HERE, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(names, capture_output=True, text=True, check=True).stdout
    files = sorted(name for name in set(listed.split("\0")) if (HERE / name).is_file())
    contents = {name: (HERE / name).read_bytes() for name in files}
    state = hashlib.sha256(repr(contents).encode()).hexdigest()
    watched = json.loads(FOUND.read_text()) if FOUND.exists() else {}
    if watched.get("state") != state:
        watched = None
        shutil.rmtree(COPY, ignore_errors=True)
    for name, content in contents.items():
        copy = COPY / name
        if not copy.is_file() or copy.read_bytes() != content:  # otherwise its build is current
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(content)
    return watched, state


def test_files(names):
    return [
        str(path.relative_to(HERE))
        for name in names
        for path in HERE.glob(f"tests/*/test_{name}.py")
    ]


def watch_tests():
    """Returns the time and the lines of each test of a copy of the tree, if it builds and all tests
    pass."""
    watched, state = copy_tree()
    if not (build() and run("setup.py", "-q", "egg_info")):
        raise SystemExit(f"mutants: the tree itself does not build: see {LOG}")
    if watched is None:
        print("Running the tests, watched", flush=True)
        files = test_files(sorted(set(" ".join(TESTS.values()).split())))
        if not tests_pass(files, "-p", "watch_tests"):
            raise SystemExit(f"mutants: before any change tests fail: see {LOG}")
        watched = json.loads(FOUND.read_text()) | {"state": state}
        FOUND.write_text(json.dumps(watched))
    return watched


def statement(source, line):
    """The first and last line of the innermost statement there; for a compound one, of its
    header."""
    found = line, line
    for node in ast.walk(ast.parse(source)):  # outer ones first
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            last = max(body[0].lineno - 1, node.lineno) if body else node.end_lineno
            if node.lineno <= line <= last:
                found = node.lineno, last
    return found


def tests_of(path, source, line, watched):
    """The tests that run the line, and the others of its file; in each group, fast files first."""
    prefix = next(prefix for prefix in TESTS if str(path).startswith(prefix))
    files = test_files(TESTS[prefix].split())
    running, seconds = set(), watched["seconds"]
    if path.suffix == ".py":
        first, last = statement(source, line)
        for number, tests in watched["lines"].get(str(COPY / path), {}).items():
            if first <= int(number) <= last:
                running.update(tests)
    of_file = {True: {}, False: {}}
    for test in seconds:
        file = test.split("::")[0]
        if test in running or file in files:
            of_file[test in running].setdefault(file, []).append(test)
    for groups in of_file.values():
        by_time = sorted(groups.values(), key=lambda tests: sum(seconds[t] for t in tests))
        yield [test for tests in by_time for test in tests]


def lives(groups, watched):
    for tests in groups:
        seconds = 60 + 5 * sum(watched["seconds"][test] for test in tests)
        if tests and not tests_pass(tests, "-x", seconds=seconds):
            return False
    return True


def trial(count, patterns, mutants_of, choose, watched, first):
    """How many of ``count`` mutants are killed. Those that do not compile do not count."""
    killed = tried = 0
    drawn = draw(patterns, mutants_of, choose, first)
    # Sorted by file, so that what a change in a header recompiles is compiled once.
    while batch := sorted(itertools.islice(drawn, count - tried)):
        for path, source, changed in batch:
            began = time.perf_counter()
            (COPY / path).write_text(changed)
            if path.suffix == ".py" or build():
                line = first_change(source, changed) + 1
                alive = lives(tests_of(path, source, line, watched), watched)
                tried, killed = tried + 1, killed + (not alive)
                took = f"{time.perf_counter() - began:.0f} s"
                said = "LIVES " if alive else "killed"
                print(tried, said, took, shown(path, source, changed), flush=True)
            (COPY / path).write_text(source)
    return killed, tried


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", type=int, default=100, metavar="N")
    parser.add_argument("--cpp", type=int, default=40, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    release = git("describe", "--tags", "--abbrev=0").strip()
    parser.add_argument("--since", default=release, metavar="COMMIT", help="the last release")
    options = parser.parse_args()
    LOG.parent.mkdir(exist_ok=True)
    LOG.unlink(missing_ok=True)
    watched = watch_tests()
    first = changed_lines(options.since) if options.since else {}
    for name, count, patterns, mutants_of in (
        ("Python", options.python, PYTHON, python_mutants),
        ("C++", options.cpp, CPP, cpp_mutants),
    ):
        choose = random.Random(options.seed)
        killed, tried = trial(count, patterns, mutants_of, choose, watched, first)
        if tried:
            share = f"{killed} of {tried} killed, {killed / tried:.0%}"
            print(f"{name}: {share}, seed {options.seed}", flush=True)


if __name__ == "__main__":
    main()
