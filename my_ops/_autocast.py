"""Autocast: the ops made of products run in the dtype of ``torch.autocast``.

gemm, linear and the recurrent ops cast their floating arguments, float64 excepted, as torch's own
products do, and like these they cast a weight once in a region, not once a call. The elementwise
ops follow their arguments: they need no rule.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from my_ops._autograd import library
from my_ops._private import transforms_active, version, without_autocast
from my_ops.ops._common import ops


class _Casts(dict[tuple[Tensor, torch.dtype], tuple[int | None, Tensor]]):
    """Of weights: the version that was cast, and the cast."""


_region: Callable[[], _Casts | None] = lambda: None  # noqa: E731


def _casts(device: torch.device) -> _Casts:
    """Those of this region, which ends where torch clears its own cache of casts.

    That cache cannot be reached from outside, but it keeps what hangs on a cast in it: here on the
    autograd node of one made for the purpose, of a tensor without elements, in an op that saves
    nothing for backward.
    """
    global _region
    casts = _region()
    if casts is None:
        casts = _Casts()
        with torch.inference_mode(False), torch.enable_grad():
            empty = torch.empty(0, 0, dtype=torch.float32, device=device)
            weight = torch.empty_like(empty, requires_grad=True)
            node: Any = torch.addmm(weight, empty, empty).grad_fn
        node.next_functions[0][0].metadata["my_ops"] = casts
        _region = weakref.ref(casts)
    return casts


def _is_weight(value: Tensor) -> bool:
    """What torch caches casts of; in torch.func and jit.trace it may be another's tensor."""
    return (
        value.requires_grad
        and value.is_leaf
        and value.dtype == torch.float32
        and torch.is_autocast_cache_enabled()
        and not (transforms_active() or torch.jit.is_tracing())
    )


def _cast_once(weight: Tensor, dtype: torch.dtype) -> Tensor:
    casts, current = _region() or _Casts(), version(weight)
    known = casts.get((weight, dtype))
    if known and known[0] == current:
        cast = known[1]
        if cast.requires_grad or not torch.is_grad_enabled():  # else made where none was recorded
            return cast
    cast = weight.to(dtype)
    if type(cast) is Tensor:  # no fake one, of a weight that may be real
        _casts(weight.device)[weight, dtype] = current, cast
    return cast


def _kernel(op: Any, device: str) -> Callable[..., Any]:
    without, on_device = without_autocast(device), f"is_{device}"

    def cast(value: Any, dtype: torch.dtype) -> Any:
        if (
            not isinstance(value, Tensor)
            or value.dtype == dtype
            or value.dtype == torch.float64
            or not value.is_floating_point()
            or not getattr(value, on_device)
        ):
            return value
        return _cast_once(value, dtype) if _is_weight(value) else value.to(dtype)

    def kernel(*args: Any) -> Any:
        dtype = torch.get_autocast_dtype(device)
        args = tuple(cast(value, dtype) for value in args)
        with without():
            return op(*args)

    return kernel


def register(op: Any) -> None:
    """Gives the rule to an op of products."""
    for device in ("cpu", "cuda"):
        library.impl(op.__name__, _kernel(op.default, device), f"Autocast{device.upper()}")


register(ops.gemm)
register(ops.linear)
