"""What the layers of all recurrent cells share: parameters, one step, one direction, all layers.

A cell's own module says which ops they call and holds the docstrings. The names of classes say what
they assume: Carrying a state ``(h, c)``, OneMatrix the parameters of ``_weights.OneMatrix``.
TorchScript compiles all of them, hence how types and branches are written.
"""

import math
import warnings
from typing import Any, List, Optional, Tuple  # noqa: UP035  TorchScript reads these

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Proxy
from torch.fx.proxy import TraceError
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from my_ops.ops._common import check_tensor
from my_ops.recurrent._formulas import running_steps

State = Tuple[Tensor, Tensor]  # noqa: UP006
Tensors = List[Tensor]  # noqa: UP006
MaybeTensor = Optional[Tensor]  # noqa: UP045
MaybeFloat = Optional[float]  # noqa: UP045


class Parameters(nn.Module):
    """The parameters of one direction of one layer, and the cell's ops with them.

    ``_op_parameters`` are those that the ops take, with DropConnect of probability
    ``weight_dropout`` in training.
    """

    __constants__ = ["_name", "_terms"]  # noqa: RUF012
    _name: str = ""  # in messages
    _terms: int = 0  # of a unit, which has as many biases
    input_size: int
    hidden_size: int

    def _op_parameters(self, weight_dropout: MaybeFloat) -> Tensors:
        raise NotImplementedError

    def _step(self, x: Tensor, h: Tensor, c: Tensor, parameters: Tensors) -> State:
        raise NotImplementedError

    def _sequence(
        self, x: Tensor, h: Tensor, c: Tensor, parameters: Tensors, lengths: MaybeTensor
    ) -> Tuple[Tensor, Tensor, Tensor]:  # noqa: UP006
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Draws every parameter anew."""
        bound = 1.0 / math.sqrt(self.hidden_size)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)


class OneMatrixParameters(Parameters):
    """``weights``, ``(gates * hidden_size, hidden_size + input_size)``, h first, and ``bias``."""

    _gates: int
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
        terms = self._terms * hidden_size
        vector = torch.empty(terms, device=device, dtype=dtype) if bias else None
        self.register_parameter("bias", None if vector is None else nn.Parameter(vector))
        self.reset_parameters()

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}, bias={self.bias is not None}"

    def _op_parameters(self, weight_dropout: MaybeFloat) -> Tensors:
        weights, bias = self.weights, self.bias
        if bias is None:
            # The ops take no None. Made anew each call: a buffer would not go through what fills,
            # casts and shards parameters.
            bias = weights.new_zeros(self._terms * self.hidden_size)
        if weight_dropout is not None and self.training:
            recurrent = F.dropout(weights[:, : self.hidden_size], weight_dropout)
            weights = torch.cat([recurrent, weights[:, self.hidden_size :]], 1)
        return [weights, bias]


class CarryingCell(Parameters):
    """One step of a cell with a state ``(h, c)``."""

    def forward(self, input: Tensor, hx: Optional[State] = None) -> State:  # noqa: UP045
        if not torch.jit.is_scripting():
            if isinstance(input, Proxy):
                return traced_call(self, input, hx)
            check_pair(self._name, input, hx)
        if input.dim() != 1 and input.dim() != 2:
            raise ValueError(
                f"{self._name}: input must have 2 dimensions, or 1 without a batch, "
                f"got {input.dim()}"
            )
        one = input.dim() == 1
        x = input.unsqueeze(0) if one else input
        if hx is None:
            h = x.new_zeros([x.size(0), self.hidden_size])
            c = h
        else:
            h = hx[0].unsqueeze(0) if one else hx[0]
            c = hx[1].unsqueeze(0) if one else hx[1]
        h, c = self._step(x, h, c, self._op_parameters(None))
        return (h.squeeze(0), c.squeeze(0)) if one else (h, c)


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
    ) -> Tuple[Tensor, Tensor, Tensor]:  # noqa: UP006
        parameters = self._op_parameters(weight_dropout)
        if zoneout is not None and input.size(0) > 0:
            return self._with_zoneout(input, h_0, c_0, parameters, lengths, zoneout)
        return self._sequence(input, h_0, c_0, parameters, lengths)

    def _with_zoneout(
        self,
        x: Tensor,
        h: Tensor,
        c: Tensor,
        parameters: Tensors,
        lengths: MaybeTensor,
        zoneout: float,
    ) -> Tuple[Tensor, Tensor, Tensor]:  # noqa: UP006
        """``_sequence`` step by step."""
        if lengths is None:
            runs = torch.ones([x.size(0), x.size(1), 1], dtype=torch.bool, device=x.device)
        else:
            runs = running_steps(x, lengths)
        outputs: Tensors = []
        for t in range(x.size(0)):
            new_h, new_c = self._step(x[t], h, c, parameters)
            h, c = h.to(new_h.dtype), c.to(new_c.dtype)  # of autocast
            if self.training:
                kept = torch.rand_like(new_h) < zoneout
                new_h = torch.where(kept, h, new_h)
            else:
                new_h = torch.lerp(new_h, h, zoneout)
            running = runs[t]
            h, c = torch.where(running, new_h, h), torch.where(running, new_c, c)
            outputs.append(h.masked_fill(~running, 0.0))
        return torch.stack(outputs), h, c


class RecurrentLayer(nn.Module):
    """Layers and directions of any cell: all but its state, its parameters and what runs them.

    A subclass makes the parameters (``_make_parameters``), checks the state or makes one of zeros
    (``_initial``), and runs all layers (``_all_layers``); ``_run`` and ``_run_packed`` are for its
    ``forward``.
    """

    __constants__ = ["_name"]  # noqa: RUF012
    __jit_unused_properties__ = ["all_weights"]  # noqa: RUF012
    _name: str  # in messages
    # What forward asks in place of the probabilities: torch.compile would begin anew at a float
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
        self._make_parameters([size for size in sizes for _ in range(directions)], device, dtype)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("dropout", "weight_dropout", "zoneout"):
            check_probability(self._name, name, value)
            value = float(value)
            super().__setattr__(f"_has_{name}", value > 0.0)
        super().__setattr__(name, value)

    def _make_parameters(
        self,
        input_sizes: list[int],
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        """Of each direction of each layer, whose input sizes are given, directions side by side."""
        raise NotImplementedError

    def _initial(self, x: Tensor, states: Optional[Tensors], one: bool) -> Tensors:  # noqa: UP045
        """The states of all layers before the first step, ``one``: given without the batch."""
        raise NotImplementedError

    def _all_layers(
        self, x: Tensor, states: Tensors, lengths: MaybeTensor
    ) -> Tuple[Tensor, Tensors]:  # noqa: UP006
        raise NotImplementedError

    def flatten_parameters(self) -> None:
        """Does nothing: for programs written for ``torch.nn.LSTM``."""

    def _run(
        self,
        input: Tensor,
        states: Optional[Tensors],  # noqa: UP045
        lengths: MaybeTensor,
    ) -> Tuple[Tensor, Tensors]:  # noqa: UP006
        if input.dim() != 2 and input.dim() != 3:
            raise ValueError(
                f"{self._name}: input must have 3 dimensions, or 2 without a batch, "
                f"got {input.dim()}"
            )
        if input.size(-1) != self.input_size:
            raise ValueError(
                f"{self._name}: input must have input_size = {self.input_size} in its last "
                f"dimension, got {list(input.shape)}"
            )
        one = input.dim() == 2
        x = input.unsqueeze(1) if one else input.transpose(0, 1) if self.batch_first else input
        first = self._initial(x, states, one)
        if lengths is not None:
            check_lengths(self._name, x, lengths)
        output, last = self._all_layers(x, first, lengths)
        if one:
            return output.squeeze(1), [s.squeeze(1) for s in last]
        return (output.transpose(0, 1) if self.batch_first else output), last

    def _next_input(self, outputs: Tensors) -> Tensor:
        """Of a layer, from the outputs of the directions of the one before."""
        x = torch.cat(outputs, 2)
        return F.dropout(x, self.dropout, self.training) if self._has_dropout else x

    def _run_packed(
        self, input: PackedSequence, states: Any
    ) -> tuple[PackedSequence, list[Tensor]]:
        """In the order of the packed data, where torch sorts the rows by length."""
        padded, host_lengths = pad_packed_sequence(
            PackedSequence(input.data, input.batch_sizes), batch_first=self.batch_first
        )
        if states is not None and input.sorted_indices is not None:
            states = [s.index_select(1, input.sorted_indices) for s in states]
        device_lengths = host_lengths.to(padded.device, non_blocking=True)
        output, last = self._run(padded, states, device_lengths)
        packed = pack_padded_sequence(output, host_lengths, self.batch_first)
        if input.unsorted_indices is not None:
            last = [s.index_select(1, input.unsorted_indices) for s in last]
        indices = (input.sorted_indices, input.unsorted_indices)
        return PackedSequence(packed.data, packed.batch_sizes, *indices), last

    def extra_repr(self) -> str:
        text = f"{self.input_size}, {self.hidden_size}"
        defaults = {"num_layers": 1, "bias": True, "batch_first": False, "dropout": 0.0}
        defaults |= {"bidirectional": False, "weight_dropout": 0.0, "zoneout": 0.0}
        for name, default in defaults.items():
            value = getattr(self, name)
            if value != default:
                text += f", {name}={value}"
        return text


class CarryingLayer(RecurrentLayer):
    """Layers and directions of a cell with a state ``(h, c)``, each a module in ``cells``."""

    _direction: type[CarryingDirection]

    def _make_parameters(
        self,
        input_sizes: list[int],
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        more = (self.hidden_size, self.bias, device, dtype)
        self.cells = nn.ModuleList(self._direction(size, *more) for size in input_sizes)

    def reset_parameters(self) -> None:
        """Draws every parameter anew."""
        for cell in self.cells:
            cell.reset_parameters()  # type: ignore[operator]

    @property
    def all_weights(self) -> list[list[Tensor]]:
        """The parameters, one list per layer and direction."""
        return [list(cell.parameters()) for cell in self.cells]

    def forward(
        self,
        input: Tensor,
        hx: Optional[State] = None,  # noqa: UP045
        lengths: MaybeTensor = None,
    ) -> Tuple[Tensor, State]:  # noqa: UP006
        if not torch.jit.is_scripting():
            if isinstance(input, PackedSequence):
                return self._forward_packed(input, hx, lengths)
            if isinstance(input, Proxy):
                return traced_call(self, input, hx, lengths)
            check_pair(self._name, input, hx, lengths)
        states: Optional[Tensors] = None  # noqa: UP045
        if hx is not None:
            states = [hx[0], hx[1]]
        output, last = self._run(input, states, lengths)
        return output, (last[0], last[1])

    def _forward_packed(self, input: Any, hx: Any, lengths: Any) -> Any:
        if lengths is not None:
            raise ValueError(
                f"{self._name}: lengths must be None beside a PackedSequence, which has its own"
            )
        check_pair(self._name, input.data, hx)
        output, last = self._run_packed(input, hx)
        return output, tuple(last)

    def _initial(self, x: Tensor, states: Optional[Tensors], one: bool) -> Tensors:  # noqa: UP045
        if states is None:
            zeros = x.new_zeros([len(self.cells), x.size(1), self.hidden_size])
            return [zeros, zeros]
        check_states(self._name, states, len(self.cells), self.hidden_size, x, one)
        return [s.unsqueeze(1) for s in states] if one else states

    def _all_layers(
        self, x: Tensor, states: Tensors, lengths: MaybeTensor
    ) -> Tuple[Tensor, Tensors]:  # noqa: UP006
        weight_dropout = self.weight_dropout if self._has_weight_dropout else None
        zoneout = self.zoneout if self._has_zoneout else None
        directions = 2 if self.bidirectional else 1
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
            output, h, c = cell(along, h_0[k], c_0[k], lengths, weight_dropout, zoneout)
            outputs.append(reverse(output, lengths) if backward else output)
            h_n.append(h)
            c_n.append(c)
        output = torch.cat(outputs, 2) if len(outputs) > 1 else outputs[0]
        return output, [torch.stack(h_n), torch.stack(c_n)]


def traced_call(layer: Any, input: Any, *others: Any) -> Any:
    """A call under ``torch.fx``: the layer as it is, as torch takes its own, and no others."""
    tracer = input.tracer
    path = tracer.path_of_module(layer)
    if not path:
        raise TraceError(f"{type(layer).__name__}: trace the model that holds the layer")
    return tracer.create_proxy("call_module", path, (input, *others), {})


def check_pair(layer: str, input: Any, hx: Any, lengths: Any = None) -> None:
    if hx is None:
        if not isinstance(input, Tensor):
            check_tensor(layer, input=input)
    else:
        if not isinstance(hx, (tuple, list)) or len(hx) != 2:
            got = f"{len(hx)} of them" if isinstance(hx, (tuple, list)) else type(hx).__name__
            raise TypeError(f"{layer}: hx must be a pair of tensors (h_0, c_0), got {got}")
        h_0, c_0 = hx
        if not (isinstance(input, Tensor) and isinstance(h_0, Tensor) and isinstance(c_0, Tensor)):
            check_tensor(layer, input=input, h_0=h_0, c_0=c_0)
    if lengths is not None:
        check_tensor(layer, lengths=lengths)


def check_states(
    layer: str, states: Tensors, cells: int, hidden: int, x: Tensor, one: bool
) -> None:
    if one:
        shape, expected = "", [cells, hidden]
    else:
        shape, expected = "batch, ", [cells, x.size(1), hidden]
    if list(states[0].shape) != expected or list(states[1].shape) != expected:
        raise ValueError(
            f"{layer}: h_0 and c_0 must be (num_layers * directions, {shape}hidden_size) = "
            f"{expected}, got {list(states[0].shape)} and {list(states[1].shape)}"
        )


def check_lengths(layer: str, x: Tensor, lengths: Tensor) -> None:
    if lengths.dim() != 1 or lengths.size(0) != x.size(1):
        raise ValueError(
            f"{layer}: lengths must be (batch,) = ({x.size(1)},), got {list(lengths.shape)}"
        )
    if lengths.dtype != torch.int64:
        raise ValueError(f"{layer}: lengths must be of dtype int64, got {lengths.dtype}")
    if lengths.device != x.device:
        raise ValueError(
            f"{layer}: lengths must be on the device of input, got {lengths.device} and {x.device}"
        )


def reverse(x: Tensor, lengths: Optional[Tensor]) -> Tensor:  # noqa: UP045
    """Turns time around, ``(steps, batch, size)``: of every row the part that runs."""
    if lengths is None:
        return x.flip(0)
    t = torch.arange(x.size(0), device=x.device).unsqueeze(1)
    from_end = lengths.clamp(max=x.size(0)) - 1 - t
    index = torch.where(from_end >= 0, from_end, t)
    return x.gather(0, index.unsqueeze(2).expand_as(x))


def check_positive(layer: str, **sizes: Any) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{layer}: {name} must be a positive int, got {size!r}")


def check_probability(layer: str, name: str, p: Any) -> None:
    if not isinstance(p, (int, float)) or isinstance(p, bool) or not 0 <= p < 1:
        raise ValueError(f"{layer}: {name} must be in [0, 1), got {p!r}")
