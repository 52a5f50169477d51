"""The cells: one step, all steps, and their layers."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import precision
import torch
from samples import OF_TORCH, as_tuple
from torch import Tensor

from fuzzing.case import Case, Excess, Op, Tensors
from fuzzing.elementwise import FLOATS
from fuzzing.tensors import T, draw_size, draw_tensor
from my_ops import reference
from my_ops.recurrent._cell import CELLS, OF_ROWS, Cell

REDRAWN = 4, 12, 48, 192  # more of the reference's errors, while those so far do not decide
VALUES = ["normal"] * 5 + ["whole", "zero", "uniform", "denormal", "not-finite"]


def sizes(choose: random.Random, bits: float, one: bool) -> tuple[int, int, int, int]:
    """steps, batch, inputs and hidden."""
    most = choose.uniform(0, bits)
    while True:
        steps = 1 if one else draw_size(choose, choose.choice([2, 3, 5]))
        batch = draw_size(choose, choose.choice([3, 5, 8]))
        inputs, hidden = (draw_size(choose, choose.choice([3, 6, 9])) for _ in range(2))
        if hidden and max(steps, 1) * max(batch, 1) * hidden * (inputs + hidden) < 2**most:
            return steps, batch, inputs, hidden
        most += 0.5


def parameter_shapes(cell: Cell, inputs: int, hidden: int) -> dict[str, tuple[int, ...]]:
    rows = cell.gates * hidden
    if cell.name in OF_TORCH:
        shapes = {"weight_ih": (rows, inputs), "weight_hh": (rows, hidden)}
        return {**shapes, "bias_ih": (rows,), "bias_hh": (rows,)}
    return {"weights": (rows, hidden + inputs), "bias": (rows,)}


def draw_op(
    cell: Cell, one: bool, choose: random.Random, bits: float
) -> tuple[dict[str, Any], bool]:
    steps, batch, inputs, hidden = sizes(choose, bits, one)
    dtype, values = choose.choice(FLOATS), choose.choice(VALUES)
    states = cell.step_states if one else cell.states
    shapes = {"input": (batch, inputs) if one else (steps, batch, inputs)}
    shapes |= dict.fromkeys(states, (batch, hidden))
    weights = parameter_shapes(cell, inputs, hidden)
    # 0 * inf depends on where a gate underflows.
    saturated = values != "not-finite" and choose.random() < 0.1
    special = choose.choice(list(shapes)) if values == "not-finite" else ""
    arguments: dict[str, Any] = {}
    for name in cell.step_arguments if one else cell.arguments[: -len(OF_ROWS)]:
        if name in weights:
            if name in cell.weights.optional and choose.random() < 0.3:
                arguments[name] = None
                continue
            scale = 1 / math.sqrt(inputs + hidden)
            if name in ("bias", "bias_ih") and saturated:
                scale = 100.0
            arguments[name] = draw_tensor(choose, weights[name], dtype, scale=scale)
        else:
            mine = values if values != "not-finite" or name == special else "normal"
            arguments[name] = draw_tensor(choose, shapes[name], dtype, mine)
    if not one:
        arguments |= draw_masks(choose, steps, batch)
    if values == "not-finite":  # a NaN in a row's state at its end reaches all of its c_n
        arguments.pop("lengths", None)
    # 16 bits cannot hold how far a saturated gate is from 1, so its slope is a matter of luck.
    lucky = saturated and dtype in ("float16", "bfloat16")
    return arguments, values != "not-finite" and not lucky


def draw_masks(choose: random.Random, steps: int, batch: int) -> dict[str, Any]:
    masks: dict[str, Any] = {}
    if choose.random() < 0.3:
        beyond = choose.choice([0, 0, 2])  # outside 0 to steps: these are clamped
        lengths = draw_tensor(choose, (batch,), "int64", low=-beyond, high=steps + 1 + beyond)
        masks["lengths"] = lengths
    if choose.random() < 0.3:
        masks["reset"] = draw_tensor(choose, (steps, batch), "bool", high=choose.choice([2, 4]))
    return masks


def masked(t: Tensors) -> dict[str, Any]:
    return {name: t[name] for name in OF_ROWS if name in t}


def calls(
    t: Tensors, name: str, module: Any
) -> tuple[list[Tensor], Callable[..., Any], Callable[..., Any]]:
    """The tensors that may have gradients, and functions of them: the op and its reference."""
    given = {key: value for key, value in t.items() if key not in OF_ROWS}
    tensors = [value for value in given.values() if value is not None]

    def complete(function: Any) -> Callable[..., tuple[Tensor, ...]]:
        def call(*ts: Tensor) -> tuple[Tensor, ...]:
            rest = iter(ts)
            whole = [None if value is None else next(rest) for value in given.values()]
            return as_tuple(function(*whole, **masked(t)))

        return call

    return tensors, complete(getattr(module, name)), complete(getattr(reference, name))


def judge_op(name: str, case: Case, t: Tensors, module: Any) -> Iterator[Excess]:
    tensors, function, oracle = calls(t, name, module)
    terms = precision.terms_of([tensors[0], t.get("h0", t.get("old_h"))])
    yield from judge(case, tensors, function, oracle, terms, "lltm" in name)


def judge(
    case: Case,
    tensors: Sequence[Tensor],
    function: Callable[..., Any],
    oracle: Callable[..., Any],
    terms: int,
    of_lltm: bool,
    depth: int = 1,
) -> Iterator[Excess]:
    """Checks with the bounds of precision.py. ``depth``: how many layers and directions there
    are."""
    tensors = [t.detach() for t in tensors]
    dtype = tensors[0].dtype
    more = depth * (1.0 if of_lltm else precision.MORE_ROUNDINGS[dtype])
    double = [t.double() for t in tensors]
    run = partial(with_gradients, case)
    want, got = run(oracle, double), run(function, tensors)
    results = len(want) - (len(tensors) if case.gradient else 0)
    assert [t.dtype for t in got] == [dtype] * len(want)
    ours = errors(got, want)
    if dtype == torch.float32 and tensors[0].is_cuda:  # docs/lstm_gru.md, Limits
        ours = [without_rows_of_infinities(error, tensors[1:]) for error in ours]
    rows = max(tensors[0].shape[:-1].numel(), 1)
    if dtype == torch.float64:
        terms += rows  # terms of a parameter's gradient
        # Also relative to the size of the pre-activations, whose last place is that of their terms.
        size = max(t.nan_to_num(0, 0, 0).abs().max().item() if t.numel() else 0 for t in tensors)
        more *= max(size, 1.0)
        found = [
            error.max().item() / precision.float64_limit(terms, exact.nan_to_num(0, 0, 0), more)
            for error, exact in zip(ours, want, strict=True)
        ]
        yield from by_kind(found, 1, results, tensors[0].device)
        return
    theirs = [e.nan_to_num(posinf=0.0) for e in errors(run(oracle, tensors), want)]
    found = list(precision.shares(ours, theirs, dtype, rows, more))
    others = redrawn_errors(case, tensors, oracle)
    for count in REDRAWN:  # maybe by chance: compare with the errors of others of these sizes
        if max(found) <= 1:
            break
        for redrawn in islice(others, count):
            theirs = [torch.maximum(a, b.max()) for a, b in zip(theirs, redrawn, strict=True)]
        found = list(precision.shares(ours, theirs, dtype, rows, more))
    yield from by_kind(found, len(found) // len(want), results, tensors[0].device)


def by_kind(found: list[float], each: int, results: int, device: Any) -> Iterator[Excess]:
    """``each`` shares of every result, then of every gradient."""
    split = results * each
    for kind, shares in (("result", found[:split]), ("gradient", found[split:])):
        if shares:
            yield kind, torch.tensor(max(shares), dtype=torch.float64, device=device)


def errors(got: Sequence[Tensor], want: Sequence[Tensor]) -> list[Tensor]:
    """Like precision.errors, but 0 where both are the same infinity or NaN, and infinity where only
    one of them is."""
    found = []
    for ours, exact in zip(got, want, strict=True):
        assert ours.shape == exact.shape
        wide = ours.double()
        error = (wide - exact).abs() / exact.abs().clamp(min=1)
        same = (wide == exact) | (wide.isnan() & exact.isnan())
        error = torch.where(same, 0.0, error.nan_to_num(nan=math.inf, posinf=math.inf))
        found.append(error if error.numel() else error.new_zeros(1))
    return found


def without_rows_of_infinities(error: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """0 in the rows of the batch whose state has an infinity; no weight has one."""
    for t in tensors:
        if t.shape[:-1] == error.shape[-2:-1]:
            error = error.masked_fill(t.isinf().any(-1, True), 0.0)
    return error


def with_gradients(case: Case, function: Any, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The results, and the gradients of all tensors if the case asks for them."""
    if not case.gradient:
        return list(function(*tensors))
    generator = torch.Generator().manual_seed(case.seed)
    leaves = [t.detach().requires_grad_() for t in tensors]
    results = function(*leaves)
    drawn = [torch.randn(r.shape, generator=generator) for r in results]
    dtype = getattr(torch, case.arguments["input"].dtype)
    grads = [g.to(dtype).to(r.device, r.dtype) for g, r in zip(drawn, results, strict=True)]
    used = [k for k, r in enumerate(results) if r.requires_grad]
    made = torch.autograd.grad(
        [results[k] for k in used], leaves, [grads[k] for k in used], materialize_grads=True
    )
    return [*(r.detach() for r in results), *made]


