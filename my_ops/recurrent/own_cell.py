"""A recurrent cell of one's own: the decorator, and the layers that it gives."""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from my_ops.recurrent._calls import (
    MaybeTensor,
    StepCall,
    Tensors,
    check_states,
    on_device,
)
from my_ops.recurrent._expressions import Node, Program, Value, gradients, smallest_cut
from my_ops.recurrent._own_ops import OwnCell, define_once
from my_ops.recurrent._torch_layers import TorchLayer
from my_ops.recurrent._trace import Trace, Unit
from my_ops.recurrent._weights import WithVectors

_TAKEN = ("input", "lengths", "reset", "zoneout", "output", "hx", "bias")
_MOST_GATES = 8


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
        A decorator. The cell that it makes of the function has ``layer``, ``step`` and ``name``.

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
    ) -> None:
        if not inspect.isfunction(function):
            kind = type(function).__name__
            raise TypeError(f"my_ops.cell: must be applied to a function, got {kind}")
        self.name = function.__name__
        self.gates, self.carried = tuple(gates), tuple(carried)
        self.parameters = tuple(parameters)
        self.function = function
        # As those of a function, for help() and pickle.
        self.__doc__, self.__module__ = function.__doc__, function.__module__
        self.__qualname__, self.__name__ = function.__qualname__, function.__name__
        traced = _Traced(self)
        described = traced.cell()
        traced.check(described)
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
    ) -> CellLayer:
        """The cell over time, in one or more layers and directions, like ``torch.nn.LSTM``.

        Arguments, names of parameters, their initialisation, state dict, calls and results are
        those of ``torch.nn.LSTM``, with what :class:`my_ops.nn.LSTM` adds. Per-unit parameters are
        named like the others, ``NAME_l0``. The state is h alone, or a tuple of h and the carried
        values.
        """
        return CellLayer(
            self,
            *(input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional),
            device,
            dtype,
            weight_dropout,
            zoneout,
        )

    def step(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> CellStep:
        """One step of the cell as a module, like ``torch.nn.LSTMCell``. A call returns the new h,
        or a tuple of it and the carried values."""
        return CellStep(self, input_size, hidden_size, bias, device, dtype)


# --------------------------------------------------------------------------- from the function


class _Traced:
    """The function as expressions, and the description of the cell."""

    def __init__(self, own: CellDefinition) -> None:
        self.own = own
        self.trace = Trace(own.name, own.function.__code__)
        self._read_names()
        leaf = self.trace.graph.leaf
        self.leaves = {name: leaf(name) for name in [*self.terms, *own.carried, "h"]}
        given = {name: Unit(self.trace, self.leaves[name]) for name in self.given}
        self.h, *self.after = self._results(own.function(**given))
        self.z = [self.leaves[name] for name in self.terms]
        self.before = [self.leaves[name] for name in own.carried]
        read = frozenset[Node]()
        for value in (self.h, *self.after):
            read |= value.depends if isinstance(value, Node) else frozenset()
        for name in self.given:
            if self.leaves[name] not in read:
                raise self._error(f"{name} does not enter the results")
        self._differentiate()

    def _error(self, rule: str) -> ValueError:
        return ValueError(f"my_ops.cell: {self.own.name}: {rule}")

    def _read_names(self) -> None:
        """``given``: the function's arguments; ``terms``: the names of z."""
        own = self.own
        names = [*own.gates, *own.carried, *own.parameters]
        for name in names:
            if not (name.isidentifier() and name.isascii()) or name == "h" or name in _TAKEN:
                raise self._error(f"the name {name!r} is taken, or not one")
            if names.count(name) > 1:
                raise self._error(f"{name} is named twice")
        for name in own.parameters:
            if hasattr(nn.RNNBase, name) or name in nn.RNNCellBase.__annotations__:
                raise self._error(f"the name {name!r} is taken by an attribute of modules")
        if not 1 <= len(own.gates) <= _MOST_GATES:
            raise self._error(f"gates must be 1 to {_MOST_GATES} names, got {len(own.gates)}")
        self.given: list[str] = []
        apart: list[str] = []
        known = {*names, "h"}
        shares = {f"{gate}_{share}": gate for gate in own.gates for share in "xh"}
        for name, parameter in inspect.signature(own.function).parameters.items():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise self._error(f"arguments must have names, got *{name}")
            if parameter.kind == parameter.POSITIONAL_ONLY:
                raise self._error(f"{name} must not be positional-only")
            if name in known:
                self.given.append(name)
            elif name in shares:
                self.given.append(name)
                apart.append(shares[name])
            elif parameter.default is parameter.empty:
                raise self._error(
                    f"{name} is neither a gate, a share of one (as n_x and n_h), a carried value, "
                    "h, a parameter, nor has it a default"
                )
        for gate in own.gates:
            ways = [gate in self.given, f"{gate}_x" in self.given, f"{gate}_h" in self.given]
            if ways not in ([True, False, False], [False, True, True]):
                raise self._error(
                    f"the function must take gate {gate} as {gate}, or as {gate}_x and {gate}_h"
                )
        for name in (*own.carried, *own.parameters):
            if name not in self.given:
                raise self._error(f"the function must take {name}")
        sums = [gate for gate in own.gates if gate not in apart]
        alone = [gate for gate in own.gates if gate in apart]
        if [*sums, *alone] != list(own.gates):
            raise self._error(f"gates whose shares are apart must come last: {' '.join(alone)}")
        self.apart = len(alone)
        products, inputs = [f"{g}_h" for g in alone], [f"{g}_x" for g in alone]
        self.terms = [*sums, *products, *inputs, *own.parameters]

    def _results(self, found: Any) -> list[Value]:
        results = list(found) if isinstance(found, (tuple, list)) else [found]
        want = ("h", *self.own.carried)
        if len(results) != len(want):
            raise self._error(
                f"the function must return {', '.join(want)}, got {len(results)} of "
                f"{len(want)} values"
            )
        values = [
            self.trace.value(r, f"the result {name}") for r, name in zip(results, want, strict=True)
        ]
        for value, name in zip(values, want, strict=True):
            if isinstance(value, Node) and value.is_condition:
                raise self._error(f"the result {name} must not be a comparison")
        return values

    def _differentiate(self) -> None:
        graph = self.trace.graph
        grads = [graph.leaf(f"grad_{name}") for name in ("h", *self.own.carried)]
        self.grad_after = grads
        pairs = list(zip((self.h, *self.after), grads, strict=True))
        h = self.leaves["h"]
        *self.grad_z, self.grad_h = gradients(graph, pairs, [*self.z, h])
        self.grad_before = gradients(graph, pairs, self.before)
        # The kernels have no cells whose backward reads no state at all.
        self.reads_h = "h" in self.given or not self.own.carried
        after = [a for a in self.after if isinstance(a, Node)]
        targets = [*self.grad_z, self.grad_h, *self.grad_before, *after]
        self.saved = smallest_cut(targets, [*self.before, h, *after], self.z) or [self.z[0]]

    def cell(self) -> OwnCell:
        own, h, count = self.own, self.leaves["h"], len(self.own.carried)
        reads_h = self.reads_h
        run = Program([*self.z, h, *self.before], [self.h, *self.after, *self.saved])
        known = {node: None for node in (*self.saved, *self.before)}
        after = [a for a in self.after if isinstance(a, Node) and a not in known]
        after = list(dict.fromkeys(after))
        places = [self.after.index(a) for a in after]
        read = [h] if reads_h and h not in known else []
        back = Program(
            [*known, *after, *read, *self.grad_after],
            [*self.grad_z, self.grad_h, *self.grad_before],
        )
        first = [*self.saved, *self.before]
        where = [first.index(node) for node in known]
        advance = Program(list(known), self.after)
        terms = len(self.z)

        def forward(z: Any, h: Any, carried: Any) -> Any:
            new_h, *results = run(*z, h, *carried)
            return new_h, tuple(results[:count]), tuple(results[count:])

        def backward(
            saved: Any, previous: Any, carried: Any, h: Any, grad_h: Any, grad_carried: Any
        ) -> Any:
            given = [*saved, *previous]
            tensors = [given[k] for k in where] + [carried[k] for k in places] + [h] * len(read)
            grads = back(*tensors, grad_h, *grad_carried)
            return (
                tuple(grads[:terms]),
                grads[terms] if reads_h else None,
                tuple(grads[terms + 1 :]),
            )

        def advanced(saved: Any, previous: Any) -> Any:
            given = [*saved, *previous]
            return tuple(advance(*[given[k] for k in where]))

        described = OwnCell(
            f"cell_{re.sub('[^a-zA-Z0-9]', '_', own.name)}_{self._hash(run)}",
            gates=len(own.gates),
            saved=len(self.saved),
            shut=(0.0,) * len(self.saved),
            forward=forward,
            backward=backward,
            carried={name: name for name in own.carried},
            apart=self.apart,
            vectors=len(own.parameters),
            reads_h=reads_h,
            weights=WithVectors(vectors=own.parameters),
            advance=advanced,
        )
        for names in (
            described.arguments,
            described.step_arguments,
            described.backward_arguments,
            described.step_backward_arguments,
        ):
            for name in names:
                if names.count(name) > 1:
                    raise self._error(f"another name is needed: {name} is an argument of its ops")
        return described

    def _hash(self, run: Program) -> str:
        """Of what the cell computes, and of its names."""
        places = {node: k for k, node in enumerate(run.inputs)}
        lines = [repr(self.own), repr(self.terms)]
        for node in run.order:
            shown = (f"%{places[a]}" if isinstance(a, Node) else repr(a) for a in node.args)
            lines.append(f"{node.op} {' '.join(shown)}")
            places[node] = len(places)
        outputs = (f"%{places[v]}" if isinstance(v, Node) else repr(v) for v in run.outputs)
        lines.append(" ".join(outputs))
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]

    def check(self, described: OwnCell) -> None:
        """Raises ValueError unless the trace is the function, and its gradient is autograd's, on
        random values in float64."""
        generator = torch.Generator().manual_seed(0)
        options: Any = {"generator": generator, "dtype": torch.float64, "device": "cpu"}
        with torch.inference_mode(False), torch.enable_grad():
            tensors = {n: torch.randn(64, **options) for n in self.leaves}
            for name in self.own.carried:
                tensors[name][:32].abs_()  # those that must be positive
            tensors = {n: t.requires_grad_() for n, t in tensors.items()}
            found = self.own.function(**{name: tensors[name] for name in self.given})
            found = list(found) if isinstance(found, (tuple, list)) else [found]
            want = [torch.as_tensor(f, dtype=torch.float64).expand(64) for f in found]
            grads = [torch.randn(64, **options) for _ in want]
            inputs = [*self.z, *([self.leaves["h"]] if self.reads_h else []), *self.before]
            names = [str(leaf.args[0]) for leaf in inputs]
            of_results = [(w, g) for w, g in zip(want, grads, strict=True) if w.requires_grad]
            slopes = torch.autograd.grad(
                [w for w, _ in of_results],
                [tensors[n] for n in names],
                [g for _, g in of_results],
                allow_unused=True,
                materialize_grads=True,
            )
        with torch.no_grad():
            z = tuple(tensors[n].detach() for n in self.terms)
            before = tuple(tensors[n].detach() for n in self.own.carried)
            h = tensors["h"].detach()
            ours, after, saved = described.forward(z, h, before)
            advanced = described.advance(saved, before)
            read = h if self.reads_h else None
            of_z, of_h, of_before = described.backward(
                saved, before, after, read, grads[0], tuple(grads[1:])
            )
        both = [*zip((ours, *after), want, strict=True), *zip(advanced, want[1:], strict=True)]
        both += zip((*of_z, *([of_h] if self.reads_h else []), *of_before), slopes, strict=True)
        finite = torch.stack([w.detach().isfinite() for _, w in both]).all(0)
        if not finite.any():
            raise self._error("its results or gradients are not finite for any of 64 random values")
        for got, exact in both:
            if not torch.allclose(got[finite], exact.detach()[finite], 1e-8, 1e-10):
                raise self._error(
                    "its trace differs from the function in values or gradients: does the function "
                    "read what changes, or cut a gradient?"
                )


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
    ) -> None:
        super().__init__(input_size, hidden_size, bias, len(cell.gates), device, dtype)
        self.cell = cell
        for name in cell.parameters:
            vector = torch.empty(hidden_size, device=device, dtype=dtype)
            self.register_parameter(name, nn.Parameter(vector))
        if cell.parameters:
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
        return f"{super().extra_repr()}, cell={self.cell.name}"

    def _step(self, x: Tensor, states: Tensors) -> Tensors:
        vectors = (getattr(self, name) for name in self.cell.parameters)
        weights = (self.weight_ih, self.weight_hh, *vectors, self.bias_ih, self.bias_hh)
        new = self.cell._run_step(x, *weights, *states)
        return [new] if isinstance(new, Tensor) else list(new)


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
    ) -> None:
        # A layer of one gate, whose parameters are not made, for torch's checks and names.
        sizes, layout = (input_size, hidden_size, num_layers), (bias, batch_first)
        super().__init__("RNN_TANH", *sizes, *layout, dropout, bidirectional, 0, "meta", dtype)
        self.cell = cell
        self.weight_dropout = weight_dropout
        self.zoneout = zoneout
        rows = len(cell.gates) * hidden_size
        for names in self._all_weights:
            suffix = names[0].removeprefix("weight_ih")
            for name in names:
                shape = (rows, *getattr(self, name).shape[1:])
                setattr(self, name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
            vectors = [f"{name}{suffix}" for name in cell.parameters]
            for name in vectors:
                vector = torch.empty(hidden_size, device=device, dtype=dtype)
                setattr(self, name, nn.Parameter(vector))
            names[2:2] = vectors
        self._flat_weights_names = [name for names in self._all_weights for name in names]
        self._init_flat_weights()
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
        run = self._run_packed if packed else self._run
        output, last = run(input, states, lengths, reset)
        return output, last[0] if len(names) == 1 else tuple(last)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, cell={self.cell.name}"

    def _for_torch(self, *_: Any) -> None:
        return None  # torch has no such layer

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
