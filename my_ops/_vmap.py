"""The rules of ``torch.vmap`` for each op: one call over the extra dimension, never a loop over it.

A rule gets the arguments and their mapped dimensions (``in_dims``, None for an argument without
one). It returns the result and the position of that dimension in it. Rules fold the dimension into
one that the op already has. The rules of the recurrent cells are in recurrent/_vmap.py.

A rule runs before autocast and before the op's own checks, which would see the folded arguments.
So :func:`register_rule` casts and checks first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from my_ops import _autocast, reference
from my_ops._autograd import library
from my_ops.ops import _checks
from my_ops.ops._common import UNARY, UNARY_BACKWARD, ops

Dims = tuple[int | None, ...]
Rule = Callable[..., Any]


def register_rule(
    name: str, check: Callable[..., Any] | None = None, *, autocast: bool = False
) -> Callable[[Rule], Rule]:
    """``check`` gets the arguments of one element. ``autocast``: whether the op has that rule."""

    def register(rule: Rule) -> Rule:
        def checked(info: Any, in_dims: Dims, *args: Any) -> Any:
            if check is not None:
                check(*map(_of_one, args, in_dims))
            return rule(info, in_dims, *args)

        def cast(info: Any, in_dims: Dims, *args: Any) -> Any:
            with _autocast.applied(args) as args:
                return checked(info, in_dims, *args)

        torch.library.register_vmap(f"my_ops::{name}", cast if autocast else checked, lib=library)
        return rule

    return register


def _of_one(value: Any, dim: int | None) -> Any:
    """What the mapped function sees of an argument, for checks of everything but values."""
    if dim is None or not isinstance(value, Tensor):
        return value
    if value.shape[dim] == 0:
        return value.new_empty(value.shape[:dim] + value.shape[dim + 1 :])
    return value.select(dim, 0)


def front(t: Tensor, dim: int | None, size: int) -> Tensor:
    """``t`` with the mapped dimension, of ``size``, first; repeated if ``t`` has none."""
    return t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0)


def unfold(t: Tensor, size: int, rest: int) -> Tensor:
    """Splits the first dimension into ``size`` and ``rest``."""
    return t.reshape(size, rest, *t.shape[1:])


# --------------------------------------------------------------------------------- elementwise


def _unary(op: Any) -> Callable[..., Any]:
    return lambda info, in_dims, x: (op(x), in_dims[0])


def _unary_backward(op: Any) -> Callable[..., Any]:
    def rule(info: Any, in_dims: Dims, grad: Tensor, x: Tensor) -> tuple[Tensor, int]:
        size = info.batch_size
        return op(front(grad, in_dims[0], size), front(x, in_dims[1], size)), 0

    return rule


for _name in UNARY:
    register_rule(_name)(_unary(getattr(ops, _name)))
for _name in UNARY_BACKWARD:
    register_rule(_name)(_unary_backward(getattr(ops, _name)))


@register_rule("custom_add", _checks.check_custom_add)
def _(info: Any, in_dims: Dims, a: Tensor, b: Tensor) -> tuple[Tensor, int]:
    ranks = [t.dim() - (d is not None) for t, d in zip((a, b), in_dims, strict=True)]
    if a.dtype != b.dtype:  # as for tensors without the mapped dimension: none have another rank
        dtype = torch.result_type(*map(_of_one, (a, b), in_dims))
        a, b = a.to(dtype), b.to(dtype)
    aligned = []
    for t, dim, rank in zip((a, b), in_dims, ranks, strict=True):
        if dim is not None:
            t = t.movedim(dim, 0)
            t = t.reshape(t.shape[0], *[1] * (max(ranks) - rank), *t.shape[1:])
        aligned.append(t)
    return ops.custom_add(*aligned), 0


# ------------------------------------------------------------------------------------ products


def _check_gemm(a: Tensor, b: Tensor, precision: str | None = None) -> None:
    _checks.check_gemm(a, b, "gemm")
    _checks.check_precision(precision, "gemm")


@register_rule("gemm", _check_gemm, autocast=True)
def _(
    info: Any, in_dims: Dims, a: Tensor, b: Tensor, precision: str | None = None
) -> tuple[Tensor, int]:
    size, dims = info.batch_size, in_dims[:2]
    a, b = (t if d is None else t.movedim(d, 0) for t, d in zip((a, b), dims, strict=True))
    batched = [t.dim() - (d is not None) == 3 for t, d in zip((a, b), dims, strict=True)]
    if dims[1] is None and not batched[1]:  # one matrix for all: more rows of a
        rows = ops.gemm(a.flatten(0, -2), b, precision)
        return rows.reshape(*a.shape[:-1], b.shape[-1]), 0
    batch: Any = ()
    if any(batched):  # (size, batch, ., .)
        a, b = (t if many else t.unsqueeze(-3) for t, many in zip((a, b), batched, strict=True))
        batch = torch.broadcast_shapes(a.shape[-3:-2], b.shape[-3:-2])
        a, b = (t.expand(size, *batch, *t.shape[-2:]).flatten(0, 1) for t in (a, b))
    result = ops.gemm(a, b, precision)
    return (unfold(result, size, *batch) if batch else result), 0


@register_rule("linear", _checks.check_linear, autocast=True)
def _(
    info: Any,
    in_dims: Dims,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "none",
    residual: Tensor | None = None,
    precision: str | None = None,
    packed: Tensor | None = None,
) -> tuple[Tensor, int]:
    size = info.batch_size
    x_dim, weight_dim, bias_dim, _, residual_dim = (*in_dims, None, None, None)[:5]
    x = front(x, x_dim, size)
    if residual is not None:
        residual = front(residual, residual_dim, size)
    if weight_dim is None and bias_dim is None:
        return ops.linear(x, weight, bias, activation, residual, precision, packed), 0
    if weight_dim is None:
        y = ops.linear(x, weight, None, "none", None, precision)
    else:
        weight = weight.movedim(weight_dim, 0)
        rows = x.reshape(size, math.prod(x.shape[1:-1]), x.shape[-1])
        y = ops.gemm(rows, weight.mT, precision).reshape(*x.shape[:-1], weight.shape[1])
    if bias is not None:
        bias = front(bias, bias_dim, size)
        y = y + bias.reshape(size, *[1] * (y.dim() - 2), bias.shape[-1])
    y = reference.activate(y, activation)
    return (y if residual is None else y + residual), 0
