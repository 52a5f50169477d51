"""What the dispatcher needs for a cell's ops, made from its description: fake kernels, gradients,
rules for vmap and autocast, FLOP formulas. my_ops.distributed adds sharding rules.

The schemas of the ops are in csrc/bindings.cpp: NAME for all steps and NAME_cell for one; the same
with _forward, which also return what backward needs; and with _backward. The names of their
arguments are in ``_cell.py``. Results:

    NAME_cell           the new states, h first
    NAME_cell_forward   also ``gates``, the saved values (batch, saved * hidden)
    NAME_cell_backward  grad_gates, of the terms (batch, terms * hidden); the gradients of old_h
                        without the part through the weights, if the cell reads h, and of what it
                        carries
    NAME                output, and the last states
    NAME_forward        also ``gates`` of every step; what is carried after every step
    NAME_backward       grad_gates of every step; the gradients of all states
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from my_ops import _autocast
from my_ops.ops._common import fake, ops
from my_ops.recurrent import _checks, _gradients, _vmap
from my_ops.recurrent._cell import CELLS, Cell, complete, unwrap_single

Call = Callable[..., Any]


def define(cell: Cell) -> tuple[Call, Call]:
    """Registers everything for a cell of the compiled module, once. Returns NAME_cell and NAME for
    its functions."""
    CELLS.append(cell)
    return register(cell)


def register(cell: Cell) -> tuple[Call, Call]:
    """The same for any cell whose ops have schemas and kernels."""
    _register_fakes(cell)
    _register_flops(cell)
    _vmap.register(cell)
    step, layer = (getattr(ops, name) for name in (f"{cell.name}_cell", cell.name))
    _autocast.register(step)
    _autocast.register(layer)
    return _gradients.register(cell)


# -------------------------------------------------------------------------------- fake kernels


def _register_fakes(cell: Cell) -> None:
    count = len(cell.states)
    first_state = count + 2 + len(cell.sequences)  # the first state that backward reads

    def states_of_step(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        _checks.check_step(cell, tensors)
        return tuple(s.new_empty(s.shape) for s in tensors[-count:])

    def step(*tensors: Tensor) -> tuple[Tensor, ...] | Tensor:
        return unwrap_single(states_of_step(tensors))

    def step_forward(*tensors: Tensor) -> tuple[Tensor, ...]:
        states = states_of_step(tensors)
        batch, hidden = states[0].shape
        return *states, states[0].new_empty((batch, cell.saved * hidden))

    def step_backward(*tensors: Tensor) -> tuple[Tensor, ...]:
        _checks.check_step_backward(cell, tensors)
        states = tensors[count + 1 :]
        batch, hidden = states[0].shape
        grads = (s.new_empty(s.shape) for s in states)
        return tensors[count].new_empty((batch, cell.terms * hidden)), *grads

    def layer(*given: Tensor) -> tuple[Tensor, ...]:
        tensors = complete(given, cell.arguments)
        _checks.check_layer(cell, tensors)
        states = tensors[1 : 1 + count]
        output = states[0].new_empty((tensors[0].shape[0], *states[0].shape))
        return output, *(s.new_empty(s.shape) for s in states)

    def layer_forward(*given: Tensor) -> tuple[Tensor, ...]:
        output, *states = layer(*given)
        steps, batch, hidden = output.shape
        saved = output.new_empty((steps, batch, cell.saved * hidden))
        sequences = (output.new_empty(output.shape) for _ in cell.carried)
        return output, *states, saved, *sequences

    def layer_backward(*given: Tensor) -> tuple[Tensor, ...]:
        tensors = complete(given, cell.backward_arguments)
        _checks.check_layer_backward(cell, tensors)
        gates, state = tensors[count + 1], tensors[first_state]
        steps, (batch, hidden) = gates.shape[0], state.shape
        grads = (state.new_empty(state.shape) for _ in cell.states)
        return gates.new_empty((steps, batch, cell.terms * hidden)), *grads

    for of_step, kernel in ((step, layer), (step_forward, layer_forward)):
        suffix = kernel.__name__.removeprefix("layer")
        fake(f"my_ops::{cell.name}_cell{suffix}")(of_step)
        fake(f"my_ops::{cell.name}{suffix}")(kernel)
    fake(f"my_ops::{cell.name}_cell_backward")(step_backward)
    fake(f"my_ops::{cell.name}_backward")(layer_backward)


# ----------------------------------------------------------------- floating-point operations


def _register_flops(cell: Cell) -> None:
    matrices, count = cell.weights.matrices, len(cell.states)

    def product(rows: int, parameters: Sequence[Sequence[int]]) -> int:
        return 2 * rows * sum(prod(shape) for shape in parameters[:matrices])

    def step(*shapes: Any, **_: Any) -> int:
        return product(shapes[0][0], shapes[1:])

    def layer(*shapes: Any, **_: Any) -> int:
        return product(shapes[0][0] * shapes[0][1], shapes[1 + count :])

    def layer_backward(*shapes: Any, **_: Any) -> int:
        gates, (_, hidden) = shapes[1 + count], shapes[1 + count + len(cell.sequences) + 1]
        weight = shapes[cell.backward_arguments.index(cell.weights.recurrent)]
        return 2 * gates[0] * gates[1] * cell.gates * hidden * min(weight[1], hidden)

    for name, formula in ((f"{cell.name}_cell", step), (cell.name, layer)):
        register_flop_formula([getattr(ops, name), getattr(ops, f"{name}_forward")])(formula)
    register_flop_formula(getattr(ops, f"{cell.name}_backward"))(layer_backward)
