"""Training steps of whole programs in float32: torch, and what my_ops makes of them.

    python benchmarks/programs.py [CASE ...] [--budget SECONDS] [--output results.json]

A step is forward, loss and backward, in one case an optimizer's step too. Each program (listed in
program_cases.py) runs in four ways:

    torch    strict float32, as torch.backends has it with TF32 forbidden everywhere
    switch   the same under my_ops.fast_fp32()
    both     the same under the switch, after my_ops.convert(model)
    tf32     with TF32 allowed in products, convolutions and recurrent layers

All four take turns in one process, since processes of one program differ on the host by more than
the ways do, and several such processes take turns. A way's speed is torch's median time divided by
its own, both of one process: the median of the processes is reported, and as "spread" the largest
distance between two of them, as a part of it. torch's steps run with the switch off; its kernels
stay registered and ask whether it is on.

Where ``convert`` finds no layer, "both" has the figures of the switch: it is the same program.

Times are medians in milliseconds, from the call to the end of the GPU's work. The loss and a sample
of the gradients are compared with those of torch. "gpu ms" is the GPU's time in one step by kind of
kernel. CASE is a part of the cases' names, such as "bert", "eager" or "llama compiled". A program
that fails is left out, with its error on the screen.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import re
import statistics
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from measure import Run, save, synchronize
from program_cases import COMPILED, DEVICE, FULL, PROGRAMS

import my_ops

WAYS = ("torch", "switch", "both", "tf32")
PROCESSES = 3 if FULL else 1
SAMPLE = 512  # entries of each parameter's gradient
# Kinds of kernels by their names; the first that fits.
KINDS = {
    "my_ops": r"my_ops::",
    "attention": r"attention|fmha|flash",
    "recurrent": r"RNN|rnn|lstm|LSTM|GRU|elemWise",
    "convolutions": r"conv|cudnn|fprop|wgrad|dgrad|winograd|nchw|nhwc",
    "products": r"gemm|nvjet|cutlass|splitK|gemv",
    "norms": r"norm",
    "copies": r"Memcpy|Memset|copy|Cat|Fill",
    "elementwise and the rest": r"",
}
steps: dict[str, Run] = {}  # of the program that this process has prepared, by way


# ----------------------------------------------------------------------- in a process of four ways


def choose(way: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = way == "tf32"
    my_ops.fast_fp32(way in ("switch", "both"))


def prepare(name: str, compiled: bool) -> dict[str, tuple[float, list[float]]]:
    """Makes the programs whose steps ``step_times`` times. Returns each way's loss and a sample of
    its gradients."""
    steps.clear()
    gc.collect()
    torch.cuda.empty_cache()
    torch.compiler.reset()
    return {way: result for way in WAYS if (result := prepare_way(way, name, compiled))}


def prepare_way(way: str, name: str, compiled: bool) -> tuple[float, list[float]] | None:
    """The same for one way, or None if its program is that of another."""
    choose(way)
    torch.manual_seed(0)
    model, loss, optimizer = PROGRAMS[name]()
    model.to(DEVICE)
    if way == "both" and not my_ops.convert(model).converted:
        return None
    if compiled:
        model.compile()
    update = optimizer(model.parameters()).step if optimizer else lambda: None

    def run() -> None:
        model.zero_grad()
        loss(model).backward()
        update()

    value = loss(model)
    value.backward()
    sample = [
        entry
        for parameter in model.parameters()
        if parameter.grad is not None
        for entry in parameter.grad.flatten()[:: 1 + parameter.numel() // SAMPLE].tolist()
    ]
    steps[way] = run
    return value.item(), sample


def step_times(way: str) -> list[float]:
    """The milliseconds of two steps, after one for what the other turns left cold."""
    choose(way)
    times = []
    for _ in range(3):
        synchronize()
        start = time.perf_counter()
        steps[way]()
        synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return times[1:]


def profiler() -> torch.profiler.profile:
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])


def load_profiler() -> None:
    """So that it slows the launches of all processes alike, and from the start."""
    if FULL:
        with profiler():
            pass


def gpu_times(way: str) -> dict[str, float]:
    """The GPU's milliseconds in one step, for each kind of kernel."""
    choose(way)
    with profiler() as profile:
        steps[way]()
        synchronize()
    found: dict[str, float] = defaultdict(float)
    for event in profile.key_averages():
        kind = next(kind for kind, pattern in KINDS.items() if re.search(pattern, event.key))
        found[kind] += event.self_device_time_total / 1e3
    return {kind: round(found[kind], 2) for kind in KINDS if found[kind] >= 0.005}


