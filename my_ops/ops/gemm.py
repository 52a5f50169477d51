"""Matrix products. Per op: fake kernel (metadata for tracing), gradient, public function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.overrides import handle_torch_function, has_torch_function

from my_ops import reference
from my_ops._autograd import differentiated, register_gradient, register_out, save
from my_ops._errors import raise_clearer, raise_out_of_memory
from my_ops._private import (
    any_autocast,
    constant_when_compiled,
    fp32_precision,
    tracing,
    version,
)
from my_ops.ops import _checks
from my_ops.ops._checks import HALF
from my_ops.ops._common import check_tensor, fake, ops

PRECISIONS = ("highest", "high")
_CAST = (*HALF, torch.float32)  # by autocast
_PLAIN = (Tensor, torch.nn.Parameter)


@constant_when_compiled
def _cublas_tf32() -> bool:
    """Whether one of torch's settings lets cuBLAS use TF32."""
    if is_dynamo_compiling():  # here it is not a constant
        return torch.backends.cuda.matmul.allow_tf32
    return fp32_precision("cuda", "matmul") == "tf32"


def effective_precision(op: str, precision: str | None) -> str | None:
    """The argument of the dispatcher op for a public ``precision``: see csrc/gemm_checks.h."""
    if precision is not None:
        _check_str(op, precision=precision)
        if precision not in PRECISIONS:
            raise ValueError(
                f"{op}: precision must be None or one of {PRECISIONS}, got {precision!r}"
            )
    if _cublas_tf32():
        return "highest" if precision == "highest" else "tf32"
    return "high" if precision == "high" else None


def _check_str(op: str, **arguments: object) -> None:
    for name, value in arguments.items():
        if not isinstance(value, str):
            raise TypeError(f"{op}: {name} must be a str or None, got {type(value).__name__}")


def in_whole_vectors(n: int, k: int) -> bool:
    """Whether cuBLAS computes this 16-bit product, or our kernel gains less than its call costs."""
    return n % 8 == 0 and k % 8 == 0


def _is_half_product(a: Tensor, b: Tensor) -> bool:
    """Whether two plain tensors have a 16-bit product, and it is not being traced."""
    if type(a) not in _PLAIN or type(b) not in _PLAIN:
        return False
    if a.dtype not in HALF or b.dtype not in HALF:
        if not any_autocast() or a.dtype not in _CAST or b.dtype not in _CAST:
            return False
        device = a.device.type
        if not torch.is_autocast_enabled(device) or torch.get_autocast_dtype(device) not in HALF:
            return False
    return not (is_compiling() or tracing())


def _dense_together(a: Tensor, b: Tensor) -> bool:
    """Checks what torch's products do not: one device, also for meta tensors, and dense layouts."""
    return a.device == b.device and a.layout is b.layout is torch.strided


# ---------------------------------------------------------------------------------------- gemm


@fake("my_ops::gemm")
def _(a: Tensor, b: Tensor, precision: str | None = None) -> Tensor:
    _checks.check_gemm(a, b, "gemm")
    _checks.check_precision(precision, "gemm")
    return _checks.wider(a, b).new_empty(_checks.gemm_sizes(a, b))


@fake("my_ops::gemm.out")
def _(a: Tensor, b: Tensor, out: Tensor, precision: str | None = None) -> None:
    _checks.check_gemm(a, b, "gemm")
    _checks.check_precision(precision, "gemm")
    _checks.check_out(out, a, b, "gemm")


