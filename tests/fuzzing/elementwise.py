"""add_one, custom_add, d_sigmoid, round_ste, fill_index."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from samples import FLOATING, INTEGERS, ROUNDED_ONCE, SIGNED_OR_BYTE, exact_d_sigmoid
from torch import Tensor

import my_ops
from fuzzing.case import Case, Excess, Op, Tensors
from fuzzing.judge import different, excess, stored, ulps
from fuzzing.tensors import VALUES, T, draw_size, draw_tensor
from my_ops import reference

# Units in the last place, those of test_elementwise.py. For the gradient of d_sigmoid, plus the
# rounding of the product with the incoming gradient.
SUM, D_SIGMOID, D_SIGMOID_GRADIENT = 1.0, 4.0, 8.5
INDEX_DTYPES = ["float64", "float32", "float16", "bfloat16", "int32", "int64"]


def names(dtypes: list[torch.dtype]) -> list[str]:
    return [str(dtype).removeprefix("torch.") for dtype in dtypes]


FLOATS, ALL_INTEGERS, PROMOTED = names(FLOATING), names(INTEGERS), names(SIGNED_OR_BYTE)


def limit(ulp: float, dtype: torch.dtype) -> float:
    return min(ulp, ROUNDED_ONCE) if stored(dtype) else ulp


def draw_shape(choose: random.Random, bits: float) -> tuple[int, ...]:
    """A shape of at most this many elements."""
    dims = choose.choice([0, 1, 1, 2, 2, 3, 3, 4, 5, 7])
    shape, left = [], choose.uniform(0, bits)
    for _ in range(dims):
        n = draw_size(choose, choose.uniform(0, left))
        left -= n.bit_length()
        shape.append(n)
    choose.shuffle(shape)
    return tuple(shape)


def values_of(choose: random.Random, dtype: str) -> str:
    return choose.choice(VALUES) if dtype in FLOATS else "any"


def draw_unary(dtypes: list[str]) -> Any:
    def draw(choose: random.Random, bits: float) -> tuple[dict[str, Any], bool]:
        dtype = choose.choice(dtypes)
        x = draw_tensor(choose, draw_shape(choose, bits), dtype, values_of(choose, dtype))
        return {"x": x}, dtype in FLOATS

    return draw


def draw_custom_add(choose: random.Random, bits: float) -> tuple[dict[str, Any], bool]:
    shape = draw_shape(choose, bits)
    pair = []
    a_dtype = b_dtype = choose.choice(FLOATS + ALL_INTEGERS)
    if choose.random() < 0.3:
        a_dtype, b_dtype = choose.choice(FLOATS + PROMOTED), choose.choice(FLOATS + PROMOTED)
    for dtype in (a_dtype, b_dtype):
        mine = tuple(1 if choose.random() < 0.2 else n for n in shape)
        mine = mine[choose.randint(0, len(mine)) :] if choose.random() < 0.2 else mine
        pair.append(draw_tensor(choose, mine, dtype, values_of(choose, dtype)))
    differentiable = a_dtype in FLOATS and b_dtype in FLOATS and pair[0].values != "special"
    return {"a": pair[0], "b": pair[1]}, differentiable and pair[1].values != "special"


def integers(got: Tensor, *wide: Tensor) -> Tensor:
    """The sum of these and 1, wrapped as in two's complement."""
    return different(got.to(torch.int64), (sum(wide) + 1).to(got.dtype).to(torch.int64))


def with_gradient(case: Case, function: Any, *inputs: Tensor) -> tuple[Tensor, Tensor, Any]:
    """The result, a gradient of it, and the gradients of the inputs, or None without."""
    if not case.gradient:
        return function(*inputs), None, None
    leaves = [t.detach().requires_grad_() for t in inputs]
    result = function(*leaves)
    generator = torch.Generator(case.device).manual_seed(case.seed)
    drawn = torch.randn(result.shape, generator=generator, device=case.device)
    grad = drawn.to(result.dtype)
    return result.detach(), grad, torch.autograd.grad(result, leaves, grad)


def judge_add_one(case: Case, t: Tensors, module: Any) -> Iterator[Excess]:
    x = t["x"]
    got, grad, grads = with_gradient(case, module.add_one, x)
    if x.is_floating_point():
        want = x.double() + 1
        yield "result", excess(got, want, ulps(limit(SUM, x.dtype), got, want))
    else:
        yield "result", integers(got, x.to(torch.int64))
    if grads:
        yield "gradient", different(grads[0], grad)


