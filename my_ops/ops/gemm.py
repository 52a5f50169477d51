"""Matrix products: fake kernel (metadata for tracing), gradient, public function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.overrides import handle_torch_function, has_torch_function

from my_ops._autograd import asked_for, register_gradient, register_out, save
from my_ops._errors import raise_out_of_memory
from my_ops._plain import plain_call
from my_ops._private import (
    any_autocast,
    constant_when_compiled,
    dispatch_modes,
    fp32_precision,
    tracing,
)
from my_ops.ops import _checks
from my_ops.ops._checks import FLOATING, HALF
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
        check_str(op, precision=precision)
        if precision not in PRECISIONS:
            raise ValueError(
                f"{op}: precision must be None or one of {PRECISIONS}, got {precision!r}"
            )
    if _cublas_tf32():
        return "highest" if precision == "highest" else "tf32"
    return "high" if precision == "high" else None


def check_str(op: str, **arguments: object) -> None:
    for name, value in arguments.items():
        if not isinstance(value, str):
            raise TypeError(f"{op}: {name} must be a str or None, got {type(value).__name__}")


def rows_aligned(n: int, k: int) -> bool:
    """Whether cuBLAS computes this 16-bit product, or our kernel gains less than its call costs."""
    return n % 8 == 0 and k % 8 == 0


def is_half_product(a: Tensor, b: Tensor) -> bool:
    """Whether two plain tensors have a 16-bit product."""
    if type(a) not in _PLAIN or type(b) not in _PLAIN:
        return False
    if a.dtype not in HALF or b.dtype != a.dtype:
        if not any_autocast() or a.dtype not in _CAST or b.dtype not in _CAST:
            return False
        device = a.device.type
        if not torch.is_autocast_enabled(device) or torch.get_autocast_dtype(device) not in HALF:
            return False
    return True


def are_on_cpu(a: Tensor, b: Tensor) -> bool:
    """Whether two plain tensors of one type are on the CPU, where torch computes all products, and
    nothing traces or watches theirs."""
    if type(a) not in _PLAIN or type(b) not in _PLAIN or is_compiling():
        return False
    if not (a.is_cpu and b.is_cpu and a.dtype == b.dtype and a.dtype in FLOATING):
        return False
    return not (tracing() or dispatch_modes())


def are_plain_on_cpu(a: Tensor, b: Tensor) -> bool:
    """Whether our op would only add to the time of torch's product of these two: those of
    :func:`are_on_cpu` that are dense. Autocast acts on our ops and torch's in its own way."""
    return are_on_cpu(a, b) and _are_dense(a, b) and not any_autocast()


def _are_dense(a: Tensor, b: Tensor) -> bool:
    return a.layout is b.layout is torch.strided and not (a.is_nested or b.is_nested)


def dense_together(a: Tensor, b: Tensor) -> bool:
    """Checks what torch's products do not: one device, also for meta tensors, and dense layouts."""
    return a.device == b.device and _are_dense(a, b)


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
        need_a, need_b, _ = asked_for(ctx, 2 * grad.numel() * a.shape[-1])
        grad_a = grad_b = None
        if need_a:
            grad_a = _gradient_of(a, grad, b.mT, ctx.precision)
        if need_b:
            grad_b = _gradient_of(b, a.mT, grad, ctx.precision)
        return grad_a, grad_b, None

    @staticmethod
    def jvp(ctx: Any, a_t: Tensor, b_t: Tensor, _: None) -> Tensor:
        a, b = ctx.saved_tensors
        return ops.gemm(a_t, b, ctx.precision) + ops.gemm(a, b_t, ctx.precision)


def _gradient_of(operand: Tensor, a: Tensor, b: Tensor, precision: str | None) -> Tensor:
    """a @ b summed over repeated batches; transposed in memory if the operand is, as torch's."""
    if operand.stride(-2) == 1 and operand.stride(-1) == operand.shape[-2]:
        grad = gemm_op(b.mT, a.mT, precision).mT
    else:
        grad = gemm_op(a, b, precision)
    if grad.shape != operand.shape:
        grad = grad.sum_to_size(operand.shape)
    return in_dtype_of(operand, grad)


def in_dtype_of(operand: Tensor, grad: Tensor) -> Tensor:
    """The gradient of a 16-bit operand beside a float32 one is computed in float32."""
    return grad if grad.dtype == operand.dtype else grad.to(operand.dtype)


_plain_gemm = plain_call("gemm")
gemm_op = register_gradient(ops.gemm.default, _Gemm)
_gemm_out = register_out(ops.gemm.out, "a", "b", "out", "precision")


def _prefer_aten_gemm(a: Tensor, b: Tensor) -> bool:
    """Whether torch's own product is the faster call."""
    if is_compiling() or not is_half_product(a, b) or tracing() or a.dim() < 2 or b.dim() < 2:
        return False
    (*batch, m, k), (*batch_b, _, n) = a.shape, b.shape
    aligned = rows_aligned(n, k) and (a.stride(-1) == 1 or m % 8 == 0)
    return aligned and batch == batch_b and len(batch) <= 1 and dense_together(a, b)


def calls_aten(a: Tensor, b: Tensor) -> bool:
    """Whether :func:`gemm` calls torch's product: csrc/calls/products.cpp has the same rule for the
    plain calls among them."""
    matrices = a.dim() == 2 and b.dim() == 2
    return (matrices and are_plain_on_cpu(a, b)) or _prefer_aten_gemm(a, b)


def _aten_gemm(a: Tensor, b: Tensor) -> Tensor | None:
    """torch's own product, or None where it refuses the arguments."""
    try:
        return torch.mm(a, b) if a.dim() == 2 else torch.bmm(a, b)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise_out_of_memory(error)
        return None


def product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` for a gradient, in the precision of torch's settings, by the faster call."""
    y = _aten_gemm(a, b) if _prefer_aten_gemm(a, b) or are_on_cpu(a, b) else None
    return gemm_op(a, b, effective_precision("gemm", None)) if y is None else y


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
            not overlap ``a`` or ``b``, nor lie between their elements. Not allowed while a gradient
            is recorded.
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
    if out is precision is None and not is_dynamo_compiling():
        result = _plain_gemm(a, b)
        if result is not None:
            return result
    if has_torch_function((a, b, out)) and not is_compiling():
        return handle_torch_function(gemm, (a, b, out), a, b, out=out, precision=precision)
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        check_tensor("gemm", a=a, b=b)
    if out is precision is None and calls_aten(a, b):
        product = _aten_gemm(a, b)
        if product is not None:
            return product
    precision = effective_precision("gemm", precision)
    if out is None:
        return gemm_op(a, b, precision)
    check_tensor("gemm", out=out)
    _gemm_out(a, b, out, precision)
    return out
