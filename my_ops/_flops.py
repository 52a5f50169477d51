"""Floating-point operations of each op, for ``torch.utils.flop_counter.FlopCounterMode``.

As for torch's own ops only products count, two operations for a multiplication and an addition.
Gradients of gemm and linear are products themselves and need no formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from torch.utils.flop_counter import register_flop_formula

from my_ops.ops._common import ops

Shape = Sequence[int]


@register_flop_formula(ops.gemm)
def gemm_flop(a: Shape, b: Shape, *_: Any, out_shape: Shape, **__: Any) -> int:
    return 2 * prod(out_shape) * a[-1]


@register_flop_formula(ops.linear)
def linear_flop(x: Shape, weight: Shape, *_: Any, **__: Any) -> int:
    return 2 * prod(x) * weight[0]


@register_flop_formula([ops.lltm_cell, ops.lltm_cell_forward])
def lltm_cell_flop(input: Shape, weights: Shape, *_: Any, **__: Any) -> int:
    return 2 * input[0] * prod(weights)


@register_flop_formula([ops.lltm, ops.lltm_forward])
def lltm_flop(input: Shape, h0: Shape, c0: Shape, weights: Shape, *_: Any, **__: Any) -> int:
    return 2 * input[0] * input[1] * prod(weights)


@register_flop_formula(ops.lltm_backward)
def lltm_backward_flop(*args: Any, **_: Any) -> int:
    gates, c0 = args[3], args[5]
    return 2 * prod(gates) * c0[-1]
