"""Autocast: ops that compute products run in the dtype of ``torch.autocast``.

gemm, linear and the recurrent ops cast their floating arguments, except float64, as torch's own
products do. Like these, they cast a weight once per region, not once per call. The elementwise ops
follow their arguments and need no rule.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from my_ops._autograd import library
from my_ops._private import any_autocast, transforms_active, version, without_autocast
from my_ops.ops._common import ops

DEVICES = ("cpu", "cuda")


class _Casts(dict[tuple[Tensor, torch.dtype], tuple[int | None, Tensor]]):
    """For each weight and dtype, the version that was cast, and the cast."""


_region: Callable[[], _Casts | None] = lambda: None  # noqa: E731


def _casts(device: torch.device) -> _Casts:
    """The casts of this autocast region, which ends when torch clears its own cache of casts.

    That cache cannot be reached from outside, but it keeps alive whatever is attached to a cast in
    it. So we make torch cast an empty tensor, in an op that saves nothing for backward, and attach
    our casts to the autograd node of that cast.
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
    """Whether torch would cache its cast; in torch.func and jit.trace a tensor may be temporary."""
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
        if cast.requires_grad or not torch.is_grad_enabled():  # else it was made under no_grad
            return cast
    cast = weight.to(dtype)
    if type(cast) is Tensor:  # not a fake one, whose weight may be real
        _casts(weight.device)[weight, dtype] = current, cast
    return cast


def _cast(value: Any, dtype: torch.dtype, on_device: str) -> Any:
    if (
        not isinstance(value, Tensor)
        or value.dtype == dtype
        or value.dtype == torch.float64
        or not value.is_floating_point()
        or not getattr(value, on_device)
    ):
        return value
    return _cast_once(value, dtype) if _is_weight(value) else value.to(dtype)


def _kernel(op: Any, device: str) -> Callable[..., Any]:
    without, on_device = without_autocast(device), f"is_{device}"

    def kernel(*args: Any) -> Any:
        dtype = torch.get_autocast_dtype(device)
        args = tuple(_cast(value, dtype, on_device) for value in args)
        with without():
            return op(*args)

    return kernel


@contextmanager
def applied(args: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """The arguments as these kernels cast them, and a context without autocast: for vmap's rules,
    which run before it."""
    with ExitStack() as regions:
        for device in DEVICES if any_autocast() else ():
            if torch.is_autocast_enabled(device):
                dtype = torch.get_autocast_dtype(device)
                args = tuple(_cast(value, dtype, f"is_{device}") for value in args)
                regions.enter_context(without_autocast(device)())
        yield args


def register(op: Any) -> None:
    """Registers the rule for an op that computes products."""
    for device in DEVICES:
        library.impl(op.__name__, _kernel(op.default, device), f"Autocast{device.upper()}")


register(ops.gemm)
register(ops.linear)
