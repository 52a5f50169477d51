"""The operator in Python: its fake kernel, its gradient, its public function."""

import torch
from torch import Tensor


@torch.library.register_fake("first_operator::square")
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad):
    (x,) = ctx.saved_tensors
    return 2 * x * grad


torch.library.register_autograd("first_operator::square", _backward, setup_context=_save)


def square(x: Tensor) -> Tensor:
    """Returns ``x * x`` of a float32 tensor; differentiable any number of times."""
    return torch.ops.first_operator.square(x)
