"""Timing, ceilings and the record of a run, for the benchmarks in this folder."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import my_ops
from my_ops._timing import Run as Run
from my_ops._timing import gpu_times as gpu_times


@dataclass
class Case:
    """One row: the same problem, solved by my_ops and by others, in one process on the same
    data."""

    name: str
    ours: Run
    others: dict[str, Run] = field(default_factory=dict)
    bytes: float = 0  # least traffic: every input read once, every output written once
    flops: float = 0
    ceiling: str = ""  # the measured ceiling that limits it


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def no_grad(run: Run) -> Run:
    return torch.no_grad()(run)


def with_tf32(run: Run) -> Run:
    """For products: torch allows TF32 meanwhile."""

    def allowed() -> Any:
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            return run()
        finally:
            torch.backends.cuda.matmul.allow_tf32 = False

    return allowed


def without_tf32(run: Run) -> Run:
    """For a run by cuDNN."""

    def strict() -> Any:
        # Left out, enabled is False, and ATen's own layers run instead of cuDNN's.
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            return run()

    return strict


def wall_times(runs: dict[str, Run], calls: int = 2000, rounds: int = 7) -> dict[str, float]:
    """Median microseconds per call on the host clock, alternating; each round waits for its
    work."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        for _ in range(min(50, calls)):
            run()
    for _ in range(rounds):
        for name, run in runs.items():
            synchronize()
            begin = time.perf_counter()
            for _ in range(calls):
                run()
            synchronize()
            times[name].append((time.perf_counter() - begin) / calls * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


def under_switch(run: Run) -> Run:
    def switched() -> Any:
        with my_ops.fast_fp32():
            return run()

    return switched


def calls_in(run: Run, seconds: float) -> int:
    """How many calls take that long, but at least 10."""
    run()
    begin = time.perf_counter()
    run()
    return max(10, int(seconds / (time.perf_counter() - begin)))


def ceilings(elements: int = 1 << 28) -> dict[str, float]:
    """The rates of this GPU: copy_ and fill_ of 1 GiB in GB/s, cuBLAS at 8192 cubed in TFLOP/s."""
    source = torch.randn(elements, device="cuda")
    target = torch.empty_like(source)
    times = gpu_times({"copy": lambda: target.copy_(source), "fill": lambda: target.fill_(1.0)})
    result = {
        "copy GB/s": 8 * elements / times["copy"] / 1e3,
        "fill GB/s": 4 * elements / times["fill"] / 1e3,
    }
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x, y = (torch.randn(8192, 8192, device="cuda", dtype=dtype) for _ in range(2))
        z = torch.empty_like(x)
        time_us = gpu_times({"mm": lambda x=x, y=y, z=z: torch.mm(x, y, out=z)}, repeats=10)["mm"]
        result[f"{str(dtype).removeprefix('torch.')} TFLOP/s"] = 2 * 8192**3 / time_us / 1e6
    return result


def row(case: Case, times: dict[str, float], limits: dict[str, float]) -> dict[str, Any]:
    ours = times.pop("my_ops")
    result: dict[str, Any] = {"case": case.name, "my_ops us": round(ours, 3)}
    for name, other in times.items():
        result[f"{name} us"] = round(other, 3)
        result[f"x {name}"] = round(other / ours, 3)
    if case.bytes:
        result["GB/s"] = round(case.bytes / ours / 1e3, 1)
    if case.flops:
        result["TFLOP/s"] = round(case.flops / ours / 1e6, 2)
    if case.ceiling and case.ceiling in limits:
        rate = result["GB/s" if "GB/s" in case.ceiling else "TFLOP/s"]
        result["share of ceiling"] = round(rate / limits[case.ceiling], 3)
        result["ceiling"] = case.ceiling
    return result


def show(result: dict[str, Any]) -> None:
    fields = [f"{key} {value}" for key, value in result.items() if key != "case"]
    print(f"{result['case']:48}", "  ".join(fields))


def environment() -> dict[str, Any]:
    def output(*command: str) -> str:
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
        return done.stdout.strip()

    record: dict[str, Any] = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "commit": os.environ.get("MY_OPS_COMMIT") or output("git", "rev-parse", "--short", "HEAD"),
        "my_ops": my_ops.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if torch.cuda.is_available():
        record["gpu"] = torch.cuda.get_device_name()
        record["cuda"] = torch.version.cuda
        record["cudnn"] = torch.backends.cudnn.version()
        record["driver"] = output(
            "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
        ).split("\n")[0]
    else:
        record["cpu threads"] = torch.get_num_threads()
    return record


def one_row_a_line(value: Any, indent: str = "") -> str:
    """JSON with a line for whatever holds no object: rows, and lists of numbers."""

    def holds_objects(part: Any) -> bool:
        inside = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        return any(isinstance(each, dict) or holds_objects(each) for each in inside)

    if not holds_objects(value):
        return json.dumps(value)
    deeper = f"{indent} "
    if isinstance(value, dict):
        left, right = "{}"
        parts = [f"{json.dumps(k)}: {one_row_a_line(v, deeper)}" for k, v in value.items()]
    else:
        left, right = "[]"
        parts = [one_row_a_line(v, deeper) for v in value]
    lines = ",\n".join(deeper + part for part in parts)
    return f"{left}\n{lines}\n{indent}{right}"


def save(path: Path, results: dict[str, Any], record: dict[str, Any] | None = None) -> None:
    """Writes results as JSON, with the environment: this one, if no record of one is given."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = one_row_a_line({"environment": record or environment(), **results})
    path.write_text(f"{text}\n")
