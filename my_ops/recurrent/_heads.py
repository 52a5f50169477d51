"""Layers of heads: the gates of a unit see h of its head's units alone.

Their recurrent weight has the blocks of a block-diagonal one, ``(gates * hidden, hidden / heads)``:
the rows are the gates', and of each gate the heads'. What has a value for each unit has those of
the heads side by side, so that it lies as in a layer of one head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

# By reshape, not by flatten, for which batched gradients (is_grads_batched) have no rule.


def of_rows(x: Tensor, heads: int, kinds: int) -> Tensor:
    """``(*, rows, kinds * hidden)``, for each kind the values of all units, by head: ``(*, heads,
    rows, kinds * units)``."""
    *lead, rows, size = x.shape
    parts = x.reshape(*lead, rows, kinds, heads, size // (kinds * heads))
    return parts.movedim(-2, -4).reshape(*lead, heads, rows, size // heads)


def joined_rows(parts: Tensor, kinds: int) -> Tensor:
    """The other way."""
    *lead, heads, rows, size = parts.shape
    parts = parts.reshape(*lead, heads, rows, kinds, size // kinds)
    return parts.movedim(-4, -2).reshape(*lead, rows, heads * size)


def of_weight(weight: Tensor, heads: int, gates: int) -> Tensor:
    """A recurrent weight by head: ``(*, heads, gates * units, units)``."""
    *lead, rows, units = weight.shape
    parts = weight.reshape(*lead, gates, heads, rows // (gates * heads), units)
    return parts.transpose(-4, -3).reshape(*lead, heads, rows // heads, units)


def joined_weight(parts: Tensor, gates: int) -> Tensor:
    """The other way."""
    *lead, heads, rows, units = parts.shape
    parts = parts.reshape(*lead, heads, gates, rows // gates, units)
    return parts.transpose(-4, -3).reshape(*lead, heads * rows, units)


def product(run: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` of ``(*, ., .)``, by a product of batches."""
    lead = a.shape[:-2]
    a, b = (t.reshape(prod(lead), *t.shape[-2:]) for t in (a, b))
    return run(a, b).reshape(*lead, a.shape[-2], b.shape[-1])


# ------------------------------------------------------------------------- one head after the other


def apart(x: Any, heads: int, kinds: int = 1) -> Sequence[Any]:
    """``(*, kinds * hidden)`` of each head."""
    if x is None:
        return [None] * heads
    parts = x.reshape(*x.shape[:-1], kinds, heads, x.shape[-1] // (kinds * heads))
    return parts.movedim(-2, 0).reshape(heads, *x.shape[:-1], x.shape[-1] // heads).unbind(0)


def together(parts: Sequence[Tensor], kinds: int = 1) -> Tensor:
    """The other way."""
    shape = (*parts[0].shape[:-1], kinds, parts[0].shape[-1] // kinds)
    whole = torch.cat([p.reshape(shape) for p in parts], -1)
    return whole.reshape(*shape[:-2], kinds * whole.shape[-1])


def _parameter(p: Any, heads: int, units: int) -> Sequence[Any]:
    """``(kinds * hidden, *)`` of each head."""
    if p is None:
        return [None] * heads
    parts = p.reshape(p.shape[0] // (heads * units), heads, units, *p.shape[1:])
    return parts.transpose(0, 1).reshape(heads, p.shape[0] // heads, *p.shape[1:]).unbind(0)


def forward(
    run: Callable[..., Any],
    cell: Any,
    input: Tensor,
    states: Sequence[Tensor],
    parameters: Sequence[Any],
    of_rows: Sequence[Any],
    saves: bool,
) -> tuple[Tensor, ...] | None:
    """The results of ``run`` for several heads. It computes a layer of one, or returns None."""
    hidden = states[0].shape[-1]
    heads = cell.weights.heads(hidden, *parameters)
    if heads == 1:
        return None
    own_states = zip(*(apart(s, heads) for s in states), strict=True)
    own = zip(*(_parameter(p, heads, hidden // heads) for p in parameters), strict=True)
    *masks, zoneout = of_rows
    found: list[Sequence[Tensor]] = []
    for given in zip(own_states, own, apart(zoneout, heads), strict=True):
        results = run(cell, input, given[0], given[1], (*masks, given[2]), saves)
        if results is None:
            return None
        found.append(results)
    at = 1 + len(states)  # of the saved values
    by_result = enumerate(zip(*found, strict=True))
    return tuple(together(parts, cell.saved if k == at else 1) for k, parts in by_result)


def backward(
    run: Callable[..., Any],
    cell: Any,
    grads: Sequence[Tensor | None],
    saved: Tensor,
    read: Sequence[Tensor],
    w_h: Tensor,
    of_rows: Sequence[Any],
) -> tuple[Tensor, ...] | None:
    """Likewise."""
    heads = saved.shape[-1] // (cell.saved * w_h.shape[-1])
    if heads == 1:
        return None
    own_grads = zip(*(apart(g, heads) for g in grads), strict=True)
    own_read = zip(*(apart(t, heads) for t in read), strict=True)
    weights, own_saved = _parameter(w_h, heads, w_h.shape[-1]), apart(saved, heads, cell.saved)
    *masks, zoneout = of_rows
    found: list[Sequence[Tensor]] = []
    for given in zip(own_grads, own_saved, own_read, weights, apart(zoneout, heads), strict=True):
        results = run(cell, *given[:4], (*masks, given[4]))
        if results is None:
            return None
        found.append(results)
    by_result = enumerate(zip(*found, strict=True))
    return tuple(together(parts, cell.terms if k == 0 else 1) for k, parts in by_result)
