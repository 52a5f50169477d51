"""The cases of bench.py that run on the CPU: ``cpu`` and ``cpu-layers``."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from measure import Case, Run, name_of, no_grad

import my_ops
from my_ops import reference


def cpu() -> Iterator[Case]:
    n = 1 << 22
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        x, y = (torch.randn(n).to(dtype) for _ in range(2))
        kind = name_of(dtype)
        yield Case(
            f"add_one {kind} 4 Mi", lambda x=x: my_ops.add_one(x), {"eager": lambda x=x: x + 1}
        )
        yield Case(
            f"custom_add {kind} 4 Mi",
            lambda x=x, y=y: my_ops.custom_add(x, y),
            {"eager": lambda x=x, y=y: x + y + 1},
        )
        yield Case(
            f"d_sigmoid {kind} 4 Mi",
            lambda x=x: my_ops.d_sigmoid(x),
            {"eager": lambda x=x: torch.sigmoid(x) * (1 - torch.sigmoid(x))},
        )
        yield Case(
            f"round_ste {kind} 4 Mi",
            lambda x=x: my_ops.round_ste(x),
            {"eager": lambda x=x: (x >= 0.5).to(x.dtype)},
        )
    yield Case(
        "fill_index float32 2048^2",
        lambda: my_ops.fill_index(2048, 2048),
        {"eager": lambda: reference.fill_index(2048, 2048)},
    )
    for batch, inputs, hidden in ((16, 32, 128), (32, 128, 128)):
        weights, bias = torch.randn(3 * hidden, hidden + inputs) / 10, torch.randn(3 * hidden)
        h, steps = torch.randn(batch, hidden), torch.randn(64, batch, inputs)
        x, step = torch.randn(batch, hidden + inputs), torch.randn(batch, inputs)
        size = f"B{batch} I{inputs} H{hidden}"
        yield Case(
            f"linear float32 {size}",
            lambda x=x, w=weights, b=bias: my_ops.linear(x, w, b),
            {"eager": lambda x=x, w=weights, b=bias: F.linear(x, w, b)},
        )
        yield from cpu_lltm(size, step, h, weights, bias)
        yield from cpu_lltm(f"T64 {size}", steps, h, weights, bias)


def cpu_layers() -> Iterator[Case]:
    """Layers beside torch's; LLTM, which has 3 gates, beside torch's LSTM."""

    def train(layer: torch.nn.Module, x: torch.Tensor) -> Run:
        def step() -> None:
            layer.zero_grad()
            layer(x)[0].sum().backward()

        return step

    peers = {"LSTM": torch.nn.LSTM, "GRU": torch.nn.GRU, "LLTM": torch.nn.LSTM}
    for (name, peer), steps, hidden, batch in product(
        peers.items(), (1, 8), (32, 128, 256, 512, 1024), (1, 16, 64)
    ):
        x, ours, other = (
            torch.randn(steps, batch, hidden),
            getattr(my_ops.nn, name)(hidden, hidden),
            peer(hidden, hidden),
        )
        case = f"{name} float32 T{steps} B{batch} H{hidden}"
        forward = (no_grad(lambda x=x, layer=layer: layer(x)) for layer in (ours, other))
        yield Case(f"{case} forward", next(forward), {"torch": next(forward)})
        yield Case(f"{case} forward + backward", train(ours, x), {"torch": train(other, x)})


def cpu_lltm(size: str, x: Any, h: Any, weights: Any, bias: Any) -> Iterator[Case]:
    """Cell or layer compared with the eager loop, and with torch's LSTM, which has 4 gates, not
    3."""
    one = x.dim() == 2
    module = (torch.nn.LSTMCell if one else torch.nn.LSTM)(x.shape[-1], h.shape[1])
    state = h if one else h.unsqueeze(0)
    arguments = (x, weights, bias, h, h) if one else (x, h, h, weights, bias)
    name = "lltm_cell" if one else "lltm"
    runs: dict[str, tuple[Any, tuple[Any, ...], list[Any]]] = {
        "my_ops": (getattr(my_ops, name), arguments, []),
        "eager": (getattr(reference, name), arguments, []),
        type(module).__name__: (
            lambda x, h, c: module(x, (h, c)),
            (x, state, state),
            list(module.parameters()),
        ),
    }

    def train(function: Any, tensors: Any, parameters: Any) -> Run:
        leaves = [t.clone().requires_grad_() for t in tensors]
        grad = torch.ones_like(function(*leaves)[0])
        used = [*leaves, *parameters]
        return lambda: torch.autograd.grad(function(*leaves)[0], used, grad)

    forward = {k: no_grad(lambda f=f, t=t: f(*t)) for k, (f, t, _) in runs.items()}
    yield Case(f"{name} float32 {size} forward", forward.pop("my_ops"), forward)
    both = {k: train(*run) for k, run in runs.items()}
    yield Case(f"{name} float32 {size} forward + backward", both.pop("my_ops"), both)
