"""Argument checks for fake tensors: csrc/*_checks.h in Python, function by function.

The fake kernels make these checks, so that tracing refuses what the kernels refuse, in the same
words. They also see calls that mix meta and real tensors, because the dispatcher then takes the
fake kernel. Checks that depend on memory are left to the kernels. Sizes may be symbolic; one
``check`` per size keeps them so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from my_ops.reference import ACTIVATIONS

HALF = (torch.float16, torch.bfloat16)
FLOATING = (torch.float64, torch.float32, *HALF)
INTEGER = (
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
)

Sizes = Sequence[int]  # or torch.SymInt


def show(value: Tensor | Sizes | torch.dtype) -> str:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return str(tuple(value.shape if isinstance(value, Tensor) else value))


# ------------------------------------------------------------------------------------ binding.h


def check(rule: bool | torch.SymBool, message: str) -> None:
    if rule is not True:
        torch._check(rule, lambda: message)


def check_value(rule: bool | torch.SymBool, message: str) -> None:
    """As :func:`check`, for arguments that are no tensors: a ValueError, if they are known."""
    if rule is False:
        raise ValueError(message)
    check(rule, message)


def check_given(t: Tensor, op: str, name: str) -> None:
    check(t is not None, f"{op}: {name} must be a tensor, got None")


def check_floating(t: Tensor, op: str, name: str) -> None:
    check_given(t, op, name)
    check(
        t.dtype in FLOATING,
        f"{op}: {name} must be of dtype float64, float32, float16 or bfloat16, got {show(t.dtype)}",
    )


def check_same_device(t: Tensor, name: str, other: Tensor, other_name: str, op: str) -> None:
    check_given(t, op, name)
    check(
        t.device == other.device,
        f"{op}: {name} must be on the device of {other_name}, got {t.device} and {other.device}",
    )


def check_same_dtype(t: Tensor, name: str, other: Tensor, other_name: str, op: str) -> None:
    check(
        t.dtype == other.dtype,
        f"{op}: {name} must have the dtype of {other_name}, "
        f"got {show(t.dtype)} and {show(other.dtype)}",
    )


def check_sizes(t: Tensor, want: Sizes, message: str) -> None:
    check(t.dim() == len(want), message)
    for size, wanted in zip(t.shape, want, strict=True):
        check(size == wanted, message)


def check_same_shape(t: Tensor, name: str, other: Tensor, other_name: str, op: str) -> None:
    check_sizes(
        t,
        other.shape,
        f"{op}: {name} must have the shape of {other_name}, got {show(t)} and {show(other)}",
    )


def check_shape(t: Tensor, name: str, want: Sizes, rule: str, op: str) -> None:
    check_sizes(t, want, f"{op}: {name} must be {rule} = {show(want)}, got {show(t)}")


def check_one_address_each(t: Tensor, name: str, op: str) -> None:
    if not all(isinstance(n, int) for n in (*t.shape, *t.stride())):
        return
    reach = 1
    for stride, size in sorted(zip(t.stride(), t.shape, strict=True)):
        if size > 1:
            check(
                stride >= reach or t.numel() == 0,
                f"{op}: {name} must not hold two elements at one address, "
                f"got strides {show(t.stride())} for shape {show(t)}",
            )
            reach += (size - 1) * stride


# ------------------------------------------------------------------------- elementwise_checks.h


def check_real(t: Tensor, op: str, name: str) -> None:
    check_given(t, op, name)
    check(
        t.dtype in FLOATING + INTEGER,
        f"{op}: {name} must have a real floating or integer dtype, got {show(t.dtype)}",
    )


def result_type(a: Tensor, b: Tensor, op: str) -> torch.dtype:
    try:
        return torch.result_type(a, b)
    except RuntimeError as error:
        raise RuntimeError(
            f"{op}: b must have a dtype that torch promotes with that of a, "
            f"got {show(b.dtype)} and {show(a.dtype)}"
        ) from error


def broadcast_sizes(a: Tensor, b: Tensor, op: str) -> Sizes:
    message = f"{op}: b must broadcast with a (equal sizes, or 1), got {show(a)} and {show(b)}"
    for in_a, in_b in zip(a.shape[::-1], b.shape[::-1], strict=False):
        check((in_a == in_b) | (in_a == 1) | (in_b == 1), message)
    return torch.broadcast_shapes(a.shape, b.shape)


def check_custom_add(a: Tensor, b: Tensor) -> tuple[Sizes, torch.dtype]:
    op = "custom_add"
    check_real(a, op, "a")
    check_real(b, op, "b")
    check_same_device(b, "b", a, "a", op)
    return broadcast_sizes(a, b, op), result_type(a, b, op)


def check_d_sigmoid_backward(grad: Tensor, z: Tensor) -> None:
    op = "d_sigmoid_backward"
    check_floating(z, op, "z")
    check_same_device(grad, "grad", z, "z", op)
    check_same_dtype(grad, "grad", z, "z", op)
    check_same_shape(grad, "grad", z, "z", op)


def check_fill_index(
    height: int,
    width: int,
    dtype: torch.dtype,
    check: Callable[[bool | torch.SymBool, str], None] = check,
) -> None:
    check(
        dtype in (*FLOATING, torch.int32, torch.int64),
        f"fill_index: dtype must be floating, int32 or int64, got {show(dtype)}",
    )
    for name, size in (("height", height), ("width", width)):
        check(size >= 0, f"fill_index: {name} must not be negative, got {size}")
    if dtype == torch.int32:
        check(
            (height == 0) | (width == 0) | (height + width - 2 <= torch.iinfo(dtype).max),
            f"fill_index: height + width - 2 must fit int32, got height {height} and width {width}",
        )


def check_fill_index_out(out: Tensor) -> None:
    check_given(out, "fill_index", "out")
    check(out.dim() == 2, f"fill_index: out must be (height, width), got {show(out)}")
    check_fill_index(out.shape[0], out.shape[1], out.dtype)
    check_one_address_each(out, "out", "fill_index")


# -------------------------------------------------------------------------------- gemm_checks.h


def check_precision(precision: str | None, op: str) -> None:
    check(
        precision in (None, "highest", "high", "tf32"),
        f"{op}: precision must be highest, high or tf32, got '{precision}'",
    )


def check_operand_dtype(t: Tensor, name: str, other: Tensor, other_name: str, op: str) -> None:
    mixed = torch.float32 in (t.dtype, other.dtype) and (t.dtype in HALF or other.dtype in HALF)
    check(
        t.dtype == other.dtype or mixed,
        f"{op}: {name} must have the dtype of {other_name}, or one must be float32 and the other "
        f"float16 or bfloat16, got {show(t.dtype)} and {show(other.dtype)}",
    )


def wider(a: Tensor, b: Tensor) -> Tensor:
    return b if b.dtype == torch.float32 else a


def check_gemm(a: Tensor, b: Tensor, op: str) -> None:
    check_floating(a, op, "a")
    check_same_device(b, "b", a, "a", op)
    check_operand_dtype(b, "b", a, "a", op)
    check(a.dim() in (2, 3), f"{op}: a must be (m, k) or (batch, m, k), got {show(a)}")
    check(b.dim() in (2, 3), f"{op}: b must be (k, n) or (batch, k, n), got {show(b)}")
    k = a.shape[-1]
    check(
        b.shape[-2] == k,
        f"{op}: b must have k = {k} rows, the columns of a, got {show(a)} and {show(b)}",
    )
    if a.dim() == 3 and b.dim() == 3:
        in_a, in_b = a.shape[0], b.shape[0]
        check(
            (in_a == in_b) | (in_a == 1) | (in_b == 1),
            f"{op}: the batch of b must equal that of a, or one must be 1, "
            f"got {show(a)} and {show(b)}",
        )


def gemm_sizes(a: Tensor, b: Tensor) -> Sizes:
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return (*batch, a.shape[-2], b.shape[-1])


def check_out(out: Tensor, a: Tensor, b: Tensor, op: str) -> None:
    check_same_device(out, "out", a, "a", op)
    check_same_dtype(out, "out", wider(a, b), "the result", op)
    want = gemm_sizes(a, b)
    check_sizes(out, want, f"{op}: out must be of shape {show(want)}, got {show(out)}")
    check_one_address_each(out, "out", op)


def check_prepack(weight: Tensor) -> None:
    check_floating(weight, "prepack", "weight")
    check(
        weight.dim() == 2,
        f"prepack: weight must be (out_features, in_features), got {show(weight)}",
    )


def linear_sizes(x: Tensor, weight: Tensor) -> Sizes:
    return (*x.shape[:-1], weight.shape[0])


def check_residual(residual: Tensor, x: Tensor, weight: Tensor) -> None:
    check_same_device(residual, "residual", x, "x", "linear")
    check_same_dtype(residual, "residual", wider(x, weight), "the result", "linear")
    want = linear_sizes(x, weight)
    check_shape(residual, "residual", want, "of the shape of the output", "linear")


def wrong_activation(op: str, activation: str, names: Sequence[str]) -> str:
    one_of = f"{', '.join(names[:-1])} or {names[-1]}"
    return f"{op}: activation must be {one_of}, got '{activation}'"


def check_activation(activation: str) -> None:
    check(activation in ACTIVATIONS, wrong_activation("linear", activation, ACTIVATIONS))


def check_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "none",
    residual: Tensor | None = None,
    precision: str | None = None,
    packed: Tensor | None = None,
) -> None:
    op = "linear"
    check_floating(x, op, "x")
    check_same_device(weight, "weight", x, "x", op)
    check_operand_dtype(weight, "weight", x, "x", op)
    check(x.dim() >= 1, f"{op}: x must have at least one dimension, got {show(x)}")
    check(
        weight.dim() == 2,
        f"{op}: weight must be (out_features, in_features), got {show(weight)}",
    )
    check(
        weight.shape[1] == x.shape[-1],
        f"{op}: weight must have in_features = {x.shape[-1]}, the last dimension of x, "
        f"got {show(x)} and {show(weight)}",
    )
    if bias is not None:
        check_same_device(bias, "bias", x, "x", op)
        check_same_dtype(bias, "bias", wider(x, weight), "the result", op)
        check_shape(bias, "bias", weight.shape[:1], "(out_features,)", op)
    if residual is not None:
        check_residual(residual, x, weight)
    check_activation(activation)
    check_precision(precision, op)
    if packed is not None:
        check_same_device(packed, "packed", x, "x", op)
        check(
            packed.dtype == torch.uint8 and packed.dim() == 1,
            f"{op}: packed must be what prepack made of weight, "
            f"got {show(packed)} of {show(packed.dtype)}",
        )


# ---------------------------------------------------------------------------- of kernels in Python


def check_storages(op: str, **tensors: Tensor | None) -> None:
    """For kernels: fake tensors have no memory."""
    for name, t in tensors.items():
        if t is None or t.numel() == 0:
            continue
        held = t.untyped_storage().nbytes()
        steps = zip(t.shape, t.stride(), strict=True)
        last = t.storage_offset() + sum((size - 1) * stride for size, stride in steps)
        needed = (last + 1) * t.element_size()
        check(
            needed <= held,
            f"{op}: {name} must have a storage that holds its {needed} bytes, got one of {held}",
        )


def check_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    op: str = "attention",
) -> None:
    check_floating(query, op, "query")
    for name, t in (("key", key), ("value", value)):
        check_same_device(t, name, query, "query", op)
        check_same_dtype(t, name, query, "query", op)
    check(query.dim() == 4, f"{op}: query must be (batch, heads, queries, size), got {show(query)}")
    check(query.shape[3] > 0, f"{op}: query must have a size of at least 1, got {show(query)}")
    for name, t, size in (("key", key, query.shape[3]), ("value", value, value.shape[-1])):
        want = (*query.shape[:2], key.shape[-2], size)
        check_shape(t, name, want, "(batch, heads, keys, size)", op)
    if bias is None:
        return
    check(not is_causal, f"{op}: is_causal must be False with a bias")
    check_same_device(bias, "bias", query, "query", op)
    check_same_dtype(bias, "bias", query, "query", op)
    scores = (*query.shape[:3], key.shape[2])
    message = (
        f"{op}: bias must broadcast to (batch, heads, queries, keys) = {show(scores)}, got "
        f"{show(bias)}"
    )
    check(bias.dim() == 4, message)
    for size, wanted in zip(bias.shape, scores, strict=True):
        check((size == 1) | (size == wanted), message)


def check_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    is_causal: bool,
    scale: float | None,
    needs_bias: bool,
) -> None:
    op = "attention_backward"
    check_attention(query, key, value, bias, is_causal, op=op)
    want = (*query.shape[:3], value.shape[3])
    for name, t in (("grad", grad), ("out", out), ("logsumexp", logsumexp)):
        check_same_device(t, name, query, "query", op)
        check_same_dtype(t, name, query, "query", op)
        if t is not logsumexp:
            check_shape(t, name, want, "(batch, heads, queries, size)", op)
    rows = (query.shape[2] + 31) // 32 * 32
    check(
        tuple(logsumexp.shape) in ((*query.shape[:2], 0), (*query.shape[:2], rows)),
        f"{op}: logsumexp must be (batch, heads, 0) or (batch, heads, queries in whole groups of "
        f"32), got {tuple(logsumexp.shape)}",
    )
    check(bias is not None or not needs_bias, f"{op}: needs_bias must be False without a bias")
