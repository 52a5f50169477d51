"""Which share of lines and branches a run under coverage.py and gcov reached: of make coverage.

python tools/testing/line_coverage.py PYTHON.json OBJECTS OUTPUT.json

PYTHON.json is what `coverage json` wrote, OBJECTS the folder of the compiler's .gcno and .gcda. A
line or branch of a template counts as reached where one of its instantiations reached it. Branches
that only an exception takes are left out.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import measure  # noqa: E402

GROUPS = ["csrc", "include", "kernels/common", "kernels/elementwise", "kernels/fp32"]
GROUPS += ["kernels/gemm", "kernels/recurrent", "my_ops"]

Reached = dict[Any, bool]


def of_python(report: Path) -> dict[str, tuple[Reached, Reached]]:
    files = {}
    for name, found in json.loads(report.read_text())["files"].items():
        lines = dict.fromkeys(found["missing_lines"], False)
        branches = {tuple(pair): False for pair in found["missing_branches"]}
        lines |= dict.fromkeys(found["executed_lines"], True)
        branches |= {tuple(pair): True for pair in found["executed_branches"]}
        files[name[name.index("my_ops/") :]] = lines, branches
    return files


def of_cpp(objects: Path) -> dict[str, tuple[Reached, Reached]]:
    files: dict[str, tuple[Reached, Reached]] = defaultdict(lambda: ({}, {}))
    notes = sorted(objects.resolve().rglob("*.gcno"))
    gcov = ["gcov", "--json-format", "--stdout", "--branch-probabilities", *map(str, notes)]
    done = subprocess.run(gcov, capture_output=True, text=True, check=True, cwd=objects)
    for unit in done.stdout.splitlines():
        for file in json.loads(unit)["files"]:
            if not file["file"].startswith(("csrc/", "include/", "kernels/")):
                continue
            lines, branches = files[file["file"]]
            for line in file["lines"]:
                at = line["line_number"]
                lines[at] = lines.get(at, False) or line["count"] > 0
                kept = [branch for branch in line["branches"] if not branch["throw"]]
                for which, branch in enumerate(kept):
                    key = at, which
                    branches[key] = branches.get(key, False) or branch["count"] > 0
    return files


def main() -> None:
    report, objects, output = map(Path, sys.argv[1:])
    files = {**of_python(report), **of_cpp(objects)}
    groups = []
    for group in GROUPS:
        names = [name for name in files if name.startswith(f"{group}/")]
        row: dict[str, Any] = {"group": group, "files": len(names)}
        for kind, which in (("lines", 0), ("branches", 1)):
            reached = [hit for name in names for hit in files[name][which].values()]
            row[kind] = len(reached)
            row[f"{kind} reached"] = sum(reached)
        groups.append(row)
        print(*(f"{value:>8}" for value in row.values()))
    missed = {}
    for name, (lines, _) in sorted(files.items()):
        if missing := sorted(line for line, hit in lines.items() if not hit):
            missed[name] = ", ".join(map(str, missing))
    measure.save(output, {"coverage": groups, "lines not reached": missed})


if __name__ == "__main__":
    main()
