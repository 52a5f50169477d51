"""LLTM, cell and layer. Per op: fake kernel (metadata for tracing), gradient, public function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.overrides import handle_torch_function, has_torch_function

from my_ops._autograd import differentiated, register_gradient, save
from my_ops._errors import raise_out_of_memory
from my_ops.ops import _checks
from my_ops.ops._common import check_tensor, fake, ops
from my_ops.ops.gemm import _gemm, as_rows

# ----------------------------------------------------------------------------------- lltm_cell


@fake("my_ops::lltm_cell")
def _(
    input: Tensor, weights: Tensor, bias: Tensor, old_h: Tensor, old_cell: Tensor
) -> tuple[Tensor, Tensor]:
    _checks.check_lltm_cell(input, weights, bias, old_h, old_cell)
    return old_h.new_empty(old_h.shape), old_cell.new_empty(old_cell.shape)


@fake("my_ops::lltm_cell_forward")
def _(
    input: Tensor, weights: Tensor, bias: Tensor, old_h: Tensor, old_cell: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    _checks.check_lltm_cell(input, weights, bias, old_h, old_cell)
    return (
        old_h.new_empty(old_h.shape),
        old_cell.new_empty(old_cell.shape),
        old_h.new_empty((old_h.shape[0], 3 * old_h.shape[1])),
    )


@fake("my_ops::lltm_cell_backward")
def _(
    grad_h: Tensor | None, grad_cell: Tensor | None, gates: Tensor, old_cell: Tensor
) -> tuple[Tensor, Tensor]:
    _checks.check_lltm_cell_backward(grad_h, grad_cell, gates, old_cell)
    return gates.new_empty(gates.shape), old_cell.new_empty(old_cell.shape)


def _cell_gates_backward(
    grad_h: Tensor | None,
    grad_cell: Tensor | None,
    input: Tensor,
    weights: Tensor,
    bias: Tensor,
    old_h: Tensor,
    old_cell: Tensor,
) -> tuple[Tensor, Tensor]:
    """What ``lltm_cell_backward`` computes, from the inputs and differentiable again."""
    z = ops.linear(torch.cat([old_h, input], dim=1), weights, bias.reshape(-1))
    z_i, z_o, z_g = z.chunk(3, dim=1)
    i, o = torch.sigmoid(z_i), torch.sigmoid(z_o)
    below = torch.clamp(z_g, max=0.0)
    g = torch.where(z_g > 0, z_g, torch.expm1(below))  # elu, which DTensor lacks before torch 2.13
    squashed = torch.tanh(old_cell + g * i)
    grad_h = torch.zeros_like(old_h) if grad_h is None else grad_h
    grad_cell = torch.zeros_like(old_cell) if grad_cell is None else grad_cell
    grad_cell = grad_cell + grad_h * o * (1 - squashed * squashed)
    elu_slope = torch.where(z_g > 0, 1.0, torch.exp(below))
    grad_gates = torch.cat(
        [
            grad_cell * g * ops.d_sigmoid(z_i),
            grad_h * squashed * ops.d_sigmoid(z_o),
            grad_cell * i * elu_slope,
        ],
        dim=1,
    )
    return grad_gates, grad_cell


def _with_zeros(tangents: tuple[Tensor | None, ...], primals: list[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(p) if t is None else t for t, p in zip(tangents, primals, strict=True)]


def _cell_jvp(primals: list[Tensor], tangents: list[Tensor]) -> tuple[Tensor, ...]:
    """``new_h, new_cell`` and their tangents."""
    input, weights, bias, old_h, old_cell = primals
    input_t, weights_t, bias_t, old_h_t, old_cell_t = tangents
    both = torch.cat([old_h, input], dim=1)
    z = ops.linear(both, weights, bias.reshape(-1))
    z_t = ops.linear(torch.cat([old_h_t, input_t], dim=1), weights)
    z_t = z_t + ops.linear(both, weights_t, bias_t.reshape(-1))
    (z_i, z_o, z_g), (z_i_t, z_o_t, z_g_t) = z.chunk(3, dim=1), z_t.chunk(3, dim=1)
    i, o, g = torch.sigmoid(z_i), torch.sigmoid(z_o), torch.nn.functional.elu(z_g)
    elu_slope = torch.where(z_g > 0, 1.0, torch.exp(torch.clamp(z_g, max=0.0)))
    cell = old_cell + g * i
    cell_t = old_cell_t + elu_slope * z_g_t * i + g * ops.d_sigmoid(z_i) * z_i_t
    squashed = torch.tanh(cell)
    h_t = (1 - squashed * squashed) * cell_t * o + squashed * ops.d_sigmoid(z_o) * z_o_t
    return squashed * o, cell, h_t, cell_t


class _LLTMCell(torch.autograd.Function):
    @staticmethod
    def forward(
        input: Tensor, weights: Tensor, bias: Tensor, old_h: Tensor, old_cell: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return ops.lltm_cell_forward(input, weights, bias, old_h, old_cell)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        gates = output[2] if len(output) > 2 else None
        ctx.set_materialize_grads(False)
        save(ctx, *inputs, gates)

    @staticmethod
    def backward(
        ctx: Any, grad_h: Tensor | None, grad_cell: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        *inputs, gates = ctx.saved_tensors
        input, weights, bias, old_h, old_cell = inputs
        if gates is None or differentiated():
            grad_gates, grad_old_cell = _cell_gates_backward(grad_h, grad_cell, *inputs)
        else:
            try:
                grad_gates, grad_old_cell = ops.lltm_cell_backward(
                    grad_h, grad_cell, gates, old_cell
                )
            except RuntimeError as error:
                raise_out_of_memory(error)
                raise
        hidden = old_h.shape[1]
        needs = ctx.needs_input_grad
        grad_input = grad_weights = grad_bias = grad_h0 = None
        if needs[0] and needs[3]:
            grad_h0, grad_input = _gemm(grad_gates, weights, None).tensor_split([hidden], dim=1)
        elif needs[0]:
            grad_input = _gemm(grad_gates, weights[:, hidden:], None)
        elif needs[3]:
            grad_h0 = _gemm(grad_gates, weights[:, :hidden], None)
        if needs[1]:
            grad_weights = _gemm(grad_gates.mT, torch.cat([old_h, input], dim=1), None)
        if needs[2]:
            grad_bias = grad_gates.sum(0).reshape(bias.shape)
        return grad_input, grad_weights, grad_bias, grad_h0, grad_old_cell if needs[4] else None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        primals = list(ctx.saved_tensors[:5])
        return _cell_jvp(primals, _with_zeros(tangents, primals))[2:]


class _LLTMCellForward(_LLTMCell):
    """Of the op that saves the gates, for transforms around one that runs it."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _LLTMCell.setup_context(ctx, inputs, output)
        ctx.mark_non_differentiable(output[2])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return _LLTMCell.backward(ctx, *grads[:2])

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        return *_LLTMCell.jvp(ctx, *tangents), None


