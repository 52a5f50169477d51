"""Writes a new operator: python tools/new_op NAME, or a recurrent cell: --cell NAME

It writes the operator's files from a template beside it, and its lines in the files that name
every op, as in the steps of CONTRIBUTING.md. At first NAME(x) is x * x, and a cell has three gates.
Both are complete and tested, for CPU and CUDA, with two gradients; then you edit them.
Needs: pip install copier clang-format ruff
"""

from __future__ import annotations

import argparse
import ast
import builtins
import importlib.util
import keyword
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import copier

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools/build"))
import preflight  # noqa: E402

TEMPLATE = Path(__file__).resolve().parent
C_HEADERS = {"cerrno", "cassert", "cmath", "csignal", "cstdarg", "cstddef", "cstdio", "ctime"}
MAX_NAME = 32  # comments of the templates leave room for this length
END_OF_SCHEMAS = "}\n\nSTABLE_TORCH_LIBRARY_IMPL(my_ops, CompositeExplicitAutograd, m)"
FROM_LLTM = "from my_ops.recurrent.lltm import"


@dataclass(frozen=True)
class Kind:
    """What can be written: the files from the template of this name, and lines in other files."""

    name: str
    ops: str  # a pattern for the names of its ops in C++
    # For each file, pairs of a text and the line to put before it, or at the end if the text is
    # empty. ruff sorts the lines.
    edits: dict[str, list[tuple[str, str]]]
    next: str  # printed at the end


OP = Kind(
    name="op",
    ops="{name}(_backward)?",
    edits={
        "csrc/bindings.cpp": [
            (
                END_OF_SCHEMAS,
                '  m.def("{name}(Tensor x) -> Tensor");\n'
                '  m.def("{name}_backward(Tensor grad, Tensor x) -> Tensor");\n',
            ),
        ],
        "my_ops/__init__.py": [
            (")\nfrom my_ops.recurrent", "    {name},\n"),
            ("]\n\n\ndef get_include", '    "{name}",\n'),
        ],
        "my_ops/ops/__init__.py": [("", "from my_ops.ops.{name} import {name} as {name}\n")],
        "my_ops/ops/_common.py": [
            ("]\nUNARY_BACKWARD = [", '    "{name}",\n'),
            ("]\n\n\n# Called before a fake kernel", '    "{name}_backward",\n'),
        ],
        "my_ops/reference.py": [("", "\n\ndef {name}(x: Tensor) -> Tensor:\n    return x * x\n")],
        "tests/samples.py": [("]\n\n\ndef named", '    _op("{name}", _unary),\n')],
        "docs/reference.md": [
            ("<!-- end -->\n\n<!-- reference my_ops.nn", "- `{name}`: `x * x`\n")
        ],
    },
    next="""\
Next, put your formula into my_ops/reference.py, into the kernels, and into the gradients and the
docstring in my_ops/ops/{name}.py, and its derivative into exact_slope in tests/ops/test_{name}.py.
Then build, and run pytest -k {name}. If the formula rounds more often than x * x, raise LIMIT in
that test file, as the comment there says.
If it takes other arguments than one tensor x, also change the schemas in csrc/bindings.cpp and the
call in tests/samples.py. Then it needs its own rules in my_ops/_vmap.py and my_ops/distributed.py
instead of the two names in my_ops/ops/_common.py.
Not written: rows in benchmarks/bench.py and tools/docs/measured.py, a line in CHANGELOG.md.""",
)

# Arguments of the ops of a step and of all steps.
PARAMETERS = "Tensor weight_ih, Tensor weight_hh, Tensor? bias_ih{none}, Tensor? bias_hh{none}"
STEP = f"Tensor input, {PARAMETERS.format(none='')}, Tensor old_h, Tensor old_cell"
OF_ROWS = "Tensor? lengths=None, Tensor? reset=None, Tensor? zoneout=None"
LAYER = f"Tensor input, Tensor h0, Tensor c0, {PARAMETERS.format(none='=None')}, {OF_ROWS}"
SCHEMAS = [
    f"{{name}}_cell({STEP}) -> (Tensor new_h, Tensor new_cell)",
    f"{{name}}_cell_forward({STEP}) -> (Tensor new_h, Tensor new_cell, Tensor gates)",
    "{name}_cell_backward(Tensor? grad_h, Tensor? grad_cell, Tensor gates, Tensor old_cell) -> "
    "(Tensor grad_gates, Tensor grad_old_cell)",
    f"{{name}}({LAYER}) -> (Tensor output, Tensor h_n, Tensor c_n)",
    f"{{name}}_forward({LAYER}) -> (Tensor output, Tensor h_n, Tensor c_n, Tensor gates, "
    "Tensor cells)",
    "{name}_backward(Tensor? grad_output, Tensor? grad_h_n, Tensor? grad_c_n, Tensor gates, "
    f"Tensor cells, Tensor c0, Tensor weight_hh, {OF_ROWS}) -> "
    "(Tensor grad_gates, Tensor grad_h0, Tensor grad_c0)",
]

