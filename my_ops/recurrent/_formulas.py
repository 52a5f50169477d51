"""The ops over time, computed step by step with a cell's formulas: like the kernels, but
differentiable.

They are used for second gradients and forward mode, and for vmap over parameters, where all tensors
have one more dimension in front. The arithmetic has the tensors' type.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from my_ops._autograd import differentiated
from my_ops._private import transforms_active
from my_ops.ops._common import ops
from my_ops.recurrent import _heads
from my_ops.recurrent._cell import Cell
from my_ops.recurrent._weights import Linear, heads_of

Tensors = Sequence[Tensor]
Parameters = Sequence[Any]  # optional ones may be None


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which the ops compute, and in which they keep what a unit carries besides h."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def in_compute_dtype(tensors: Sequence[Any]) -> list[Any]:
    return [None if t is None else t.to(compute_dtype(t.dtype)) for t in tensors]


def running_steps(input: Tensor, lengths: Tensor) -> Tensor:
    """Whether a row still runs, ``(*, steps, batch, 1)``. Without arange, because of DTensor."""
    steps = input.new_ones(input.shape[:-1], dtype=torch.int64).cumsum(-2)
    return (steps <= lengths.unsqueeze(-2)).unsqueeze(-1)


class Rows(NamedTuple):
    """What a step does to a row, ``(*, steps, batch, 1)``, for all steps or for one.

    ``runs``: whether the row still runs, or None if all do. ``reset``: whether its state is zero
    before the step, or None if none is. A row that has ended is not reset. ``zoneout``,
    ``(*, steps, batch, hidden)``: the fraction of h that stays from before the step, or None.
    """

    runs: Tensor | None = None
    reset: Tensor | None = None
    zoneout: Tensor | None = None

    @staticmethod
    def of(
        input: Tensor, lengths: Tensor | None, reset: Tensor | None, zoneout: Tensor | None
    ) -> Rows:
        """Makes them from an op's arguments. ``input`` may be any tensor ``(*, steps, batch,
        .)``."""
        runs = None if lengths is None else running_steps(input, lengths)
        if reset is not None:
            reset = reset.unsqueeze(-1)
            reset = reset if runs is None else reset & runs
        return Rows(runs, reset, zoneout)

    def at(self, t: int) -> Rows:
        return Rows(*(None if mask is None else mask.select(-3, t) for mask in self))

    def run(self, yes: Tensor, no: Tensor | float) -> Tensor:
        """``yes`` in rows that run, otherwise ``no``."""
        return yes if self.runs is None else torch.where(self.runs, yes, no)

    def clear(self, tensors: Sequence[Any]) -> list[Any]:
        """For states before a step, their tangents or gradients. Selects, because 0 times NaN is
        NaN."""
        if self.reset is None:
            return list(tensors)
        return [None if t is None else torch.where(self.reset, 0.0, t) for t in tensors]

    def before(self, h0: Tensor, output: Tensor) -> Tensor:
        """h before every step, cleared."""
        values = 8 // output.element_size()
        # torch 2.10 has no rule of vmap for views of another type.
        plain = type(output) is Tensor and not (transforms_active() or differentiated())
        in_eights = plain and output.shape[-1] % values == output.storage_offset() % values == 0
        if self.reset is None or not in_eights:
            return self.clear([torch.cat([h0.unsqueeze(0), output])[:-1]])[0]
        # In one pass. torch's kernel is bound by elements, so it gets elements of eight bytes.
        result = torch.empty_like(output, memory_format=torch.contiguous_format)
        eight, zero = result.view(torch.int64), output.new_zeros((), dtype=torch.int64)
        result[:1].copy_(h0)
        eight[:1].masked_fill_(self.reset[:1], 0)
        old = output[:-1].contiguous().view(torch.int64)
        torch.where(self.reset[1:], zero, old, out=eight[1:])
        return result

    def mix(self, new: Tensor, old: Tensor) -> Tensor:
        """h, or its tangent, from the cell's and the one before the step."""
        return new if self.zoneout is None else self.zoneout * old + (1 - self.zoneout) * new


