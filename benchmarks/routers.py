"""Products of a router's sizes: cuBLAS in float32, and my_ops with float32 and bfloat16 tokens.

    python benchmarks/routers.py [CASE ...] [--budget SECONDS] [--output results.json]

A case's name has the tokens, their width and the experts, then which product: forward, or the
gradient of the weight or of the tokens. Then training steps of a router with a float32 weight and
tokens in bfloat16, alone and with experts in bfloat16. Times are median GPU microseconds. Errors
are root mean squares against float64, relative to the exact results. Needs an NVIDIA GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from measure import Run, gpu_times, save, show
from torch import Tensor, nn

import my_ops

SIZES = [  # tokens, width, experts
    (1, 4096, 64),
    (16, 4096, 64),
    (128, 6144, 128),
    (1024, 4096, 192),
    (4096, 4096, 64),
    (16384, 4096, 64),
    (16384, 6144, 128),
    (16384, 7168, 256),
    (16384, 3072, 384),
    (16384, 6144, 768),
]


def products(tokens: int, width: int, experts: int) -> Iterator[tuple[str, Tensor, Tensor, int]]:
    """Which product, its operands, and which of them may have 16 bits."""
    x, weight = torch.randn(tokens, width, device="cuda"), torch.randn(experts, width).cuda()
    x = x.bfloat16().float()
    grad = torch.randn(tokens, experts, device="cuda")
    yield "forward", x, weight.mT, 0
    yield "gradient of the weight", grad.mT, x, 1
    yield "gradient of the tokens", grad, weight, -1


def error(result: Tensor, exact: Tensor) -> float:
    return float(f"{((result - exact).norm() / exact.norm()).item():.1e}")


def row(name: str, operands: list[Tensor], half: int, budget: float) -> dict[str, Any]:
    runs: dict[str, Run] = {
        "cuBLAS": lambda: torch.mm(*operands),
        "float32": lambda: my_ops.gemm(*operands),
    }
    if half >= 0:
        mixed = [x.bfloat16() if i == half else x for i, x in enumerate(operands)]
        runs["bfloat16"] = lambda: my_ops.gemm(*mixed)
    times = gpu_times(runs, budget=budget)
    a, b = operands
    exact = a.double() @ b.double()
    result: dict[str, Any] = {"case": name}
    for way, run in runs.items():
        result |= {f"{way} us": round(times[way], 1), f"{way} error": error(run(), exact)}
        result[f"x cuBLAS, {way}"] = round(times["cuBLAS"] / times[way], 2)
    return result


class Cast(nn.Linear):
    """torch.nn.Linear refuses an input of 16 bits."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


class Experts(nn.Module):
    """Each token goes to its two experts of the largest scores, which take a limited number."""

    def __init__(self, width: int, hidden: int, router: nn.Linear) -> None:
        super().__init__()
        self.router, count = router, router.out_features
        self.up = nn.Parameter((torch.randn(count, width, hidden) / width**0.5).bfloat16())
        self.down = nn.Parameter((torch.randn(count, hidden, width) / hidden**0.5).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        shares, chosen = self.router(x).softmax(-1).topk(2, -1)
        expert, order = chosen.flatten().sort(stable=True)
        count, token = len(self.up), order // 2
        room = len(order) // count
        place = torch.arange(len(order), device=x.device) - torch.searchsorted(expert, expert)
        slot = torch.where(place < room, expert * room + place, count * room)  # the last is dropped
        taken = x.new_zeros(count * room + 1, x.shape[1]).index_copy(0, slot, x[token])
        y = torch.relu(torch.bmm(taken[:-1].view(count, room, -1), self.up))
        y = torch.cat((torch.bmm(y, self.down).flatten(0, 1), x.new_zeros(1, x.shape[1])))
        weighted = y[slot] * shares.flatten()[order][:, None]
        return torch.zeros(x.shape, device=x.device).index_add(0, token, weighted)


def step(module: nn.Module, x: Tensor) -> Run:
    def run() -> None:
        module(x).square().mean().backward()
        module.zero_grad()
        x.grad = None

    return run


def steps(budget: float) -> Iterator[dict[str, Any]]:
    """Of the router alone, and with its experts."""
    tokens, width, hidden, experts = 16384, 4096, 256, 64
    x = torch.randn(tokens, width, device="cuda").bfloat16().requires_grad_()
    pairs = {
        "the router": {"torch": Cast(width, experts), "my_ops": my_ops.nn.Linear(width, experts)},
        "with experts": {
            "torch": Experts(width, hidden, Cast(width, experts)),
            "my_ops": Experts(width, hidden, my_ops.nn.Linear(width, experts)),
        },
    }
    for what, ways in pairs.items():
        runs = {way: step(module.cuda(), x) for way, module in ways.items()}
        result: dict[str, Any] = {"case": f"{tokens}, {width} to {experts}, {what}"}
        for way, us in gpu_times(runs, budget=budget).items():
            result[f"{way} us"] = round(us, 1)
        result["x torch"] = round(result["torch us"] / result["my_ops us"], 2)
        yield result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("case", nargs="*", default=[""], help="part of a case's name")
    parser.add_argument("--budget", type=float, default=0.3, help="seconds of timing a case")
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for tokens, width, experts in SIZES:
        for which, a, b, half in products(tokens, width, experts):
            name = f"{tokens}, {width} to {experts}: {which}"
            if any(part in name for part in arguments.case):
                rows.append(row(name, [a, b], half, arguments.budget))
                show(rows[-1])
    found = {"products": rows, "training step": list(steps(arguments.budget))}
    for result in found["training step"]:
        show(result)
    if arguments.output:
        save(arguments.output, found)


if __name__ == "__main__":
    main()
