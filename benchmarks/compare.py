"""Compares every row of two results of bench.py, ours and the peers': python compare.py A B

If the peers of a row changed as much as ours, the machine was disturbed, or the library changed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

SECTIONS = ("elementwise", "gemm", "sweep", "lltm")


def rows(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    results = json.loads(path.read_text())
    return {(section, row["case"]): row for section in SECTIONS for row in results[section]}


def ratios(old: dict[str, Any], new: dict[str, Any]) -> dict[str, float]:
    """The new time divided by the old, for every column of times."""
    times = [name for name, value in old.items() if name.endswith(" us") and value]
    return {name: new[name] / old[name] for name in times if new.get(name)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--beyond", type=float, default=0, help="only rows changed by that share")
    options = parser.parse_args()
    before, after = rows(options.before), rows(options.after)
    found = {key: ratios(before[key], after[key]) for key in before if key in after}
    for section in SECTIONS:
        ours = sorted(found[key].pop("my_ops us") for key in found if key[0] == section)
        print(f"{section}: {len(ours)} rows, median {ours[len(ours) // 2]:.3f}")
        for key in found:
            change = after[key]["my_ops us"] / before[key]["my_ops us"]
            if key[0] != section or abs(change - 1) < options.beyond:
                continue
            peers = ", ".join(f"{name[:-3]} {ratio:.3f}" for name, ratio in found[key].items())
            print(f"  {change:.3f}  {key[1]}  ({peers})")


if __name__ == "__main__":
    main()
