"""torch.nn.RNN and RNNCell: two cells that are defined as programs define theirs, and the layers.

A call that gains nothing from the cells' kernels is torch's own op.
"""

from typing import Any, Tuple  # noqa: UP035  TorchScript reads these

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from my_ops._costs import RNN_CPU, RNN_CUDA
from my_ops._private import (
    any_autocast,
    any_requires_grad,
    forward_mode,
    tracing,
    transforms_active,
)
from my_ops.ops._checks import FLOATING
from my_ops.recurrent import _checks, _own_cpu, _own_kernels
from my_ops.recurrent._calls import MaybeTensor, PlainLayerCall, PlainStepCall, Tensors
from my_ops.recurrent._torch_layers import TorchLayer
from my_ops.recurrent._torchs_calls import are_alike, steps_and_batch
from my_ops.recurrent.own_cell import CellDefinition, CellLayer


def rnn_tanh(a: Any) -> Any:
    return torch.tanh(a)


def rnn_relu(a: Any) -> Any:
    return torch.relu(a)


CELLS = {
    function.__name__: CellDefinition(function, "a", "", "", layer="nn.RNN")
    for function in (rnn_tanh, rnn_relu)
}


def _check_nonlinearity(layer: str, nonlinearity: Any) -> None:
    if nonlinearity not in ("tanh", "relu"):
        raise ValueError(f"{layer}: nonlinearity must be 'tanh' or 'relu', got {nonlinearity!r}")


class RNNCell(PlainStepCall, nn.RNNCell):
    """A ``torch.nn.RNNCell``. It calls torch's op: a step alone gains nothing from a kernel.

    Arguments, parameters, their initialisation, state dict and calls are torch's.

    Raises:
        TypeError: an argument is not a tensor.
        ValueError: ``nonlinearity`` is neither ``"tanh"`` nor ``"relu"``.
        RuntimeError: dtypes, devices or shapes do not fit.
    """

    __constants__ = [*nn.RNNCell.__constants__, "_name"]  # noqa: RUF012
    _name = "RNNCell"

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        nonlinearity: str = "tanh",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(input_size, hidden_size, bias, nonlinearity, device, dtype)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "nonlinearity":
            _check_nonlinearity(self._name, value)
        super().__setattr__(name, value)

    def _step(self, x: Tensor, states: Tensors) -> Tensors:
        if torch.jit.is_scripting():
            return self._torchs_step(x, states)
        else:
            return self._with_our_errors(x, states)

    def _torchs_step(self, x: Tensor, states: Tensors) -> Tensors:
        w_ih, w_hh, b_ih, b_hh = self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh
        if self.nonlinearity == "tanh":
            return [torch.rnn_tanh_cell(x, states[0], w_ih, w_hh, b_ih, b_hh)]
        return [torch.rnn_relu_cell(x, states[0], w_ih, w_hh, b_ih, b_hh)]

    def _with_our_errors(self, x: Tensor, states: Tensors) -> Tensors:
        try:
            return self._torchs_step(x, states)
        except RuntimeError:
            weights = self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh
            cell = CELLS[f"rnn_{self.nonlinearity}"]._cell
            _checks.check_step(cell, (x, *weights, *states))
            raise


