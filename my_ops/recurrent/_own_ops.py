"""The ops of cells that are defined at run time: their schemas, which for other cells are in
csrc/bindings.cpp, and their kernels: all steps in one launch where that is possible, of all heads
or of each, else the cell's formulas, a step at a time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from my_ops.recurrent import _checks, _formulas, _heads, _own_cpu, _own_kernels
from my_ops.recurrent._cell import OF_ROWS, OWN_CELLS, Cell, Values, complete, unwrap_single
from my_ops.recurrent._formulas import ALL_ROWS, Rows
from my_ops.recurrent._ops import register

Call = Callable[..., Any]


@dataclass(frozen=True)
class OwnCell(Cell):
    """``advance`` computes what is carried after a step from the saved values and what was carried
    before it. ``header`` prints the cell in C++, or raises ValueError if the kernels lack a
    function. ``shares`` are the input's shares of the gates in a row that has ended, or None if
    none keep what is carried. ``built`` is where a package may have it compiled. ``layer`` is the
    name of the layer of this package whose cell it is.
    """

    advance: Callable[[Values, Values], Values] = lambda saved, previous: previous
    header: Callable[[], str] = str
    shares: tuple[float, ...] | None = None
    built: Path | None = None
    layer: str = ""

    def runs_at_once(self, layer: Any, input: Tensor) -> bool:
        if not input.is_cpu:
            return False
        return layer.heads == 1 and _own_cpu.number_of(self, input.dtype) is not None

    def __hash__(self) -> int:
        return hash(self.name)  # it says what the cell computes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OwnCell) and self.name == other.name


_library = torch.library.Library("my_ops", "FRAGMENT")  # kept alive: it owns the registrations
_calls: dict[str, tuple[OwnCell, Call, Call]] = {}
_lock = Lock()


def define_once(cell: OwnCell) -> tuple[OwnCell, Call, Call]:
    """Registers the ops of a cell, unless they are: its name says what it computes. Returns the
    cell whose ops they are, NAME_cell and NAME."""
    with _lock:
        if cell.name not in _calls:
            _implement(cell)
            _calls[cell.name] = (cell, *register(cell))
            OWN_CELLS.append(cell)
            sharding = sys.modules.get("my_ops.distributed")
            if sharding is not None:
                sharding.register_recurrent(cell)
        return _calls[cell.name]


def _implement(cell: OwnCell) -> None:
    name, states, carried = cell.name, len(cell.states), len(cell.carried)
    of_step, of_all, optional = cell.step_arguments, cell.arguments, cell.weights.optional
    read, saved = carried + cell.reads_h, 1 + carried
    _define(f"{name}_cell", of_step, optional, states, _step(cell, False))
    _define(f"{name}_cell_forward", of_step, optional, states + 1, _step(cell, True))
    _define(f"{name}_cell_backward", cell.step_backward_arguments, (), 1 + read, _back_step(cell))
    _define(name, of_all, optional, 1 + states, _layer(cell, False))
    _define(f"{name}_forward", of_all, optional, 1 + states + saved, _layer(cell, True))
    _define(f"{name}_backward", cell.backward_arguments, (), 1 + states, _back_layer(cell))


def _define(
    op: str, arguments: Sequence[str], optional: Sequence[str], results: int, kernel: Call
) -> None:
    """The last arguments that may be None have that default."""
    may_be_none = {a for a in arguments if a in (*optional, *OF_ROWS) or a.startswith("grad_")}
    shown: list[str] = []
    is_last = True
    for name in reversed(arguments):
        is_last = is_last and name in may_be_none
        optionally = "Tensor?" if name in may_be_none else "Tensor"
        shown.insert(0, f"{optionally} {name}{'=None' if is_last else ''}")
    returns = "Tensor" if results == 1 else f"({', '.join(['Tensor'] * results)})"
    schema = f"{op}({', '.join(shown)}) -> {returns}"
    _library.define(schema, tags=torch.Tag.pt2_compliant_tag)
    for device in ("CPU", "CUDA"):
        _library.impl(op, kernel, device)


def _apart(results: Sequence[Tensor], given: Sequence[Any]) -> tuple[Tensor, ...]:
    """The results, none of which is an argument or another result."""
    seen = {id(t) for t in given}
    apart = []
    for t in results:
        apart.append(t.clone() if id(t) in seen else t)
        seen.add(id(t))
    return tuple(apart)


def _step(cell: OwnCell, saves: bool) -> Call:
    count, end = len(cell.states), 1 + len(cell.weights.names)

    def kernel(*tensors: Any) -> Any:
        _checks.check_step(cell, tensors)
        input, parameters, states = tensors[0], tensors[1:end], tensors[end:]
        given = cell, input, parameters, states
        found = _own_cpu.step(*given, saves) if input.is_cpu else None
        if found is None:
            one_step = input.unsqueeze(0), states, parameters
            _, *all_steps = _formulas.forward_of_op(cell, *one_step, ALL_ROWS)
            saved = [all_steps[count].squeeze(0)] if saves else []
            found = [*all_steps[:count], *saved]
        return unwrap_single(_apart(found, tensors))

    return kernel


def _back_step(cell: OwnCell) -> Call:
    count = len(cell.states)

    def kernel(*tensors: Any) -> Any:
        _checks.check_step_backward(cell, tensors)
        grads, saved, read = tensors[:count], tensors[count], tensors[count + 1 :]
        found = _own_cpu.step_backward(cell, grads, saved, read) if saved.is_cpu else None
        return _apart(_plain_back_step(cell, tensors) if found is None else found, tensors)

    return kernel


def _plain_back_step(cell: OwnCell, tensors: Sequence[Any]) -> list[Tensor]:
    count = len(cell.states)
    dtype, given = tensors[count].dtype, _formulas.in_compute_dtype(tensors)
    gates, *previous = given[count:]
    h = previous.pop(0) if cell.reads_h else None
    grads = [torch.zeros_like(given[-1]) if g is None else g for g in given[:count]]
    saved, before = gates.chunk(cell.saved, -1), tuple(previous)
    after = cell.advance(saved, before)
    grad_z, *found = cell.backward(saved, before, after, h, grads[0], tuple(grads[1:]))
    direct = [found[0]] if cell.reads_h else []
    return [t.to(dtype) for t in (cell.store(grad_z), *direct, *found[1])]


def _layer(cell: OwnCell, saves: bool) -> Call:
    start = 1 + len(cell.states)
    end = start + len(cell.weights.names)

    def kernel(*given: Any) -> Any:
        tensors = complete(given, cell.arguments)
        _checks.check_layer(cell, tensors)
        input, states, parameters = tensors[0], tensors[1:start], tensors[start:end]
        run, of_rows = (_own_cpu if input.is_cpu else _own_kernels).forward, tensors[end:]
        asked = cell, input, states, parameters
        found = run(*asked, of_rows, saves)
        if found is None:
            found = _heads.forward(run, *asked, of_rows, saves)
        if found is None:
            found = _formulas.forward_of_op(*asked, Rows.of(input, *of_rows))
        return _apart(found if saves else found[:start], tensors)

    return kernel


def _back_layer(cell: OwnCell) -> Call:
    count = 1 + len(cell.states)

    def kernel(*given: Any) -> Any:
        complete_given = complete(given, cell.backward_arguments)
        _checks.check_layer_backward(cell, complete_given)
        *tensors, recurrent, lengths, reset, zoneout = complete_given
        of_rows = lengths, reset, zoneout
        grads, gates, read = tensors[:count], tensors[count], tensors[count + 1 :]
        of_h = cell.weights.of_h(gates.shape[-1] // cell.saved, recurrent)
        run = (_own_cpu if gates.is_cpu else _own_kernels).backward
        asked = cell, grads, gates, read, of_h
        found = run(*asked, of_rows)
        if found is None:
            found = _heads.backward(run, *asked, of_rows)
        if found is None:
            found = _formulas.backward_of_op(*asked, Rows.of(gates, *of_rows))
        return _apart(found, tensors)

    return kernel
