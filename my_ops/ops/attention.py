"""Attention: its ops, Python over the kernels of ``fast_fp32``, their rules, the public function.

``attention_forward`` also returns what backward needs: on CUDA in float32 the log-sum-exp of
torch's efficient attention, so that either side may serve the other's backward. Elsewhere that has
no rows, and backward is torch's operations.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils.flop_counter import register_flop_formula

from my_ops import _autocast, reference
from my_ops._autograd import differentiated, register_gradient, save
from my_ops._costs import ATTENTION as COSTS
from my_ops._library import has_fast_fp32
from my_ops._private import efficient_attention, efficient_attention_backward
from my_ops._vmap import Dims, front, register_rule, unfold
from my_ops.ops import _checks
from my_ops.ops._checks import Sizes
from my_ops.ops._common import are_plain, check_tensor, fake, ops

_OPERANDS = "Tensor query, Tensor key, Tensor value, Tensor? bias"
_OPTIONS = "bool is_causal=False, float? scale=None"

library = torch.library.Library("my_ops", "FRAGMENT")
library.define(f"attention({_OPERANDS}=None, {_OPTIONS}) -> Tensor")
library.define(f"attention_forward({_OPERANDS}=None, {_OPTIONS}) -> (Tensor out, Tensor logsumexp)")
library.define(
    f"attention_backward(Tensor grad, {_OPERANDS}, Tensor out, Tensor logsumexp, bool is_causal, "
    "float? scale, bool needs_bias) -> (Tensor query, Tensor key, Tensor value, Tensor? bias)"
)


def _saves_logsumexp(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether torch's efficient attention computes what our kernels leave: of whole groups of 4."""
    if query.device.type != "cuda" or query.dtype is not torch.float32 or not efficient_attention:
        return False
    sizes = (*query.shape, *key.shape, *value.shape)
    return 0 not in sizes and query.shape[3] % 4 == 0 and value.shape[3] % 4 == 0


def _aligned(t: Tensor, unit: int = 4) -> Tensor:
    """As torch's efficient attention asks for: contiguous rows that begin at 16 bytes and at whole
    groups of ``unit`` elements."""
    size, *strides = t.size(-1), *t.stride()[:-1]
    fits = t.stride(-1) == 1 and all(stride % unit == 0 for stride in strides)
    if fits and size % unit == 0 and t.data_ptr() % 16 == 0:
        return t
    rows = t.new_zeros(*t.shape[:-1], size + -size % unit)[..., :size]
    return rows.copy_(t)


