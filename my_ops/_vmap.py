"""What ``torch.vmap`` does to each op: one call over the extra dimension, never a loop over it.

A rule gets the arguments with the dimension that is mapped over (``in_dims``, None for an argument
without it) and returns the result and the place of that dimension in it. Rules fold the dimension
into one the op has already. Where LLTM has other weights for each element, which no fold reaches,
the steps are written out with batched products.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from my_ops import reference
from my_ops._autograd import library
from my_ops.ops._common import UNARY, UNARY_BACKWARD, ops

Dims = tuple[int | None, ...]


def _register(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(rule: Callable[..., Any]) -> Callable[..., Any]:
        torch.library.register_vmap(f"my_ops::{name}", rule, lib=library)
        return rule

    return register


def _front(t: Tensor, dim: int | None, size: int) -> Tensor:
    """``t`` with the mapped dimension, of ``size``, first: repeated where ``t`` had none."""
    return t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0)


def _unfold(t: Tensor, size: int) -> Tensor:
    """Splits ``size`` off the front of the first dimension."""
    return t.reshape(size, t.shape[0] // size, *t.shape[1:])


# --------------------------------------------------------------------------------- elementwise


def _unary(op: Any) -> Callable[..., Any]:
    return lambda info, in_dims, x: (op(x), in_dims[0])


def _unary_backward(op: Any) -> Callable[..., Any]:
    def rule(info: Any, in_dims: Dims, grad: Tensor, x: Tensor) -> tuple[Tensor, int]:
        size = info.batch_size
        return op(_front(grad, in_dims[0], size), _front(x, in_dims[1], size)), 0

    return rule


for _name in UNARY:
    _register(_name)(_unary(getattr(ops, _name)))
for _name in UNARY_BACKWARD:
    _register(_name)(_unary_backward(getattr(ops, _name)))


@_register("custom_add")
def _(info: Any, in_dims: Dims, a: Tensor, b: Tensor) -> tuple[Tensor, int]:
    ranks = [t.dim() - (d is not None) for t, d in zip((a, b), in_dims, strict=True)]
    if a.dtype != b.dtype:  # as of tensors without the mapped dimension: none have another rank
        like = [t if d is None else t.select(d, 0) for t, d in zip((a, b), in_dims, strict=True)]
        dtype = torch.result_type(*like)
        a, b = a.to(dtype), b.to(dtype)
    aligned = []
    for t, dim, rank in zip((a, b), in_dims, ranks, strict=True):
        if dim is not None:
            t = t.movedim(dim, 0)
            t = t.reshape(t.shape[0], *[1] * (max(ranks) - rank), *t.shape[1:])
        aligned.append(t)
    return ops.custom_add(*aligned), 0


# ------------------------------------------------------------------------------------ products


@_register("gemm")
def _(
    info: Any, in_dims: Dims, a: Tensor, b: Tensor, precision: str | None = None
) -> tuple[Tensor, int]:
    size, dims = info.batch_size, in_dims[:2]
    a, b = (t if d is None else t.movedim(d, 0) for t, d in zip((a, b), dims, strict=True))
    batched = [t.dim() - (d is not None) == 3 for t, d in zip((a, b), dims, strict=True)]
    if dims[1] is None and not batched[1]:  # one matrix for all: more rows of a
        rows = ops.gemm(a.reshape(-1, a.shape[-1]), b, precision)
        return rows.reshape(*a.shape[:-1], b.shape[-1]), 0
    if any(batched):  # (size, batch, ., .)
        a, b = (t if many else t.unsqueeze(-3) for t, many in zip((a, b), batched, strict=True))
        batch = torch.broadcast_shapes(a.shape[-3:-2], b.shape[-3:-2])
        a, b = (t.expand(size, *batch, *t.shape[-2:]).flatten(0, 1) for t in (a, b))
    result = ops.gemm(a, b, precision)
    return (_unfold(result, size) if any(batched) else result), 0


@_register("linear")
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
    x = _front(x, x_dim, size)
    if residual is not None:
        residual = _front(residual, residual_dim, size)
    if weight_dim is None and bias_dim is None:
        return ops.linear(x, weight, bias, activation, residual, precision, packed), 0
    if weight_dim is None:
        y = ops.linear(x, weight, None, "none", None, precision)
    else:
        weight = weight.movedim(weight_dim, 0)
        rows = x.reshape(size, x[0, ..., 0].numel(), x.shape[-1])
        y = ops.gemm(rows, weight.mT, precision).reshape(*x.shape[:-1], weight.shape[1])
    if bias is not None:
        bias = _front(bias, bias_dim, size)
        y = y + bias.reshape(size, *[1] * (y.dim() - 2), bias.shape[-1]).to(y.dtype)
    y = reference.activate(y, activation)
    return (y if residual is None else y + residual.to(y.dtype)), 0


# ---------------------------------------------------------------------------------------- LLTM


def _lltm_by_steps(
    input: Tensor,
    h0: Tensor,
    c0: Tensor,
    weights: Tensor,
    bias: Tensor,
    lengths: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """``lltm_forward`` of tensors with one more dimension in front."""
    size, steps, batch, _ = input.shape
    dtype, hidden = input.dtype, h0.shape[-1]
    if dtype != torch.float64 and torch.is_autocast_enabled(input.device.type):
        dtype = torch.get_autocast_dtype(input.device.type)
    if dtype != torch.float64:
        input, h0, c0, weights, bias = (t.float() for t in (input, h0, c0, weights, bias))
    gates_x = ops.gemm(input.flatten(1, 2), weights[..., hidden:].mT)
    gates_x = (gates_x + bias.reshape(size, 1, -1)).reshape(size, steps, batch, 3 * hidden)
    h, c, hs, cs, gates = h0, c0, [], [], []
    for t in range(steps):
        z = gates_x[:, t] + ops.gemm(h, weights[..., :hidden].mT)
        z_i, z_o, z_g = z.chunk(3, dim=-1)
        i, o, g = torch.sigmoid(z_i), torch.sigmoid(z_o), torch.nn.functional.elu(z_g)
        new_c = c + g * i
        new_h = torch.tanh(new_c) * o
        step = torch.cat([i, o, g], dim=-1)
        if lengths is None:
            h, c = new_h, new_c
            hs.append(h)
        else:
            runs = (t < lengths).unsqueeze(-1)
            h, c = torch.where(runs, new_h, h), torch.where(runs, new_c, c)
            hs.append(torch.where(runs, h, 0.0))
            step = torch.where(runs, step, 0.0)
        cs.append(c)
        gates.append(step)

    def stacked(states: list[Tensor], columns: int) -> Tensor:
        return torch.stack(states, 1) if states else input.new_empty((size, 0, batch, columns))

    return (
        stacked(hs, hidden).to(dtype),
        h.to(dtype),
        c.to(dtype),
        stacked(gates, 3 * hidden).to(dtype),
        stacked(cs, hidden),
    )


def _lltm_backward_by_steps(
    weights: Tensor,
    grad_output: Tensor | None,
    grad_h: Tensor | None,
    grad_c: Tensor | None,
    gates: Tensor,
    cells: Tensor,
    c0: Tensor,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``lltm_backward`` of tensors with one more dimension in front."""
    dtype, compute, hidden = gates.dtype, cells.dtype, c0.shape[-1]
    gates, c0, weights = gates.to(compute), c0.to(compute), weights.to(compute)
    grad_h = torch.zeros_like(c0) if grad_h is None else grad_h.to(compute)
    grad_c = torch.zeros_like(c0) if grad_c is None else grad_c.to(compute)
    steps = []
    for t in range(gates.shape[1] - 1, -1, -1):
        beyond = None if lengths is None else (t >= lengths).unsqueeze(-1)
        after = grad_h
        if grad_output is not None:
            grad_h = grad_h + grad_output[:, t]
        i, o, g = gates[:, t].chunk(3, dim=-1)
        squashed = torch.tanh(cells[:, t])
        grad_c = grad_c + grad_h * o * (1 - squashed * squashed)
        elu_slope = torch.where(g > 0, 1.0, g + 1)
        step = [grad_c * g * i * (1 - i), grad_h * squashed * o * (1 - o), grad_c * i * elu_slope]
        steps.append(torch.cat(step, dim=-1))
        grad_h = ops.gemm(steps[-1], weights[..., :hidden])
        if beyond is not None:  # its gates are 0, and so is their gradient
            grad_h = torch.where(beyond, after, grad_h)
    grad_gates = torch.stack(steps[::-1], 1) if steps else torch.empty_like(gates)
    return grad_gates.to(dtype), grad_h.to(dtype), grad_c.to(dtype)


