"""attention: the function, which is torch's own for some calls, and the op under it."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import my_ops
from fuzzing.case import Case, Excess, Op, Tensors
from fuzzing.elementwise import with_gradient
from fuzzing.judge import UNIT, excess, least, of_sum
from fuzzing.tensors import draw_size, draw_tensor
from my_ops import reference

EXP = {torch.float64: 2.0**-50, torch.float32: 2.0**-21}  # of an exponential, and of a division
# Not those of many magnitudes: errors are relative to a row, not to its least element. In 16 bits
# all of it is torch's own.
VALUES = ["normal", "normal", "uniform", "whole", "zero", "one-hot"]


def draw(choose: random.Random, bits: float) -> tuple[dict[str, Any], bool]:
    most = choose.uniform(0, bits)
    while True:
        sizes = [draw_size(choose, choose.uniform(0, most)) for _ in range(4)]
        size = max(draw_size(choose, 8), 1)
        rows, *others = (max(n, 1) for n in sizes)  # a mask may have what the batch has not
        pairs, elements = rows * math.prod(others), rows * others[0] * sum(others[1:]) * size
        if pairs * size < 2**most and max(pairs, elements) < 2**26:
            break
    batch, heads, queries, keys = sizes
    dtype, grouped = choose.choice(["float32", "float32", "float64"]), choose.random() < 0.2
    groups = choose.choice([n for n in (1, 2, heads) if n and heads % n == 0] or [heads])
    pair = (batch, groups if grouped else heads, keys)
    of_value = size if choose.random() < 0.7 else choose.randint(1, 32)
    shapes = {"query": (batch, heads, queries, size), "key": (*pair, size)}
    shapes |= {"value": (*pair, of_value)}
    tensors = {n: draw_tensor(choose, s, dtype, choose.choice(VALUES)) for n, s in shapes.items()}
    options: dict[str, Any] = {"is_causal": False, "scale": None, "enable_gqa": grouped}
    if choose.random() < 0.3:
        options["scale"] = choose.choice([0.1, 0.5])
    kind = choose.choice(["none", "causal", "bool", "bias", "bias"])
    if kind == "causal":
        options["is_causal"] = True
    elif kind != "none":
        full = (batch, heads, queries, keys)
        shape = tuple(1 if choose.random() < 0.3 else n for n in full)
        tensors["attn_mask"] = draw_tensor(choose, shape, "bool" if kind == "bool" else dtype)
    return {**tensors, **options}, 0 not in sizes  # torch's does not use a mask of no scores


def spoil(choose: random.Random, right: dict[str, Any]) -> tuple[dict[str, Any], str]:
    name = choose.choice([n for n in ("query", "key", "value", "attn_mask") if n in right])
    return {**right, name: choose.choice([1.5, "x", [1.0]])}, "TypeError"


def judge(case: Case, t: Tensors, module: Any) -> Iterator[Excess]:
    operands = [t["query"], t["key"], t["value"]]
    mask = t.get("attn_mask")
    is_bias = mask is not None and mask.dtype != torch.bool
    names = ("is_causal", "scale", "enable_gqa")
    options = {name: t[name] for name in names}
    of_op = module is my_ops and case.seed % 2 and not t["enable_gqa"] and (mask is None or is_bias)

    def call(*tensors: Tensor) -> Tensor:
        query, key, value, bias = (*tensors, mask)[:4]
        if of_op:
            op = torch.ops.my_ops.attention
            return op(query, key, value, bias, t["is_causal"], t["scale"])
        return module.attention(query, key, value, bias, **options)

    got, grad, grads = with_gradient(case, call, *operands, *([mask] if is_bias else []))
    yield from judge_results(t, got, grad, grads)


def judge_results(t: Tensors, got: Tensor, grad: Tensor, grads: Any) -> Iterator[Excess]:
    dtype, heads = got.dtype, t["query"].shape[1]
    q, k, v = (t[name].double() for name in ("query", "key", "value"))
    repeats = heads // max(k.shape[1], 1)
    k, v = (x.repeat_interleave(repeats, 1) for x in (k, v))
    mask, bias = t.get("attn_mask"), None
    if mask is not None:
        bias = mask.double()
        if mask.dtype == torch.bool:
            bias = torch.zeros_like(bias).masked_fill(~mask, -math.inf)
    queries, keys, size = q.shape[2], k.shape[2], q.shape[3]
    scale = size**-0.5 if t["scale"] is None else t["scale"]
    weights = reference.attention_weights(q, k, bias, t["is_causal"], scale)
    # Errors of scores are absolute, and so relative ones of weights: each, and the sum of a row.
    scores = scale * (q.abs() @ k.abs().mT)
    if bias is not None:
        scores = scores + bias.nan_to_num(0, 0, 0).abs()
    off = ((of_sum(size, dtype) + 6 * UNIT[dtype]) * scores).where(weights > 0, 0)
    worst = off.amax(-1, keepdim=True) if keys else off.sum(-1, keepdim=True)
    of_weights = torch.expm1(2 * worst) + of_sum(keys, dtype) + EXP[dtype]
    tiny = keys * least(dtype)
    want = weights @ v
    allowed = (of_weights + of_sum(keys, dtype)) * (weights @ v.abs())
    yield "result", excess(got, want, allowed + tiny * (1 + v.abs().sum((-2, -1), keepdim=True)))
    if not grads:
        return
    g = grad.double()
    inner, inner_size = g @ v.mT, g.abs() @ v.abs().mT
    slope = weights * (inner - (weights * inner).sum(-1, keepdim=True))
    slope_size = weights * (inner_size + (weights * inner_size).sum(-1, keepdim=True))
    of_slope = 2 * of_weights + of_sum(keys, dtype) + 2 * of_sum(v.shape[3], dtype)
    off = of_slope * slope_size + tiny * (1 + inner_size.sum(-1, keepdim=True))
    found = [
        (scale * slope @ k, scale * (off @ k.abs()), of_sum(keys, dtype)),
        (scale * slope.mT @ q, scale * (off.mT @ q.abs()), of_sum(queries, dtype)),
        (weights.mT @ g, (of_weights * weights + tiny).mT @ g.abs(), of_sum(queries, dtype)),
        (slope, off, 0.0),
    ]
    sizes = [
        scale * (slope_size @ k.abs()),
        scale * (slope_size.mT @ q.abs()),
        weights.mT @ g.abs(),
        slope_size,
    ]
    given = (t["query"], t["key"], t["value"], mask)
    each = zip(grads, found, sizes, given, strict=False)
    for ours, (want, off, of_terms), total, operand in each:
        allowed = off + of_terms * total
        if want.shape[1] != operand.shape[1] and operand is not mask:  # heads that share one
            want, allowed, total = (
                x.unflatten(1, (operand.shape[1], repeats)).sum(2) for x in (want, allowed, total)
            )
        terms = max(want.numel() // max(operand.numel(), 1), 1)
        want, allowed, total = (x.sum_to_size(operand.shape) for x in (want, allowed, total))
        yield "gradient", excess(ours, want, allowed + of_sum(terms * repeats, dtype) * total)


OPS = [Op("attention", draw, judge, spoil, weight=2.0, peer=True)]