class _Gemm(torch.autograd.Function):
    @staticmethod
    def forward(a: Tensor, b: Tensor, precision: str | None = None) -> Tensor:
        return ops.gemm(a, b, precision)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        a, b, ctx.precision = inputs
        save(ctx, a, b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        grad_a = grad_b = None
        if ctx.needs_input_grad[0]:
            grad_a = _gradient_of(a, grad, b.mT, ctx.precision)
        if ctx.needs_input_grad[1]:
            grad_b = _gradient_of(b, a.mT, grad, ctx.precision)
        return grad_a, grad_b, None

    @staticmethod
    def jvp(ctx: Any, a_t: Tensor, b_t: Tensor, _: None) -> Tensor:
        a, b = ctx.saved_tensors
        return ops.gemm(a_t, b, ctx.precision) + ops.gemm(a, b_t, ctx.precision)


def _gradient_of(operand: Tensor, a: Tensor, b: Tensor, precision: str | None) -> Tensor:
    """a @ b summed over repeated batches; transposed in memory if the operand is, as torch's."""
    if operand.stride(-2) == 1 and operand.stride(-1) == operand.shape[-2]:
        grad = _gemm(b.mT, a.mT, precision).mT
    else:
        grad = _gemm(a, b, precision)
    if grad.shape != operand.shape:
        grad = grad.sum_to_size(operand.shape)
    return _in_dtype_of(operand, grad)


def _in_dtype_of(operand: Tensor, grad: Tensor) -> Tensor:
    """The gradient of a 16-bit operand beside a float32 one is computed in float32."""
    return grad if grad.dtype == operand.dtype else grad.to(operand.dtype)


_gemm = register_gradient(ops.gemm.default, _Gemm)
_gemm_out = register_out(ops.gemm.out, "a", "b", "out", "precision")


def _torchs_gemm(a: Tensor, b: Tensor) -> Tensor | None:
    """torch's own product if that call is faster; None if it is not, or if torch refuses."""
    if not _is_half_product(a, b) or a.dim() < 2 or b.dim() < 2:
        return None
    (*batch, m, k), (*batch_b, _, n) = a.shape, b.shape
    whole = in_whole_vectors(n, k) and (a.stride(-1) == 1 or m % 8 == 0)
    if not whole or batch != batch_b or len(batch) > 1 or not _dense_together(a, b):
        return None
    try:
        return torch.bmm(a, b) if batch else torch.mm(a, b)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise_out_of_memory(error)
        return None


def product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` for a gradient, in the precision of torch's settings, by the faster call."""
    y = _torchs_gemm(a, b)
    return _gemm(a, b, effective_precision("gemm", None)) if y is None else y


def gemm(
    a: Tensor, b: Tensor, *, out: Tensor | None = None, precision: str | None = None
) -> Tensor:
    """Returns the matrix product ``a @ b``.

    Args:
        a: ``(m, k)`` or ``(batch, m, k)``, dtype float64, float32, float16 or bfloat16; any
            strides.
        b: ``(k, n)`` or ``(batch, k, n)``, with the dtype and device of ``a``; or one operand is
            float32 and the other float16 or bfloat16. A batch of 1 is repeated, and so is a matrix
            whose other operand has a batch.
        out: a tensor that receives the result and has its dtype. It may have any strides, but must
            not overlap ``a`` or ``b``. Not allowed while a gradient is recorded.
        precision: for float32 products on the GPU. ``"highest"`` has float32's accuracy;
            ``"high"`` allows that of TF32, 11 bits of each factor. None follows torch's settings
            (``torch.set_float32_matmul_precision`` or ``torch.backends.cuda.matmul``) at the time
            of the call or of tracing. Where cuBLAS with TF32 is faster, ``"high"`` uses it whatever
            these settings are, and None if they allow it; ``"highest"`` then avoids cuBLAS. On the
            CPU torch computes all products.

    Returns:
        ``out``, or a new tensor ``(m, n)`` or ``(batch, m, n)``. Products of 16-bit types are
        summed in float32; in cuBLAS, torch's settings for reduced-precision reductions apply. On
        Hopper GPUs large float32 products are computed as 16-bit ones, three or six for
        ``"highest"`` and one for ``"high"``. They need up to 6 bytes of workspace for each element
        of both operands. The gradient goes to both operands, in the same precision, and can be
        differentiated again.

        With one float32 and one 16-bit operand the product is that of float32, and so is the dtype
        of the result. Large products on Hopper read the 16-bit operand as it is; for others it is
        first converted, exactly, which takes a pass and 4 bytes for each of its elements. Each
        gradient is computed in float32 and has the dtype of its operand. An enabled autocast casts
        both operands.

    Raises:
        TypeError: an argument is not a tensor, or ``precision`` is not a str.
        ValueError: ``precision`` is none of these.
        RuntimeError: dtypes, devices or shapes do not fit, or ``out`` overlaps an operand.
    """
    if has_torch_function((a, b, out)) and not is_compiling():
        return handle_torch_function(gemm, (a, b, out), a, b, out=out, precision=precision)
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        check_tensor("gemm", a=a, b=b)
    if out is None and precision is None:
        product = _torchs_gemm(a, b)
        if product is not None:
            return product
    precision = effective_precision("gemm", precision)
    if out is None:
        return _gemm(a, b, precision)
    check_tensor("gemm", out=out)
    _gemm_out(a, b, out, precision)
    return out


# -------------------------------------------------------------------------------------- linear


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
        grad_residual = grad if ctx.needs_input_grad[4] else None
        if ctx.activation != "none":
            grad = activation_backward(grad, _Linear._before(ctx.precision, *saved), ctx.activation)
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            if grad.dim() == 2:
                grad_x = _gemm(grad, weight, ctx.precision)
            else:
                grad_x = _linear(grad, weight.mT, None, "none", None, ctx.precision, None)
            grad_x = _in_dtype_of(x, grad_x)
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            grad_rows, x_rows = as_rows(grad, x)
            if ctx.needs_input_grad[1]:
                grad_weight = _gemm(grad_rows.mT, x_rows, ctx.precision)
                grad_weight = _in_dtype_of(weight, grad_weight)
            if ctx.needs_input_grad[2]:
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


def is_torchs_linear(x: Tensor, weight: Tensor) -> bool:
    """Whether torch's own linear is the faster call."""
    return _is_half_product(x, weight) and weight.dim() == 2 and in_whole_vectors(*weight.shape)


def torchs_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
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
    y = torchs_linear(x, weight, None) if is_torchs_linear(x, weight) else None
    if y is not None:
        return y
    return _linear(x, weight, None, "none", None, effective_precision("linear", None), None)


def as_rows(*tensors: Tensor) -> Sequence[Tensor]:
    """Each ``(*, size)`` as ``(rows, size)``, with the rows of all in the same order."""
    if type(tensors[0]) is not Tensor and hasattr(tensors[0], "placements"):
        from my_ops.distributed import flattenable  # imported only for DTensors, as it takes time

        tensors = flattenable(tensors)
    return [t.flatten(0, -2) if t.dim() > 1 else t.unsqueeze(0) for t in tensors]


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
            changed in place after ``prepack``.
    """
    if has_torch_function((weight,)) and not is_compiling():
        return handle_torch_function(prepack, (weight,), weight)
    check_tensor("prepack", weight=weight)
    return PackedWeight(weight)


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
        ValueError: ``precision`` is none of those of :func:`gemm`.
        RuntimeError: dtypes, devices or shapes do not fit, or the activation is unknown.
    """
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
        _check_str("linear", activation=activation)
    if activation is residual is precision is packed is None and is_torchs_linear(x, weight):
        fits = bias is None or (bias.shape == weight.shape[:1] and _dense_together(bias, x))
        if fits and _dense_together(x, weight):
            y = torchs_linear(x, weight, bias)
            if y is not None:
                return y
    precision = effective_precision("linear", precision)
    return _linear(x, weight, bias, activation or "none", residual, precision, packed)
