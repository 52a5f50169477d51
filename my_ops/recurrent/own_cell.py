"""A recurrent cell of one's own: the decorator, and the layers that it gives."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from my_ops._private import parameters_by_direction, parameters_changed
from my_ops.recurrent._calls import (
    MaybeTensor,
    StepCall,
    Tensors,
    check_heads,
    check_states,
    joined_heads,
    on_device,
    parameters_by_head,
    states_by_head,
)
from my_ops.recurrent._compiled import built_folder
from my_ops.recurrent._derived import Derived
from my_ops.recurrent._header import with_header
from my_ops.recurrent._own_ops import define_once
from my_ops.recurrent._plain import plain
from my_ops.recurrent._torch_layers import TorchLayer


def cell(
    *, gates: str, carried: str = "", parameters: str = ""
) -> Callable[[Callable[..., Any]], CellDefinition]:
    """A recurrent cell of one's own, from the arithmetic of one hidden unit at one step::

        @my_ops.cell(gates="f g o", carried="c")
        def leaky(f, g, o, c):
            f, o = torch.sigmoid(f), torch.sigmoid(o)
            c = f * c + (1 - f) * torch.tanh(g)
            return o * torch.tanh(c), c

        layer = leaky.layer(64, 128, num_layers=2)  # called like torch.nn.LSTM
        step = leaky.step(64, 128)                  # called like torch.nn.LSTMCell

    The function is written with operators and elementwise functions of torch. Its arguments are
    found by name:

    - a gate: its pre-activation, ``input @ weight_ih.T + bias_ih + h @ weight_hh.T + bias_hh``. For
      a gate ``n`` whose shares are needed apart, ``n_x`` and ``n_h`` instead: the input's, and that
      of h. Such gates come last in ``gates``;
    - a carried value: as the step before returned it;
    - ``h``: the one before the step, of this unit;
    - a parameter: one that is learned, with a value for each unit.

    Arguments with a default are constants. The function returns the new h, and then the new carried
    values, in the order of ``carried``. It runs when the cell is defined, for a trace, from which
    the gradient is derived and checked against autograd in float64. Later it does not run.

    Args:
        gates: the names of the gates, in the order of the weights' rows, with spaces between them.
        carried: the names of the values that a unit carries besides h.
        parameters: the names of the parameters with a value for each unit.

    Returns:
        A decorator. The cell that it makes of the function has ``layer``, ``step`` and ``header``.

    Raises:
        TypeError: a Python number, a condition or the like is made of a value of the unit.
        ValueError: names are missing, unknown or taken, the function calls what is not elementwise
            or not known, or its results are wrong in number. The message has the line.
    """

    def define(function: Callable[..., Any]) -> CellDefinition:
        return CellDefinition(function, gates.split(), carried.split(), parameters.split())

    return define


class CellDefinition:
    """What :func:`cell` makes of a function."""

    def __init__(
        self,
        function: Callable[..., Any],
        gates: Sequence[str],
        carried: Sequence[str],
        parameters: Sequence[str],
        layer: str = "",
    ) -> None:
        """``layer``: that of this package whose cell it is, for messages. Its ops have the cell's
        plain name, and its tests check it: that imports what torch's gradients need, which takes
        half a second."""
        if not inspect.isfunction(function):
            kind = type(function).__name__
            raise TypeError(f"my_ops.cell: must be applied to a function, got {kind}")
        self.name = function.__name__
        self.gates, self.carried = tuple(gates), tuple(carried)
        self.parameters = tuple(parameters)
        self.function: Callable[..., Any] = function
        # As those of a function, for help() and pickle.
        self.__doc__, self.__module__ = function.__doc__, function.__module__
        self.__qualname__, self.__name__ = function.__qualname__, function.__name__
        with torch.device("cpu"):  # where the values are with which the function is tried
            self._derived = Derived(self)
            described = self._derived.cell()
            if layer:
                described = replace(described, name=self.name, layer=layer)
            else:
                self._derived.check(described)
            described = with_header(self._derived, described)
        described = replace(described, built=built_folder(self.__module__))
        self._cell, self._run_step, self._run = define_once(described)

    def __reduce__(self) -> str:
        return self.__qualname__  # pickle and copy take the one that can be imported

    def __repr__(self) -> str:
        names = {"gates": self.gates, "carried": self.carried, "parameters": self.parameters}
        shown = (f"{key}={' '.join(value)!r}" for key, value in names.items() if value)
        return f"<my_ops.cell {self.name}: {', '.join(shown)}>"

    def layer(
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
    ) -> CellLayer:
        """The cell over time, in one or more layers and directions, like ``torch.nn.LSTM``.

        Arguments, names of parameters, their initialisation, state dict, calls and results are
        those of ``torch.nn.LSTM``, with what :class:`my_ops.nn.LSTM` adds. Per-unit parameters are
        named like the others, ``NAME_l0``. The state is h alone, or a tuple of h and the carried
        values.

        With ``heads`` the recurrent weights are block-diagonal: ``weight_hh_l0`` is ``(gates *
        hidden_size, hidden_size / heads)``, and a unit's gates see h of the units of its head.

        Raises:
            TypeError: ``heads`` is not an int.
            ValueError: ``heads`` does not divide ``hidden_size``.
        """
        return CellLayer(
            self,
            *(input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional),
            device,
            dtype,
            weight_dropout,
            zoneout,
            heads,
        )

    def step(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        heads: int = 1,
    ) -> CellStep:
        """One step of the cell as a module, like ``torch.nn.LSTMCell``. A call returns the new h,
        or a tuple of it and the carried values. ``heads`` is that of :meth:`layer`."""
        return CellStep(self, input_size, hidden_size, bias, device, dtype, heads)

    def header(self) -> str:
        """The cell in C++, as the headers in kernels/recurrent/cells: what the engine's kernels
        take as a template argument.

        Raises:
            ValueError: it has a function that the kernels lack. They have arithmetic, comparisons,
                sigmoid, tanh, elu, exp, expm1, log, log1p, softplus and sqrt, and what consists of
                these.
        """
        return self._cell.header()


# -------------------------------------------------------------------------------------- layers


class CellStep(StepCall, nn.RNNCellBase):
    """One step of a cell of one's own: :meth:`CellDefinition.step`."""

    def __init__(
        self,
        cell: CellDefinition,
        input_size: int,
        hidden_size: int,
        bias: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        heads: int,
    ) -> None:
        super().__init__(input_size, hidden_size, bias, len(cell.gates), device, dtype)
        self.cell = cell
        self.heads = heads
        check_heads(self._name, heads, hidden_size)
        if heads > 1:
            blocks = self.weight_hh.new_empty(len(self.weight_hh), hidden_size // heads)
            self.weight_hh = nn.Parameter(blocks)
        for name in cell.parameters:
            vector = torch.empty(hidden_size, device=device, dtype=dtype)
            self.register_parameter(name, nn.Parameter(vector))
        if cell.parameters or heads > 1:
            self.reset_parameters()

    @property
    def _name(self) -> str:  # type: ignore[override]
        return f"{self.cell.name}.step"

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        names = self.cell._cell.states
        check_states(self._name, names, input, hx)
        given = None if hx is None else [hx] if len(names) == 1 else list(hx)
        last = self._run(input, given, len(names))
        return last[0] if len(names) == 1 else tuple(last)

    def extra_repr(self) -> str:
        heads = f", heads={self.heads}" if self.heads > 1 else ""
        return f"{super().extra_repr()}{heads}, cell={self.cell.name}"

    def _step(self, x: Tensor, states: Tensors) -> Tensors:
        vectors = (getattr(self, name) for name in self.cell.parameters)
        weights = [self.weight_ih, self.weight_hh, *vectors]
        weights += [self.bias_ih, self.bias_hh] if self.bias else []
        biases = () if self.bias else (None, None)

        def run(states: Tensors, weights: Tensors) -> Tensors:
            new = self.cell._run_step(x, *weights, *biases, *states)
            return [new] if isinstance(new, Tensor) else list(new)

        if self.heads == 1 or not x.is_cpu:
            return run(states, weights)
        own = parameters_by_head(weights, self.heads, self.hidden_size // self.heads)
        return joined_heads(list(map(run, states_by_head(states, self.heads), own)))


class CellLayer(TorchLayer):
    """A cell of one's own over time: :meth:`CellDefinition.layer`."""

    def __init__(
        self,
        cell: CellDefinition,
        input_size: int,
        hidden_size: int,
        num_layers: int,
        bias: bool,
        batch_first: bool,
        dropout: float,
        bidirectional: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        weight_dropout: float,
        zoneout: float,
        heads: int,
    ) -> None:
        # A layer of one gate, whose parameters are not made, for torch's checks and names.
        sizes, layout = (input_size, hidden_size, num_layers), (bias, batch_first)
        super().__init__("RNN_TANH", *sizes, *layout, dropout, bidirectional, 0, "meta", dtype)
        self.cell = cell
        self.weight_dropout = weight_dropout
        self.zoneout = zoneout
        self._make_heads(heads)
        rows = len(cell.gates) * hidden_size
        for names in parameters_by_direction(self):
            suffix = names[0].removeprefix("weight_ih")
            for name in names:
                shape = (rows, *getattr(self, name).shape[1:])
                setattr(self, name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
            vectors = [f"{name}{suffix}" for name in cell.parameters]
            for name in vectors:
                vector = torch.empty(hidden_size, device=device, dtype=dtype)
                setattr(self, name, nn.Parameter(vector))
            names[2:2] = vectors
        parameters_changed(self)
        self.reset_parameters()

    @property
    def _name(self) -> str:  # type: ignore[override]
        return f"{self.cell.name}.layer"

    @property
    def _state_names(self) -> list[str]:  # type: ignore[override]
        return [f"{letter}_0" for letter in ("h", *self.cell.carried)]

    def forward(
        self, input: Any, hx: Any = None, lengths: Any = None, reset: MaybeTensor = None
    ) -> Any:
        names = self._state_names
        packed = isinstance(input, PackedSequence)
        if not packed:
            lengths = on_device(self._name, input, lengths, self.batch_first)
        data = input.data if packed else input
        of_rows = {"reset": reset} if packed else {"lengths": lengths, "reset": reset}
        check_states(self._name, names, data, hx, **of_rows)
        states = None if hx is None else [hx] if len(names) == 1 else list(hx)
        found = None
        if not packed and lengths is None and reset is None:
            found = self._plain(input, states or ())
        if found is not None:
            output, *last = found
        else:
            run = self._run_packed if packed else self._run
            output, last = run(input, states, lengths, reset)
        return output, last[0] if len(names) == 1 else tuple(last)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, cell={self.cell.name}"

    def _plain(self, input: Tensor, states: Any) -> Any:
        return plain(self, self.cell._cell, input, states)

    def _for_torch(self, *_: Any) -> None:
        return None  # torch has no such layer

    def _at_once(self, x: Any, *others: Any) -> Any:
        # On the CPU copies would cost more than the loop over the heads.
        return None if x.is_cpu else self._direction(x, *others)

    def _direction(
        self,
        x: Tensor,
        states: Tensors,
        parameters: Tensors,
        lengths: MaybeTensor,
        reset: MaybeTensor,
        zoneout: MaybeTensor,
    ) -> Tensors:
        biases = () if self.bias else (None, None)
        of_rows = (lengths, reset, zoneout)
        return list(self.cell._run(x, *states, *parameters, *biases, *of_rows))
