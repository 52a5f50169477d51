"""LSTM, GRU and LLTM layers compared with cuDNN's, in the same run on the same data.

    python benchmarks/recurrent.py [FAMILY ...] [--alone] [--output results.json]

``table``: sizes that people train, forward and forward + backward, everything included. ``high``:
float32 layers with many rows while torch allows TF32 in products. ``sweep``: sizes drawn evenly on
a logarithmic scale. ``reset``: a layer with resets, beside the same layer without. ``host``: short
training steps on the host's clock. ``memory``: what a layer holds between forward and backward,
the output included, in MiB. ``converted``: torch's layers, also of two directions and of several
layers, before and after ``my_ops.convert``. ``converted_host``: short ones on the host's clock.
``rnn``: ``nn.RNN`` by the kernels of its cell, which a call may leave to cuDNN, likewise. Times are
medians of alternating runs, in microseconds; those of the GPU but for ``host``, ``converted_host``
and ``rnn``. Except for ``high`` the layers of both are called with their defaults, with the
TF32 that each is allowed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import (
    Case,
    Run,
    gpu_times,
    name_of,
    row,
    save,
    show,
    wall_times,
    with_tf32,
    without_tf32,
)
from torch import Tensor

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
STEPS, SIZES = (16, 64, 256, 1024), (32, 96, 256, 768, 2048)
BATCHES = (1, 4, 16, 64, 256, 1024, 8192)
MOST = 1 << 38  # multiply-adds of a forward pass in the sweep
FORMS = ((1, False), (1, True), (2, True))  # layers, and whether bidirectional
MOST_CONVERTED = 1 << 30  # of batch times hidden squared
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LAYERS = {"LSTM": torch.nn.LSTM, "GRU": torch.nn.GRU, "LLTM": torch.nn.LSTM}
GATES = {"LSTM": 4, "GRU": 3, "LLTM": 3}


def ways(x: Tensor, grad: Tensor) -> list[tuple[str, Callable[[Any], Run]]]:
    """Inference and a training step of a layer, with that gradient of its output."""
    leaf = x.clone().requires_grad_()

    def inference(layer: Any) -> Run:
        return torch.no_grad()(lambda: layer(x))

    def training(layer: Any) -> Run:
        return lambda: layer(leaf)[0].backward(grad)

    return [("forward", inference), ("forward + backward", training)]


def cases(
    name: str, steps: int, batch: int, size: int, dtype: torch.dtype, high: bool = False
) -> Iterator[Case]:
    kind = str(dtype).removeprefix("torch.") + " high" * high
    x = torch.randn(steps, batch, size, device="cuda", dtype=dtype)
    ours = getattr(my_ops.nn, name)(size, size, device="cuda", dtype=dtype)
    theirs = LAYERS[name](size, size, device="cuda", dtype=dtype)
    theirs.flatten_parameters()
    for (way, run), passes in zip(ways(x, torch.randn_like(x)), (1, 3), strict=True):
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


def before_and_after(
    name: str, dtype: torch.dtype, steps: int, batch: int, size: int, layers: int, both: bool
) -> Iterator[Case]:
    x = torch.randn(steps, batch, size, device="cuda", dtype=dtype)
    options: Any = {"bidirectional": both, "device": "cuda", "dtype": dtype}
    theirs, ours = (LAYERS[name](size, size, layers, **options) for _ in range(2))
    my_ops.convert(ours)
    what = f"{name} {name_of(dtype)} T{steps} B{batch} H{size}"
    what += f" {layers} layers" * (layers > 1) + " bidirectional" * both
    for way, run in ways(x, torch.cat([x, x], 2) if both else x):
        yield Case(f"{what} {way}", run(ours), {"torch.nn": run(theirs)})


def converted() -> Iterator[Case]:
    for form in FORMS:
        for dtype in DTYPES:
            for name in ("LSTM", "GRU"):
                for batch in (1, 16, 64, 256, 1024, 8192):
                    for size in (32, 96, 128, 256, 512, 1024, 1536):
                        if batch * size * size <= MOST_CONVERTED:
                            yield from before_and_after(name, dtype, 64, batch, size, *form)


def converted_host() -> Iterator[Case]:
    for form in FORMS:
        for dtype in (torch.float16, torch.float32):
            for name in ("LSTM", "GRU"):
                for sizes in ((8, 16, 32), (64, 16, 32), (64, 16, 128)):
                    yield from before_and_after(name, dtype, *sizes, *form)


class RnnOfKernels(my_ops.nn.RNN):
    def _faster_in_torch(self, *_: Any) -> None:
        return None


def rnn() -> Iterator[Case]:
    for dtype in DTYPES:
        for size in (32, 128, 512, 1024):
            for batch in (1, 16, 128):
                theirs, ours = (
                    kind(size, size, device="cuda", dtype=dtype)
                    for kind in (torch.nn.RNN, RnnOfKernels)
                )
                for steps in (32, 64, 256):
                    x = torch.randn(steps, batch, size, device="cuda", dtype=dtype)
                    what = f"RNN {name_of(dtype)} T{steps} B{batch} H{size}"
                    for way, run in ways(x, torch.randn_like(x)):
                        yield Case(f"{what} {way}", run(ours), {"cuDNN": run(theirs)})


def with_resets(name: str, steps: int, batch: int, size: int, dtype: torch.dtype) -> Iterator[Case]:
    x = torch.randn(steps, batch, size, device="cuda", dtype=dtype)
    grad, leaf = torch.randn_like(x), x.clone().requires_grad_()
    layer = getattr(my_ops.nn, name)(size, size, device="cuda", dtype=dtype)
    starts = torch.rand(steps, batch, device="cuda") < 1 / 64

    @torch.no_grad()
    def inference(reset: Tensor | None = None) -> Any:
        return layer(x, reset=reset)

    def training(reset: Tensor | None = None) -> Any:
        return layer(leaf, reset=reset)[0].backward(grad)

    for way, run in (("forward", inference), ("forward + backward", training)):
        what = f"{name} {name_of(dtype)} T{steps} B{batch} H{size} {way}"
        yield Case(what, partial(run, starts), {"no reset": run})


def reset() -> Iterator[Case]:
    for steps, batch, size in TABLE:
        for dtype in DTYPES:
            for name in LAYERS:
                yield from with_resets(name, steps, batch, size, dtype)


def host() -> Iterator[Case]:
    for batch, size in ((1, 128), (16, 128), (16, 512)):
        for dtype in DTYPES:
            for name in LAYERS:
                *_, training = cases(name, 4, batch, size, dtype)
                yield training


def memory() -> Iterator[dict[str, Any]]:
    def held(layer: Any, leaf: Tensor) -> float:
        layer(leaf)[0].sum().backward()  # workspaces and gradients stay
        before = torch.cuda.memory_allocated()
        result = layer(leaf)
        kept = torch.cuda.memory_allocated() - before
        del result
        return kept / (1 << 20)

    for steps, batch, size in TABLE:
        for dtype in DTYPES:
            leaf = torch.randn(steps, batch, size, device="cuda", dtype=dtype, requires_grad=True)
            for name in LAYERS:
                ours = held(getattr(my_ops.nn, name)(size, size, device="cuda", dtype=dtype), leaf)
                theirs = held(LAYERS[name](size, size, device="cuda", dtype=dtype), leaf)
                yield {
                    "case": f"{name} {name_of(dtype)} T{steps} B{batch} H{size}",
                    "my_ops MiB": round(ours, 2),
                    "cuDNN MiB": round(theirs, 2),
                    "x cuDNN": round(theirs / ours, 3),
                }


def timed(
    found: Iterator[Case], times: Callable[[dict[str, Run]], dict[str, float]], alone: bool
) -> Iterator[dict[str, Any]]:
    for case in found:
        others = {} if alone else case.others
        yield row(case, times({"my_ops": case.ours, **others}), {})


def main() -> None:
    on_gpu: dict[str, Callable[[], Iterator[Case]]] = {
        "table": table,
        "high": high,
        "sweep": sweep,
        "converted": converted,
        "reset": reset,
    }
    on_host = {
        "host": (host, partial(wall_times, calls=100)),
        "converted_host": (converted_host, partial(wall_times, calls=40, rounds=5)),
        "rnn": (rnn, partial(wall_times, calls=4, rounds=5)),
    }
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("family", nargs="*", choices=[*on_gpu, *on_host, "memory"])
    parser.add_argument("--budget", type=float, default=0.6, help="seconds a case")
    parser.add_argument("--alone", action="store_true", help="without peers, to compare builds")
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    arguments = parser.parse_args()
    by_gpu = partial(gpu_times, budget=arguments.budget)
    families = {
        **{
            name: partial(timed, family(), by_gpu, arguments.alone)
            for name, family in on_gpu.items()
        },
        **{
            name: partial(timed, family(), times, arguments.alone)
            for name, (family, times) in on_host.items()
        },
        "memory": memory,
    }
    sections: dict[str, Any] = {}
    for family in arguments.family or families:
        sections[family] = []
        for result in families[family]():
            sections[family].append(result)
            show(result)
        if arguments.output:
            save(arguments.output, sections)


if __name__ == "__main__":
    main()
