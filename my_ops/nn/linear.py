"""The layers over :func:`my_ops.linear`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from my_ops.ops import linear
from my_ops.reference import activate

_PLAIN: tuple[type, ...] = (nn.Parameter, Tensor)
try:  # private names, present in torch 2.10 to 2.15: without them a traced Linear is torch's linear
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    _PLAIN = (*_PLAIN, FakeTensor, FunctionalTensor)
except ImportError:
    pass

# Private names of nn.Module; where one is missing, LinearActivation fuses nothing.
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def _is_plain(weight: Tensor) -> bool:
    """Whether my_ops has the weight's values, or its tracing or sharding (of a DTensor).

    Other subclasses, quantized ones above all, know torch's own linear alone.
    """
    return type(weight) in _PLAIN or hasattr(weight, "placements")


class Linear(nn.Linear):
    """``torch.nn.Linear`` by :func:`my_ops.linear`.

    It is a ``torch.nn.Linear`` in everything: arguments, parameters, their initialisation, state
    dict, and for tools that look for one, to read, replace or wrap it. A weight of a tensor
    subclass, such as a quantized one, goes to ``torch.nn.functional.linear``, but for ``DTensor``.
    In TorchScript float32 has its full precision, but for products that go to cuBLAS where torch
    lets that use TF32.
    """

    def forward(self, input: Tensor) -> Tensor:
        if torch.jit.is_scripting():
            return torch.ops.my_ops.linear(input, self.weight, self.bias)
        else:
            weight = self.weight
            if _is_plain(weight):
                return linear(input, weight, self.bias)
            return F.linear(input, weight, self.bias)


class LinearActivation(nn.Module):
    """A :class:`Linear` and an activation, in one kernel: see :func:`my_ops.linear`.

    It computes ``activation(self.linear(input))``, and so it does where ``self.linear`` has been
    replaced, wrapped or hooked, one after the other.

    Args:
        in_features, out_features, bias, device, dtype: as for ``torch.nn.Linear``.
        activation: ``"relu"``, ``"gelu"``, ``"gelu_tanh"``, ``"silu"`` or ``"sigmoid"``.

    Raises:
        ValueError: the activation is another.
    """

    __constants__ = ["_fused"]  # noqa: RUF012  read when it is scripted
    __jit_unused_properties__ = ["_fused"]  # noqa: RUF012

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str,
    ) -> None:
        super().__init__()
        known = ("relu", "gelu", "gelu_tanh", "silu", "sigmoid")
        if activation not in known:
            raise ValueError(
                f"LinearActivation: activation must be one of {known}, got {activation!r}"
            )
        self.linear = Linear(in_features, out_features, bias, device, dtype)
        self.activation = activation

    @property
    def _fused(self) -> bool:
        """Whether calling ``self.linear`` is ``Linear.forward`` and nothing else."""
        own: dict[str, Any] = self.linear.__dict__
        return (
            type(self.linear) is Linear
            and "forward" not in own
            and not any(own.get(name, True) for name in _HOOKS)
            and _is_plain(self.linear.weight)
        )

    def forward(self, input: Tensor) -> Tensor:
        if not self._fused:
            return activate(self.linear(input), self.activation)
        weight, bias = self.linear.weight, self.linear.bias
        if torch.jit.is_scripting():
            return torch.ops.my_ops.linear(input, weight, bias, self.activation)
        else:
            return linear(input, weight, bias, activation=self.activation)

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"
