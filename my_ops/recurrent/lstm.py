"""LSTM, a drop-in replacement for torch's: description, functions, layers."""

from typing import Any, Tuple  # noqa: UP035  TorchScript reads these

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.overrides import handle_torch_function, has_torch_function

from my_ops.recurrent import _block_cells
from my_ops.recurrent._calls import (
    CarryingLayerCall,
    CarryingStepCall,
    MaybeTensor,
    Tensors,
)
from my_ops.recurrent._cell import Cell, Values, check_types
from my_ops.recurrent._ops import define
from my_ops.recurrent._plain import plain, plain_step
from my_ops.recurrent._torch_layers import TorchLayer


def _forward(z: Values, h: Tensor, carried: Values) -> tuple[Tensor, Values, Values]:
    z_i, z_f, z_g, z_o = z
    i, f, g, o = torch.sigmoid(z_i), torch.sigmoid(z_f), torch.tanh(z_g), torch.sigmoid(z_o)
    c = f * carried[0] + i * g
    return o * torch.tanh(c), (c,), (i, f, g, o)


def _backward(
    saved: Values,
    previous: Values,
    carried: Values,
    h: Tensor | None,
    grad_h: Tensor,
    grad_carried: Values,
) -> tuple[Values, None, Values]:
    i, f, g, o = saved
    squashed = torch.tanh(carried[0])
    grad_c = grad_carried[0] + grad_h * o * (1 - squashed * squashed)
    grad_z = (
        grad_c * g * i * (1 - i),
        grad_c * previous[0] * f * (1 - f),
        grad_c * i * (1 - g * g),
        grad_h * squashed * o * (1 - o),
    )
    return grad_z, None, (grad_c * f,)


CELL = Cell(
    "lstm",
    gates=4,
    saved=4,
    shut=(0.0, 1.0, 0.0, 0.0),
    carried={"c": "cell"},
    forward=_forward,
    backward=_backward,
)
_lstm_cell, _lstm = define(CELL)


def lstm_cell(
    input: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None,
    bias_hh: Tensor | None,
    old_h: Tensor,
    old_cell: Tensor,
) -> tuple[Tensor, Tensor]:
    """One step of LSTM, like ``torch.nn.LSTMCell``.

    ``gates = input @ weight_ih.T + bias_ih + old_h @ weight_hh.T + bias_hh`` in torch's order:
    input, forget, candidate, output; ``i, f, o = sigmoid``; ``g = tanh``; ``new_cell = f * old_cell
    + i * g``; ``new_h = o * tanh(new_cell)``.

    Args:
        input: ``(batch, input_size)``, dtype float64, float32, float16 or bfloat16.
        weight_ih: ``(4 * hidden_size, input_size)``.
        weight_hh: ``(4 * hidden_size, hidden_size)``.
        bias_ih, bias_hh: ``(4 * hidden_size,)``, or None.
        old_h, old_cell: ``(batch, hidden_size)``.

    Returns:
        ``(new_h, new_cell)``, both ``(batch, hidden_size)``. The 16-bit types compute in float32.
        The gradient goes to all seven arguments and can be differentiated again.

    Raises:
        TypeError: an argument is not a tensor.
        RuntimeError: dtypes, devices or shapes do not fit.
    """
    tensors = (input, weight_ih, weight_hh, bias_ih, bias_hh, old_h, old_cell)
    if has_torch_function(tensors) and not is_compiling():
        return handle_torch_function(lstm_cell, tensors, *tensors)
    check_types("lstm_cell", CELL, CELL.step_arguments, tensors)
    return _lstm_cell(*tensors)


