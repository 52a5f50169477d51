"""What the test files share: dtypes, error measures and limits, data, and a call of every op."""

import functools
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import my_ops
from my_ops import reference
from my_ops.recurrent._cell import CELLS
from my_ops.recurrent._weights import TwoMatrices

NO_INDUCTOR = {  # arguments of pytest.mark.skipif
    "condition": not Path(sysconfig.get_path("include"), "Python.h").exists(),
    "reason": "torch's inductor needs Python's headers (Debian: apt install python3-dev)",
}

FLOATING = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
SIXTEEN_BIT = [torch.float16, torch.bfloat16]
SIGNED_OR_BYTE = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint16, torch.uint32, torch.uint64]  # torch promotes these with no other type
INTEGERS = SIGNED_OR_BYTE + UNSIGNED
NOT_REAL = [torch.bool, torch.complex64]

ACTIVATIONS = [None if name == "none" else name for name in reference.ACTIVATIONS]

# Units in the last place of a 16-bit result with a single rounding, from float32.
ROUNDED_ONCE = 0.51

# The type of the other operand of a product of two types.
OTHER_OPERAND = {
    torch.float32: torch.bfloat16,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
}

# Largest |got - a @ b| / (|a| @ |b|) of one element, by the type of the arithmetic: four roundings.
GEMM_LIMIT = {torch.float64: 2.0**-50, torch.float32: 2.0**-21}


# batch, hidden size: for every variant of the persistent kernels of a recurrent layer on an H200.
VARIANT_SIZES = [  # warps: up to 32, 64 and 96 units; one, two and four rows
    *[(1, 7), (500, 32), (2200, 5), (1, 37), (135, 63), (130, 71), (200, 91), (270, 95)],
    # clusters: up to 128 and 256 units; one, two and four rows
    *[(1, 65), (44, 65), (82, 65), (1, 81), (1, 113), (52, 97), (72, 97), (66, 107)],
    *[(1, 129), (1, 145), (1, 209), (26, 129), (52, 129)],
    # blocks: up to 32, 64 and 128 units; four and eight rows
    *[(1060, 14), (2200, 30), (270, 62), (600, 38), (600, 62), (67, 118), (270, 118)],
    # grids, by bytes of h per warp; one or two tiles of rows, one or two of units
    *[(128, 111), (256, 99), (600, 101), (1200, 101), (1, 257), (33, 420), (1, 516)],
    *[(26, 516), (17, 712), (33, 840), (1, 1032), (9, 1064)],
]

# m, k, n, activation: for every tile of the 16-bit products on an H200, from large to small.
TILE_SIZES = [(626, 67, 4701, None), (1700, 67, 3976, "silu")]
TILE_SIZES += [(321, 79, 4530, None), (177, 82, 4405, None), (309, 99, 841, None)]


def arithmetic(dtype: torch.dtype) -> torch.dtype:
    """The type in which ops on ``dtype`` compute."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def half_ulp(dtype: torch.dtype) -> float:
    """The largest relative error of rounding to ``dtype``."""
    return torch.finfo(dtype).eps / 2


def ulps(got: Tensor, want: Tensor, scale: Tensor | None = None) -> float:
    """Worst distance of finite elements, in units of the last place of ``got``'s dtype at the size
    of ``want`` (or of ``scale``, if that is larger). Infinities and NaN must match."""
    info = torch.finfo(got.dtype)
    size = want.abs() if scale is None else torch.maximum(want.abs(), scale.abs())
    _, exponent = torch.frexp(size.clamp(min=info.tiny))
    ulp = info.eps * 2.0 ** (exponent.double() - 1)
    rounded = want.to(got.dtype)  # beyond the largest number this is infinity, for both
    finite = rounded.isfinite()
    torch.testing.assert_close(got[~finite], rounded[~finite], rtol=0, atol=0, equal_nan=True)
    distance = (got.double() - want)[finite].abs() / ulp[finite]
    return distance.max().item() if distance.numel() else 0.0


def exact_d_sigmoid(z: Tensor) -> Tensor:
    """Of float64, within 3 ulp. The reference loses as many digits as what it is to judge."""
    e = torch.exp(-z.abs())
    return e / (e * (2 + e) + 1)


def gemm_excess(got: Tensor, a: Tensor, b: Tensor) -> float:
    """The worst element's error as a share of what is allowed; one bad element is enough."""
    a64, b64 = a.double(), b.double()
    want = a64 @ b64
    size = a64.abs() @ b64.abs()
    info = torch.finfo(got.dtype)
    stored = 0.0 if got.dtype == arithmetic(got.dtype) else half_ulp(got.dtype)
    allowed = GEMM_LIMIT[arithmetic(got.dtype)] * size + stored * want.abs() + info.tiny * info.eps
    assert got.shape == want.shape
    error = (got.double() - want).abs() / allowed
    assert not error.isnan().any()
    return error.max().item() if error.numel() else 0.0