CELL = Kind(
    name="cell",
    ops="{name}(_cell)?(_forward|_backward)?",
    edits={
        "csrc/bindings.cpp": [(END_OF_SCHEMAS, "".join(f'  m.def("{s}");\n' for s in SCHEMAS))],
        "my_ops/__init__.py": [
            (FROM_LLTM, "from my_ops.recurrent.{name} import {name}, {name}_cell\n"),
            ("]\n\n\ndef get_include", '    "{name}",\n    "{name}_cell",\n'),
        ],
        "my_ops/nn/__init__.py": [
            (FROM_LLTM, "from my_ops.recurrent.{name} import {class_}, {class_}Cell\n"),
            ('    "LLTM",', '    "{class_}",\n    "{class_}Cell",\n'),
        ],
        "my_ops/reference.py": [
            (
                "",
                """

def {name}_cell(
    input: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None,
    bias_hh: Tensor | None,
    old_h: Tensor,
    old_cell: Tensor,
) -> tuple[Tensor, Tensor]:
    gates = F.linear(input, weight_ih, bias_ih) + F.linear(old_h, weight_hh, bias_hh)
    f, g, o = gates.chunk(3, dim=1)
    new_cell = torch.sigmoid(f) * old_cell + (1 - torch.sigmoid(f)) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(new_cell), new_cell


def {name}(
    input: Tensor,
    h0: Tensor,
    c0: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None = None,
    bias_hh: Tensor | None = None,
    lengths: Tensor | None = None,
    reset: Tensor | None = None,
    zoneout: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    def step(x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        return {name}_cell(x, weight_ih, weight_hh, bias_ih, bias_hh, h, c)

    output, (h_n, c_n) = _over_time(step, input, (h0, c0), lengths, reset, zoneout)
    return output, h_n, c_n
""",
            )
        ],
        "tests/layers/test_reset.py": [
            ("}\nLIMIT = ", '    "{name}": my_ops.nn.{class_},\n'),
        ],
        "docs/reference.md": [
            (
                "<!-- end -->\n\n## Layers",
                "- `{name}_cell`: one step of {class_}\n- `{name}`: all steps of {class_}\n",
            ),
            (
                "- `Linear`: a layer",
                "- `{class_}`: a layer of {class_}\n- `{class_}Cell`: one step of it\n",
            ),
        ],
    },
    next="""\
Next, put your formula into my_ops/reference.py, kernels/recurrent/cells/{name}.h and
my_ops/recurrent/{name}.py, and a step of it into test_one_step_by_hand in
tests/layers/test_{name}.py.
Then build, and run pytest tests/layers/test_{name}.py, then pytest -k {name}.
If the cell carries no c, or reads more in backward, also change the schemas in csrc/bindings.cpp;
GRU's are an example. With another number of gates, also change the rest of
tests/layers/test_{name}.py.
Not written: functions in my_ops/include/my_ops/ops.h, rows in benchmarks and
tools/docs/measured.py, a line in CHANGELOG.md.""",
)


def program(name: str) -> str:
    """The program from this Python's environment, or from PATH."""
    folders = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    path = shutil.which(name, path=os.pathsep.join(folders))
    if path is None:
        raise SystemExit(f"new_op: {name} is missing: pip install {name}")
    return path


def check_name(name: str, kind: Kind) -> None:
    """Raises an error if Python, C++ or this package uses the name already."""
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or len(name) > MAX_NAME:
        rule = f"lower-case words joined by _, of at most {MAX_NAME} letters"
        raise SystemExit(f"new_op: NAME must be {rule}, got {name!r}")
    check_python(name, kind)
    check_cxx(name)
    ops = kind.ops.format(name=name)
    word, schema = rf"\b_?{ops}\b", rf'"{ops}[.(]'
    taken = [
        ("my_ops/__init__.py", word),
        ("csrc/bindings.cpp", schema),
        ("csrc/binding*.h", word),
        ("kernels/common/*", word),
        (f"tools/new_op/{kind.name}/**/*.jinja", word),
    ]
    if kind is CELL:
        classes = rf"\b{class_name(name)}(Cell)?\b"
        places = ("my_ops/nn/__init__.py", "csrc/*.h", "include/*.h", "kernels/*/**/*.*")
        taken += [(place, classes) for place in places]
    for place, pattern in taken:
        for file in sorted(ROOT.glob(place)):
            if re.search(pattern, file.read_text()):
                where = file.relative_to(ROOT)
                raise SystemExit(f"new_op: NAME must be new, and {where} has a {name!r} already")


