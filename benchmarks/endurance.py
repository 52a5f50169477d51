"""Memory and speed over a long training loop whose shapes change at every step.

    python benchmarks/endurance.py --output benchmarks/results/endurance-cpu.json

A step is a linear layer, LSTM, GRU or LLTM in turn, an elementwise op, another linear layer,
backward and SGD. With gradients these are twelve calls of ops of my_ops. Every interval takes the
same steps, so that speeds can be compared: by the clock on a GPU, by processor time on the CPU.
Asserts nothing, but says whether they are flat:

memory  what the process holds, and torch's allocator on a GPU, is at most 1 % or 4 MiB more after
        the last interval than after the first quarter of them
speed   the median of the last quarter is at least 0.95 of that of the first
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any

import measure
import torch
from torch import nn

import my_ops

CALLS_A_STEP = 12
INTERVALS = 20
WIDTH = 24


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = my_ops.nn.LinearActivation(WIDTH, WIDTH, activation="silu")
        layers = [my_ops.nn.LSTM, my_ops.nn.GRU, my_ops.nn.LLTM]
        self.layers = nn.ModuleList(layer(WIDTH, WIDTH) for layer in layers)
        self.last = my_ops.nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        output, _ = self.layers[which](self.first(x))
        return self.last(my_ops.d_sigmoid(output))


def memory(device: str) -> dict[str, int]:
    fields = Path("/proc/self/statm").read_text().split()
    record = {"process": int(fields[1]) * os.sysconf("SC_PAGE_SIZE")}
    if device == "cuda":
        record["allocated"] = torch.cuda.memory_allocated()
        record["reserved"] = torch.cuda.memory_reserved()
    return record


def interval(model: Model, optimizer: torch.optim.Optimizer, steps: int, device: str) -> None:
    choose = random.Random(7)
    for step in range(steps):
        length, batch = choose.randint(1, 12), choose.randint(1, 40)
        x = torch.randn(length, batch, WIDTH, device=device)
        loss = model(x, step % 3).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def flat(rows: list[dict[str, Any]]) -> dict[str, bool]:
    quarter = len(rows) // 4
    start, end = rows[quarter - 1], rows[-1]
    kinds = [kind for kind in start if kind.endswith("bytes")]
    first, last = (
        statistics.median(row["calls/s"] for row in part)
        for part in (rows[:quarter], rows[-quarter:])
    )
    return {
        "memory is flat": all(end[k] <= max(1.01 * start[k], start[k] + (4 << 20)) for k in kinds),
        "speed is flat": last >= 0.95 * first,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=1_000_000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    device = options.device
    model = Model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    steps = -(-options.calls // (CALLS_A_STEP * INTERVALS))
    interval(model, optimizer, min(steps, 500), device)  # what is made at the first calls
    clock = time.monotonic if device == "cuda" else time.process_time
    rows = []
    for _ in range(INTERVALS):
        begin = clock()
        interval(model, optimizer, steps, device)
        measure.synchronize()
        speed = CALLS_A_STEP * steps / (clock() - begin)
        sizes = {f"{kind}, bytes": size for kind, size in memory(device).items()}
        rows.append({"calls/s": round(speed), **sizes})
        print(rows[-1], flush=True)
    verdict = flat(rows)
    print(verdict)
    if options.output:
        calls = CALLS_A_STEP * INTERVALS * steps
        record = {"device": device, "calls": calls, **verdict, "intervals": rows}
        measure.save(options.output, record)


if __name__ == "__main__":
    main()
