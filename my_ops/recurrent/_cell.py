"""What a recurrent cell is: the arithmetic of a hidden unit, and the names of its ops' arguments.

This is the counterpart of kernels/recurrent/cells/cell.h, with the same terms. Formulas work on
tensors ``(*, hidden_size)``, one for each value of a unit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from my_ops.ops._common import check_tensor
from my_ops.recurrent._terms import Terms, Values
from my_ops.recurrent._weights import OneMatrix, TwoMatrices

# The last arguments over all steps: when each row ends, (batch,); before which steps its state is
# zero, (steps, batch); and what fraction of h stays, (steps, batch, hidden). Any may be None or
# left out.
OF_ROWS = ("lengths", "reset", "zoneout")

# z, h, carried -> h, carried, saved
Forward = Callable[[Values, Tensor, Values], tuple[Tensor, Values, Values]]
# saved, carried before the step and after it, h before it (only if the cell reads that), grad_h,
# grad_carried -> grad_z, grad_h without the part through the weights or None, grad_carried
Backward = Callable[[Values, Values, Values, Any, Tensor, Values], tuple[Values, Any, Values]]


@dataclass(frozen=True)
class Cell(Terms):
    """One kind of cell.

    ``forward`` and ``backward`` compute the same as the kernels, in plain PyTorch and
    differentiable: they are used for second gradients, forward mode, and vmap over parameters.
    ``z`` has the pre-activations, one for each term of the cell. For each gate it is the sum of the
    input gate and the product with ``h``. For the last ``apart`` gates it is the product alone,
    and their input gates follow after all gates, and then the vectors of ``weights``. What
    ``forward`` saves is all that ``backward`` gets of ``z``.
    """

    name: str  # the op over all steps; NAME_cell is the op of one step
    gates: int  # rows of the weights per unit
    saved: int  # values that forward keeps for backward
    shut: tuple[float, ...]  # for rows that have ended: carried values stay, and h gets no gradient
    forward: Forward
    backward: Backward
    carried: dict[str, str] = field(default_factory=dict)  # besides h: {"c": "cell"} in LSTM
    apart: int = 0  # gates that need the product with h apart from the input: 1 in GRU
    reads_h: bool = False  # whether the previous h also enters other than through the weights
    weights: OneMatrix | TwoMatrices = field(default_factory=TwoMatrices)

    def __post_init__(self) -> None:
        """Raises ValueError unless the formulas return as many values as the numbers say."""

        def check(what: str, want: int, got: int) -> None:
            if got != want:
                raise ValueError(f"{self.name}: {what.format(want)}, got {got}")

        check("shut must have {} values, one for each saved value", self.saved, len(self.shut))
        one = torch.zeros(1, device="cpu")
        carried = (one,) * len(self.carried)
        _, after, saved = self.forward((one,) * self.terms, one, carried)
        check("forward must return {} saved values", self.saved, len(saved))
        check("forward must return {} carried values", len(self.carried), len(after))
        h = one if self.reads_h else None
        grad_z, grad_h, grad_carried = self.backward(saved, carried, after, h, one, carried)
        check("backward must return {} gradients of pre-activations", self.terms, len(grad_z))
        check(
            "backward must return {} gradients of carried values",
            len(self.carried),
            len(grad_carried),
        )
        if (grad_h is not None) != self.reads_h:
            want, got = ("a tensor", "None") if self.reads_h else ("None", "a tensor")
            rule = f"backward must return {want} as the gradient of h, got {got}"
            raise ValueError(f"{self.name}: {rule}")

    def runs_at_once(self, layer: Any, input: Tensor) -> bool:
        """Whether the ops recurrent_layers and recurrent_layers_backward run a call of a layer."""
        return True

    # ------------------------------------------------------------- names of arguments and results

    @property  # not cached: Dynamo's guards see what a first use adds to an object
    def vectors(self) -> int:  # type: ignore[override]
        return len(self.weights.vectors)

    @cached_property
    def step_states(self) -> list[str]:
        return ["old_h", *(f"old_{word}" for word in self.carried.values())]

    @cached_property
    def states(self) -> list[str]:
        return ["h0", *(f"{letter}0" for letter in self.carried)]

    @cached_property
    def step_arguments(self) -> list[str]:
        return ["input", *self.weights.names, *self.step_states]

    @cached_property
    def arguments(self) -> list[str]:
        return ["input", *self.states, *self.weights.names, *OF_ROWS]

    @cached_property
    def step_backward_arguments(self) -> list[str]:
        words = ["h", *self.carried.values()]
        read = self.step_states[0 if self.reads_h else 1 :]
        return [*(f"grad_{word}" for word in words), "gates", *read]

    @cached_property
    def sequences(self) -> list[str]:
        """For all steps, what backward reads besides the saved values: ``(steps, batch, .)``."""
        words = [f"{word}s" for word in self.carried.values()]
        return ["output", *words] if self.reads_h else words

    @cached_property
    def backward_arguments(self) -> list[str]:
        letters = ["h", *self.carried]
        grads = ["grad_output", *(f"grad_{letter}_n" for letter in letters)]
        read = self.states[0 if self.reads_h else 1 :]
        return [*grads, "gates", *self.sequences, *read, self.weights.recurrent, *OF_ROWS]


CELLS: list[Cell] = []  # those whose ops are in the compiled module
OWN_CELLS: list[Cell] = []  # those that programs have defined


def complete(given: tuple[Any, ...], names: list[str]) -> tuple[Any, ...]:
    """All arguments: the dispatcher strips the last ones if they are None."""
    return (*given, *[None] * (len(names) - len(given)))


def check_types(op: str, cell: Cell, names: Sequence[str], values: Sequence[Any]) -> None:
    """Raises TypeError unless all are tensors, or None where that is allowed."""
    for name, value in zip(names, values, strict=True):
        if isinstance(value, Tensor):
            continue
        if value is not None or name not in (*cell.weights.optional, *OF_ROWS):
            check_tensor(op, **{name: value})


def unwrap_single(results: tuple[Tensor, ...]) -> tuple[Tensor, ...] | Tensor:
    """The results in an op's form: a single tensor is not in a tuple."""
    return results if len(results) > 1 else results[0]
