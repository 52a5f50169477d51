"""The layer over :func:`my_ops.linear`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from my_ops.ops import linear


class Linear(nn.Linear):
    """``torch.nn.Linear`` with the activation fused in: see :func:`my_ops.linear`.

    Parameters, their initialisation and the state dict are those of ``torch.nn.Linear``. In
    TorchScript float32 has its full precision, but for products that go to cuBLAS where torch lets
    that use TF32.

    Args:
        in_features, out_features: sizes of the last dimension of input and output.
        bias: whether to add a learned bias.
        activation: None, ``"relu"``, ``"gelu"``, ``"gelu_tanh"``, ``"silu"`` or ``"sigmoid"``.
        device, dtype: of the parameters.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        activation: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        known = ("none", "relu", "gelu", "gelu_tanh", "silu", "sigmoid")
        if activation is not None and activation not in known:
            raise ValueError(f"Linear: activation must be one of {known}, got {activation!r}")
        self.activation: str = activation or "none"

    def forward(self, x: Tensor) -> Tensor:
        if torch.jit.is_scripting():
            return torch.ops.my_ops.linear(x, self.weight, self.bias, self.activation)
        else:
            return linear(x, self.weight, self.bias, activation=self.activation)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation}"
