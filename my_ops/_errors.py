"""Out of memory in an op: the class of torch's error, found again.

The ops are compiled against torch's C interface, through which an error comes as a status, and from
torch 2.13 on as text. What the module raises is a RuntimeError that ends in "(N bytes on cuda:0)".
"""

from __future__ import annotations

import re

import torch

_ALLOCATION = re.compile(r"my_ops: (\S+) failed(.*?) \((\d+) bytes on (\S+)\)", re.DOTALL)


def raise_out_of_memory(error: RuntimeError) -> None:
    """Raises what torch raises where ``error`` says that memory was missing, else nothing.

    To be called from ``except RuntimeError``, before ``raise``.
    """
    if type(error) is not RuntimeError:  # torch's own, which is raised from Python below an op
        return
    text = str(error)
    match = _ALLOCATION.search(text)
    said = "CUDA out of memory" in text or "cudaErrorMemoryAllocation" in text
    if match:
        call, reason, size, device = match.groups()
        said |= device != "cpu" and "empty" in call and not reason
        # torch's own error, with its figures. It raises none if memory has become free since.
        torch.empty(int(size), dtype=torch.uint8, device=device)
    if said:
        raise torch.OutOfMemoryError(text)
