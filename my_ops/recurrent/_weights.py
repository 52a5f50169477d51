"""How pre-activations are computed from a cell's parameters: which matrices and biases, with which
shapes.

``names`` are the names of the ops' arguments, ``optional`` those that may be None. The first
``matrices`` of them are factors of products, and ``recurrent`` is the one that the backward op over
all steps takes. ``sizes`` are the hidden and input sizes of parameters that agree with each other:
then a state or an input of another size is wrong. Gradients are computed from ``grad``, those of
the terms, and ``input_gates``, the part of it that belongs to the input gates (``Terms.of_input``,
or ``Terms.input_range`` with its two results). They can be differentiated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from my_ops.ops._checks import (
    Sizes,
    check,
    check_shape,
    check_sizes,
    show,
)
from my_ops.ops.gemm import product
from my_ops.ops.linear import as_rows, linear_product
from my_ops.recurrent import _heads
from my_ops.recurrent._terms import Terms

Linear = tuple[Tensor, Tensor | None]  # a weight and a bias, or None
Needs = Sequence[bool]  # which gradients are needed
InputGates = tuple[Tensor, int]  # Terms.input_range


def of_numbers(*tensors: Tensor) -> bool:
    """Whether no size is symbolic."""
    return all(isinstance(size, int) for t in tensors for size in t.shape)


@dataclass(frozen=True)
class OneMatrix:
    """``weights``, ``(gates * hidden_size, hidden_size + input_size)``, h first, and ``bias``.

    For cells whose terms are all sums of an input gate and the product with h.
    """

    names = ("weights", "bias")
    vectors: ClassVar[tuple[str, ...]] = ()
    optional: tuple[str, ...] = ()
    matrices = 1
    recurrent = "weights"

    def linears(
        self, cell: Terms, hidden: int, weights: Tensor, bias: Tensor
    ) -> tuple[Linear, Linear]:
        """For the input and for h; all may have one more dimension in front."""
        bias = bias.reshape(*weights.shape[:-2], cell.terms * hidden)
        return (weights[..., hidden:], bias), (weights[..., :hidden], None)

    def vectors_of(self, *_: Any) -> Sequence[Tensor]:
        """Those parameters that have a value for each unit."""
        return ()

    def of_h(self, hidden: int, recurrent: Tensor) -> Tensor:
        return recurrent[..., :hidden]

    def heads(self, hidden: int, *_: Any) -> int:
        return 1

    def check(
        self, cell: Terms, op: str, inputs: int, hidden: int, weights: Tensor, bias: Tensor
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

    def sizes(self, cell: Terms, weights: Tensor, bias: Tensor) -> tuple[int, int] | None:
        if not of_numbers(weights, bias) or weights.dim() != 2:
            return None
        rows, columns = weights.shape
        hidden, rest = divmod(rows, cell.gates)
        agree = rest == 0 and bias.numel() == rows and columns >= hidden
        return (hidden, columns - hidden) if agree else None

    def check_recurrent(self, cell: Terms, op: str, hidden: int, weights: Tensor) -> None:
        message = (
            f"{op}: weights must be ({cell.gates} * hidden_size, hidden_size + input_size) with "
            f"hidden_size = {hidden}, got {show(weights)}"
        )
        check(weights.dim() == 2, message)
        check(weights.shape[0] == cell.gates * hidden, message)
        check(weights.shape[1] >= hidden, message)

    def grad_input(self, input_gates: InputGates, hidden: int, weights: Tensor, _: Any) -> Tensor:
        """``input_gates`` may have any leading dimensions."""
        return linear_product(input_gates[0], weights[:, hidden:].mT)

    def grad_step(
        self,
        cell: Terms,
        grad: Tensor,
        input_gates: Tensor,
        hidden: int,
        needs: Needs,
        weights: Tensor,
        _: Any,
    ) -> tuple[Tensor | None, Tensor | None]:
        """For the input and for h in one step; ``needs`` says which. ``grad`` is ``(batch, .)``."""
        grad_x = grad_h = None
        if all(needs):
            grad_h, grad_x = product(grad, weights).tensor_split([hidden], dim=1)
        elif needs[0]:
            grad_x = product(grad, weights[:, hidden:])
        elif needs[1]:
            grad_h = product(grad, weights[:, :hidden])
        return grad_x, grad_h

    def grad_parameters(
        self,
        cell: Terms,
        grad: Tensor,
        input_gates: InputGates,
        x: Tensor,
        h: Tensor,
        needs: Needs,
        weights: Tensor,
        bias: Tensor,
    ) -> list[Tensor | None]:
        """From the input and h before every step, with the same leading dimensions as ``grad``."""
        grad_weights: Tensor | None = None
        grad_bias: Tensor | None = None
        if needs[0]:
            if grad.dim() == 2:
                grad_weights = product(grad.mT, torch.cat([h, x], dim=1))
            else:
                rows, h_rows, x_rows = as_rows(grad, h, x)
                by_row = rows.mT
                parts = [product(by_row, h_rows), product(by_row, x_rows)]
                grad_weights = torch.cat(parts, dim=1)
        if needs[1]:
            grad_bias = _sum_of_rows(grad)
            if bias.dim() == 2:
                grad_bias = grad_bias.unsqueeze(0)
        return [grad_weights, grad_bias]

    def join(
        self, x: Tensor, h: Tensor, bias_x: Tensor, _: Tensor, weights: Tensor, bias: Tensor
    ) -> list[Tensor]:
        """The parameters' gradients, from those of :meth:`linears`."""
        return [torch.cat([h, x], dim=1), bias_x.view_as(bias)]


