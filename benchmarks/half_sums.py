"""What it costs, and what it gains, that cuBLAS adds no slices of a 16-bit product in 16 bits.

    python benchmarks/half_sums.py --output half_sums.json

Times torch.mm with torch's settings, without reduced-precision reductions, and with a float32
result that is then rounded. Errors are of the largest of one product, relative to the sum of
absolute values and in units of the type's eps / 2, which one rounding of a sum of one sign has.
"not finite" counts sums within the type's range that are infinite or NaN, of data whose first half
of k cancels the second.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import measure
import torch
from torch import Tensor

SHAPES = [  # m, n, k
    *product((8, 64, 256), (64, 256, 1024), (1024, 4096, 16384)),
    *product((1024, 4096), (1024, 4096), (1024, 4096)),
]


@contextlib.contextmanager
def float_sums() -> Iterator[None]:
    settings = torch.backends.cuda.matmul
    names = [f"allow_{kind}_reduced_precision_reduction" for kind in ("fp16", "bf16")]
    before = [getattr(settings, name) for name in names]
    for name in names:
        setattr(settings, name, False)
    yield
    for name, value in zip(names, before, strict=True):
        setattr(settings, name, value)


def ways(a: Tensor, b: Tensor) -> dict[str, Callable[[], Tensor]]:
    def without() -> Tensor:
        with float_sums():
            return torch.mm(a, b)

    return {
        "torch": lambda: torch.mm(a, b),
        "sums in float": without,
        "float result": lambda: torch.mm(a, b, out_dtype=torch.float32).to(a.dtype),
    }


def errors(a: Tensor, b: Tensor) -> dict[str, float]:
    exact, size = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    unit = torch.finfo(a.dtype).eps / 2
    return {
        name: round(((call().double() - exact).abs() / size).max().item() / unit, 3)
        for name, call in ways(a, b).items()
    }


def not_finite(a: Tensor, b: Tensor) -> dict[str, int]:
    """Of data whose partial sums pass the largest float16, but whose sums are small."""
    half = a.shape[1] // 2
    size = (3 * torch.finfo(torch.float16).max / half) ** 0.5
    a, b = torch.full_like(a, size), torch.full_like(b, size)
    a[:, half:] *= -1
    return {name: int((~call().isfinite()).sum()) for name, call in ways(a, b).items()}


def row(dtype: torch.dtype, m: int, n: int, k: int) -> dict[str, Any]:
    a, b = (torch.randn(shape, device="cuda").to(dtype) for shape in ((m, k), (k, n)))
    runs = ways(a, b)
    times = measure.gpu_times(runs, repeats=15, budget=0.3)
    found = {
        "case": f"{measure.name_of(dtype)} {m}x{n}x{k}",
        **{f"{name} us": round(time, 2) for name, time in times.items()},
        "errors": errors(a, b),
    }
    if dtype == torch.float16:
        found["not finite"] = not_finite(a, b)
    print(found, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    rows = [row(dtype, *s) for dtype in (torch.bfloat16, torch.float16) for s in SHAPES]
    if options.output:
        measure.save(options.output, {"sums": rows})


if __name__ == "__main__":
    main()