# ---------------------------------------------------------------------------- in the main process


def start() -> list[ProcessPoolExecutor]:
    spawn = multiprocessing.get_context("spawn")
    return [ProcessPoolExecutor(1, spawn, load_profiler) for _ in range(PROCESSES)]


def cases() -> Iterator[tuple[str, bool]]:
    for name in PROGRAMS:
        yield name, False
        if name in COMPILED:
            yield name, True


def apart(values: list[float], reference: list[float]) -> float:
    """The L2 distance, relative to the reference."""
    pairs = zip(values, reference, strict=True)
    squares = [((value - exact) ** 2, exact**2) for value, exact in pairs]
    return (sum(s for s, _ in squares) / sum(s for _, s in squares)) ** 0.5


def row(
    processes: list[ProcessPoolExecutor], name: str, compiled: bool, budget: float
) -> dict[str, Any]:
    futures = [process.submit(prepare, name, compiled) for process in processes]
    results, *_ = [future.result() for future in futures]
    order = list(results)
    found: list[dict[str, list[float]]] = [{way: [] for way in order} for _ in processes]
    begin = time.monotonic()
    while time.monotonic() - begin < budget or not found[0]["torch"]:
        for process, times in zip(processes, found, strict=True):
            for way in order:
                times[way] += process.submit(step_times, way).result()
        order.append(order.pop(0))  # a step is faster or slower by what ran before it
    converted = "both" if "both" in results else "switch"
    if converted == "switch":
        for of_one in (results, *found):
            of_one["both"] = of_one["switch"]
    medians = [{way: statistics.median(times[way]) for way in WAYS} for times in found]
    result: dict[str, Any] = {"case": f"{name} {'compiled' if compiled else 'eager'}"}
    for way in WAYS:
        result[f"{way} ms"] = round(statistics.median(ms[way] for ms in medians), 3)
    spreads = []
    for way in WAYS[1:]:
        speeds = [ms["torch"] / ms[way] for ms in medians]
        speed = statistics.median(speeds)
        result[f"x {way}"] = round(speed, 3)
        spreads.append((max(speeds) - min(speeds)) / speed)
    result["spread"] = round(max(spreads), 3)
    loss, gradients = results["torch"]
    for way in WAYS[1:]:
        result[f"{way} loss apart"] = float(f"{apart([results[way][0]], [loss]):.1e}")
        result[f"{way} gradients apart"] = float(f"{apart(results[way][1], gradients):.1e}")
    if FULL:
        for way, of in (("torch", "torch"), ("both", converted)):
            result[f"{way} gpu ms"] = processes[0].submit(gpu_times, of).result()
    return result


def means(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The geometric means of speeds over the eager programs, beside strict torch's, and the
    slowest."""
    eager = [row for row in rows if row["case"].endswith("eager")]
    speeds = {way: [row[f"x {way}"] for row in eager] for way in WAYS[1:]}
    speeds["the better of switch and both"] = [max(row["x switch"], row["x both"]) for row in eager]
    return {
        way: {
            "geometric mean": round(statistics.geometric_mean(values), 3),
            "slowest": round(min(values), 3),
        }
        for way, values in speeds.items()
        if values
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("case", nargs="*", default=[""])
    parser.add_argument("--budget", type=float, default=3, help="seconds of timing a case")
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    arguments = parser.parse_args()
    processes = start()
    rows: list[dict[str, Any]] = []
    for name, compiled in cases():
        if not any(
            part in f"{name} {'compiled' if compiled else 'eager'}" for part in arguments.case
        ):
            continue
        try:
            rows.append(row(processes, name, compiled, arguments.budget))
        except Exception as failure:
            print(name, traceback.format_exc(), flush=True)
            if isinstance(failure, BrokenExecutor | torch.AcceleratorError):
                processes = start()
            continue
        shown = "  ".join(f"{key} {value}" for key, value in rows[-1].items() if key != "case")
        print(f"{rows[-1]['case']:24}", shown, flush=True)
        if arguments.output:
            save(arguments.output, {"speeds": means(rows), "training step": rows})


if __name__ == "__main__":
    main()
