"""Which calls of a converted layer still go to cuDNN, as before ``convert``.

Most of them are in float32 while torch lets cuDNN use TF32, its default, but not products: then a
layer that ``convert`` made of torch's has float32's accuracy where it had TF32's before. The limits
were timed on an H200.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from my_ops._private import (
    any_autocast,
    any_requires_grad,
    forward_mode,
    fp32_precision,
    tracing,
    transforms_active,
)
from my_ops.ops._checks import HALF
from my_ops.recurrent._weights_backward import FEW_ROWS

# From how many rows on TF32 is faster, for hidden sizes up to the key. A row is a sequence of the
# batch in one direction. By mode and whether there is a gradient.
_LEAST_ROWS: dict[tuple[str, bool], dict[float, float]] = {
    ("LSTM", False): {256: 16384, 384: 4096, 512: 2048, 640: 1024, 768: 256, 1024: 512, inf: 4},
    ("LSTM", True): {192: inf, 384: 1024, 512: 512, 1024: 256, inf: 16},
    ("GRU", False): {256: 16384, 384: 4096, 512: 2048, 768: 1024, 1024: 512, inf: 4},
    ("GRU", True): {384: inf, 640: 512, 1024: 256, inf: 16},
}
# Small sizes for which it is faster with batches of 64 to 128 sequences, or 256 if it runs two
# directions at a time. Forward only in many steps, where launches no longer count.
_SOME_ROWS = {
    ("LSTM", False): range(65, 97),
    ("LSTM", True): range(65, 97),
    ("GRU", False): range(65, 129),
    ("GRU", True): range(97, 129),
}
_MANY_STEPS = 128
# In 16 bits two directions at a time are faster from so many rows on, for sizes from the key on.
_ROWS_TOGETHER = {1025: 64, 1024: 2048}
# Up to so many steps times units, several layers or directions are bound by the host, and cuDNN's
# are a single op. Training steps are with so many sequences, and not while the gradients of the
# parameters are one launch. In bfloat16 torch copies the weights.
_SHORT, _SHORT_BATCH = 8192, 256


class Call(NamedTuple):
    mode: str
    dtype: torch.dtype
    hidden: int
    steps: int
    batch: int
    directions: int
    several: bool  # layers, directions, or rows with lengths of their own
    grad: bool


def bound_by_host(call: Call) -> bool:
    """Whether cuDNN takes less of the host's time, and that is what counts."""
    if not call.several or call.steps * call.hidden > _SHORT:
        return False
    if call.grad and (call.steps * call.batch <= FEW_ROWS or call.batch > _SHORT_BATCH):
        return False
    return call.dtype in (torch.float32, torch.float16)


def faster_on_gpu(call: Call, tf32: bool) -> bool:
    """Whether cuDNN is, which in float32 may use TF32."""
    rows, both = call.batch * call.directions, call.directions == 2
    if call.dtype in HALF:
        return both and any(call.hidden >= h and rows >= n for h, n in _ROWS_TOGETHER.items())
    if call.dtype != torch.float32 or not tf32:
        return False
    which = call.mode, call.grad
    least = next(rows for size, rows in _LEAST_ROWS[which].items() if call.hidden <= size)
    if rows >= least or (both and call.hidden > 1024):
        return True
    some = 64 <= call.batch <= 128 * call.directions and call.hidden in _SOME_ROWS[which]
    return some and (call.grad or call.steps >= _MANY_STEPS)


def cudnn_is_faster(
    layer: Any, data: Tensor, batch_sizes: Tensor | None, states: Sequence[Tensor]
) -> bool:
    """For a batch, ``(steps, batch, input_size)``, or for packed data with ``batch_sizes``."""
    if is_compiling() or not data.is_cuda:
        return False
    tensors = [data, *states, *layer._flat_weights]
    grad = torch.is_grad_enabled() and any_requires_grad(*tensors)
    if grad and not layer.training:  # cuDNN would refuse backward
        return False
    if batch_sizes is None:
        steps, batch = data.shape[:2]
    else:
        steps, batch = len(batch_sizes), int(batch_sizes[0])
    directions = 2 if layer.bidirectional else 1
    several = batch_sizes is not None or layer.num_layers * directions > 1
    form = directions, several, grad
    call = Call(layer.mode, data.dtype, layer.hidden_size, steps, batch, *form)
    of_rnn, of_products = (fp32_precision("cuda", op) for op in ("rnn", "matmul"))
    tf32 = of_rnn == "tf32" and of_products != "tf32"
    counts_host = bound_by_host(call) and not torch.cuda.is_current_stream_capturing()
    if not counts_host and not faster_on_gpu(call, tf32):
        return False
    if not all(type(t) in (Tensor, torch.nn.Parameter) for t in tensors):
        return False
    watched = tracing() or any_autocast() or transforms_active() or forward_mode()
    return torch.backends.cudnn.enabled and not watched
