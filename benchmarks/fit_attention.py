"""The numbers of kernels/attention/costs.h, from times of attention by our kernels and by torch's.

    python benchmarks/fit_attention.py [benchmarks/results/attention_fit.json]

The file is what benchmarks/attention.py wrote with a margin of 0 in the plan, so that it took every
call. The model is that of ``attention_gain``: linear in these numbers, which are the least squares
of its relative errors, none of them negative.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

RESULTS = Path(__file__).with_name("results") / "attention_fit.json"
SMS = 132
Case = tuple[int, int, int, int, str]  # all heads, queries, keys, the size of a head, the option


def parsed(name: str) -> Case:
    batch, heads, lengths, dim, *option = name.split(", ")
    queries, _, keys = lengths.partition(":")
    return int(batch) * int(heads), int(queries), int(keys or queries), int(dim), *(option or [""])


def over(a: int, b: int) -> int:
    return -(-a // b)


class Steps:
    """``AttentionSteps`` of costs.h."""

    def __init__(
        self, heads: int, rows: int, columns: int, tile: tuple[int, int], causal: bool, keys: bool
    ) -> None:
        steps, count = over(columns, tile[1]), over(rows, tile[0])
        own = [steps] * count
        if causal and keys:
            own = [max(0, steps - i * tile[0] // tile[1]) for i in range(count)]
        elif causal:
            own = [min(steps, over((i + 1) * tile[0], tile[1])) for i in range(count)]
        self.tiles, self.longest, self.all = heads * count, max(own), heads * sum(own)
        self.waves = over(self.tiles, SMS)
        self.on = max(self.all / SMS, (1 if causal else self.waves) * self.longest)


def padded(rows: int) -> int:
    return over(rows, 128) * 128


def bytes_of(heads: int, dim: int) -> float:
    return 4e-6 * heads * (dim + (64 if dim <= 64 else 128))


def forward(case: Case) -> list[float]:
    heads, q, k, dim, option = case
    wide, causal, bias = dim > 64, option == "causal", option in ("bias", "mask")
    seen = min(q, k) if causal else k
    s = Steps(heads, q, seen, (128, 64 if wide else 128), causal, False)
    split = bytes_of(heads, dim) * (padded(q) + 2 * padded(seen))
    return [1, split, s.on * (not wide), s.on * wide, s.on * bias, s.waves]


def torch_forward(case: Case) -> list[float]:
    heads, q, k, dim, option = case
    wide, causal, bias = dim > 64, option == "causal", option in ("bias", "mask")
    t = Steps(heads, q, k, (32, 128) if wide else (64, 64), causal, False)
    each, longest = t.all / SMS, t.longest
    sizes = [each * (dim <= 32), each * (32 < dim <= 64), each * wide]
    return [1, longest * (not wide), longest * wide, *sizes, each * bias, t.tiles / SMS]


def backward(case: Case) -> list[float]:
    heads, q, k, dim, option = case
    wide, causal, bias = dim > 64, option == "causal", option in ("bias", "mask")
    columns = 64 if wide else 128
    by_queries = Steps(heads, q, k, (128, columns), causal, False)
    by_keys = Steps(heads, k, q, (128, 64), causal, True)
    a, b = by_queries.on, by_keys.on
    split = bytes_of(heads, dim) * 2 * (padded(q) + padded(k))
    steps = [a * (not wide), b * (not wide), (a + 2 * b) * wide, (a * columns / 64 + b) * bias]
    scores = 4e-6 * heads * q * k * (option == "bias")
    return [not wide, wide, split, *steps, scores, by_queries.waves + by_keys.waves]


def torch_backward(case: Case) -> list[float]:
    heads, q, k, dim, option = case
    wide, causal, bias = dim > 64, option == "causal", option in ("bias", "mask")
    t = Steps(heads, k, q, (64, 64), causal, True)
    each = t.all / SMS
    sizes = [each * (dim <= 32), each * (32 < dim <= 64), each * wide, each * bias]
    scores = 4e-6 * heads * q * k * (option == "bias")
    return [1, *sizes, scores, t.tiles / SMS, t.longest * (not wide), t.longest * wide]


def fitted(features: Tensor, times: Tensor) -> Tensor:
    """Least squares of the relative errors by descent along one number after another."""
    a = features / times[:, None]
    length = a.norm(dim=0).clamp(min=1e-12)
    a = a / length
    products, target, x = a.T @ a, a.sum(0), torch.zeros(a.shape[1], dtype=a.dtype)
    for _ in range(3000):
        for j in range(len(x)):
            x[j] = (x[j] + target[j] - products[j] @ x).clamp(min=0)
    return x / length


PARTS: dict[str, tuple[Callable[[Case], list[float]], str]] = {
    "forward": (forward, "my_ops ms"),
    "torch_forward": (torch_forward, "torch ms"),
    "backward": (backward, "backward, my_ops ms"),
    "torch_backward": (torch_backward, "backward, torch ms"),
}


def main() -> None:
    results: dict[str, Any] = json.loads(Path(*(sys.argv[1:] or [RESULTS])).read_text())
    rows = results["speed"] + results["sweep"]
    for name, (of, column) in PARTS.items():
        features = torch.tensor([of(parsed(r["case"])) for r in rows], dtype=torch.float64)
        times = torch.tensor([r[column] * 1e3 for r in rows], dtype=torch.float64)
        costs = fitted(features, times)
        errors = (features @ costs / times - 1).abs()
        print(f".{name} = {{{', '.join(f'{c:.4g}' for c in costs.tolist())}}},")
        print(f"  // mean relative error {errors.mean():.3f}, largest {errors.max():.2f}")


if __name__ == "__main__":
    main()
