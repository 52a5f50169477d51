"""The recurrent layers of my_ops.nn, compared with the references of their cells, which run row by
row for directions from the end."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from samples import as_tuple
from torch import Tensor
from torch.func import functional_call
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import my_ops
from fuzzing.case import Case, Excess, Op, Tensors
from fuzzing.elementwise import FLOATS
from fuzzing.recurrent import draw_masks, judge, sizes
from fuzzing.tensors import draw_tensor
from my_ops import reference
from my_ops.recurrent._cell import CELLS, Cell

CLASSES = {name.lower(): name for name in my_ops.nn.__all__}


def class_of(cell: Cell, one: bool) -> str:
    return CLASSES[cell.name.replace("_", "") + "cell" * one]


def draw(cell: Cell, one: bool, choose: random.Random, bits: float) -> tuple[dict[str, Any], bool]:
    steps, batch, inputs, hidden = sizes(choose, bits - 2, one)
    inputs, batch, dtype = max(inputs, 1), max(batch, 1), choose.choice(FLOATS)
    arguments: dict[str, Any] = {"hidden": hidden, "bias": choose.random() < 0.7}
    if one:
        arguments["input"] = draw_tensor(choose, (batch, inputs), dtype)
        states = (batch, hidden)
    else:
        layers, both = choose.choice([1, 1, 2, 3]), choose.random() < 0.3
        batch_first = choose.random() < 0.3
        arguments |= {"num_layers": layers, "bidirectional": both, "batch_first": batch_first}
        states = (layers * (1 + both), batch, hidden)
        shape = (batch, steps, inputs) if batch_first else (steps, batch, inputs)
        arguments["input"] = draw_tensor(choose, shape, dtype)
        masks = draw_masks(choose, steps, batch)
        if batch_first and "reset" in masks:
            masks["reset"] = draw_tensor(choose, (batch, steps), "bool")
        if choose.random() < 0.2 and steps:
            lengths = sorted((choose.randint(1, steps) for _ in range(batch)), reverse=True)
            masks = {"packed": tuple([steps, *lengths[1:]])}
        arguments |= masks
    if choose.random() < 0.7:
        for name in cell.states:
            arguments[name] = draw_tensor(choose, states, dtype)
    return arguments, True


def direction(
    cell: Cell,
    x: Tensor,
    states: list[Tensor],
    parameters: list[Tensor],
    lengths: Tensor | None,
    reset: Tensor | None,
    from_end: bool,
) -> list[Tensor]:
    """The reference's output, and the states at the end."""
    run = partial(getattr(reference, cell.name))
    if not from_end:
        return list(run(x, *states, *parameters, lengths=lengths, reset=reset))
    rows: list[list[Tensor]] = []
    for row in range(x.shape[1]):
        steps = x.shape[0] if lengths is None else int(lengths[row].clamp(0, x.shape[0]))
        cut = None
        if reset is not None:  # no state passes from a step back to the one before
            cut = reset[:steps, row : row + 1].flip(0)
            cut = torch.cat([torch.zeros_like(cut[:1]), cut[:-1]])
        mine = [s[row : row + 1] for s in states]
        output, *ends = run(x[:steps, row : row + 1].flip(0), *mine, *parameters, reset=cut)
        beyond = output.new_zeros(x.shape[0] - steps, *output.shape[1:])
        rows.append([torch.cat([output.flip(0), beyond]), *ends])
    outputs, *ends = zip(*rows, strict=True)
    return [torch.cat(outputs, 1), *(torch.cat(end) for end in ends)]


