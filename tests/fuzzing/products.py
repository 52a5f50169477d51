"""gemm and linear, and the layers that call linear."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator
from typing import Any

import torch
from samples import ACTIVATIONS
from torch import Tensor

import my_ops
from fuzzing.case import Case, Excess, Op, Tensors
from fuzzing.elementwise import FLOATS, draw_shape, with_gradient
from fuzzing.judge import arithmetic, different, excess, least, of_sum, overflow, stored
from fuzzing.tensors import MODERATE, VALUES, T, draw_size, draw_tensor, of_one_dnn
from my_ops import reference

TF32 = 2.0**-9  # two factors of 11 bits, truncated
TF32_LEAST = 2.0**-136  # the distance of its subnormal numbers
TF32_OVERFLOW = 2.0**128 - 2.0**116  # numbers from here on round to infinity
CUBLAS_GELU_TANH = 2.0**-18  # cuBLAS's own, in bfloat16
STEEPEST, BEND = 1.13, 1.6  # the largest slopes of the activations, and of these slopes
OWN_ROUNDING = 2.0**-21  # the rounding of an activation and of its slope


def sizes(choose: random.Random, bits: float) -> tuple[int, int, int]:
    """m, k and n with at most 2^bits multiplications, mostly few."""
    if bits >= 30 and choose.random() < 0.02:  # a router, or the gradient of its weight
        m, k, n = (round(2 ** choose.uniform(*range_)) for range_ in ((12, 14), (10, 11.5), (6, 7)))
        k = k // 8 * 8
        return choose.choice([(m, k, n), (n, k, m)])
    most = choose.uniform(0, bits)
    while True:
        m, k, n = (draw_size(choose, choose.uniform(0, most)) for _ in range(3))
        if m * k * n < 2**most and max(m * k, k * n, m * n) <= 2 ** min(0.85 * bits, 26):
            return m, k, n


def draw_precision(choose: random.Random) -> dict[str, Any]:
    """Settings of torch, and the precision of the call."""
    options: dict[str, Any] = {}
    if choose.random() < 0.2:
        options["tf32"] = True
    if choose.random() < 0.3:
        options["precision"] = choose.choice(["highest", "high"])
    return options


def operand_dtypes(choose: random.Random) -> tuple[str, str, str]:
    """Those of the operands and of the result."""
    if choose.random() < 0.2:
        mixed = ["float32", choose.choice(["float16", "bfloat16"])]
        choose.shuffle(mixed)
        return mixed[0], mixed[1], "float32"
    dtype = choose.choice([*FLOATS, "float32"])
    return dtype, dtype, dtype


def result_dtype(a: Tensor, b: Tensor) -> torch.dtype:
    return torch.promote_types(a.dtype, b.dtype)


def draw_gemm(choose: random.Random, bits: float) -> tuple[dict[str, Any], bool]:
    m, k, n = sizes(choose, bits)
    a_dtype, b_dtype, dtype = operand_dtypes(choose)
    a_values, b_values = choose.choice(VALUES), choose.choice(VALUES)
    if choose.random() < 0.7:
        b_values = a_values if a_values in ("opposed", "exp", "uniform") else "normal"
    batch = draw_size(choose, 4) if choose.random() < 0.3 else None
    if batch and batch * m * k * n > 2**bits:
        batch = None
    a_batch = b_batch = () if batch is None else (batch,)
    if batch is not None and choose.random() < 0.4:
        short = choose.choice([(), (1,)])
        a_batch, b_batch = (a_batch, short) if choose.random() < 0.5 else (short, b_batch)
    a = draw_tensor(choose, (*a_batch, m, k), a_dtype, a_values, axis=-1)
    b = draw_tensor(choose, (*b_batch, k, n), b_dtype, b_values, axis=-2, first=False)
    arguments: dict[str, Any] = {"a": a, "b": b, **draw_precision(choose)}
    moderate = a_values in MODERATE and b_values in MODERATE
    if choose.random() < 0.25:
        shape = (batch, m, n) if batch is not None else (m, n)
        out = draw_tensor(choose, shape, dtype, repeats=False)
        if 0 not in (out.strides or ()):
            return {**arguments, "out": out}, False
    return arguments, moderate


@contextlib.contextmanager
def torch_tf32(t: Tensors, module: Any) -> Iterator[None]:
    """Applies torch's setting, unless a peer of a product in full precision must not use TF32."""
    allowed = t.get("tf32", False) and (module is my_ops or t.get("precision") != "highest")
    torch.backends.cuda.matmul.allow_tf32 = allowed
    yield
    torch.backends.cuda.matmul.allow_tf32 = False


