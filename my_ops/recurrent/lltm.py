"""LLTM, a recurrent cell with three gates and no forget gate: description, functions, layers."""

from typing import Any, Tuple  # noqa: UP035  TorchScript reads these

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.overrides import handle_torch_function, has_torch_function

from my_ops._private import hooked
from my_ops.recurrent._calls import MaybeTensor, State, Tensors
from my_ops.recurrent._cell import Cell, Values, check_types
from my_ops.recurrent._layers import (
    CarryingCell,
    CarryingDirection,
    CarryingLayer,
    OneMatrixParameters,
)
from my_ops.recurrent._ops import define
from my_ops.recurrent._plain import plain, plain_step
from my_ops.recurrent._weights import OneMatrix


def _forward(z: Values, h: Tensor, carried: Values) -> tuple[Tensor, Values, Values]:
    z_i, z_o, z_g = z
    (c,) = carried
    i, o = torch.sigmoid(z_i), torch.sigmoid(z_o)
    below = torch.clamp(z_g, max=0.0)
    g = torch.where(z_g > 0, z_g, torch.expm1(below))  # elu, which DTensor lacks before torch 2.13
    c = c + g * i
    return torch.tanh(c) * o, (c,), (i, o, g)


def _backward(
    saved: Values,
    previous: Values,
    carried: Values,
    h: Tensor | None,
    grad_h: Tensor,
    grad_carried: Values,
) -> tuple[Values, None, Values]:
    i, o, g = saved
    squashed = torch.tanh(carried[0])
    grad_c = grad_carried[0] + grad_h * o * (1 - squashed * squashed)
    elu_slope = torch.where(g > 0, 1.0, g + 1)
    grad_z = (
        grad_c * g * i * (1 - i),
        grad_h * squashed * o * (1 - o),
        grad_c * i * elu_slope,
    )
    return grad_z, None, (grad_c,)


CELL = Cell(
    "lltm",
    gates=3,
    saved=3,
    shut=(0.0, 0.0, 0.0),
    carried={"c": "cell"},
    forward=_forward,
    backward=_backward,
    weights=OneMatrix(),
)
_lltm_cell, _lltm = define(CELL)


def lltm_cell(
    input: Tensor, weights: Tensor, bias: Tensor, old_h: Tensor, old_cell: Tensor
) -> tuple[Tensor, Tensor]:
    """One step of LLTM, a recurrent cell with three gates and no forget gate.

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
        The gradient goes to all five arguments and can be differentiated again.

    Raises:
        TypeError: an argument is not a tensor.
        RuntimeError: dtypes, devices or shapes do not fit.
    """
    tensors = (input, weights, bias, old_h, old_cell)
    if has_torch_function(tensors) and not is_compiling():
        return handle_torch_function(lltm_cell, tensors, *tensors)
    check_types("lltm_cell", CELL, CELL.step_arguments, tensors)
    return _lltm_cell(*tensors)


