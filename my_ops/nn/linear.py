"""The layers that call :func:`my_ops.linear`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_compiling, is_dynamo_compiling

from my_ops._private import FakeTensor, FunctionalTensor, hooked, tracing
from my_ops.ops._checks import FLOATING
from my_ops.ops.gemm import are_on_cpu
from my_ops.ops.linear import (
    aten_linear,
    check_activation,
    linear,
    plain_linear,
    prefer_aten_linear,
)
from my_ops.reference import ACTIVATIONS, activate

_DENSE = (nn.Parameter, Tensor, FakeTensor, FunctionalTensor)


def _is_dense(t: Tensor) -> bool:
    """Whether it is of a floating-point type, and a dense tensor, a DTensor, or one of the
    subclasses that torch traces with.

    Other subclasses, such as quantized weights or nested inputs, and sparse tensors support torch's
    linear, not ours.
    """
    if type(t) in _DENSE:
        return t.layout is torch.strided and not t.is_nested and t.dtype in FLOATING
    return hasattr(t, "placements")


def _for_onnx() -> bool:
    """Whether torch exports the layer to ONNX, whose exporters know torch's operators alone."""
    if is_dynamo_compiling() or not (tracing() or is_compiling()):  # the import below takes time
        return False
    return torch.onnx.is_in_onnx_export()


def _is_untouched(layer: nn.Module) -> bool:
    """Whether a call of the layer runs ``Linear.forward`` and nothing else."""
    return type(layer) is Linear and not hooked(layer)


class Linear(nn.Linear):
    """A ``torch.nn.Linear`` that calls :func:`my_ops.linear`.

    It is a ``torch.nn.Linear`` in every respect: arguments, parameters, their initialisation and
    state dict. Tools that look for a ``torch.nn.Linear``, to read, replace or wrap it, find it.
    (For tools that ask for the exact type, such as ``quantize_dynamic``, set ``layer.__class__ =
    torch.nn.Linear`` first.) Weights and inputs that are sparse, nested or of tensor subclasses,
    such as quantized ones, go to ``torch.nn.functional.linear``, except ``DTensor``; so do those on
    the CPU, those of complex and integer types, 16-bit ones that would not gain from the op, and
    all in an export to ONNX. Unlike ``torch.nn.Linear``, a float32 layer takes 16-bit inputs and
    returns float32; a 16-bit layer takes float32 inputs only without a bias. In TorchScript float32
    has its full precision, except for products that go to cuBLAS while torch allows TF32 there.
    """

    def forward(self, input: Tensor) -> Tensor:
        if torch.jit.is_scripting():
            return torch.ops.my_ops.linear(input, self.weight, self.bias)
        else:
            weight, bias = self.weight, self.bias
            if not is_dynamo_compiling():
                result = plain_linear(input, weight, bias)
                if result is not None:
                    return result
            if prefer_aten_linear(input, weight) or are_on_cpu(input, weight):
                output = aten_linear(input, weight, bias)
                if output is not None:
                    return output
            ours = _is_dense(weight) and _is_dense(input) and not _for_onnx()
            call = linear if ours else F.linear
            return call(input, weight, bias)


class LinearActivation(nn.Module):
    """A :class:`Linear` and an activation in one kernel: see :func:`my_ops.linear`.

    The layer is not a ``torch.nn.Linear``, but its attribute ``linear`` is one. If a tool has
    replaced, wrapped or hooked ``linear``, the layer calls it and applies the activation to the
    result.

    Args:
        in_features, out_features, bias, device, dtype: as for ``torch.nn.Linear``.
        activation: ``"relu"``, ``"gelu"``, ``"gelu_tanh"``, ``"silu"`` or ``"sigmoid"``.

    Raises:
        TypeError: the activation is not a str.
        ValueError: it is none of these.
    """

    __constants__ = ["_fused"]  # noqa: RUF012  read when the layer is scripted
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
        names = [name for name in ACTIVATIONS if name != "none"]
        check_activation("LinearActivation", activation, names)
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
                if _is_dense(input) and _is_dense(weight) and not _for_onnx():
                    return linear(input, weight, bias, activation=self.activation)
        return activate(self.linear(input), self.activation)

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"
