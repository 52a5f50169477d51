"""What every op needs: the library's namespace, the list of unary ops, checks of argument types."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from my_ops import _library as _library  # loads the compiled module before ops is read

ops: Any = torch.ops.my_ops

# Elementwise ops of one tensor, and their gradients, which take (grad, tensor). All of them share
# the rules for vmap and sharding.
UNARY = [
    "add_one",
    "d_sigmoid",
    "round_ste",
]
UNARY_BACKWARD = [
    "d_sigmoid_backward",
]


# Called before a fake kernel runs, so once a graph is traced; my_ops/_inductor.py adds to it.
before_tracing: list[Callable[[], None]] = []


def fake(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Like ``torch.library.register_fake``; the kernel calls ``before_tracing`` first."""

    def register(kernel: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(kernel)
        def traced(*args: Any, **kwargs: Any) -> Any:
            for prepare in before_tracing:
                prepare()
            return kernel(*args, **kwargs)

        return torch.library.register_fake(name)(traced)

    return register


def check_tensor(op: str, **arguments: object) -> None:
    """Raises TypeError unless all are tensors."""
    for name, value in arguments.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{op}: {name} must be a torch.Tensor, got {type(value).__name__}")


def are_plain(*tensors: Tensor | None) -> bool:
    """Whether no class of them, such as DTensor, has a ``__torch_dispatch__`` of its own."""
    own = Tensor.__torch_dispatch__
    return all(t is None or type(t).__torch_dispatch__ is own for t in tensors)