def precision_of(t: Tensors, module: Any) -> dict[str, Any]:
    return {} if module is reference else {"precision": t.get("precision")}


def in_tf32(t: Tensors, dtype: torch.dtype, device: str) -> bool:
    """Whether the product may have the precision of TF32."""
    low = dtype == torch.float32 and device != "cpu" and t.get("precision") != "highest"
    return low and bool(t.get("tf32") or t.get("precision"))


def of_finite(a: Tensor, b: Tensor) -> Tensor:
    """The sum of the finite terms' absolute values: no sum on the way to a @ b is larger."""
    return a.nan_to_num(0, 0, 0).abs() @ b.nan_to_num(0, 0, 0).abs()


def product(
    t: Tensors, a: Tensor, b: Tensor, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor, Tensor]:
    """In float64: the product, the error that it may have before it is stored, and where it may
    have overflowed on the way."""
    k = a.shape[-1]
    want, size = a @ b, a.abs() @ b.abs()
    allowed = of_sum(k, dtype) * size + k * least(arithmetic(dtype))
    unsure = torch.zeros((), dtype=torch.bool, device=a.device)
    if in_tf32(t, dtype, device):
        allowed = allowed + TF32 * size
        allowed = allowed + TF32_LEAST * (a.abs().sum(-1, True) + b.abs().sum(-2, True))
        high_a, high_b = (x.isfinite() & (x.abs() >= TF32_OVERFLOW) for x in (a, b))
        unsure = high_a.any(-1, True) | high_b.any(-2, True)
    if stored(dtype) and device == "cpu":  # oneDNN treats numbers below this as 0
        tiny = torch.finfo(dtype).tiny
        allowed = allowed + tiny * (a.abs().sum(-1, True) + b.abs().sum(-2, True) + k)
    unsure = unsure | (of_finite(a, b) >= overflow(arithmetic(dtype)))
    if of_one_dnn(dtype, device):  # a NaN may reach the row before its own
        unsure = unsure | ~size.isfinite().all()
    return want, allowed, unsure


