"""The layers over :func:`my_ops.lltm_cell` and :func:`my_ops.lltm`."""

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
from my_ops.recurrent.lltm import lltm, lltm_cell

State = Tuple[Tensor, Tensor]  # noqa: UP006


class _Parameters(nn.Module):
    """The parameters of one direction of one layer."""

    weights: Tensor
    bias: Optional[Tensor]  # noqa: UP045

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_positive(type(self).__name__, input_size=input_size, hidden_size=hidden_size)
        self.input_size = input_size
        self.hidden_size = hidden_size
        shape = (3 * hidden_size, hidden_size + input_size)
        self.weights = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        vector = torch.empty(3 * hidden_size, device=device, dtype=dtype) if bias else None
        self.register_parameter("bias", None if vector is None else nn.Parameter(vector))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws every parameter anew."""
        bound = 1.0 / math.sqrt(self.hidden_size)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}, bias={self.bias is not None}"


def _or_zeros(bias: Optional[Tensor], weights: Tensor) -> Tensor:  # noqa: UP045
    """The bias of an op, which takes no None.

    Made anew each call: a buffer would not go through what fills, casts and shards parameters.
    """
    return weights.new_zeros(weights.size(0)) if bias is None else bias


class LLTMCell(_Parameters):
    """:func:`my_ops.lltm_cell` with its parameters, called like ``torch.nn.LSTMCell``.

    Args:
        input_size, hidden_size: sizes of the last dimension of input and state.
        bias: whether to add a learned bias.
        device, dtype: of the parameters.

    Parameters: ``weights``, ``(3 * hidden_size, hidden_size + input_size)``, and ``bias``,
    ``(3 * hidden_size,)`` or None, drawn from U(-1/sqrt(hidden_size), 1/sqrt(hidden_size)).

    Shapes: ``cell(input, (h, c))`` with input ``(batch, input_size)`` and h, c
    ``(batch, hidden_size)`` (zeros if left out) returns ``(h, c)``; all without the batch for one
    row.

    Raises:
        TypeError: an argument is no tensor, or ``hx`` no pair of them.
        ValueError: ``input`` has other dimensions.
        RuntimeError: dtypes, devices or shapes do not fit.
    """

    def forward(
        self,
        input: Tensor,
        hx: Optional[State] = None,  # noqa: UP045
    ) -> State:
        if not torch.jit.is_scripting():
            if isinstance(input, Proxy):
                return _traced_call(self, input, hx)
            _check_arguments("LLTMCell", input, hx)
        if input.dim() != 1 and input.dim() != 2:
            raise ValueError(
                f"LLTMCell: input must have 2 dimensions, or 1 without a batch, got {input.dim()}"
            )
        one = input.dim() == 1
        x = input.unsqueeze(0) if one else input
        if hx is None:
            h = x.new_zeros([x.size(0), self.hidden_size])
            c = h
        else:
            h = hx[0].unsqueeze(0) if one else hx[0]
            c = hx[1].unsqueeze(0) if one else hx[1]
        weights = self.weights
        bias = _or_zeros(self.bias, weights)
        if torch.jit.is_scripting():
            h, c = torch.ops.my_ops.lltm_cell(x, weights, bias, h, c)
        else:
            h, c = lltm_cell(x, weights, bias, h, c)
        return (h.squeeze(0), c.squeeze(0)) if one else (h, c)


class LLTMDirection(_Parameters):
    """One direction of one layer of :class:`LLTM`, over all steps of a call.

    Shapes: as of :func:`my_ops.lltm`; the probabilities as of :class:`LLTM`, None for 0.
    """

    def forward(
        self,
        input: Tensor,
        h_0: Tensor,
        c_0: Tensor,
        lengths: Optional[Tensor],  # noqa: UP045
        weight_dropout: Optional[float],  # noqa: UP045
        zoneout: Optional[float],  # noqa: UP045
    ) -> Tuple[Tensor, Tensor, Tensor]:  # noqa: UP006
        weights = self.weights
        bias = _or_zeros(self.bias, weights)
        if weight_dropout is not None and self.training:
            recurrent = F.dropout(weights[:, : self.hidden_size], weight_dropout)
            weights = torch.cat([recurrent, weights[:, self.hidden_size :]], 1)
        if zoneout is not None and input.size(0) > 0:
            return self._steps(input, h_0, c_0, weights, bias, lengths, zoneout)
        if torch.jit.is_scripting():
            return torch.ops.my_ops.lltm(input, h_0, c_0, weights, bias, lengths)
        else:
            return lltm(input, h_0, c_0, weights, bias, lengths=lengths)

    def _steps(
        self,
        x: Tensor,
        h: Tensor,
        c: Tensor,
        weights: Tensor,
        bias: Tensor,
        lengths: Optional[Tensor],  # noqa: UP045
        zoneout: float,
    ) -> Tuple[Tensor, Tensor, Tensor]:  # noqa: UP006
        """The same with zoneout."""
        if lengths is None:
            runs = torch.ones([x.size(0), x.size(1)], dtype=torch.bool, device=x.device)
        else:
            runs = running_steps(x, lengths).squeeze(2)
        outputs: List[Tensor] = []  # noqa: UP006
        for t in range(x.size(0)):
            if torch.jit.is_scripting():
                new_h, new_c = torch.ops.my_ops.lltm_cell(x[t], weights, bias, h, c)
            else:
                new_h, new_c = lltm_cell(x[t], weights, bias, h, c)
            h, c = h.to(new_h.dtype), c.to(new_c.dtype)  # of autocast
            if self.training:
                kept = torch.rand_like(new_h) < zoneout
                new_h = torch.where(kept, h, new_h)
            else:
                new_h = torch.lerp(new_h, h, zoneout)
            running = runs[t].unsqueeze(1)
            h, c = torch.where(running, new_h, h), torch.where(running, new_c, c)
            outputs.append(h.masked_fill(~running, 0.0))
        return torch.stack(outputs), h, c


class LLTM(nn.Module):
    """LLTM over time, in one or more layers and directions, used like ``torch.nn.LSTM``.

    Args:
        input_size, hidden_size: sizes of the last dimension of input and state.
        num_layers: layers, each taking the output of the one before.
        bias: whether to add learned biases.
        batch_first: whether input and output are ``(batch, steps, size)``.
        dropout: probability, in training, of an element of every layer's output but the last's.
        bidirectional: whether a second direction runs from the end; outputs are concatenated.
        weight_dropout: DropConnect: probability, in training, of a recurrent weight, drawn once for
            all steps of a call.
        zoneout: probability, in training, that an element of ``h`` keeps its value of the step
            before; in evaluation the mean of that. Runs step by step: many times slower.
        device, dtype: of the parameters.

    Parameters stand in ``cells``, one module per layer and direction, directions of one layer side
    by side: ``cells.0.weights`` and ``cells.0.bias`` are those of :class:`LLTMCell`. Each is called
    once a call, for all steps: hooks on it, pruning, ``weight_norm`` and ``fully_shard`` act.

    Shapes: ``layer(input, (h_0, c_0), lengths)``; input ``(steps, batch, input_size)``, without the
    batch for one sequence, or a ``PackedSequence``; h_0, c_0 ``(num_layers * directions, batch,
    hidden_size)``, zeros if left out; lengths as in :func:`my_ops.lltm`. Returns ``output, (h_n,
    c_n)``: output ``(steps, batch, directions * hidden_size)``, packed as the input was, and the
    states at the ends, shaped like h_0.

    Raises:
        TypeError: an argument is no tensor, or ``hx`` no pair of them.
        ValueError: shapes do not fit, or ``lengths``.
        RuntimeError: dtypes or devices do not fit.
    """

    __jit_unused_properties__ = ["all_weights"]  # noqa: RUF012
    proj_size = 0  # for what asks an nn.LSTM: LLTM has no projections
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
        _check_positive(
            "LLTM", input_size=input_size, hidden_size=hidden_size, num_layers=num_layers
        )
        self.dropout = dropout
        self.weight_dropout = weight_dropout
        self.zoneout = zoneout
        if dropout > 0 and num_layers == 1:
            warnings.warn(
                f"LLTM: dropout acts between layers, and there is one: dropout={dropout} has no "
                "effect with num_layers=1",
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
        self.cells = nn.ModuleList(
            LLTMDirection(size, hidden_size, bias, device, dtype)
            for size in sizes
            for _ in range(directions)
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("dropout", "weight_dropout", "zoneout"):
            _check_probability("LLTM", name, value)
            value = float(value)
            super().__setattr__(f"_has_{name}", value > 0.0)
        super().__setattr__(name, value)

    def reset_parameters(self) -> None:
        """Draws every parameter anew."""
        for cell in self.cells:
            cell.reset_parameters()  # type: ignore[operator]

    def flatten_parameters(self) -> None:
        """Does nothing: for programs written for ``torch.nn.LSTM``."""

    @property
    def all_weights(self) -> list[list[Tensor]]:
        """The parameters, one list per layer and direction."""
        return [[p for p in (c.weights, c.bias) if isinstance(p, Tensor)] for c in self.cells]

    def forward(
        self,
        input: Tensor,
        hx: Optional[State] = None,  # noqa: UP045
        lengths: Optional[Tensor] = None,  # noqa: UP045
    ) -> Tuple[Tensor, State]:  # noqa: UP006
        if not torch.jit.is_scripting():
            if isinstance(input, PackedSequence):
                return self._forward_packed(input, hx, lengths)
            if isinstance(input, Proxy):
                return _traced_call(self, input, hx, lengths)
            _check_arguments("LLTM", input, hx, lengths)
        if input.dim() != 2 and input.dim() != 3:
            raise ValueError(
                f"LLTM: input must have 3 dimensions, or 2 without a batch, got {input.dim()}"
            )
        if input.size(-1) != self.input_size:
            raise ValueError(
                f"LLTM: input must have input_size = {self.input_size} in its last dimension, "
                f"got {list(input.shape)}"
            )
        one = input.dim() == 2
        x = input.unsqueeze(1) if one else input.transpose(0, 1) if self.batch_first else input
        if hx is None:
            h_0 = x.new_zeros([len(self.cells), x.size(1), self.hidden_size])
            c_0 = h_0
        else:
            _check_state(hx, len(self.cells), self.hidden_size, None if one else x.size(1))
            h_0 = hx[0].unsqueeze(1) if one else hx[0]
            c_0 = hx[1].unsqueeze(1) if one else hx[1]
        if lengths is not None:
            _check_lengths(x, lengths)

        weight_dropout = self.weight_dropout if self._has_weight_dropout else None
        zoneout = self.zoneout if self._has_zoneout else None
        directions = 2 if self.bidirectional else 1
        h_n: List[Tensor] = []  # noqa: UP006
        c_n: List[Tensor] = []  # noqa: UP006
        outputs: List[Tensor] = []  # noqa: UP006
        for k, cell in enumerate(self.cells):
            if k > 0 and k % directions == 0:
                x = torch.cat(outputs, 2)
                if self._has_dropout:
                    x = F.dropout(x, self.dropout, self.training)
                outputs = []
            backward = k % directions == 1
            along = reverse(x, lengths) if backward else x
            output, h, c = cell(along, h_0[k], c_0[k], lengths, weight_dropout, zoneout)
            outputs.append(reverse(output, lengths) if backward else output)
            h_n.append(h)
            c_n.append(c)

        output = torch.cat(outputs, 2) if len(outputs) > 1 else outputs[0]
        h, c = torch.stack(h_n), torch.stack(c_n)
        if one:
            return output.squeeze(1), (h.squeeze(1), c.squeeze(1))
        return (output.transpose(0, 1) if self.batch_first else output), (h, c)

    def _forward_packed(self, input: Any, hx: Any, lengths: Any) -> Any:
        """In the order of the packed data, where torch sorts the rows by length."""
        if lengths is not None:
            raise ValueError(
                "LLTM: lengths must be None beside a PackedSequence, which has its own"
            )
        padded, host_lengths = pad_packed_sequence(
            PackedSequence(input.data, input.batch_sizes), batch_first=self.batch_first
        )
        _check_arguments("LLTM", padded, hx)
        if hx is not None and input.sorted_indices is not None:
            hx = tuple(s.index_select(1, input.sorted_indices) for s in hx)
        device_lengths = host_lengths.to(padded.device, non_blocking=True)
        output, (h, c) = self.forward(padded, hx, device_lengths)
        packed = pack_padded_sequence(output, host_lengths, self.batch_first)
        if input.unsorted_indices is not None:
            h, c = (s.index_select(1, input.unsorted_indices) for s in (h, c))
        indices = (input.sorted_indices, input.unsorted_indices)
        return PackedSequence(packed.data, packed.batch_sizes, *indices), (h, c)

    def extra_repr(self) -> str:
        text = f"{self.input_size}, {self.hidden_size}"
        defaults = {"num_layers": 1, "bias": True, "batch_first": False, "dropout": 0.0}
        defaults |= {"bidirectional": False, "weight_dropout": 0.0, "zoneout": 0.0}
        for name, default in defaults.items():
            value = getattr(self, name)
            if value != default:
                text += f", {name}={value}"
        return text


def _traced_call(layer: Any, input: Any, *others: Any) -> Any:
    """A call under ``torch.fx``: the layer as it is, as torch takes its own, and no others."""
    tracer = input.tracer
    path = tracer.path_of_module(layer)
    if not path:
        raise TraceError(f"{type(layer).__name__}: trace the model that holds the layer")
    return tracer.create_proxy("call_module", path, (input, *others), {})


def _check_arguments(layer: str, input: Any, hx: Any, lengths: Any = None) -> None:
    if hx is None:
        check_tensor(layer, input=input)
    else:
        if not isinstance(hx, (tuple, list)) or len(hx) != 2:
            got = f"{len(hx)} of them" if isinstance(hx, (tuple, list)) else type(hx).__name__
            raise TypeError(f"{layer}: hx must be a pair of tensors (h_0, c_0), got {got}")
        check_tensor(layer, input=input, h_0=hx[0], c_0=hx[1])
    if lengths is not None:
        check_tensor(layer, lengths=lengths)


def _check_state(
    hx: State,
    cells: int,
    hidden: int,
    batch: Optional[int],  # noqa: UP045
) -> None:
    if batch is None:
        shape, expected = "", [cells, hidden]
    else:
        shape, expected = "batch, ", [cells, batch, hidden]
    if list(hx[0].shape) != expected or list(hx[1].shape) != expected:
        raise ValueError(
            f"LLTM: h_0 and c_0 must be (num_layers * directions, {shape}hidden_size) = "
            f"{expected}, got {list(hx[0].shape)} and {list(hx[1].shape)}"
        )


def _check_lengths(x: Tensor, lengths: Tensor) -> None:
    if lengths.dim() != 1 or lengths.size(0) != x.size(1):
        raise ValueError(
            f"LLTM: lengths must be (batch,) = ({x.size(1)},), got {list(lengths.shape)}"
        )
    if lengths.dtype != torch.int64:
        raise ValueError(f"LLTM: lengths must be of dtype int64, got {lengths.dtype}")
    if lengths.device != x.device:
        raise ValueError(
            f"LLTM: lengths must be on the device of input, got {lengths.device} and {x.device}"
        )


def reverse(x: Tensor, lengths: Optional[Tensor]) -> Tensor:  # noqa: UP045
    """Turns time around, ``(steps, batch, size)``: of every row the part that runs."""
    if lengths is None:
        return x.flip(0)
    t = torch.arange(x.size(0), device=x.device).unsqueeze(1)
    from_end = lengths.clamp(max=x.size(0)) - 1 - t
    index = torch.where(from_end >= 0, from_end, t)
    return x.gather(0, index.unsqueeze(2).expand_as(x))


def _check_positive(layer: str, **sizes: Any) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{layer}: {name} must be a positive int, got {size!r}")


def _check_probability(layer: str, name: str, p: Any) -> None:
    if not isinstance(p, (int, float)) or isinstance(p, bool) or not 0 <= p < 1:
        raise ValueError(f"{layer}: {name} must be in [0, 1), got {p!r}")