_lltm_cell = register_gradient(ops.lltm_cell.default, _LLTMCell, returns=2)
register_gradient(ops.lltm_cell_forward.default, _LLTMCellForward, returns=3)


def lltm_cell(
    input: Tensor, weights: Tensor, bias: Tensor, old_h: Tensor, old_cell: Tensor
) -> tuple[Tensor, Tensor]:
    """One step of LLTM, a recurrent unit with three gates and no forget gate.

    ``gates = [old_h, input] @ weights.T + bias`` in the order input, output, candidate;
    ``i, o = sigmoid``; ``g = elu``; ``new_cell = old_cell + g * i``; ``new_h = tanh(new_cell) *
    o``. Source: the PyTorch tutorial on custom C++ and CUDA extensions.

    Args:
        input: ``(batch, input_size)``, dtype float64, float32, float16 or bfloat16.
        weights: ``(3 * hidden_size, hidden_size + input_size)``.
        bias: ``(3 * hidden_size,)`` or ``(1, 3 * hidden_size)``.
        old_h, old_cell: ``(batch, hidden_size)``.

    Returns:
        ``(new_h, new_cell)``, both ``(batch, hidden_size)``. The 16-bit types compute in float32.
        The gradient goes to all five and can be differentiated again.

    Raises:
        TypeError: an argument is no tensor.
        RuntimeError: dtypes, devices or shapes do not fit.
    """
    tensors = (input, weights, bias, old_h, old_cell)
    if has_torch_function(tensors) and not is_compiling():
        return handle_torch_function(lltm_cell, tensors, *tensors)
    check_tensor(
        "lltm_cell", input=input, weights=weights, bias=bias, old_h=old_h, old_cell=old_cell
    )
    return _lltm_cell(*tensors)


# ---------------------------------------------------------------------------------------- lltm


