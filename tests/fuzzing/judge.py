"""How far a result is from the exact one, as a share of what is allowed."""

import math

import torch
from torch import Tensor

UNIT = {torch.float64: 2.0**-53, torch.float32: 2.0**-24}  # one rounding


def arithmetic(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def stored(dtype: torch.dtype) -> float:
    """The relative error of rounding a result to ``dtype``, in addition to that of its
    arithmetic."""
    return 0.0 if dtype == arithmetic(dtype) else torch.finfo(dtype).eps / 2


def least(dtype: torch.dtype) -> float:
    info = torch.finfo(dtype)
    return info.tiny * info.eps


def of_sum(terms: int, dtype: torch.dtype) -> float:
    """The error of a sum of products, relative to the sum of magnitudes.

    In float64 the exact sum is also a float64 sum, in another order. The bound there holds for any
    order.
    """
    if dtype == torch.float64:
        return 2 * (terms + 6) * UNIT[dtype]
    return (2 * math.sqrt(terms) + 6) * UNIT[torch.float32]


def overflow(dtype: torch.dtype) -> float:
    """Numbers from here on round to infinity."""
    info = torch.finfo(dtype)
    return info.max if dtype == torch.float64 else info.max * (1 + info.eps / 4)


def excess(got: Tensor, want: Tensor, allowed: Tensor, unsure: Tensor | None = None) -> Tensor:
    """The worst element's error as a share of ``allowed``, without synchronisation. It is infinity
    if NaN or infinities do not match.

    ``unsure``: where an intermediate result may have overflowed; there any result is right.
    """
    ours = got.double()
    if not ours.numel():
        return torch.zeros((), dtype=torch.float64, device=got.device)
    error = (ours - want).abs()
    # If a result was rounded up to infinity: the distance to where infinity begins.
    room = (overflow(got.dtype) - want * ours.sign()).clamp(min=0)
    error = torch.where(ours.isinf() & want.isfinite(), room, error)
    share = (error / (allowed + least(got.dtype))).nan_to_num(nan=math.inf, posinf=math.inf)
    share = torch.where(ours.isnan() | ~want.isfinite(), math.inf, share)
    share = torch.where((ours == want) | (ours.isnan() & want.isnan()), 0.0, share)
    beyond = (
        want.isfinite() & (want.abs() >= overflow(got.dtype)) & (ours == want.sign() * math.inf)
    )
    share = torch.where(beyond, 0.0, share)
    if unsure is not None:
        share = torch.where(unsure, 0.0, share)
    return share.max()


def ulps(limit: float, got: Tensor, want: Tensor, scale: Tensor | None = None) -> Tensor:
    """``limit`` units in the last place of ``got`` at the size of ``want``, or of ``scale``."""
    info = torch.finfo(got.dtype)
    size = want.abs() if scale is None else torch.maximum(want.abs(), scale.abs())
    _, exponent = torch.frexp(size.clamp(min=info.tiny, max=info.max))
    return limit * info.eps * torch.ldexp(torch.ones_like(size), exponent - 1)


def different(got: Tensor, want: Tensor) -> Tensor:
    """0 where all bits of values are equal, or both are NaN; infinity elsewhere."""
    same = got == want
    if got.is_floating_point():
        same = same | (got.isnan() & want.isnan())
    return torch.where(same.all(), 0.0, math.inf).double()
