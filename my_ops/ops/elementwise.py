"""The elementwise family. Per op: fake kernel (metadata for tracing), gradient, public function."""

from __future__ import annotations

from typing import Any, overload

import torch
from torch import Tensor
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.overrides import handle_torch_function, has_torch_function

from my_ops._autograd import register_gradient, register_out, save
from my_ops._errors import raise_out_of_memory
from my_ops._plain import plain_call
from my_ops.ops import _checks
from my_ops.ops._common import check_tensor, fake, ops
from my_ops.ops._strides import result_like


class _Unchanged(torch.autograd.Function):
    """The gradient passes through as it is."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent.clone()


# ------------------------------------------------------------------------------------- add_one


@fake("my_ops::add_one")
def _(x: Tensor) -> Tensor:
    _checks.check_real(x, "add_one", "x")
    return result_like(x)


class _AddOne(_Unchanged):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return ops.add_one.default(x)


_plain_add_one = plain_call("add_one")
_add_one = register_gradient(ops.add_one.default, _AddOne)


@overload
def add_one(x: Tensor) -> Tensor: ...
@overload
def add_one(x: int) -> int: ...
def add_one(x: Tensor | int) -> Tensor | int:
    """Returns ``x + 1``.

    Args:
        x: a tensor of any shape and any real floating or integer dtype, or a Python int.

    Returns:
        A tensor of the shape and dtype of ``x`` (integers wrap), or an int. The gradient is the
        identity.

    Raises:
        TypeError: ``x`` is neither a tensor nor an int.
        RuntimeError: the dtype is bool or complex.
    """
    if not is_dynamo_compiling():
        result = _plain_add_one(x)
        if result is not None:
            return result
    if has_torch_function((x,)) and not is_compiling():
        return handle_torch_function(add_one, (x,), x)  # type: ignore[arg-type]
    if isinstance(x, int) and not isinstance(x, bool):
        return x + 1
    if not isinstance(x, Tensor):
        raise TypeError(f"add_one: x must be a torch.Tensor or an int, got {type(x).__name__}")
    return _add_one(x)


# ---------------------------------------------------------------------------------- custom_add


@fake("my_ops::custom_add")
def _(a: Tensor, b: Tensor) -> Tensor:
    _, dtype = _checks.check_custom_add(a, b)
    return result_like(a, b, dtype=dtype)


class _CustomAdd(torch.autograd.Function):
    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return ops.custom_add.default(a, b)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.like = [(t.shape, t.dtype) for t in inputs]
        ctx.dtype = output.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return tuple(
            grad.sum_to_size(shape).to(dtype) if needed else None
            for (shape, dtype), needed in zip(ctx.like, ctx.needs_input_grad, strict=True)
        )

    @staticmethod
    def jvp(ctx: Any, a: Tensor | None, b: Tensor | None) -> Tensor:
        given: Any = b if a is None else a  # an integer operand has no tangent
        a, b = (
            given.new_zeros(shape) if t is None else t
            for t, (shape, _) in zip((a, b), ctx.like, strict=True)
        )
        return (a + b).to(ctx.dtype)


_plain_custom_add = plain_call("custom_add")
_custom_add = register_gradient(ops.custom_add.default, _CustomAdd)


def custom_add(a: Tensor, b: Tensor) -> Tensor:
    """Returns ``a + b + 1``.

    Args:
        a, b: tensors of real floating or integer dtypes whose shapes broadcast.

    Returns:
        A tensor of the broadcast shape, of ``torch.result_type(a, b)`` and of the strides of
        ``a + b``. The gradient goes to both, summed over broadcast dimensions.

    Raises:
        TypeError: an argument is not a tensor.
        RuntimeError: shapes do not broadcast, devices differ, a dtype is bool or complex, or torch
            cannot promote the two dtypes.
    """
    if not is_dynamo_compiling():
        result = _plain_custom_add(a, b)
        if result is not None:
            return result
    if has_torch_function((a, b)) and not is_compiling():
        return handle_torch_function(custom_add, (a, b), a, b)
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        check_tensor("custom_add", a=a, b=b)
    return _custom_add(a, b)


# ----------------------------------------------------------------------------------- d_sigmoid


@fake("my_ops::d_sigmoid")
def _(z: Tensor) -> Tensor:
    _checks.check_floating(z, "d_sigmoid", "z")
    return result_like(z)


@fake("my_ops::d_sigmoid_backward")
def _(grad: Tensor, z: Tensor) -> Tensor:
    _checks.check_d_sigmoid_backward(grad, z)
    return result_like(grad, z)


class _DSigmoid(torch.autograd.Function):
    @staticmethod
    def forward(z: Tensor) -> Tensor:
        return ops.d_sigmoid.default(z)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        save(ctx, inputs[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (z,) = ctx.saved_tensors
        return _d_sigmoid_backward(grad, z)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        (z,) = ctx.saved_tensors
        return ops.d_sigmoid_backward(tangent, z)


class _DSigmoidBackward(torch.autograd.Function):
    """The gradient of ``grad * f(z)``, f = s(1 - s)(1 - 2s), f' = s(1 - s)(1 - 6s(1 - s))."""

    @staticmethod
    def forward(grad: Tensor, z: Tensor) -> Tensor:
        return ops.d_sigmoid_backward.default(grad, z)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        save(ctx, *inputs)

    @staticmethod
    def _slope(z: Tensor) -> Tensor:
        d = ops.d_sigmoid(z)
        return d * (1 - 6 * d)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, Tensor | None]:
        grad, z = ctx.saved_tensors
        grad_grad = ops.d_sigmoid_backward(grad_out, z) if ctx.needs_input_grad[0] else None
        grad_z = grad_out * grad * _DSigmoidBackward._slope(z) if ctx.needs_input_grad[1] else None
        return grad_grad, grad_z

    @staticmethod
    def jvp(ctx: Any, grad_t: Tensor, z_t: Tensor) -> Tensor:
        grad, z = ctx.saved_tensors
        return ops.d_sigmoid_backward(grad_t, z) + grad * _DSigmoidBackward._slope(z) * z_t


