"""Argument checks of a recurrent cell for fake tensors: csrc/recurrent_checks.h."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from my_ops.ops._checks import (
    Sizes,
    check,
    check_floating,
    check_given,
    check_same_device,
    check_same_dtype,
    check_same_shape,
    check_shape,
    show,
)
from my_ops.recurrent._cell import OF_ROWS, Cell

STATE = "(batch, hidden_size)"


def _check_inputs(
    cell: Cell, op: str, input: Tensor, steps: bool, named: Sequence[tuple[Any, str]]
) -> None:
    """``named``: the parameters, and then the states."""
    check_floating(input, op, "input")
    for t, name in named:
        if t is not None or name not in cell.weights.optional:
            check_same_device(t, name, input, "input", op)
            check_same_dtype(t, name, input, "input", op)
    rule = "(steps, batch, input_size)" if steps else "(batch, input_size)"
    check(input.dim() == 2 + steps, f"{op}: input must be {rule}, got {show(input)}")
    count = len(cell.weights.names)
    states = named[count:]
    h, h_name = states[0]
    check(h.dim() == 2, f"{op}: {h_name} must be {STATE}, got {show(h)}")
    parameters = [t for t, _ in named[:count]]
    agreed = cell.weights.sizes(cell, *parameters)
    batch, hidden = input.shape[-2], agreed[0] if agreed else h.shape[1]
    for state, name in states:
        check_shape(state, name, (batch, hidden), STATE, op)
    if agreed:
        check_shape(input, "input", (*input.shape[:-1], agreed[1]), rule, op)
    cell.weights.check(cell, op, input.shape[-1], hidden, *parameters)


def check_step(cell: Cell, tensors: Sequence[Tensor]) -> None:
    input, *others = tensors
    named = list(zip(others, cell.step_arguments[1:], strict=True))
    _check_inputs(cell, f"{cell.name}_cell", input, False, named)


def check_layer(cell: Cell, tensors: Sequence[Tensor]) -> None:
    named = list(zip(tensors, cell.arguments, strict=True))
    states, parameters, of_rows = _cut(named[1:], len(cell.states), len(cell.weights.names))
    input = tensors[0]
    _check_inputs(cell, cell.name, input, True, [*parameters, *states])
    sizes = (*input.shape[:2], tensors[1].shape[1])
    _check_of_rows(of_rows, input, "input", sizes, cell.name)


def _cut(named: list[Any], *counts: int) -> Iterator[list[Any]]:
    """Splits into groups of these counts, and the rest."""
    for count in counts:
        yield named[:count]
        named = named[count:]
    yield named


def _check_of_rows(
    named: Sequence[tuple[Tensor | None, str]], like: Tensor, like_name: str, sizes: Sizes, op: str
) -> None:
    steps, batch, hidden = sizes
    rules: dict[str, tuple[torch.dtype, Sizes, str]] = {
        "lengths": (torch.int64, (batch,), "(batch,)"),
        "reset": (torch.bool, (steps, batch), "(steps, batch)"),
        "zoneout": (like.dtype, (steps, batch, hidden), "(steps, batch, hidden_size)"),
    }
    for t, name in named:
        if t is not None:
            dtype, want, rule = rules[name]
            check_same_device(t, name, like, like_name, op)
            if name == "zoneout":
                check_same_dtype(t, name, like, like_name, op)
            message = f"{op}: {name} must be of dtype {show(dtype)}, got {show(t.dtype)}"
            check(t.dtype == dtype, message)
            check_shape(t, name, want, rule, op)


def _check_like(t: Tensor | None, name: str, like: Tensor, like_name: str, op: str) -> None:
    if t is None:
        return
    check_same_device(t, name, like, like_name, op)
    check_same_dtype(t, name, like, like_name, op)
    check_same_shape(t, name, like, like_name, op)


def check_step_backward(cell: Cell, tensors: Sequence[Tensor]) -> None:
    op, names = f"{cell.name}_cell_backward", cell.step_backward_arguments
    at = names.index("gates")
    gates, state, state_name = tensors[at], tensors[at + 1], names[at + 1]
    check_floating(gates, op, "gates")
    for t, name in zip(tensors[at + 1 :], names[at + 1 :], strict=True):
        check_same_device(t, name, gates, "gates", op)
        check_same_dtype(t, name, gates, "gates", op)
    check(state.dim() == 2, f"{op}: {state_name} must be {STATE}, got {show(state)}")
    for t, name in zip(tensors[at + 2 :], names[at + 2 :], strict=True):
        check_same_shape(t, name, state, state_name, op)
    want = (state.shape[0], cell.saved * state.shape[1])
    check_shape(gates, "gates", want, f"(batch, {cell.saved} * hidden_size)", op)
    for t, name in zip(tensors[:at], names[:at], strict=True):
        _check_like(t, name, state, state_name, op)


def check_layer_backward(cell: Cell, tensors: Sequence[Tensor]) -> None:
    op, names = f"{cell.name}_backward", cell.backward_arguments
    at = names.index("gates")
    gates = tensors[at]
    read = list(zip(tensors[at + 1 :], names[at + 1 :], strict=True))
    more = len(cell.states) if cell.reads_h else len(cell.carried)
    sequences, states, (recurrent,), of_rows = _cut(read, len(cell.sequences), more, 1)
    check_floating(gates, op, "gates")
    for t, name in (*sequences, *states, recurrent):
        check_same_device(t, name, gates, "gates", op)
        check_same_dtype(t, name, gates, "gates", op)
    first, first_name = sequences[0]
    check(
        first.dim() == 3,
        f"{op}: {first_name} must be (steps, batch, hidden_size), got {show(first)}",
    )
    for t, name in sequences[1:]:
        check_same_shape(t, name, first, first_name, op)
    steps, batch, hidden = first.shape
    want: Sizes = (steps, batch, cell.saved * hidden)
    check_shape(gates, "gates", want, f"(steps, batch, {cell.saved} * hidden_size)", op)
    for t, name in states:
        check_shape(t, name, (batch, hidden), STATE, op)
    cell.weights.check_recurrent(cell, op, hidden, recurrent[0])
    grad_output = tensors[0]
    if grad_output is not None:
        check_same_device(grad_output, "grad_output", gates, "gates", op)
        check_same_dtype(grad_output, "grad_output", gates, "gates", op)
        check_same_shape(grad_output, "grad_output", first, first_name, op)
    for t, name in zip(tensors[1:at], names[1:at], strict=True):
        _check_like(t, name, states[0][0], states[0][1], op)
    _check_of_rows(of_rows, gates, "gates", (steps, batch, hidden), op)


def check_layers(
    cell: Cell,
    op: str,
    input: Tensor,
    states: Sequence[Tensor],
    parameters: Sequence[Tensor],
    layers: int,
    bidirectional: bool,
) -> None:
    """Of all layers and directions of a call: csrc/recurrent_layers.h."""
    check_given(input, op, "input")
    check(input.dim() == 3, f"{op}: input must be (steps, batch, input_size), got {show(input)}")
    check(layers >= 1, f"{op}: layers must be positive, got {layers}")
    directions = 2 if bidirectional else 1
    cells, names = layers * directions, cell.weights.names
    each = len(parameters) // cells
    least = len(names) - len(cell.weights.optional)
    check(
        each * cells == len(parameters) and least <= each <= len(names),
        f"{op}: parameters must be those of {cells} cells, got {len(parameters)}",
    )
    count = len(cell.states)
    message = f"{op}: states must be {count} tensors or none, got {len(states)}"
    check(len(states) in (0, count), message)
    for s in states:
        check_given(s, op, "states")
        message = (
            f"{op}: states must be (layers * directions, batch, hidden_size) with layers * "
            f"directions = {cells}, got {show(s)}"
        )
        check(s.dim() == 3 and s.shape[0] == cells, message)
    first = _complete(cell, parameters[:each])
    agreed = cell.weights.sizes(cell, *first)
    hidden = agreed[0] if agreed else 0
    zeros = [input.new_empty((input.shape[1], hidden))] * count
    x = input
    for k in range(cells):
        if k == directions:
            x = input.new_empty((*input.shape[:2], directions * hidden))
        own = _complete(cell, parameters[k * each : (k + 1) * each])
        of_cell: list[Any] = [x, *([s[k] for s in states] or zeros), *own]
        of_cell += [None] * len(OF_ROWS)
        check_layer(cell, of_cell)


def check_layers_backward(
    cell: Cell,
    op: str,
    grads: Sequence[Tensor | None],
    input: Tensor,
    layers: int,
    bidirectional: bool,
    saved: Sequence[Tensor],
) -> None:
    """What a call's gradients read besides its own arguments."""
    directions = 2 if bidirectional else 1
    cells = layers * directions
    carried = len(cell.carried)
    count = cells * (3 if carried else 2) + (layers - 1 if bidirectional else 0)
    check(
        len(saved) == count,
        f"{op}: saved must be the {count} tensors that recurrent_layers saves, got {len(saved)}",
    )
    steps, batch, _ = input.shape
    hidden = saved[0].shape[-1]
    of_state, of_saved = (steps, batch, hidden), (steps, batch, cell.saved * hidden)
    of_cell = [of_state, of_saved]
    if carried:
        of_cell.append((steps, batch, carried * hidden))
    of_input = [(steps, batch, 2 * hidden)] if bidirectional else []
    all_saved = (of_cell * directions + of_input) * layers
    rule = "(layers * directions, batch, hidden_size)"
    of_output = ("(steps, batch, directions * hidden_size)", (steps, batch, directions * hidden))
    shaped: list[tuple[Tensor | None, str, str, Sizes]] = [
        *(
            (t, "saved", "(steps, batch, .)", want)
            for t, want in zip(saved, all_saved, strict=False)
        ),
        (grads[0], "grad_output", *of_output),
        (grads[1], "grad_h_n", rule, (cells, batch, hidden)),
        (grads[2], "grad_c_n", rule, (cells, batch, max(carried, 1) * hidden)),
    ]
    for t, name, rule, want in shaped:
        if t is not None:
            check_same_device(t, name, input, "input", op)
            check_same_dtype(t, name, input, "input", op)
            check_shape(t, name, want, rule, op)


