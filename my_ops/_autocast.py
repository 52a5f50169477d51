"""Autocast: the ops made of products run in the dtype of ``torch.autocast``.

gemm, linear, lltm_cell and lltm cast their floating arguments, float64 excepted, as torch's own
products do. The elementwise ops follow their arguments: they need no rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from my_ops._autograd import library
from my_ops.ops._common import ops

try:  # private names, present in torch 2.10 to 2.15: a sixth of torch.autocast's host time
    from torch._C import DispatchKey, DispatchKeySet, _ExcludeDispatchKeyGuard

    def _without(device: str, key: str) -> Callable[[], Any]:
        keys = DispatchKeySet(getattr(DispatchKey, key))
        return lambda: _ExcludeDispatchKeyGuard(keys)
except ImportError:

    def _without(device: str, key: str) -> Callable[[], Any]:
        return lambda: torch.autocast(device, enabled=False)


def _kernel(op: Any, device: str, key: str) -> Callable[..., Any]:
    below = _without(device, key)

    def cast(value: Any, dtype: torch.dtype) -> Any:
        eligible = (
            isinstance(value, Tensor)
            and value.is_floating_point()
            and value.device.type == device
            and value.dtype != torch.float64
        )
        return value.to(dtype) if eligible else value

    def kernel(*args: Any) -> Any:
        dtype = torch.get_autocast_dtype(device)
        with below():
            return op(*(cast(value, dtype) for value in args))

    return kernel


for _op in (ops.gemm, ops.linear, ops.lltm_cell, ops.lltm):
    for _device in ("cpu", "cuda"):
        _key = f"Autocast{_device.upper()}"
        library.impl(_op.__name__, _kernel(_op.default, _device, _key), _key)
