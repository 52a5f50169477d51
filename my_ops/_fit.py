"""Fits the costs of products to times, for ``python -m my_ops tune`` and benchmarks/fit_gemm.py.

Each product was timed with every plan that other costs would choose. Starting from some costs, the
fit changes one number at a time as long as the products that are then planned differently gain.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

from my_ops._gemm_costs import Gpu, Numbers, Planner, Problem

# A product's family, the fields of a Problem that are not DEFAULT, and its times: "us" has lists of
# a plan's number and the microseconds of its runs.
Row = dict[str, Any]
DEFAULT: Row = {"dtype": "float32", "activation": "none", "batch": 1}

FACTORS = (0.95, 1.05, 0.9, 1.1, 0.8, 1.25, 0.7, 1.4, 0.5, 2, 0.25, 4)  # the closest first
NOISE = 0.02  # in the logarithm of a time
LEAST_SIGMAS = 1  # a gain must exceed its spread among the products that change by this factor
GUARDED, MOST = "bench", 0.01  # in these families no product may take longer by more than this
ALWAYS, NEVER = 0, 1 << 40  # a lower limit; for an upper limit the two are swapped


# ---------------------------------------------------------------------------------------- products

LAYOUT = {"a_transposed": [0, 1], "b_transposed": [0, 1]}
BATCHES = {"batch": [1, 1, 1, (2, 32)]}


def sizes(low: int, high: int) -> Row:
    """A range of sizes, half of which are multiples of a vector."""
    return {name: [(low, high, 1), (low, high, 8)] for name in "mnk"}


# A family of products, at the limits where kernels start to pay: a name, how many, the fewest and
# the most multiply-adds, and a description. A tuple is a range of sizes, even on a logarithmic
# scale, and what they are multiples of; from a list one is picked.
Family = tuple[str, int, float, float, Row]
FLOATS: Family = ("float32", 200, 1e6, 2e10, sizes(48, 6000) | LAYOUT | BATCHES)
FEW_ROWS: Family = (
    "float32, few rows",
    *(220, 1e6, 4e9),
    {"m": (2, 64), "n": (32, 16384, 4), "k": (512, 32768, 4), "b_transposed": [0, 1]},
)
SMALL: list[Family] = [
    (f"small {dtype}", 80, 1e4, 1.6e7, sizes(2, 1024) | LAYOUT | BATCHES | {"dtype": dtype})
    for dtype in ("float64", "float32", "float16", "bfloat16")
]


def work(row: Row) -> int:
    return row.get("batch", 1) * row["m"] * row["n"] * row["k"]


def drawn(families: Iterable[Family], pick: random.Random) -> Iterator[Row]:
    """Some of each family, without fields that are DEFAULT."""

    def value_of(field: Any) -> Any:
        if isinstance(field, list):
            return value_of(pick.choice(field))
        if not isinstance(field, tuple):
            return field
        low, high, *multiples = field
        multiple = multiples[0] if multiples else 1
        value = math.exp(pick.uniform(math.log(low), math.log(high)))
        return max(1, round(value / multiple)) * multiple

    for family, count, least, most, fields in families:
        found = 0
        while found < count:
            row = {name: value_of(field) for name, field in fields.items()}
            if least <= work(row) <= most:
                yield {"family": family, **{n: x for n, x in row.items() if x != DEFAULT.get(n, 0)}}
                found += 1


def problem_of(row: Row, gpu: Gpu) -> Problem:
    names = [field[0] for field in Problem._fields_][len(gpu) :]
    values = [row.get(name, DEFAULT.get(name, 0)) for name in names]
    return Problem(*gpu, *(v.encode() if isinstance(v, str) else v for v in values))


# ------------------------------------------------------------------------------------------- plans


def candidates(start: Numbers) -> Iterator[Numbers]:
    """Costs for which one kernel, with one of its tiles, is chosen wherever it can run."""

    def all_of(kernel: str) -> Iterator[tuple[str, str]]:
        for name in start:
            if name.startswith(f"{kernel}."):
                yield name, name.removeprefix(f"{kernel}.")

    library: Numbers = start | {
        "fp32_skinny.few_min_columns": NEVER,
        "fp32_skinny.min_k": NEVER,
        "fp32_narrow.launches": NEVER,
        "fp32_short.launches": NEVER,
        "fp32_sm90.min_side": NEVER,
        "fp32_sm90.packed_min_rows": NEVER,
        "fp32_sm80.product": NEVER,
        "half_sm90.copied.min_size": NEVER,
        "half_sm90.in_place.min_size": NEVER,
        "half_sm90.epilogue_max_outputs": NEVER,
        "half_sm90.epilogue_min_side": NEVER,
        "small.max_outputs": 0,
        "small.tile_min_work": NEVER,
    }
    yield library
    yield library | {
        name: NEVER if "max" in own or "many" in own else ALWAYS for name, own in all_of("small")
    }
    yield library | {name: NEVER if "max" in own else ALWAYS for name, own in all_of("fp32_skinny")}
    taken = ("launches", "end", "floats.here", "halves.here")
    yield library | {name: ALWAYS if own in taken else NEVER for name, own in all_of("fp32_narrow")}
    for kernel in ("fp32_short", "fp32_sm80"):
        yield library | dict.fromkeys((name for name, _ in all_of(kernel)), ALWAYS)
    chosen, left = 1e-6, 1e6  # for tiles
    tiles = ["fp32_sm90.wide_slowdown", "fp32_sm90.medium_slowdown", "fp32_sm90.small_slowdown"]
    free = ["min_side", "min_k", "launches", "second_pass", "element", "strided_element"]
    free += ["tf32_launches", "tf32_element", "reduce", "reduce_element"]
    three = library | {f"fp32_sm90.{name}": ALWAYS for name in free}
    three |= {"small.tile_min_work": ALWAYS, "fp32_sm90.single_min_work": 1e30}
    for tile in (None, *tiles):
        yield three | {name: chosen if name == tile else left for name in tiles}
    for slowdown in (chosen, left):
        single = {"fp32_sm90.single_min_work": ALWAYS, "fp32_sm90.promoted_slowdown": slowdown}
        yield three | single
    tiles = [f"half_sm90.{size}_us" for size in ("large", "wide", "medium", "small")]
    half = library | {
        name: NEVER if "max" in own else ALWAYS
        for odd in ("half_sm90.copied", "half_sm90.in_place")
        for name, own in all_of(odd)
    }
    half |= {"half_sm90.epilogue_min_side": ALWAYS, "half_sm90.epilogue_warps_min_share": ALWAYS}
    half["half_sm90.epilogue_max_k"] = NEVER
    half |= {f"half_sm90.epilogue_warps_min_k{slow}": ALWAYS for slow in ("", "_slow")}
    for most, tile in product((ALWAYS, NEVER), tiles):
        half["half_sm90.epilogue_max_outputs"] = most
        yield half | {name: chosen if name == tile else left for name in tiles}


def plans_of(rows: list[Row], planner: Planner, start: Numbers) -> list[dict[str, Numbers]]:
    """For each product the plans to time, and costs that choose each."""
    plans: list[dict[str, Numbers]] = [{} for _ in rows]
    for numbers in (start, *candidates(start)):
        for row, found, words in zip(rows, plans, planner.plans(numbers), strict=True):
            if words != "small" or work(row) < 1e8:
                found.setdefault(words, numbers)
    return plans


# --------------------------------------------------------------------------------------------- fit


def moved(value: float, factor: float) -> float:
    if isinstance(value, int):
        return round(value * factor)
    return float(f"{value * factor:.3g}")


def choice(plan: str) -> str:
    """The part of a plan's description that costs decide: not what the library is asked for."""
    return plan.split(":")[0]


