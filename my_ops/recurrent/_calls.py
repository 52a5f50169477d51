"""What a call of a recurrent layer or cell does around its ops, for all kinds of parameters.

These are mixins for modules that have ``_name``, for messages, and torch's attributes. The names of
classes say what they assume: Carrying means a state ``(h, c)``, Plain a state ``h`` alone.
TorchScript compiles all of them, which explains how types and branches are written.
"""

from collections.abc import Iterable
from numbers import Integral, Real
from typing import (  # noqa: UP035  TorchScript reads these
    TYPE_CHECKING,
    Any,
    List,
    Optional,
    Protocol,
    Tuple,
    overload,
)

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Proxy
from torch.fx.proxy import TraceError
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from my_ops._errors import without_kernel
from my_ops.ops._checks import show
from my_ops.ops._common import check_tensor

State = Tuple[Tensor, Tensor]  # noqa: UP006
Tensors = List[Tensor]  # noqa: UP006
Sizes = List[int]  # noqa: UP006
MaybeTensor = Optional[Tensor]  # noqa: UP045
MaybeState = Optional[State]  # noqa: UP045
MaybeTensors = Optional[Tensors]  # noqa: UP045
MaybeFloat = Optional[float]  # noqa: UP045
if TYPE_CHECKING:  # what calls from Python take; forward has the types of TorchScript
    Pair = State | Tensors
    Lengths = Tensor | list[int] | tuple[int, ...] | None

    class CarryingLayer(Protocol):
        @overload
        def __call__(
            self,
            input: Tensor,
            hx: Pair | None = None,
            lengths: Lengths = None,
            reset: Tensor | None = None,
        ) -> tuple[Tensor, State]: ...
        @overload
        def __call__(
            self,
            input: PackedSequence,
            hx: Pair | None = None,
            lengths: None = None,
            reset: Tensor | None = None,
        ) -> tuple[PackedSequence, State]: ...

    class PlainLayer(Protocol):
        @overload
        def __call__(
            self,
            input: Tensor,
            hx: Tensor | None = None,
            lengths: Lengths = None,
            reset: Tensor | None = None,
        ) -> tuple[Tensor, Tensor]: ...
        @overload
        def __call__(
            self,
            input: PackedSequence,
            hx: Tensor | None = None,
            lengths: None = None,
            reset: Tensor | None = None,
        ) -> tuple[PackedSequence, Tensor]: ...


# ------------------------------------------------------------------------------------- torch.fx


def _tracer_of(arguments: Iterable[Any]) -> Any:
    """The tracer of ``torch.fx`` that traces any of the arguments, or None."""
    for a in arguments:
        if isinstance(a, Proxy):
            return a.tracer
        if isinstance(a, (tuple, list)):
            tracer = _tracer_of(a)
            if tracer is not None:
                return tracer
    return None


