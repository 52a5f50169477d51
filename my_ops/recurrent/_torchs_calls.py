"""Which calls of a converted layer are still torch's op, as before ``convert``: cuDNN's, and on the
CPU oneDNN's.

Most of those of cuDNN are in float32 while torch lets cuDNN use TF32, its default, but not
products: then a layer that ``convert`` made of torch's has float32's accuracy where it had TF32's
before. The limits are in ``_costs.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from my_ops._costs import CUDNN, ONEDNN, WEIGHTS_BACKWARD
from my_ops._private import (
    any_autocast,
    any_requires_grad,
    forward_mode,
    fp32_precision,
    multiplies_bfloat16,
    tracing,
    transforms_active,
)
from my_ops.ops._checks import HALF

_PLAIN = (Tensor, torch.nn.Parameter)


class Call(NamedTuple):
    mode: str
    dtype: torch.dtype
    hidden: int
    steps: int
    batch: int
    layers: int
    directions: int
    packed: bool
    grad: bool


def bound_by_host(call: Call) -> bool:
    """Whether cuDNN takes less of the host's time, and that is what counts."""
    several = call.packed or call.layers * call.directions > 1
    short = call.steps * call.hidden
    if not several or short > CUDNN.short or short * call.batch > CUDNN.few_elements:
        return False
    if (
        call.grad and call.steps * call.batch <= WEIGHTS_BACKWARD.rows
    ):  # one launch for the gradients
        return False
    return call.dtype in (torch.float32, torch.float16)


def faster_on_gpu(call: Call, tf32: bool) -> bool:
    """Whether cuDNN is, which in float32 may use TF32."""
    which, both = (call.mode, call.grad), call.directions == 2
    rows = call.batch * call.directions
    if call.dtype in HALF:
        small = which == ("LSTM", False) and call.hidden <= CUDNN.small_lstm
        if small and call.dtype == torch.float16:
            return both and call.batch >= CUDNN.many_sequences
        return both and any(call.hidden >= h and rows >= n for h, n in CUDNN.rows_together.items())
    if call.dtype != torch.float32 or not tf32:
        return False
    least = next(rows for size, rows in CUDNN.least_rows[which].items() if call.hidden <= size)
    if rows >= least or (both and call.hidden > CUDNN.both_directions_hidden):
        return True
    if (
        both
        and call.layers > 1
        and call.grad
        and call.hidden > CUDNN.wide_input
        and rows >= CUDNN.many_rows
    ):
        return True
    few, most = CUDNN.some_rows.start, CUDNN.some_rows.stop - 1
    some = few <= call.batch <= most * call.directions and call.hidden in CUDNN.some_hidden[which]
    return some and (call.grad or call.steps * call.directions >= CUDNN.many_steps)


def faster_on_cpu(call: Call) -> bool:
    """Whether oneDNN is, which multiplies bfloat16 where the processor does. Ours are float."""
    if (call.mode, call.dtype) != ("LSTM", torch.bfloat16) or call.packed:
        return False
    if not multiplies_bfloat16():
        return False
    work = call.batch * call.hidden**2
    if call.grad:
        return call.batch >= ONEDNN.training_batch and work >= ONEDNN.training_work
    return work >= ONEDNN.work


@lru_cache(maxsize=256)  # such Python counts where the host bounds
def _is_faster(call: Call, tf32: bool, eager: bool) -> bool:
    return (eager and bound_by_host(call)) or faster_on_gpu(call, tf32)


def steps_and_batch(layer: Any, data: Tensor, batch_sizes: Tensor | None) -> tuple[int, int] | None:
    """Of a batch ``(steps, batch, input_size)`` or of packed data with ``batch_sizes``; None if
    torch's op does not take it."""
    if data.numel() == 0:
        return None
    if batch_sizes is None:
        return data.size(0), data.size(1)
    if data.dim() != 2 or data.size(1) != layer.input_size:
        return None
    return len(batch_sizes), int(batch_sizes[0])


def are_alike(*tensors: Tensor) -> bool:
    """Whether all are torch's own, of one dtype and on one device. For what does not fit, our own
    ops have the messages."""
    dtype, device = tensors[0].dtype, tensors[0].device
    for t in tensors:
        if type(t) not in _PLAIN or t.dtype != dtype or t.device != device:
            return False
    return True


def parameters_for_torch(
    layer: Any, data: Tensor, batch_sizes: Tensor | None, states: Sequence[Tensor]
) -> list[Tensor] | None:
    """The parameters of all layers if torch's op is faster, for a batch ``(steps, batch,
    input_size)`` or for packed data with ``batch_sizes``."""
    if is_compiling() or type(data) not in _PLAIN:
        return None
    if not (data.is_cuda or (data.is_cpu and data.dtype == torch.bfloat16)):
        return None
    if tracing() or any_autocast() or transforms_active() or forward_mode():
        return None
    found = steps_and_batch(layer, data, batch_sizes)
    if found is None:
        return None
    directions = 2 if layer.bidirectional else 1
    sizes = layer.mode, data.dtype, layer.hidden_size, *found, layer.num_layers, directions
    packed = batch_sizes is not None
    recorded, on_gpu = torch.is_grad_enabled(), data.is_cuda
    calls = Call(*sizes, packed, False), Call(*sizes, packed, True)
    if on_gpu:
        tf32 = fp32_precision("cuda", "rnn") == "tf32" != fp32_precision("cuda", "matmul")
        eager = not torch.cuda.is_current_stream_capturing()
        faster = [_is_faster(call, tf32, eager) for call in calls[: 1 + recorded]]
    else:
        faster = [faster_on_cpu(call) for call in calls[: 1 + recorded]]
    if not any(faster):
        return None
    parameters: list[Tensor] = layer._in_a_row()
    tensors = [data, *states, *parameters]
    if not are_alike(*tensors):
        return None
    grad = recorded and any_requires_grad(*tensors)
    refused = grad and not layer.training  # backward, by cuDNN
    enabled = torch.backends.cudnn.enabled if on_gpu else torch.backends.mkldnn.enabled
    if refused or not faster[grad] or not enabled:
        return None
    return parameters