def values(dtype: torch.dtype, size: int, device: str = "cpu") -> Tensor:
    """Normally distributed over a few magnitudes. Integers cover their whole range."""
    if dtype.is_floating_point:
        wide = torch.randn(size, dtype=torch.float64) * 4.0 ** torch.randint(-4, 3, (size,))
        return wide.to(dtype).to(device)
    return torch.randint(-(1 << 62), 1 << 62, (size,)).to(dtype).to(device)


def special(dtype: torch.dtype, device: str) -> Tensor:
    """Zeros, subnormals, the largest numbers, infinities, NaN, and the ends of exp's range."""
    info = torch.finfo(dtype)
    subnormal = info.tiny * info.eps
    magnitudes = [0.0, subnormal, 3 * subnormal, info.tiny, info.eps, 0.25, 0.5, 1.0, 17.0, 88.0]
    magnitudes += [104.0, 200.0, 745.0, 1e4, info.max / 2, info.max, float("inf"), float("nan")]
    both = torch.tensor(magnitudes + [-m for m in magnitudes], dtype=torch.float64)
    return both.to(dtype).to(device)


def layouts(device: str) -> dict[str, Tensor]:
    """Views that are not contiguous, or do not start at the start of their memory."""
    base = torch.randn(6, 5, 4, 3, device=device)
    return {
        "transposed": base.transpose(0, 2),
        "permuted": base.permute(3, 0, 2, 1),
        "channels_last": base.to(memory_format=torch.channels_last),
        "stepped": base[::2, :, ::3],
        "offset": base.flatten()[1:],
        "offset-and-stepped": base[1:, 1:, 1:, 1:],
        "expanded": base[:1].expand(6, 5, 4, 3),
        "expanded-new-dimension": base[0].expand(2, 5, 4, 3),
        "one-element-expanded": base[0, 0, 0, :1].expand(50),
        "column": base.view(30, 12)[:, 5],
        "empty-transposed": base[:0].transpose(0, 1),
        "moved-and-sliced": base.movedim(1, -1)[..., 2:],
        "negated": torch.complex(base, base).conj().imag,  # torch's views with the negative bit
    }


CELL = {cell.name: cell for cell in CELLS}
# Those with torch's parameters.
OF_TORCH = {name: cell for name, cell in CELL.items() if isinstance(cell.weights, TwoMatrices)}


def recurrent_inputs(
    name: str,
    steps: int | None,
    batch: int,
    inputs: int,
    hidden: int,
    dtype: torch.dtype,
    device: str,
) -> tuple[Tensor, ...]:
    """Arguments of the op of a cell, with biases; of NAME_cell if ``steps`` is None."""
    cell, scale = CELL[name], 1.0 / max(hidden, 1) ** 0.5
    rows = cell.gates * hidden
    states = [torch.randn(batch, hidden, dtype=torch.float64) for _ in cell.states]
    shapes: tuple[tuple[int, ...], ...] = ((rows, hidden + inputs), (rows,))
    if name in OF_TORCH:
        shapes = ((rows, inputs), (rows, hidden), (rows,), (rows,))
    parameters = [torch.randn(shape, dtype=torch.float64) * scale for shape in shapes]
    if steps is None:
        drawn = [torch.randn(batch, inputs, dtype=torch.float64), *parameters, *states]
    else:
        drawn = [torch.randn(steps, batch, inputs, dtype=torch.float64), *states, *parameters]
    return tuple(t.to(dtype).to(device) for t in drawn)