ALL_ROWS = Rows()


def _product(x: Tensor, linear: Linear) -> Tensor:
    weight, bias = linear
    if weight.dim() == 2:
        return ops.linear(x, weight, bias)
    y = ops.gemm(x.flatten(1, -2), weight.mT)
    return (y if bias is None else y + bias.unsqueeze(1)).unflatten(1, x.shape[1:-1])


class _OfH(NamedTuple):
    """The product with h. Of several heads the weight is ``(*, heads, gates * units, units)``."""

    weight: Tensor
    bias: Tensor | None
    gates: int
    heads: int

    @staticmethod
    def of(cell: Cell, hidden: int, linear: Linear) -> _OfH:
        weight, bias = linear
        heads = heads_of(hidden, weight)
        if heads > 1:
            weight = _heads.of_weight(weight, heads, cell.gates)
        return _OfH(weight, bias, cell.gates, heads)

    def product(self, h: Tensor) -> Tensor:
        if self.heads == 1:
            return _product(h, (self.weight, self.bias))
        parts = _heads.product(ops.gemm, _heads.of_rows(h, self.heads, 1), self.weight.mT)
        y = _heads.joined_rows(parts, self.gates)
        return y if self.bias is None else y + self.bias.unsqueeze(-2)

    def gradient(self, grad: Tensor) -> Tensor:
        """That of h, from that of the product."""
        if self.heads == 1:
            return ops.gemm(grad, self.weight)
        parts = _heads.of_rows(grad, self.heads, self.gates)
        return _heads.joined_rows(_heads.product(ops.gemm, parts, self.weight), 1)


class Step(NamedTuple):
    """What backward reads of a step. States are h, and then what is carried."""

    before: Sequence[Any]  # cleared; h is None if the cell does not read it
    after: Sequence[Any]
    saved: tuple[Tensor, ...]
    rows: Rows


def _stack(steps: list[Tensor], like: Tensor, columns: int) -> Tensor:
    """If there are no steps, the shape comes from ``like``, ``(*, steps, batch, .)``."""
    return torch.stack(steps, -3) if steps else like.new_empty((*like.shape[:-1], columns))


def _walk(
    cell: Cell, input: Tensor, states: Tensors, parameters: Parameters, rows: Rows
) -> Iterator[Step]:
    hidden = states[0].shape[-1]
    of_input, linear = cell.weights.linears(cell, hidden, *parameters)
    of_h = _OfH.of(cell, hidden, linear)
    vectors = cell.weights.vectors_of(*parameters)
    input_gates = _product(input, of_input)
    for t in range(input.shape[-3]):  # DTensor cannot unbind a sharded dimension
        here = rows.at(t)
        h, *carried = states = here.clear(states)
        z = cell.join(input_gates.select(-3, t), of_h.product(h), vectors)
        new_h, new_carried, saved = cell.forward(z, h, tuple(carried))
        new = (here.mix(new_h, h), *new_carried)
        after = [here.run(n, s) for n, s in zip(new, states, strict=True)]
        yield Step(states, after, saved, here)
        states = after


def forward(
    cell: Cell, input: Tensor, states: Tensors, parameters: Parameters, rows: Rows
) -> tuple[Tensor, ...]:
    """The results of NAME_forward: the output, the last states, the saved values, the sequences."""
    hidden = states[0].shape[-1]
    steps = list(_walk(cell, input, states, parameters, rows))
    outputs = [s.rows.run(s.after[0], 0.0) for s in steps]
    all_saved = [torch.cat(list(map(s.rows.run, s.saved, cell.shut)), -1) for s in steps]
    sequences = [[s.after[k] for s in steps] for k in range(1, len(states))]
    return (
        _stack(outputs, input, hidden),
        *(steps[-1].after if steps else states),
        _stack(all_saved, input, cell.saved * hidden),
        *(_stack(sequence, input, hidden) for sequence in sequences),
    )


