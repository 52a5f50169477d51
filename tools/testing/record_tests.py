"""Records a run of the whole suite, or of a part, for the page on reliability:

    python tools/testing/record_tests.py benchmarks/results/tests-nvidia-h200.json JUNIT.xml ...

Must run with the Python and on the machine that ran the tests. Several files are the parts of one
run. A test that stands in two of them ran again, with fewer beside it: it counts as it ended then,
and is named. tools/docs/measured.py writes the table: all tests, and those of faults by name.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

FAULTS = ("test_faults", "test_a_refused_launch", "test_a_process_that_dies", "test_out_of_memory")


def outcome(case: ElementTree.Element) -> str:
    for kind in ("failure", "error", "skipped"):
        if case.find(kind) is not None:
            return "skipped" if kind == "skipped" else "failed"
    return "passed"


def recorded(junits: list[Path]) -> dict[str, Any]:
    """The counts of all tests, and of those of faults: by name, without parameters."""
    outcomes: dict[str, str] = {}
    again, seconds = [], 0.0
    for case in (case for path in junits for case in ElementTree.parse(path).iter("testcase")):
        name = f"{case.get('classname')}::{case.get('name')}"
        if name in outcomes:
            again.append(name)
        outcomes[name] = outcome(case)
        seconds += float(case.get("time", 0))
    total = Counter(outcomes.values())
    faults: dict[str, Counter[str]] = {}
    for name, found in outcomes.items():
        if found != "skipped" and any(fault in name for fault in FAULTS):
            of = name.split("[")[0].rpartition(".")[2]
            faults.setdefault(of, Counter())[found] += 1
    return {
        **{kind: total[kind] for kind in ("passed", "failed", "skipped")},
        "seconds in tests": round(seconds, 1),
        "names of failed": [name for name, found in outcomes.items() if found == "failed"],
        "ran again": again,
        "faults": [
            {"test": name, "passed": counts["passed"], "failed": counts["failed"]}
            for name, counts in sorted(faults.items())
        ],
    }


def main() -> None:
    import measure

    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    found = recorded([Path(name) for name in sys.argv[2:]])
    measure.save(Path(sys.argv[1]), found)
    print({key: value for key, value in found.items() if key != "faults"})


if __name__ == "__main__":
    main()