lltm_inputs = functools.partial(recurrent_inputs, "lltm")


@dataclass(frozen=True)
class Op:
    """One way to call an op. tensors(size, dtype, device) returns its tensor arguments."""

    name: str
    call: Callable[..., Any]
    reference: Callable[..., Any]
    overload: Any  # in torch.ops.my_ops
    tensors: Callable[[int, torch.dtype, str], tuple[Tensor, ...]]
    arguments: Callable[..., tuple[Any, ...]] = lambda *tensors: tensors  # of the overload
    dtypes: tuple[torch.dtype, ...] = tuple(FLOATING)
    smooth: bool = True  # the gradient is the derivative

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return as_tuple(self.call(*tensors))


def assert_close(got, want, limit=2.0**-46):
    """The limit is for float64 results of the same operations in another order."""
    for ours, exact in zip(as_tuple(got), as_tuple(want), strict=True):
        torch.testing.assert_close(ours, exact, rtol=limit, atol=limit)


def as_tuple(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def _randn(*shape: int) -> Callable[[torch.dtype, str], Tensor]:
    return lambda dtype, device: torch.randn(shape, dtype=torch.float64).to(dtype).to(device)


def _unary(size: int, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    return (_randn(size, 3)(dtype, device),)


def _broadcast(size: int, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    return _randn(size, 1, 3)(dtype, device), _randn(2, 1)(dtype, device)


def _gemm(size: int, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    return _randn(size, 4)(dtype, device), _randn(4, 3)(dtype, device)


def _gemm_batched(size: int, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    return _randn(2, size, 4)(dtype, device), _randn(1, 4, 3)(dtype, device)


def _linear(size: int, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    return tuple(_randn(*s)(dtype, device) for s in ((2, size, 4), (3, 4), (3,)))


def _attention(size: int, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    return tuple(_randn(2, 2, n, 4)(dtype, device) for n in (size, 3, 3))


def _mixed(operands: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """float32 and 16 bits, in this order for float32. In float64 both have one type."""

    def tensors(size: int, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
        first, second, *more = operands(size, dtype, device)
        second = second.to(OTHER_OPERAND.get(dtype, dtype))
        result = torch.promote_types(first.dtype, second.dtype)
        return first, second, *(t.to(result) for t in more)

    return tensors


def _lengths(h0: Tensor) -> Tensor:
    """Of 3 steps: none, some and all."""
    return h0.new_ones(h0.shape[:-1], dtype=torch.int64).cumsum(-1) % 4


def _reset(input: Tensor, h0: Tensor) -> Tensor:
    """A third of each row's 3 steps, for some rows including the first."""
    t = input.new_ones(input.shape[:-1], dtype=torch.int64).cumsum(-2)
    row = h0.new_ones(h0.shape[:-1], dtype=torch.int64).cumsum(-1).unsqueeze(-2)
    return (t + row) % 3 == 0


def _zoneout(input: Tensor, h0: Tensor) -> Tensor:
    """Fractions of 0, 1/2 and 1."""
    t = input.new_ones(input.shape[:-1], dtype=torch.int64).cumsum(-2).unsqueeze(-1)
    return ((t + (h0.detach() > 0).unsqueeze(-3)) % 3).to(h0.dtype) / 2


def _recurrent(name: str, steps: int | None) -> Callable[..., tuple[Tensor, ...]]:
    return lambda size, dtype, device: recurrent_inputs(name, steps, size, 3, 2, dtype, device)


def _masked(name: str) -> list[Op]:
    """All steps of a cell with lengths, with reset, with both, and with zoneout too."""
    function, oracle = getattr(my_ops, name), getattr(reference, name)
    tensors = _recurrent(name, 3)

    def op(label: str, with_lengths: bool, with_reset: bool, with_zoneout: bool) -> Op:
        def masks(ts: tuple[Tensor, ...]) -> dict[str, Tensor | None]:
            return {
                "lengths": _lengths(ts[1]) if with_lengths else None,
                "reset": _reset(ts[0], ts[1]) if with_reset else None,
                "zoneout": _zoneout(ts[0], ts[1]) if with_zoneout else None,
            }

        return Op(
            f"{name}-{label}",
            lambda *ts: function(*ts, **masks(ts)),
            lambda *ts: oracle(*ts, **masks(ts)),
            getattr(torch.ops.my_ops, name).default,
            tensors,
            lambda *ts: (*ts, *masks(ts).values()),
        )

    return [
        op("lengths", True, False, False),
        op("reset", False, True, False),
        op("lengths-reset", True, True, False),
        op("zoneout", False, False, True),
        op("lengths-reset-zoneout", True, True, True),
    ]


def _without_bias(name: str) -> Op:
    """Of a cell of OF_TORCH."""
    count = 1 + len(OF_TORCH[name].states) + 2
    return Op(
        f"{name}-without-bias",
        getattr(my_ops, name),
        getattr(reference, name),
        getattr(torch.ops.my_ops, name).default,
        lambda *given: _recurrent(name, 3)(*given)[:count],
    )


def _of_cell(name: str) -> list[Op]:
    step, all_steps = _op(f"{name}_cell", _recurrent(name, None)), _op(name, _recurrent(name, 3))
    without_bias = [_without_bias(name)] if name in OF_TORCH else []
    return [step, all_steps, *_masked(name), *without_bias]


def _linear_op(activation: str | None, operands: Any = _linear, label: str = "") -> Op:
    return Op(
        f"linear-{activation}{label}",
        lambda x, weight, bias: my_ops.linear(x, weight, bias, activation=activation),
        lambda x, weight, bias: reference.linear(x, weight, bias, activation=activation),
        torch.ops.my_ops.linear.default,
        operands,
        lambda x, weight, bias: (x, weight, bias, activation or "none"),
    )


def _op(name: str, tensors: Callable[..., Any], label: str = "", **more: Any) -> Op:
    return Op(
        name + label,
        getattr(my_ops, name),
        getattr(reference, name),
        getattr(torch.ops.my_ops, name).default,
        tensors,
        **more,
    )


ALL = tuple(FLOATING + SIGNED_OR_BYTE)
DIFFERENTIABLE = [
    _op("add_one", _unary, dtypes=ALL),
    _op("custom_add", _broadcast, dtypes=ALL),
    _op("d_sigmoid", _unary),
    _op("round_ste", _unary, smooth=False),
    _op("gemm", _gemm),
    _op("gemm", _gemm_batched, "-batched"),
    _op("gemm", _mixed(_gemm_batched), "-mixed"),
    *[_linear_op(activation) for activation in ACTIVATIONS],
    _linear_op("gelu", _mixed(_linear), "-mixed"),
    Op(
        "linear-without-bias",
        my_ops.linear,
        reference.linear,
        torch.ops.my_ops.linear.default,
        lambda size, dtype, device: _linear(size, dtype, device)[:2],
        lambda x, weight: (x, weight, None),
    ),
    Op(
        "linear-residual",
        lambda x, weight, r: my_ops.linear(x, weight, activation="silu", residual=r),
        lambda x, weight, r: reference.linear(x, weight, activation="silu", residual=r),
        torch.ops.my_ops.linear.default,
        lambda size, dtype, device: (
            *_linear(size, dtype, device)[:2],
            _randn(2, size, 3)(dtype, device),
        ),
        lambda x, weight, r: (x, weight, None, "silu", r),
    ),
    Op(  # the op: the function calls torch's on the CPU, which has no second derivative
        "attention",
        torch.ops.my_ops.attention.default,
        reference.attention,
        torch.ops.my_ops.attention.default,
        _attention,
    ),
    *[op for name in CELL for op in _of_cell(name)],
]


def named(ops: list[Op]) -> dict[str, Any]:
    """Arguments of pytest.mark.parametrize."""
    return {"argnames": "op", "argvalues": ops, "ids": [op.name for op in ops]}


def with_dtypes(ops: list[Op]) -> dict[str, Any]:
    pairs = [(op, dtype) for op in ops for dtype in op.dtypes]
    ids = [f"{op.name}-{str(dtype).removeprefix('torch.')}" for op, dtype in pairs]
    return {"argnames": "op, dtype", "argvalues": pairs, "ids": ids}


def leaves(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(t.detach().requires_grad_(t.is_floating_point()) for t in tensors)