class FxLeaf:
    """A module that ``torch.fx`` leaves whole, as torch's own: hooks do not see what it traces."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tracer = _tracer_of(args) or _tracer_of(kwargs.values())
        if tracer is None:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        return tracer.create_proxy("call_module", tracer.path_of_module(self), args, kwargs)


# ------------------------------------------------------------------------------------- one step


class StepCall(FxLeaf):
    """One step. ``_step`` runs the op."""

    _name: str
    hidden_size: int

    def _step(self, x: Tensor, states: Tensors) -> Tensors:
        raise NotImplementedError

    def _plain_step(self, input: Tensor, states: Any) -> Any:
        """The states after a call that ``_plain.plain_step`` takes, or None."""
        return None

    def _run(self, input: Tensor, states: MaybeTensors, count: int) -> Tensors:
        """``count``: the number of states of a row."""
        if input.dim() != 1 and input.dim() != 2:
            raise RuntimeError(
                f"{self._name}: input must be (batch, input_size) or (input_size,), "
                f"got {shape_of(input)}"
            )
        one = input.dim() == 1
        x = input.unsqueeze(0) if one else input
        if states is None:
            states = [x.new_zeros([x.size(0), self.hidden_size])] * count
        elif one:
            states = [s.unsqueeze(0) for s in states]
        last = self._step(x, states)
        return [s.squeeze(0) for s in last] if one else last


class CarryingStepCall(StepCall):
    if TYPE_CHECKING:

        def __call__(self, input: Tensor, hx: Pair | None = None) -> State: ...

    def forward(self, input: Tensor, hx: MaybeState = None) -> State:
        if not torch.jit.is_scripting():
            check_pair(self._name, input, hx)
            found = self._plain_step(input, () if hx is None else hx)
            if found is not None:
                return found[0], found[1]
        states: MaybeTensors = None
        if hx is not None:
            states = [hx[0], hx[1]]
        last = self._run(input, states, 2)
        return last[0], last[1]


class PlainStepCall(StepCall):
    if TYPE_CHECKING:

        def __call__(self, input: Tensor, hx: Tensor | None = None) -> Tensor: ...

    def forward(self, input: Tensor, hx: MaybeTensor = None) -> Tensor:
        if not torch.jit.is_scripting():
            check_one(self._name, input, hx)
            found = self._plain_step(input, () if hx is None else (hx,))
            if found is not None:
                return found[0]
        states: MaybeTensors = None
        if hx is not None:
            states = [hx]
        return self._run(input, states, 1)[0]


# ------------------------------------------------------------------------------------ all steps


class LayerCall(FxLeaf):
    """All layers and directions.

    ``_initial`` checks a state, or makes one of zeros; ``_all_layers`` runs them.
    """

    _name: str
    input_size: int
    dropout: float
    _has_dropout: bool
    training: bool
    batch_first: bool

    def _initial(self, x: Tensor, states: MaybeTensors, one: bool) -> Tensors:
        """The states of all layers before the first step. ``one``: they were given without the
        batch."""
        raise NotImplementedError

    def _all_layers(
        self, x: Tensor, states: Tensors, lengths: MaybeTensor, reset: MaybeTensor
    ) -> Tuple[Tensor, Tensors]:  # noqa: UP006
        raise NotImplementedError

    def _plain(self, input: Tensor, states: Any) -> Any:
        """The output and the states at the end of a call that ``_plain.plain`` takes, or None."""
        return None

    def _run(
        self, input: Tensor, states: MaybeTensors, lengths: MaybeTensor, reset: MaybeTensor
    ) -> Tuple[Tensor, Tensors]:  # noqa: UP006
        one = input.dim() == 2
        if (input.dim() != 3 and not one) or input.size(-1) != self.input_size:
            self._refuse(input)
        x = input.unsqueeze(1) if one else input.transpose(0, 1) if self.batch_first else input
        first = self._initial(x, states, one)
        if lengths is not None:
            check_lengths(self._name, x, lengths)
        if reset is not None:
            check_reset(self._name, input, reset, self.batch_first)
            reset = reset.unsqueeze(1) if one else reset
            reset = reset.transpose(0, 1) if self.batch_first and not one else reset
        output, last = self._all_layers(x, first, lengths, reset)
        if one:
            return output.squeeze(1), [s.squeeze(1) for s in last]
        return (output.transpose(0, 1) if self.batch_first else output), last

    def _refuse(self, input: Tensor) -> None:
        rule = "(batch, steps, input_size)" if self.batch_first else "(steps, batch, input_size)"
        if input.dim() == 3 or input.dim() == 2:
            rule = rule if input.dim() == 3 else "(steps, input_size)"
            rule += f" = {shown(list(input.shape[:-1]) + [self.input_size])}"  # noqa: RUF005
        else:
            rule += " or (steps, input_size)"
        raise RuntimeError(f"{self._name}: input must be {rule}, got {shape_of(input)}")

    def _next_input(self, outputs: Tensors) -> Tensor:
        """The input of a layer, from the outputs of the directions of the layer before."""
        x = torch.cat(outputs, 2)
        return F.dropout(x, self.dropout, self.training) if self._has_dropout else x

    def _run_packed(
        self, input: PackedSequence, states: Any, lengths: Any, reset: Any
    ) -> tuple[PackedSequence, list[Tensor]]:
        """Runs in the order of the packed data, in which torch sorts the rows by length."""
        if lengths is not None:
            raise ValueError(
                f"{self._name}: lengths must be None with a PackedSequence, which has its own"
            )
        if input.data.dim() != 2:
            raise RuntimeError(
                f"{self._name}: the data of a PackedSequence must be (elements, input_size), "
                f"got {shape_of(input.data)}"
            )
        padded, host_lengths = pad_packed_sequence(
            PackedSequence(input.data, input.batch_sizes), batch_first=self.batch_first
        )
        if input.sorted_indices is not None:
            if states is not None:
                states = self._initial(
                    padded.transpose(0, 1) if self.batch_first else padded, states, False
                )
                states = [s.index_select(1, input.sorted_indices) for s in states]
            if reset is not None:
                check_reset(self._name, padded, reset, self.batch_first)
                reset = reset.index_select(0 if self.batch_first else 1, input.sorted_indices)
        device_lengths = host_lengths.to(padded.device, non_blocking=True)
        output, last = self._run(padded, states, device_lengths, reset)
        packed = pack_padded_sequence(output, host_lengths, self.batch_first)
        if input.unsorted_indices is not None:
            last = [s.index_select(1, input.unsorted_indices) for s in last]
        indices = (input.sorted_indices, input.unsorted_indices)
        return PackedSequence(packed.data, packed.batch_sizes, *indices), last


class CarryingLayerCall(LayerCall):
    if TYPE_CHECKING:
        __call__: CarryingLayer

    def forward(
        self,
        input: Tensor,
        hx: MaybeState = None,
        lengths: MaybeTensor = None,
        reset: MaybeTensor = None,
    ) -> Tuple[Tensor, State]:  # noqa: UP006
        if not torch.jit.is_scripting():
            if isinstance(input, PackedSequence):
                return self._forward_packed(input, hx, lengths, reset)
            lengths = on_device(self._name, input, lengths, self.batch_first)
            check_pair(self._name, input, hx, lengths=lengths, reset=reset)
            if lengths is None and reset is None:
                found = self._plain(input, () if hx is None else hx)
                if found is not None:
                    return found[0], (found[1], found[2])
        states: MaybeTensors = None
        if hx is not None:
            states = [hx[0], hx[1]]
        output, last = self._run(input, states, lengths, reset)
        return output, (last[0], last[1])

    def _forward_packed(self, input: Any, hx: Any, lengths: Any, reset: Any) -> Any:
        check_pair(self._name, input.data, hx, reset=reset)
        output, last = self._run_packed(input, hx, lengths, reset)
        return output, tuple(last)


class PlainLayerCall(LayerCall):
    if TYPE_CHECKING:
        __call__: PlainLayer

    def forward(
        self,
        input: Tensor,
        hx: MaybeTensor = None,
        lengths: MaybeTensor = None,
        reset: MaybeTensor = None,
    ) -> Tuple[Tensor, Tensor]:  # noqa: UP006
        if not torch.jit.is_scripting():
            if isinstance(input, PackedSequence):
                return self._forward_packed(input, hx, lengths, reset)
            lengths = on_device(self._name, input, lengths, self.batch_first)
            check_one(self._name, input, hx, lengths=lengths, reset=reset)
            if lengths is None and reset is None:
                found = self._plain(input, () if hx is None else (hx,))
                if found is not None:
                    return found[0], found[1]
        states: MaybeTensors = None
        if hx is not None:
            states = [hx]
        output, last = self._run(input, states, lengths, reset)
        return output, last[0]

    def _forward_packed(self, input: Any, hx: Any, lengths: Any, reset: Any) -> Any:
        check_one(self._name, input.data, hx, reset=reset)
        states = None if hx is None else [hx]
        output, last = self._run_packed(input, states, lengths, reset)
        return output, last[0]


# ------------------------------------------------------------------------------------- functions


def shown(sizes: Sizes) -> str:
    """As the ops show a shape: (2, 3)."""
    text = ", ".join([str(n) for n in sizes])
    return f"({text},)" if len(sizes) == 1 else f"({text})"


def shape_of(t: Tensor) -> str:
    return shown(list(t.shape))


def dtype_of(t: Tensor) -> str:
    name = str(t.dtype)  # in TorchScript a number
    if not torch.jit.is_scripting():
        name = show(t.dtype)
    return name


def _check_given(layer: str, **tensors: Any) -> None:
    for name, t in tensors.items():
        if t is not None:
            check_tensor(layer, **{name: t})


def _check_input(layer: str, input: Any) -> None:
    if not isinstance(input, Tensor):
        if isinstance(input, Proxy):
            raise TraceError(f"{layer}: trace the model that holds the layer")
        check_tensor(layer, input=input)
    problem = without_kernel(input)
    if problem is not None:
        raise NotImplementedError(f"{layer}: input {problem}")


def check_pair(layer: str, input: Any, hx: Any, **of_rows: Any) -> None:
    _check_input(layer, input)
    if hx is not None:
        if not isinstance(hx, (tuple, list)) or len(hx) != 2:
            got = f"{len(hx)} of them" if isinstance(hx, (tuple, list)) else type(hx).__name__
            raise TypeError(f"{layer}: hx must be a pair of tensors (h_0, c_0), got {got}")
        h_0, c_0 = hx
        if not (isinstance(h_0, Tensor) and isinstance(c_0, Tensor)):
            check_tensor(layer, h_0=h_0, c_0=c_0)
    _check_given(layer, **of_rows)


def check_states(layer: str, names: list[str], input: Any, hx: Any, **of_rows: Any) -> None:
    """For any number of states, which have these names."""
    if len(names) == 1:
        return check_one(layer, input, hx, **of_rows)
    _check_input(layer, input)
    if hx is not None:
        if not isinstance(hx, (tuple, list)) or len(hx) != len(names):
            got = f"{len(hx)} of them" if isinstance(hx, (tuple, list)) else type(hx).__name__
            want = f"{len(names)} tensors ({', '.join(names)})"
            raise TypeError(f"{layer}: hx must be a tuple of {want}, got {got}")
        check_tensor(layer, **dict(zip(names, hx, strict=True)))
    _check_given(layer, **of_rows)


def check_one(layer: str, input: Any, hx: Any, **of_rows: Any) -> None:
    _check_input(layer, input)
    _check_given(layer, hx=hx, **of_rows)


def on_device(layer: str, input: Any, lengths: Any, batch_first: bool) -> Any:
    """The lengths on the input's device, if they were given as pack_padded_sequence takes them: as
    numbers, which can be checked here, or on the CPU."""
    if lengths is None or not isinstance(input, Tensor):
        return lengths
    if isinstance(lengths, (list, tuple)):
        steps = input.size(1 if batch_first and input.dim() == 3 else 0)
        for length in lengths:
            is_integer = isinstance(length, Integral)
            if not is_integer or not 0 <= int(length) <= steps:
                kind = ValueError if is_integer else TypeError
                raise kind(
                    f"{layer}: lengths must be integers from 0 to steps = {steps}, got {length!r}"
                )
        return torch.tensor(lengths, dtype=torch.int64, device=input.device)
    if isinstance(lengths, Tensor) and lengths.is_cpu and not input.is_cpu:
        return lengths.to(input.device, non_blocking=True)
    return lengths


def check_lengths(layer: str, x: Tensor, lengths: Tensor) -> None:
    if lengths.dim() != 1 or lengths.size(0) != x.size(1):
        raise RuntimeError(
            f"{layer}: lengths must be (batch,) = ({x.size(1)},), got {shape_of(lengths)}"
        )
    if lengths.dtype != torch.int64:
        raise RuntimeError(f"{layer}: lengths must be of dtype int64, got {dtype_of(lengths)}")
    if lengths.device != x.device:
        raise RuntimeError(
            f"{layer}: lengths must be on the device of input, got {lengths.device} and {x.device}"
        )


def check_reset(layer: str, input: Tensor, reset: Tensor, batch_first: bool) -> None:
    """Checks both as the caller gave them: they may lack the batch, or have it first."""
    expected = list(input.shape[:-1])
    if list(reset.shape) != expected:
        rule = "batch, steps" if batch_first else "steps, batch"
        if input.dim() == 2:
            rule = "steps,"
        want, got = shown(expected), shape_of(reset)
        raise RuntimeError(f"{layer}: reset must be ({rule}) = {want}, got {got}")
    if reset.dtype != torch.bool:
        raise RuntimeError(f"{layer}: reset must be of dtype bool, got {dtype_of(reset)}")
    if reset.device != input.device:
        raise RuntimeError(
            f"{layer}: reset must be on the device of input, got {reset.device} and {input.device}"
        )


def check_state(layer: str, name: str, state: Tensor, sizes: Sizes, last: str) -> None:
    """``last``: the name of the last size."""
    if list(state.shape) != sizes:
        batch = "batch, " if len(sizes) == 3 else ""
        raise RuntimeError(
            f"{layer}: {name} must be (num_layers * directions, {batch}{last}) = {shown(sizes)}, "
            f"got {shape_of(state)}"
        )


def stacked(ends: Tensors) -> Tensor:
    """torch.stack, without the copy if there is only one."""
    return ends[0].unsqueeze(0) if len(ends) == 1 else torch.stack(ends)


def check_heads(layer: str, heads: Any, hidden: int) -> None:
    if not isinstance(heads, int) or isinstance(heads, bool):
        raise TypeError(f"{layer}: heads must be an int, got {heads!r}")
    if heads < 1 or hidden % heads != 0:
        raise ValueError(
            f"{layer}: heads must be positive and divide hidden_size = {hidden}, got {heads}"
        )


def parameters_by_head(parameters: Tensors, heads: int, units: int) -> List[Tensors]:  # noqa: UP006
    """Those of each head, in the ops' shapes. The rows of every parameter are its gates', and of
    each gate the heads', each of ``units``."""
    found: List[Tensors] = [[] for _ in range(heads)]  # noqa: UP006
    for p in parameters:
        blocks = p.unflatten(0, [-1, heads, units]).transpose(0, 1).flatten(1, 2).unbind(0)
        for k, block in enumerate(blocks):
            found[k].append(block)
    return found


