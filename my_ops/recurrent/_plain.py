"""Plain calls of a layer: one op for all layers and directions, and one for their gradients; of a
cell, one op for its gradients.

Around these ops is little Python, which is what takes the time of a small layer. A call is plain if
nothing but autograd, in reverse mode, watches it: :func:`plain`. All others run the ops of each
direction, as do second gradients and those that a transform maps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_compiling
from torch.overrides import has_torch_function
from torch.utils.flop_counter import register_flop_formula

from my_ops._autograd import asked_for, differentiated
from my_ops._errors import raise_out_of_memory
from my_ops._private import (
    SingleLevelFunction,
    any_autocast,
    any_requires_grad,
    batched,
    dispatch_modes,
    forward_mode,
    tracing,
    transforms_active,
)
from my_ops.ops._common import are_plain, fake, ops
from my_ops.recurrent import _carried, _checks
from my_ops.recurrent._calls import reverse, stacked
from my_ops.recurrent._cell import CELLS, OWN_CELLS, Cell

_PLAIN = (Tensor, torch.nn.Parameter)
_layers = ops.recurrent_layers.default
_layers_backward = ops.recurrent_layers_backward.default
_step_backward = ops.recurrent_step_backward.default


@fake("my_ops::recurrent_layers")
def _(
    name: str,
    input: Tensor,
    states: list[Tensor],
    parameters: list[Tensor],
    layers: int,
    bidirectional: bool,
    save: bool,
) -> list[Tensor]:
    cell, directions = _of_name(name), 2 if bidirectional else 1
    op = "recurrent_layers"
    _checks.check_layers(cell, op, input, states, parameters, layers, bidirectional)
    cells, (steps, batch, _) = layers * directions, input.shape
    hidden = parameters[0].shape[0] // cell.gates
    results = [input.new_empty((steps, batch, directions * hidden))]
    results += [input.new_empty((cells, batch, hidden)) for _ in cell.states]
    sizes = [hidden, cell.saved * hidden]
    if cell.carried:
        sizes.append(len(cell.carried) * hidden)
    for k in range(cells if save else 0):
        if bidirectional and k > 0 and k % 2 == 0:
            results.append(input.new_empty((steps, batch, 2 * hidden)))
        results += [input.new_empty((steps, batch, size)) for size in sizes]
    return results


@fake("my_ops::recurrent_layers_backward")
def _(
    name: str,
    grad_output: Tensor | None,
    grad_h_n: Tensor | None,
    grad_c_n: Tensor | None,
    input: Tensor,
    states: list[Tensor],
    parameters: list[Tensor],
    layers: int,
    bidirectional: bool,
    saved: list[Tensor],
    *needs: bool,
) -> list[Tensor]:
    cell, op = _of_name(name), "recurrent_layers_backward"
    _checks.check_layers(cell, op, input, states, parameters, layers, bidirectional)
    grads = (grad_output, grad_h_n, grad_c_n)
    _checks.check_layers_backward(cell, op, grads, input, layers, bidirectional, saved)
    cells, hidden = layers * (2 if bidirectional else 1), saved[0].shape[2]
    ends = [(cells, input.shape[1], hidden)] * len(cell.states)
    return _made(input, needs, [input.shape], ends, [p.shape for p in parameters])


@fake("my_ops::recurrent_step_backward")
def _(
    name: str,
    grad_h: Tensor | None,
    grad_cell: Tensor | None,
    gates: Tensor,
    input: Tensor,
    states: list[Tensor],
    parameters: list[Tensor],
    *needs: bool,
) -> list[Tensor]:
    _checks.check_step_gradients(
        _of_name(name), (grad_h, grad_cell), gates, input, states, parameters
    )
    shapes = ([t.shape for t in some] for some in ([input], states, parameters))
    return _made(input, needs, *shapes)


@register_flop_formula(_layers_backward.overloadpacket)
def _layers_backward_flop(name: str, *shapes: Any, **_: Any) -> int:
    """Of each layer but the first the gradient of the input, the gradients of all parameters or of
    none, and the product with the recurrent weight in each step."""
    _, _, _, x, _, parameters, layers, both, _, of_input, _, of_parameters = shapes
    cell, rows = _of_name(name), x[0] * x[1]
    directions = 2 if both else 1
    each = len(parameters) // (layers * directions)
    total = 0
    for k in range(layers * directions):
        recurrent, every = _products(cell, parameters[k * each :])
        total += recurrent + every * of_parameters
        total += (every - recurrent) * (of_input or k >= directions)
    return 2 * rows * total


@register_flop_formula(_step_backward.overloadpacket)
def _step_backward_flop(name: str, *shapes: Any, **_: Any) -> int:
    _, _, _, x, _, parameters, of_input, of_states, of_parameters = shapes
    recurrent, every = _products(_of_name(name), parameters)
    return (
        2 * x[0] * (every * of_parameters + recurrent * of_states + (every - recurrent) * of_input)
    )


def _products(cell: Cell, parameters: Sequence[Any]) -> tuple[int, int]:
    """Multiply-adds of a row, of the product with h and of all, from the parameters' shapes."""
    matrices = parameters[: cell.weights.matrices]
    rows, columns = matrices[-1]
    every = sum(prod(shape) for shape in matrices)
    return rows * min(columns, rows // cell.gates), every


def _made(like: Tensor, needs: Sequence[bool], *shapes: Sequence[Any]) -> list[Tensor]:
    pairs = zip(shapes, needs, strict=True)
    return [like.new_empty(shape) for some, need in pairs if need for shape in some]


def _of_name(name: str) -> Cell:
    return next(cell for cell in (*CELLS, *OWN_CELLS) if cell.name == name)


class Call(NamedTuple):
    """What a call is besides its tensors: the input, the states if any, and the parameters."""

    cell: Cell
    states: int  # how many are given; none: zeros
    hidden: int
    layers: int
    bidirectional: bool
    batch_first: bool


def plain(
    layer: Any, cell: Cell, input: Tensor, states: Sequence[Tensor]
) -> tuple[Tensor, ...] | None:
    """The output and the states at the end, or None if the call is not plain or fails: then the
    ops of each direction raise what there is to raise. ``states``: before the first step, or
    none."""
    if is_compiling() or input.dim() != 3 or not _is_plain(input):
        return None
    layers, both, batch_first = layer.num_layers, layer.bidirectional, layer.batch_first
    if layer._has_weight_dropout or layer._has_zoneout or layer.proj_size > 0:
        return None
    if layers > 1 and layer.training and layer._has_dropout:
        return None
    if input.size(2) != layer.input_size:
        return None
    batch, hidden = input.size(0 if batch_first else 1), layer.hidden_size
    shape = (layers * (2 if both else 1), batch, hidden)
    for state in states:
        if state.shape != shape:
            return None
    parameters: list[Tensor] = layer._in_a_row()
    recorded = _recorded(input, states, parameters)
    if recorded is None:
        return None
    call = Call(cell, len(states), hidden, layers, both, batch_first)
    results: Sequence[Tensor]
    try:
        of_torch = None
        if layer._was_torchs:
            along = input.transpose(0, 1) if batch_first else input
            of_torch = layer._for_torch(along, None, states, None, None)
        if of_torch is not None:
            first = layer._initial(along, list(states) or None, False)
            output, last = layer._torchs(along, None, first, of_torch)
            results = output, *last
        elif not cell.runs_at_once(layer, input, recorded):
            return None
        elif recorded:
            results = _apply(call, input, *states, *parameters)
        else:
            results = _run(call, input, states, parameters, False)[: 1 + len(cell.states)]
    except RuntimeError:
        return None
    if batch_first:
        output, *last = results
        return output.transpose(0, 1), *last
    return tuple(results)


def plain_step(
    cell: Cell,
    hidden: int,
    input: Tensor,
    states: Sequence[Tensor],
    parameters: Sequence[Tensor | None],
) -> Sequence[Tensor] | None:
    """The same for one step: the new states. Without a gradient there is no Python to save."""
    if not is_grad_enabled() or is_compiling() or input.dim() != 2 or not _is_plain(input):
        return None
    given = [p for p in parameters if p is not None]
    if not _recorded(input, states, given):
        return None
    if not states:
        states = [input.new_zeros((input.size(0), hidden))] * len(cell.states)
    try:
        results: Sequence[Tensor] = _apply_step(cell, input, *states, *given)
    except RuntimeError:
        return None
    return results


def _is_plain(input: Tensor) -> bool:
    if type(input) not in _PLAIN or not (input.is_cuda or input.is_cpu):
        return False
    if not input.is_floating_point() or has_torch_function((input,)):  # a mode
        return False
    if tracing() or any_autocast() or transforms_active() or forward_mode():
        return False
    return not dispatch_modes()


def _recorded(input: Tensor, states: Sequence[Tensor], parameters: Sequence[Tensor]) -> bool | None:
    """Whether the call records gradients, for all parameters; None if the call is not plain."""
    recorded = is_grad_enabled() and any_requires_grad(input, *states, *parameters)
    for t in states:
        if type(t) not in _PLAIN:
            return None
    for p in parameters:
        if type(p) not in _PLAIN or (recorded and not p.requires_grad):
            return None
    return recorded


def _run(
    call: Call, input: Tensor, states: Sequence[Tensor], parameters: Sequence[Tensor], save: bool
) -> list[Tensor]:
    x = input.transpose(0, 1) if call.batch_first else input
    results: list[Tensor] = _layers(
        call.cell.name, x, states, parameters, call.layers, call.bidirectional, save
    )
    return results


class _Layers(SingleLevelFunction):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, call: Call, input: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call = call
        results = _run(call, input, rest[: call.states], rest[call.states :], True)
        count = 1 + len(call.cell.states)
        ctx.save_for_backward(input, *rest, *results[count:])
        return tuple(results[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        call, saved = ctx.call, ctx.saved_tensors
        cell, end = call.cell, 1 + call.states
        last = len(ctx.needs_input_grad) - 1  # of the tensors
        input, states, parameters = saved[0], saved[1:end], saved[end:last]
        needs = asked_for(ctx, call.layers * cell.work(input, saved[last]))[1:]
        if not is_compiling():
            again = differentiated() or transforms_active() or not are_plain(*grads)
            for grad in grads:  # in this frame: compiled autograd would compile another
                again = again or (grad is not None and batched(grad))
            if again:
                run = functools.partial(each_direction, call)
                return None, *_by_ops(run, saved[:last], grads, needs)
        of_input, of_states, of_parameters = needs[0], any(needs[1:end]), any(needs[end:])
        x = input.transpose(0, 1) if call.batch_first else input
        grad_output, grad_h_n, *of_carried = grads
        try:
            results = _layers_backward(
                cell.name,
                grad_output,
                grad_h_n,
                _carried.gradients(of_carried),
                x,
                states,
                parameters,
                call.layers,
                call.bidirectional,
                saved[last:],
                of_input,
                of_states,
                of_parameters,
            )
        except RuntimeError as error:
            raise_out_of_memory(error)
            raise
        if of_input and call.batch_first:
            results[0] = results[0].transpose(0, 1)
        return None, *_in_place(results, needs, end)


class _Step(SingleLevelFunction):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, cell: Cell, input: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.cell, count = cell, len(cell.states)
        no_bias = [None] * (len(cell.weights.names) - (len(rest) - count))
        op = getattr(ops, f"{cell.name}_cell_forward").default
        *new, gates = op(input, *rest[count:], *no_bias, *rest[:count])
        ctx.save_for_backward(input, *rest, gates)
        return tuple(new)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        cell, (*inputs, gates) = ctx.cell, ctx.saved_tensors
        end = 1 + len(cell.states)
        needs = asked_for(ctx, cell.work(inputs[0], inputs[1]))[1:]
        if not is_compiling():
            again = differentiated() or transforms_active() or not are_plain(*grads)
            for grad in grads:
                again = again or (grad is not None and batched(grad))
            if again:
                run = functools.partial(each_step, cell)
                return None, *_by_ops(run, inputs, grads, needs)
        if len(cell.states) < 2:
            grads = (*grads, None)
        try:
            results = _step_backward(
                cell.name,
                *grads,
                gates,
                inputs[0],
                inputs[1:end],
                inputs[end:],
                needs[0],
                any(needs[1:end]),
                any(needs[end:]),
            )
        except RuntimeError as error:
            raise_out_of_memory(error)
            raise
        return None, *_in_place(results, needs, end)


_apply, _apply_step = _Layers.apply, _Step.apply


def _in_place(results: list[Any], needs: Sequence[bool], end: int) -> list[Any]:
    """The gradients of all tensors, from those of the input, the states and the parameters that
    were needed; ``end``: of the states."""
    for first, last in ((0, 1), (1, end), (end, len(needs))):
        if not any(needs[first:last]):
            results[first:first] = [None] * (last - first)
    return results


def _by_ops(
    run: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """The gradients by the ops that ``run`` calls, which can be differentiated and mapped."""
    again = is_grad_enabled()
    with torch.enable_grad():
        # Views, so that an input that is computed from another has a gradient of its own.
        own = [t.view_as(t) for t in inputs]
        results = run(own)
        pairs = [(r, g) for r, g in zip(results, grads, strict=True) if g is not None]
        wanted = [t for t, need in zip(own, needs, strict=True) if need]
        found = iter(
            torch.autograd.grad(
                [r for r, _ in pairs],
                wanted,
                [g for _, g in pairs],
                create_graph=again,
                allow_unused=True,
            )
        )
    return [next(found) if need else None for need in needs]


def each_direction(call: Call, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same results as :func:`plain`'s before its last view, by the ops of each direction."""
    cell, directions = call.cell, 2 if call.bidirectional else 1
    cells, op = call.layers * directions, getattr(ops, cell.name).default
    input, states, parameters = tensors[0], tensors[1 : 1 + call.states], tensors[1 + call.states :]
    x = input.transpose(0, 1) if call.batch_first else input
    each = len(parameters) // cells
    if not states:
        states = [x.new_zeros((cells, x.size(1), call.hidden))] * len(cell.states)
    ends: list[list[Tensor]] = [[] for _ in states]
    outputs: list[Tensor] = []
    for k in range(cells):
        if k > 0 and k % directions == 0:
            x, outputs = torch.cat(outputs, 2) if directions > 1 else outputs[0], []
        back = k % directions == 1
        own = parameters[k * each : (k + 1) * each]
        output, *last = op(reverse(x, None) if back else x, *[s[k] for s in states], *own)
        outputs.append(reverse(output, None) if back else output)
        for end, state in zip(ends, last, strict=True):
            end.append(state)
    output = torch.cat(outputs, 2) if directions > 1 else outputs[0]
    return [output, *map(stacked, ends)]


def each_step(cell: Cell, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The same results as :func:`plain_step`'s, by the op of one step."""
    end = 1 + len(cell.states)
    op = getattr(ops, f"{cell.name}_cell").default
    no_bias = [None] * (len(cell.weights.names) - (len(tensors) - end))
    new = op(tensors[0], *tensors[end:], *no_bias, *tensors[1:end])
    return [new] if isinstance(new, Tensor) else new
