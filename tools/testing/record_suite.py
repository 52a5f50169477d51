"""Adds a run of the tests to the compatibility table: record_suite.py JUNIT.xml WHAT

Must run with the Python that ran the tests. A run replaces an earlier one with the same torch,
Python and processor. tools/docs/measured.py writes the table.
"""

from __future__ import annotations

import json
import platform
import sys
import sysconfig
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from packaging.version import Version

RUNS = Path(__file__).resolve().parents[2] / "benchmarks/results/compatibility.json"


def counts(junit: Path) -> dict[str, int]:
    suites = list(ElementTree.parse(junit).iter("testsuite"))
    tests, *other = (
        sum(int(suite.get(name, 0)) for suite in suites)
        for name in ("tests", "failures", "errors", "skipped")
    )
    failed = other[0] + other[1]
    return {"passed": tests - failed - other[2], "failed": failed}


def this_run(what: str) -> dict[str, Any]:
    import torch

    import my_ops

    free_threaded = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
    build = json.loads(Path(my_ops.__file__).with_name("_build.json").read_text())
    return {
        "processor": platform.machine(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": ".".join(platform.python_version_tuple()[:2]) + "t" * free_threaded,
        "commit": (build["commit"] or "unknown")[:7],
        "tests": what,
    }


def add(runs: list[dict[str, Any]], run: dict[str, Any]) -> list[dict[str, Any]]:
    def of(row: dict[str, Any]) -> tuple[bool, str, Version, int, str]:
        torch = Version(Version(row["torch"]).public)
        minor = int(row["python"].split(".")[1].rstrip("t"))
        return row["processor"] != "x86_64", row["processor"], torch, minor, row["python"]

    return sorted([*(row for row in runs if of(row) != of(run)), run], key=of)


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    run = {**this_run(sys.argv[2]), **counts(Path(sys.argv[1]))}
    runs = json.loads(RUNS.read_text()) if RUNS.exists() else []
    RUNS.write_text(json.dumps(add(runs, run), indent=1) + "\n")
    print(f"{RUNS.name}: {run}")


if __name__ == "__main__":
    main()
