"""The gradients of a layer's input and parameters from those of its terms, by one op. Where it is
not the faster call they are the products of ``_weights.py``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.compiler import is_compiling

from my_ops._costs import WEIGHTS_BACKWARD
from my_ops._errors import raise_out_of_memory
from my_ops._private import dispatch_modes, tracing, transforms_active
from my_ops.ops._common import are_plain, fake, ops
from my_ops.recurrent._cell import Cell
from my_ops.recurrent._checks import check_weights_backward


@fake("my_ops::recurrent_weights_backward")
def _(*given: Any) -> tuple[Tensor, ...]:
    check_weights_backward(*given)
    grad_gates, input, h0, _, weight_x, _, gates = given
    rows, hidden = gates * h0.shape[1], h0.shape[1]
    of_input = (0,) if weight_x is None else input.shape
    sizes: Any = (of_input, (rows, input.shape[2]), (rows, hidden), (rows,), (rows,))
    return tuple(grad_gates.new_empty(size) for size in sizes)


def takes(
    cell: Cell,
    grad: Tensor,
    input: Tensor,
    h0: Tensor,
    reset: Tensor | None,
    needs: Sequence[bool],
    *others: Tensor | None,
) -> bool:
    """Whether it is the faster call, for plain tensors that nothing traces or watches. ``needs``:
    which parameters need a gradient. It computes all, and would clear h in another pass."""
    if is_compiling() or cell.vectors or not are_plain(grad, input, h0, *others):
        return False
    steps, batch, _ = grad.shape
    few = steps * batch <= WEIGHTS_BACKWARD.rows and cell.work(
        input, h0
    ) <= WEIGHTS_BACKWARD.work.get(grad.device.type, 0)
    if not few and not (grad.is_cuda and reset is None and all(needs)):
        return False
    return not (tracing() or dispatch_modes() or transforms_active())


def gradients(
    cell: Cell,
    grad: Tensor,
    input: Tensor,
    h0: Tensor,
    output: Tensor,
    reset: Tensor | None,
    need_input: bool,
    *parameters: Any,
) -> tuple[Tensor | None, Sequence[Tensor | None]]:
    weight_x = cell.weights.linears(cell, h0.shape[1], *parameters)[0][0] if need_input else None
    try:
        grad_input, *grads = ops.recurrent_weights_backward.default(
            grad, input, h0, output, weight_x, reset, cell.gates
        )
    except RuntimeError as error:
        raise_out_of_memory(error)
        raise
    return grad_input if need_input else None, cell.weights.join(*grads, *parameters)
