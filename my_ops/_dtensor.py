"""Layouts of DTensors. Imported only where there are some, because that takes time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import Replicate


def flattenable(tensors: Sequence[Any]) -> tuple[Any, ...]:
    """DTensors ``(*, size)``, laid out so that all but their last dimension can be flattened.

    Before torch 2.13 only the first of the flattened dimensions may be sharded, and only evenly. A
    later sharded dimension is moved to the front, in all tensors alike. Tensors that are sharded in
    another way are gathered.
    """
    last = tensors[0].ndim - 1
    sharded = [p.dim for t in tensors for p in t.placements if p.is_shard() and p.dim < last]
    return tuple(_flattenable(t, sharded[0] if sharded else 0, last) for t in tensors)


def _flattenable(t: Any, first: int, last: int) -> Any:
    sizes = zip(t.device_mesh.shape, t.placements, strict=True)
    even = t.shape[first] % math.prod(size for size, p in sizes if p.is_shard(first)) == 0
    places = [
        Replicate() if p.is_shard() and p.dim < last and not (p.dim == first and even) else p
        for p in t.placements
    ]
    if first == 0 and places == list(t.placements):
        return t
    # Clone, because the strides after an uneven gather are not those that DTensor assumes.
    moved = t.redistribute(placements=places).movedim(first, 0)
    return moved.clone(memory_format=torch.contiguous_format)
