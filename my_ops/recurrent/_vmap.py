"""The rules of ``torch.vmap`` for a cell's ops: the mapped dimension is folded into the batch.

If each element has its own parameters, this is not possible, and the cell's formulas run step by
step with batched products.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from my_ops._vmap import Dims, front, register_rule, unfold
from my_ops.ops._common import ops
from my_ops.recurrent import _checks, _formulas
from my_ops.recurrent._cell import OF_ROWS, Cell, complete
from my_ops.recurrent._formulas import ALL_ROWS, Rows

Result = tuple[tuple[Tensor, ...], tuple[int, ...]]


def register(cell: Cell) -> None:
    for suffix, saves in (("", False), ("_forward", True)):
        _register_step(cell, f"{cell.name}_cell{suffix}", saves)
        _register_layer(cell, f"{cell.name}{suffix}", saves)
    _register_step_backward(cell)
    _register_layer_backward(cell)


def _all_front(tensors: Any, in_dims: Any, size: int) -> list[Any]:
    return [None if t is None else front(t, d, size) for t, d in zip(tensors, in_dims, strict=True)]


def _fold(t: Tensor | None) -> Tensor | None:
    """Folds (size, steps, batch, .), (size, batch, .) or (size, batch), so that ``size`` is
    gone."""
    if t is None:
        return None
    return t.transpose(0, 1).flatten(1, 2) if t.dim() == 4 else t.flatten(0, 1)


def _fold_of_rows(
    lengths: Tensor | None, reset: Tensor | None, zoneout: Tensor | None
) -> tuple[Tensor | None, ...]:
    if reset is not None:  # (size, steps, batch)
        reset = reset.transpose(0, 1).flatten(1)
    return _fold(lengths), reset, _fold(zoneout)


def _unfold_batch(results: tuple[Tensor, ...], size: int, batch: int) -> Result:
    """Unfolds (steps, size * batch, .) and (size * batch, .), so that ``size`` has its own
    dimension."""
    split = tuple(t.unflatten(t.dim() - 2, (size, batch)) for t in results)
    return split, tuple(t.dim() - 3 for t in split)


def _register_layer(cell: Cell, name: str, saves: bool) -> None:
    """``saves``: whether it is NAME_forward, which autocast does not see."""
    op, start = getattr(ops, name), 1 + len(cell.states)
    results = start + (1 + len(cell.carried) if saves else 0)
    end = start + len(cell.weights.names)

    def check(*given: Any) -> None:
        _checks.check_layer(cell, complete(given, cell.arguments))

    @register_rule(name, check, autocast=not saves)
    def _(info: Any, in_dims: Dims, *given: Any) -> Result:
        size = info.batch_size
        tensors = complete(given, cell.arguments)
        in_dims = complete(in_dims, cell.arguments)
        input, *states = _all_front(tensors[:start], in_dims[:start], size)
        of_rows = _all_front(tensors[end:], in_dims[end:], size)
        parameters, dims = tensors[start:end], in_dims[start:end]
        if any(d is not None for d in dims):
            own = _all_front(parameters, dims, size)
            rows = Rows.of(input, *of_rows)
            by_steps = _formulas.forward_of_op(cell, input, states, own, rows)
            return by_steps[:results], (0,) * results
        folded = (_fold(t) for t in (input, *states))
        found = op(*folded, *parameters, *_fold_of_rows(*of_rows))
        return _unfold_batch(found, size, input.shape[-2])


def _register_layer_backward(cell: Cell) -> None:
    op, count = getattr(ops, f"{cell.name}_backward"), 1 + len(cell.states)
    at = len(cell.backward_arguments) - len(OF_ROWS) - 1  # the position of the recurrent weights

    def check(*given: Any) -> None:
        _checks.check_layer_backward(cell, complete(given, cell.backward_arguments))

    @register_rule(f"{cell.name}_backward", check)
    def _(info: Any, in_dims: Dims, *given: Any) -> Result:
        size = info.batch_size
        tensors = complete(given, cell.backward_arguments)
        in_dims = complete(in_dims, cell.backward_arguments)
        moved = _all_front(tensors[:at], in_dims[:at], size)
        of_rows = _all_front(tensors[at + 1 :], in_dims[at + 1 :], size)
        recurrent, dim = tensors[at], in_dims[at]
        if dim is None:
            folded = (_fold(t) for t in moved)
            found = op(*folded, recurrent, *_fold_of_rows(*of_rows))
            return _unfold_batch(found, size, moved[-1].shape[-2])
        grads, gates, read = moved[:count], moved[count], moved[count + 1 :]
        own = cell.weights.of_h(gates.shape[-1] // cell.saved, recurrent.movedim(dim, 0))
        rows = Rows.of(gates, *of_rows)
        found = _formulas.backward_of_op(cell, grads, gates, read, own, rows)
        return found, (0,) * len(found)


def _register_step(cell: Cell, name: str, saves: bool) -> None:
    op, end = getattr(ops, name), 1 + len(cell.weights.names)
    results = len(cell.states) + saves

    @register_rule(name, lambda *tensors: _checks.check_step(cell, tensors), autocast=not saves)
    def _(info: Any, in_dims: Dims, *tensors: Tensor) -> Any:
        size = info.batch_size
        input, *states = _all_front(
            (tensors[0], *tensors[end:]), (in_dims[0], *in_dims[end:]), size
        )
        if any(d is not None for d in in_dims[1:end]):
            own = _all_front(tensors[1:end], in_dims[1:end], size)
            _, *found = _formulas.forward_of_op(cell, input[:, None], states, own, ALL_ROWS)
            *found, gates = found[: len(states) + 1]
            found = [*found, gates[:, 0]][:results]
        else:
            fold = (s.flatten(0, 1) for s in states)
            folded = op(input.flatten(0, 1), *tensors[1:end], *fold)
            batch = input.shape[1]
            found = [unfold(t, size, batch) for t in (folded if results > 1 else [folded])]
        return (tuple(found), (0,) * results) if results > 1 else (found[0], 0)


def _register_step_backward(cell: Cell) -> None:
    name = f"{cell.name}_cell_backward"
    op = getattr(ops, name)

    @register_rule(name, lambda *tensors: _checks.check_step_backward(cell, tensors))
    def _(info: Any, in_dims: Dims, *tensors: Tensor | None) -> Result:
        size = info.batch_size
        moved = _all_front(tensors, in_dims, size)
        found = op(*map(_fold, moved))
        batch = moved[-1].shape[1]
        return tuple(unfold(t, size, batch) for t in found), (0,) * len(found)


@register_rule("recurrent_weights_backward", _checks.check_weights_backward)
def _(info: Any, in_dims: Dims, *given: Any) -> Result:
    *tensors, gates = given
    grad, input, h0, output, weight_x, reset = _all_front(tensors, in_dims[:-1], info.batch_size)
    rows = gates * h0.shape[-1]
    alone = grad.shape[-1] - rows
    of_x = torch.cat([grad[..., alone:rows], grad[..., :alone]], -1).flatten(1, 2)
    of_h = grad[..., alone:].flatten(1, 2)
    before = torch.cat([h0.unsqueeze(1), output], 1)[:, :-1]
    if reset is not None:
        before = torch.where(reset.unsqueeze(-1), 0.0, before)
    grad_input = grad.new_empty((info.batch_size, 0))
    if weight_x is not None:
        grad_input = ops.gemm(of_x, weight_x).reshape(input.shape)
    products = (ops.gemm(of_x.mT, input.flatten(1, 2)), ops.gemm(of_h.mT, before.flatten(1, 2)))
    return (grad_input, *products, of_x.sum(1), of_h.sum(1)), (0,) * 5