def _aligned_bias(bias: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    if bias is None:
        return None
    return _expanded(_aligned(bias.expand(*bias.shape[:3], key.shape[2]), 16), query, key)


def _no_random_numbers(device: torch.device) -> tuple[Tensor, Tensor]:
    """The seed and the offset that torch's efficient attention returns without dropout."""
    at = device if torch.cuda.is_current_stream_capturing() else "cpu"
    seed, offset = (torch.empty((), dtype=torch.int64, device=at) for _ in range(2))
    return seed, offset


def _for_torch(query: Tensor) -> Tensor:
    """torch's kernel for the CPU is wrong for some queries that repeat a row."""
    repeats = query.is_cpu and not query.is_nested and 0 in query.stride()
    return query.contiguous() if repeats else query


def _expanded(bias: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    return None if bias is None else bias.expand(*query.shape[:3], key.shape[2])


# ------------------------------------------------------------------------------------------ kernels


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    _checks.check_attention(query, key, value, bias, is_causal)
    _checks.check_storages("attention", query=query, key=key, value=value, bias=bias)
    if not _saves_logsumexp(query, key, value):
        out = F.scaled_dot_product_attention(
            _for_torch(query), key, value, bias, is_causal=is_causal, scale=scale
        )
        return out.contiguous(), query.new_empty(*query.shape[:2], 0)
    if has_fast_fp32():
        added = _expanded(bias, query, key)
        out, logsumexp = ops.fast_fp32_attention(query, key, value, added, 0.0, is_causal, scale)
        if out is not None:
            return out, logsumexp
    operands = *map(_aligned, (query, key, value)), _aligned_bias(bias, query, key)
    out, logsumexp, *_ = efficient_attention(*operands, True, 0.0, is_causal, scale=scale)
    return out, logsumexp


def _backward(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    options = is_causal, scale, needs_bias
    operands = (query, key, value, bias)
    _checks.check_attention_backward(grad, *operands, out, logsumexp, *options)
    saved = {"key": key, "value": value, "bias": bias, "out": out, "logsumexp": logsumexp}
    _checks.check_storages("attention_backward", grad=grad, query=query, **saved)
    if not _saves_logsumexp(query, key, value) or logsumexp.shape[2] == 0:
        of_query, of_key, of_value, of_bias = _grads(grad, *operands, is_causal, scale)
        return of_query, of_key, of_value, of_bias if needs_bias else None
    if has_fast_fp32():
        added = _expanded(bias, query, key)
        grads = ops.fast_fp32_attention_backward(
            grad, query, key, value, added, out, logsumexp, 0.0, *options
        )
        if grads[0] is not None:
            return grads
    numbers = _no_random_numbers(query.device)
    grad, query, key, value, out = map(_aligned, (grad, query, key, value, out))
    forward = (query, key, value, _aligned_bias(bias, query, key), out, logsumexp, *numbers)
    mask = [True, True, True, needs_bias]
    *grads, of_bias = efficient_attention_backward(
        grad, *forward, 0.0, mask, is_causal, scale=scale
    )
    return (*grads, of_bias.contiguous() if needs_bias else None)


for _key in ("CPU", "CUDA"):
    library.impl("attention", lambda *args: _forward(*args)[0], _key)
    library.impl("attention_forward", _forward, _key)
    library.impl("attention_backward", _backward, _key)


@fake("my_ops::attention_forward")
def _fake_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    _checks.check_attention(query, key, value, bias, is_causal)
    saves = _saves_logsumexp(query, key, value)
    out = _like(query, value.shape[3], saves)
    rows = (query.shape[2] + 31) // 32 * 32 if saves else 0
    return out, query.new_empty(*query.shape[:2], rows)


@fake("my_ops::attention")
def _(*args: Any) -> Tensor:
    return _fake_forward(*args)[0]


@fake("my_ops::attention_backward")
def _(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    _checks.check_attention_backward(
        grad, query, key, value, bias, out, logsumexp, is_causal, scale, needs_bias
    )
    saves = _saves_logsumexp(query, key, value)
    q, k, v = (_like(t, t.shape[3], saves) for t in (query, key, value))
    return q, k, v, query.new_empty(*query.shape[:3], key.shape[2]) if needs_bias else None


def _like(operand: Tensor, size: int, saves: bool) -> Tensor:
    """New, in the order of the results: of kernels for CUDA by length before heads."""
    batch, heads, length, _ = operand.shape
    if not saves:
        return operand.new_empty(batch, heads, length, size)
    return operand.new_empty(batch, length, heads, size).transpose(1, 2)


# ----------------------------------------------------------------------------------------- gradient


def _grads(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients in torch's operations, which can be differentiated again. That of bias is of
    all scores, not summed."""
    grad, q, k, v = (_wide(t) for t in (grad, query, key, value))
    weights = reference.attention_weights(q, k, bias, is_causal, scale)
    of_weights = grad @ v.mT
    of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True))
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    grads = (factor * of_scores @ k, factor * of_scores.mT @ q, weights.mT @ grad, of_scores)
    return tuple(t.to(query.dtype) for t in grads)  # type: ignore[return-value]


def _wide(t: Tensor) -> Tensor:
    return t.float() if t.dtype in _checks.HALF else t


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        return ops.attention_forward(query, key, value, bias, is_causal, scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.is_causal, ctx.scale = inputs
        save(ctx, *tensors, *output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, bias, out, logsumexp = ctx.saved_tensors
        options = ctx.is_causal, ctx.scale
        needs_bias = bias is not None and ctx.needs_input_grad[3]
        if differentiated() or logsumexp.shape[2] == 0:  # torch's operations
            *grads, of_bias = _grads(grad, query, key, value, bias, *options)
        else:
            saved = (query, key, value, bias, out, logsumexp)
            *grads, of_bias = ops.attention_backward(grad, *saved, *options, needs_bias)
        return (*grads, of_bias.sum_to_size(bias.shape) if needs_bias else None, None, None)

    @staticmethod
    def jvp(
        ctx: Any,
        query_t: Tensor,
        key_t: Tensor,
        value_t: Tensor,
        bias_t: Tensor | None,
        _is_causal: None,
        _scale: None,
    ) -> Tensor:
        query, key, value, bias = ctx.saved_tensors[:4]
        dtype, scale = query.dtype, ctx.scale
        query, key, value, query_t, key_t, value_t = map(
            _wide, (query, key, value, query_t, key_t, value_t)
        )
        weights = reference.attention_weights(query, key, bias, ctx.is_causal, scale)
        factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        scores_t = factor * (query_t @ key.mT + query @ key_t.mT)
        if bias_t is not None:
            scores_t = scores_t + bias_t
        weights_t = weights * (scores_t - (weights * scores_t).sum(-1, keepdim=True))
        return (weights_t @ value + weights @ value_t).to(dtype)


class _AttentionForward(_Attention):
    """Of ``attention_forward``, which outer levels of torch.func differentiate."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _Attention.setup_context(ctx, inputs, output)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _Attention.backward(ctx, grads[0])

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return _Attention.jvp(ctx, *tangents), None


_attention = register_gradient(ops.attention.default, _Attention)
register_gradient(ops.attention_forward.default, _AttentionForward, returns=2)


# ------------------------------------------------------------------------ operations, as torch's


def _flop(query: Sizes, key: Sizes, terms: int) -> int:
    """Of products that take so many multiply-adds for each score."""
    return 2 * math.prod(query[:3]) * key[2] * terms


@register_flop_formula([ops.attention, ops.attention_forward])
def _(query: Sizes, key: Sizes, value: Sizes, *_: Any, **__: Any) -> int:
    return _flop(query, key, query[3] + value[3])


@register_flop_formula(ops.attention_backward)
def _(grad: Sizes, query: Sizes, key: Sizes, value: Sizes, *_: Any, **__: Any) -> int:
    """The scores are computed again."""
    return _flop(query, key, 3 * query[3] + 2 * value[3])


# --------------------------------------------------------------------------- autocast and vmap

_autocast.register(ops.attention)
_autocast.register(ops.attention_forward)


def _more_batches(size: int, in_dims: Dims, *tensors: Tensor | None) -> list[Tensor | None]:
    """The mapped dimension becomes a part of the batch, which is the first one."""
    return [
        None if t is None else front(t, dim, size).flatten(0, 1)
        for t, dim in zip(tensors, in_dims, strict=False)
    ]


def _more_biases(size: int, dim: int | None, bias: Tensor | None, batch: int) -> Tensor | None:
    if bias is None or (dim is None and bias.shape[0] == 1):
        return bias
    return front(bias, dim, size).expand(size, batch, *bias.shape[-3:]).flatten(0, 1)


def _batch(t: Tensor, dim: int | None) -> int:
    return t.shape[0] if dim is None else t.movedim(dim, 0).shape[1]


def _attention_forward(info: Any, in_dims: Dims, *args: Any) -> tuple[Tensor, Tensor]:
    size, (*tensors, bias), options = info.batch_size, (*args, None)[:4], args[4:]
    dim = (*in_dims, None)[3]
    folded = _more_batches(size, in_dims, *tensors)
    bias = _more_biases(size, dim, bias, _batch(tensors[0], in_dims[0]))
    return ops.attention_forward(*folded, bias, *options)


@register_rule("attention", _checks.check_attention, autocast=True)
def _(info: Any, in_dims: Dims, *args: Any) -> tuple[Tensor, int]:
    out, _ = _attention_forward(info, in_dims, *args)
    return unfold(out, info.batch_size, out.shape[0] // info.batch_size), 0


@register_rule("attention_forward", _checks.check_attention, autocast=True)
def _(info: Any, in_dims: Dims, *args: Any) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    size, (out, logsumexp) = info.batch_size, _attention_forward(info, in_dims, *args)
    batch = out.shape[0] // size
    return (unfold(out, size, batch), unfold(logsumexp, size, batch)), (0, 0)


@register_rule("attention_backward", _checks.check_attention_backward)
def _(
    info: Any,
    in_dims: Dims,
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    *options: Any,
) -> tuple[tuple[Tensor | None, ...], tuple[int | None, ...]]:
    size, batch = info.batch_size, _batch(query, in_dims[1])
    folded = _more_batches(size, in_dims, grad, query, key, value)
    bias = _more_biases(size, in_dims[4], bias, batch)
    saved = _more_batches(size, in_dims[5:], out, logsumexp)
    grads = ops.attention_backward(*folded, bias, *saved, *options)
    split = tuple(None if g is None else unfold(g, size, batch) for g in grads)
    return split, tuple(None if g is None else 0 for g in grads)


# ---------------------------------------------------------------------------------- public function


def _takes(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> bool:
    """Whether the kernels may compute this: torch's own serves everything else, and refuses it."""
    tensors = (query, key, value)
    if not are_plain(*tensors, attn_mask) or torch.is_autocast_enabled("cuda"):
        return False
    if any(t.dtype is not torch.float32 or t.dim() != 4 or not t.is_cuda for t in tensors):
        return False
    batch, heads, queries, size = query.shape
    groups, keys = key.shape[1:3]
    if not (0 < size <= COSTS.largest_head and size % 4 == 0 and (scale is None or scale > 0)):
        return False
    if key.shape != value.shape or (key.shape[0], key.shape[3]) != (batch, size):
        return False
    if heads != groups and not (enable_gqa and groups > 0 and heads % groups == 0):
        return False
    if query.numel() * keys < COSTS.least_work or not (query.device == key.device == value.device):
        return False
    if attn_mask is not None:
        if is_causal or attn_mask.dtype not in (torch.bool, torch.float32):
            return False
        if attn_mask.device != query.device or attn_mask.dim() > 4:
            return False
        scores = (batch, heads, queries, keys)
        sizes = zip(reversed(attn_mask.shape), reversed(scores), strict=False)
        if any(mine not in (1, theirs) for mine, theirs in sizes):
            return False
    if is_compiling():
        return True
    return torch.backends.cuda.mem_efficient_sdp_enabled() and has_fast_fp32()


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch's ``scaled_dot_product_attention``, with the same arguments and results.

    Float32 on Hopper GPUs is computed by the kernels of :class:`fast_fp32` where they are faster,
    whether that is on or off: four dimensions, heads of a multiple of 4 up to 128, no dropout.
    Everything else is torch's own, as is all of it on the CPU.

    Args:
        query: ``(batch, heads, queries, size)``; torch's also takes other numbers of dimensions.
        key: ``(batch, heads, keys, size)``.
        value: ``(batch, heads, keys, size)``; torch's also takes another size.
        attn_mask: bool, True where a key is seen, or what is added to the scores; anything that
            broadcasts to ``(batch, heads, queries, keys)``, or None. A bias gets a gradient.
        dropout_p: as torch's.
        is_causal: a query sees the keys up to its own position. Not with ``attn_mask``.
        scale: of the scores; None is ``1 / sqrt(size)``.
        enable_gqa: ``key`` and ``value`` may have fewer heads, a divisor of those of ``query``.

    Returns:
        ``(batch, heads, queries, size)``. The gradient can be differentiated again where these
        kernels run; second derivatives are torch's operations, over all scores.

    Raises:
        TypeError: an argument is not a tensor.
        RuntimeError: as torch's, if dtypes, devices or shapes do not fit.
    """
    options: dict[str, Any] = {
        "dropout_p": dropout_p,
        "is_causal": is_causal,
        "scale": scale,
        "enable_gqa": enable_gqa,
    }
    tensors = (query, key, value, attn_mask)
    if has_torch_function(tensors) and not is_compiling():
        return handle_torch_function(attention, tensors, *tensors, **options)
    check_tensor("attention", query=query, key=key, value=value)
    if attn_mask is not None:
        check_tensor("attention", attn_mask=attn_mask)
    if dropout_p != 0 or not _takes(*tensors, is_causal, scale, enable_gqa):
        return F.scaled_dot_product_attention(_for_torch(query), *tensors[1:], **options)
    bias = attn_mask
    if bias is not None:
        if bias.dtype is torch.bool:
            bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill(~bias, -math.inf)
        bias = bias.reshape(*[1] * (4 - bias.dim()), *bias.shape)
    if key.shape[1] != query.shape[1]:
        repeats = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(repeats, 1) for t in (key, value))
    return _attention(query, key, value, bias, is_causal, scale)
