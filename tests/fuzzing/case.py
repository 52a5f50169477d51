"""A call, described by what is needed to repeat it, and its result."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from fuzzing.tensors import T

Excess = tuple[str, Tensor]  # the kind of call, and its error as a share of what is allowed
Tensors = dict[str, Any]


@dataclass(frozen=True)
class Case:
    op: str
    device: str
    arguments: dict[str, Any]  # T, or a value that is passed unchanged
    seed: int = 0  # for what is drawn besides the arguments
    gradient: bool = False
    wrong: str = ""  # the exception that it must raise

    def __repr__(self) -> str:
        given = [f for f in fields(self)[3:] if getattr(self, f.name) != f.default]
        lines = "".join(f"\n        {name!r}: {v!r}," for name, v in self.arguments.items())
        more = "".join(f"\n    {f.name}={getattr(self, f.name)!r}," for f in given)
        return f"Case(\n    {self.op!r},\n    {self.device!r},\n    {{{lines}\n    }},{more}\n)"


@dataclass(frozen=True)
class Op:
    """``draw`` makes arguments, and says whether gradients are possible; ``judge`` calls the op of
    a module, my_ops or the reference; ``spoil`` makes one of the arguments wrong."""

    name: str
    draw: Callable[[random.Random, float], tuple[dict[str, Any], bool]]
    judge: Callable[[Case, Tensors, Any], Iterator[Excess]]
    spoil: Callable[[random.Random, dict[str, Any]], tuple[dict[str, Any], str]] | None = None
    peer: bool = False  # beyond the bound it is wrong only if torch's own is nearer
    weight: float = 1.0  # how often it is drawn


def make(case: Case) -> tuple[Tensors, list[Tensor]]:
    """The arguments, and the memory of those that are tensors."""
    tensors, memories = {}, []
    for name, value in case.arguments.items():
        if isinstance(value, T):
            tensors[name], memory = value.make(case.device)
            memories.append(memory)
        else:
            tensors[name] = value
    return tensors, memories


def bits(memory: Tensor) -> Tensor:
    return memory.view(torch.uint8)


def unchanged(before: list[Tensor], memories: list[Tensor]) -> Tensor:
    """0, or infinity if any bit has changed."""
    same = [(bits(a) == b).all() for a, b in zip(memories, before, strict=True)]
    return torch.where(torch.stack(same).all(), 0.0, math.inf).double()
