"""The costs of products: benchmarks/fit_gemm.py, which fits them to committed times."""

import shutil
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "benchmarks"))

pytestmark = pytest.mark.skipif(
    not shutil.which("c++") or not (REPOSITORY / "kernels").exists(),
    reason="needs a C++ compiler and the source tree",
)


def test_the_header_is_what_the_times_give(tmp_path):
    import fit_gemm

    assert fit_gemm.header(tmp_path)[0] == fit_gemm.HEADER.read_text()


def fitted(times, folder, family=""):
    """The costs that differ from START if products of doubles take these times: small, library."""
    import fit_gemm
    from gemm_costs import START, Planner, flat, load, problem_of

    rows = []
    for size in range(16, 400, 4):
        us = [[plan, time, time] for plan, time in enumerate(times(size**3))]
        row = {"family": family, "dtype": "float64", "m": size, "n": size, "k": size, "us": us}
        rows.append(row)
    h200 = [9, 0, 132, 227 * 1024, 60 * 1024**2, 90, 1]
    planner = Planner(load(folder), [problem_of(row, h200) for row in rows])
    fit = fit_gemm.Fit(planner, ["small", "library: its product"], rows)
    fit.run()
    start = flat(START)
    return {name: value for name, value in fit.numbers.items() if value != start[name]}


def test_a_fit_follows_the_times(tmp_path):
    crossover = 2**18
    found = fitted(lambda work: (10 * work / crossover, 10), tmp_path)
    assert set(found) == {"small.max_work_8_bytes"}
    assert 0.7 * crossover < found["small.max_work_8_bytes"] < 1.4 * crossover


def test_a_fit_guards_the_benchmarks(tmp_path):
    def times(work):
        return (10 * work / 2**18, 11 if work == 80**3 else 10)

    assert fitted(times, tmp_path)
    found = fitted(lambda work: times(work) if work != 80**3 else (10, 20), tmp_path, "bench")
    assert found["small.max_work_8_bytes"] >= 80**3


def test_a_fit_leaves_what_chance_may_explain(tmp_path):
    assert fitted(lambda work: (10, 9.9 + 0.1 * (work % 3)), tmp_path) == {}