def _layer(name: str, results: int) -> None:
    op = getattr(ops, name)

    @_register(name)
    def _(
        info: Any,
        in_dims: Dims,
        input: Tensor,
        h0: Tensor,
        c0: Tensor,
        weights: Tensor,
        bias: Tensor,
        lengths: Tensor | None = None,
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        size = info.batch_size
        input, h0, c0 = (
            _front(t, d, size) for t, d in zip((input, h0, c0), in_dims[:3], strict=True)
        )
        if lengths is not None:
            lengths = _front(lengths, in_dims[5], size)
        if in_dims[3] is not None or in_dims[4] is not None:
            weights, bias = _front(weights, in_dims[3], size), _front(bias, in_dims[4], size)
            by_steps = _lltm_by_steps(input, h0, c0, weights, bias, lengths)
            return by_steps[:results], (0,) * results
        folded = op(
            input.transpose(0, 1).flatten(1, 2),
            h0.flatten(0, 1),
            c0.flatten(0, 1),
            weights,
            bias,
            None if lengths is None else lengths.flatten(),
        )
        return _unfold_layer(folded, size)


def _unfold_layer(
    results: tuple[Tensor, ...], size: int
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """(steps, size * batch, .) and (size * batch, .) with the dimension of ``size`` by itself."""
    split = tuple(t.unflatten(t.dim() - 2, (size, t.shape[-2] // size)) for t in results)
    return split, tuple(t.dim() - 3 for t in split)


_layer("lltm", 3)
_layer("lltm_forward", 5)


@_register("lltm_backward")
def _(info: Any, in_dims: Dims, *tensors: Tensor | None) -> Any:
    size = info.batch_size
    tensors, in_dims = (*tensors, None)[:8], (*in_dims, None)[:8]  # lengths may be left out
    weights, weights_dim = tensors[6], in_dims[6]
    fronted: list[Any] = [
        None if t is None else _front(t, d, size) for t, d in zip(tensors, in_dims, strict=True)
    ]
    del fronted[6]
    if weights is not None and weights_dim is not None:
        return _lltm_backward_by_steps(weights.movedim(weights_dim, 0), *fronted), (0, 0, 0)
    folded = [
        None
        if t is None
        else (t.transpose(0, 1).flatten(1, 2) if t.dim() == 4 else t.flatten(0, 1))
        for t in fronted
    ]
    return _unfold_layer(ops.lltm_backward(*folded[:6], weights, folded[6]), size)


def _cell(name: str, results: int) -> None:
    op = getattr(ops, name)

    @_register(name)
    def _(
        info: Any,
        in_dims: Dims,
        input: Tensor,
        weights: Tensor,
        bias: Tensor,
        old_h: Tensor,
        old_cell: Tensor,
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        size = info.batch_size
        input, old_h, old_cell = (
            _front(t, d, size)
            for t, d in ((input, in_dims[0]), (old_h, in_dims[3]), (old_cell, in_dims[4]))
        )
        if in_dims[1] is not None or in_dims[2] is not None:
            weights, bias = _front(weights, in_dims[1], size), _front(bias, in_dims[2], size)
            _, h, c, gates, _ = _lltm_by_steps(input[:, None], old_h, old_cell, weights, bias)
            return (h, c, gates[:, 0])[:results], (0,) * results
        input, old_h, old_cell = (t.flatten(0, 1) for t in (input, old_h, old_cell))
        folded = op(input, weights, bias, old_h, old_cell)
        return tuple(_unfold(t, size) for t in folded), (0,) * results


_cell("lltm_cell", 2)
_cell("lltm_cell_forward", 3)


@_register("lltm_cell_backward")
def _(info: Any, in_dims: Dims, *tensors: Tensor | None) -> tuple[tuple[Tensor, ...], Dims]:
    size = info.batch_size
    folded = ops.lltm_cell_backward(
        *(
            None if t is None else _front(t, d, size).flatten(0, 1)
            for t, d in zip(tensors, in_dims, strict=True)
        )
    )
    return tuple(_unfold(t, size) for t in folded), (0, 0)
