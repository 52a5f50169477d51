"""``python -m my_ops tune``: measures the products of this machine's GPU, and keeps the costs that
follow for all programs of the user (:mod:`my_ops._tuned`).

It times random products, each by every kernel that can compute it and by cuBLAS, until its time is
up. Then it fits the costs with which the plan would have chosen best.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import time
from datetime import datetime, timezone
from typing import Any

import torch

from my_ops import _fit, _gemm_costs, _tuned
from my_ops import _library as _library  # registers the ops
from my_ops._explain import GPUS
from my_ops._fit import Fit, Row
from my_ops._gemm_costs import Gpu, Model, Numbers, Planner, Problem
from my_ops._timing import Run, gpu_times
from my_ops._tuned import Tuned

IN_A_ROW = 3  # calls
LEAST_PRODUCTS = 50
EAGER_PRODUCT = 0.75  # of fp32_sm80, beside a library's

Times = dict[str, tuple[float, float]]  # by plan, in microseconds: a call alone, one of a few


def find_gpu(device: int) -> tuple[Gpu, Model]:
    """Makes a GPU the current one. SystemExit says why it cannot be measured."""
    if not torch.cuda.is_available():
        raise SystemExit("tune: torch sees no GPU; `python -m my_ops` says what is wrong")
    if not 0 <= device < torch.cuda.device_count():
        raise SystemExit(f"tune: --device must be below {torch.cuda.device_count()}, got {device}")
    torch.cuda.set_device(device)
    torch.cuda.synchronize()
    found = _gemm_costs.current_gpu()
    if found is None:
        raise SystemExit("tune: this build of my_ops is for the CPU only")
    if not found[0].code:
        raise SystemExit(f"tune: this build of my_ops has no code for {found[1].name}")
    return found


def times_of(problem: Problem, plans: dict[str, Numbers], gpu: Gpu, model: Model) -> Times:
    """Of a product with each plan, on random data."""
    dtype, batch = getattr(torch, problem.dtype.decode()), problem.batch

    def matrix(rows: int, columns: int, transposed: int) -> torch.Tensor:
        sizes = (batch, columns, rows) if transposed else (batch, rows, columns)
        x = torch.randn(sizes, device="cuda", dtype=dtype)
        x = x.mT if transposed else x
        return x if batch > 1 else x[0]

    a = matrix(problem.m, problem.k, problem.a_transposed)
    b = matrix(problem.k, problem.n, problem.b_transposed)
    out = matrix(problem.m, problem.n, 0)

    def calls(numbers: Numbers, count: int) -> Run:
        def run() -> None:
            _gemm_costs.give(gpu, model, numbers, "being timed")
            for _ in range(count):
                torch.ops.my_ops.gemm.out(a, b, out, None)

        return run

    alone, in_a_row = (
        gpu_times({words: calls(numbers, count) for words, numbers in plans.items()}, repeats=5)
        for count in (1, IN_A_ROW)
    )
    return {words: (alone[words], in_a_row[words] / IN_A_ROW) for words in plans}


def products(gpu: Gpu) -> list[Row]:
    """In random order, so that when the time is up there are some of every family."""
    families = [_fit.FLOATS, *_fit.SMALL]
    if gpu.hopper_code:
        families.append(_fit.FEW_ROWS)
    pick = random.Random(0)
    rows = list(_fit.drawn(families, pick))
    pick.shuffle(rows)
    return rows


def measure(gpu: Gpu, model: Model, own: Numbers, seconds: float) -> tuple[list[Row], list[str]]:
    """Products with their times, and what the numbers of plans in them stand for."""
    rows = products(gpu)
    planner = Planner([_fit.problem_of(row, gpu) for row in rows])
    plans = _fit.plans_of(rows, planner, own)
    names = sorted({words for found in plans for words in found})
    begin, timed = time.monotonic(), 0
    shows = sys.stderr is not None and sys.stderr.isatty()
    for row, problem, found in zip(rows, planner.problems, plans, strict=True):
        passed = time.monotonic() - begin
        if passed > seconds:
            break
        if shows:
            sys.stderr.write(f"\rtune: {passed:.0f} of {seconds:.0f} s, {timed} products timed ")
            sys.stderr.flush()
        with contextlib.suppress(torch.cuda.OutOfMemoryError):
            times = times_of(problem, found, gpu, model)
            row["us"] = [[names.index(words), *us] for words, us in times.items()]
            timed += 1
    if shows:
        sys.stderr.write("\r\033[K")
    return [row for row in rows if "us" in row], names


def fitted(gpu: Gpu, own: Numbers, rows: list[Row], plans: list[str]) -> Fit:
    """From what the GPU has, and from what an H200 has with more products on tensor cores: there it
    shows which kernels are slow."""
    h200 = _gemm_costs.costs_of(GPUS["h200"], own=True) | {"fp32_sm80.product": EAGER_PRODUCT}
    eager = own | {name: h200[name] for name in _tuned.FITTED}
    planner = Planner([_fit.problem_of(row, gpu) for row in rows])
    return _fit.best_fit(planner, plans, rows, (own, eager), _tuned.FITTED)


def tune(options: argparse.Namespace) -> str:
    """What ``python -m my_ops tune`` prints; SystemExit if the GPU cannot be measured, or nothing
    can be written."""
    gpu, model = find_gpu(options.device)
    own, tf32 = _gemm_costs.costs_of(gpu, own=True), torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        rows, plans = measure(gpu, model, own, options.seconds)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32
        _gemm_costs.give(gpu, model, own, "own")
    if len(rows) < LEAST_PRODUCTS:
        raise SystemExit(
            f"tune: {len(rows)} products were timed in {options.seconds:g} s, and "
            f"{LEAST_PRODUCTS} are needed: raise --seconds"
        )
    planner = Planner([_fit.problem_of(row, gpu) for row in rows])
    before = Fit(planner, plans, rows, own).by_family()
    fit = fitted(gpu, own, rows, plans)
    today = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    tuned = Tuned(gpu, model, {name: fit.numbers[name] for name in _tuned.FITTED}, today)
    path = _tuned.write(tuned)
    if path is None:
        raise SystemExit(
            f"tune: {_tuned.folder()} cannot be written to; MY_OPS_CACHE names another folder"
        )
    changed = {name: [own[name], x] for name, x in tuned.costs.items() if x != own[name]}
    families = {
        family: {"products": count, "before": round(before[family][1], 2), "after": round(new, 2)}
        for family, (count, new) in fit.by_family().items()
    }
    if options.json:
        found: dict[str, Any] = {"path": str(path), "changed": changed, "families": families}
        return f"{json.dumps(found | _tuned.record_of(tuned), indent=1)}\n"
    said = [f"{model.name}: {len(rows)} products timed"]
    said.append("time of the planned kernel over that of the fastest, mean in %, before and now:")
    for family, each in families.items():
        count, old, new = each.values()
        said.append(f"  {family:18} {count:4} products {old:8.2f} {new:8.2f}")
    said += [f"  {name}: {old:g} -> {new:g}" for name, (old, new) in changed.items()]
    said.append(f"written to {path}, used by every program that starts from now on")
    return "\n".join(said) + "\n"
