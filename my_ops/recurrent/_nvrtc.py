"""Compiles CUDA kernels at run time with NVRTC, which torch's CUDA builds bring, and keeps their
machine code on disk."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, TextIO

import torch

_OPTIONS = ["--std=c++20", "--device-as-default-execution-space", "--disable-warnings"]
_OPTIONS += ["-DMY_OPS_WITH_CUDA"]


class CannotCompile(Exception):
    """NVRTC is missing or refuses; the message says why."""


def say(line: str) -> None:
    """On stderr, if the program has it open."""
    stderr: TextIO | None = sys.stderr
    if stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            stderr.write(f"my_ops: {line}\n")


def cache_folder() -> Path:
    """MY_OPS_CACHE, or my_ops in the user's cache folder."""
    given = os.environ.get("MY_OPS_CACHE")
    if given:
        return Path(given)
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(home) / "my_ops"


def machine_code(source: str, kernel: str, what: str) -> tuple[bytes, bytes]:
    """A kernel's code for the current GPU, and its name there, from the cache or compiled.

    ``kernel`` names it in the source. ``what`` is what the line says that is printed before it is
    compiled. Other processes may use the folder at the same time: a file appears there whole.

    Raises:
        CannotCompile: it is not in the cache, and cannot be compiled.
    """
    major, minor = torch.cuda.get_device_capability()
    architecture = f"sm_{major}{minor}" + ("a" if major >= 9 else "")
    asked = "\0".join([source, kernel, architecture, str(torch.version.cuda), *_OPTIONS])
    path = cache_folder() / f"{hashlib.sha256(asked.encode()).hexdigest()}.cubin"
    found = _read(path)
    if found is None:
        say(f"compiling {what} for this GPU, {architecture}")
        found = _compile(source, kernel, architecture)
        _write(path, found)
    name, _, code = found.partition(b"\0")
    return code, name


def _read(path: Path) -> bytes | None:
    """What _write has written, or None."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    return data[32:] if hashlib.sha256(data[32:]).digest() == data[:32] else None


def _write(path: Path, data: bytes) -> None:
    """A folder that cannot be written to is left as it is."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".cubin")
    except OSError:
        return
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(data).digest() + data)
        os.replace(temporary, path)
    except OSError:  # the disk is full
        Path(temporary).unlink(missing_ok=True)


def _library() -> Any:
    """Of the release that torch was built with, from pip or the system."""
    release = (torch.version.cuda or "").split(".")[0]
    name = f"libnvrtc.so.{release}"
    places = [path for folder in sys.path for path in Path(folder).glob(f"nvidia/*/lib/{name}")]
    try:
        for path in places[:1]:
            for part in path.parent.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(part))  # NVRTC looks for it by name
        library = ctypes.CDLL(str(places[0]) if places else name)
    except OSError as error:
        raise CannotCompile(f"NVRTC does not load: {error}") from None
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    return library


def _compile(source: str, kernel: str, architecture: str) -> bytes:
    """The kernel's name in the machine code, a zero byte, and the machine code."""
    nvrtc = _library()
    program = ctypes.c_void_p()

    def call(function: str, *arguments: Any) -> None:
        status = getattr(nvrtc, function)(*arguments)
        if status != 0:
            said = nvrtc.nvrtcGetErrorString(status).decode()
            log = _text(nvrtc, program, "ProgramLog").decode(errors="replace") if program else ""
            raise CannotCompile(f"NVRTC: {said}{f': {log}' if log.strip(chr(0)) else ''}")

    given = (source.encode(), b"cell.cu", 0, None, None)
    call("nvrtcCreateProgram", ctypes.byref(program), *given)
    try:
        call("nvrtcAddNameExpression", program, kernel.encode())
        options = [f"--gpu-architecture={architecture}".encode(), *(o.encode() for o in _OPTIONS)]
        array = (ctypes.c_char_p * len(options))(*options)
        call("nvrtcCompileProgram", program, len(options), array)
        name = ctypes.c_char_p()
        call("nvrtcGetLoweredName", program, kernel.encode(), ctypes.byref(name))
        return (name.value or b"") + b"\0" + _text(nvrtc, program, "CUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _text(nvrtc: Any, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, text)
    return text.raw