_plain_d_sigmoid = plain_call("d_sigmoid")
_d_sigmoid = register_gradient(ops.d_sigmoid.default, _DSigmoid)
_d_sigmoid_backward = register_gradient(ops.d_sigmoid_backward.default, _DSigmoidBackward)


def d_sigmoid(z: Tensor) -> Tensor:
    """Returns the derivative of the sigmoid, ``s * (1 - s)`` with ``s = sigmoid(z)``.

    It is computed as ``e / (1 + e)**2`` with ``e = exp(-abs(z))``, which stays accurate for large
    ``z``.

    Args:
        z: a tensor of any shape, dtype float64, float32, float16 or bfloat16.

    Returns:
        A tensor of the shape and dtype of ``z``. The gradient, ``s(1 - s)(1 - 2s)``, can be
        differentiated again.

    Raises:
        TypeError: ``z`` is not a tensor.
        RuntimeError: the dtype is not floating.
    """
    if not is_dynamo_compiling():
        result = _plain_d_sigmoid(z)
        if result is not None:
            return result
    if has_torch_function((z,)) and not is_compiling():
        return handle_torch_function(d_sigmoid, (z,), z)
    if not isinstance(z, Tensor):
        check_tensor("d_sigmoid", z=z)
    return _d_sigmoid(z)


# ----------------------------------------------------------------------------------- round_ste


@fake("my_ops::round_ste")
def _(x: Tensor) -> Tensor:
    _checks.check_floating(x, "round_ste", "x")
    return result_like(x)


class _RoundSTE(_Unchanged):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return ops.round_ste.default(x)


_plain_round_ste = plain_call("round_ste")
_round_ste = register_gradient(ops.round_ste.default, _RoundSTE)


def round_ste(x: Tensor) -> Tensor:
    """Rounds to 0 or 1 (1 where ``x >= 0.5``), with a straight-through gradient.

    Source: Bengio, Leonard and Courville, "Estimating or Propagating Gradients Through Stochastic
    Neurons for Conditional Computation", arXiv 1308.3432.

    Args:
        x: a tensor of any shape, dtype float64, float32, float16 or bfloat16.

    Returns:
        A tensor of the shape and dtype of ``x``; NaN stays NaN. ``grad_x = grad_out``.

    Raises:
        TypeError: ``x`` is not a tensor.
        RuntimeError: the dtype is not floating.
    """
    if not is_dynamo_compiling():
        result = _plain_round_ste(x)
        if result is not None:
            return result
    if has_torch_function((x,)) and not is_compiling():
        return handle_torch_function(round_ste, (x,), x)
    if not isinstance(x, Tensor):
        check_tensor("round_ste", x=x)
    return _round_ste(x)


# ---------------------------------------------------------------------------------- fill_index


@fake("my_ops::fill_index")
def _(
    height: int,
    width: int,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> Tensor:
    dtype = dtype or torch.float32
    _checks.check_fill_index(height, width, dtype)
    return torch.empty((height, width), dtype=dtype, device=device)


@fake("my_ops::fill_index.out")
def _(out: Tensor) -> None:
    _checks.check_fill_index_out(out)


_plain_fill_index = plain_call("fill_index")
register_out(ops.fill_index.out, "out")


def fill_index(
    height: int,
    width: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | int | None = None,
) -> Tensor:
    """Returns the matrix ``out[y][x] = x + y``.

    Args:
        height, width: the shape of the matrix, not negative.
        dtype: float64, float32, float16, bfloat16, int32 or int64.
        device: the device of the result; None is torch's default device.

    Returns:
        A tensor of shape ``(height, width)``, without a gradient.

    Raises:
        TypeError: a size is not an int, ``dtype`` is not a dtype, or ``device`` is not a device.
        ValueError: a size is negative, ``dtype`` is another, or the values do not fit int32.
    """
    if not is_dynamo_compiling():
        result = _plain_fill_index(height, width, dtype, device)
        if result is not None:
            return result
    # torch.get_default_device would break the graph of torch.compile. Read the default here: the
    # call below leaves a mode that sets it.
    device = torch.empty(0).device if device is None else device
    if has_torch_function((height, width)) and not is_compiling():
        return handle_torch_function(
            fill_index, (height, width), height, width, dtype=dtype, device=device
        )
    for name, size in (("height", height), ("width", width)):
        if not isinstance(size, (int, torch.SymInt)) or isinstance(size, bool):
            raise TypeError(f"fill_index: {name} must be an int, got {type(size).__name__}")
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"fill_index: dtype must be a torch.dtype, got {type(dtype).__name__}")
    if not isinstance(device, (torch.device, str, int)):
        raise TypeError(
            f"fill_index: device must be a torch.device, a str or an int, got "
            f"{type(device).__name__}"
        )
    device = torch.device(device)
    if device.type not in ("cpu", "cuda", "meta"):
        raise NotImplementedError(f"fill_index: device must be cpu, cuda or meta, got {device}")
    if not is_dynamo_compiling():  # else the fake kernel checks
        _checks.check_fill_index(height, width, dtype, _checks.check_value)
    try:
        return ops.fill_index.default(height, width, dtype=dtype, device=device)
    except RuntimeError as error:
        raise_out_of_memory(error)
        raise
