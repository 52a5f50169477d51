"""Every operator in plain PyTorch. This is the specification that the tests compare with.

The functions are slow, work with any dtype and device, and can be differentiated any number of
times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def add_one(x: Tensor) -> Tensor:
    return x + torch.ones((), dtype=x.dtype, device=x.device)


def custom_add(a: Tensor, b: Tensor) -> Tensor:
    return add_one(a + b)


def d_sigmoid(z: Tensor) -> Tensor:
    return torch.sigmoid(z) * torch.sigmoid(-z)


def round_ste(x: Tensor) -> Tensor:
    rounded = torch.where(x.isnan(), x, (x >= 0.5).to(x.dtype))
    return x + (rounded - x).detach() if x.requires_grad else rounded


def fill_index(
    height: int,
    width: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    y = torch.arange(height, device=device)[:, None]
    x = torch.arange(width, device=device)[None, :]
    return (y + x).to(dtype)


def of_one_dtype(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Both in float32 if one is: torch's products take no 16-bit operand beside it."""
    dtype = torch.promote_types(a.dtype, b.dtype)
    return a.to(dtype), b.to(dtype)


def gemm(a: Tensor, b: Tensor) -> Tensor:
    return torch.matmul(*of_one_dtype(a, b))


# The activations of linear: the same names as in include/gemm.h, in the same order.
ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu", "sigmoid")


def activate(x: Tensor, activation: str | None) -> Tensor:
    if activation is None or activation == "none":
        return x
    if activation == "relu":
        return F.relu(x)
    if activation == "gelu":
        return F.gelu(x)
    if activation == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    if activation == "silu":
        return F.silu(x)
    if activation == "sigmoid":
        return torch.sigmoid(x)
    raise ValueError(f"unknown activation '{activation}'")


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    y = activate(F.linear(*of_one_dtype(x, weight), bias), activation)
    return y if residual is None else y + residual


def attention_weights(
    query: Tensor,
    key: Tensor,
    bias: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """The softmax of the scores. Rows that see no key are zeros."""
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + bias
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    unseen = (scores == -torch.inf).all(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(unseen, 0), -1).masked_fill(unseen, 0)


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
    """Without dropout: ``dropout_p`` must be 0."""
    if dropout_p != 0:
        raise ValueError(f"dropout_p must be 0, got {dropout_p}")
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(
            ~attn_mask, -torch.inf
        )
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = (t.repeat_interleave(repeats, -3) for t in (key, value))
    return attention_weights(query, key, attn_mask, is_causal, scale) @ value


def lltm_cell(
    input: Tensor, weights: Tensor, bias: Tensor, old_h: Tensor, old_cell: Tensor
) -> tuple[Tensor, Tensor]:
    gates = F.linear(torch.cat([old_h, input], dim=1), weights, bias.reshape(-1))
    i, o, g = gates.chunk(3, dim=1)
    new_cell = old_cell + F.elu(g) * torch.sigmoid(i)
    return torch.tanh(new_cell) * torch.sigmoid(o), new_cell


def lltm(
    input: Tensor,
    h0: Tensor,
    c0: Tensor,
    weights: Tensor,
    bias: Tensor,
    lengths: Tensor | None = None,
    reset: Tensor | None = None,
    zoneout: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    def step(x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        return lltm_cell(x, weights, bias, h, c)

    output, (h_n, c_n) = _over_time(step, input, (h0, c0), lengths, reset, zoneout)
    return output, h_n, c_n


def _over_time(
    step: Callable[..., Sequence[Tensor]],
    input: Tensor,
    states: Sequence[Tensor],
    lengths: Tensor | None,
    reset: Tensor | None,
    zoneout: Tensor | None,
) -> tuple[Tensor, Sequence[Tensor]]:
    """Returns ``h``, the first state, of every step, and all states at the end."""
    outputs = []
    for t, x in enumerate(input):
        before = states
        if reset is not None:
            before = [s.masked_fill(reset[t].unsqueeze(1), 0.0) for s in states]
        after = step(x, *before)
        if zoneout is not None:
            after = (torch.lerp(after[0], before[0], zoneout[t].to(x.dtype)), *after[1:])
        if lengths is None:
            states = after
            outputs.append(states[0])
        else:
            runs = (t < lengths).unsqueeze(1)
            states = [torch.where(runs, a, s) for a, s in zip(after, states, strict=True)]
            outputs.append(torch.where(runs, states[0], 0.0))
    return torch.stack(outputs) if outputs else states[0].new_empty((0, *states[0].shape)), states


def lstm_cell(
    input: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None,
    bias_hh: Tensor | None,
    old_h: Tensor,
    old_cell: Tensor,
) -> tuple[Tensor, Tensor]:
    gates = F.linear(input, weight_ih, bias_ih) + F.linear(old_h, weight_hh, bias_hh)
    i, f, g, o = gates.chunk(4, dim=1)
    new_cell = torch.sigmoid(f) * old_cell + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(new_cell), new_cell


def lstm(
    input: Tensor,
    h0: Tensor,
    c0: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None = None,
    bias_hh: Tensor | None = None,
    lengths: Tensor | None = None,
    reset: Tensor | None = None,
    zoneout: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    def step(x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        return lstm_cell(x, weight_ih, weight_hh, bias_ih, bias_hh, h, c)

    output, (h_n, c_n) = _over_time(step, input, (h0, c0), lengths, reset, zoneout)
    return output, h_n, c_n


def gru_cell(
    input: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None,
    bias_hh: Tensor | None,
    old_h: Tensor,
) -> Tensor:
    x_r, x_u, x_n = F.linear(input, weight_ih, bias_ih).chunk(3, dim=1)
    h_r, h_u, h_n = F.linear(old_h, weight_hh, bias_hh).chunk(3, dim=1)
    u = torch.sigmoid(x_u + h_u)
    n = torch.tanh(x_n + torch.sigmoid(x_r + h_r) * h_n)
    return (1 - u) * n + u * old_h


def gru(
    input: Tensor,
    h0: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None = None,
    bias_hh: Tensor | None = None,
    lengths: Tensor | None = None,
    reset: Tensor | None = None,
    zoneout: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    def step(x: Tensor, h: Tensor) -> tuple[Tensor]:
        return (gru_cell(x, weight_ih, weight_hh, bias_ih, bias_hh, h),)

    output, (h_n,) = _over_time(step, input, (h0,), lengths, reset, zoneout)
    return output, h_n
