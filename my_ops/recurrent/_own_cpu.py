"""The engine on the CPU for cells that are defined at run time: the machine's C++ compiler makes a
library of a cell at the first call that needs it, and the compiled module runs it in its threads.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from my_ops._cache import read, write
from my_ops.ops._common import ops
from my_ops.recurrent import _carried, _compiled
from my_ops.recurrent._compiled import (
    CannotCompile,
    body_of,
    file_name,
    lacking,
    place_of,
    say,
    say_refused,
    shown,
    struct_of,
)
from my_ops.recurrent._weights import heads_of

_PACKAGE = Path(__file__).resolve().parents[1]
_SOURCE = _PACKAGE / "_recurrent.hpp"  # which the build makes of kernels/recurrent/cpu/own.h
# As setup.py: no traps, or loops that compute both sides of a choice stay scalar. And no errno, or
# those with sqrt do.
_OPTIONS = ["-std=c++20", "-O3", "-fno-trapping-math", "-fno-math-errno", "-fPIC", "-shared"]
_OPTIONS += ["-fvisibility=hidden", "-w", "-DMY_OPS_ONE_LEVEL"]
_LEVELS = ("x86-64", "x86-64-v3", "x86-64-v4")  # of my_ops_level_of_own_cell, on x86-64
_TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_numbers: dict[tuple[str, bool], int | None] = {}  # by a cell's name and whether it is for double
_refused = set[str]()  # cells of which it has been said
_libraries: list[Any] = []  # which stay loaded

# ----------------------------------------------------------------------------------- compilation


@functools.cache
def _module() -> Any:
    module = ctypes.CDLL(str(_PACKAGE / "_C.so"))
    module.my_ops_level_of_own_cell.restype = ctypes.c_char_p
    module.my_ops_add_own_cell.restype = ctypes.c_int64
    return module


@functools.cache
def _engine() -> str:
    return _SOURCE.read_text()


def source_of(header: str, double: bool) -> str:
    """What the compiler gets for a cell, with what ``cell.header()`` prints."""
    entry = f"MY_OPS_OWN_CELL_{'DOUBLE' if double else 'FLOAT'}({struct_of(header)})\n"
    return f"{_engine()}{body_of(header)}{entry}"


def number_of(cell: Any, dtype: torch.dtype) -> int | None:
    """By which the module's ops know the cell, or None if it runs step by step. It is compiled and
    loaded at the first call."""
    key = cell.name, dtype == torch.float64
    if key not in _numbers:
        with _compiled.lock:
            if key not in _numbers:
                _numbers[key] = _add(cell, key[1])
    return _numbers[key]


def _add(cell: Any, double: bool) -> int | None:
    if not _SOURCE.exists():  # Hugging Face's Kernel Hub has no sources
        return None
    try:
        source = source_of(cell.header(), double)
    except ValueError:  # the kernels lack a function
        return None
    try:
        library = _library(cell, source, f"{shown(cell)}{' in float64' if double else ''}")
    except CannotCompile as error:
        if cell.name not in _refused:
            say_refused(cell, "step by step", error)
        _refused.add(cell.name)
        return None
    _libraries.append(library)
    entry = ctypes.cast(library.my_ops_own_cell, ctypes.c_void_p)
    return int(_module().my_ops_add_own_cell(cell.name.encode(), entry, int(double)))


@functools.cache
def _compiler() -> tuple[list[str], str]:
    """The command, and what it says of its version."""
    command = shlex.split(os.environ.get("CXX", ""))
    command = command or [c for c in map(shutil.which, ("c++", "g++", "clang++")) if c][:1]
    if not command:
        raise CannotCompile("no C++ compiler: CXX, c++, g++ and clang++ name none")
    return command, _run([*command, "--version"]).stdout


def _run(command: list[str], text: str | None = None) -> Any:
    options: Any = {"capture_output": True, "text": True, "errors": "replace"}
    try:
        result = subprocess.run(command, input=text, check=False, **options)
    except OSError as error:
        raise CannotCompile(f"the C++ compiler does not run: {error}") from None
    if result.returncode != 0:
        said = next((line for line in result.stderr.splitlines() if "error" in line), "")
        raise CannotCompile(
            f"the C++ compiler {command[0]} fails{f': {said.strip()}' if said else ''}"
        )
    return result


def _level() -> str:
    return str(_module().my_ops_level_of_own_cell().decode())


def _options(level: str) -> list[str]:
    return [*_OPTIONS, *([f"-march={level}"] if level else [])]


def _compile(source: str, options: Sequence[str], path: Path) -> None:
    command, _ = _compiler()
    _run([*command, *options, "-x", "c++", "-", "-o", str(path)], source)


def _library(cell: Any, source: str, what: str) -> Any:
    """From the cell's package, from the cache, or compiled."""
    level = _level()
    options = _options(level)
    built = _compiled.built(cell, ".so", source, *options)
    if built is not None:
        try:
            return _load(built)
        except CannotCompile as error:  # the system is older than the one that built it
            say(f"{what} is compiled again: {error}")
    command, version = _compiler()
    path = place_of(".so", source, *command, version, *options)
    if read(path) is not None:
        return _load(path)
    say(f"compiling {what}{lacking(cell)} for this CPU{f', {level}' if level else ''}")
    try:
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder, "cell.so")
            _compile(source, options, made)
            return _load(path if write(path, made.read_bytes()) else made)
    except OSError as error:
        raise CannotCompile(f"no temporary file can be written: {error}") from None


