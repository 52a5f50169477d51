"""Plain calls of a layer: one op for all layers and directions, and one for their gradients; of a
cell, one op for its gradients.

Around these ops is little Python, which is what takes the time of a small layer. A call is plain if
nothing but autograd, in reverse mode, watches it: :func:`plain`. All others run the ops of each
direction, as do second gradients and those that a transform maps.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_compiling
from torch.overrides import has_torch_function
from torch.utils.flop_counter import register_flop_formula

from my_ops._autograd import asked_for, differentiated
from my_ops._errors import raise_out_of_memory
from my_ops._plain import plain_call
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
    op, directions = "recurrent_layers", 2 if bidirectional else 1
    cell = _of_name(name, op)
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
    op = "recurrent_layers_backward"
    cell = _of_name(name, op)
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
    cell = _of_name(name, "recurrent_step_backward")
    _checks.check_step_gradients(cell, (grad_h, grad_cell), gates, input, states, parameters)
    shapes = ([t.shape for t in some] for some in ([input], states, parameters))
    return _made(input, needs, *shapes)


@register_flop_formula(_layers_backward.overloadpacket)
def _layers_backward_flop(name: str, *shapes: Any, **_: Any) -> int:
    """Of each layer but the first the gradient of the input, the gradients of all parameters or of
    none, and the product with the recurrent weight in each step."""
    _, _, _, x, _, parameters, layers, both, _, of_input, _, of_parameters = shapes
    cell, rows = _of_name(name, "recurrent_layers_backward"), x[0] * x[1]
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
    recurrent, every = _products(_of_name(name, "recurrent_step_backward"), parameters)
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


def _of_name(name: str, op: str = "recurrent_layers") -> Cell:
    for cell in (*CELLS, *OWN_CELLS):
        if cell.name == name:
            return cell
    raise RuntimeError(f"{op}: cell must be the name of a recurrent op, got '{name}'")


class Call(NamedTuple):
    """What a call is besides its tensors: the input, the states if any, and the parameters."""

    name: str  # of the cell
    kinds: int  # of states
    hidden: int
    states: int  # how many are given; none: zeros
    layers: int  # 0: one step
    bidirectional: bool
    batch_first: bool

    def in_time(self, t: Tensor) -> Tensor:
        return t.transpose(0, 1) if self.batch_first else t


def plain(
    layer: Any, cell: Cell, input: Tensor, states: Sequence[Tensor]
) -> Sequence[Tensor] | None:
    """The output and the states at the end, or None if the call is not plain or fails: then the
    ops of each direction raise what there is to raise. ``states``: before the first step, or
    none."""
    if is_compiling() or input.dim() != 3:
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
    if layer._was_torchs:
        along = input.transpose(0, 1) if batch_first else input
        of_torch = layer._for_torch(along, None, states, None, None)
        if of_torch is not None:
            first = layer._initial(along, list(states) or None, False)
            output, last = layer._torchs(along, None, first, of_torch)
            return output.transpose(0, 1) if batch_first else output, *last
    if not cell.runs_at_once(layer, input):
        return None
    kinds, count = len(cell.states), len(states)
    call = cell.name, kinds, hidden, count, layers, both, batch_first
    results: Sequence[Tensor] | None = _call(*call, input, *states, *layer._in_a_row())
    return results


def plain_step(
    cell: Cell,
    hidden: int,
    input: Tensor,
    states: Sequence[Tensor],
    parameters: Sequence[Tensor | None],
) -> Sequence[Tensor] | None:
    """The same for one step: the new states."""
    if is_compiling():
        return None
    given = [p for p in parameters if p is not None]
    call = cell.name, len(cell.states), hidden, len(states), 0, False, False
    new: Sequence[Tensor] | None = _call(*call, input, *states, *given)
    return new


# ---------------------------------------------------------- without the module of csrc/calls


def in_python(*arguments: Any) -> Sequence[Tensor] | None:
    """What csrc/calls/recurrent.cpp does with the same arguments: those of Call, and the tensors.
    A step without a gradient has no Python to save."""
    call, tensors = Call(*arguments[:7]), arguments[7:]
    input, first = tensors[0], 1 + call.states
    if not _is_plain(input) or (call.layers == 0 and input.dim() != 2):
        return None
    recorded = _recorded(input, tensors[1:first], tensors[first:])
    if recorded is None or (call.layers == 0 and not recorded):
        return None
    if call.layers == 0 and call.states == 0:
        zeros = input.new_zeros((input.size(0), call.hidden))
        call = Call(call.name, call.kinds, call.hidden, call.kinds, *call[4:])
        tensors = input, *[zeros] * call.kinds, *tensors[1:]
    try:
        results = _apply(call, *tensors) if recorded else _forward(call, tensors, False)
    except RuntimeError:
        return None
    output, *last = results
    return call.in_time(output), *last


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


def _forward(call: Call, tensors: Sequence[Tensor], save: bool) -> Sequence[Tensor]:
    """The results, and with ``save`` what backward reads."""
    first = 1 + call.states
    if call.layers == 0:
        cell, parameters = _of_name(call.name), tensors[first:]
        no_bias = [None] * (len(cell.weights.names) - len(parameters))
        op = getattr(ops, f"{cell.name}_cell_forward").default
        new: Sequence[Tensor] = op(tensors[0], *parameters, *no_bias, *tensors[1:first])
        return new
    sizes = call.layers, call.bidirectional, save
    x, states, parameters = call.in_time(tensors[0]), tensors[1:first], tensors[first:]
    results: Sequence[Tensor] = _layers(call.name, x, states, parameters, *sizes)
    return results


def _backward(
    call: Call,
    grads: Sequence[Tensor | None],
    tensors: Sequence[Tensor],
    kept: Sequence[Tensor],
    needs: Sequence[bool],
) -> list[Any]:
    """The gradients of the input, of all states and of all parameters: of those that are needed."""
    first = 1 + call.states
    x, states, parameters = call.in_time(tensors[0]), tensors[1:first], tensors[first:]
    if call.layers == 0:
        both = grads if call.kinds > 1 else (*grads, None)
        found: list[Any] = _step_backward(call.name, *both, *kept, x, states, parameters, *needs)
        return found
    given = *grads[:2], _carried.gradients(grads[2:])
    sizes = call.layers, call.bidirectional
    found = _layers_backward(call.name, *given, x, states, parameters, *sizes, kept, *needs)
    if needs[0]:
        found[0] = call.in_time(found[0])
    return found


class _Recurrent(SingleLevelFunction):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call = call
        results = _forward(call, tensors, True)
        count = call.kinds + (call.layers > 0)
        ctx.save_for_backward(*tensors, *results[count:])
        return tuple(results[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        call, saved, first = ctx.call, ctx.saved_tensors, 1 + ctx.call.states
        count = len(ctx.needs_input_grad) - 1  # of the tensors
        tensors, kept = saved[:count], saved[count:]
        row = tensors[1] if call.layers == 0 else kept[0]
        work = max(1, call.layers) * _of_name(call.name).work(tensors[0], row)
        needs = asked_for(ctx, work)[1:]
        if not is_compiling():
            again = differentiated() or transforms_active() or not are_plain(*grads)
            for grad in grads:  # in this frame: compiled autograd would compile another
                again = again or (grad is not None and batched(grad))
            if again:
                return None, *_by_ops(call, tensors, grads, needs)
        ranges = (0, 1), (1, first), (first, count)
        of_each = [any(needs[begin:end]) for begin, end in ranges]
        try:
            results = _backward(call, grads, tensors, kept, of_each)
        except RuntimeError as error:
            raise_out_of_memory(error)
            raise
        for need, (begin, end) in zip(of_each, ranges, strict=True):
            if not need:
                results[begin:begin] = [None] * (end - begin)
        return None, *results


_apply = _Recurrent.apply
_call = plain_call("recurrent", in_python)


def _by_ops(
    call: Call, tensors: Sequence[Tensor], grads: Sequence[Tensor | None], needs: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients by ops that can be differentiated and mapped."""
    again = is_grad_enabled()
    with torch.enable_grad():
        # Views, so that an input that is computed from another has a gradient of its own.
        own = [t.view_as(t) for t in tensors]
        results = _each_direction(call, own) if call.layers else _step(call, own)
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


def _each_direction(call: Call, tensors: Sequence[Tensor]) -> list[Tensor]:
    """All steps by the op of each layer and direction."""
    directions = 2 if call.bidirectional else 1
    cells, op = call.layers * directions, getattr(ops, call.name).default
    states, parameters = tensors[1 : 1 + call.states], tensors[1 + call.states :]
    x = call.in_time(tensors[0])
    each = len(parameters) // cells
    if not states:
        states = [x.new_zeros((cells, x.size(1), call.hidden))] * call.kinds
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


def _step(call: Call, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """One step by its op."""
    first, op = 1 + call.states, getattr(ops, f"{call.name}_cell").default
    no_bias = [None] * (len(_of_name(call.name).weights.names) - (len(tensors) - first))
    new = op(tensors[0], *tensors[first:], *no_bias, *tensors[1:first])
    return [new] if isinstance(new, Tensor) else new
