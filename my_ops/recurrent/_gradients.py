"""The gradients of a cell's ops: the first with the kernels of NAME_backward, further ones with the
formulas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import Parameter, Signature
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from my_ops._autograd import asked_for, differentiated, register_gradient, save
from my_ops._errors import raise_out_of_memory
from my_ops.ops._common import are_plain, ops
from my_ops.recurrent import _formulas, _weights_backward
from my_ops.recurrent._cell import OF_ROWS, Cell
from my_ops.recurrent._formulas import ALL_ROWS, Rows

Grads = tuple[Tensor | None, ...]
Call = Callable[..., Any]


def register(cell: Cell) -> tuple[Call, Call]:
    """Returns faster ways to call NAME_cell and NAME: see register_gradient."""
    states, calls = len(cell.states), []
    for name, function, arguments, results, saved in (
        (f"{cell.name}_cell", _step(cell), cell.step_arguments, states, 1),
        (cell.name, _layer(cell), cell.arguments, 1 + states, 1 + len(cell.carried)),
    ):
        function.__name__ = f"_{name}"
        optional = () if name.endswith("_cell") else (*cell.weights.optional, *OF_ROWS)
        signature = _signature(arguments, optional)
        function.forward.__signature__ = signature  # type: ignore[attr-defined]
        saving = _saving(function, results, saved)
        calls.append(register_gradient(getattr(ops, name).default, function, results))
        register_gradient(getattr(ops, f"{name}_forward").default, saving, results + saved)
    return calls[0], calls[1]


def _signature(names: Sequence[str], optional: Sequence[str]) -> Signature:
    """For register_gradient, which needs names and defaults. Optional arguments default to None."""
    kind, defaults = Parameter.POSITIONAL_OR_KEYWORD, dict.fromkeys(optional)
    return Signature([Parameter(n, kind, default=defaults.get(n, Parameter.empty)) for n in names])


def _run(op: Any, *args: Any) -> Any:
    try:
        return op(*args)
    except RuntimeError as error:
        raise_out_of_memory(error)
        raise


def _with_zeros(tangents: Sequence[Tensor | None], primals: Sequence[Any]) -> list[Any]:
    pairs = zip(tangents, primals, strict=True)
    return [torch.zeros_like(p) if t is None and p is not None else t for t, p in pairs]


def _asked(grads: Sequence[Tensor | None], needs: Sequence[bool]) -> list[Tensor | None]:
    return [grads[k] if need else None for k, need in enumerate(needs)]


def _without_what_takes_no_part(
    rows: Rows, lengths: Tensor | None, input: Tensor, states: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Both with 0 there. Such values must not reach sums, because 0 times NaN is NaN."""
    if rows.runs is None or lengths is None:
        return input, list(states)
    none = (lengths <= 0).unsqueeze(1)
    return input.masked_fill(~rows.runs, 0.0), [s.masked_fill(none, 0.0) for s in states]


def _is_a_step(grads: Sequence[Tensor | None], input: Tensor, *of_rows: Tensor | None) -> bool:
    """Whether NAME_cell_backward gives the same, which computes no gradient of h0: for one step of
    plain tensors, and the gradient of one of output and h_n."""
    if is_compiling() or not are_plain(input) or input.shape[0] != 1:
        return False
    return all(t is None for t in of_rows) and (grads[0] is None) != (grads[1] is None)


def _step(cell: Cell) -> type[torch.autograd.Function]:
    """For NAME_cell, whose arguments are the input, the parameters and the states."""
    weights, reads_h, count = cell.weights, cell.reads_h, len(cell.states)
    end = 1 + len(weights.names)  # of the parameters, where h is
    read = end if reads_h else end + 1
    forward_op = getattr(ops, f"{cell.name}_cell_forward").default
    backward_op = getattr(ops, f"{cell.name}_cell_backward").default

    class Step(torch.autograd.Function):
        @staticmethod
        def forward(*inputs: Tensor) -> tuple[Tensor, ...]:
            return forward_op(*inputs)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.set_materialize_grads(False)
            saved = isinstance(output, tuple) and len(output) > count
            save(ctx, *inputs, output[count] if saved else None)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> Grads:
            *inputs, gates = ctx.saved_tensors
            input, parameters, h = inputs[0], inputs[1:end], inputs[end]
            needs, hidden = asked_for(ctx, cell.work(input, h)), h.shape[1]
            grad_h: Tensor | None
            if gates is None or differentiated():
                one_step = input.unsqueeze(0), inputs[end:], parameters
                grad, grad_h, *grad_carried, _ = _formulas.gradient(
                    cell, (None, *grads), *one_step, ALL_ROWS
                )
                grad, which = grad.squeeze(0), (needs[0], False)
                input_gates = cell.of_input(grad)
                grad_x, _ = weights.grad_step(cell, grad, input_gates, hidden, which, *parameters)
            else:
                grad, *grad_carried = _run(backward_op, *grads, gates, *inputs[read:])
                direct = grad_carried.pop(0) if reads_h else None
                which, input_gates = (needs[0], needs[end]), cell.of_input(grad)
                grad_x, grad_h = weights.grad_step(
                    cell, grad, input_gates, hidden, which, *parameters
                )
                if direct is not None and grad_h is not None:
                    grad_h = grad_h + direct
            return (
                grad_x,
                *weights.grad_parameters(
                    cell, grad, (input_gates, 0), input, h, needs[1:end], *parameters
                ),
                *_asked([grad_h, *grad_carried], needs[end:]),
            )

        @staticmethod
        def jvp(ctx: Any, *tangents: Tensor | None) -> Grads:
            primals = ctx.saved_tensors[:-1]
            tensors = _with_zeros(tangents, primals)
            pair = [(t[0].unsqueeze(0), list(t[end:]), list(t[1:end])) for t in (primals, tensors)]
            return _formulas.jvp(cell, *pair[0], *pair[1], ALL_ROWS)[1:]

    return Step