def build(header: str, folder: Path) -> None:
    """Compiles a cell for all processors of this kind, into a folder of a package.

    Raises:
        CannotCompile: the C++ compiler is missing or refuses.
    """
    for double in (False, True):
        source = source_of(header, double)
        for level in _LEVELS if _level() in _LEVELS else ("",):
            options = _options(level)
            _compile(source, options, folder / file_name(".so", source, *options))


def _load(path: Path) -> Any:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise CannotCompile(f"its library does not load: {error}") from None


# ----------------------------------------------------------------------------------------- calls


def _arguments(cell: Any, parameters: Sequence[Any]) -> list[Any]:
    """Those of the ops: parameters with a value for each unit side by side."""
    vectors = cell.weights.vectors_of(*parameters)
    return [*parameters[:2], _carried.together(vectors), *parameters[-2:]]


def forward(
    cell: Any,
    input: Tensor,
    states: Sequence[Tensor],
    parameters: Sequence[Any],
    of_rows: Sequence[Any],
    saves: bool,
) -> tuple[Tensor, ...] | None:
    """The results of NAME_forward, without the saved values if ``saves`` is false; or None if the
    cell runs step by step, or has several heads."""
    number = number_of(cell, input.dtype)
    if number is None or cell.weights.heads(states[0].shape[1], *parameters) > 1:
        return None
    h0, *carried0 = states
    given = (input, h0, _carried.together(carried0), *_arguments(cell, parameters), *of_rows)
    output, h_n, *found = ops.own_cell(number, *given, saves)
    last = _carried.apart(cell, found.pop(0)) if carried0 else []
    sequences = _carried.apart(cell, found.pop()) if saves and carried0 else []
    return (output, h_n, *last, *found, *sequences)


def backward(
    cell: Any,
    grads: Sequence[Tensor | None],
    saved: Tensor,
    read: Sequence[Tensor],
    w_h: Tensor,
    of_rows: Sequence[Any],
) -> tuple[Tensor, ...] | None:
    """The results of NAME_backward, likewise. ``read`` are the sequences and then the states that
    the cell reads."""
    number = number_of(cell, saved.dtype)
    if number is None or heads_of(saved.shape[2] // cell.saved, w_h) > 1:
        return None
    output, h0, carried, carried0 = _carried.of_forward(cell, read)
    grad_output, grad_h_n, *of_kinds = grads
    of_carried = _carried.gradients(of_kinds)
    given = (grad_output, grad_h_n, of_carried, saved, carried, output, h0, carried0, w_h)
    terms, grad_h0, *grad_carried0 = ops.own_cell_backward(number, *given, *of_rows)
    return (terms, grad_h0, *(_carried.apart(cell, grad_carried0[0]) if of_kinds else []))


def step(
    cell: Any, input: Tensor, parameters: Sequence[Any], states: Sequence[Tensor], saves: bool
) -> list[Tensor] | None:
    """The results of NAME_cell_forward, likewise."""
    number = number_of(cell, input.dtype)
    if number is None or cell.weights.heads(states[0].shape[1], *parameters) > 1:
        return None
    h, *carried = states
    given = (input, h, _carried.together(carried), *_arguments(cell, parameters))
    new_h, *found = ops.own_cell_step(number, *given, saves)
    return [new_h, *(_carried.apart(cell, found.pop(0)) if carried else []), *found]


def step_backward(
    cell: Any, grads: Sequence[Tensor | None], saved: Tensor, read: Sequence[Tensor]
) -> list[Tensor] | None:
    """The results of NAME_cell_backward, likewise. ``read`` are the states that the cell reads."""
    number = number_of(cell, saved.dtype)
    if number is None:
        return None
    states = list(read)
    h = states.pop(0) if cell.reads_h else None
    grad_h, *of_kinds = grads
    carried = _carried.together(states)
    given = (grad_h, _carried.gradients(of_kinds), saved, h, carried)
    terms, *found = ops.own_cell_step_backward(number, *given)
    return [terms, *found[:-1], *_carried.apart(cell, found[-1])] if of_kinds else [terms, *found]