class Fit:
    """The search for one GPU's numbers, from those of the start. ``plans``: what the numbers in
    the times of ``rows`` stand for."""

    def __init__(self, planner: Planner, plans: list[str], rows: list[Row], start: Numbers) -> None:
        self._planner, self.rows = planner, rows
        # The mean of the times of a single call and of calls in a row.
        self._times = [
            {choice(plans[plan]): sum(map(math.log, us)) / len(us) for plan, *us in row["us"]}
            for row in rows
        ]
        self._guarded = [i for i, row in enumerate(rows) if row["family"].startswith(GUARDED)]
        self.numbers = dict(start)
        self.times = self._planned(self.numbers)
        self._most = [time + MOST for time in self.times]

    def _planned(self, numbers: Numbers) -> list[float]:
        """Logarithms of microseconds; infinite for a plan that was not timed."""
        return [
            times.get(choice(plan), math.inf)
            for times, plan in zip(self._times, self._planner.plans(numbers), strict=True)
        ]

    def regrets(self) -> list[float]:
        """How much longer the chosen plans take than the fastest ones, as logarithms."""
        best = [min(times.values()) for times in self._times]
        return [time - least for time, least in zip(self.times, best, strict=True)]

    def by_family(self) -> dict[str, tuple[int, float]]:
        """Of each family how many products, and the mean of :meth:`regrets` in percent."""
        families: dict[str, list[float]] = {}
        for row, regret in zip(self.rows, self.regrets(), strict=True):
            families.setdefault(row["family"], []).append(regret)
        return {
            family: (len(all_of), 100 * math.expm1(sum(all_of) / len(all_of)))
            for family, all_of in sorted(families.items())
        }

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
            trial = self.numbers | {name: moved(start, factor)}
            times = self._planned(trial)
            if self._gain(times) > best:
                best, chosen, chosen_times = self._gain(times), trial, times
        if best:
            self.numbers, self.times = chosen, chosen_times
        return best > 0

    def run(self, names: Iterable[str]) -> None:
        """Moves these numbers until none of them gains."""
        names = list(names)
        while any([self.improve(name) for name in names]):
            pass


def best_fit(
    planner: Planner,
    plans: list[str],
    rows: list[Row],
    starts: Iterable[Numbers],
    names: Iterable[str],
) -> Fit:
    """The fit with the least times of those from each start; the first, if they are equal. A fit
    moves one number at a time, so it may end elsewhere from another start."""
    names, fits = list(names), [Fit(planner, plans, rows, start) for start in starts]
    for fit in fits:
        fit.run(names)
    return min(fits, key=lambda fit: sum(fit.times))
