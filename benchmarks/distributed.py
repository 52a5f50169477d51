"""Training of the character model on 1, 2 and 4 GPUs: my_ops layers compared with torch.nn's.

    python benchmarks/distributed.py --output FILE

The model is that of examples/char_lm.py, and its peer has nn.LSTM and nn.Linear; they are
distributed as in examples/train_distributed.py. The batch grows with the number of GPUs (weak
scaling). Without a GPU it runs 1 and 2 processes with gloo at matching sizes, to check that it
works.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from measure import save
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from char_lm import BITS, EMBEDDING, CharLM
from train_distributed import adam, parallel, train_step

VOCABULARY = 128
WAYS = {  # name: what train_distributed.py calls it, and whether it uses bfloat16
    "ddp": ("ddp", False),
    "fsdp": ("fsdp", False),
    "fsdp bf16": ("fsdp", True),
    "tp": ("tp", False),
}
WARM_UP, ROUNDS = 5, 5
ROUND = 0.2  # approximate seconds for the steps of a round
TIMEOUT = 240  # seconds for everything with one number of processes

RULES = {
    "global batch": "batch x GPUs; a GPU runs its share of it; with tp, its part of the linear "
    "layers on all of it, and so the whole LSTM of torch.nn, which has no rule for DTensor",
    "tokens/s": "global batch x length / median over the rounds of the slowest process's step",
    "efficiency": "tokens/s at N GPUs / (N x tokens/s at 1 GPU), of the same model and way",
    "torch.nn": "float32 as PyTorch sets it: TF32 in nn.LSTM, not in nn.Linear",
    "torch.nn, no TF32": "float32's accuracy throughout, as with my_ops",
}


class TorchCharLM(nn.Module):
    """CharLM with torch.nn's layers: LSTM (4 gates) instead of LLTM (3)."""

    def __init__(self, vocabulary: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, EMBEDDING)
        self.lstm = nn.LSTM(EMBEDDING, hidden)
        self.encode = nn.Linear(hidden, BITS)
        self.decode = nn.Linear(BITS, vocabulary)

    def forward(self, text: Tensor) -> tuple[Tensor, Any]:
        output, state = self.lstm(self.embedding(text))
        bits = torch.sigmoid(self.encode(output))
        bits = bits + (bits.round() - bits).detach()  # straight-through gradient
        return self.decode(bits), state


class Trainee:
    """A model that is distributed over the processes, its optimizer and its batch."""

    def __init__(self, model: nn.Module, tf32: bool, batch: Tensor) -> None:
        self.model, self.tf32, self.batch = model, tf32, batch
        self.optimizer = adam(model)

    def seconds(self, steps: int) -> float:
        """Seconds per step on this process, after all have started together."""
        torch.backends.cudnn.allow_tf32 = self.tf32
        meet(self.batch.device)
        begin = time.perf_counter()
        for _ in range(steps):
            train_step(self.model, self.optimizer, self.batch)
        if self.batch.is_cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - begin) / steps


def meet(device: torch.device) -> None:
    slowest(torch.zeros(1, device=device))


def slowest(seconds: Tensor) -> list[float]:
    """The largest value over all processes, for each element."""
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.tolist()  # this waits for the device


def measure(name: str, device: torch.device, options: argparse.Namespace) -> dict[str, float]:
    """Seconds per step of each model: the median over the rounds, in which the models alternate."""
    way, bf16 = WAYS[name]
    size = dist.get_world_size()
    mesh = init_device_mesh(device.type, (size,))
    torch.manual_seed(0)
    text = torch.randint(VOCABULARY, (options.length + 1, size * options.batch), device=device)
    batch = text if way == "tp" else text.chunk(size, 1)[dist.get_rank()].contiguous()
    peers = {"my_ops": (CharLM, True), "torch.nn": (TorchCharLM, True)}
    if device.type == "cuda" and not bf16:
        peers["torch.nn, no TF32"] = (TorchCharLM, False)
    trainees: dict[str, Trainee] = {}
    for peer, (kind, tf32) in peers.items():
        model = parallel(kind(VOCABULARY, options.hidden).to(device), mesh, way, bf16)
        trainees[peer] = Trainee(model, tf32, batch)

    steps = {}
    for peer, trainee in trainees.items():
        trainee.seconds(WARM_UP)
        [one] = slowest(torch.tensor([trainee.seconds(1)], device=device))
        steps[peer] = max(1, int(ROUND / one))
    times = {peer: [0.0] * ROUNDS for peer in trainees}
    for turn in range(ROUNDS):
        for peer in reversed(trainees) if turn % 2 else trainees:
            times[peer][turn] = trainees[peer].seconds(steps[peer])
    return {
        peer: statistics.median(slowest(torch.tensor(values, device=device)))
        for peer, values in times.items()
    }


def work(
    rank: int, size: int, store: str, rows: SimpleQueue[dict[str, Any]], options: argparse.Namespace
) -> None:
    """The work of one process."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        store=dist.FileStore(store, size),
        rank=rank,
        world_size=size,
        timeout=timedelta(minutes=1),
    )
    for way in WAYS:
        for model, seconds in measure(way, device, options).items():
            if rank == 0:
                tokens = size * options.batch * options.length / seconds
                rows.put({"way": way, "model": model, "tokens/s": tokens, "step ms": seconds * 1e3})
    meet(device)
    dist.destroy_process_group()


def results(size: int, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields the rows for this many processes as they arrive; raises what a process raised."""
    rows = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (size, os.path.join(folder, "store"), rows, options)
        context = mp.start_processes(work, arguments, size, join=False, start_method="spawn")
        end = time.monotonic() + TIMEOUT
        done = False
        while not done:
            done = context.join(timeout=0.5)
            while not rows.empty():
                yield rows.get()
            if not done and time.monotonic() > end:
                for process in context.processes:
                    process.kill()
                raise TimeoutError(f"{size} processes were not done within {TIMEOUT} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=64, help="of one GPU")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--gpus", default="1,2,4", help="numbers of GPUs, the first of them 1")
    options = parser.parse_args()
    sizes = [int(size) for size in options.gpus.split(",")]
    if sizes[0] != 1:
        parser.error(f"--gpus must begin with 1, the base of efficiency, got {options.gpus}")
    there = torch.cuda.device_count() if torch.cuda.is_available() else 2

    table: list[dict[str, Any]] = []
    alone: dict[tuple[str, str], float] = {}
    for size in sizes:
        if size > there:
            print(f"{size} processes left out: this machine runs {there} at most")
            continue
        for row in results(size, options):
            rate = row["tokens/s"]
            efficiency = rate / size / alone.setdefault((row["way"], row["model"]), rate)
            table.append({"gpus": size, **row, "efficiency": round(efficiency, 3)})
            table[-1].update({"tokens/s": round(rate), "step ms": round(row["step ms"], 3)})
            print("  ".join(f"{key} {value}" for key, value in table[-1].items()), flush=True)
    if options.output:
        sizes_of_model = {name: getattr(options, name) for name in ("hidden", "batch", "length")}
        save(options.output, {"sizes": sizes_of_model, "rules": RULES, "distributed": table})


if __name__ == "__main__":
    main()
