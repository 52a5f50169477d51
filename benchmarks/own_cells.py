"""Times layers of my_ops.cell beside those that the wheel ships: own_cells.py FILE

For each case the ms of a forward pass and of one with backward, as the GPU's events measure them or
on a CPU the clock, and the seconds of the first training step of a process that finds nothing in
the cache, with the compilation. On a CPU also the ms of torch's operations, a step at a time. On a
GPU also layers of heads, with the ms of all its kernels, by its profiler, and of those that run the
steps: without the products outside them.
"""

import argparse
import datetime
import json
import os
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/layers")]  # before this file, whose name is the same
os.environ["MY_OPS_CACHE"] = tempfile.mkdtemp()

import own_cells  # noqa: E402
import torch  # noqa: E402

import my_ops  # noqa: E402
from my_ops.recurrent import _own_cpu  # noqa: E402

CASES = {  # steps, batch, hidden
    "cuda": [(512, 16, 512), (128, 32, 128), (1024, 1, 256), (512, 64, 1024)],
    "cpu": [(128, 32, 128), (64, 4, 512), (20, 1, 64)],
}
CELLS = {"lstm": my_ops.nn.LSTM, "gru": my_ops.nn.GRU, "minimal": None, "janet": None}
HEADS = [  # of 512 steps of 16 rows in bfloat16: cell, hidden, heads
    ("slstm", 512, 1),
    ("slstm", 512, 8),
    ("slstm", 768, 4),
    ("gru", 512, 8),
    ("LSTM", 512, 8),
    ("GRU", 512, 8),
]
STEPS_KERNEL = r"(warp|block|cluster|grid|warpgroup)\w*(forward|backward)"


def milliseconds(call, calls, device):
    for _ in range(2):
        call()
    found = []
    for _ in range(5):
        if device == "cpu":
            begin = time.perf_counter()
            for _ in range(calls):
                call()
            found.append((time.perf_counter() - begin) * 1e3 / calls)
            continue
        start, end = torch.cuda.Event(True), torch.cuda.Event(True)
        start.record()
        for _ in range(calls):
            call()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) / calls)
    return round(statistics.median(found), 4)


def calls_of(layer, x, grad):
    def forward():
        with torch.no_grad():
            layer(x)

    def training():
        layer.zero_grad()
        layer(x)[0].backward(grad)

    return forward, training


def times(layer, x, grad):
    forward, training = calls_of(layer, x, grad)
    start = time.perf_counter()
    training()
    if x.is_cuda:
        torch.cuda.synchronize()
    first = time.perf_counter() - start
    calls = 3 if x.shape[2] == 1024 else 10
    return {
        "forward_ms": milliseconds(forward, calls, x.device.type),
        "training_ms": milliseconds(training, calls, x.device.type),
        "first_s": round(first, 3),
    }


def kernels_ms(call, calls=5):
    """Of a call: all kernels, and those of the steps."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    found = [e for e in profiler.key_averages() if e.self_device_time_total > 0]
    of_steps = [e for e in found if re.search(STEPS_KERNEL, e.key)]
    totals = (sum(e.self_device_time_total for e in some) for some in (found, of_steps))
    return [round(total / 1e3 / calls, 4) for total in totals]


def of_heads():
    rows = []
    for name, hidden, heads in HEADS:
        x = torch.randn(512, 16, hidden, device="cuda", dtype=torch.bfloat16)
        make = getattr(my_ops.nn, name) if name.isupper() else getattr(own_cells, name).layer
        layer = make(hidden, hidden, heads=heads, device="cuda", dtype=torch.bfloat16)
        row = {"cell": name, "hidden": hidden, "heads": heads, **times(layer, x, x)}
        for call in calls_of(layer, x, x):
            row[f"{call.__name__}_kernels_ms"] = kernels_ms(call)
        rows.append(row)
        print(row, flush=True)
    return rows


def step_by_step(layer, x):
    with mock.patch.object(_own_cpu, "number_of", lambda *_: None):
        return times(layer, x, x)


def on_cpu():
    return {"cpu": torch.backends.cpu.get_cpu_capability(), "threads": torch.get_num_threads()}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--heads", action="store_true", help="the layers of heads alone")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.randn(8, 8, device=device) @ torch.randn(8, 8, device=device)  # cuBLAS starts
    heads = of_heads() if device == "cuda" else []
    rows = []
    for dtype in () if options.heads else (torch.bfloat16, torch.float32):
        for steps, batch, hidden in CASES[device]:
            x = torch.randn(steps, batch, hidden, device=device, dtype=dtype)
            for name, shipped in CELLS.items():
                cell = getattr(own_cells, name)
                made = {"own": cell.layer(hidden, hidden, device=device, dtype=dtype)}
                if shipped:
                    made["shipped"] = shipped(hidden, hidden, device=device, dtype=dtype)
                row = {"cell": name, "dtype": str(dtype)[6:], "sizes": [steps, batch, hidden]}
                row |= {key: times(layer, x, x) for key, layer in made.items()}
                if device == "cpu":
                    row["step_by_step"] = step_by_step(made["own"], x)
                rows.append(row)
                print(rows[-1], flush=True)
    about = {
        "date": datetime.date.today().isoformat(),
        **({"gpu": torch.cuda.get_device_name()} if device == "cuda" else on_cpu()),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "commit": options.commit,
    }
    options.file.write_text(json.dumps(about | {"cases": rows, "heads": heads}, indent=1) + "\n")


main()