def states_by_head(states: Tensors, heads: int) -> List[Tensors]:  # noqa: UP006
    """``(*, hidden_size)``, and of each head ``(*, hidden_size / heads)``."""
    found: List[Tensors] = [[] for _ in range(heads)]  # noqa: UP006
    for s in states:
        for k, part in enumerate(s.chunk(heads, -1)):
            found[k].append(part)
    return found


def joined_heads(results: List[Tensors]) -> Tensors:  # noqa: UP006
    """The other way."""
    return [torch.cat([r[i] for r in results], -1) for i in range(len(results[0]))]


def reverse(x: Tensor, lengths: MaybeTensor) -> Tensor:
    """Reverses time in ``(steps, batch, size)``: in every row, the steps that it has."""
    if lengths is None:
        return x.flip(0)
    t = torch.arange(x.size(0), device=x.device).unsqueeze(1)
    from_end = lengths.clamp(0, x.size(0)) - 1 - t
    index = torch.where(from_end >= 0, from_end, t)
    return x.gather(0, index.unsqueeze(2).expand_as(x))


def reverse_reset(reset: Tensor, lengths: MaybeTensor) -> Tensor:
    """The ``reset``, ``(steps, batch)``, for a direction that runs from the end.

    No state passes from a step to a next step that is reset, nor back. So that direction's state is
    zero before the step that precedes the reset step in time.
    """
    from_end = reverse(reset.unsqueeze(2), lengths).squeeze(2)
    # Not cut before it is joined: torch.export would ask whether steps - 1 is 1.
    return torch.cat([torch.zeros_like(reset[:1]), from_end])[:-1]


def check_probability(layer: str, name: str, p: Any) -> None:
    if not isinstance(p, Real) or isinstance(p, bool) or not 0 <= float(p) <= 1:
        raise ValueError(f"{layer}: {name} must be a number in [0, 1], got {p!r}")


def zoneout_fractions(x: Tensor, hidden: int, p: float, training: bool) -> Tensor:
    """The ops' ``zoneout``: drawn in training, and its expected value in evaluation."""
    sizes = [x.size(0), x.size(1), hidden]
    if not training:
        return x.new_full(sizes, p)
    # In one kernel. torch.bernoulli would not work under vmap with randomness="same"; and with
    # "different", vmap draws in place only in a tensor with its dimension, which rand_like adds to
    # that of an x without it.
    return torch.rand_like(x.new_empty([0])).new_empty(sizes).bernoulli_(p)
