"""The costs that the plan of a matrix product compares: measured, fitted, and written as a header.

    python benchmarks/fit_gemm.py measure    on a GPU: results/fit_gemm/<gpu>.json
    python benchmarks/fit_gemm.py fit        anywhere: kernels/gemm/fitted_costs.h, from all of them

`measure` times, for a thousand products, every plan that other costs would choose: each kernel with
each of its tiles, and the vendor's library. `fit` uses the plan of my_ops, which has to be built
from this source: it starts from START (my_ops/_fit.py).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from gemm_costs import START, flat, initializer

from my_ops._fit import Fit, problem_of
from my_ops._gemm_costs import Gpu, Planner

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results/fit_gemm"
HEADER = ROOT / "kernels/gemm/fitted_costs.h"
FIRST = "nvidia-h200"  # GPUs without their own costs use these

BY_HAND = {
    # Below this, one product instead of three may have a larger error than cuBLAS with TF32
    # (tests/ops/test_gemm_tf32.py, test_high_of_random_shapes).
    "fp32_sm90.single_min_work": 4e9,
    # Not among the committed times: within 20 % of those in docs/notes/gemm.md, "A narrow operand".
    **flat({"fp32_narrow": START["fp32_narrow"] | {"launches": 1.9e8}}),
    # The same: within 7 % of those in "A short k: fp32_short".
    **flat({"fp32_short": START["fp32_short"] | {"launches": 1.2e8}}),
    # Not timed: a GPU with more than fp32_sm80 has no use for it.
    **flat({"fp32_sm80": START["fp32_sm80"]}),
    # A plan is timed with the slices that START gives to its tile, not with others.
    "fp32_sm90.more_waves_min_gain": 0.04,
    # The times are of the GPU alone, and a second launch costs the host too.
    "half_sm90.epilogue_max_k": 1024,
    # The times would give 32, for products that no benchmark has run with it.
    "small.tile_min_side": 16,
}


def fitted(path: Path) -> tuple[str, str]:
    """The GPU's entry in the header for a file of `measure`, and the gain of the fit."""
    results = json.loads(path.read_text())
    rows, gpu = results["products"], Gpu(**results["device"])
    start = flat(START)
    fit = Fit(Planner([problem_of(row, gpu) for row in rows]), results["plans"], rows, start)
    before = fit.by_family()
    fit.run(name for name in start if name not in BY_HAND)
    report = [f"{results['environment']['gpu']}: time over that of the fastest plan, mean in %"]
    for family, (count, new) in fit.by_family().items():
        report.append(f"  {family:28} {count:4} products  {before[family][1]:6.2f} -> {new:6.2f}")
    moves = [f"  {n}: {start[n]:g} -> {v:g}" for n, v in fit.numbers.items() if v != start[n]]
    environment, facts = results["environment"], ("major", "minor", "sm_count", "l2_bytes")
    number = {name: f"{results['device'][name]}" for name in facts} | {
        f"costs.{name}": f"{value}" if isinstance(value, int) else f"{value:g}"
        for name, value in (fit.numbers | BY_HAND).items()
    }
    entry = (
        f"    // {environment['gpu']}, {environment['date']}, torch {environment['torch']}\n"
        f"    {initializer({**dict.fromkeys(facts), 'costs': START}, number, 4)},\n"
    )
    return entry, "\n".join(report + moves)


def header() -> tuple[str, str]:
    """fitted_costs.h from all committed measurements, and the gains of the fits."""
    paths = sorted(RESULTS.glob("*.json"), key=lambda path: (path.stem != FIRST, path.stem))
    fits = [fitted(path) for path in paths]
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
    text, report = header()
    HEADER.write_text(text)
    print(report)
    return None


if __name__ == "__main__":
    main()
