"""The user's folder of files that my_ops has made: compiled cells, and costs of GPUs."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

_DIGEST = 32  # bytes at the end of a file


def cache_folder() -> Path:
    """MY_OPS_CACHE, or my_ops in the user's cache folder."""
    given = os.environ.get("MY_OPS_CACHE")
    if given:
        return Path(given)
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(home) / "my_ops"


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