def judge_custom_add(case: Case, t: Tensors, module: Any) -> Iterator[Excess]:
    a, b = t["a"], t["b"]
    got, grad, grads = with_gradient(case, module.custom_add, a, b)
    assert got.dtype == torch.result_type(a, b)
    if got.is_floating_point():
        a, b = a.to(got.dtype).double(), b.to(got.dtype).double()
        want, both = a + b + 1, a + b
        allowed = ulps(limit(SUM, got.dtype), got, want, both)
        unsure = both.isfinite() & ~both.to(got.dtype).isfinite()
        yield "result", excess(got, want, allowed, unsure)
    else:
        yield "result", integers(got, a.to(torch.int64), b.to(torch.int64))
    if not grads:
        return
    for ours, operand in zip(grads, (t["a"], t["b"]), strict=True):
        want = grad.double().sum_to_size(operand.shape)
        size = grad.double().abs().sum_to_size(operand.shape)
        terms = max(grad.numel() // max(operand.numel(), 1), 1)
        rounded = 2 * max(stored(grad.dtype), stored(operand.dtype))
        floats = (2 * terms**0.5 + 6) * 2.0**-24
        if {grad.dtype, operand.dtype} == {torch.float64}:
            floats = 2 * (terms + 6) * 2.0**-53
        yield "gradient", excess(ours, want, floats * size + rounded * want.abs())


def judge_d_sigmoid(case: Case, t: Tensors, module: Any) -> Iterator[Excess]:
    z = t["x"]
    got, grad, grads = with_gradient(case, module.d_sigmoid, z)
    z64 = z.double()
    want = exact_d_sigmoid(z64)
    yield "result", excess(got, want, ulps(limit(D_SIGMOID, z.dtype), got, want))
    if grads:
        want = grad.double() * (want * -torch.tanh(z64 / 2))
        allowed = ulps(limit(D_SIGMOID_GRADIENT, z.dtype), got, want)
        yield "gradient", excess(grads[0], want, allowed)


def judge_round_ste(case: Case, t: Tensors, module: Any) -> Iterator[Excess]:
    x = t["x"]
    got, grad, grads = with_gradient(case, module.round_ste, x)
    yield "result", different(got, reference.round_ste(x))
    if grads:
        yield "gradient", different(grads[0], grad)


def draw_fill_index(choose: random.Random, bits: float) -> tuple[dict[str, Any], bool]:
    left = choose.uniform(0, bits)
    height = draw_size(choose, choose.uniform(0, left), 0.05)
    width = draw_size(choose, left - height.bit_length(), 0.05)
    dtype = choose.choice(INDEX_DTYPES)
    out = draw_tensor(choose, (height, width), dtype, repeats=False, high=9)
    if 0 in (out.strides or ()) or choose.random() < 0.5:
        return {"height": height, "width": width, "dtype": getattr(torch, dtype)}, False
    return {"out": out}, False


def judge_fill_index(case: Case, t: Tensors, module: Any) -> Iterator[Excess]:
    if "out" in t:
        got, kind = t["out"], "out="
        (height, width), dtype = got.shape, got.dtype
        torch.ops.my_ops.fill_index.out(out=got)
    else:
        height, width, dtype, kind = t["height"], t["width"], t["dtype"], "result"
        got = my_ops.fill_index(height, width, dtype=dtype, device=case.device)
    want = reference.fill_index(height, width, dtype=dtype, device=case.device)
    yield kind, different(got, want)


# --------------------------------------------------------------------------------- wrong arguments


def spoil_unary(choose: random.Random, right: dict[str, Any]) -> tuple[dict[str, Any], str]:
    x = right["x"]
    wrong = choose.choice([None, 1.5, "x", T(x.shape, "bool"), T(x.shape, "complex64")])
    return {"x": wrong}, "RuntimeError" if isinstance(wrong, T) else "TypeError"


def spoil_custom_add(choose: random.Random, right: dict[str, Any]) -> tuple[dict[str, Any], str]:
    name = choose.choice("ab")
    x = right[name]
    other = right["b" if name == "a" else "a"]
    at = choose.randrange(1, 1 + max(min(len(x.shape), len(other.shape)), 1))
    if choose.random() < 0.5 and other.shape and x.shape and other.shape[-at] > 1:
        shape = list(x.shape)
        shape[-at] = other.shape[-at] + 1
        return {**right, name: T(tuple(shape), x.dtype)}, "RuntimeError"
    wrong = choose.choice([None, 1.5, "x", T(x.shape, "bool"), T(x.shape, "complex64")])
    return {**right, name: wrong}, "RuntimeError" if isinstance(wrong, T) else "TypeError"


def spoil_fill_index(choose: random.Random, right: dict[str, Any]) -> tuple[dict[str, Any], str]:
    size = {"height": 3, "width": 4, "dtype": torch.float32}
    name = choose.choice(list(size))
    if name == "dtype":
        wrong = choose.choice([torch.int8, torch.bool, torch.complex64, "float32"])
        return {**size, name: wrong}, "TypeError" if wrong == "float32" else "ValueError"
    wrong = choose.choice([-1, -choose.randrange(1, 1 << 40), 1.0, None, True])
    return {**size, name: wrong}, "ValueError" if type(wrong) is int else "TypeError"


OPS = [
    Op("add_one", draw_unary(FLOATS + ALL_INTEGERS), judge_add_one, spoil_unary),
    Op("custom_add", draw_custom_add, judge_custom_add, spoil_custom_add, weight=2.0),
    Op("d_sigmoid", draw_unary(FLOATS), judge_d_sigmoid, spoil_unary),
    Op("round_ste", draw_unary(FLOATS), judge_round_ste, spoil_unary),
    Op("fill_index", draw_fill_index, judge_fill_index, spoil_fill_index, weight=0.5),
]
