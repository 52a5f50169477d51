"""What is compiled for the cells of programs: what is said of it, the folder that keeps what was
compiled at run time, and those that packages bring (my_ops.build)."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import sys
import tempfile
from pathlib import Path
from threading import RLock
from typing import Any, TextIO

_DIGEST = 32  # bytes at the end of a file

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
    """The name that the program, or this package, gave a cell."""
    name = str(cell.name)
    return name.removeprefix("cell_").rpartition("_")[0] if name.startswith("cell_") else name


def struct_of(header: str) -> str:
    """The cell's name in its header."""
    return str(re.findall(r"^struct (\S+) {", header, re.M)[0])


def body_of(header: str) -> str:
    """A cell's header without directives: the text before it has what they include."""
    return re.sub(r"^#.*\n", "", header, flags=re.M)


# ----------------------------------------------------------------------------------------- cache


def cache_folder() -> Path:
    """MY_OPS_CACHE, or my_ops in the user's cache folder."""
    given = os.environ.get("MY_OPS_CACHE")
    if given:
        return Path(given)
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(home) / "my_ops"


def file_name(suffix: str, *asked: str) -> str:
    """Of what is compiled of ``asked``."""
    return f"{hashlib.sha256(chr(0).join(asked).encode()).hexdigest()}{suffix}"


def place_of(suffix: str, *asked: str) -> Path:
    """Where the folder has what was compiled of ``asked``."""
    return cache_folder() / file_name(suffix, *asked)


def read(path: Path) -> bytes | None:
    """What :func:`write` has written, or None."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    data, digest = data[:-_DIGEST], data[-_DIGEST:]
    return data if hashlib.sha256(data).digest() == digest else None


def write(path: Path, data: bytes) -> bool:
    """Other processes may use the folder at the same time: a file appears there whole. A folder
    that cannot be written to is left as it is, and the result is false."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=path.suffix)
    except OSError:
        return False
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data + hashlib.sha256(data).digest())
        os.replace(temporary, path)
    except OSError:  # the disk is full
        Path(temporary).unlink(missing_ok=True)
        return False
    return True


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