def judge_gemm(case: Case, t: Tensors, module: Any) -> Iterator[Excess]:
    a, b = t["a"], t["b"]
    a64, b64, dtype = a.double(), b.double(), result_dtype(a, b)
    want, allowed, unsure = product(t, a64, b64, dtype, case.device)
    if "out" in t:
        got = t["out"]
        with torch_tf32(t, module):
            if module is reference:
                torch.matmul(a.to(dtype), b.to(dtype), out=got)
            else:
                my_ops.gemm(a, b, out=got, precision=t.get("precision"))
        yield "out=", excess(got, want, allowed + stored(dtype) * want.abs(), unsure)
        return

    def call(a: Tensor, b: Tensor) -> Tensor:
        return module.gemm(a, b, **precision_of(t, module))

    with torch_tf32(t, module):
        got, grad, grads = with_gradient(case, call, a, b)
    yield "result", excess(got, want, allowed + stored(dtype) * want.abs(), unsure)
    if not grads:
        return
    g = grad.double()
    pairs = ((grads[0], g, b64.mT, a), (grads[1], a64.mT, g, b))
    for ours, left, right, operand in pairs:
        each, allowed, _ = product(t, left, right, dtype, case.device)
        # With a repeated operand: the sum of products that are stored.
        terms = max(each.numel() // max(operand.numel(), 1), 1)
        allowed = allowed + stored(dtype) * each.abs() + (terms > 1) * least(dtype)
        want, allowed = each.sum_to_size(operand.shape), allowed.sum_to_size(operand.shape)
        size = each.abs().sum_to_size(operand.shape)
        allowed = allowed + of_sum(terms, dtype) * size + stored(operand.dtype) * want.abs()
        yield "gradient", excess(ours, want, allowed)


# ------------------------------------------------------------------------------------------- linear


def draw_linear(choose: random.Random, bits: float) -> tuple[dict[str, Any], bool]:
    m, k, n = sizes(choose, bits)
    x_dtype, weight_dtype, dtype = operand_dtypes(choose)
    values = choose.choice(VALUES)
    weight_values = values if values in ("opposed", "exp") else choose.choice(["normal", "uniform"])
    leading: tuple[int, ...] = (m,)
    if choose.random() < 0.4:
        leading = choose.choice([(), (1, m), (m, 1), (2, m), (2, 3, m), (m, 2)])
    tensors = {
        "x": draw_tensor(choose, (*leading, k), x_dtype, values),
        "weight": draw_tensor(choose, (n, k), weight_dtype, weight_values, first=False),
    }
    others = ["normal", "normal", "zero", "special"]
    if choose.random() < 0.6:
        tensors["bias"] = draw_tensor(choose, (n,), dtype, choose.choice(others))
    if choose.random() < 0.3:
        tensors["residual"] = draw_tensor(choose, (*leading, n), dtype, choose.choice(others))
    moderate = all(tensor.values in MODERATE for tensor in tensors.values())
    options = {**tensors, "activation": choose.choice(ACTIVATIONS), **draw_precision(choose)}
    if choose.random() < 0.15:
        return {**options, "packed": True}, False
    return options, moderate


def linear_call(t: Tensors, module: Any) -> Any:
    options = {"activation": t["activation"], **precision_of(t, module)}

    def call(x: Tensor, weight: Any, *more: Tensor) -> Tensor:
        rest = list(more)
        bias = rest.pop(0) if "bias" in t else None
        residual = rest.pop(0) if "residual" in t else None
        if t.get("packed") and module is my_ops:
            weight = my_ops.prepack(weight)
        return module.linear(x, weight, bias, **options, residual=residual)

    return call


def judge_linear(case: Case, t: Tensors, module: Any) -> Iterator[Excess]:
    given = [t[name] for name in ("x", "weight", "bias", "residual") if name in t]
    with torch_tf32(t, module):
        got, grad, grads = with_gradient(case, linear_call(t, module), *given)
    yield from judge_linear_results(case, t, got, grad, grads)


def judge_linear_results(
    case: Case, t: Tensors, got: Tensor, grad: Tensor, grads: Any
) -> Iterator[Excess]:
    x, weight, activation = t["x"], t["weight"], t["activation"]
    dtype = result_dtype(x, weight)
    k = weight.shape[1]
    x64, w64 = x.double().reshape(-1 if k else math.prod(x.shape[:-1]), k), weight.double()
    before, off, unsure = product(t, x64, w64.mT, dtype, case.device)
    once = stored(dtype)  # at every place where a value may be stored on the way
    if "bias" in t:
        bias = t["bias"].double()
        before, off = before + bias, off + of_sum(k + 1, dtype) * bias.abs()
        unsure = unsure | (bias.isfinite() & (before.abs() >= overflow(dtype)))
        sums = of_finite(x64, w64.mT) + bias.nan_to_num(0, 0, 0).abs()  # the bias may come first
        unsure = unsure | (sums >= overflow(arithmetic(dtype)))
    want = reference.activate(before, activation)
    allowed = off
    if activation is not None:
        unsure = unsure | (before.isfinite() & (before.abs() + off >= overflow(dtype)))
        own = OWN_ROUNDING if dtype != torch.float64 else 2.0**-48
        allowed = STEEPEST * (off + once * before.abs()) + own * want.abs()
        if (case.device, dtype, activation) == ("cuda", torch.bfloat16, "gelu_tanh"):
            allowed = allowed + CUBLAS_GELU_TANH
            unsure = unsure | (before == -math.inf) | (before >= overflow(dtype) / 2)
        if (case.device, activation) == ("cpu", "gelu"):  # as torch's
            unsure = unsure | (before + off >= overflow(dtype) / 2)
    if "residual" in t:
        residual = t["residual"].double().reshape(want.shape)
        unsure = unsure | (want.isfinite() & (want.abs() + allowed >= overflow(dtype)))
        allowed = allowed + (once + of_sum(1, dtype)) * want.abs()
        want = want + residual
        rounded = 2 if dtype == torch.float64 else 1  # there the exact sum is rounded too
        allowed = allowed + rounded * torch.finfo(dtype).eps / 2 * want.abs()
    allowed = allowed + once * want.abs()
    yield "result", excess(got.reshape(want.shape), want, allowed, unsure)
    if not grads:
        return
    g = grad.double().reshape(want.shape)
    slope_of, off_slope = slope(before, off, activation, dtype)
    inner = g * slope_of
    off_inner = g.abs() * off_slope + (once + of_sum(1, dtype)) * inner.abs()
    for ours, left, right, axis, operand in (
        (grads[0], inner, w64, 0, x),
        (grads[1], inner.mT, x64, 1, weight),
    ):
        want, allowed, _ = product(t, left, right, dtype, case.device)
        errors = off_inner.mT if axis else off_inner
        allowed = allowed + errors @ right.abs() + stored(operand.dtype) * want.abs()
        yield "gradient", excess(ours.reshape(want.shape), want, allowed)
    rest = list(grads[2:])
    if "bias" in t:
        want, size = inner.sum(0), inner.abs().sum(0)
        allowed = off_inner.sum(0) + of_sum(inner.shape[0], dtype) * size + once * want.abs()
        yield "gradient", excess(rest.pop(0), want, allowed)
    if "residual" in t:
        yield "gradient", different(rest.pop(0), grad)


def slope(
    before: Tensor, off: Tensor, activation: str | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The derivative of the activation, and the error that it may have."""
    if activation is None:
        return torch.ones_like(before), torch.zeros_like(before)
    z = before.detach().requires_grad_()
    (exact,) = torch.autograd.grad(reference.activate(z, activation).sum(), z)
    off = off + stored(dtype) * before.abs()
    if activation == "relu":
        return exact, (before.abs() <= off).double()
    own = OWN_ROUNDING if dtype != torch.float64 else 2.0**-48
    near = BEND * off + own * (1 + before.abs()) + 2 * stored(dtype)
    return exact, near.clamp(max=2 * STEEPEST)


# ------------------------------------------------------------------------------------------- layers


def draw_layer(choose: random.Random, bits: float) -> tuple[dict[str, Any], bool]:
    _, k, n = sizes(choose, 0.6 * bits)
    m = draw_size(choose, 6)
    dtype = choose.choice(FLOATS)
    x = draw_tensor(choose, (m, max(k, 1)), dtype, choose.choice(MODERATE))
    return {
        "x": x,
        "out_features": max(n, 1),
        "bias": choose.random() < 0.7,
        "activation": choose.choice(ACTIVATIONS),
    }, True


def judge_layer(case: Case, t: Tensors, module: Any) -> Iterator[Excess]:
    """nn.Linear, or nn.LinearActivation if there is an activation."""
    x, activation = t["x"], t["activation"]
    torch.manual_seed(case.seed)
    options = {"bias": t["bias"], "dtype": x.dtype, "device": case.device}
    sizes = x.shape[-1], t["out_features"]
    if activation is None:
        layer = inner = my_ops.nn.Linear(*sizes, **options)
    else:
        layer = my_ops.nn.LinearActivation(*sizes, **options, activation=activation)
        inner = layer.linear
    parameters = dict(zip(("weight", "bias"), inner.parameters(), strict=False))
    t = {"x": x, **{name: p.detach() for name, p in parameters.items()}, "activation": activation}
    if module is reference:
        given = [t[name] for name in ("x", "weight", "bias") if name in t]
        got, grad, grads = with_gradient(case, linear_call(t, reference), *given)
    else:
        got, grad, grads = with_gradient(case, layer, x)
        if case.gradient:
            input = x.detach().requires_grad_()
            grads = torch.autograd.grad(layer(input), [input, *parameters.values()], grad)
        got = got.detach()
    yield from judge_linear_results(case, t, got, grad, grads)


def draw_round(choose: random.Random, bits: float) -> tuple[dict[str, Any], bool]:
    dtype = choose.choice(FLOATS)
    return {"x": draw_tensor(choose, draw_shape(choose, bits), dtype, choose.choice(VALUES))}, True


def judge_round(case: Case, t: Tensors, module: Any) -> Iterator[Excess]:
    got, grad, grads = with_gradient(case, my_ops.nn.RoundSTE(), t["x"])
    yield "result", different(got, reference.round_ste(t["x"]))
    if grads:
        yield "gradient", different(grads[0], grad)


# --------------------------------------------------------------------------------- wrong arguments

TIED = {"a": [-1], "b": [-2], "x": [-1], "weight": [1], "bias": [0], "residual": [0, -1]}


def spoil(choose: random.Random, right: dict[str, Any]) -> tuple[dict[str, Any], str]:
    tensors = [name for name in TIED if isinstance(right.get(name), T)]
    name = choose.choice(tensors)
    t = right[name]
    how = choose.choice(["size", "type", "dtype", "device", "precision", "activation"])
    if how == "precision":
        return {**right, "precision": "medium"}, "ValueError"
    if how == "activation" and "activation" in right:
        return {**right, "activation": "tanh"}, "ValueError"
    if how == "size":
        shape = list(t.shape)
        shape[choose.choice(TIED[name])] += 1
        return {**right, name: T(tuple(shape), t.dtype)}, "RuntimeError"
    if how == "type":
        wrong = choose.choice([1.5, "x", [1.0]] + [None] * (name in ["a", "b", "x", "weight"]))
        return {**right, name: wrong}, "TypeError"
    dtype = "float64" if t.dtype != "float64" else "float32"
    wrong = choose.choice(["int32", "complex64", dtype])
    return {**right, name: T(t.shape, wrong)}, "RuntimeError"


OPS = [
    Op("gemm", draw_gemm, judge_gemm, spoil, weight=4.0, peer=True),
    Op("linear", draw_linear, judge_linear, spoil, weight=4.0, peer=True),
    Op("nn.Linear", draw_layer, judge_layer, peer=True),
    Op("nn.RoundSTE", draw_round, judge_round, weight=0.3),
]
