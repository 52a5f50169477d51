"""The layers over :func:`my_ops.lltm_cell` and :func:`my_ops.lltm`."""

from __future__ import annotations

import math
from typing import Optional, Tuple  # noqa: UP035  TorchScript reads these

import torch
from torch import Tensor, nn

from my_ops import ops as ops


class _Recurrent(nn.Module):
    """Parameters of LLTM: ``weights`` (3 * hidden_size, hidden_size + input_size) and ``bias``."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, size in (("input_size", input_size), ("hidden_size", hidden_size)):
            if not isinstance(size, int) or size < 1:
                kind = type(self).__name__
                raise ValueError(f"{kind}: {name} must be a positive int, got {size!r}")
        self.input_size = input_size
        self.hidden_size = hidden_size
        shape = (3 * hidden_size, hidden_size + input_size)
        self.weights = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        zero_bias = torch.zeros(3 * hidden_size, device=device, dtype=dtype)
        if bias:
            self.bias = nn.Parameter(zero_bias)
        else:
            self.register_buffer("bias", zero_bias, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws every parameter from U(-1/sqrt(hidden_size), 1/sqrt(hidden_size))."""
        bound = 1.0 / math.sqrt(self.hidden_size)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def extra_repr(self) -> str:
        bias = isinstance(self.bias, nn.Parameter)
        return f"{self.input_size}, {self.hidden_size}, bias={bias}"


class LLTMCell(_Recurrent):
    """:func:`my_ops.lltm_cell` with its parameters, called like ``torch.nn.LSTMCell``.

    Args:
        input_size, hidden_size: sizes of the last dimension of input and state.
        bias: whether the bias is learned; without it, it is zero.
        device, dtype: of the parameters.

    Shapes: ``cell(input, (h, c))`` with input ``(batch, input_size)`` and h, c
    ``(batch, hidden_size)`` (zeros if left out) returns ``(h, c)``.
    """

    def forward(
        self,
        input: Tensor,
        state: Optional[Tuple[Tensor, Tensor]] = None,  # noqa: UP006, UP045
    ) -> Tuple[Tensor, Tensor]:  # noqa: UP006
        if state is None:
            zero = torch.zeros(
                [input.size(0), self.hidden_size], dtype=input.dtype, device=input.device
            )
            state = (zero, zero)
        return torch.ops.my_ops.lltm_cell(input, self.weights, self.bias, state[0], state[1])


class LLTM(_Recurrent):
    """:func:`my_ops.lltm` with its parameters, called like a one-layer ``torch.nn.LSTM``.

    Args: as :class:`LLTMCell`.

    Shapes: ``layer(input, (h_0, c_0))`` with input ``(steps, batch, input_size)`` and h_0, c_0
    ``(1, batch, hidden_size)`` (zeros if left out) returns ``output, (h_n, c_n)`` with output
    ``(steps, batch, hidden_size)``.
    """

    def forward(
        self,
        input: Tensor,
        state: Optional[Tuple[Tensor, Tensor]] = None,  # noqa: UP006, UP045
    ) -> Tuple[Tensor, Tuple[Tensor, Tensor]]:  # noqa: UP006
        if state is None:
            zero = torch.zeros(
                [1, input.size(1), self.hidden_size], dtype=input.dtype, device=input.device
            )
            state = (zero, zero)
        output, h, c = torch.ops.my_ops.lltm(
            input, state[0][0], state[1][0], self.weights, self.bias
        )
        return output, (h.unsqueeze(0), c.unsqueeze(0))
