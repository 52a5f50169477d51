"""Every operator in plain PyTorch: the specification, and the oracle of the tests.

Slow, differentiable any number of times, any dtype and device.
"""

from __future__ import annotations

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


def gemm(a: Tensor, b: Tensor) -> Tensor:
    return torch.matmul(a, b)


# Of linear: the same names, in this order, as in include/gemm.h.
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
    y = activate(F.linear(x, weight, bias), activation)
    return y if residual is None else y + residual


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
) -> tuple[Tensor, Tensor, Tensor]:
    h, c, outputs = h0, c0, []
    for t, step in enumerate(input):
        next_h, next_c = lltm_cell(step, weights, bias, h, c)
        if lengths is None:
            h, c = next_h, next_c
            outputs.append(h)
        else:
            runs = (t < lengths).unsqueeze(1)
            h, c = torch.where(runs, next_h, h), torch.where(runs, next_c, c)
            outputs.append(torch.where(runs, h, 0.0))
    output = torch.stack(outputs) if outputs else h0.new_empty((0, *h0.shape))
    return output, h, c
