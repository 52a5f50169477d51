"""The layout of elementwise results for fake tensors: csrc/elementwise_layout.h in Python.

torch's own fake tensors do not always have the strides of its kernels' results, if operands are
broadcast or have dimensions of size 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Sizes = Sequence[int]  # or torch.SymInt


def known(condition: Any) -> bool:
    """Whether a condition on sizes holds; False if that depends on the data."""
    if condition is True or condition is False:  # in Dynamo, every condition is a bool
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # imports sympy

    return guard_or_false(condition)


def _equal(a: Sizes, b: Sizes) -> bool:
    return len(a) == len(b) and all(known(i == j) for i, j in zip(a, b, strict=True))


def _lie_alike(sizes: Sizes, a: Sizes, b: Sizes) -> bool:
    """Whether two layouts are the same. The stride of a dimension of size 1 does not matter, and
    without elements no stride does."""
    if any(known(n == 0) for n in sizes):
        return True
    return all(known(n == 1) or known(i == j) for n, i, j in zip(sizes, a, b, strict=True))


def _dense_strides(sizes: Sizes, order: Sequence[int]) -> Sizes:
    """The strides for dimensions in this memory order, innermost first."""
    if list(order) == sorted(order, reverse=True):
        return torch.empty(sizes, device="meta").stride()
    strides, stride = [1] * len(sizes), 1
    for d in order:
        strides[d] = stride
        stride *= sizes[d]
    return strides


def _broadcast_strides(t: Tensor, sizes: Sizes) -> Sizes:
    lead = len(sizes) - t.dim()
    dims = zip(t.shape, sizes[lead:], t.stride(), strict=True)
    return [0] * lead + [stride if known(own == wide) else 0 for own, wide, stride in dims]


def _memory_order(sizes: Sizes, operands: Sequence[Sizes]) -> list[int]:
    def compare(i: int, j: int) -> int:
        for strides in operands:
            if known(strides[i] == 0) or known(strides[j] == 0):
                continue
            if known(strides[i] < strides[j]):
                return -1
            if known(strides[i] > strides[j]) or known(sizes[i] > sizes[j]):
                return 1
        return 0

    order = list(range(len(sizes)))[::-1]
    for following in range(1, len(order)):
        at = following
        for before in range(following - 1, -1, -1):
            found = compare(order[before], order[at])
            if found < 0:
                break
            if found > 0:
                order[before], order[at] = order[at], order[before]
                at = before
    return order


def _strides(sizes: Sizes, *tensors: Tensor) -> Sizes:
    operands = [_broadcast_strides(t, sizes) for t in tensors]
    strides, own = _dense_strides(sizes, _memory_order(sizes, operands)), operands[0]
    one_layout = all(_equal(t.shape, sizes) for t in tensors) and all(
        _equal(other, own) for other in operands
    )
    return own if one_layout and _lie_alike(sizes, own, strides) else strides


def result_like(*tensors: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The elementwise result of tensors that broadcast, in ``dtype`` or the first one's dtype."""
    first = tensors[0]
    sizes = torch.broadcast_shapes(*(t.shape for t in tensors))
    if first.device.type == "cpu" and dtype is not None:  # there torch casts the operands first
        tensors = tuple(
            t if t.dtype == dtype else t.new_empty_strided(t.shape, _strides(t.shape, t))
            for t in tensors
        )
    if all(_equal(t.shape, sizes) for t in tensors):
        contiguous, channels_last = range(len(sizes))[::-1], (1, 3, 2, 0)
        for order in (contiguous, channels_last)[: 2 if len(sizes) == 4 else 1]:
            strides = _dense_strides(sizes, order)
            if all(_lie_alike(sizes, t.stride(), strides) for t in tensors):
                return first.new_empty_strided(sizes, strides, dtype=dtype)
    return first.new_empty_strided(sizes, _strides(sizes, *tensors), dtype=dtype)