def _walk_back(
    cell: Cell, grads: Sequence[Tensor | None], steps: Sequence[Step], of_h: Tensor, zeros: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients of the terms of every step, and of the states before the first step."""
    grad_output, *grad_last = grads
    through = _OfH.of(cell, zeros.shape[-1], (of_h, None))
    grad_states = [zeros if g is None else g.to(zeros.dtype) for g in grad_last]
    terms: list[Tensor] = []
    for t in range(len(steps) - 1, -1, -1):
        before, after, saved, rows = steps[t]
        if grad_output is not None:
            h_too = grad_states[0] + grad_output.select(-3, t)
            grad_states[0] = rows.run(h_too, grad_states[0])
        grad_h, *grad_carried = (rows.run(g, 0.0) for g in grad_states)
        stays = None if rows.zoneout is None else rows.zoneout * grad_h
        grad_h = grad_h if stays is None else grad_h - stays
        grad_z, direct, grad_carried_before = cell.backward(
            saved, tuple(before[1:]), tuple(after[1:]), before[0], grad_h, tuple(grad_carried)
        )
        terms.append(rows.run(cell.store(grad_z), 0.0))
        grad_h = through.gradient(cell.of_h(terms[-1]))
        grad_h = grad_h if direct is None else grad_h + direct
        new = (grad_h if stays is None else grad_h + stays, *grad_carried_before)
        kept_or_new = (rows.run(n, g) for n, g in zip(new, grad_states, strict=True))
        grad_states = rows.clear(list(kept_or_new))
    return terms[::-1], grad_states


def backward(
    cell: Cell,
    grads: Sequence[Tensor | None],
    all_saved: Tensor,
    sequences: Sequence[Tensor | None],
    states: Sequence[Tensor | None],
    of_h: Tensor,
    rows: Rows,
) -> tuple[Tensor, ...]:
    """The results of NAME_backward: the gradients of the terms of all steps, and of the states.

    ``grads`` are those of the output and of the last states. ``sequences`` are h and what is
    carried after every step, and ``states`` the same before the first; h is None if the cell does
    not read it. ``of_h`` is the matrix of the product with h.
    """
    steps, before = [], states
    for t in range(all_saved.shape[-3]):
        after = [None if s is None else s.select(-3, t) for s in sequences]
        saved, here = all_saved.select(-3, t).chunk(cell.saved, -1), rows.at(t)
        steps.append(Step(here.clear(before), after, saved, here))
        before = after
    hidden = all_saved.shape[-1] // cell.saved
    zeros = all_saved.new_zeros((*all_saved.shape[:-3], all_saved.shape[-2], hidden))
    terms, grad_states = _walk_back(cell, grads, steps, of_h, zeros)
    return _stack(terms, all_saved, cell.terms * hidden), *grad_states


def forward_of_op(
    cell: Cell, input: Tensor, states: Tensors, parameters: Parameters, rows: Rows
) -> tuple[Tensor, ...]:
    """The results of NAME_forward, computed and returned in the types of the op."""
    dtype = input.dtype
    input, *states = in_compute_dtype([input, *states])
    results = forward(cell, input, states, in_compute_dtype(parameters), rows)
    return tuple(t.to(dtype) for t in results)


def backward_of_op(
    cell: Cell,
    grads: Sequence[Tensor | None],
    all_saved: Tensor,
    read: Tensors,
    of_h: Tensor,
    rows: Rows,
) -> tuple[Tensor, ...]:
    """The results of NAME_backward, likewise. ``read`` are the sequences and then the states that
    the cell reads."""
    dtype = all_saved.dtype
    all_saved, of_h, *given = in_compute_dtype([all_saved, of_h, *read])
    half = len(given) // 2
    sequences, states = given[:half], given[half:]
    if not cell.reads_h:
        sequences, states = [None, *sequences], [None, *states]
    results = backward(cell, grads, all_saved, sequences, states, of_h, rows)
    return tuple(t.to(dtype) for t in results)


def gradient(
    cell: Cell,
    grads: Sequence[Tensor | None],
    input: Tensor,
    states: Tensors,
    parameters: Parameters,
    rows: Rows,
) -> tuple[Tensor, ...]:
    """The results of NAME_backward, and the output, from the arguments of the op."""
    dtype, count, hidden = input.dtype, len(states), states[0].shape[-1]
    input, *rest = in_compute_dtype([input, *states, *parameters])
    states, parameters = rest[:count], rest[count:]
    steps = list(_walk(cell, input, states, parameters, rows))
    of_h = cell.weights.linears(cell, hidden, *parameters)[1][0]
    terms, grad_states = _walk_back(cell, grads, steps, of_h, torch.zeros_like(states[0]))
    output = _stack([s.after[0] for s in steps], input, hidden)
    grad = _stack(terms, input, cell.terms * hidden)
    return tuple(t.to(dtype) for t in (grad, *grad_states, output))


def jvp(
    cell: Cell,
    input: Tensor,
    states: Tensors,
    parameters: Parameters,
    input_t: Tensor,
    states_t: Tensors,
    parameters_t: Parameters,
    rows: Rows,
) -> tuple[Tensor, ...]:
    """The tangents of the output and of the last states, from those of the arguments."""
    dtype, hidden = input.dtype, states[0].shape[-1]
    input, input_t = in_compute_dtype([input, input_t])
    states, states_t = in_compute_dtype(states), in_compute_dtype(states_t)
    parameters, parameters_t = in_compute_dtype(parameters), in_compute_dtype(parameters_t)
    primals = cell.weights.linears(cell, hidden, *parameters)
    tangents = cell.weights.linears(cell, hidden, *parameters_t)
    of_input, linear = primals
    of_h = _OfH.of(cell, hidden, linear)
    of_h_t = _OfH.of(cell, hidden, tangents[1])
    through = _OfH.of(cell, hidden, (linear[0], None))
    vectors = cell.weights.vectors_of(*parameters)
    vectors_t = cell.weights.vectors_of(*parameters_t)
    input_gates = _product(input, of_input)
    shares_t = _product(input_t, (of_input[0], None)) + _product(input, tangents[0])
    outputs_t = []
    for t in range(input.shape[-3]):
        here = rows.at(t)
        h, *carried = states = here.clear(states)
        states_t = here.clear(states_t)
        z = cell.join(input_gates.select(-3, t), of_h.product(h), vectors)
        product_t = through.product(states_t[0]) + of_h_t.product(h)
        z_t = cell.join(shares_t.select(-3, t), product_t, vectors_t)
        new_h, new_carried, saved = cell.forward(z, h, tuple(carried))
        new = (here.mix(new_h, h), *new_carried)
        new_t = [
            _pushed(cell, k, saved, states, new, (*z_t, *states_t)) for k in range(len(states))
        ]
        new_t[0] = here.mix(new_t[0], states_t[0])
        states = [here.run(n, s) for n, s in zip(new, states, strict=True)]
        states_t = [here.run(n, s) for n, s in zip(new_t, states_t, strict=True)]
        outputs_t.append(here.run(states_t[0], 0.0))
    results = (_stack(outputs_t, input_t, hidden), *states_t)
    return tuple(t.to(dtype) if outputs_t else t.clone().to(dtype) for t in results)


def _pushed(
    cell: Cell, k: int, saved: Tensors, before: Tensors, after: Tensors, tangents: Tensors
) -> Tensor:
    """The tangent of state ``k`` after a step. A unit's Jacobian has a row for each of its states,
    which is the result of backward for a gradient of 1 in that state and 0 elsewhere."""
    grads = [torch.ones_like(s) if i == k else torch.zeros_like(s) for i, s in enumerate(after)]
    grad_z, grad_h, grad_carried = cell.backward(
        tuple(saved), tuple(before[1:]), tuple(after[1:]), before[0], grads[0], tuple(grads[1:])
    )
    row = (*grad_z, grad_h, *grad_carried)
    terms = [slope * t for slope, t in zip(row, tangents, strict=True) if slope is not None]
    return sum(terms[1:], terms[0])
