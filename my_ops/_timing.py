"""Times of the GPU, for ``python -m my_ops tune`` and the benchmarks."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from my_ops._private import gpu_sleep

Run = Callable[[], Any]


def gpu_times(runs: dict[str, Run], repeats: int = 30, budget: float = 1.5) -> dict[str, float]:
    """Median GPU microseconds of each, in random order, with the L2 cache overwritten before every
    run.

    The device is kept busy until the run is queued, so that host time does not count. Only of runs
    with more launches than fit into the queue, about a thousand, it counts. The order is random
    because every fourth run, whatever it is, takes 0.9 us longer.
    """
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    times: dict[str, list[float]] = {name: [] for name in runs}
    cycles: dict[str, int] = {}  # of sleep, about 2e9 a second
    for name, run in runs.items():
        for _ in range(3):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            run()
            queued = time.perf_counter() - begin
        # At least 1 ms: after a peer of many launches the host's caches are cold.
        cycles[name] = int(2e9 * min(max(2 * queued, 1e-3), 10e-3))
    torch.cuda.synchronize()
    begin = time.monotonic()
    order, generator = list(runs.items()), random.Random(0)
    for _ in range(repeats):
        generator.shuffle(order)
        for name, run in order:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            gpu_sleep(cycles[name])
            start.record()
            run()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) * 1e3)
        if time.monotonic() - begin > budget and len(times[name]) >= 5:
            break
    return {name: statistics.median(values) for name, values in times.items()}
