"""LSTM, GRU and LLTM layers compared with cuDNN's, in the same run on the same data.

    python benchmarks/recurrent.py [table] [high] [sweep] [--alone] [--output results.json]

``table``: sizes that people train, forward and forward + backward, everything included. ``high``:
float32 layers with many rows while torch allows TF32 in products. ``sweep``: sizes drawn evenly on
a logarithmic scale. Times are medians of alternating runs, in microseconds of the GPU. Except for
``high`` the layers of both are called with their defaults, with the TF32 that each is allowed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from measure import Case, Run, gpu_times, row, save, show, with_tf32, without_tf32

import my_ops

TABLE = [  # steps, batch, inputs and hidden
    (512, 16, 512),
    (1024, 16, 768),
    (512, 64, 1024),
    (512, 256, 1024),
    (128, 8000, 256),
    (1024, 1, 256),
    (128, 32, 128),
    (16, 128, 512),
]
HIGH = [(512, 64, 1024), (512, 256, 1024), (128, 8000, 256), (128, 1024, 512)]
STEPS, BATCHES, SIZES = (16, 64, 256, 1024), (1, 8, 64, 512, 4096), (32, 96, 256, 768, 2048)
MOST = 1 << 39  # multiply-adds of a forward pass in the sweep
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LAYERS = {"LSTM": torch.nn.LSTM, "GRU": torch.nn.GRU, "LLTM": torch.nn.LSTM}
GATES = {"LSTM": 4, "GRU": 3, "LLTM": 3}


def cases(
    name: str, steps: int, batch: int, size: int, dtype: torch.dtype, high: bool = False
) -> Iterator[Case]:
    kind = str(dtype).removeprefix("torch.") + " high" * high
    x = torch.randn(steps, batch, size, device="cuda", dtype=dtype)
    ours = getattr(my_ops.nn, name)(size, size, device="cuda", dtype=dtype)
    theirs = LAYERS[name](size, size, device="cuda", dtype=dtype)
    theirs.flatten_parameters()
    grad, leaf = torch.randn_like(x), x.clone().requires_grad_()

    def inference(layer: Any) -> Run:
        return torch.no_grad()(lambda: layer(x))

    def training(layer: Any) -> Run:
        return lambda: layer(leaf)[0].backward(grad)

    for way, run, passes in (("forward", inference, 1), ("forward + backward", training, 3)):
        peers = {"cuDNN": run(theirs)}
        if high:
            peers["my_ops strict"] = run(ours)
        elif dtype == torch.float32:  # cuDNN's default is TF32
            peers["cuDNN strict"] = without_tf32(run(theirs))
        yield Case(
            f"{name} {kind} T{steps} B{batch} H{size} {way}",
            with_tf32(run(ours)) if high else run(ours),
            peers,
            flops=4 * passes * GATES[name] * steps * batch * size * size,
        )


def table() -> Iterator[Case]:
    for steps, batch, size in TABLE:
        for dtype in DTYPES:
            for name in LAYERS:
                yield from cases(name, steps, batch, size, dtype)


def high() -> Iterator[Case]:
    for steps, batch, size in HIGH:
        for name in LAYERS:
            yield from cases(name, steps, batch, size, torch.float32, high=True)


def sweep() -> Iterator[Case]:
    for steps in STEPS:
        for batch in BATCHES:
            for size in SIZES:
                if 8 * steps * batch * size * size <= MOST:
                    for dtype in DTYPES:
                        for name in ("LSTM", "GRU"):
                            yield from cases(name, steps, batch, size, dtype)


def main() -> None:
    families = {"table": table, "high": high, "sweep": sweep}
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("family", nargs="*", choices=[*families])
    parser.add_argument("--budget", type=float, default=0.6, help="seconds a case")
    parser.add_argument("--alone", action="store_true", help="without cuDNN, to compare builds")
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    arguments = parser.parse_args()
    sections: dict[str, Any] = {}
    for family in arguments.family or families:
        sections[family] = []
        for case in families[family]():
            others = {} if arguments.alone else case.others
            times = gpu_times({"my_ops": case.ours, **others}, budget=arguments.budget)
            sections[family].append(row(case, times, {}))
            show(sections[family][-1])
        if arguments.output:
            save(arguments.output, sections)


if __name__ == "__main__":
    main()
