"""Like wrong_arguments.py, for the ops of LSTM, GRU and other cells with torch's parameters."""

from dataclasses import dataclass
from typing import Any

import torch

from my_ops.recurrent._cell import Cell

STEPS, BATCH, INPUTS, HIDDEN = 5, 2, 3, 4


@dataclass(frozen=True)
class T:
    """Describes a tensor on the device of the test, or on another one."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    elsewhere: bool = False
    strides: tuple[int, ...] | None = None

    def make(self, here: str, elsewhere: str) -> torch.Tensor:
        device = elsewhere if self.elsewhere else here
        if self.strides is not None:
            return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)
        return torch.zeros(self.shape, dtype=self.dtype, device=device)


STATE = T((BATCH, HIDDEN))
LENGTHS, RESET = T((BATCH,), torch.int64), T((STEPS, BATCH), torch.bool)
MASKS = {"lengths": LENGTHS, "reset": RESET, "zoneout": T((STEPS, BATCH, HIDDEN))}


def right_of_torch(cell: Cell) -> dict[str, dict[str, Any]]:
    """Right arguments for all ops of a cell."""
    name, rows = cell.name, cell.gates * HIDDEN
    sequence = T((STEPS, BATCH, HIDDEN))
    parameters = {"weight_ih": T((rows, INPUTS)), "weight_hh": T((rows, HIDDEN))}
    parameters |= {"bias_ih": T((rows,)), "bias_hh": T((rows,))}
    carries = bool(cell.carried)
    states = {"old_h": STATE, "old_cell": STATE} if carries else {"old_h": STATE}
    first = {"h0": STATE, "c0": STATE} if carries else {"h0": STATE}
    step_grads = {"grad_h": STATE, "grad_cell": STATE} if carries else {"grad_h": STATE}
    grads = {"grad_h_n": STATE, "grad_c_n": STATE} if carries else {"grad_h_n": STATE}
    read = {"cells": sequence, "c0": STATE} if carries else {"output": sequence, "h0": STATE}
    step = {"input": T((BATCH, INPUTS)), **parameters, **states}
    layer = {"input": T((STEPS, BATCH, INPUTS)), **first, **parameters, **MASKS}
    gates_of_step = T((BATCH, cell.saved * HIDDEN))
    last = list(states)[-1]
    return {
        f"{name}_cell": step,
        f"{name}_cell_forward": step,
        f"{name}_cell_backward": {**step_grads, "gates": gates_of_step, last: STATE},
        name: layer,
        f"{name}_forward": layer,
        f"{name}_backward": {
            "grad_output": sequence,
            **grads,
            "gates": T((STEPS, BATCH, cell.saved * HIDDEN)),
            **read,
            "weight_hh": parameters["weight_hh"],
            **MASKS,
        },
    }


def wrong_of_torch(cell: Cell) -> list[tuple[str, str, list[Any], str]]:
    """The arguments with other names and sizes than LLTM's."""
    name, rule, rows = cell.name, f"{cell.gates} * hidden_size", cell.gates * HIDDEN
    saved_rule, saved = f"{cell.saved} * hidden_size", cell.saved * HIDDEN
    step, layer = f"{name}_cell_backward", f"{name}_backward"
    all_forward = f"{name}_cell {name}_cell_forward {name} {name}_forward"
    old, first, sequence, grads = ("old_h", "h0", "output", ["h"])
    if cell.carried:
        old, first, sequence, grads = ("old_cell", "c0", "cells", ["h", "c"])
    like, shaped = "must have the shape of", "got {got} and"
    return [
        (
            all_forward,
            "weight_ih",
            [(3, rows), (rows,), (rows + 1, 3), (1, rows, 3)],
            f"weight_ih must be ({rule}, input_size) = ({rows}, 3), got {{got}}",
        ),
        (
            f"{all_forward} {layer}",
            "weight_hh",
            [(rows, 3), (4, rows), (rows,), (rows - 1, 4), (rows, 5)],
            f"weight_hh must be ({rule}, hidden_size) = ({rows}, 4), got {{got}}",
        ),
        *[
            (
                all_forward,
                bias,
                [(rows + 1,), (), (1,), (1, rows)],
                f"{bias} must be ({rule},) = ({rows},), got {{got}}",
            )
            for bias in ("bias_ih", "bias_hh")
        ],
        (step, old, [(4,), (1, 2, 4)], f"{old} must be (batch, hidden_size), got {{got}}"),
        (
            step,
            "gates",
            [(2, saved - 4), (1, saved), (2, saved, 1)],
            f"gates must be (batch, {saved_rule}) = (2, {saved}), got {{got}}",
        ),
        *[
            (step, f"grad_{word}", [(4,), (2, 5)], f"grad_{word} {like} {old}, {shaped} (2, 4)")
            for word in (["h", "cell"] if cell.carried else ["h"])
        ],
        (
            layer,
            sequence,
            [(2, 4), (5, 2, 4, 1)],
            f"{sequence} must be (steps, batch, hidden_size), got {{got}}",
        ),
        (
            layer,
            "gates",
            [(5, 2, saved - 4), (4, 2, saved)],
            f"gates must be (steps, batch, {saved_rule}) = (5, 2, {saved}), got {{got}}",
        ),
        (
            layer,
            first,
            [(2, 5), (4,)],
            f"{first} must be (batch, hidden_size) = (2, 4), got {{got}}",
        ),
        (layer, "grad_output", [(2, 4)], f"grad_output {like} {sequence}, {shaped} (5, 2, 4)"),
        *[
            (layer, f"grad_{x}_n", [(1, 4)], f"grad_{x}_n {like} {first}, {shaped} (2, 4)")
            for x in grads
        ],
    ]


OP = "recurrent_weights_backward"
WEIGHTS_BACKWARD = {  # of a cell with three gates and four terms
    "grad_gates": T((STEPS, BATCH, 4 * HIDDEN)),
    "input": T((STEPS, BATCH, INPUTS)),
    "h0": STATE,
    "output": T((STEPS, BATCH, HIDDEN)),
    "weight_x": T((3 * HIDDEN, INPUTS)),
    "reset": RESET,
    "gates": 3,
}
WRONG_WEIGHTS_BACKWARD: list[tuple[str, str, list[Any], str]] = [
    (
        OP,
        "grad_gates",
        [(5, 2, 8), (5, 2, 28), (5, 2, 14), (4, 2, 16), (10, 16)],
        "grad_gates must be (steps, batch, terms * hidden_size) = (5, 2, 12) or more columns, at "
        "most twice as many, got {got}",
    ),
    (OP, "input", [(2, 3), (5, 2, 3, 1)], "input must be (steps, batch, input_size), got {got}"),
    (OP, "h0", [(4,), (1, 2, 4)], "h0 must be (batch, hidden_size), got {got}"),
    (OP, "h0", [(3, 4)], "h0 must be (batch, hidden_size) = (2, 4), got {got}"),
    (
        OP,
        "output",
        [(4, 2, 4), (5, 2, 5), (2, 4)],
        "output must be (steps, batch, hidden_size) = (5, 2, 4), got {got}",
    ),
    (
        OP,
        "weight_x",
        [(12, 4), (16, 3), (12,)],
        "weight_x must be (gates * hidden_size, input_size) = (12, 3), got {got}",
    ),
    (OP, "gates", [0, -1], "gates must be positive, got {got}"),
]
