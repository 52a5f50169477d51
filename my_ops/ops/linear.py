"""Linear layers: fake kernel (metadata for tracing), gradient, public function; and prepack."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling, is_dynamo_compiling, is_exporting
from torch.overrides import handle_torch_function, has_torch_function

from my_ops import reference
from my_ops._autograd import asked_for, differentiated, register_gradient, save
from my_ops._costs import LINEAR
from my_ops._errors import raise_clearer, raise_out_of_memory
from my_ops._plain import plain_call
from my_ops._private import constant_when_compiled, tracing, version
from my_ops.ops import _checks
from my_ops.ops._common import check_tensor, fake, ops
from my_ops.ops._strides import known
from my_ops.ops.gemm import (
    are_on_cpu,
    are_plain_on_cpu,
    dense_together,
    effective_precision,
    gemm_op,
    in_dtype_of,
    is_half_product,
    rows_aligned,
)


@fake("my_ops::linear")
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "none",
    residual: Tensor | None = None,
    precision: str | None = None,
    packed: Tensor | None = None,
) -> Tensor:
    _checks.check_linear(x, weight, bias, activation, residual, precision, packed)
    return _checks.wider(x, weight).new_empty(_checks.linear_sizes(x, weight))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str = "none",
        residual: Tensor | None = None,
        precision: str | None = None,
        packed: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        if activation == "none":
            return ops.linear(x, weight, bias, activation, residual, precision, packed)
        if activation == "relu" and residual is None:  # its slope follows from its value
            y = ops.linear(x, weight, bias, activation, None, precision, packed)
            return y, y
        before = ops.linear(x, weight, bias, "none", None, precision, packed)
        _checks.check_activation(activation)
        y = reference.activate(before, activation)
        if residual is None:
            return y, before
        if (residual.shape, residual.dtype, residual.device) != (y.shape, y.dtype, y.device):
            _checks.check_residual(residual, x, weight)  # raises and says what is wrong
        return y + residual, before

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, bias, ctx.activation, _, ctx.precision, _ = inputs
        before = output[1] if isinstance(output, tuple) else None
        save(ctx, x, weight, bias, before)

    @staticmethod
    def _before(
        precision: str | None, x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor | None
    ) -> Tensor:
        """The value before the activation, or after relu, which has the same slope there. It is
        recomputed from the inputs if the result will be differentiated."""
        if before is None or differentiated():
            return ops.linear(x, weight, bias, "none", None, precision)
        return before

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once: activation checkpointing allows no second time
        x, weight = saved[:2]
        needs = asked_for(ctx, 2 * grad.numel() * x.shape[-1])
        grad_residual = grad if needs[4] else None
        if ctx.activation != "none":
            grad = activation_backward(grad, _Linear._before(ctx.precision, *saved), ctx.activation)
        grad_x = grad_weight = grad_bias = None
        if needs[0]:
            if grad.dim() == 2:
                grad_x = gemm_op(grad, weight, ctx.precision)
            else:
                grad_x = _linear(grad, weight.mT, None, "none", None, ctx.precision, None)
            grad_x = in_dtype_of(x, grad_x)
        if needs[1] or needs[2]:
            grad_rows, x_rows = as_rows(grad, x)
            if needs[1]:
                grad_weight = gemm_op(grad_rows.mT, x_rows, ctx.precision)
                grad_weight = in_dtype_of(weight, grad_weight)
            if needs[2]:
                grad_bias = grad_rows.sum(0)
        return grad_x, grad_weight, grad_bias, None, grad_residual, None, None

    @staticmethod
    def jvp(
        ctx: Any,
        x_t: Tensor,
        weight_t: Tensor,
        bias_t: Tensor | None,
        _activation: None,
        residual_t: Tensor | None,
        _precision: None,
        _packed: None,
    ) -> Tensor:
        saved = ctx.saved_tensors
        x, weight = saved[:2]
        tangent = ops.linear(x_t, weight, None, "none", None, ctx.precision)
        tangent = tangent + ops.linear(x, weight_t, None, "none", None, ctx.precision)
        if bias_t is not None:
            tangent = tangent + bias_t
        if ctx.activation != "none":
            tangent = activation_backward(
                tangent, _Linear._before(ctx.precision, *saved), ctx.activation
            )
        return tangent if residual_t is None else tangent + residual_t


@constant_when_compiled  # Dynamo takes is_exporting for True before torch 2.13
def _exporting() -> bool:
    return is_exporting()


def prefer_aten_linear(x: Tensor, weight: Tensor) -> bool:
    """Whether torch's own linear is the faster call."""
    if not is_half_product(x, weight) or weight.dim() != 2:
        return False
    if is_compiling():
        # Inductor pads rows that are not aligned, for forward and backward together.
        if not is_dynamo_compiling() or _exporting() or x.dim() == 0:
            return False
        fits = known(x.shape[-1] == weight.shape[1])
        return fits and known(x.numel() * weight.shape[0] >= LINEAR.padded_by_inductor)
    return not tracing() and rows_aligned(*weight.shape)  # traced sizes are tensors