@dataclass(frozen=True)
class TwoMatrices:
    """torch's parameters: ``weight_ih``, ``(gates * hidden_size, input_size)``, ``weight_hh``,
    ``(gates * hidden_size, hidden_size)``, then ``vectors``, each ``(hidden_size,)``, and a bias of
    each product, or None. With ``blocks``, ``weight_hh`` may be that of several heads, ``(gates *
    hidden_size, hidden_size / heads)``.
    """

    vectors: tuple[str, ...] = ()
    blocks: bool = False
    optional: tuple[str, ...] = ("bias_ih", "bias_hh")
    matrices = 2
    recurrent = "weight_hh"

    @property  # not cached: Dynamo's guards see what a first use adds to an object
    def names(self) -> tuple[str, ...]:
        return ("weight_ih", "weight_hh", *self.vectors, *self.optional)

    def linears(
        self, cell: Terms, hidden: int, weight_ih: Tensor, weight_hh: Tensor, *rest: Any
    ) -> tuple[Linear, Linear]:
        bias_ih, bias_hh = rest[-2:]
        return (weight_ih, bias_ih), (weight_hh, bias_hh)

    def vectors_of(self, *parameters: Any) -> Sequence[Tensor]:
        return parameters[2:-2]

    def of_h(self, hidden: int, recurrent: Tensor) -> Tensor:
        return recurrent

    def heads(self, hidden: int, weight_ih: Tensor, weight_hh: Tensor, *_: Any) -> int:
        return heads_of(hidden, weight_hh)

    def check(
        self,
        cell: Terms,
        op: str,
        inputs: int,
        hidden: int,
        weight_ih: Tensor,
        weight_hh: Tensor,
        *rest: Any,
    ) -> None:
        rows = cell.gates * hidden
        rule = f"({cell.gates} * hidden_size, input_size)"
        check_shape(weight_ih, "weight_ih", (rows, inputs), rule, op)
        self.check_recurrent(cell, op, hidden, weight_hh)
        for vector, name in zip(rest[:-2], self.vectors, strict=True):
            check_shape(vector, name, (hidden,), "(hidden_size,)", op)
        for bias, name in zip(rest[-2:], self.optional, strict=True):
            if bias is not None:
                check_shape(bias, name, (rows,), f"({cell.gates} * hidden_size,)", op)

    def sizes(
        self, cell: Terms, weight_ih: Tensor, weight_hh: Tensor, *_: Tensor | None
    ) -> tuple[int, int] | None:
        if not of_numbers(weight_ih, weight_hh) or (weight_ih.dim(), weight_hh.dim()) != (2, 2):
            return None
        (rows, inputs), (rows_h, units) = weight_ih.shape, weight_hh.shape
        hidden = rows // cell.gates if self.blocks and units > 0 else units
        agree = rows == rows_h == cell.gates * hidden and (hidden == units or hidden % units == 0)
        return (hidden, inputs) if agree else None

    def check_recurrent(self, cell: Terms, op: str, hidden: int, weight_hh: Tensor) -> None:
        if self.blocks and weight_hh.dim() == 2:
            rows, units = weight_hh.shape
            if 0 < units < hidden and hidden % units == 0 and rows == cell.gates * hidden:
                return
        rule = f"({cell.gates} * hidden_size, hidden_size)"
        check_shape(weight_hh, "weight_hh", (cell.gates * hidden, hidden), rule, op)

    def grad_input(
        self, input_gates: InputGates, hidden: int, weight_ih: Tensor, *_: Any
    ) -> Tensor:
        part, first = input_gates
        return linear_product(part, _rotated(weight_ih, len(weight_ih) - first).mT)

    def grad_step(
        self,
        cell: Terms,
        grad: Tensor,
        input_gates: Tensor,
        hidden: int,
        needs: Needs,
        weight_ih: Tensor,
        weight_hh: Tensor,
        *_: Any,
    ) -> tuple[Tensor | None, Tensor | None]:
        grad_x = product(input_gates, weight_ih) if needs[0] else None
        heads = heads_of(hidden, weight_hh)
        grad_h: Tensor | None = None
        if needs[1] and heads == 1:
            grad_h = product(cell.of_h(grad), weight_hh)
        elif needs[1]:
            of_h = _heads.of_rows(cell.of_h(grad), heads, cell.gates)
            weights = _heads.of_weight(weight_hh, heads, cell.gates)
            grad_h = _heads.joined_rows(_heads.product(product, of_h, weights), 1)
        return grad_x, grad_h

    def grad_parameters(
        self,
        cell: Terms,
        grad: Tensor,
        input_gates: InputGates,
        x: Tensor,
        h: Tensor,
        needs: Needs,
        weight_ih: Tensor,
        weight_hh: Tensor,
        *_: Any,
    ) -> list[Tensor | None]:
        vectors = [_sum_of_rows(g) for g in cell.of_vectors(grad)]
        grads: list[Tensor | None] = [None, None, *vectors, None, None]
        if needs[0] or needs[1]:
            part, first = input_gates
            rows, share_rows, h_rows, x_rows = as_rows(grad, part, h, x)
            if needs[0]:
                grads[0] = _rotated(product(share_rows.mT, x_rows), first)
            heads = heads_of(h.shape[-1], weight_hh)
            if needs[1] and heads == 1:
                grads[1] = product(cell.of_h(rows).mT, h_rows)
            elif needs[1]:
                of_h = _heads.of_rows(cell.of_h(rows), heads, cell.gates)
                blocks = product(of_h.mT, _heads.of_rows(h_rows, heads, 1))
                grads[1] = _heads.joined_weight(blocks, cell.gates)
        if needs[-2] or needs[-1]:
            total = _sum_of_rows(grad)
            if needs[-2]:
                grads[-2] = cell.of_input(total)
            if needs[-1]:
                of_h = cell.of_h(total)  # a tensor for each parameter
                grads[-1] = of_h.clone() if of_h is grads[-2] else of_h
        return grads

    def join(self, x: Tensor, h: Tensor, bias_x: Tensor, bias_h: Tensor, *_: Any) -> list[Tensor]:
        return [x, h, bias_x, bias_h]


def heads_of(hidden: int, recurrent: Tensor) -> int:
    """How many heads a recurrent weight is of."""
    units = recurrent.shape[-1]
    return 1 if units == hidden else hidden // units


def _rotated(matrix: Tensor, first: int) -> Tensor:
    """The rows from ``first`` on, then those before it."""
    if first in (0, len(matrix)):
        return matrix
    return torch.cat([matrix[first:], matrix[:first]])


def _sum_of_rows(grad: Tensor) -> Tensor:
    """The sum over the rows of ``(*, size)``, with one or two dimensions in front."""
    return grad.sum((0,) if grad.dim() == 2 else (0, 1))
