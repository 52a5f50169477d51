"""How the parameters of a cell make pre-activations: which matrices and biases, of which shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from my_ops.ops._checks import Sizes, check, check_shape, check_sizes, show
from my_ops.ops._common import ops
from my_ops.ops.gemm import _gemm, as_rows

if TYPE_CHECKING:
    from my_ops.recurrent._cell import Cell

Linear = tuple[Tensor, Tensor | None]  # a weight and a bias, or None


@dataclass(frozen=True)
class OneMatrix:
    """``weights``, ``(gates * hidden_size, hidden_size + input_size)``, h first, and ``bias``.

    The bias is ``(terms * hidden_size,)``: one value for each term of a unit.
    """

    names = ("weights", "bias")
    matrices = 1  # the first of them, of which products are made
    recurrent = "weights"  # what the backward op over all steps takes

    def split(
        self, cell: Cell, hidden: int, weights: Tensor, bias: Tensor
    ) -> tuple[Linear, Linear]:
        """Of the input and of h; all with one more dimension in front, or without."""
        bias, of_h = bias.reshape(*weights.shape[:-2], cell.terms * hidden), None
        if cell.apart:  # each term's bias goes to the one product that has it
            sums = (cell.gates - cell.apart) * hidden
            of_h = torch.cat([torch.zeros_like(bias[..., :sums]), cell.of_h(bias)[..., sums:]], -1)
        return (weights[..., hidden:], cell.of_input(bias)), (weights[..., :hidden], of_h)

    def of_h(self, hidden: int, recurrent: Tensor) -> Tensor:
        return recurrent[..., :hidden]

    def check(
        self, cell: Cell, op: str, inputs: int, hidden: int, weights: Tensor, bias: Tensor
    ) -> None:
        rule = f"({cell.gates} * hidden_size, hidden_size + input_size)"
        check_shape(weights, "weights", (cell.gates * hidden, hidden + inputs), rule, op)
        terms = cell.terms * hidden
        want: Sizes = (1, terms)[2 - bias.dim() :] if bias.dim() in (1, 2) else (terms,)
        message = (
            f"{op}: bias must be ({cell.terms} * hidden_size,) or (1, {cell.terms} * hidden_size) "
            f"= ({terms},), got {show(bias)}"
        )
        check_sizes(bias, want, message)

    def check_recurrent(self, cell: Cell, op: str, hidden: int, weights: Tensor) -> None:
        message = (
            f"{op}: weights must be ({cell.gates} * hidden_size, hidden_size + input_size) with "
            f"hidden_size = {hidden}, got {show(weights)}"
        )
        check(weights.dim() == 2, message)
        check(weights.shape[0] == cell.gates * hidden, message)
        check(weights.shape[1] >= hidden, message)

    # ------------------------------------------ gradients, from those of the terms, differentiable

    def grad_input(self, cell: Cell, grad: Tensor, hidden: int, weights: Tensor, _: Any) -> Tensor:
        """``grad`` of any leading dimensions."""
        return ops.linear(cell.of_input(grad), weights[:, hidden:].mT)

    def grad_step(
        self, cell: Cell, grad: Tensor, hidden: int, needs: Sequence[bool], weights: Tensor, _: Any
    ) -> tuple[Tensor | None, Tensor | None]:
        """Of the input and of h in one step, ``needs`` which; ``grad`` is ``(batch, .)``."""
        grad_x = grad_h = None
        if all(needs) and not cell.apart:
            grad_h, grad_x = _gemm(grad, weights, None).tensor_split([hidden], dim=1)
            return grad_x, grad_h
        if needs[0]:
            grad_x = _gemm(cell.of_input(grad), weights[:, hidden:], None)
        if needs[1]:
            grad_h = _gemm(cell.of_h(grad), weights[:, :hidden], None)
        return grad_x, grad_h

    def grad_parameters(
        self,
        cell: Cell,
        grad: Tensor,
        x: Tensor,
        h: Tensor,
        needs: Sequence[bool],
        weights: Tensor,
        bias: Tensor,
    ) -> list[Tensor | None]:
        """From the input and h before every step, of leading dimensions as ``grad`` has."""
        grad_weights: Tensor | None = None
        grad_bias: Tensor | None = None
        if needs[0]:
            if grad.dim() == 2 and not cell.apart:
                grad_weights = _gemm(grad.mT, torch.cat([h, x], dim=1), None)
            else:
                rows, h_rows, x_rows = as_rows(grad, h, x)
                of_h = _gemm(cell.of_h(rows).mT, h_rows, None)
                of_x = _gemm(cell.of_input(rows).mT, x_rows, None)
                grad_weights = torch.cat([of_h, of_x], dim=1)
        if needs[1]:
            grad_bias = grad.sum((0,) if grad.dim() == 2 else (0, 1))
            if bias.dim() == 2:
                grad_bias = grad_bias.unsqueeze(0)
        return [grad_weights, grad_bias]
