"""float32 attention under ``my_ops.fast_fp32()`` beside torch's own.

    python benchmarks/attention.py [--sweep 100] [--output results.json]

Times are medians of alternating runs on the GPU; host times are those of calls in a row.
``--sweep`` draws that many shapes and options. Errors are relative to float64, in the L2 norm.
Needs an NVIDIA GPU.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from measure import Run, gpu_times, save, show, under_switch, wall_times
from torch import Tensor

import my_ops


class Problem(NamedTuple):
    batch: int
    heads: int
    queries: int
    keys: int
    dim: int
    option: str = "plain"  # causal, bias (and its gradient), mask

    def __str__(self) -> str:
        lengths = f"{self.queries}" if self.queries == self.keys else f"{self.queries}:{self.keys}"
        option = "" if self.option == "plain" else f", {self.option}"
        return f"{self.batch}, {self.heads}, {lengths}, {self.dim}{option}"


TABLE = [
    Problem(16, 12, 512, 512, 64),
    Problem(4, 16, 1024, 1024, 64),
    Problem(4, 16, 1024, 1024, 64, "causal"),
    Problem(4, 16, 4096, 4096, 64),
    Problem(4, 16, 4096, 4096, 128),
    Problem(4, 16, 4096, 4096, 128, "causal"),
    Problem(8, 16, 1500, 1500, 80),
    Problem(16, 12, 512, 512, 64, "mask"),
    Problem(4, 16, 1024, 1024, 64, "bias"),
    Problem(384, 4, 384, 384, 32, "bias"),
]
HOST = [Problem(1, 2, 16, 16, 64), Problem(2, 8, 128, 128, 64), Problem(16, 12, 512, 512, 64)]


def tensors(problem: Problem) -> tuple[list[Tensor], Tensor, dict[str, Any]]:
    """Leaves (q, k, v, and a bias), the gradient of the output, options."""
    batch, heads, queries, keys, dim, option = problem
    torch.manual_seed(0)
    q, k, v, grad = (
        torch.randn(batch, length, heads, dim, device="cuda").transpose(1, 2)
        for length in (queries, keys, keys, queries)
    )
    leaves, options = [q, k, v], {"is_causal": option == "causal"}
    if option == "bias":
        options["attn_mask"] = torch.randn(1, heads, queries, keys, device="cuda")
        leaves.append(options["attn_mask"])
    elif option == "mask":
        options["attn_mask"] = torch.rand(batch, 1, 1, keys, device="cuda") < 0.9
    return [x.requires_grad_() for x in leaves], grad, options


def times(problem: Problem) -> dict[str, Any]:
    leaves, grad, options = tensors(problem)

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(*leaves[:3], **options)

    def backward(out: Tensor) -> Run:
        return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)

    with my_ops.fast_fp32():
        out = forward()
    found = gpu_times(
        {
            "my_ops": under_switch(torch.no_grad()(forward)),
            "torch": torch.no_grad()(forward),
            "my_ops backward": under_switch(backward(out)),
            "torch backward": backward(forward()),
        },
        budget=0.5,
    )
    ours, torchs = found["my_ops"], found["torch"]
    ours_back, torchs_back = found["my_ops backward"], found["torch backward"]
    work = problem.batch * problem.heads * problem.queries * problem.keys * problem.dim
    work *= 0.5 if problem.option == "causal" else 1
    return {
        "case": str(problem),
        "my_ops ms": round(ours / 1e3, 4),
        "torch ms": round(torchs / 1e3, 4),
        "x torch": round(torchs / ours, 3),
        "backward, my_ops ms": round(ours_back / 1e3, 4),
        "backward, torch ms": round(torchs_back / 1e3, 4),
        "backward, x torch": round(torchs_back / ours_back, 3),
        "TFLOP/s": round(4 * work / ours / 1e6, 1),
        "backward, TFLOP/s": round(10 * work / ours_back / 1e6, 1),
    }


def error(x: Tensor, exact: Tensor) -> float:
    return float(f"{((x.double() - exact).norm() / exact.norm()).item():.3g}")


def errors(problem: Problem, scale: float = 1.0) -> dict[str, Any]:
    leaves, grad, options = tensors(problem)
    leaves = [x.detach() * (scale if i < 2 else 1) for i, x in enumerate(leaves)]

    def computed(dtype: torch.dtype) -> list[Tensor]:
        given = [x.to(dtype).requires_grad_() for x in leaves]
        mask = {"attn_mask": given[3]} if len(given) > 3 else {}
        out = F.scaled_dot_product_attention(*given[:3], **{**options, **mask})
        return [out.detach(), *torch.autograd.grad(out, given, grad.to(dtype))]

    exact, torchs = computed(torch.float64), computed(torch.float32)
    with my_ops.fast_fp32():
        ours = computed(torch.float32)
    row: dict[str, Any] = {"case": f"{problem}" + (f", q and k times {scale:g}" * (scale != 1))}
    for name, x, t, e in zip(("out", "dq", "dk", "dv", "dbias"), ours, torchs, exact, strict=False):
        row[name], row[f"{name}, torch"] = error(x, e), error(t, e)
    return row


def host(problem: Problem) -> dict[str, Any]:
    leaves, grad, options = tensors(problem)
    q, k, v = (x.detach() for x in leaves[:3])

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, **options)

    def step() -> Any:
        return torch.autograd.grad(F.scaled_dot_product_attention(*leaves, **options), leaves, grad)

    row: dict[str, Any] = {"case": str(problem)}
    for name, run in (("forward", forward), ("with backward", step)):
        torchs = wall_times({"torch": run}, 300, 5)["torch"]
        with my_ops.fast_fp32():
            row[f"{name}, my_ops us"] = round(wall_times({"ours": run}, 300, 5)["ours"], 2)
        row[f"{name}, torch us"] = round(torchs, 2)
    return row


def drawn(count: int) -> list[Problem]:
    generator = random.Random(0)
    found: list[Problem] = []
    while len(found) < count:
        queries, keys = (int(2 ** generator.uniform(4, 12)) for _ in range(2))
        if generator.random() < 0.5:
            keys = queries
        problem = Problem(
            int(2 ** generator.uniform(0, 5)),
            int(2 ** generator.uniform(1, 5)),
            queries,
            keys,
            generator.choice([8, 16, 24, 32, 40, 48, 64, 64, 72, 80, 96, 128, 128]),
            generator.choice(["plain", "plain", "causal", "bias", "mask"]),
        )
        work = problem.batch * problem.heads * queries * keys
        if work <= 1 << 31 and work * problem.dim >= 1 << 20:
            found.append(problem)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", type=int, default=100)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    results: dict[str, list[dict[str, Any]]] = {}

    def measured(name: str, rows: Any) -> None:
        print(name)
        results[name] = []
        for row in rows:
            show(row)
            results[name].append(row)
            if given.output:
                save(given.output, results)

    measured("host", map(host, HOST))
    measured("speed", map(times, TABLE))
    measured("errors", map(errors, (p for p in TABLE if p.keys <= 1024 and p.batch < 100)))
    measured("errors of large scores", (errors(p, 5.0) for p in TABLE[:3]))
    measured("sweep", map(times, drawn(given.sweep)))


if __name__ == "__main__":
    main()
