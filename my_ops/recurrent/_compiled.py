"""What is compiled for the cells of programs: what is said of it, its files in the user's cache
(:mod:`my_ops._cache`), and those that packages bring (my_ops.build)."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import sys
from pathlib import Path
from threading import RLock
from typing import Any, TextIO

from my_ops._cache import cache_folder

lock = RLock()  # of what has been compiled; to be read here, as a child has its own after a fork


def _renew_lock() -> None:
    global lock
    lock = RLock()


os.register_at_fork(after_in_child=_renew_lock)


class CannotCompile(Exception):
    """The compiler is missing or refuses; the message says why."""


def say(line: str) -> None:
    """On stderr, if the program has it open."""
    stderr: TextIO | None = sys.stderr
    if stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            stderr.write(f"my_ops: {line}\n")


def shown(cell: Any) -> str:
    """The name that the program gave a cell, or that of the layer of this package."""
    return cell.layer or str(cell.name).removeprefix("cell_").rpartition("_")[0]


def say_refused(cell: Any, how: str, error: CannotCompile) -> None:
    """That a cell could not be compiled, and how it runs then. A layer of this package has several
    ways, torch's among them."""
    how = "without a kernel of its own" if cell.layer else how
    say(f"{shown(cell)}{lacking(cell)} runs {how}: {error}")


def struct_of(header: str) -> str:
    """The cell's name in its header."""
    return str(re.findall(r"^struct (\S+) {", header, re.M)[0])


def body_of(header: str) -> str:
    """A cell's header without directives: the text before it has what they include."""
    return re.sub(r"^#.*\n", "", header, flags=re.M)


# ----------------------------------------------------------------------------------------- cache


def file_name(suffix: str, *asked: str) -> str:
    """Of what is compiled of ``asked``."""
    return f"{hashlib.sha256(chr(0).join(asked).encode()).hexdigest()}{suffix}"


def place_of(suffix: str, *asked: str) -> Path:
    """Where the folder has what was compiled of ``asked``."""
    return cache_folder() / file_name(suffix, *asked)


# -------------------------------------------------------------------------------- ahead of time


def built_folder(module: str) -> Path | None:
    """Where a package has the cells of a module that it has compiled: NAME.compiled beside NAME.py.
    None if the module is no file."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return Path(file).with_suffix(".compiled") if file else None


def built(cell: Any, suffix: str, *asked: str) -> Path | None:
    """What the cell's package has compiled of ``asked``, if it has."""
    path = cell.built and Path(cell.built, file_name(suffix, *asked))
    return path if path and path.is_file() else None


def lacking(cell: Any) -> str:
    """After the name of what has to be compiled at run time: that the cell's package lacks it."""
    return f", which {cell.built} lacks," if cell.built and cell.built.is_dir() else ""