def lstm(
    input: Tensor,
    h0: Tensor,
    c0: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None = None,
    bias_hh: Tensor | None = None,
    *,
    lengths: Tensor | None = None,
    reset: Tensor | None = None,
    zoneout: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """LSTM over time: :func:`lstm_cell` applied to each step of ``input``.

    Args:
        input: ``(steps, batch, input_size)``, dtype float64, float32, float16 or bfloat16.
        h0, c0: ``(batch, hidden_size)``, the state before the first step.
        weight_ih: ``(4 * hidden_size, input_size)``.
        weight_hh: ``(4 * hidden_size, hidden_size)``.
        bias_ih, bias_hh: ``(4 * hidden_size,)``, or None.
        lengths, reset, zoneout: as in :func:`lltm`.

    Returns:
        ``(output, h_n, c_n)``. ``output`` has ``h`` of every step, ``(steps, batch, hidden_size)``,
        and is 0 after a sequence's end; ``h_n`` and ``c_n`` are the state at every sequence's end.
        In 16 bits the cell state is kept in float32 between steps. The gradient goes to the first
        seven arguments and can be differentiated again.

    Raises:
        TypeError: an argument is not a tensor.
        RuntimeError: dtypes, devices or shapes do not fit.
    """
    tensors = (input, h0, c0, weight_ih, weight_hh, bias_ih, bias_hh)
    relevant = (*tensors, lengths, reset, zoneout)
    if has_torch_function(relevant) and not is_compiling():
        return handle_torch_function(
            lstm, relevant, *tensors, lengths=lengths, reset=reset, zoneout=zoneout
        )
    check_types("lstm", CELL, CELL.arguments, relevant)
    return _lstm(*relevant)


# -------------------------------------------------------------------------------------- layers


class LSTMCell(CarryingStepCall, nn.LSTMCell):
    """A ``torch.nn.LSTMCell`` that calls :func:`my_ops.lstm_cell`.

    Arguments, parameters, their initialisation, state dict and calls are torch's.

    Raises:
        TypeError: an argument is not a tensor, or ``hx`` is not a pair of tensors.
        RuntimeError: dtypes, devices or shapes do not fit.
    """

    __constants__ = [*nn.LSTMCell.__constants__, "_name"]  # noqa: RUF012
    _name = "LSTMCell"

    def _plain_step(self, input: Tensor, states: Any) -> Any:
        biases = self.bias_ih, self.bias_hh
        return plain_step(
            CELL, self.hidden_size, input, states, (self.weight_ih, self.weight_hh, *biases)
        )

    def _step(self, x: Tensor, states: Tensors) -> Tensors:
        h, c = states[0], states[1]
        w_ih, w_hh, b_ih, b_hh = self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh
        if torch.jit.is_scripting():
            h, c = torch.ops.my_ops.lstm_cell(x, w_ih, w_hh, b_ih, b_hh, h, c)
        elif x.is_complex():  # which our op does not take
            h, c = torch.lstm_cell(x, [h, c], w_ih, w_hh, b_ih, b_hh)
        else:
            h, c = lstm_cell(x, w_ih, w_hh, b_ih, b_hh, h, c)
        return [h, c]


class LSTM(CarryingLayerCall, TorchLayer):
    """LSTM over time, in one or more layers and directions, like ``torch.nn.LSTM``.

    Arguments, parameters, their names and initialisation, state dict, calls and results are those
    of ``torch.nn.LSTM``. It adds ``lengths``, ``reset``, ``weight_dropout`` and ``zoneout``, as in
    :class:`LLTM`, and ``heads``: the recurrent weights are block-diagonal, ``weight_hh_l0`` is ``(4
    * hidden_size, hidden_size / heads)``, and a unit's gates see h of its head's units.

    It is a ``torch.nn.RNNBase``, but not a ``torch.nn.LSTM`` for ``isinstance``, because
    torch.compile does not trace those. Projections (``proj_size``) run torch's own LSTM.

    The call is ``layer(input, (h_0, c_0), lengths, reset)``. input is ``(steps, batch,
    input_size)``, or ``(batch, steps, input_size)`` with ``batch_first``, without the batch for one
    sequence, or a ``PackedSequence``. h_0 and c_0 are ``(num_layers * directions, batch,
    hidden_size)``, zeros by default. lengths and reset are as in :func:`my_ops.lltm`, with reset
    laid out like input. Where reset is True, no state passes from the step before to that step, nor
    back in the other direction. The result is ``output, (h_n, c_n)``: output is ``(steps, batch,
    directions * hidden_size)``, packed if the input was, and the states at the ends have the shape
    of h_0.

    Raises:
        TypeError: an argument is not a tensor, or ``hx`` is not a pair of tensors.
        ValueError: a length in a list is negative or larger than steps, ``lengths`` is given beside
            a ``PackedSequence``, an option does not go with projections, or ``heads`` does not
            divide ``hidden_size``.
        RuntimeError: dtypes, devices or shapes do not fit.
    """

    _name = "LSTM"
    _state_names = ["h_0", "c_0"]  # noqa: RUF012

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        weight_dropout: float = 0.0,
        zoneout: float = 0.0,
        heads: int = 1,
    ) -> None:
        sizes, layout = (input_size, hidden_size, num_layers), (bias, batch_first)
        more: Any = (dropout, bidirectional, proj_size, device, dtype)
        super().__init__("LSTM", *sizes, *layout, *more)
        self.weight_dropout = weight_dropout
        self.zoneout = zoneout
        self._make_heads(heads)

    # What torch.nn.LSTM overrides of RNNBase, for programs that call it.
    get_expected_cell_size = nn.LSTM.get_expected_cell_size
    check_forward_args = nn.LSTM.check_forward_args  # type: ignore[assignment]
    permute_hidden = nn.LSTM.permute_hidden  # type: ignore[assignment]

    def _sizes(self) -> list[int]:
        return [self.proj_size if self.proj_size > 0 else self.hidden_size, self.hidden_size]

    def _plain(self, input: Tensor, states: Any) -> Any:
        return plain(self, CELL, input, states) if self.heads == 1 else None

    def _at_once(self, *given: Any) -> Any:
        return _block_cells.run(_block_cells.block_lstm, *given)

    def _direction(
        self,
        x: Tensor,
        states: Tensors,
        parameters: Tensors,
        lengths: MaybeTensor,
        reset: MaybeTensor,
        zoneout: MaybeTensor,
    ) -> Tensors:
        w_ih, w_hh = parameters[0], parameters[1]
        b_ih: MaybeTensor = None
        b_hh: MaybeTensor = None
        if len(parameters) > 2:
            b_ih, b_hh = parameters[2], parameters[3]
        h, c = states[0], states[1]
        if torch.jit.is_scripting():
            output, h, c = torch.ops.my_ops.lstm(
                x, h, c, w_ih, w_hh, b_ih, b_hh, lengths, reset, zoneout
            )
        else:
            output, h, c = lstm(
                x, h, c, w_ih, w_hh, b_ih, b_hh, lengths=lengths, reset=reset, zoneout=zoneout
            )
        return [output, h, c]

    def _projected(self, x: Tensor, states: Tensors) -> Tuple[Tensor, Tensors]:  # noqa: UP006
        output, h, c = torch.lstm(
            x,
            states,
            self._in_a_row(),
            self.bias,
            self.num_layers,
            self.dropout,
            self.training,
            self.bidirectional,
            False,  # batch_first
        )
        return output, [h, c]
