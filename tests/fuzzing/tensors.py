"""A tensor described by a few literals, which print as the Python that makes it again."""

import math
import random
from dataclasses import dataclass, fields

import torch
from torch import Tensor

# How far powers of two may spread before products leave a type's range.
SPREAD = {"float64": 200, "float32": 30, "bfloat16": 30, "float16": 6}
PLACES = 3  # special values in a tensor


def of_one_dnn(dtype: torch.dtype, device: str) -> bool:
    return device == "cpu" and dtype in (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class T:
    """A tensor to be made. Memory between its elements is NaN, or 0xff.

    For 16 bits on the CPU that memory is 0: for an odd k, oneDNN (AMX) multiplies what follows a
    row by 0. torch's own products do this too.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    values: str = "normal"
    seed: int = 0
    strides: tuple[int, ...] | None = None  # for a new tensor
    offset: int = 0
    negated: bool = False  # one of torch's views with the negative bit
    scale: float = 1.0
    axis: int = -1  # the dimension that a product sums over
    first: bool = True  # first operand: its magnitudes along axis are opposed to the second's
    low: int = 0  # for integers
    high: int = 2

    def __repr__(self) -> str:
        given = [f for f in fields(self)[1:] if getattr(self, f.name) != f.default]
        more = "".join(f", {f.name}={getattr(self, f.name)!r}" for f in given)
        return f"T({self.shape!r}{more})"

    def make(self, device: str) -> tuple[Tensor, Tensor]:
        """The tensor, and all the memory that holds it."""
        dtype = getattr(torch, self.dtype)
        if self.strides is None or self.negated:
            new = self._drawn(self.shape, dtype, device)
            if self.negated:
                memory = torch.complex(torch.zeros_like(new), -new)
                return memory.conj().imag, torch.view_as_real(memory).flatten()
            return new, new.flatten()
        once = [1 if stride == 0 else n for n, stride in zip(self.shape, self.strides, strict=True)]
        last = sum((n - 1) * s for n, s in zip(once, self.strides, strict=True))
        memory = torch.empty(self.offset + max(last, -1) + 2, dtype=dtype, device=device)
        memory.view(torch.uint8).fill_(0 if of_one_dnn(dtype, device) else 0xFF)
        if 0 not in once:
            view = memory.as_strided(once, self.strides, self.offset)
            view.copy_(self._drawn(tuple(once), dtype, device))
        return memory.as_strided(self.shape, self.strides, self.offset), memory

    def _drawn(self, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
        generator = torch.Generator(device).manual_seed(self.seed)
        if not dtype.is_floating_point:
            low, high = (-(1 << 62), 1 << 62) if self.values == "any" else (self.low, self.high)
            whole = torch.randint(low, high, shape, generator=generator, device=device)
            return whole.to(dtype)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        x = torch.randn(shape, generator=generator, device=device, dtype=wide)
        x = self._shaped(x, torch.finfo(dtype), generator).to(dtype)
        if self.values in ("special", "not-finite") and x.numel():
            _set_places(x, self.values, random.Random(self.seed))
        return x

    def _shaped(self, x: Tensor, info: torch.finfo, generator: torch.Generator) -> Tensor:
        spread = SPREAD[self.dtype]

        def exponents(shape: list[int]) -> Tensor:
            return torch.randint(
                -spread, spread + 1, shape, generator=generator, device=x.device
            ).to(x.dtype)

        if self.values in ("normal", "special", "not-finite"):
            return x * self.scale
        if self.values == "uniform":
            return x.abs().clamp(max=2)
        if self.values == "whole":
            return (4 * x).round()
        if self.values == "exp":
            return (x * (1 if self.dtype == "float16" else 4)).exp()
        if self.values == "zero":
            return x.zero_()
        if self.values == "denormal":
            return x * info.tiny
        if self.values == "huge":
            # In float64 the exact product, which has the same range, must not overflow.
            return x.clamp(-1, 1) * (info.max if self.dtype != "float64" else 2.0**500)
        if self.values == "scaled-elements":
            return torch.ldexp(x, exponents(list(x.shape)))
        if x.dim() < 2:
            return x
        axis = self.axis % x.dim()
        if self.values == "scaled-rows":
            return torch.ldexp(x, exponents([1 if d == axis else n for d, n in enumerate(x.shape)]))
        along = torch.arange(x.shape[axis], device=x.device)
        along = along.view([-1 if d == axis else 1 for d in range(x.dim())])
        if self.values == "opposed":
            powers = (along * 40503 // 128) % (2 * spread + 1) - spread
            return torch.ldexp(x, (powers if self.first else -powers).to(x.dtype))
        assert self.values == "one-hot"
        if not x.numel():
            return x
        rows = [1 if d == axis else n for d, n in enumerate(x.shape)]
        places = torch.randint(
            x.shape[axis], rows, generator=generator, device=x.device, dtype=torch.int64
        )
        return (along == places).to(x.dtype)


VALUES = ["normal", "uniform", "whole", "exp", "zero", "denormal", "huge", "scaled-elements"]
VALUES += ["scaled-rows", "opposed", "one-hot", "special"]
# Without infinities, and such that products of two do not overflow.
MODERATE = [v for v in VALUES if v not in ("huge", "special", "scaled-elements", "scaled-rows")]


def _set_places(x: Tensor, kind: str, choose: random.Random) -> None:
    info = torch.finfo(x.dtype)
    values = [math.nan, math.inf, -math.inf]
    if kind == "special":
        largest = info.max if x.dtype != torch.float64 else 2.0**500  # see "huge"
        values += [largest, -largest, -0.0, info.tiny * info.eps]
    flat = x.view(-1)
    for _ in range(choose.randint(1, PLACES)):
        flat[choose.randrange(flat.numel())] = choose.choice(values)


def draw_size(choose: random.Random, bits: float, empty: float = 0.02) -> int:
    """0, or up to 2^bits. Small sizes are as frequent as large ones; whole vectors are
    preferred."""
    if choose.random() < empty:
        return 0
    size = round(2 ** choose.uniform(0, max(bits, 0.0)))
    if choose.random() < 0.4:
        unit = choose.choice([8, 16, 64])
        size = max(size // unit, 1) * unit if size > unit // 2 else size
    return size


def draw_layout(choose: random.Random, shape: tuple[int, ...], repeats: bool = True) -> dict:
    """Keywords of T: dense in any order, with gaps, strided, offset, repeated, negated."""
    kind = choose.choice(["new", "new", "dense", "gaps", "strided", "repeated", "negated"])
    if kind == "new" or (not repeats and kind == "negated"):
        return {}
    if kind == "negated":
        return {"negated": True}
    order = list(range(len(shape)))
    choose.shuffle(order)
    strides, step = [0] * len(shape), 1
    for d in order:  # from the innermost dimension outwards
        strides[d] = step * (choose.randint(1, 3) if kind == "strided" else 1)
        if kind == "repeated" and repeats and choose.random() < 0.5:
            strides[d] = 0
            continue
        if shape[d] == 1 and choose.random() < 0.3:
            strides[d] = choose.choice([0, 1, 7])
            continue
        step = strides[d] * max(shape[d], 1) + (
            choose.choice([0, 1, 3, 8]) if kind in ("gaps", "strided") else 0
        )
    return {"strides": tuple(strides), "offset": choose.choice([0, 0, 1, 3, 4, 8])}


def draw_tensor(
    choose: random.Random, shape: tuple[int, ...], dtype: str, values: str = "normal", **more
) -> T:
    repeats = more.pop("repeats", True)
    layout = draw_layout(choose, shape, repeats)
    if layout.get("negated") and dtype not in ("float32", "float64"):
        layout = {}
    return T(shape, dtype, values, choose.randrange(1 << 31), **layout, **more)
