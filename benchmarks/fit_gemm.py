"""The costs that the plan of a matrix product compares: measured, fitted, and written as a header.

    python benchmarks/fit_gemm.py measure    on a GPU: results/fit_gemm/<gpu>.json
    python benchmarks/fit_gemm.py fit        anywhere: kernels/gemm/fitted_costs.h, from all of them

`measure` times, for a thousand products, every plan that other costs would choose: each kernel with
each of its tiles, and the vendor's library. `fit` uses the same plan_gemm, compiled here. Starting
from START, it changes one number at a time as long as the products that are then planned
differently gain.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
from pathlib import Path

from gemm_costs import ROOT, START, Numbers, Planner, Row, flat, initializer, load, problem_of

RESULTS = ROOT / "benchmarks/results/fit_gemm"
HEADER = ROOT / "kernels/gemm/fitted_costs.h"
FIRST = "nvidia-h200"  # GPUs without their own costs use these

FACTORS = [0.95, 1.05, 0.9, 1.1, 0.8, 1.25, 0.7, 1.4, 0.5, 2, 0.25, 4]  # the closest first
NOISE = 0.02  # in the logarithm of a time
LEAST_SIGMAS = 1  # a gain must exceed its spread among the products that change by this factor
BY_HAND = {
    # Below this, one product instead of three may have a larger error than cuBLAS with TF32
    # (tests/ops/test_gemm_tf32.py, test_high_of_random_shapes).
    "fp32_sm90.single_min_work": 4e9,
    # Not among the committed times: within 20 % of those in docs/notes/gemm.md, "A narrow operand".
    **flat({"fp32_narrow": START["fp32_narrow"] | {"launches": 1.9e8}}),
    # A plan is timed with the slices that START gives to its tile, not with others.
    "fp32_sm90.more_waves_min_gain": 0.04,
    # The times are of the GPU alone, and a second launch costs the host too.
    "half_sm90.epilogue_max_k": 1024,
    # The times would give 32, for products that no benchmark has run with it.
    "small.tile_min_side": 16,
}
GUARDED, MOST = "bench", 0.01  # in these families no product may take longer by more than this


def moved(name: str, value: float, factor: float) -> float:
    if isinstance(flat(START)[name], int):
        return round(value * factor)
    return float(f"{value * factor:.3g}")


def choice(plan: str) -> str:
    """The part of a plan's description that costs decide: not what the library is asked for."""
    return plan.split(":")[0]


class Fit:
    """The search for one GPU's numbers, from START."""

    def __init__(self, planner: Planner, names: list[str], rows: list[Row]) -> None:
        self._planner, self.rows = planner, rows
        self._known: dict[int, str] = {}
        # The mean of the times of a single call and of calls in a row.
        self._times = [
            {choice(names[plan]): sum(map(math.log, us)) / len(us) for plan, *us in row["us"]}
            for row in rows
        ]
        self._guarded = [i for i, row in enumerate(rows) if row["family"].startswith(GUARDED)]
        self.numbers = flat(START)
        self.times = self._planned(self.numbers)
        self._most = [time + MOST for time in self.times]

    def _planned(self, numbers: Numbers) -> list[float]:
        """Logarithms of microseconds; infinite for a plan that was not timed."""
        codes = self._planner.codes(numbers)
        for code in set(codes) - self._known.keys():
            self._known[code] = choice(self._planner.describe(code))
        return [
            times.get(self._known[code], math.inf)
            for times, code in zip(self._times, codes, strict=True)
        ]

    def regrets(self) -> list[float]:
        """How much longer the chosen plans take than the fastest ones, as logarithms."""
        best = [min(times.values()) for times in self._times]
        return [time - least for time, least in zip(self.times, best, strict=True)]

    def _gain(self, times: list[float]) -> float:
        """The gain of all products together; 0 if it may be chance or a guarded one loses."""
        if math.inf in times or any(times[i] > self._most[i] for i in self._guarded):
            return 0
        gains = [old - new for old, new in zip(self.times, times, strict=True) if old != new]
        spread = math.sqrt(sum(gain**2 + NOISE**2 for gain in gains))
        return sum(gains) if sum(gains) > LEAST_SIGMAS * spread else 0

    def improve(self, name: str) -> bool:
        """Moves a number to where the products gain most."""
        best = 0.0
        start = self.numbers[name]
        for factor in FACTORS:
            trial = self.numbers | {name: moved(name, start, factor)}
            times = self._planned(trial)
            if self._gain(times) > best:
                best, chosen, chosen_times = self._gain(times), trial, times
        if best:
            self.numbers, self.times = chosen, chosen_times
        return best > 0

    def run(self) -> None:
        names = [name for name in self.numbers if name not in BY_HAND]
        while any([self.improve(name) for name in names]):
            pass


def fitted(path: Path, module: ctypes.CDLL) -> tuple[str, str]:
    """The GPU's entry in the header for a file of `measure`, and the gain of the fit."""
    results = json.loads(path.read_text())
    rows, device = results["products"], list(results["device"].values())
    planner = Planner(module, [problem_of(row, device) for row in rows])
    fit = Fit(planner, results["plans"], rows)
    before = fit.regrets()
    fit.run()
    families: dict[str, list[tuple[float, float]]] = {}
    for row, *pair in zip(rows, before, fit.regrets(), strict=True):
        families.setdefault(row["family"], []).append((pair[0], pair[1]))
    report = [f"{results['environment']['gpu']}: time over that of the fastest plan, mean in %"]
    for family, pairs in sorted(families.items()):
        old, new = (100 * math.expm1(sum(side) / len(pairs)) for side in zip(*pairs, strict=True))
        report.append(f"  {family:28} {len(pairs):4} products  {old:6.2f} -> {new:6.2f}")
    moves = [
        f"  {n}: {flat(START)[n]:g} -> {v:g}" for n, v in fit.numbers.items() if v != flat(START)[n]
    ]
    environment, facts = results["environment"], ("major", "minor", "l2_bytes")
    number = {name: f"{results['device'][name]}" for name in facts} | {
        f"costs.{name}": f"{value}" if isinstance(value, int) else f"{value:g}"
        for name, value in (fit.numbers | BY_HAND).items()
    }
    entry = (
        f"    // {environment['gpu']}, {environment['date']}, torch {environment['torch']}\n"
        f"    {initializer({**dict.fromkeys(facts), 'costs': START}, number, 4)},\n"
    )
    return entry, "\n".join(report + moves)


def header(folder: Path) -> tuple[str, str]:
    """fitted_costs.h from all committed measurements, and the gains of the fits."""
    module = load(folder)
    paths = sorted(RESULTS.glob("*.json"), key=lambda path: (path.stem != FIRST, path.stem))
    fits = [fitted(path, module) for path in paths]
    text = (
        "// Written by `python benchmarks/fit_gemm.py fit` from benchmarks/results/fit_gemm.\n"
        "#pragma once\n\n"
        '#include "gemm/costs.h"\n\n'
        "namespace my_ops::cuda {\n\n"
        "inline constexpr GpuCosts kFittedCosts[] = {\n"
        f"{''.join(entry for entry, _ in fits)}"
        "};\n\n"
        "}  // namespace my_ops::cuda\n"
    )
    return text, "\n".join(report for _, report in fits)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("step", choices=("measure", "fit"))
    if parser.parse_args().step == "measure":
        from gemm_times import measure

        return measure(RESULTS)
    text, report = header(ROOT / "build/fit_gemm")
    HEADER.write_text(text)
    print(report)
    return None


if __name__ == "__main__":
    main()
