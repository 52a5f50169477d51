"""torch's own products under ``my_ops.fast_fp32()``: small ones on the host, large ones on the GPU.

    python benchmarks/fast_fp32.py [--output results.json]

The host times are the least of many runs on one core: in a process that never uses the switch, with
it on, and after it, in turns. The others are medians of alternating runs. Needs an NVIDIA GPU.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import timeit
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from measure import Run, gpu_times, save, show, under_switch
from torch.nn.functional import linear

import my_ops

CALLS, ROUNDS = 500, 20
NEVER_SWITCHED: dict[str, Run] = {}


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def small_products() -> dict[str, Run]:
    a, b, out, bias = tensor(32, 32), tensor(32, 32), tensor(32, 32), tensor(32)
    half = tensor(32, 32, dtype=torch.bfloat16)
    stack, wide, wide_bias = tensor(4, 32, 32), tensor(256, 256), tensor(256)
    return {
        "mm fp32 32": lambda: torch.mm(a, b),
        "mm.out fp32 32": lambda: torch.mm(a, b, out=out),
        "mm bf16 32": lambda: torch.mm(half, half),
        "bmm fp32 4x32": lambda: torch.bmm(stack, stack),
        "addmm fp32 32": lambda: torch.addmm(bias, a, b),
        "addmm.out fp32 32": lambda: torch.addmm(bias, a, b, out=out),
        "addmm bf16 32": lambda: torch.addmm(half, half, half),
        "linear+bias fp32 32": lambda: linear(a, b, bias),
        "baddbmm fp32": lambda: torch.baddbmm(stack, stack, stack),
        "mm fp32 256": lambda: torch.mm(wide, wide),
        "addmm fp32 256": lambda: torch.addmm(wide_bias, wide, wide),
    }


def host_time(run: Run) -> float:
    torch.cuda.synchronize()
    return timeit.timeit(run, number=CALLS) / CALLS * 1e6


def share_a_core() -> None:
    """Processes that take turns are then as fast as each other."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def never_switched(name: str) -> float:
    """Runs in a process of its own."""
    if not NEVER_SWITCHED:
        share_a_core()
        NEVER_SWITCHED.update(small_products())
        for run in NEVER_SWITCHED.values():
            host_time(run)
    return host_time(NEVER_SWITCHED[name])


def host_times(never: Callable[[str], float]) -> list[dict[str, Any]]:
    share_a_core()
    products = small_products()
    for run in products.values():
        host_time(run)
    rows = []
    for name, run in products.items():
        times: dict[str, list[float]] = {"never us": [], "on us": [], "off again us": []}
        for _ in range(ROUNDS):
            times["never us"].append(never(name))
            with my_ops.fast_fp32():
                times["on us"].append(host_time(run))
            times["off again us"].append(host_time(run))
        rows.append({"case": name, **{key: round(min(t), 2) for key, t in times.items()}})
        show(rows[-1])
    return rows


def large_products() -> dict[str, Run]:
    a, b, bias = tensor(4096, 4096), tensor(4096, 4096), tensor(4096)
    sizes = [(768, 3072), (3072, 768)] * 12
    model = torch.nn.Sequential(*(torch.nn.Linear(*size) for size in sizes)).cuda()
    x = tensor(8192, 768)

    def step() -> None:
        model.zero_grad()
        model(x).square().mean().backward()

    return {
        "4096 mm": lambda: torch.mm(a, b),
        "4096 linear with bias": lambda: linear(a, b, bias),
        "training step of 12 x Linear(768, 3072, 768), 8192 rows": step,
    }


def complex_products() -> dict[str, Run]:
    def product(*sizes: int, adjoint: bool = False) -> Run:
        *batch, m, n, k = sizes
        rows = (k, m) if adjoint else (m, k)
        a, b = (tensor(*batch, *each, dtype=torch.complex64) for each in (rows, (k, n)))
        return lambda: torch.matmul(a.mH if adjoint else a, b)

    cubes = {f"{n} mm": product(n, n, n) for n in (600, 1024, 2048, 4096)}
    adjoint = {f"{n} mm, adjoint": product(n, n, n, adjoint=True) for n in (1024, 4096)}
    rows = {f"{m} x 4096 x 4096 mm": product(m, 4096, 4096) for m in (256, 1024)}
    return {
        **cubes,
        **adjoint,
        **rows,
        "16384 x 64 x 4096 mm": product(16384, 64, 4096),
        "8 x 512 bmm": product(8, 512, 512, 512),
    }


def gpu_rows(products: dict[str, Run]) -> list[dict[str, Any]]:
    rows = []
    for name, run in products.items():
        times = gpu_times({"never us": run, "on us": under_switch(run)})
        rows.append({"case": name, **{key: round(value, 1) for key, value in times.items()}})
        show(rows[-1])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    output = parser.parse_args().output
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as other:
        small = host_times(lambda name: other.submit(never_switched, name).result())
    sections = {
        "host time of small products": small,
        "products and a training step": gpu_rows(large_products()),
        "complex products": gpu_rows(complex_products()),
    }
    if output:
        save(output, sections)


if __name__ == "__main__":
    main()
