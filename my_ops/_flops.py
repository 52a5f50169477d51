"""Floating-point operations of each op, for ``torch.utils.flop_counter.FlopCounterMode``.

As for torch's own ops, only products count; a multiplication and an addition are two operations.
Gradients of gemm and linear are products themselves and need no formula. The formulas of attention
are in ops/attention.py, those of the recurrent ops in recurrent/_ops.py.
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
