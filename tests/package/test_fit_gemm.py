"""The costs of products: benchmarks/fit_gemm.py, which fits them to committed times."""

import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "benchmarks"))

pytestmark = pytest.mark.skipif(
    not (REPOSITORY / "kernels").exists(), reason="needs the source tree"
)


def test_the_header_is_what_the_times_give():
    import fit_gemm

    assert fit_gemm.header()[0] == fit_gemm.HEADER.read_text()


def test_the_fit_starts_with_every_cost():
    from gemm_costs import START, flat

    from my_ops import _gemm_costs

    start = flat(START)
    assert {name: type(value) for name, value in start.items()} == _gemm_costs.kinds()
    assert list(start) == list(_gemm_costs.kinds())  # the header initializes them in this order


def fitted(times, family=""):
    """The costs that differ from START if products of doubles take these times: small, library."""
    from gemm_costs import START, flat

    from my_ops._explain import GPUS
    from my_ops._fit import Fit, problem_of
    from my_ops._gemm_costs import Planner

    rows = []
    for size in range(16, 400, 4):
        us = [[plan, time, time] for plan, time in enumerate(times(size**3))]
        row = {"family": family, "dtype": "float64", "m": size, "n": size, "k": size, "us": us}
        rows.append(row)
    planner, start = Planner([problem_of(row, GPUS["h200"]) for row in rows]), flat(START)
    fit = Fit(planner, ["small", "library: its product"], rows, start)
    fit.run(start)
    return {name: value for name, value in fit.numbers.items() if value != start[name]}


def test_a_fit_follows_the_times():
    crossover = 2**18
    found = fitted(lambda work: (10 * work / crossover, 10))
    assert set(found) == {"small.max_work_8_bytes"}
    assert 0.7 * crossover < found["small.max_work_8_bytes"] < 1.4 * crossover


def test_a_fit_guards_the_benchmarks():
    def times(work):
        return (10 * work / 2**18, 11 if work == 80**3 else 10)

    assert fitted(times)
    found = fitted(lambda work: times(work) if work != 80**3 else (10, 20), "bench")
    assert found["small.max_work_8_bytes"] >= 80**3


def test_a_fit_leaves_what_chance_may_explain():
    assert fitted(lambda work: (10, 9.9 + 0.1 * (work % 3))) == {}
