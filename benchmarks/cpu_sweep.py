"""Recurrent layers and small calls on the CPU, each beside torch's in the same process.

    python benchmarks/cpu_sweep.py layers rnn small [--seconds 60] [--seed 0] [--output FILE]

``layers``: LSTM and GRU beside torch's, and LLTM beside the same formulas in PyTorch, of 1 to 130
units and 1 to 512 sequences; sizes are drawn evenly on a logarithmic scale, every second one of
units from those near a multiple of 8. ``rnn``: RNN of some sizes, once compiled. ``small``: calls
that take microseconds. A ratio is the median, over alternating rounds, of torch's time over ours;
with one thread it is the processor's time. Cases below 0.98 are printed.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measure import Run, environment, name_of, save
from torch import Tensor

import my_ops

ROUND, ROUNDS = 2e-3, 11  # seconds of a round, and how many
SLOWER = 0.98
DTYPES = (torch.float32, torch.bfloat16)


@dataclass
class Pair:
    name: str
    ours: Run
    torchs: Run


class PlainLLTMCell(torch.nn.Module):
    """LLTM's step as one writes it in PyTorch: a product and pointwise operations."""

    def __init__(self, cell: Any) -> None:
        super().__init__()
        self.hidden, self.weights, self.bias = cell.hidden_size, cell.weights, cell.bias

    def forward(self, x: Tensor, hx: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        h, c = hx or (x.new_zeros(len(x), self.hidden),) * 2
        gates = torch.addmm(self.bias, torch.cat([h, x], 1), self.weights.t())
        i, o, g = gates.chunk(3, 1)
        c = c + F.elu(g) * torch.sigmoid(i)
        return torch.tanh(c) * torch.sigmoid(o), c


class PlainLLTM(torch.nn.Module):
    """The same at every step."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.cell = PlainLLTMCell(layer.cells[0])

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        state, outputs = None, []
        for step in x:
            state = self.cell(step, state)
            outputs.append(state[0])
        return torch.stack(outputs), *(state or ())


def ways(layer: Any, x: Tensor, grad: Tensor) -> Iterator[tuple[str, Run]]:
    def train() -> None:
        layer.zero_grad()
        layer(x)[0].backward(grad)

    yield "forward", torch.no_grad()(lambda: layer(x))
    yield "forward + backward", train


def layers(draw: random.Random) -> Iterator[Pair]:
    while True:
        batch, inputs, hidden = (round(2 ** draw.uniform(0, top)) for top in (9.0, 7.0, 7.0))
        if draw.random() < 0.5:
            hidden = max(1, 8 * draw.randint(0, 16) + draw.choice((-2, -1, 0, 0, 1, 2)))
        steps = draw.choice((1, 4, 20, 60))
        name, dtype = draw.choice(("LSTM", "GRU", "LLTM")), draw.choice(DTYPES)
        ours = getattr(my_ops.nn, name)(inputs, hidden, dtype=dtype)
        if name == "LLTM":
            torchs: Any = PlainLLTM(ours)
        else:
            torchs = getattr(torch.nn, name)(inputs, hidden, dtype=dtype)
        x = torch.randn(steps, batch, inputs).to(dtype)
        grad = torch.randn(steps, batch, hidden).to(dtype)
        size = f"{name} {name_of(dtype)} T{steps} B{batch} I{inputs} H{hidden}"
        for (way, run), (_, other) in zip(ways(ours, x, grad), ways(torchs, x, grad), strict=True):
            yield Pair(f"{size} {way}", run, other)


def rnn() -> Iterator[Pair]:
    sizes = [(1, 1, 64), (4, 64, 64), (12, 64, 64), (24, 1, 64), (32, 128, 128), (16, 256, 64)]
    sizes += [(100, 1, 128), (50, 16, 512), (64, 4, 1024), (200, 64, 16)]
    for (steps, batch, hidden), dtype in itertools.product(sizes, (*DTYPES, torch.float64)):
        ours, torchs = (m.nn.RNN(hidden, hidden, dtype=dtype) for m in (my_ops, torch))
        x, grad = (torch.randn(steps, batch, hidden).to(dtype) for _ in range(2))
        size = f"RNN {name_of(dtype)} T{steps} B{batch} H{hidden}"
        for (way, run), (_, other) in zip(ways(ours, x, grad), ways(torchs, x, grad), strict=True):
            yield Pair(f"{size} {way}", run, other)


def small() -> Iterator[Pair]:
    def pair(name: str, ours: Any, torchs: Any, *arguments: Any) -> Pair:
        return Pair(name, lambda: ours(*arguments), lambda: torchs(*arguments))

    def gradients(function: Any, grad: Tensor, tensors: list[Tensor]) -> Run:
        return lambda: torch.autograd.grad(function(*tensors), tensors, grad)

    for n in (1, 32):
        a, b, bias = torch.randn(n, n), torch.randn(n, n), torch.randn(n)
        yield pair(f"gemm {n} x {n}", my_ops.gemm, torch.mm, a, b)
        yield pair(f"linear {n} x {n}", my_ops.linear, F.linear, a, b, bias)
        yield pair(f"d_sigmoid {n} x {n}", my_ops.d_sigmoid, torch.sigmoid, a)
        yield pair(f"add_one {n} x {n}", my_ops.add_one, lambda x: x + 1, a)
        yield pair(f"custom_add {n} x {n}", my_ops.custom_add, torch.add, a, b)
        yield pair(f"round_ste {n} x {n}", my_ops.round_ste, torch.round, a)
        yield pair(f"fill_index {n} x {n}", my_ops.fill_index, torch.zeros, n, n)

        leaves = [t.requires_grad_() for t in (torch.randn(n, n), torch.randn(n, n), bias.clone())]
        for name, torchs, count in (
            ("gemm", torch.mm, 2),
            ("linear", F.linear, 3),
            ("d_sigmoid", torch.sigmoid, 1),
            ("add_one", lambda x: x + 1, 1),
            ("custom_add", torch.add, 2),
            ("round_ste", torch.round, 1),
        ):
            runs = (
                gradients(function, a, leaves[:count])
                for function in (getattr(my_ops, name), torchs)
            )
            yield Pair(f"{name} {n} x {n} forward + backward", *runs)

    def step(cell: Any, x: Tensor) -> Run:
        def run() -> None:
            cell.zero_grad()
            state = cell(x)
            (state[0] if isinstance(state, tuple) else state).sum().backward()

        return run

    cells = "LSTMCell", "GRUCell", "RNNCell", "LLTMCell"
    for name, batch, size in itertools.product(cells, (1, 16), (4, 32)):
        x = torch.randn(batch, size)
        ours = getattr(my_ops.nn, name)(size, size)
        torchs = PlainLLTMCell(ours) if name == "LLTMCell" else getattr(torch.nn, name)(size, size)
        case = f"{name} B{batch} H{size}"
        yield Pair(
            f"{case} forward", *(torch.no_grad()(partial(cell, x)) for cell in (ours, torchs))
        )
        yield Pair(f"{case} forward + backward", step(ours, x), step(torchs, x))


def timed(pair: Pair) -> dict[str, Any]:
    runs = pair.ours, pair.torchs
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    calls = [calls_of(run) for run in runs]
    times: list[list[float]] = [[], []]
    for _ in range(ROUNDS):
        for run, count, into in zip(runs, calls, times, strict=True):
            begin = clock()
            for _ in range(count):
                run()
            into.append((clock() - begin) / count * 1e6)
    ours, torchs = map(statistics.median, times)
    ratio = statistics.median(b / a for a, b in zip(*times, strict=True))
    return {
        "case": pair.name,
        "my_ops us": round(ours, 2),
        "torch us": round(torchs, 2),
        "x torch": round(ratio, 3),
    }


def calls_of(run: Run) -> int:
    """How many calls fill a round."""
    for _ in range(2):
        begin = time.perf_counter()
        run()
    return max(1, int(ROUND / (time.perf_counter() - begin)))


def measured(pairs: Iterator[Pair], seconds: float, threads: int) -> list[dict[str, Any]]:
    torch.set_num_threads(threads)
    end, rows = time.monotonic() + seconds, []
    for pair in pairs:
        if time.monotonic() > end:
            break
        rows.append(timed(pair))
        if rows[-1]["x torch"] < SLOWER:
            print(*rows[-1].values(), f"{threads} thread(s)")
    return rows


def processor() -> str:
    """Its name, and the instructions that torch uses."""
    with open("/proc/cpuinfo") as info:
        names = [line.partition(":")[2].strip() for line in info if line.startswith("model name")]
    return f"{names[0]}, {torch.backends.cpu.get_cpu_capability()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("part", nargs="+", choices=["layers", "rnn", "small"])
    parser.add_argument("--seconds", type=float, default=60, help="for each part and threads")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    parts: dict[str, Callable[[], Iterator[Pair]]] = {
        "layers": lambda: layers(random.Random(arguments.seed)),
        "rnn": rnn,
        "small": small,
    }
    sections: dict[str, Any] = {}
    for part in arguments.part:
        for threads in (1, 2) if part == "layers" else (1,):
            rows = measured(parts[part](), arguments.seconds, threads)
            sections[f"{part}, {threads} thread(s)"] = rows
            ratios = sorted(row["x torch"] for row in rows)
            print(
                f"{part}, {threads} thread(s): {len(rows)} cases, {ratios[0]} to {ratios[-1]}, "
                f"median {statistics.median(ratios)}, "
                f"{sum(r < SLOWER for r in ratios)} below {SLOWER}"
            )
    if arguments.output:
        save(arguments.output, sections, environment() | {"processor": processor()})


if __name__ == "__main__":
    main()
