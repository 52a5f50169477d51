"""Writes a new operator: python tools/new_op.py NAME

Its files, from the template in tools/new_op, and its lines in the files that name every op: the six
steps of CONTRIBUTING.md. NAME(x) is x * x at first: complete, for CPU and CUDA, differentiable
twice, tested. Then it is yours to edit. Needs: pip install copier clang-format ruff
"""

from __future__ import annotations

import argparse
import keyword
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import copier
from pygments.lexers.c_cpp import CppLexer
from pygments.token import Token

ROOT = Path(__file__).resolve().parents[1]
TEMPLATE = ROOT / "tools/new_op"
MAX_NAME = 32  # comments of the template leave room for as many
NEXT = """\
Next: put the formula of {name} into my_ops/reference.py, the kernels, the gradients of
my_ops/ops/{name}.py and the docstring; build; pytest -k {name}.
If its arguments become others than one tensor x: the schemas in csrc/bindings.cpp, the call in
tests/samples.py, and rules of its own in my_ops/_vmap.py and my_ops/distributed.py in place of the
two names in my_ops/ops/_common.py.
Left to you: rows in benchmarks/bench.py and README.md, a line in CHANGELOG.md."""

# Of each file: the text before which a line goes (none: at the end), and the line. ruff sorts.
EDITS = {
    "csrc/bindings.cpp": [
        (
            "}\n\nSTABLE_TORCH_LIBRARY_IMPL(my_ops, CompositeExplicitAutograd, m)",
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
        ("]\n\n\ndef check_tensor", '    "{name}_backward",\n'),
    ],
    "my_ops/reference.py": [("", "\n\ndef {name}(x: Tensor) -> Tensor:\n    return x * x\n")],
    "tests/samples.py": [("]\n\n\ndef named", '    _op("{name}", _unary),\n')],
    "docs/reference.md": [("]\n\n## Layers", ", {name}")],
}


def program(name: str) -> str:
    """Of this Python's environment, or of PATH."""
    folders = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    path = shutil.which(name, path=os.pathsep.join(folders))
    if path is None:
        raise SystemExit(f"new_op: {name} is missing: pip install {name}")
    return path


def check_name(name: str) -> None:
    """Python, C++ and this package leave it free."""
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or len(name) > MAX_NAME:
        rule = f"lower-case words joined by _, of at most {MAX_NAME} letters"
        raise SystemExit(f"new_op: NAME must be {rule}, got {name!r}")
    ((kind, _), *_) = CppLexer().get_tokens(name)
    if keyword.iskeyword(name) or kind not in Token.Name:
        raise SystemExit(f"new_op: NAME must be no word of Python or C++, got {name!r}")
    word, schema = rf"\b_?{name}(_backward)?\b", rf'"{name}(_backward)?[.(]'
    taken = {
        "my_ops/__init__.py": word,
        "my_ops/reference.py": rf"def {name}\(",
        "csrc/bindings.cpp": schema,
        "csrc/binding*.h": word,
        "kernels/common/*": word,
        "tools/new_op/template/**/*.jinja": word,
    }
    for place, pattern in taken.items():
        for file in sorted(ROOT.glob(place)):
            if re.search(pattern, file.read_text()):
                where = file.relative_to(ROOT)
                raise SystemExit(f"new_op: NAME must be new, and {where} has a {name!r} already")


def edited(name: str) -> dict[str, str]:
    texts = {}
    for path, edits in EDITS.items():
        text = (ROOT / path).read_text()
        for before, line in edits:
            if before and text.count(before) != 1:
                raise SystemExit(f"new_op: {path} must have {before!r} once: correct EDITS")
            at = text.index(before) if before else len(text)
            text = text[:at] + line.format(name=name) + text[at:]
        texts[path] = text
    return texts


def rendered(name: str) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        copier.run_copy(str(TEMPLATE), folder, data={"name": name}, quiet=True)
        files = sorted(file for file in Path(folder).rglob("*") if file.is_file())
        return {str(file.relative_to(folder)): file.read_text() for file in files}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("name", metavar="NAME", help="in lower_case: my_ops.NAME")
    name = parser.parse_args().name
    check_name(name)
    clang_format, ruff = program("clang-format"), program("ruff")
    new, changed = rendered(name), edited(name)
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
    print(NEXT.format(name=name))


if __name__ == "__main__":
    main()
