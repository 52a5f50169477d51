"""Replaces unclear errors of an op by clearer ones.

Out of memory: the ops are compiled against torch's C interface, which passes an error on as a
status, and from torch 2.13 on as text. So the module raises a RuntimeError that ends in "(N bytes
on cuda:0)", and this file raises the class of torch's error instead. For arguments that no kernel
takes, the new error says which one, and why.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_ALLOCATION = re.compile(r"my_ops: (\S+) failed(.*?) \((\d+) bytes on (\S+)\)", re.DOTALL)


def raise_out_of_memory(error: RuntimeError) -> None:
    """Raises torch's out-of-memory error if ``error`` means that, or an error that names it as the
    likely reason if torch passed none on; otherwise does nothing. On the CPU, torch's out-of-memory
    error is a RuntimeError, and ``error`` may be that.

    Call it in ``except RuntimeError``, before ``raise``.
    """
    if type(error) is not RuntimeError:  # torch's own class, raised by Python code below an op
        return
    text = str(error)
    match = _ALLOCATION.search(text)
    said = "CUDA out of memory" in text or "cudaErrorMemoryAllocation" in text
    unsaid = False
    if match:
        call, reason, size, device = match.groups()
        unsaid = device != "cpu" and not reason
        said |= unsaid and ("empty" in call or call == "aten::to")
        # This raises torch's own error, with its numbers, unless memory has become free since.
        torch.empty(int(size), dtype=torch.uint8, device=device)
    if "can't allocate memory" in text:  # on the CPU
        raise error
    if said:
        known = "out of memory" in text
        raise torch.OutOfMemoryError(text if known else f"CUDA out of memory. {text}")
    if unsaid:
        raise RuntimeError(f"{text}. torch before 2.13 gives no reason: most often, out of memory")


def without_kernel(value: Tensor) -> str | None:
    """Why no kernel takes a tensor of this kind, after its name; None if one may."""
    if value.is_nested:
        return "must not be nested, got a NestedTensor: pass its values() or unbind() it"
    if value.layout != torch.strided or value.is_quantized:
        kind = value.dtype if value.is_quantized else value.layout
        return f"must be a dense tensor of layout torch.strided, got {kind}"
    return None


def raise_clearer(
    error: RuntimeError, op: torch._ops.OpOverload, names: Iterable[str], args: Iterable[Any]
) -> None:
    """Raises a clearer error than ``error``, which ``op`` raised for these arguments, if it can.

    Call it in ``except RuntimeError``, before ``raise``.
    """
    raise_out_of_memory(error)
    if not isinstance(error, NotImplementedError):
        return
    for name, value in zip(names, args, strict=False):
        if not isinstance(value, Tensor):
            continue
        problem = without_kernel(value)
        if hasattr(value, "placements") and "my_ops.distributed" not in sys.modules:
            problem = "is a DTensor: import my_ops.distributed first, which has the sharding rules"
        if problem:
            short = op.name().split("::")[1].split(".")[0]
            raise NotImplementedError(f"{short}: {name} {problem}") from error