def redrawn_errors(case: Case, tensors: Sequence[Tensor], oracle: Any) -> Iterator[list[Tensor]]:
    """The errors of the reference for similar inputs: the same numbers in other places, times
    another one."""
    generator = torch.Generator().manual_seed(case.seed)
    while True:
        factors = (0.5 + torch.rand(len(tensors), generator=generator)).tolist()
        others = []
        for t, factor in zip(tensors, factors, strict=True):
            once = t  # repeated elements stay repeated, and so do their errors
            for dim, stride in enumerate(t.stride()):
                once = once.narrow(dim, 0, 1) if stride == 0 and t.shape[dim] > 1 else once
            places = torch.randperm(once.numel(), generator=generator).to(t.device)
            others.append((once.flatten()[places].view(once.shape) * factor).expand(t.shape))
        want = with_gradients(case, oracle, [t.double() for t in others])
        got = with_gradients(case, oracle, others)
        yield [error.nan_to_num(posinf=0.0) for error in errors(got, want)]


# --------------------------------------------------------------------------------- wrong arguments


def spoil(choose: random.Random, right: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Makes one size too large, uses another type or dtype, or adds a dimension."""
    name = choose.choice([key for key, value in right.items() if isinstance(value, T)])
    t = right[name]
    how = choose.choice(["size", "dimension", "type", "dtype"])
    if how == "type":
        return {**right, name: choose.choice([1.5, "x", (1,)])}, "TypeError"
    if how == "dtype":
        dtype = "float64" if t.dtype != "float64" else "float32"
        return {
            **right,
            name: T(t.shape, choose.choice(["int32", "complex64", dtype])),
        }, "RuntimeError"
    shape = list(t.shape)
    if how == "size":
        at = choose.randrange(len(shape))
        free = name == "input" and at == 0 and "reset" not in right and "h0" in right
        shape[-1 if free else at] += 1  # steps may be any number
    else:
        shape.insert(0, 2)
    return {**right, name: T(tuple(shape), t.dtype)}, "RuntimeError"


def ops_of(cell: Cell) -> list[Op]:
    step = f"{cell.name}_cell"
    return [
        Op(step, partial(draw_op, cell, True), partial(judge_op, step), spoil, weight=0.5),
        Op(
            cell.name,
            partial(draw_op, cell, False),
            partial(judge_op, cell.name),
            spoil,
            weight=0.6,
        ),
    ]


OPS = [op for cell in CELLS for op in ops_of(cell)]
