"""What layers with a module per layer and direction share: LLTM's, with its regularisers.

A cell's own module says which ops they call, and has the docstrings. The names of classes say what
they assume: Carrying means a state ``(h, c)``, OneMatrix the parameters of ``_weights.OneMatrix``.
TorchScript compiles all of them, which explains how types and branches are written.
"""

import math
import warnings
from typing import Any, Tuple  # noqa: UP035  TorchScript reads these

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from my_ops.recurrent._calls import (
    CarryingLayerCall,
    CarryingStepCall,
    MaybeFloat,
    MaybeTensor,
    MaybeTensors,
    State,
    Tensors,
    check_probability,
    check_state,
    reverse,
    reverse_reset,
    stacked,
    zoneout_fractions,
)


class Parameters(nn.Module):
    """The parameters of one direction of one layer, and the cell's ops with them.

    ``_op_parameters`` are the parameters that the ops take; in training with DropConnect of
    probability ``weight_dropout``.
    """

    __constants__ = ["_name", "_gates"]  # noqa: RUF012
    _name: str = ""  # used in messages
    _gates: int = 0  # per unit, which has as many biases
    input_size: int
    hidden_size: int

    def _op_parameters(self, weight_dropout: MaybeFloat) -> Tensors:
        raise NotImplementedError

    def _one_step(self, x: Tensor, h: Tensor, c: Tensor, parameters: Tensors) -> State:
        raise NotImplementedError

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
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Draws every parameter again."""
        bound = 1.0 / math.sqrt(self.hidden_size)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)


class OneMatrixParameters(Parameters):
    """``weights``, ``(gates * hidden_size, hidden_size + input_size)``, h first, and ``bias``."""

    weights: Tensor
    bias: MaybeTensor

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_positive(type(self).__name__, input_size=input_size, hidden_size=hidden_size)
        self.input_size = input_size
        self.hidden_size = hidden_size
        shape = (self._gates * hidden_size, hidden_size + input_size)
        self.weights = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        size = self._gates * hidden_size
        vector = torch.empty(size, device=device, dtype=dtype) if bias else None
        self.register_parameter("bias", None if vector is None else nn.Parameter(vector))
        self.reset_parameters()

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}, bias={self.bias is not None}"

    def _op_parameters(self, weight_dropout: MaybeFloat) -> Tensors:
        weights, bias = self.weights, self.bias
        if bias is None:
            # The ops do not take None. This is made in every call, because a buffer would not
            # follow when parameters are filled, cast or sharded.
            bias = weights.new_zeros(self._gates * self.hidden_size)
        if weight_dropout is not None and self.training:
            recurrent = F.dropout(weights[:, : self.hidden_size], weight_dropout)
            weights = torch.cat([recurrent, weights[:, self.hidden_size :]], 1)
        return [weights, bias]


class CarryingCell(CarryingStepCall, Parameters):
    """One step of a cell with a state ``(h, c)``."""

    def _step(self, x: Tensor, states: Tensors) -> Tensors:
        h, c = self._one_step(x, states[0], states[1], self._op_parameters(None))
        return [h, c]


class CarryingDirection(Parameters):
    """One direction of one layer of a cell with a state ``(h, c)``, over all steps of a call."""

    def forward(
        self,
        input: Tensor,
        h_0: Tensor,
        c_0: Tensor,
        lengths: MaybeTensor,
        weight_dropout: MaybeFloat,
        zoneout: MaybeFloat,
        reset: MaybeTensor = None,
    ) -> Tuple[Tensor, Tensor, Tensor]:  # noqa: UP006
        parameters = self._op_parameters(weight_dropout)
        fractions: MaybeTensor = None
        if zoneout is not None:
            fractions = zoneout_fractions(input, self.hidden_size, zoneout, self.training)
        return self._sequence(input, h_0, c_0, parameters, lengths, reset, fractions)


class CarryingLayer(CarryingLayerCall, nn.Module):
    """Layers and directions of a cell with a state ``(h, c)``, each a module in ``cells``."""

    __constants__ = ["_name"]  # noqa: RUF012
    __jit_unused_properties__ = ["all_weights"]  # noqa: RUF012
    _direction: type[CarryingDirection]
    # forward checks these instead of the probabilities: torch.compile would recompile for a float
    # that is compared.
    _has_dropout: bool
    _has_weight_dropout: bool
    _has_zoneout: bool

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        *,
        weight_dropout: float = 0.0,
        zoneout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_positive(
            self._name, input_size=input_size, hidden_size=hidden_size, num_layers=num_layers
        )
        self.dropout = dropout
        self.weight_dropout = weight_dropout
        self.zoneout = zoneout
        if dropout > 0 and num_layers == 1:
            warnings.warn(
                f"{self._name}: dropout acts between layers, and there is one: dropout={dropout} "
                "has no effect with num_layers=1",
                stacklevel=2,
            )
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.num_layers = num_layers
        self.bias = bias
        self.batch_first = batch_first
        self.bidirectional = bidirectional
        directions = 2 if bidirectional else 1
        sizes = [input_size] + [directions * hidden_size] * (num_layers - 1)
        more = (hidden_size, bias, device, dtype)
        of_each = [size for size in sizes for _ in range(directions)]
        self.cells = nn.ModuleList(self._direction(size, *more) for size in of_each)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("dropout", "weight_dropout", "zoneout"):
            check_probability(self._name, name, value)
            value = float(value)
            super().__setattr__(f"_has_{name}", value > 0.0)
        super().__setattr__(name, value)

    def reset_parameters(self) -> None:
        """Draws every parameter again."""
        for cell in self.cells:
            cell.reset_parameters()  # type: ignore[operator]

    @property
    def all_weights(self) -> list[list[Tensor]]:
        """The parameters, one list per layer and direction."""
        return [list(cell.parameters()) for cell in self.cells]

    def flatten_parameters(self) -> None:
        """Does nothing; for programs written for ``torch.nn.LSTM``."""

    def _initial(self, x: Tensor, states: MaybeTensors, one: bool) -> Tensors:
        if states is None:
            zeros = x.new_zeros([len(self.cells), x.size(1), self.hidden_size])
            return [zeros, zeros]
        sizes = [len(self.cells), x.size(1), self.hidden_size]
        for k, name in enumerate(["h_0", "c_0"]):
            want = [sizes[0], sizes[2]] if one else sizes
            check_state(self._name, name, states[k], want, "hidden_size")
        return [s.unsqueeze(1) for s in states] if one else states

    def _all_layers(
        self, x: Tensor, states: Tensors, lengths: MaybeTensor, reset: MaybeTensor
    ) -> Tuple[Tensor, Tensors]:  # noqa: UP006
        weight_dropout = self.weight_dropout if self._has_weight_dropout else None
        zoneout = self.zoneout if self._has_zoneout else None
        directions = 2 if self.bidirectional else 1
        from_end: MaybeTensor = None
        if reset is not None and self.bidirectional:
            from_end = reverse_reset(reset, lengths)
        h_0, c_0 = states[0], states[1]
        h_n: Tensors = []
        c_n: Tensors = []
        outputs: Tensors = []
        for k, cell in enumerate(self.cells):
            if k > 0 and k % directions == 0:
                x = self._next_input(outputs)
                outputs = []
            backward = k % directions == 1
            along = reverse(x, lengths) if backward else x
            output, h, c = cell(
                along,
                h_0[k],
                c_0[k],
                lengths,
                weight_dropout,
                zoneout,
                from_end if backward else reset,
            )
            outputs.append(reverse(output, lengths) if backward else output)
            h_n.append(h)
            c_n.append(c)
        output = torch.cat(outputs, 2) if len(outputs) > 1 else outputs[0]
        return output, [stacked(h_n), stacked(c_n)]

    def extra_repr(self) -> str:
        text = f"{self.input_size}, {self.hidden_size}"
        defaults = {"num_layers": 1, "bias": True, "batch_first": False, "dropout": 0.0}
        defaults |= {"bidirectional": False, "weight_dropout": 0.0, "zoneout": 0.0}
        for name, default in defaults.items():
            value = getattr(self, name)
            if value != default:
                text += f", {name}={value}"
        return text


def check_positive(layer: str, **sizes: Any) -> None:
    for name, size in sizes.items():
        is_int = isinstance(size, int) and not isinstance(size, bool)
        if not is_int or size < 1:
            kind = ValueError if is_int else TypeError
            raise kind(f"{layer}: {name} must be a positive int, got {size!r}")
