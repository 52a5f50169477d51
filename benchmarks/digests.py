"""Digests of results, to compare GPUs, and of what was launched for them.

    python benchmarks/digests.py --output benchmarks/results/digests-nvidia-h200.json

The calls are those of repetitions.py, and random products and layers with their gradients, all of
the same data on every GPU. The digest of the launches is over the names, grids, blocks and shared
memory of all kernels, cuBLAS's too. Where it is the same on two GPUs, so should be that of the
results: tools/docs/measured.py compares them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import measure
import torch
from repetitions import Call, cases, one, train
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import my_ops

SEPARATOR = "spin_kernel"  # torch.cuda._sleep's, between two calls


def drawn(choose: random.Random, dtype: str, rows: int, columns: int) -> Tensor:
    """In one of the two layouts."""
    transposed = choose.random() < 0.5
    x = torch.randn((columns, rows) if transposed else (rows, columns))
    x = x.to("cuda", getattr(torch, dtype))
    return x.mT if transposed else x


def random_calls(count: int, choose: random.Random) -> Iterator[tuple[str, Call]]:
    """Three products to a layer."""

    def size(largest: int) -> int:
        value = int(largest ** choose.random())
        return value if choose.random() < 0.5 else -(-value // 8) * 8

    for number in range(count):
        dtype = choose.choice(["float32", "float32", "bfloat16", "float16"])
        if number % 4 == 3:
            kind = choose.choice([my_ops.nn.LSTM, my_ops.nn.GRU, my_ops.nn.LLTM])
            steps, batch, hidden = choose.randint(1, 6), size(600), size(800)
            layer = kind(16, hidden, dtype=getattr(torch, dtype)).cuda()
            input, grad = (torch.randn(steps, batch, columns) for columns in (16, hidden))
            input = input.to("cuda", getattr(torch, dtype)).requires_grad_()
            name = f"{kind.__name__} {dtype} T{steps} B{batch} H{hidden}, gradients"
            yield name, partial(train, layer, input, grad.to("cuda", getattr(torch, dtype)))
            continue
        m, k, n = size(3000), size(4000), size(3000)
        a, b = drawn(choose, dtype, m, k), drawn(choose, dtype, k, n)
        if number % 4 == 2:
            activation = choose.choice(["relu", "gelu", "gelu_tanh", "silu"])
            name = f"linear {dtype} {m}x{n}x{k} {activation}"
            yield name, partial(one, my_ops.linear, a, b.mT, activation=activation)
        else:
            how = {"precision": choose.choice(["highest", "high"])} if dtype == "float32" else {}
            name = " ".join(["gemm", dtype, f"{m}x{n}x{k}", *how.values()])
            yield name, partial(one, my_ops.gemm, a, b, **how)


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def of_results(results: tuple[Tensor, ...]) -> str:
    """Of all bits, in the order of a contiguous tensor."""
    whole = [t.detach().cpu().contiguous().flatten().view(torch.uint8) for t in results]
    return digest(b"".join(t.numpy().tobytes() for t in whole))


def launches(trace: Path) -> list[list[str]]:
    """Of each call: its kernels in order, from what the profiler wrote."""
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e.get("cat") == "kernel"]
    found: list[list[str]] = [[]]
    for event in sorted(events, key=lambda event: event["ts"]):
        if SEPARATOR in event["name"]:
            found.append([])
            continue
        about = event["args"]
        sizes = [about.get(key) for key in ("grid", "block", "shared memory")]
        found[-1].append(f"{event['name']} {sizes}")
    return found


def record(calls: Iterator[tuple[str, Call]]) -> list[dict[str, Any]]:
    rows = []
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for name, call in calls:
            torch.cuda._sleep(1)
            results = call()
            torch.cuda._sleep(1)
            rows.append({"case": name, "results": of_results(results)})
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiled.export_chrome_trace(str(path))
        found = launches(path)[1::2]  # what runs between two calls draws data
    for row, kernels in zip(rows, found, strict=True):
        row["launches"] = digest("\n".join(kernels).encode())
        row["kernels"] = len(kernels)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=400, help="random ones")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.cuda._sleep(1)  # loads it
    rows = record(cases()) + record(random_calls(options.calls, random.Random(0)))
    print(f"{len(rows)} calls")
    if options.output:
        measure.save(options.output, {"digests": rows})


if __name__ == "__main__":
    main()
