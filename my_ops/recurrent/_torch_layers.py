"""What layers with torch's parameters share: LSTM's, GRU's and RNN's, drop-in replacements for
torch.nn's, and those of cells of a program's own.

The layer itself has the parameters, under torch's names. It is a ``torch.nn.RNNBase``, which makes,
draws, copies and saves them, but no ``torch.nn.LSTM``, ``GRU`` or ``RNN``: torch.compile does not
trace these or their subclasses.
"""

from typing import Any, List, Tuple  # noqa: UP035  TorchScript reads these

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from my_ops._private import parameters_by_direction, parameters_changed, weights_in_a_row
from my_ops.recurrent._calls import (
    LayerCall,
    MaybeTensor,
    MaybeTensors,
    Tensors,
    check_heads,
    check_probability,
    check_state,
    joined_heads,
    parameters_by_head,
    reverse,
    reverse_reset,
    stacked,
    states_by_head,
    zoneout_fractions,
)
from my_ops.recurrent._torchs_calls import parameters_for_torch


class TorchLayer(LayerCall, nn.RNNBase):
    """``_direction`` runs the op for one direction of one layer."""

    __constants__ = [  # noqa: RUF012
        *(*nn.RNNBase.__constants__, "_name", "_state_names"),
        *("_has_dropout", "_has_weight_dropout", "_has_zoneout", "heads"),
    ]
    _name: str
    _state_names: list[str]
    # The layers check these instead of the probabilities: torch.compile would compile again for a
    # float that is compared. These are the values of a layer that convert made of torch's.
    _has_dropout: bool = True
    _has_weight_dropout: bool = False
    _has_zoneout: bool = False
    _was_torchs: bool = False  # before convert; such a layer may call cuDNN
    weight_dropout: float = 0.0
    zoneout: float = 0.0
    heads: int = 1

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("weight_dropout", "zoneout"):
            check_probability(self._name, name, value)
            value = float(value)
            if value > 0.0 and self.proj_size > 0:
                raise ValueError(f"{self._name}: {name} must be 0 with proj_size > 0, got {value}")
        if name in ("dropout", "weight_dropout", "zoneout"):
            super().__setattr__(f"_has_{name}", bool(value != 0.0))  # torch checks dropout itself
        super().__setattr__(name, value)

    def _direction(
        self,
        x: Tensor,
        states: Tensors,
        parameters: Tensors,
        lengths: MaybeTensor,
        reset: MaybeTensor,
        zoneout: MaybeTensor,
    ) -> Tensors:
        """The output, and the states at the end."""
        raise NotImplementedError

    def _at_once(
        self,
        x: Any,
        states: Any,
        parameters: Any,
        lengths: Any,
        reset: Any,
        zoneout: Any,
    ) -> Any:
        """``_direction`` of all heads by one op, or None."""
        return None

    def _make_heads(self, heads: int) -> None:
        """The recurrent weights for a number of heads, in place of those for one."""
        check_heads(self._name, heads, self.hidden_size)
        if heads == 1:
            return
        if self.proj_size > 0:
            raise ValueError(f"{self._name}: heads must be 1 with proj_size > 0, got {heads}")
        self.heads = heads
        for names in parameters_by_direction(self):
            whole = getattr(self, names[1])
            blocks = whole.new_empty(len(whole), self.hidden_size // heads)
            setattr(self, names[1], nn.Parameter(blocks))
        parameters_changed(self)
        self.reset_parameters()

    def _by_head(
        self,
        x: Tensor,
        states: Tensors,
        parameters: Tensors,
        lengths: MaybeTensor,
        reset: MaybeTensor,
        zoneout: MaybeTensor,
    ) -> Tensors:
        """``_direction``, of each head with its own part of the states and parameters unless one op
        runs all."""
        heads = self.heads
        if heads == 1:
            return self._direction(x, states, parameters, lengths, reset, zoneout)
        if not torch.jit.is_scripting():
            found = self._at_once(x, states, parameters, lengths, reset, zoneout)
            if found is not None:
                return found
        of_states = states_by_head(states, heads)
        own = parameters_by_head(parameters, heads, self.hidden_size // heads)
        kept = states_by_head([] if zoneout is None else [zoneout], heads)
        results: List[Tensors] = []  # noqa: UP006
        for k in range(heads):
            of_head: MaybeTensor = None
            if zoneout is not None:
                of_head = kept[k][0]
            results.append(self._direction(x, of_states[k], own[k], lengths, reset, of_head))
        return joined_heads(results)

    def flatten_parameters(self) -> None:
        """As torch's, for layers that may call cuDNN: those with projections, and converted ones.
        Others do not need the parameters in a single block of memory, where some would not be
        aligned."""
        if self.proj_size > 0 or self._was_torchs:
            super().flatten_parameters()

    def _in_a_row(self) -> Tensors:
        """The parameters of all layers, after hooks and parametrizations."""
        if torch.jit.is_scripting():
            return self._flat_weights  # type: ignore[return-value]
        else:
            return weights_in_a_row(self)

    def _sizes(self) -> list[int]:
        """The size of each state."""
        return [self.hidden_size] * len(self._state_names)

    def _initial(self, x: Tensor, states: MaybeTensors, one: bool) -> Tensors:
        sizes = self._sizes()
        cells = self.num_layers * (2 if self.bidirectional else 1)
        if states is None:
            zeros = x.new_zeros([cells, x.size(1), sizes[0]])
            return [zeros if n == sizes[0] else x.new_zeros([cells, x.size(1), n]) for n in sizes]
        for k, s in enumerate(states):
            last = "proj_size" if self.proj_size > 0 and k == 0 else "hidden_size"
            want = [cells, sizes[k]] if one else [cells, x.size(1), sizes[k]]
            check_state(self._name, self._state_names[k], s, want, last)
        return [s.unsqueeze(1) for s in states] if one else states

    def _projected(self, x: Tensor, states: Tensors) -> Tuple[Tensor, Tensors]:  # noqa: UP006
        """All layers with projections, which run torch's own op."""
        raise NotImplementedError

    def _torchs(
        self, data: Tensor, batch_sizes: Tensor | None, states: Tensors, parameters: Tensors
    ) -> tuple[Tensor, Tensors]:
        """torch's own op for all layers, for a batch or for packed data."""
        if self._has_dropout:
            check_probability(self._name, "dropout", self.dropout)  # cuDNN takes what is above 1
        of_layer = (parameters, self.bias, self.num_layers, self.dropout)
        more = (*of_layer, self.training, self.bidirectional)
        op = getattr(torch, self.mode.lower())
        states = [s.contiguous() for s in states]  # cuDNN takes no others, our ops do
        hx = states if len(states) > 1 else states[0]
        if batch_sizes is None:
            output, *last = op(data, hx, *more, False)  # batch_first
        else:
            output, *last = op(data, batch_sizes, hx, *more)
        return output, last

    def _check_projected(self, lengths: MaybeTensor, reset: MaybeTensor) -> None:
        if lengths is not None or reset is not None:
            raise ValueError(f"{self._name}: lengths and reset must be None with proj_size > 0")

    def _for_torch(
        self, data: Any, batch_sizes: Any, states: Any, lengths: Any, reset: Any
    ) -> list[Tensor] | None:
        """The parameters, if the call is torch's: of complex numbers, which our ops do not take, or
        one that is faster in torch."""
        if self._has_weight_dropout or self._has_zoneout or self.heads > 1:
            return None
        if lengths is not None or reset is not None:
            return None
        if data.is_complex():
            return self._in_a_row()
        return self._faster_in_torch(data, batch_sizes, states)

    def _faster_in_torch(self, data: Any, batch_sizes: Any, states: Any) -> list[Tensor] | None:
        """The parameters, if the call is: a converted layer may call cuDNN or oneDNN."""
        if not self._was_torchs:
            return None
        return parameters_for_torch(self, data, batch_sizes, states)

    def _all_layers(
        self, x: Tensor, states: Tensors, lengths: MaybeTensor, reset: MaybeTensor
    ) -> Tuple[Tensor, Tensors]:  # noqa: UP006
        if self.proj_size > 0:
            self._check_projected(lengths, reset)
            return self._projected(x, states)
        if not torch.jit.is_scripting():
            parameters = self._for_torch(x, None, states, lengths, reset)
            if parameters is not None:
                return self._torchs(x, None, states, parameters)
        return self._each_layer(x, states, lengths, reset)

    def _run_packed(
        self, input: PackedSequence, states: Any, lengths: Any, reset: Any
    ) -> tuple[PackedSequence, list[Tensor]]:
        data, batch_sizes, sorted_indices, unsorted_indices = input
        if self.proj_size > 0:
            self._check_projected(lengths, reset)
            parameters = self._in_a_row()
        else:
            found = self._for_torch(data, batch_sizes, states or (), lengths, reset)
            if found is None:
                return super()._run_packed(input, states, lengths, reset)
            parameters = found
        states = self._initial(data[None, : batch_sizes[0]], states, False)
        if sorted_indices is not None:
            states = [s.index_select(1, sorted_indices) for s in states]
        output, last = self._torchs(data, batch_sizes, states, parameters)
        if unsorted_indices is not None:
            last = [s.index_select(1, unsorted_indices) for s in last]
        return PackedSequence(output, batch_sizes, sorted_indices, unsorted_indices), last

    def _each_layer(
        self, x: Tensor, states: Tensors, lengths: MaybeTensor, reset: MaybeTensor
    ) -> Tuple[Tensor, Tensors]:  # noqa: UP006
        parameters = self._in_a_row()
        directions = 2 if self.bidirectional else 1
        each = len(parameters) // (self.num_layers * directions)
        from_end: MaybeTensor = None
        if reset is not None and self.bidirectional:
            from_end = reverse_reset(reset, lengths)
        ends: list[Tensors] = [[] for _ in states]
        outputs: Tensors = []
        for k in range(self.num_layers * directions):
            if k > 0 and k % directions == 0:
                x = self._next_input(outputs)
                outputs = []
            backward = k % directions == 1
            own = parameters[k * each : (k + 1) * each]
            if self._has_weight_dropout:
                own[1] = F.dropout(own[1], self.weight_dropout, self.training)
            zoneout: MaybeTensor = None
            if self._has_zoneout:
                zoneout = zoneout_fractions(x, self.hidden_size, self.zoneout, self.training)
            results = self._by_head(
                reverse(x, lengths) if backward else x,
                [s[k] for s in states],
                own,
                lengths,
                from_end if backward else reset,
                zoneout,
            )
            outputs.append(reverse(results[0], lengths) if backward else results[0])
            for i, end in enumerate(ends):
                end.append(results[1 + i])
        output = torch.cat(outputs, 2) if len(outputs) > 1 else outputs[0]
        return output, [stacked(end) for end in ends]

    def extra_repr(self) -> str:
        text = super().extra_repr()
        if self._has_weight_dropout:
            text += f", weight_dropout={self.weight_dropout}"
        if self._has_zoneout:
            text += f", zoneout={self.zoneout}"
        if self.heads > 1:
            text += f", heads={self.heads}"
        return text