class RNN(PlainLayerCall, TorchLayer):
    """A plain RNN over time, in one or more layers and directions, like ``torch.nn.RNN``.

    Arguments, parameters, their names and initialisation, state dict, calls and results are those
    of ``torch.nn.RNN``. It adds ``lengths``, ``reset``, ``weight_dropout`` and ``zoneout``, as in
    :class:`LLTM`, and ``heads``, as in :class:`LSTM`. It is a ``torch.nn.RNNBase``, but not a
    ``torch.nn.RNN`` for ``isinstance``, because torch.compile does not trace those.

    The call is that of :class:`GRU`. Its kernels are compiled at the first call that gains from
    them, in 1 to 2 s, as those of :func:`my_ops.cell`. Without these arguments and options other
    calls run torch's own op: those of few steps, on the CPU those of many units in 16 bits, on CUDA
    those of few units in float32 and float16 and those of packed data, and all where there is no
    compiler. So do all calls in TorchScript, which has none of these arguments and options.

    Raises:
        TypeError: an argument is not a tensor.
        ValueError: ``nonlinearity`` is neither ``"tanh"`` nor ``"relu"``, a length in a list is
            negative or larger than steps, ``lengths`` is given beside a ``PackedSequence``, or
            ``heads`` does not divide ``hidden_size``.
        RuntimeError: dtypes, devices or shapes do not fit.
    """

    __jit_unused_properties__ = [*nn.RNNBase.__jit_unused_properties__, "cell"]  # noqa: RUF012
    _name = "RNN"
    _state_names = ["hx"]  # noqa: RUF012

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str = "tanh",
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
        _check_nonlinearity(self._name, nonlinearity)
        sizes, layout = (input_size, hidden_size, num_layers), (bias, batch_first)
        mode = f"RNN_{nonlinearity.upper()}"
        super().__init__(mode, *sizes, *layout, dropout, bidirectional, 0, device, dtype)
        self.nonlinearity = nonlinearity
        self.weight_dropout = weight_dropout
        self.zoneout = zoneout
        self._make_heads(heads)

    _was_torchs = True  # converted or not, it may call cuDNN
    _plain = CellLayer._plain  # type: ignore[assignment]
    _at_once = CellLayer._at_once  # type: ignore[assignment]

    @property
    def cell(self) -> CellDefinition:
        return CELLS[self.mode.lower()]

    _direction = CellLayer._direction  # type: ignore[assignment]

    def flatten_parameters(self) -> None:
        """As torch's, unless there are ``heads``, whose weights are not cuDNN's."""
        if self.heads == 1:
            nn.RNNBase.flatten_parameters(self)

    def _each_layer(
        self, x: Tensor, states: Tensors, lengths: MaybeTensor, reset: MaybeTensor
    ) -> Tuple[Tensor, Tensors]:  # noqa: UP006
        if torch.jit.is_scripting():
            return self._scripted(x, states, lengths, reset)
        else:
            return super()._each_layer(x, states, lengths, reset)

    def _scripted(
        self, x: Tensor, states: Tensors, lengths: MaybeTensor, reset: MaybeTensor
    ) -> Tuple[Tensor, Tensors]:  # noqa: UP006
        drawn = self._has_weight_dropout or self._has_zoneout
        if lengths is not None or reset is not None or drawn or self.heads > 1:
            raise ValueError(
                "RNN: lengths, reset, weight_dropout, zoneout and heads must not be used in "
                "TorchScript"
            )
        h, weights = states[0], self._in_a_row()
        layers, both = self.num_layers, self.bidirectional
        if self.mode == "RNN_TANH":
            output, h_n = torch.rnn_tanh(
                x, h, weights, self.bias, layers, self.dropout, self.training, both, False
            )
        else:
            output, h_n = torch.rnn_relu(
                x, h, weights, self.bias, layers, self.dropout, self.training, both, False
            )
        return output, [h_n]

    def _faster_in_torch(
        self, data: Tensor, batch_sizes: Tensor | None, states: Any
    ) -> list[Tensor] | None:
        if is_compiling() or transforms_active() or forward_mode():
            return None
        sizes = steps_and_batch(self, data, batch_sizes)
        if sizes is None or data.dtype not in FLOATING:
            return None
        parameters: list[Tensor] = self._in_a_row()
        tensors = [data, *states, *parameters]
        if not are_alike(*tensors):
            return None
        if tracing():  # torch's op goes into programs that run without my_ops
            return parameters
        packed = batch_sizes is not None
        trains = torch.is_grad_enabled() and any_requires_grad(*tensors)
        if data.is_cuda:
            gains = not packed and self._gains_on_cuda(data, *sizes, trains)
            return None if gains else parameters
        if not data.is_cpu:
            return None
        if not any_autocast():  # there our op alone always returns 16 bits
            if packed and not trains:
                return parameters  # padding costs more than forward alone gains
            if not _gains(data.dtype, *sizes, self.hidden_size, packed):
                return parameters
        compiled = _own_cpu.number_of(self.cell._cell, data.dtype) is not None
        return None if compiled else parameters

    def _gains_on_cuda(self, data: Tensor, steps: int, batch: int, trains: bool) -> bool:
        """Whether all steps, and those of backward, run in one launch, and faster than cuDNN's."""
        dtype = _own_kernels.dtype_of_call(data)
        if dtype not in RNN_CUDA.least or not _enough_on_cuda(dtype, steps, self.hidden_size):
            return False
        sizes = steps, batch, self.hidden_size, 1  # one head
        return _own_kernels.in_one_launch(self.cell._cell, data, trains, *sizes)


def _enough_on_cuda(dtype: torch.dtype, steps: int, hidden: int) -> bool:
    least_steps, least_units = RNN_CUDA.least[dtype]
    return steps >= least_steps and hidden >= least_units


def _gains(dtype: torch.dtype, steps: int, batch: int, hidden: int, packed: bool) -> bool:
    """Whether a call on the CPU does by the cell's kernels."""
    costs, work = RNN_CPU, batch * hidden * hidden
    many = not packed and steps * batch * hidden >= costs.many_elements
    if steps < (costs.fewer_steps if many else costs.steps) or hidden < costs.units:
        return False
    if dtype != torch.bfloat16:
        return True
    return hidden <= costs.bfloat16_units and work <= costs.bfloat16_work
