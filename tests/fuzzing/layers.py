"""The recurrent layers of my_ops.nn and some of my_ops.cell, compared with the references of their
cells, which run row by row for directions from the end."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import own_cells
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
from my_ops.recurrent import rnn
from my_ops.recurrent._cell import CELLS, Cell
from my_ops.recurrent.own_cell import CellDefinition

CLASSES = {name.lower(): name for name in my_ops.nn.__all__}


class Kind(NamedTuple):
    """``make`` gives a layer, of all steps or of one, and ``exact`` computes the same."""

    name: str
    cell: Cell
    one: bool
    make: Callable[..., Any]
    exact: Callable[..., Any]


def draw(kind: Kind, choose: random.Random, bits: float) -> tuple[dict[str, Any], bool]:
    cell, one = kind.cell, kind.one
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


def all_steps(own: CellDefinition, x: Tensor, *given: Tensor, **of_rows: Any) -> list[Tensor]:
    """A loop with the function of a cell of one's own."""
    count, vectors = 1 + len(own.carried), len(own.parameters)
    now, (w_x, w_h, *more) = list(given[:count]), given[count:]
    bias_x, bias_h = more[vectors:] or (0.0, 0.0)
    fixed = dict(zip(own.parameters, more, strict=False))
    asked = inspect.signature(own.function).parameters
    lengths, reset = of_rows.get("lengths"), of_rows.get("reset")
    output = []
    for t in range(x.shape[0]):
        runs = x.new_ones(x.shape[1], 1, dtype=torch.bool)
        runs = runs if lengths is None else (t < lengths).unsqueeze(1)
        before = now
        if reset is not None:
            before = [torch.where(reset[t].unsqueeze(1), 0.0, s) for s in now]
        parts = (x[t] @ w_x.mT + bias_x, before[0] @ w_h.mT + bias_h)
        gates = zip(own.gates, *(part.chunk(len(own.gates), 1) for part in parts), strict=True)
        values = fixed | dict(zip(("h", *own.carried), before, strict=True))
        for name, of_x, of_h in gates:
            values |= {name: of_x + of_h, f"{name}_x": of_x, f"{name}_h": of_h}
        new = as_tuple(own.function(**{n: v for n, v in values.items() if n in asked}))
        output.append(torch.where(runs, new[0], 0.0))
        now = [torch.where(runs, after, s) for after, s in zip(new, now, strict=True)]
    return [torch.stack(output) if output else x.new_zeros(0, *now[0].shape), *now]


def direction(
    run: Callable[..., Any],
    x: Tensor,
    states: list[Tensor],
    parameters: list[Tensor],
    lengths: Tensor | None,
    reset: Tensor | None,
    from_end: bool,
) -> list[Tensor]:
    """The reference's output, and the states at the end."""
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


def oracle(kind: Kind, t: Tensors, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The input, the states if given, and the parameters."""
    cell, (x, *rest) = kind.cell, tensors
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
            masks = lengths, reset, bool(from_end)
            output, *last = direction(kind.exact, x, mine, parameters, *masks)
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


def oracle_step(kind: Kind, t: Tensors, *tensors: Tensor) -> tuple[Tensor, ...]:
    cell, (x, *rest) = kind.cell, tensors
    states = [x.new_zeros(x.shape[0], t["hidden"]) for _ in cell.states]
    if cell.states[0] in t:
        states, rest = rest[: len(cell.states)], rest[len(cell.states) :]
    parameters = with_bias(cell, t, rest)
    if cell.weights.optional and not t["bias"]:
        parameters = [*parameters, None, None]
    return as_tuple(kind.exact(x, *parameters, *states))


def names_of(layer: Any) -> list[str]:
    """The parameters of each layer and direction in a row."""
    rows = getattr(layer, "_all_weights", None)
    if rows is None:
        return [name for name, _ in layer.named_parameters()]
    return [name for row in rows for name in row]


def call(layer: Any, cell: Cell, t: Tensors, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Calls the layer with these parameters; returns its results in the reference's form."""
    names = names_of(layer)
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


def judge_layer(kind: Kind, case: Case, t: Tensors, module: Any) -> Iterator[Excess]:
    cell, one, x = kind.cell, kind.one, t["input"]
    options = {
        key: t[key] for key in ("num_layers", "bias", "bidirectional", "batch_first") if key in t
    }
    torch.manual_seed(case.seed)
    layer = kind.make(x.shape[-1], t["hidden"], **options, dtype=x.dtype)
    layer = layer.to(case.device)
    given = [t[state] for state in cell.states if state in t]
    tensors = [x, *given, *(layer.get_parameter(name).detach() for name in names_of(layer))]
    exact = partial(oracle_step if one else oracle, kind, t)
    steps = 1 if one else x.shape[t["batch_first"]] if x.dim() == 3 else 1
    depth = t.get("num_layers", 1) * (1 + t.get("bidirectional", False))
    terms = depth**2 * steps * (x.shape[-1] + 2 * t["hidden"])
    ours = partial(call, layer, cell, t)
    yield from judge(case, tensors, ours, exact, terms, cell.name == "lltm", depth)


def shipped(cell: Cell, one: bool) -> Kind:
    name = CLASSES[cell.name.replace("_", "") + "cell" * one]
    exact = getattr(reference, cell.name + "_cell" * one)
    return Kind(f"nn.{name}", cell, one, getattr(my_ops.nn, name), exact)


def own(name: str, definition: CellDefinition, make: Callable[..., Any]) -> Kind:
    return Kind(name, definition._cell, False, make, partial(all_steps, definition))


KINDS = [shipped(cell, one) for cell in CELLS for one in (True, False)]
KINDS.append(own("nn.RNN", rnn.CELLS["rnn_tanh"], my_ops.nn.RNN))
# Without kinks, near which 16 bits choose a side by chance.
SMOOTH = (own_cells.minimal, own_cells.peephole, own_cells.two_speeds)
KINDS += [own(f"{made.name}.layer", made, made.layer) for made in SMOOTH]
OPS = [Op(kind.name, partial(draw, kind), partial(judge_layer, kind), weight=0.2) for kind in KINDS]