def calls_aten(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether :func:`linear` calls torch's own: csrc/calls/products.cpp has the same rule for the
    plain calls among them."""
    on_cpu = weight.dim() == 2 and are_plain_on_cpu(x, weight)
    if not (on_cpu or (prefer_aten_linear(x, weight) and dense_together(x, weight))):
        return False
    return bias is None or (bias.shape == weight.shape[:1] and dense_together(bias, x))


def aten_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """torch's own linear, or None where it refuses the arguments."""
    dim = x.dim()
    try:
        if bias is None or dim in (0, 2) or (dim == 3 and x.is_contiguous()):
            return F.linear(x, weight, bias)
        # For such an x, torch would round the product before it adds the bias.
        return F.linear(as_rows(x)[0], weight, bias).view(*x.shape[:-1], weight.shape[0])
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise_out_of_memory(error)
        return None


def linear_product(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T`` for a gradient, as :func:`product`."""
    if prefer_aten_linear(x, weight) or are_on_cpu(x, weight):
        y = aten_linear(x, weight, None)
        if y is not None:
            return y
    return _linear(x, weight, None, "none", None, effective_precision("linear", None), None)


def as_rows(*tensors: Tensor) -> Sequence[Tensor]:
    """Each ``(*, size)`` as ``(rows, size)``, with the rows of all in the same order."""
    if type(tensors[0]) is not Tensor and hasattr(tensors[0], "placements"):
        from my_ops._dtensor import flattenable  # takes time to import

        tensors = flattenable(tensors)
    # Not by flatten, for which batched gradients (is_grads_batched) have no rule.
    return [t.reshape(math.prod(t.shape[:-1]), t.shape[-1]) for t in tensors]


def activation_backward(grad: Tensor, x: Tensor, activation: str) -> Tensor:
    """``grad`` times the derivative of the activation at ``x``, differentiable again."""
    if activation == "relu":
        return torch.ops.aten.threshold_backward(grad, x, 0)
    if activation == "gelu":
        return torch.ops.aten.gelu_backward(grad, x)
    if activation == "gelu_tanh":
        return torch.ops.aten.gelu_backward(grad, x, approximate="tanh")
    if activation == "silu":
        if not differentiated():
            return torch.ops.aten.silu_backward(grad, x)  # one kernel, without a derivative
        return grad * (torch.sigmoid(x) + x * ops.d_sigmoid(x))
    if activation == "sigmoid":
        return grad * ops.d_sigmoid(x)
    return torch.func.vjp(lambda x: reference.activate(x, activation), x)[1](grad)[0]


plain_linear = plain_call("linear")
_linear = register_gradient(ops.linear.default, _Linear)


@fake("my_ops::prepack")
def _(weight: Tensor) -> Tensor:
    _checks.check_prepack(weight)
    # The number of bytes depends on the device.
    none = weight.device.type in ("cpu", "meta")
    size = 0 if none else torch.library.get_ctx().new_dynamic_size()
    return weight.new_empty((size,), dtype=torch.uint8)


class PackedWeight:
    """A weight of :func:`linear` and the packed form that :func:`prepack` made."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight.detach()
        self._made_of: int | None = None
        if is_compiling():  # packing gains nothing for a single call, and no size is known
            self.packed = weight.new_empty(0, dtype=torch.uint8)
            return
        try:
            self.packed = ops.prepack.default(self.weight)
        except RuntimeError as error:
            raise_clearer(error, ops.prepack.default, ["weight"], [self.weight])
            raise
        self._made_of = version(self.weight)

    def current(self) -> Tensor:
        """Returns the packed form; raises if the weight has changed since."""
        made_of = self._made_of
        if made_of is not None and not is_compiling() and version(self.weight) != made_of:
            raise RuntimeError(
                "linear: weight must not change after prepack(), got one changed in place"
            )
        return self.packed

    def __reduce__(self) -> tuple[Any, ...]:
        return PackedWeight, (self.weight,)

    def __repr__(self) -> str:
        w = self.weight
        return f"PackedWeight({tuple(w.shape)}, {w.dtype}, {w.device}, {self.packed.numel()} bytes)"


def prepack(weight: Tensor) -> PackedWeight:
    """Prepares a weight for many calls of :func:`linear`. The weight must not change afterwards.

    On Hopper GPUs float32 products are computed from 16-bit parts; ``prepack`` splits the weight
    into these once. On other GPUs, and for other types, it does nothing and gains nothing.

    Args:
        weight: ``(out_features, in_features)``, dtype float64, float32, float16 or bfloat16. It
            gets no gradient.

    Returns:
        What :func:`linear` takes in place of the weight. It keeps the weight and its packed form,
        which takes as much memory again.

    Raises:
        TypeError: ``weight`` is not a tensor.
        RuntimeError: dtype or shape does not fit. :func:`linear` raises it if the weight was
            changed in place after ``prepack``. It cannot see changes that torch does not count,
            such as ``weight.data.add_(1)`` and those of kernels through the address, and then
            computes with the old values.
    """
    if has_torch_function((weight,)) and not is_compiling():
        return handle_torch_function(prepack, (weight,), weight)
    check_tensor("prepack", weight=weight)
    return PackedWeight(weight)


def check_activation(
    op: str, activation: object, names: Sequence[str], kind: str = "a str"
) -> None:
    if not isinstance(activation, str):
        raise TypeError(f"{op}: activation must be {kind}, got {type(activation).__name__}")
    if activation not in names:
        raise ValueError(_checks.wrong_activation(op, activation, names))


def linear(
    x: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    precision: str | None = None,
) -> Tensor:
    """Returns ``activation(x @ weight.T + bias) + residual``.

    Args:
        x: ``(*, in_features)``, dtype float64, float32, float16 or bfloat16.
        weight: ``(out_features, in_features)``, or the result of :func:`prepack` for it. One of
            ``x`` and ``weight`` may be float32 and the other float16 or bfloat16, as in
            :func:`gemm`.
        bias: ``(out_features,)``, with the dtype of the result, or None.
        activation: None, ``"relu"``, ``"gelu"`` (the erf form), ``"gelu_tanh"``, ``"silu"`` or
            ``"sigmoid"``; formulas as in :mod:`torch.nn.functional`.
        residual: ``(*, out_features)``, with the dtype of the result, added last, or None.
        precision: as in :func:`gemm`.

    Returns:
        ``(*, out_features)``. The gradient goes to every tensor and can be differentiated again.
        With relu and no residual, backward needs the output, so do not change it in place before.
        On CUDA, small results of gelu_tanh in bfloat16 may be off by 2^-18.

    Raises:
        TypeError: an argument is not a tensor, or ``activation`` or ``precision`` is not a str.
        ValueError: ``activation`` or ``precision`` is none of these.
        RuntimeError: dtypes, devices or shapes do not fit.
    """
    if activation is residual is precision is None and not is_dynamo_compiling():
        result = plain_linear(x, weight, bias)
        if result is not None:
            return result
    if has_torch_function((x, weight, bias, residual)) and not is_compiling():
        return handle_torch_function(
            linear,
            (x, weight, bias, residual),
            x,
            weight,
            bias,
            activation=activation,
            residual=residual,
            precision=precision,
        )
    packed = None
    if isinstance(weight, PackedWeight):
        packed = weight.current()
        weight = weight.weight
    if not (isinstance(x, Tensor) and isinstance(weight, Tensor)):
        check_tensor("linear", x=x, weight=weight)
    if bias is not None:
        check_tensor("linear", bias=bias)
    if residual is not None:
        check_tensor("linear", residual=residual)
    if activation is not None:
        check_activation("linear", activation, reference.ACTIVATIONS, "a str or None")
    plain = activation is residual is precision is packed is None
    if plain and calls_aten(x, weight, bias):
        y = aten_linear(x, weight, bias)
        if y is not None:
            return y
    precision = effective_precision("linear", precision)
    return _linear(
        x, weight, bias, "none" if activation is None else activation, residual, precision, packed
    )