def check_python(name: str, kind: Kind) -> None:
    if keyword.iskeyword(name):
        raise SystemExit(f"new_op: NAME must be no word of Python, got {name!r}")
    names = [name, *([class_name(name), f"{class_name(name)}Cell"] if kind is CELL else [])]
    for own in names:
        if hasattr(builtins, own):
            raise SystemExit(f"new_op: NAME must be no name that Python has: {own!r} is a builtin")
    if name in names_of_module("my_ops/reference.py"):
        where = "my_ops/reference.py"
        raise SystemExit(f"new_op: NAME must be new, and {where} has a {name!r} already")
    for place in (f"my_ops/{name}", f"my_ops/{name}.py", f"kernels/{name}"):
        if (ROOT / place).exists():
            raise SystemExit(f"new_op: NAME must be new, and there is {place}")


def names_of_module(path: str) -> set[str]:
    """What a module defines and imports."""
    names = set()
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


# Of the compiler: NAME.h would be found in place of a header, or NAME is a macro.
PROBE = """
#if __has_include(<{name}.h>)
#error header
#endif
{includes}
#ifdef {name}
#error macro
#endif
"""


def check_cxx(name: str) -> None:
    """Asks the compiler, with the headers of the system, and of torch and CUDA where they are."""
    try:
        compiler = preflight.cxx_compiler()
    except preflight.Unfit as error:
        raise SystemExit(f"new_op: {error}") from None
    folders = [
        home / "include" for home in preflight.toolkit_folders() if preflight.is_toolkit(home)
    ]
    if spec := importlib.util.find_spec("torch"):
        folders.append(Path(spec.origin).parent / "include")
    sources = [
        file for place in ("csrc", "include", "kernels") for file in (ROOT / place).rglob("*.*")
    ]
    headers = {h for file in sources for h in re.findall(r"#include <(\w+)>", file.read_text())}
    includes = "\n".join(f"#include <{header}>" for header in sorted(headers | C_HEADERS))

    def run(source: str, option: str) -> subprocess.CompletedProcess[str]:
        options = ["-std=c++20", "-x", "c++", option, *(f"-I{folder}" for folder in folders), "-"]
        return subprocess.run(
            [compiler, *options], input=source, capture_output=True, text=True, check=False
        )

    if run(f"int {name};", "-fsyntax-only").returncode:
        raise SystemExit(f"new_op: NAME must be no word of C++, got {name!r}")
    probed = run(PROBE.format(name=name, includes=includes), "-E")
    if found := re.search("#error (header|macro)", probed.stderr):
        what = f"a header {name}.h" if found[1] == "header" else f"a macro {name}"
        raise SystemExit(f"new_op: NAME must be no name that C++ has: there is {what}")
    if probed.returncode:
        raise SystemExit(f"new_op: {compiler} fails: {preflight.first_error(probed.stderr)}")


def class_name(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def edited(name: str, kind: Kind) -> dict[str, str]:
    texts = {}
    for path, edits in kind.edits.items():
        text = (ROOT / path).read_text()
        for before, line in edits:
            if before and text.count(before) != 1:
                raise SystemExit(f"new_op: {path} must have {before!r} once: correct its edit")
            at = text.index(before) if before else len(text)
            text = text[:at] + line.format(name=name, class_=class_name(name)) + text[at:]
        texts[path] = text
    return texts


def rendered(name: str, kind: Kind) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        data = {"name": name, "class": class_name(name), "kind": kind.name}
        copier.run_copy(str(TEMPLATE), folder, data=data, quiet=True)
        files = sorted(file for file in Path(folder).rglob("*") if file.is_file())
        return {str(file.relative_to(folder)): file.read_text() for file in files}


def main() -> None:
    parser = argparse.ArgumentParser("new_op", description=__doc__.split("\n", 1)[0])
    parser.add_argument("name", metavar="NAME", help="in lower_case: my_ops.NAME")
    parser.add_argument("--cell", action="store_true", help="a recurrent cell")
    arguments = parser.parse_args()
    name, kind = arguments.name, CELL if arguments.cell else OP
    check_name(name, kind)
    clang_format, ruff = program("clang-format"), program("ruff")
    new, changed = rendered(name, kind), edited(name, kind)
    for path in new:
        if (ROOT / path).exists():
            raise SystemExit(f"new_op: NAME must be new, and there is a file {path}")
    for path, text in {**new, **changed}.items():
        (ROOT / path).parent.mkdir(exist_ok=True)
        (ROOT / path).write_text(text)
    paths = [*new, *changed]
    python = [path for path in paths if path.endswith(".py")]
    cxx = [path for path in paths if path.endswith((".h", ".cpp", ".cu"))]
    for command in (
        [clang_format, "-i", *cxx],
        [ruff, "check", "-q", "--fix", "--select=I,RUF022", *python],
        [ruff, "format", "-q", *python],
    ):
        subprocess.run(command, cwd=ROOT, check=True)
    print(*(f"wrote {path}" for path in new), *(f"edited {path}" for path in changed), sep="\n")
    print(kind.next.format(name=name))


if __name__ == "__main__":
    main()
