"""The tables of the page on reliability, for measured.py."""

import statistics
from pathlib import Path
from typing import Any

from tables import environment, loader, table

LAUNCHES = ["compiled", "launched"]


def place(results: dict[str, Any], device: str) -> str:
    return "CPU" if device == "cpu" else machine(results)


def machine(results: dict[str, Any]) -> str:
    return results["environment"].get("gpu", "CPU")


def record(results: dict[str, Any]) -> list[str]:
    return [results["environment"]["date"], results["environment"]["commit"][:7]]


def yes(value: bool) -> str:
    return "yes" if value else "no"


class Reliability:
    """Has one method for each NAME of the page. Tables without a file of results are empty."""

    def __init__(self, folder: Path) -> None:
        load = loader(folder)

        def of_each(what: str) -> list[dict[str, Any]]:
            return [load(path.stem) for path in sorted(folder.glob(f"{what}-*.json"))]

        self.reach = load("coverage")
        self.kernels = load("kernels-nvidia-h200")
        self.random, self.long = of_each("fuzz"), of_each("endurance")
        self.repeats, self.digests = of_each("repetitions"), of_each("digests")
        self.sanitized, self.tests = of_each("sanitizer"), of_each("tests")

    def random_calls(self) -> str:
        rows = []
        for run in self.random:
            for part in run["devices"]:
                beyond = len(part["products beyond their bound, torch's no nearer"])
                counts = [f"{part['calls']:,}", str(len(part["wrong"])), str(beyond)]
                took = [str(run["processes"]), f"{run['seconds']:.0f}", str(run["seed"])]
                rows.append([place(run, part["device"]), *counts, *took, *record(run)])
        head = ["on", "calls", "wrong", "beyond a bound, as torch's"]
        head += ["processes", "seconds", "first seed"]
        return table([*head, "date", "commit"], rows)

    def reached(self) -> str:
        rows = []
        for row in self.reach["coverage"]:
            shares = []
            for kind in ("lines", "branches"):
                share = row[f"{kind} reached"] / row[kind]
                shares.append(f"{100 * share:.1f} % of {row[kind]:,}")
            rows.append([f"`{row['group']}/`", str(row["files"]), *shares])
        return table(["folder", "files", "lines", "branches"], rows)

    def reached_environment(self) -> str:
        return environment(self.reach)

    def launched(self) -> str:
        found = self.kernels
        rows = [[f"`{r['kernel']}`", *(str(r[k]) for k in LAUNCHES)] for r in found["kernels"]]
        rows.append(["all", *(str(found[k]) for k in LAUNCHES)])
        return table(["kernel", *LAUNCHES], rows)

    def launched_environment(self) -> str:
        return environment(self.kernels)

    def endurance(self) -> str:
        rows = []
        for run in self.long:
            intervals = run["intervals"]
            quarter = len(intervals) // 4
            for kind in (key for key in intervals[0] if key.endswith(", bytes")):
                sizes = [f"{intervals[at][kind] / 2**20:.1f}" for at in (quarter - 1, -1)]
                cells = [kind.removesuffix(", bytes"), *sizes, yes(run["memory is flat"])]
                rows.append([place(run, run["device"]), f"{run['calls']:,}", *cells, *record(run)])
            speeds = [
                f"{statistics.median(row['calls/s'] for row in part):,.0f}"
                for part in (intervals[:quarter], intervals[-quarter:])
            ]
            cells = ["calls/s", *speeds, yes(run["speed is flat"])]
            rows.append([place(run, run["device"]), f"{run['calls']:,}", *cells, *record(run)])
        head = ["on", "calls", "MiB of, or", "first quarter", "last", "flat", "date", "commit"]
        return table(head, rows)

    def repetitions(self) -> str:
        rows = []
        for run in self.repeats:
            families: dict[str, list[dict[str, Any]]] = {}
            for case in run["repetitions"]:
                families.setdefault(case["case"].split()[0], []).append(case)
            for family, cases in families.items():
                sums = [sum(case[kind] for case in cases) for kind in ("repetitions", "differing")]
                counts = [str(len(cases)), *(f"{total:,}" for total in sums)]
                rows.append([run["environment"]["gpu"], f"`{family}`", *counts, *record(run)])
        head = ["on", "of", "cases", "repetitions", "differing", "date", "commit"]
        return table(head, rows)

    def sanitizers(self) -> str:
        rows = []
        for run in self.sanitized:
            reached = f"{run['families'] - len(run['not reached'])} of {run['families']}"
            for tool in run["tools"]:
                calls = f"{tool['calls']} of {run['calls']}"
                counts = [str(tool[f"reports {where}"]) for where in ("in my_ops", "elsewhere")]
                cells = [tool["tool"], calls, reached, *counts, f"{tool['seconds']:.0f}"]
                cells += ["; ".join(tool["ended in"]) or "none", run["compute-sanitizer"]]
                rows.append([run["environment"]["gpu"], *cells, *record(run)])
        head = ["on", "tool", "calls", "kernel families", "reports in my_ops", "elsewhere"]
        head += ["seconds", "calls that did not end", "compute-sanitizer"]
        return table([*head, "date", "commit"], rows) if rows else ""

    def same_bits(self) -> str:
        """Of each GPU beside the first."""
        rows = []
        for other in self.digests[1:]:
            first = self.digests[0]
            families: dict[str, list[tuple[bool, bool]]] = {}
            for one, two in zip(first["digests"], other["digests"], strict=True):
                assert one["case"] == two["case"]
                same = one["launches"] == two["launches"], one["results"] == two["results"]
                families.setdefault(one["case"].split()[0], []).append(same)
            names = " and ".join(run["environment"]["gpu"] for run in (first, other))
            date, commits = record(other)[0], " and ".join(record(r)[1] for r in (first, other))
            for family, cases in families.items():
                alike = [equal for same, equal in cases if same]
                counts = [len(cases), len(alike), sum(alike), len(alike) - sum(alike)]
                rows.append([names, f"`{family}`", *map(str, counts), date, commits])
        head = ["on", "of", "calls", "launched alike", "of these equal", "different"]
        return table([*head, "date", "commits"], rows) if rows else ""

    def suites(self) -> str:
        rows = []
        for run in self.tests:
            counts = [f"{run[kind]:,}" for kind in ("passed", "failed", "skipped")]
            counts.append(str(len(run.get("ran again", []))))
            minutes = f"{run['seconds in tests'] / 60:.0f}"
            rows.append([machine(run), run["environment"]["torch"], *counts, minutes, *record(run)])
        head = ["on", "torch", "passed", "failed", "skipped", "run again", "minutes of tests"]
        return table([*head, "date", "commit"], rows) if rows else ""

    def faults(self) -> str:
        found: dict[str, list[str]] = {}
        for run in self.tests:
            for row in run["faults"]:
                of = row["passed"] + row["failed"]
                found.setdefault(row["test"], []).append(
                    f"{machine(run)}: {row['passed']} of {of} passed"
                )
        rows = [[f"`{test}`", "; ".join(runs)] for test, runs in sorted(found.items())]
        return table(["test", "on"], rows) if rows else ""
