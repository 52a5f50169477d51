"""torch's convolutions under the switch, which takes some of them on CUDA."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import my_ops
from fuzzing.case import Case, Excess, Op, Tensors
from fuzzing.elementwise import with_gradient
from fuzzing.judge import excess, of_sum
from fuzzing.tensors import MODERATE, T, draw_size, draw_tensor


def draw_sizes(choose: random.Random, bits: float, reach: list[int]) -> tuple[int, ...]:
    """Images, channels, outputs and points, with at most 2^bits products of an image's point."""
    if bits >= 30 and choose.random() < 0.4:  # large enough for ours
        points = 2 ** choose.uniform(9, 13)
        space = [round(points ** (1 / len(reach)) + choose.random()) for _ in reach]
        return (choose.randint(1, 8), choose.randint(60, 300), choose.randint(30, 300), *space)
    while True:
        batch, channels, outputs = (max(draw_size(choose, bits / 3), 1) for _ in range(3))
        space = [max(draw_size(choose, bits / 3), n) for n in reach]
        if batch * channels * outputs * math.prod(space) < 2 ** (bits - 3):
            return (batch, channels, outputs, *space)


def draw_operand(choose: random.Random, shape: tuple[int, ...], values: str) -> T:
    """Contiguous, or with the channels last."""
    strides, points = None, math.prod(shape[2:])
    if choose.random() < 0.5:
        inner = [shape[1] * math.prod(shape[d + 1 :]) for d in range(2, len(shape))]
        strides = (shape[1] * points, 1, *inner)
    return T(shape, "float32", values, choose.randrange(1 << 31), strides)


def draw_depthwise(choose: random.Random, bits: float) -> tuple[dict[str, Any], bool]:
    """A group for each channel: mostly what kernels fit, and mostly one output of a group."""
    rank = choose.choice([1, 2, 2])
    kernel = [choose.choice([1, 3, 4, 7, 20, 31] if rank == 1 else [1, 2, 3, 5, 6, 7, 8])] * rank
    stride = [choose.choice([1, 1, 1, 2, 3])] * rank
    if choose.random() < 0.2:  # not the same along both
        kernel[-1], stride[-1] = choose.randint(1, 7), choose.randint(1, 2)
    dilation = [choose.choice([1, 1, 1, 1, 2])] * rank
    padding = [choose.choice([0, n // 2, n - 1]) for n in kernel]
    batch, _, channels, *space = draw_sizes(choose, bits, kernel_reach(kernel, dilation))
    outputs = channels * choose.choice([1, 1, 1, 1, 2])
    x = draw_operand(choose, (batch, channels, *space), choose.choice(MODERATE))
    tensors = {"input": x, "weight": draw_operand(choose, (outputs, 1, *kernel), "normal")}
    if choose.random() < 0.5:
        tensors["bias"] = draw_tensor(choose, (outputs,), "float32")
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": channels}
    return {**tensors, **options}, True


def kernel_reach(kernel: list[int], dilation: list[int]) -> list[int]:
    return [d * (n - 1) + 1 for d, n in zip(dilation, kernel, strict=True)]


def draw(choose: random.Random, bits: float) -> tuple[dict[str, Any], bool]:
    if choose.random() < 0.3:
        return draw_depthwise(choose, bits)
    space = range(choose.choice([1, 2, 2]))
    kernel = [choose.choice([1, 1, 2, 3, 3, 3, 4, 5, 7]) for _ in space]
    stride, dilation = ([choose.choice([1, 1, 1, 2, 3]) for _ in space] for _ in range(2))
    if choose.random() < 0.5:  # the same along both
        stride, dilation = stride[:1] * len(kernel), dilation[:1] * len(kernel)
    padding = [choose.choice([0, n // 2]) for n in kernel]
    transposed = choose.random() < 0.3
    batch, channels, outputs, *space = draw_sizes(choose, bits, kernel_reach(kernel, dilation))
    x = draw_operand(choose, (batch, channels, *space), choose.choice(MODERATE))
    both = (channels, outputs) if transposed else (outputs, channels)
    tensors = {"input": x, "weight": draw_operand(choose, (*both, *kernel), "normal")}
    if choose.random() < 0.5:
        tensors["bias"] = draw_tensor(choose, (outputs,), "float32")
    options: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation}
    if transposed:
        options["output_padding"] = [choose.randrange(n) for n in stride]
    return {**tensors, **options}, True


def judge(case: Case, t: Tensors, module: Any) -> Iterator[Excess]:
    operands = [t[name] for name in ("input", "weight", "bias") if name in t]
    names = ("stride", "padding", "dilation", "output_padding", "groups")
    options, transposed = {n: t[n] for n in names if n in t}, "output_padding" in t
    name = f"conv{'_transpose' if transposed else ''}{t['input'].dim() - 2}d"

    def call(*tensors: Tensor) -> Tensor:
        return getattr(torch.nn.functional, name)(*tensors, **options)

    with contextlib.ExitStack() as settings:
        settings.enter_context(torch.backends.cudnn.flags(enabled=True, allow_tf32=False))
        if module is my_ops:
            settings.enter_context(my_ops.fast_fp32())
        got, grad, grads = with_gradient(case, call, *operands)
    want, *exact = _in_double(call, operands, grad)
    total, *totals = _in_double(
        call, [x.abs() for x in operands], None if grad is None else grad.abs()
    )
    of_each = t["weight"][0].numel()  # products of a point: of the output, or transposed the input
    products = (t["input"] if transposed else got).numel() * of_each
    terms = t["weight"][:, 0].numel() if transposed else of_each
    yield "result", excess(got, want, of_sum(terms + 1, got.dtype) * total)
    if not grads:
        return
    for ours, one, scale, operand in zip(grads, exact, totals, operands, strict=True):
        terms = products // max(operand.numel(), 1)
        yield "gradient", excess(ours, one, of_sum(terms, got.dtype) * scale)


def _in_double(call: Any, operands: list[Tensor], grad: Tensor | None) -> list[Tensor]:
    leaves = [x.double().requires_grad_(grad is not None) for x in operands]
    result = call(*leaves)
    if grad is None:
        return [result]
    return [result.detach(), *torch.autograd.grad(result, leaves, grad.double())]


# On the CPU they are torch's alone.
OPS = [Op("convolution", draw, judge, peer=True)] if torch.cuda.is_available() else []
