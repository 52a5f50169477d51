"""Writes which kernel takes which product into docs/which_kernel.md and its picture.

The answers come from the plan of the installed my_ops, on any machine.
tests/package/test_docs.py fails if the page differs from what this writes.
"""

from __future__ import annotations

import argparse
import re
from itertools import groupby
from pathlib import Path

from svg import Drawing
from tables import table

from my_ops import _explain

PAGE = Path(__file__).resolve().parents[2] / "docs/which_kernel.md"
COLORS = {
    "small": "green",
    "fp32_skinny": "purple",
    "fp32_narrow": "yellow",
    "fp32_short": "teal",
    "fp32_sm90": "blue",
    "fp32_sm80": "red",
    "half_sm90": "orange",
    "cuBLAS": "grey",
}
LARGEST = 13  # the largest exponent: sizes are powers of two
PANELS = [  # title, arguments, whether n = m or n = k varies along y, what is added to sizes
    ("gemm, fp32", "gemm --dtype float32", "k", 0),
    ("linear, fp32", "linear --dtype float32", "n = k", 0),
    ('gemm, fp32, "high"', "gemm --precision high", "k", 0),
    ('gemm, fp32, "highest", with TF32 on', "gemm --tf32 --precision highest", "k", 0),
    ("gemm, bf16, all sizes + 1", "gemm --dtype bfloat16", "k", 1),
    ("linear with silu, bf16", "linear --dtype bfloat16 --activation silu", "k", 0),
]
SHAPES = [
    (16, 16, 16),
    (128, 128, 128),
    (512, 512, 512),
    (1000, 1001, 1003),
    (2048, 2048, 2048),
    (4096, 4096, 4096),
    (1, 4096, 4096),
    (16, 4096, 4096),
    (64, 4096, 4096),
    (8192, 4096, 16),
    (147456, 128, 128),
    (64, 64, 65536),
    (16384, 64, 4096),
]
COLUMNS = {
    "fp32": "gemm --dtype float32",
    'fp32, "high"': "gemm --precision high",
    'fp32, "highest", with TF32 on': "gemm --tf32 --precision highest",
    "bf16": "gemm --dtype bfloat16",
    "bf16, `linear` with silu": "linear --dtype bfloat16 --activation silu",
    "fp64": "gemm --dtype float64",
}


def kernel(what: str, m: int, n: int, k: int) -> str:
    op, *options = what.split()
    parser = argparse.ArgumentParser()
    _explain.add_arguments(parser)
    answer = _explain.explain(parser.parse_args([op, str(m), str(n), str(k), *options]))
    name = re.split("[,:]", answer.splitlines()[-1].strip())[0]
    return "cuBLAS" if name == "library" else name


def picture() -> Drawing:
    cell, left, top, across, down = 16, 50, 50, 300, 300
    side = cell * (LARGEST + 1)
    columns = 2
    rows = -(-len(PANELS) // columns)
    drawing = Drawing(left + columns * across, top + rows * down, "Which kernel takes a product")
    used: set[str] = set()
    for number, (title, what, upward, more) in enumerate(PANELS):
        x0, y0 = left + number % columns * across, top + number // columns * down
        drawing.text(x0, y0 + 4, title, anchor="start", bold=True)
        y0 += 14
        for j in range(LARGEST + 1):
            y, other = y0 + side - cell * (j + 1), (1 << j) + more
            taken = []
            for i in range(LARGEST + 1):
                m = (1 << i) + more
                shape = (m, other, other) if upward == "n = k" else (m, m, other)
                taken.append(kernel(what, *shape))
            used.update(taken)
            i = 0
            for name, squares in groupby(taken):
                width = len(list(squares))
                drawing.rect(x0 + cell * i, y, cell * width - 1, cell - 1, COLORS[name])
                i += width
        for power in range(0, LARGEST + 1, 4):
            middle = cell * (power + 0.5)
            label = str(1 << power)
            drawing.text(x0 + middle, y0 + side + 13, label, size=11, color="faint")
            place = x0 - 4, y0 + side - middle + 4
            drawing.text(*place, label, size=11, anchor="end", color="faint")
        across_name = "m" if upward == "n = k" else "m = n"
        drawing.text(x0 + side / 2, y0 + side + 29, across_name, size=12)
        drawing.text(x0 - 6, y0 + 12, upward, size=12, anchor="end")
    for number, name in enumerate(name for name in COLORS if name in used):
        drawing.rect(left + 105 * number, 8, 13, 13, COLORS[name])
        drawing.text(left + 105 * number + 18, 19, name, anchor="start", size=12)
    return drawing


def named(m: int, n: int, k: int) -> str:
    return f"{m}³" if m == n == k else f"{m} x {n} x {k}"


def by_shape() -> str:
    rows = [
        [named(*shape), *(kernel(what, *shape) for what in COLUMNS.values())] for shape in SHAPES
    ]
    return table(["m x n x k", *COLUMNS], rows)


def by_gpu() -> str:
    gpus = ["t4", "a100", "l4", "h100", "h200", "b200", "rtx5090"]
    rows = [
        [
            named(*shape),
            *(kernel(f"gemm --dtype float32 --gpu {gpu}", *shape) for gpu in gpus),
        ]
        for shape in SHAPES
    ]
    return table(["fp32, m x n x k", *gpus], rows)


def files() -> dict[Path, str]:
    """The content of each file."""
    found = picture().files("which_kernel")
    text = PAGE.read_text()
    for name, section in (("by_shape", by_shape()), ("by_gpu", by_gpu())):
        marked = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
        text = re.sub(marked, rf"\g<1>{section}\n\2", text, flags=re.DOTALL)
    return {**found, PAGE: text}


if __name__ == "__main__":
    for path, content in files().items():
        path.write_text(content)