def check_step_gradients(
    cell: Cell,
    grads: Sequence[Tensor | None],
    gates: Tensor,
    input: Tensor,
    states: Sequence[Tensor],
    parameters: Sequence[Tensor],
) -> None:
    op, count, names = "recurrent_step_backward", len(cell.states), cell.weights.names
    check(len(states) == count, f"{op}: states must be {count} tensors, got {len(states)}")
    each = len(parameters)
    message = f"{op}: parameters must be those of a cell, got {each}"
    check(len(names) - len(cell.weights.optional) <= each <= len(names), message)
    check_step(cell, [input, *_complete(cell, parameters), *states])
    of_backward: list[Any] = [*grads[:count], gates, *states[0 if cell.reads_h else 1 :]]
    check_step_backward(cell, of_backward)


def _complete(cell: Cell, parameters: Sequence[Tensor]) -> list[Any]:
    """Of one cell, with None for the biases that it lacks."""
    return [*parameters, *[None] * (len(cell.weights.names) - len(parameters))]


def check_weights_backward(
    grad_gates: Tensor,
    input: Tensor,
    h0: Tensor,
    output: Tensor,
    weight_x: Tensor | None,
    reset: Tensor | None,
    gates: int,
) -> None:
    op = "recurrent_weights_backward"
    check_floating(grad_gates, op, "grad_gates")
    others: list[Any] = [(input, "input"), (h0, "h0"), (output, "output"), (weight_x, "weight_x")]
    for t, name in others:
        if t is not None or name != "weight_x":
            check_same_device(t, name, grad_gates, "grad_gates", op)
            check_same_dtype(t, name, grad_gates, "grad_gates", op)
    rule = "(steps, batch, input_size)"
    check(input.dim() == 3, f"{op}: input must be {rule}, got {show(input)}")
    check(h0.dim() == 2, f"{op}: h0 must be {STATE}, got {show(h0)}")
    (steps, batch, inputs), hidden = input.shape, h0.shape[1]
    check_shape(h0, "h0", (batch, hidden), STATE, op)
    check_shape(output, "output", (steps, batch, hidden), "(steps, batch, hidden_size)", op)
    check(gates >= 1, f"{op}: gates must be positive, got {gates}")
    rows = gates * hidden
    message = (
        f"{op}: grad_gates must be (steps, batch, terms * hidden_size) = ({steps}, {batch}, {rows})"
        f" or more columns, at most twice as many, got {show(grad_gates)}"
    )
    check(grad_gates.dim() == 3 and grad_gates.shape[:2] == (steps, batch), message)
    columns = grad_gates.shape[2]
    check(rows <= columns <= 2 * rows and columns % max(hidden, 1) == 0, message)
    if weight_x is not None:
        rule = "(gates * hidden_size, input_size)"
        check_shape(weight_x, "weight_x", (rows, inputs), rule, op)
    _check_of_rows([(reset, "reset")], grad_gates, "grad_gates", (steps, batch, hidden), op)
