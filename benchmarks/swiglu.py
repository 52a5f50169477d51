"""What an epilogue for SwiGLU could save: ``silu(gate) * up`` of one product's two halves.

    python benchmarks/swiglu.py --output swiglu.json

Times the product, the activation after it, by ATen and as Inductor fuses it, and writing the
results alone, which bounds the activation of a product that need not be kept.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import measure
import torch
from torch import Tensor

import my_ops

SIZES = [(4096, 1024, 2816), (4096, 4096, 11008), (16384, 2048, 5632)]  # rows, inputs, outputs


def swiglu(y: Tensor) -> Tensor:
    gate, up = y.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def swiglu_backward(y: Tensor, grad: Tensor) -> Tensor:
    gate, up = y.float().chunk(2, -1)
    share = torch.sigmoid(gate)
    slope = share * (1 + gate * (1 - share))
    return torch.cat((grad * up * slope, grad * gate * share), -1).to(y.dtype)


def times(rows: int, inputs: int, outputs: int, dtype: torch.dtype) -> dict[str, float]:
    x = torch.randn(rows, inputs, device="cuda", dtype=dtype)
    weight = torch.randn(2 * outputs, inputs, device="cuda", dtype=dtype) / inputs**0.5
    y, grad = my_ops.linear(x, weight), torch.randn(rows, outputs, device="cuda", dtype=dtype)
    fused, fused_backward = (torch.compile(f, dynamic=False) for f in (swiglu, swiglu_backward))
    runs = {
        "product": lambda: my_ops.linear(x, weight),
        "activation": lambda: swiglu(y),
        "activation, compiled": lambda: fused(y),
        "product, then compiled": lambda: fused(my_ops.linear(x, weight)),
        "gradient, compiled": lambda: fused_backward(y, grad),
        "write of the result": lambda: grad.fill_(1.0),
        "write of the product": lambda: y.fill_(1.0),
    }
    for run in runs.values():
        run()
    return measure.gpu_times(runs, repeats=15, budget=0.4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path)
    output = parser.parse_args().output
    found: list[dict[str, Any]] = []
    for dtype in (torch.float32, torch.bfloat16):
        for rows, inputs, outputs in SIZES:
            us = times(rows, inputs, outputs, dtype)
            case = f"{str(dtype).removeprefix('torch.')} {rows} x {inputs} to {outputs}"
            found.append({"case": case, "us": {name: round(t, 1) for name, t in us.items()}})
            print(found[-1], flush=True)
    if output:
        measure.save(output, {"swiglu": found})


if __name__ == "__main__":
    main()
