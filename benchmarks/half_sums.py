"""What it costs, and what it gains, that cuBLAS adds no slices of a 16-bit product in 16 bits.

    python benchmarks/half_sums.py --output benchmarks/results/log/half_sums.json

torch.mm of random shapes and layouts with torch's settings, without reduced-precision reductions,
and with a float32 result that is then rounded. An error is the largest of a product, relative to
the sum of absolute values, in units of the type's eps / 2. Products for which torch's settings make
it larger are timed.
"""

from __future__ import annotations

import argparse
import contextlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import measure
import torch
from torch import Tensor

WORSE = 1.5  # torch's error over that of sums in float: such products are timed


def shapes(count: int, choose: random.Random) -> Iterator[tuple[str, int, int, int, str]]:
    """dtype, m, n, k and layouts; first two for which fuzzing found such sums."""
    yield "bfloat16", 9472, 8, 872, "NT"
    yield "bfloat16", 300, 40, 257, "TT"
    while count:
        m, n, k = (int(2 ** choose.uniform(3, most)) for most in (14, 14, 15))
        if choose.random() < 0.7:
            m, n, k = (-(-size // 8) * 8 for size in (m, n, k))
        if m * n * k < 2**33:
            count -= 1
            dtype = choose.choice(["bfloat16", "float16"])
            yield dtype, m, n, k, choose.choice(["NN", "NT", "TN", "TT"])


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


def row(dtype: str, m: int, n: int, k: int, layout: str) -> dict[str, Any]:
    def drawn(rows: int, columns: int, letter: str) -> Tensor:
        transposed = letter == "T"
        x = torch.randn((columns, rows) if transposed else (rows, columns), device="cuda")
        x = x.to(getattr(torch, dtype))
        return x.mT if transposed else x

    a, b = drawn(m, k, layout[0]), drawn(k, n, layout[1])
    found: dict[str, Any] = {"case": f"{dtype} {m}x{n}x{k} {layout}", "errors": errors(a, b)}
    if found["errors"]["torch"] > WORSE * found["errors"]["sums in float"]:
        times = measure.gpu_times(ways(a, b), repeats=15, budget=0.3)
        found |= {f"{name} us": round(time, 2) for name, time in times.items()}
        print(found, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--products", type=int, default=600)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    rows = [row(*product) for product in shapes(options.products, random.Random(0))]
    print(f"{sum('torch us' in r for r in rows)} of {len(rows)} are worse than with sums in float")
    if options.output:
        measure.save(options.output, {"sums": rows})


if __name__ == "__main__":
    main()
