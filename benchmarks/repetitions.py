"""Whether repeating a call gives the same bits, while a second stream keeps the GPU busy.

    python benchmarks/repetitions.py [CASE ...] --output results.json

Every case runs one kernel, or a few, on the same tensors again and again in a CUDA graph, and
counts the repetitions that differ in any bit from the first call. A product and a copy run beside
it on another stream. Which kernel computes a product follows from its size: python -m my_ops
explain.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import measure
import torch
from torch import Tensor

import my_ops

IN_GRAPH = 20  # repetitions
Call = Callable[[], tuple[Tensor, ...]]

PRODUCTS = [  # dtype, m, k, n, and how
    *[("float32", *size, {}) for size in ((512, 512, 512), (640, 2560, 640), (3000, 200, 700))],
    *[("float32", *size, {}) for size in ((5, 2563, 1000), (64, 8192, 64), (33, 40, 50))],
    ("float32", 768, 768, 768, {"precision": "high"}),
    *[("bfloat16", *size, {}) for size in ((20_000, 65, 64), (10_000, 65, 192), (700, 643, 777))],
    *[("float16", *size, {}) for size in ((300, 67, 1001), (33, 40, 50), (9000, 72, 136))],
    *[("float32", *size, {}) for size in ((16384, 1032, 61), (60, 8200, 4008))],
    ("float64", 33, 40, 50, {}),
]
ATTENTION = [(2, 32, 300, 330, 64), (2, 16, 520, 520, 128)]  # batch, heads, queries, keys, size
# images, channels, outputs, space, kernel, stride
CONVOLUTIONS = [(8, 256, 250, (40, 41), 3, 1), (16, 128, 192, (57, 56), 3, 2)]
CONVOLUTIONS += [(4, 256, 250, (2001,), 5, 1)]
LINEAR = [  # dtype, m, k, n
    *[("float32", *size) for size in ((512, 640, 520), (40, 100, 60))],
    *[("bfloat16", *size) for size in ((600, 320, 512), (2800, 1024, 3072), (129, 200, 1003))],
]
LAYERS = [  # dtype, steps, batch, hidden: warps, blocks, clusters, grids, steps, warpgroups
    *[("float32", 12, 300, 32), ("bfloat16", 12, 70, 64), ("float32", 12, 300, 64)],
    *[("float32", *size) for size in ((12, 3, 64), (8, 20, 512), (2, 300, 640))],
    *[("bfloat16", *size) for size in ((12, 3, 200), (8, 20, 512), (4, 9, 1100), (3, 300, 512))],
    *[("float32", *size) for size in ((6, 256, 1024), (4, 2500, 256))],
]


def one(op: Callable[..., Tensor], *arguments: Tensor, **options: Any) -> tuple[Tensor, ...]:
    return (op(*arguments, **options),)


def train(layer: torch.nn.Module, input: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    output, _ = layer(input)
    return output.detach(), *torch.autograd.grad(output, [input, *layer.parameters()], grad)


def attend(inputs: list[Tensor], grad: Tensor) -> tuple[Tensor, ...]:
    out = my_ops.attention(*inputs)
    return out.detach(), *torch.autograd.grad(out, inputs, grad)


def convolve(inputs: list[Tensor], grad: Tensor, stride: int) -> tuple[Tensor, ...]:
    """Under the switch."""
    run = torch.nn.functional.conv1d if grad.dim() == 3 else torch.nn.functional.conv2d
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False), my_ops.fast_fp32():
        y = run(*inputs, stride=stride, padding=inputs[1].shape[-1] // 2)
        return y.detach(), *torch.autograd.grad(y, inputs, grad)


def cases() -> Iterator[tuple[str, Call]]:
    def drawn(*shape: int, dtype: str = "float32") -> Tensor:
        return torch.randn(shape).to("cuda", getattr(torch, dtype))  # the same on every GPU

    x, y = drawn(333, 777), drawn(777)
    yield "custom_add", partial(one, my_ops.custom_add, x, y)
    yield "d_sigmoid", partial(one, my_ops.d_sigmoid, x)
    for dtype, m, k, n, how in PRODUCTS:
        a, b = drawn(m, k, dtype=dtype), drawn(k, n, dtype=dtype)
        name = " ".join(["gemm", dtype, f"{m}x{n}x{k}", *how.values()])
        yield name, partial(one, my_ops.gemm, a, b, **how)
    for dtype, m, k, n in LINEAR:
        args = [drawn(*shape, dtype=dtype) for shape in ((m, k), (n, k), (n,))]
        r = drawn(m, n, dtype=dtype)
        name = f"linear {dtype} {m}x{n}x{k} silu, residual"
        yield name, partial(one, my_ops.linear, *args, activation="silu", residual=r)
    for batch, heads, queries, keys, size in ATTENTION:
        given = [drawn(batch, heads, n, size).requires_grad_() for n in (queries, keys, keys)]
        name = f"attention float32 {batch}, {heads}, {queries}, {keys}, {size}, gradients"
        yield name, partial(attend, given, drawn(batch, heads, queries, size))
    for batch, channels, outputs, space, kernel, stride in CONVOLUTIONS:
        x, w = drawn(batch, channels, *space), drawn(outputs, channels, *[kernel] * len(space))
        grad = drawn(batch, outputs, *(-(-n // stride) for n in space))
        name = f"convolution float32 {batch}, {channels} to {outputs}, {space}, {kernel}, {stride}"
        inputs = [x.requires_grad_(), w.requires_grad_()]
        yield f"{name}, gradients", partial(convolve, inputs, grad, stride)
    for kind in (my_ops.nn.LSTM, my_ops.nn.GRU, my_ops.nn.LLTM):
        for dtype, steps, batch, hidden in LAYERS:
            layer = kind(16, hidden, dtype=getattr(torch, dtype)).cuda()
            input = drawn(steps, batch, 16, dtype=dtype).requires_grad_()
            grad = drawn(steps, batch, hidden, dtype=dtype)
            name = f"{kind.__name__} {dtype} T{steps} B{batch} H{hidden}, gradients"
            yield name, partial(train, layer, input, grad)


def repeat(call: Call, repetitions: int) -> int:
    """How many of the repetitions, whole graphs of them, differ from the first call."""
    first = [t.clone() for t in call()]
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    graph, beside = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        for _ in range(IN_GRAPH):
            changed = [(t != want).any() for t, want in zip(call(), first, strict=True)]
            differing += torch.stack(changed).any()
    other = torch.randn(1024, 1024, device="cuda")
    beside.wait_stream(torch.cuda.current_stream())
    for _ in range(repetitions // IN_GRAPH):
        with torch.cuda.stream(beside):
            torch.mm(other, other).copy_(other)
        graph.replay()
    return int(differing)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("case", nargs="*", default=[""], help="part of a case's name")
    parser.add_argument("--repetitions", type=int, default=100_000, help="of an op")
    parser.add_argument("--of-a-case", type=int, default=20_000, help="at least")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    drawn = [case for case in cases() if any(part in case[0] for part in options.case)]
    rows = []
    of_op = Counter(name.split()[0] for name, _ in drawn)
    for name, call in drawn:
        count = max(options.of_a_case, -(-options.repetitions // of_op[name.split()[0]]))
        count = -(-count // IN_GRAPH) * IN_GRAPH
        rows.append({"case": name, "repetitions": count, "differing": repeat(call, count)})
        print(rows[-1], flush=True)
    if options.output:
        measure.save(options.output, {"repetitions": rows})


if __name__ == "__main__":
    main()
