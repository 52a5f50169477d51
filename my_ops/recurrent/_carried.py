"""The values that a cell carries besides h, for kernels that take all kinds side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def together(tensors: Sequence[Tensor]) -> Tensor | None:
    """Values of a unit, ``(*, hidden)`` each: ``(*, count * hidden)``."""
    if len(tensors) < 2:
        return tensors[0] if tensors else None
    return torch.cat(list(tensors), -1)


def apart(cell: Any, values: Tensor | None) -> list[Tensor]:
    """The other way, in memory of their own."""
    count = len(cell.carried)
    if values is None or count < 2:
        return [] if values is None else [values]
    return [t.clone(memory_format=torch.contiguous_format) for t in values.chunk(count, -1)]


def gradients(grads: Sequence[Tensor | None]) -> Tensor | None:
    """Those of all kinds, with zeros for kinds that have none; None if no kind has one."""
    given = next((g for g in grads if g is not None), None)
    if given is None:
        return None
    return together([torch.zeros_like(given) if g is None else g for g in grads])


def of_forward(cell: Any, read: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """The output, h0, and what is carried, of all steps and at first, of ``read``: the sequences
    that backward reads and then the states."""
    sequences, states = list(read[: len(read) // 2]), list(read[len(read) // 2 :])
    output, h0 = (sequences.pop(0), states.pop(0)) if cell.reads_h else (None, None)
    return output, h0, together(sequences), together(states)
