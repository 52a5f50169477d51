"""Which calls of a converted layer still go to cuDNN.

By default torch lets cuDNN use TF32, and not products. Then a layer that ``convert`` made of
torch's has float32's accuracy where it had TF32's before, which takes longer at the sizes below.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from my_ops._private import any_autocast, forward_mode, fp32_precision, tracing, transforms_active

# From how many rows on cuDNN's TF32 is faster, for hidden sizes up to the key. A row is a sequence
# of the batch in one direction. By mode and whether there is a gradient. Timed on an H200.
_LEAST_ROWS: dict[tuple[str, bool], dict[float, float]] = {
    ("LSTM", False): {256: inf, 384: 4096, 512: 2048, 640: 1024, 768: 256, 1024: 512, inf: 4},
    ("LSTM", True): {192: inf, 384: 1024, 512: 512, 1024: 256, inf: 16},
    ("GRU", False): {256: inf, 384: 4096, 512: 2048, 768: 1024, 1024: 512, inf: 4},
    ("GRU", True): {384: inf, 640: 512, 1024: 256, inf: 16},
}
# Small sizes for which it is faster with batches of 64 to 128 sequences, or 256 if it runs two
# directions at a time. Forward only where launches no longer count.
_SOME_ROWS = {
    ("LSTM", False): range(65, 97),
    ("LSTM", True): range(65, 97),
    ("GRU", False): range(65, 129),
    ("GRU", True): range(97, 129),
}
_LONG = 128


def _faster(mode: str, hidden: int, steps: int, batch: int, directions: int, grad: bool) -> bool:
    least = next(rows for size, rows in _LEAST_ROWS[mode, grad].items() if hidden <= size)
    if batch * directions >= least:
        return True
    some = 64 <= batch <= 128 * directions and (grad or steps >= _LONG)
    return some and hidden in _SOME_ROWS[mode, grad]


def cudnn_is_faster(
    layer: Any, data: Tensor, batch_sizes: Tensor | None, states: Sequence[Tensor]
) -> bool:
    """For a batch, ``(steps, batch, input_size)``, or for packed data with ``batch_sizes``."""
    if is_compiling() or not data.is_cuda or data.dtype != torch.float32:
        return False
    if fp32_precision("cuda", "rnn") != "tf32" or fp32_precision("cuda", "matmul") == "tf32":
        return False
    tensors = [data, *states, *layer._in_a_row()]
    grad = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    if grad and not layer.training:  # cuDNN would refuse backward
        return False
    if batch_sizes is None:
        steps, batch = data.shape[:2]
    else:
        steps, batch = len(batch_sizes), int(batch_sizes[0])
    directions = 2 if layer.bidirectional else 1
    return (
        _faster(layer.mode, layer.hidden_size, steps, batch, directions, grad)
        and torch.backends.cudnn.enabled
        and all(type(t) in (Tensor, torch.nn.Parameter) for t in tensors)
        and not (tracing() or any_autocast() or transforms_active() or forward_mode())
    )