def oracle(cell: Cell, t: Tensors, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The input, the states if given, and the parameters."""
    x, *rest = tensors
    x = x.transpose(0, 1) if t["batch_first"] else x
    cells = t["num_layers"] * (1 + t["bidirectional"])
    if cell.states[0] in t:
        states, rest = rest[: len(cell.states)], rest[len(cell.states) :]
    else:
        states = [x.new_zeros(cells, x.shape[1], t["hidden"]) for _ in cell.states]
    each = len(rest) // cells
    lengths, reset = t.get("lengths"), t.get("reset")
    if "packed" in t:
        lengths = torch.tensor(t["packed"], device=x.device)
    if reset is not None and t["batch_first"]:
        reset = reset.mT
    ends: list[list[Tensor]] = [[] for _ in cell.states]
    for layer in range(t["num_layers"]):
        outputs = []
        for from_end in range(1 + t["bidirectional"]):
            k = layer * (1 + t["bidirectional"]) + from_end
            parameters = with_bias(cell, t, rest[k * each : (k + 1) * each])
            mine = [s[k] for s in states]
            output, *last = direction(cell, x, mine, parameters, lengths, reset, bool(from_end))
            outputs.append(output)
            for end, state in zip(ends, last, strict=True):
                end.append(state)
        x = torch.cat(outputs, 2)
    x = x.transpose(0, 1) if t["batch_first"] else x
    return x, *(torch.stack(end) for end in ends)


def with_bias(cell: Cell, t: Tensors, parameters: list[Tensor]) -> list[Tensor]:
    if t["bias"] or cell.weights.optional:
        return parameters
    weights = parameters[0]
    return [weights, weights.new_zeros(weights.shape[0])]


def oracle_step(cell: Cell, t: Tensors, *tensors: Tensor) -> tuple[Tensor, ...]:
    x, *rest = tensors
    states = [x.new_zeros(x.shape[0], t["hidden"]) for _ in cell.states]
    if cell.states[0] in t:
        states, rest = rest[: len(cell.states)], rest[len(cell.states) :]
    parameters = with_bias(cell, t, rest)
    if cell.weights.optional and not t["bias"]:
        parameters = [*parameters, None, None]
    return as_tuple(getattr(reference, f"{cell.name}_cell")(x, *parameters, *states))


def call(layer: Any, cell: Cell, t: Tensors, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Calls the layer with these parameters; returns its results in the reference's form."""
    names = [name for name, _ in layer.named_parameters()]
    parameters = dict(zip(names, tensors[len(tensors) - len(names) :], strict=True))
    x, *states = tensors[: len(tensors) - len(names)]
    hx = (tuple(states) if len(cell.states) > 1 else states[0]) if states else None
    if "packed" in t:
        batch_first = t["batch_first"]
        x = pack_padded_sequence(x, torch.tensor(t["packed"]), batch_first)
    masks = {name: t[name] for name in ("lengths", "reset") if name in t}
    results = functional_call(layer, parameters, (x, hx), masks)
    if "hidden" in t and "num_layers" not in t:
        return as_tuple(results)
    output, ends = results
    if isinstance(output, PackedSequence):
        output, _ = pad_packed_sequence(output, t["batch_first"])
    return output, *as_tuple(ends)


def judge_layer(cell: Cell, one: bool, case: Case, t: Tensors, module: Any) -> Iterator[Excess]:
    x = t["input"]
    options = {
        key: t[key] for key in ("num_layers", "bias", "bidirectional", "batch_first") if key in t
    }
    torch.manual_seed(case.seed)
    layer = getattr(my_ops.nn, class_of(cell, one))(
        x.shape[-1], t["hidden"], **options, dtype=x.dtype
    )
    layer = layer.to(case.device)
    given = [t[state] for state in cell.states if state in t]
    tensors = [x, *given, *(p.detach() for p in layer.parameters())]
    exact = partial(oracle_step if one else oracle, cell, t)
    steps = 1 if one else x.shape[t["batch_first"]] if x.dim() == 3 else 1
    depth = t.get("num_layers", 1) * (1 + t.get("bidirectional", False))
    terms = depth**2 * steps * (x.shape[-1] + 2 * t["hidden"])
    ours = partial(call, layer, cell, t)
    yield from judge(case, tensors, ours, exact, terms, cell.name == "lltm", depth)


def ops_of(cell: Cell) -> list[Op]:
    return [
        Op(
            f"nn.{class_of(cell, one)}",
            partial(draw, cell, one),
            partial(judge_layer, cell, one),
            weight=0.2,
        )
        for one in (True, False)
    ]


OPS = [op for cell in CELLS for op in ops_of(cell)]