def _layer(cell: Cell) -> type[torch.autograd.Function]:
    """For NAME, whose arguments are the input, the states, the parameters and OF_ROWS."""
    weights, reads_h, count = cell.weights, cell.reads_h, len(cell.states)
    start, end = 1 + count, 1 + count + len(weights.names)  # of the parameters
    recurrent = weights.names.index(weights.recurrent)
    results, missing = 1 + count, [None] * (1 + len(cell.carried))
    forward_op = getattr(ops, f"{cell.name}_forward").default
    backward_op = getattr(ops, f"{cell.name}_backward").default
    step_op = getattr(ops, f"{cell.name}_cell_backward").default

    class Layer(torch.autograd.Function):
        @staticmethod
        def forward(*inputs: Any) -> tuple[Tensor, ...]:
            return forward_op(*inputs)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.set_materialize_grads(False)
            save(ctx, *inputs, output[0], *(output[results:] or missing))

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> Grads:
            saved = ctx.saved_tensors
            input, states, parameters = saved[0], saved[1:start], saved[start:end]
            needs = asked_for(ctx, cell.work(input, states[0]))
            lengths, reset, zoneout, output, gates, *sequences = saved[end:]
            rows = Rows.of(input, lengths, reset, zoneout)
            input, states = _without_what_takes_no_part(rows, lengths, input, states)
            by_formula = gates is None or differentiated()
            grad_states: Sequence[Tensor | None]
            if by_formula:
                grad, *grad_states, output = _formulas.gradient(
                    cell, grads, input, states, parameters, rows
                )
            elif not needs[1] and _is_a_step(grads, input, lengths, reset, zoneout):
                grad_output, grad_h = grads[:2]
                grad_h = grad_h if grad_output is None else grad_output.squeeze(0)
                read = states if reads_h else states[1:]
                grad, *grad_states = _run(step_op, grad_h, *grads[2:], gates.squeeze(0), *read)
                grad = grad.unsqueeze(0)
                grad_states = grad_states if reads_h else [None, *grad_states]
            else:
                read = [output, *sequences, *states] if reads_h else [*sequences, *states[1:]]
                grad, *grad_states = _run(
                    backward_op,
                    *grads,
                    gates,
                    *read,
                    parameters[recurrent],
                    lengths,
                    reset,
                    zoneout,
                )
            grad_input: Tensor | None = None
            grad_parameters: Sequence[Tensor | None] = [None] * len(parameters)
            trains, h0 = any(needs[start:end]), states[0]
            if (
                trains
                and lengths is None
                and not by_formula
                and weights.heads(h0.shape[1], *parameters) == 1
                and _weights_backward.takes(
                    cell, grad, input, h0, reset, needs[start:end], output, *parameters
                )
            ):
                grad_input, grad_parameters = _weights_backward.gradients(
                    cell, grad, input, h0, output, reset, needs[0], *parameters
                )
            else:
                input_gates = cell.input_range(grad)
                if needs[0]:
                    grad_input = weights.grad_input(input_gates, h0.shape[1], *parameters)
                if trains:
                    before = rows.before(h0, output)
                    grad_parameters = weights.grad_parameters(
                        cell, grad, input_gates, input, before, needs[start:end], *parameters
                    )
            return (
                grad_input,
                *_asked(grad_states, needs[1:start]),
                *_asked(grad_parameters, needs[start:end]),
                *[None] * len(OF_ROWS),
            )

        @staticmethod
        def jvp(ctx: Any, *tangents: Tensor | None) -> Grads:
            *primals, lengths, reset, zoneout = ctx.saved_tensors[: end + len(OF_ROWS)]
            tensors = _with_zeros(tangents[:end], primals)
            rows = Rows.of(primals[0], lengths, reset, zoneout)
            part = _without_what_takes_no_part(rows, lengths, primals[0], primals[1:start])
            primals[0], primals[1:start] = part
            if rows.runs is not None:
                tensors[0] = tensors[0].masked_fill(~rows.runs, 0.0)
            pair = [(t[0], t[1:start], t[start:]) for t in (primals, tensors)]
            return _formulas.jvp(cell, *pair[0], *pair[1], rows)

    return Layer


def _saving(
    function: type[torch.autograd.Function], results: int, saved: int
) -> type[torch.autograd.Function]:
    """For the op that returns what backward needs, for transforms around one that runs it."""

    class Saving(function):  # type: ignore[misc, valid-type]
        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            function.setup_context(ctx, inputs, output)
            ctx.mark_non_differentiable(*output[results:])

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> Grads:
            return function.backward(ctx, *grads[:results])

        @staticmethod
        def jvp(ctx: Any, *tangents: Tensor | None) -> Grads:
            return *function.jvp(ctx, *tangents), *[None] * saved

    return Saving