def lltm(
    input: Tensor,
    h0: Tensor,
    c0: Tensor,
    weights: Tensor,
    bias: Tensor,
    *,
    lengths: Tensor | None = None,
    reset: Tensor | None = None,
    zoneout: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """LLTM over time: :func:`lltm_cell` applied to each step of ``input``.

    Args:
        input: ``(steps, batch, input_size)``, dtype float64, float32, float16 or bfloat16.
        h0, c0: ``(batch, hidden_size)``, the state before the first step.
        weights: ``(3 * hidden_size, hidden_size + input_size)``.
        bias: ``(3 * hidden_size,)`` or ``(1, 3 * hidden_size)``.
        lengths: ``(batch,)``, int64, on the device of ``input``, in any order. Sequence ``b`` ends
            after ``lengths[b]`` steps, which may be 0; later values in ``input`` are ignored.
            Lengths are clamped to the range from 0 to steps. None: every sequence has all steps.
        reset: ``(steps, batch)``, bool, on the device of ``input``. Where True, ``h`` and the cell
            state are zero before that step, even if they were NaN, and no gradient goes through
            them. After a sequence's end it is ignored. None: no resets.
        zoneout: ``(steps, batch, hidden_size)``, dtype and device of ``input``: the fraction of
            ``h`` that stays from the step before, so that ``h`` is ``zoneout * old_h + (1 -
            zoneout) * new_h``; the cell state is as without it. 0 and 1 keep the new or the old
            ``h`` (Krueger et al., "Zoneout", 2017), and a probability gives the expected value. It
            gets no gradient. None: 0.

    Returns:
        ``(output, h_n, c_n)``. ``output`` has ``h`` of every step, ``(steps, batch, hidden_size)``,
        and is 0 after a sequence's end; ``h_n`` and ``c_n`` are the state at every sequence's end.
        In 16 bits the cell state is kept in float32 between steps. The gradient goes to the first
        five arguments and can be differentiated again.

    Raises:
        TypeError: an argument is not a tensor.
        RuntimeError: dtypes, devices or shapes do not fit.
    """
    tensors = (input, h0, c0, weights, bias)
    relevant = (*tensors, lengths, reset, zoneout)
    if has_torch_function(relevant) and not is_compiling():
        return handle_torch_function(
            lltm, relevant, *tensors, lengths=lengths, reset=reset, zoneout=zoneout
        )
    check_types("lltm", CELL, CELL.arguments, relevant)
    return _lltm(*relevant)


# -------------------------------------------------------------------------------------- layers


class _Ops(OneMatrixParameters):
    """The ops that the layers call."""

    _gates = CELL.gates

    def _one_step(self, x: Tensor, h: Tensor, c: Tensor, parameters: Tensors) -> State:
        if torch.jit.is_scripting():
            return torch.ops.my_ops.lltm_cell(x, parameters[0], parameters[1], h, c)
        else:
            return lltm_cell(x, parameters[0], parameters[1], h, c)

    def _sequence(
        self,
        x: Tensor,
        h: Tensor,
        c: Tensor,
        parameters: Tensors,
        lengths: MaybeTensor,
        reset: MaybeTensor,
        zoneout: MaybeTensor,
    ) -> Tuple[Tensor, Tensor, Tensor]:  # noqa: UP006
        if torch.jit.is_scripting():
            return torch.ops.my_ops.lltm(
                x, h, c, parameters[0], parameters[1], lengths, reset, zoneout
            )
        else:
            w, b = parameters[0], parameters[1]
            return lltm(x, h, c, w, b, lengths=lengths, reset=reset, zoneout=zoneout)


class LLTMCell(_Ops, CarryingCell):
    """A layer that runs :func:`my_ops.lltm_cell`, called like ``torch.nn.LSTMCell``.

    Args:
        input_size, hidden_size: sizes of the last dimension of input and state.
        bias: whether to add a learned bias.
        device, dtype: of the parameters.

    Parameters: ``weights``, ``(3 * hidden_size, hidden_size + input_size)``, and ``bias``,
    ``(3 * hidden_size,)`` or None, drawn from U(-1/sqrt(hidden_size), 1/sqrt(hidden_size)).

    Shapes: ``cell(input, (h, c))`` with input ``(batch, input_size)`` and h, c
    ``(batch, hidden_size)`` (zeros by default) returns ``(h, c)``. For a single sequence, leave
    out the batch everywhere.

    Raises:
        TypeError: an argument is not a tensor, or ``hx`` is not a pair of tensors.
        RuntimeError: dtypes, devices or shapes do not fit.
    """

    _name = "LLTMCell"

    def _plain_step(self, input: Tensor, states: Any) -> Any:
        return plain_step(CELL, self.hidden_size, input, states, self._op_parameters(None))


class LLTMDirection(_Ops, CarryingDirection):
    """One direction of one layer of :class:`LLTM`, over all steps of a call.

    Shapes are those of :func:`my_ops.lltm`, probabilities those of :class:`LLTM`, or None for 0.
    """


class LLTM(CarryingLayer):
    """LLTM over time, in one or more layers and directions, used like ``torch.nn.LSTM``.

    Args:
        input_size, hidden_size: sizes of the last dimension of input and state.
        num_layers: number of layers; each takes the output of the one before.
        bias: whether to add learned biases.
        batch_first: whether input and output are ``(batch, steps, size)``.
        dropout: probability, in training, that an output element of a layer is dropped, except in
            the last layer.
        bidirectional: whether a second direction runs from the end; outputs are concatenated.
        weight_dropout: DropConnect: probability, in training, that a recurrent weight is dropped;
            drawn once per call, for all steps.
        zoneout: probability, in training, that an element of ``h`` keeps its value from the step
            before; drawn for every step. In evaluation ``h`` is the expected value of that.
        device, dtype: of the parameters.

    The parameters are in ``cells``, one module per layer and direction, with the directions of a
    layer next to each other: ``cells.0.weights`` and ``cells.0.bias`` are like those of
    :class:`LLTMCell`. Each module is called once per call, for all steps, so hooks on it, pruning,
    ``weight_norm`` and ``fully_shard`` take effect.

    The call is ``layer(input, (h_0, c_0), lengths, reset)``. input is ``(steps, batch,
    input_size)``, without the batch for one sequence, or a ``PackedSequence``. h_0 and c_0 are
    ``(num_layers * directions, batch, hidden_size)``, zeros by default. lengths and reset are as in
    :func:`my_ops.lltm`, with reset laid out like input: ``(batch, steps)`` with ``batch_first``.
    Where reset is True, no state passes from the step before to that step, nor back in the other
    direction. The result is ``output, (h_n, c_n)``: output is ``(steps, batch, directions *
    hidden_size)``, packed if the input was, and the states at the ends have the shape of h_0.

    Raises:
        TypeError: an argument is not a tensor, or ``hx`` is not a pair of tensors.
        ValueError: a length in a list is negative or larger than steps, or ``lengths`` is given
            beside a ``PackedSequence``.
        RuntimeError: dtypes, devices or shapes do not fit.
    """

    _name = "LLTM"
    proj_size = 0  # for code that asks nn.LSTM for it; LLTM has no projections
    _direction = LLTMDirection
    _was_torchs = False

    def _plain(self, input: Tensor, states: Any) -> Any:
        for cell in self.cells:
            if hooked(cell) or type(cell) is not LLTMDirection:
                return None
        return plain(self, CELL, input, states)

    def _in_a_row(self) -> Tensors:
        return [p for cell in self.cells for p in cell._op_parameters(None)]  # type: ignore[operator]
