"""GRU, a drop-in replacement for torch's: description, functions, layers."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.overrides import handle_torch_function, has_torch_function

from my_ops.recurrent import _block_cells
from my_ops.recurrent._calls import MaybeTensor, PlainLayerCall, PlainStepCall, Tensors
from my_ops.recurrent._cell import Cell, Values, check_types
from my_ops.recurrent._ops import define
from my_ops.recurrent._plain import plain, plain_step
from my_ops.recurrent._torch_layers import TorchLayer


def _forward(z: Values, h: Tensor, carried: Values) -> tuple[Tensor, Values, Values]:
    z_r, z_u, product, input_gate = z
    r, u = torch.sigmoid(z_r), torch.sigmoid(z_u)
    n = torch.tanh(input_gate + r * product)
    return n + u * (h - n), (), (r, u, n, product)


def _backward(
    saved: Values,
    previous: Values,
    carried: Values,
    h: Tensor,
    grad_h: Tensor,
    grad_carried: Values,
) -> tuple[Values, Tensor, Values]:
    r, u, n, product = saved
    grad_n = grad_h * (1 - u) * (1 - n * n)
    grad_z = (grad_n * product * r * (1 - r), grad_h * (h - n) * u * (1 - u), grad_n * r, grad_n)
    return grad_z, grad_h * u, ()


CELL = Cell(
    "gru",
    gates=3,
    saved=4,
    shut=(0.0, 0.0, 0.0, 0.0),
    forward=_forward,
    backward=_backward,
    apart=1,
    reads_h=True,
)
_gru_cell, _gru = define(CELL)


def gru_cell(
    input: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None,
    bias_hh: Tensor | None,
    old_h: Tensor,
) -> Tensor:
    """One step of GRU, like ``torch.nn.GRUCell``.

    ``x = input @ weight_ih.T + bias_ih``, ``p = old_h @ weight_hh.T + bias_hh``, with the gates in
    torch's order: reset, update, candidate. ``r, u = sigmoid(x + p)``; ``n = tanh(x_n + r * p_n)``;
    ``new_h = (1 - u) * n + u * old_h``.

    Args:
        input: ``(batch, input_size)``, dtype float64, float32, float16 or bfloat16.
        weight_ih: ``(3 * hidden_size, input_size)``.
        weight_hh: ``(3 * hidden_size, hidden_size)``.
        bias_ih, bias_hh: ``(3 * hidden_size,)``, or None.
        old_h: ``(batch, hidden_size)``.

    Returns:
        ``new_h``, ``(batch, hidden_size)``. The 16-bit types compute in float32. The gradient goes
        to all six arguments and can be differentiated again.

    Raises:
        TypeError: an argument is not a tensor.
        RuntimeError: dtypes, devices or shapes do not fit.
    """
    tensors = (input, weight_ih, weight_hh, bias_ih, bias_hh, old_h)
    if has_torch_function(tensors) and not is_compiling():
        return handle_torch_function(gru_cell, tensors, *tensors)
    check_types("gru_cell", CELL, CELL.step_arguments, tensors)
    return _gru_cell(*tensors)


def gru(
    input: Tensor,
    h0: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None = None,
    bias_hh: Tensor | None = None,
    *,
    lengths: Tensor | None = None,
    reset: Tensor | None = None,
    zoneout: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """GRU over time: :func:`gru_cell` applied to each step of ``input``.

    Args:
        input: ``(steps, batch, input_size)``, dtype float64, float32, float16 or bfloat16.
        h0: ``(batch, hidden_size)``, the state before the first step.
        weight_ih: ``(3 * hidden_size, input_size)``.
        weight_hh: ``(3 * hidden_size, hidden_size)``.
        bias_ih, bias_hh: ``(3 * hidden_size,)``, or None.
        lengths, reset, zoneout: as in :func:`lltm`.

    Returns:
        ``(output, h_n)``. ``output`` has ``h`` of every step, ``(steps, batch, hidden_size)``, and
        is 0 after a sequence's end; ``h_n`` is the state at every sequence's end. The gradient goes
        to the first six arguments and can be differentiated again.

    Raises:
        TypeError: an argument is not a tensor.
        RuntimeError: dtypes, devices or shapes do not fit.
    """
    tensors = (input, h0, weight_ih, weight_hh, bias_ih, bias_hh)
    relevant = (*tensors, lengths, reset, zoneout)
    if has_torch_function(relevant) and not is_compiling():
        return handle_torch_function(
            gru, relevant, *tensors, lengths=lengths, reset=reset, zoneout=zoneout
        )
    check_types("gru", CELL, CELL.arguments, relevant)
    return _gru(*relevant)


# -------------------------------------------------------------------------------------- layers


class GRUCell(PlainStepCall, nn.GRUCell):
    """A ``torch.nn.GRUCell`` that calls :func:`my_ops.gru_cell`.

    Arguments, parameters, their initialisation, state dict and calls are torch's.

    Raises:
        TypeError: an argument is not a tensor.
        RuntimeError: dtypes, devices or shapes do not fit.
    """

    __constants__ = [*nn.GRUCell.__constants__, "_name"]  # noqa: RUF012
    _name = "GRUCell"

    def _plain_step(self, input: Tensor, states: Any) -> Any:
        biases = self.bias_ih, self.bias_hh
        return plain_step(
            CELL, self.hidden_size, input, states, (self.weight_ih, self.weight_hh, *biases)
        )

    def _step(self, x: Tensor, states: Tensors) -> Tensors:
        w_ih, w_hh, b_ih, b_hh = self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh
        if torch.jit.is_scripting():
            return [torch.ops.my_ops.gru_cell(x, w_ih, w_hh, b_ih, b_hh, states[0])]
        elif x.is_complex():  # which our op does not take
            return [torch.gru_cell(x, states[0], w_ih, w_hh, b_ih, b_hh)]
        else:
            return [gru_cell(x, w_ih, w_hh, b_ih, b_hh, states[0])]


class GRU(PlainLayerCall, TorchLayer):
    """GRU over time, in one or more layers and directions, like ``torch.nn.GRU``.

    Arguments, parameters, their names and initialisation, state dict, calls and results are those
    of ``torch.nn.GRU``. It adds ``lengths``, ``reset``, ``weight_dropout`` and ``zoneout``, as in
    :class:`LLTM`, and ``heads``, as in :class:`LSTM`. It is a ``torch.nn.RNNBase``, but not a
    ``torch.nn.GRU`` for ``isinstance``, because torch.compile does not trace those.

    The call is ``layer(input, h_0, lengths, reset)``. input is ``(steps, batch, input_size)``, or
    ``(batch, steps, input_size)`` with ``batch_first``, without the batch for one sequence, or a
    ``PackedSequence``. h_0 is ``(num_layers * directions, batch, hidden_size)``, zeros by default.
    lengths and reset are as in :func:`my_ops.lltm`, with reset laid out like input. Where reset is
    True, no state passes from the step before to that step, nor back in the other direction. The
    result is ``output, h_n``: output is ``(steps, batch, directions * hidden_size)``, packed if the
    input was, and the state at the ends has the shape of h_0.

    Raises:
        TypeError: an argument is not a tensor.
        ValueError: a length in a list is negative or larger than steps, ``lengths`` is given
            beside a ``PackedSequence``, or ``heads`` does not divide ``hidden_size``.
        RuntimeError: dtypes, devices or shapes do not fit.
    """

    _name = "GRU"
    _state_names = ["hx"]  # noqa: RUF012

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        weight_dropout: float = 0.0,
        zoneout: float = 0.0,
        heads: int = 1,
    ) -> None:
        sizes, layout = (input_size, hidden_size, num_layers), (bias, batch_first)
        super().__init__("GRU", *sizes, *layout, dropout, bidirectional, 0, device, dtype)
        self.weight_dropout = weight_dropout
        self.zoneout = zoneout
        self._make_heads(heads)

    def _plain(self, input: Tensor, states: Any) -> Any:
        return plain(self, CELL, input, states) if self.heads == 1 else None

    def _at_once(self, *given: Any) -> Any:
        return _block_cells.run(_block_cells.block_gru, *given)

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
        h = states[0]
        if torch.jit.is_scripting():
            output, h = torch.ops.my_ops.gru(x, h, w_ih, w_hh, b_ih, b_hh, lengths, reset, zoneout)
        else:
            output, h = gru(
                x, h, w_ih, w_hh, b_ih, b_hh, lengths=lengths, reset=reset, zoneout=zoneout
            )
        return [output, h]
