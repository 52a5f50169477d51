"""LSTM and GRU as cells that are defined in Python, for layers of several heads on CUDA: such cells
have kernels that run all heads in one launch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from my_ops._private import any_requires_grad, dispatch_modes, tracing, transforms_active
from my_ops.ops._common import are_plain
from my_ops.recurrent import _own_kernels
from my_ops.recurrent._calls import MaybeTensor, Tensors
from my_ops.recurrent._torchs_calls import are_alike
from my_ops.recurrent.own_cell import CellDefinition


def block_lstm(i: Any, f: Any, g: Any, o: Any, c: Any) -> Any:
    i, f, g, o = torch.sigmoid(i), torch.sigmoid(f), torch.tanh(g), torch.sigmoid(o)
    c = f * c + i * g
    return o * torch.tanh(c), c


def block_gru(r: Any, u: Any, n_x: Any, n_h: Any, h: Any) -> Any:
    r, u = torch.sigmoid(r), torch.sigmoid(u)
    n = torch.tanh(n_x + r * n_h)
    return n + u * (h - n)


@functools.cache
def _cell(function: Callable[..., Any]) -> CellDefinition:
    """Not at import, which would take longer for programs without heads."""
    if function is block_lstm:
        return CellDefinition(function, "ifgo", "c", "", layer="nn.LSTM with heads")
    return CellDefinition(function, "run", "", "", layer="nn.GRU with heads")


def run(
    function: Callable[..., Any],
    x: Tensor,
    states: Tensors,
    parameters: Tensors,
    *of_rows: MaybeTensor,
) -> Tensors | None:
    """All heads of a direction, or None if they do not run in one launch: the shipped kernels, one
    head after the other, are faster than a launch for each step."""
    if not x.is_cuda or is_compiling() or not are_plain(x, *states, *parameters):
        return None
    if tracing() or transforms_active() or dispatch_modes():
        return None
    if x.dtype == torch.float64:  # of which there are no such kernels
        return None
    given = x, *states, *parameters
    if not torch.is_autocast_enabled("cuda") and not are_alike(*given):
        return None  # the shipped op says what is wrong
    hidden = states[0].size(-1)
    sizes = x.size(0), x.size(1), hidden, hidden // parameters[1].size(-1)
    cell, trains = _cell(function), torch.is_grad_enabled() and any_requires_grad(*given)
    if not _own_kernels.in_one_launch(cell._cell, x, trains, *sizes):
        return None
    biases = () if len(parameters) > 2 else (None, None)
    return list(cell._run(x, *states, *parameters, *biases, *of_rows))
