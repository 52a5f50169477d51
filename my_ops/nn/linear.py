"""The layers over :func:`my_ops.linear`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from my_ops._private import FakeTensor, FunctionalTensor, hooked
from my_ops.ops import linear
from my_ops.ops.gemm import is_torchs_linear, torchs_linear
from my_ops.reference import ACTIVATIONS, activate

_PLAIN = (nn.Parameter, Tensor, FakeTensor, FunctionalTensor)


def _is_plain(t: Tensor) -> bool:
    """Whether it is of no tensor subclass but those of torch's tracing, and DTensor.

    Others, such as quantized weights or nested inputs, know torch's linear and not the op.
    """
    return type(t) in _PLAIN or hasattr(t, "placements")


def _is_untouched(layer: nn.Module) -> bool:
    """Whether calling it is ``Linear.forward`` and nothing else."""
    return type(layer) is Linear and not hooked(layer)


class Linear(nn.Linear):
    """``torch.nn.Linear`` by :func:`my_ops.linear`.

    It is a ``torch.nn.Linear`` in everything: arguments, parameters, their initialisation, state
    dict, and for tools that look for one, to read, replace or wrap it. (Those that ask for the
    exact type, such as ``quantize_dynamic``, take it after ``layer.__class__ = torch.nn.Linear``.)
    Weights and inputs of tensor subclasses, such as quantized or nested ones, go to
    ``torch.nn.functional.linear``, but for ``DTensor``; so do 16-bit ones that gain nothing by the
    op. In TorchScript float32 has its full precision, but for products that go to cuBLAS where
    torch lets that use TF32.
    """

    def forward(self, input: Tensor) -> Tensor:
        if torch.jit.is_scripting():
            return torch.ops.my_ops.linear(input, self.weight, self.bias)
        else:
            weight, bias = self.weight, self.bias
            if is_torchs_linear(input, weight):
                output = torchs_linear(input, weight, bias)
                if output is not None:
                    return output
            call = linear if _is_plain(input) and _is_plain(weight) else F.linear
            return call(input, weight, bias)


class LinearActivation(nn.Module):
    """A :class:`Linear` and an activation, in one kernel: see :func:`my_ops.linear`.

    The layer is no ``torch.nn.Linear``, its part ``linear`` is one: where a tool has replaced,
    wrapped or hooked that, it is called, and the activation applied to what it returns.

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
        known = tuple(name for name in ACTIVATIONS if name != "none")
        if activation not in known:
            raise ValueError(
                f"LinearActivation: activation must be one of {known}, got {activation!r}"
            )
        self.linear = Linear(in_features, out_features, bias, device, dtype)
        self.activation = activation

    @property
    def _fused(self) -> bool:
        return _is_untouched(self.linear)

    def forward(self, input: Tensor) -> Tensor:
        if torch.jit.is_scripting():
            if self._fused:
                weight, bias = self.linear.weight, self.linear.bias
                return torch.ops.my_ops.linear(input, weight, bias, self.activation)
        else:
            inner = self.linear
            if _is_untouched(inner):
                weight, bias = inner.weight, inner.bias
                if _is_plain(input) and _is_plain(weight):
                    return linear(input, weight, bias, activation=self.activation)
        return activate(self.linear(input), self.activation)

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"