@fake("my_ops::lltm")
def _(
    input: Tensor,
    h0: Tensor,
    c0: Tensor,
    weights: Tensor,
    bias: Tensor,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    _checks.check_lltm(input, h0, c0, weights, bias, lengths)
    output = h0.new_empty((input.shape[0], *h0.shape))
    return output, h0.new_empty(h0.shape), c0.new_empty(c0.shape)


@fake("my_ops::lltm_forward")
def _(
    input: Tensor,
    h0: Tensor,
    c0: Tensor,
    weights: Tensor,
    bias: Tensor,
    lengths: Tensor | None = None,
) -> tuple[Tensor, ...]:
    _checks.check_lltm(input, h0, c0, weights, bias, lengths)
    steps, (batch, hidden) = input.shape[0], h0.shape
    return (
        h0.new_empty((steps, batch, hidden)),
        h0.new_empty(h0.shape),
        c0.new_empty(c0.shape),
        h0.new_empty((steps, batch, 3 * hidden)),
        h0.new_empty((steps, batch, hidden), dtype=_checks.cells_dtype(h0.dtype)),
    )


@fake("my_ops::lltm_backward")
def _(
    grad_output: Tensor | None,
    grad_h_n: Tensor | None,
    grad_c_n: Tensor | None,
    gates: Tensor,
    cells: Tensor,
    c0: Tensor,
    weights: Tensor,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    _checks.check_lltm_backward(grad_output, grad_h_n, grad_c_n, gates, cells, c0, weights, lengths)
    return gates.new_empty(gates.shape), c0.new_empty(c0.shape), c0.new_empty(c0.shape)


def _lltm_gates_backward(
    grad_output: Tensor | None,
    grad_h_n: Tensor | None,
    grad_c_n: Tensor | None,
    input: Tensor,
    h0: Tensor,
    c0: Tensor,
    weights: Tensor,
    bias: Tensor,
    runs: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What ``lltm_backward`` computes, and the output, from the inputs and differentiable again.

    ``runs``: whether a row still runs, ``(steps, batch, 1)``; None: all do.
    """
    hidden = h0.shape[1]

    def where(t: int, running: Tensor, over: Tensor | float) -> Tensor:
        return running if runs is None else torch.where(runs[t], running, over)

    steps = [input[t] for t in range(input.shape[0])]  # DTensor unbinds no sharded dimension
    states = [(h0, c0)]
    for t, step in enumerate(steps):
        h, c = ops.lltm_cell(step, weights, bias, *states[-1])
        states.append((where(t, h, states[-1][0]), where(t, c, states[-1][1])))
    grad_h = torch.zeros_like(h0) if grad_h_n is None else grad_h_n
    grad_c = torch.zeros_like(c0) if grad_c_n is None else grad_c_n
    grad_gates = []
    for t in range(len(steps) - 1, -1, -1):
        if grad_output is not None:
            grad_h = where(t, grad_h + grad_output[t], grad_h)
        grad_step, grad_c_before = _cell_gates_backward(
            where(t, grad_h, 0.0), where(t, grad_c, 0.0), steps[t], weights, bias, *states[t]
        )
        grad_h = where(t, ops.gemm(grad_step, weights[:, :hidden]), grad_h)
        grad_c = where(t, grad_c_before, grad_c)
        grad_gates.append(grad_step)
    output = torch.stack([h for h, _ in states])[1:]
    if grad_gates:
        all_gates = torch.stack(grad_gates[::-1])
    else:
        all_gates = input.new_empty((0, h0.shape[0], 3 * hidden))
    return all_gates, grad_h, grad_c, output


def _lltm_jvp(
    primals: list[Tensor], tangents: list[Tensor], runs: Tensor | None
) -> tuple[Tensor, ...]:
    """The tangents of ``output, h_n, c_n``; ``runs`` as above."""
    input, h, c, *parameters = primals
    input_t, h_t, c_t, *parameters_t = tangents
    outputs_t = []
    for t, (step, step_t) in enumerate(zip(input, input_t, strict=True)):
        before = h, c, h_t, c_t
        after = _cell_jvp([step, *parameters, h, c], [step_t, *parameters_t, h_t, c_t])
        if runs is not None:
            after = tuple(torch.where(runs[t], a, b) for a, b in zip(after, before, strict=True))
        h, c, h_t, c_t = after
        outputs_t.append(h_t if runs is None else torch.where(runs[t], h_t, 0.0))
    if not outputs_t:
        return h_t.new_empty((0, *h_t.shape)), h_t.clone(), c_t.clone()
    return torch.stack(outputs_t), h_t, c_t


def _without_what_takes_no_part(
    lengths: Tensor, input: Tensor, h0: Tensor, c0: Tensor
) -> tuple[Tensor, ...]:
    """``runs``, and the others with 0 there: it must not reach sums, as 0 times NaN is NaN."""
    runs = running_steps(input, lengths).unsqueeze(2)
    none = (lengths <= 0).unsqueeze(1)
    return runs, input.masked_fill(~runs, 0.0), h0.masked_fill(none, 0.0), c0.masked_fill(none, 0.0)


class _LLTM(torch.autograd.Function):
    @staticmethod
    def forward(
        input: Tensor,
        h0: Tensor,
        c0: Tensor,
        weights: Tensor,
        bias: Tensor,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        return ops.lltm_forward(input, h0, c0, weights, bias, lengths)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        gates, cells = output[3:] if len(output) > 3 else (None, None)
        ctx.set_materialize_grads(False)
        save(ctx, *inputs, output[0], gates, cells)

    @staticmethod
    def backward(
        ctx: Any, grad_output: Tensor | None, grad_h_n: Tensor | None, grad_c_n: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        *inputs, output, gates, cells = ctx.saved_tensors
        input, h0, c0, weights, bias, lengths = inputs
        hidden, needs = h0.shape[1], ctx.needs_input_grad
        runs = None
        if lengths is not None:
            runs, input, h0, c0 = _without_what_takes_no_part(lengths, input, h0, c0)
        grads = (grad_output, grad_h_n, grad_c_n)
        if gates is None or differentiated():
            grad_gates, grad_h0, grad_c0, output = _lltm_gates_backward(
                *grads, input, h0, c0, weights, bias, runs
            )
        else:
            try:
                grad_gates, grad_h0, grad_c0 = ops.lltm_backward(
                    *grads, gates, cells, c0, weights, lengths
                )
            except RuntimeError as error:
                raise_out_of_memory(error)
                raise
        grad_input = grad_weights = grad_bias = None
        if needs[0]:
            grad_input = ops.linear(grad_gates, weights[:, hidden:].mT)
        if needs[3]:
            before = torch.cat([h0.unsqueeze(0), output])[:-1]
            rows, h_rows, x_rows = as_rows(grad_gates, before, input)
            products = [_gemm(rows.mT, h_rows, None), _gemm(rows.mT, x_rows, None)]
            grad_weights = torch.cat(products, dim=1)
        if needs[4]:
            grad_bias = grad_gates.sum((0, 1)).reshape(bias.shape)
        return (
            grad_input,
            grad_h0 if needs[1] else None,
            grad_c0 if needs[2] else None,
            grad_weights,
            grad_bias,
            None,
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        *primals, lengths = ctx.saved_tensors[:6]
        filled = _with_zeros(tangents[:5], primals)
        runs = None
        if lengths is not None:
            runs, *primals[:3] = _without_what_takes_no_part(lengths, *primals[:3])
            filled[0] = filled[0].masked_fill(~runs, 0.0)
        return _lltm_jvp(primals, filled, runs)


class _LLTMForward(_LLTM):
    """Of the op that saves gates and cells, for transforms around one that runs it."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _LLTM.setup_context(ctx, inputs, output)
        ctx.mark_non_differentiable(*output[3:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return _LLTM.backward(ctx, *grads[:3])

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        return *_LLTM.jvp(ctx, *tangents), None, None


_lltm = register_gradient(ops.lltm.default, _LLTM, returns=3)
register_gradient(ops.lltm_forward.default, _LLTMForward, returns=5)


def lltm(
    input: Tensor,
    h0: Tensor,
    c0: Tensor,
    weights: Tensor,
    bias: Tensor,
    *,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """LLTM over time: :func:`lltm_cell` applied to each step of ``input``.

    Args:
        input: ``(steps, batch, input_size)``, dtype float64, float32, float16 or bfloat16.
        h0, c0: ``(batch, hidden_size)``, the state before the first step.
        weights: ``(3 * hidden_size, hidden_size + input_size)``.
        bias: ``(3 * hidden_size,)`` or ``(1, 3 * hidden_size)``.
        lengths: ``(batch,)``, int64, on the device of ``input``, in any order: row ``b`` ends after
            ``lengths[b]`` steps, which may be 0. What stands in ``input`` beyond does not matter.
            Values outside 0 to steps count as the nearest of these. None: every row has all steps.

    Returns:
        ``(output, h_n, c_n)``: ``h`` of every step, ``(steps, batch, hidden_size)``, 0 beyond a
        row's end, and the state at every row's end. The cell state of the 16-bit types is kept in
        float32 between steps. The gradient goes to all five and can be differentiated again.

    Raises:
        TypeError: an argument is no tensor.
        RuntimeError: dtypes, devices or shapes do not fit.
    """
    tensors = (input, h0, c0, weights, bias)
    if has_torch_function((*tensors, lengths)) and not is_compiling():
        return handle_torch_function(lltm, (*tensors, lengths), *tensors, lengths=lengths)
    check_tensor("lltm", input=input, h0=h0, c0=c0, weights=weights, bias=bias)
    if lengths is not None:
        check_tensor("lltm", lengths=lengths)
    return _lltm(*tensors, lengths)


def running_steps(input: Tensor, lengths: Tensor) -> Tensor:
    """``(steps, batch)``: whether a row still runs. Without arange, for the sake of DTensor."""
    return input.new_ones([input.size(0), input.size(1)], dtype=torch.int64).cumsum(0) <= lengths
