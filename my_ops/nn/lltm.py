"""The layers over :func:`my_ops.lltm_cell` and :func:`my_ops.lltm`."""

from __future__ import annotations

import math
import warnings
from typing import Any, List, Optional, Tuple  # noqa: UP035  TorchScript reads these

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from my_ops.ops.lltm import lltm, lltm_cell, running_steps

State = Tuple[Tensor, Tensor]  # noqa: UP006


class LLTMCell(nn.Module):
    """:func:`my_ops.lltm_cell` with its parameters, called like ``torch.nn.LSTMCell``.

    Args:
        input_size, hidden_size: sizes of the last dimension of input and state.
        bias: whether the bias is learned; without it, it is zero.
        device, dtype: of the parameters.

    Parameters: ``weights``, ``(3 * hidden_size, hidden_size + input_size)``, and ``bias``,
    ``(3 * hidden_size,)``, drawn from U(-1/sqrt(hidden_size), 1/sqrt(hidden_size)).

    Shapes: ``cell(input, (h, c))`` with input ``(batch, input_size)`` and h, c
    ``(batch, hidden_size)`` (zeros if left out) returns ``(h, c)``.
    """

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
        zero_bias = torch.zeros(3 * hidden_size, device=device, dtype=dtype)
        if bias:
            self.bias = nn.Parameter(zero_bias)
        else:
            self.register_buffer("bias", zero_bias, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws every parameter anew."""
        bound = 1.0 / math.sqrt(self.hidden_size)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def forward(
        self,
        input: Tensor,
        state: Optional[State] = None,  # noqa: UP045
    ) -> State:
        if state is None:
            zero = input.new_zeros([input.size(0), self.hidden_size])
            state = (zero, zero)
        if torch.jit.is_scripting():
            return torch.ops.my_ops.lltm_cell(input, self.weights, self.bias, state[0], state[1])
        else:
            return lltm_cell(input, self.weights, self.bias, state[0], state[1])

    def extra_repr(self) -> str:
        bias = isinstance(self.bias, nn.Parameter)
        return f"{self.input_size}, {self.hidden_size}, bias={bias}"


class LLTM(nn.Module):
    """LLTM over time, in one or more layers and directions, used like ``torch.nn.LSTM``.

    Args:
        input_size, hidden_size: sizes of the last dimension of input and state.
        num_layers: layers, each taking the output of the one before.
        bias: whether the biases are learned; without that, they are zero.
        batch_first: whether input and output are ``(batch, steps, size)``.
        dropout: probability, in training, of an element of every layer's output but the last's.
        bidirectional: whether a second direction runs from the end; outputs are concatenated.
        weight_dropout: DropConnect: probability, in training, of a recurrent weight, drawn once for
            all steps of a call.
        zoneout: probability, in training, that an element of ``h`` keeps its value of the step
            before; in evaluation the mean of that. Runs step by step: many times slower.
        device, dtype: of the parameters.

    Parameters stand in ``cells``, one :class:`LLTMCell` per layer and direction, directions of one
    layer side by side.

    Shapes: ``layer(input, (h_0, c_0), lengths)``; input ``(steps, batch, input_size)``, without the
    batch for one sequence, or a ``PackedSequence``; h_0, c_0 ``(num_layers * directions, batch,
    hidden_size)``, zeros if left out; lengths as in :func:`my_ops.lltm`. Returns ``output, (h_n,
    c_n)``: output ``(steps, batch, directions * hidden_size)``, packed as the input was, and the
    states at the ends, shaped like h_0.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        weight_dropout: float = 0.0,
        zoneout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_positive(
            "LLTM", input_size=input_size, hidden_size=hidden_size, num_layers=num_layers
        )
        _check_probability("LLTM", dropout=dropout, weight_dropout=weight_dropout, zoneout=zoneout)
        if dropout > 0 and num_layers == 1:
            warnings.warn(
                f"LLTM: dropout acts between layers, and there is one: dropout={dropout} has no "
                "effect with num_layers=1",
                stacklevel=2,
            )
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.num_layers = num_layers
        self.batch_first = batch_first
        self.dropout = float(dropout)
        self.bidirectional = bidirectional
        self.weight_dropout = float(weight_dropout)
        self.zoneout = float(zoneout)
        # torch.compile specialises on a float that is compared, after it has compiled once.
        self._has_dropout = dropout > 0
        self._has_weight_dropout = weight_dropout > 0
        self._has_zoneout = zoneout > 0
        self.directions = 2 if bidirectional else 1
        sizes = [input_size] + [self.directions * hidden_size] * (num_layers - 1)
        self.cells = nn.ModuleList(
            LLTMCell(size, hidden_size, bias, device, dtype)
            for size in sizes
            for _ in range(self.directions)
        )

    def reset_parameters(self) -> None:
        """Draws every parameter anew."""
        for cell in self.cells:
            cell.reset_parameters()  # type: ignore[operator]

    def forward(
        self,
        input: Tensor,
        state: Optional[State] = None,  # noqa: UP045
        lengths: Optional[Tensor] = None,  # noqa: UP045
    ) -> Tuple[Tensor, State]:  # noqa: UP006
        if not torch.jit.is_scripting() and isinstance(input, PackedSequence):
            return self._forward_packed(input, state, lengths)
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
        if state is None:
            h_0 = x.new_zeros([len(self.cells), x.size(1), self.hidden_size])
            c_0 = h_0
        else:
            h_0 = state[0].unsqueeze(1) if one else state[0]
            c_0 = state[1].unsqueeze(1) if one else state[1]
        expected = [len(self.cells), x.size(1), self.hidden_size]
        if list(h_0.shape) != expected or list(c_0.shape) != expected:
            raise ValueError(
                "LLTM: h_0 and c_0 must be (num_layers * directions, batch, hidden_size) = "
                f"{expected}, got {list(h_0.shape)} and {list(c_0.shape)}"
            )

        if lengths is not None:
            _check_lengths(x, lengths)

        h_n: List[Tensor] = []  # noqa: UP006
        c_n: List[Tensor] = []  # noqa: UP006
        outputs: List[Tensor] = []  # noqa: UP006
        for k, cell in enumerate(self.cells):
            if k > 0 and k % self.directions == 0:
                x = torch.cat(outputs, 2)
                if self._has_dropout:
                    x = F.dropout(x, self.dropout, self.training)
                outputs = []
            backward = k % self.directions == 1
            weights = self._weights(cell.weights)  # type: ignore[arg-type]
            bias: Tensor = cell.bias  # type: ignore[assignment]
            along = reverse(x, lengths) if backward else x
            if self._has_zoneout:
                output, h, c = self._steps(along, h_0[k], c_0[k], weights, bias, lengths)
            elif torch.jit.is_scripting():
                output, h, c = torch.ops.my_ops.lltm(along, h_0[k], c_0[k], weights, bias, lengths)
            else:
                output, h, c = lltm(along, h_0[k], c_0[k], weights, bias, lengths=lengths)
            outputs.append(reverse(output, lengths) if backward else output)
            h_n.append(h)
            c_n.append(c)

        output = torch.cat(outputs, 2) if len(outputs) > 1 else outputs[0]
        h, c = torch.stack(h_n), torch.stack(c_n)
        if one:
            return output.squeeze(1), (h.squeeze(1), c.squeeze(1))
        return (output.transpose(0, 1) if self.batch_first else output), (h, c)

    @torch.jit.unused
    def _forward_packed(self, input: Any, state: Any, lengths: Any) -> Any:
        """In the order of the packed data, where torch sorts the rows by length."""
        if lengths is not None:
            raise ValueError(
                "LLTM: lengths must be None beside a PackedSequence, which has its own"
            )
        padded, host_lengths = pad_packed_sequence(
            PackedSequence(input.data, input.batch_sizes), batch_first=self.batch_first
        )
        if state is not None and input.sorted_indices is not None:
            state = tuple(s.index_select(1, input.sorted_indices) for s in state)
        output, (h, c) = self(padded, state, host_lengths.to(padded.device, non_blocking=True))
        packed = pack_padded_sequence(output, host_lengths, self.batch_first)
        if input.unsorted_indices is not None:
            h, c = (s.index_select(1, input.unsorted_indices) for s in (h, c))
        indices = (input.sorted_indices, input.unsorted_indices)
        return PackedSequence(packed.data, packed.batch_sizes, *indices), (h, c)

    def _weights(self, weights: Tensor) -> Tensor:
        """With DropConnect on the columns that multiply h."""
        if not self._has_weight_dropout or not self.training:
            return weights
        recurrent = F.dropout(weights[:, : self.hidden_size], self.weight_dropout)
        return torch.cat([recurrent, weights[:, self.hidden_size :]], 1)

    def _steps(
        self,
        x: Tensor,
        h: Tensor,
        c: Tensor,
        weights: Tensor,
        bias: Tensor,
        lengths: Optional[Tensor],  # noqa: UP045
    ) -> Tuple[Tensor, Tensor, Tensor]:  # noqa: UP006
        """One direction with zoneout."""
        if lengths is None:
            runs = torch.ones([x.size(0), x.size(1)], dtype=torch.bool, device=x.device)
        else:
            runs = running_steps(x, lengths)
        outputs: List[Tensor] = []  # noqa: UP006
        for t in range(x.size(0)):
            if torch.jit.is_scripting():
                new_h, new_c = torch.ops.my_ops.lltm_cell(x[t], weights, bias, h, c)
            else:
                new_h, new_c = lltm_cell(x[t], weights, bias, h, c)
            if self.training:
                kept = torch.rand_like(new_h) < self.zoneout
                new_h = torch.where(kept, h, new_h)
            else:
                new_h = torch.lerp(new_h, h, self.zoneout)
            running = runs[t].unsqueeze(1)
            h, c = torch.where(running, new_h, h), torch.where(running, new_c, c)
            outputs.append(h.masked_fill(~running, 0.0))
        if len(outputs) == 0:
            return x.new_zeros([0, x.size(1), self.hidden_size]), h, c
        return torch.stack(outputs), h, c

    def extra_repr(self) -> str:
        text = f"{self.input_size}, {self.hidden_size}"
        bias = isinstance(self.cells[0].bias, nn.Parameter)
        defaults = {"num_layers": 1, "bias": True, "batch_first": False, "dropout": 0.0}
        defaults |= {"bidirectional": False, "weight_dropout": 0.0, "zoneout": 0.0}
        for name, default in defaults.items():
            value = bias if name == "bias" else getattr(self, name)
            if value != default:
                text += f", {name}={value}"
        return text


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


def _check_probability(layer: str, **probabilities: Any) -> None:
    for name, p in probabilities.items():
        if not isinstance(p, (int, float)) or isinstance(p, bool) or not 0 <= p < 1:
            raise ValueError(f"{layer}: {name} must be in [0, 1), got {p!r}")
