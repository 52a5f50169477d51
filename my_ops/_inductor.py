"""What Inductor compiles instead of our ops.

Elementwise ops become ATen expressions, which Inductor fuses with their neighbours. Products that a
library computes become ATen's, which Inductor plans and calls without Python. For other products
the functions here return NotImplemented, and Inductor calls our kernels.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from my_ops import reference
from my_ops._private import declinable, inductor_tables
from my_ops.ops._checks import HALF
from my_ops.ops._common import before_tracing, ops
from my_ops.ops._strides import known
from my_ops.ops.gemm import rows_aligned
from my_ops.ops.linear import as_rows

_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)  # ATen has no arithmetic for these


def _add_one(x: Tensor) -> Tensor:
    return (x.to(torch.int64) + 1).to(x.dtype) if x.dtype in _UNSIGNED else x + 1


def _custom_add(a: Tensor, b: Tensor) -> Tensor:
    if a.dtype in _UNSIGNED:
        return (a.to(torch.int64) + b.to(torch.int64) + 1).to(a.dtype)
    return a + b + 1  # Inductor adds 16-bit types in float32 and rounds once


def _wide(t: Tensor) -> Tensor:
    """``t`` in the type in which our kernels compute."""
    return t.float() if t.dtype in HALF else t


def _wide_d_sigmoid(wide: Tensor) -> Tensor:
    e = torch.exp(-wide.abs())
    return e / (e * (2 + e) + 1)  # (1 + e)^2, rounded once where e is small


def _d_sigmoid(z: Tensor) -> Tensor:
    return _wide_d_sigmoid(_wide(z)).to(z.dtype)


def _d_sigmoid_backward(grad: Tensor, z: Tensor) -> Tensor:
    wide = _wide(z)
    # 1 - 2s = -tanh(z / 2). Not with expm1, which Inductor turns into exp(x) - 1 on the CPU.
    return (_wide(grad) * (_wide_d_sigmoid(wide) * -torch.tanh(wide / 2))).to(z.dtype)


def _round_ste(x: Tensor) -> Tensor:
    return torch.where(x.isnan(), x, (x >= 0.5).to(x.dtype))


def _fill_index(
    height: int,
    width: int,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> Tensor:
    return reference.fill_index(height, width, dtype=dtype or torch.float32, device=device)


def _is_librarys(a: Tensor, b: Tensor, n: int, k: int) -> bool:
    if a.device.type == "cpu":
        return True
    if a.dtype not in HALF or b.dtype not in HALF or not known(rows_aligned(n, k)):
        return False
    return a.dim() < 2 or known(a.stride(-1) == 1) or known(a.shape[-2] % 8 == 0)


def _gemm(a: Tensor, b: Tensor, precision: str | None = None) -> Tensor:
    if not _is_librarys(a, b, b.shape[-1], a.shape[-1]) and declinable("my_ops::gemm"):
        return NotImplemented
    a, b = reference.of_one_dtype(a, b)
    if b.dim() == 2:
        return torch.matmul(a, b)
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return torch.bmm(a.expand(*batch, *a.shape[-2:]), b.expand(*batch, *b.shape[-2:]))


def _linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "none",
    residual: Tensor | None = None,
    precision: str | None = None,
    packed: Tensor | None = None,
) -> Tensor:
    n, k = weight.shape
    fused = (activation != "none" or residual is not None) and x.device.type != "cpu"
    if (fused or not _is_librarys(x, weight, n, k)) and declinable("my_ops::linear"):
        return NotImplemented
    x, weight = reference.of_one_dtype(x, weight)
    y = F.linear(as_rows(x)[0], weight, bias).reshape(*x.shape[:-1], n)
    y = reference.activate(y, activation)
    return y if residual is None else y + residual


@functools.cache
def register_decompositions() -> None:
    found: dict[Any, Any] = {
        ops.add_one.default: _add_one,
        ops.custom_add.default: _custom_add,
        ops.d_sigmoid.default: _d_sigmoid,
        ops.d_sigmoid_backward.default: _d_sigmoid_backward,
        ops.round_ste.default: _round_ste,
        ops.fill_index.default: _fill_index,
        ops.gemm.default: _gemm,
        ops.linear.default: _linear,
    }
    for table in inductor_tables():
        table.update(found)


@before_tracing.append
def _register_if_loaded() -> None:
    if "torch._inductor" in sys.modules:
        register_decompositions()
