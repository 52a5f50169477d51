"""Compiles CUDA kernels at run time with NVRTC, which torch's CUDA builds bring, and keeps their
machine code on disk."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

import torch

from my_ops._cache import read, write
from my_ops.recurrent._compiled import CannotCompile, built, file_name, place_of, say

_OPTIONS = ["--std=c++20", "--device-as-default-execution-space", "--disable-warnings"]
_OPTIONS += ["-DMY_OPS_WITH_CUDA"]


def architecture_of(major: int, minor: int) -> str:
    """That NVRTC compiles for, of a GPU's compute capability."""
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


def machine_code(source: str, kernel: str, what: str) -> tuple[bytes, bytes]:
    """A kernel's code for the current GPU, and its name there, from the cache or compiled.

    ``kernel`` names it in the source. ``what`` is what the line says that is printed before it is
    compiled.

    Raises:
        CannotCompile: it is not in the cache, and cannot be compiled.
    """
    architecture = architecture_of(*torch.cuda.get_device_capability())
    path = place_of(".cubin", source, kernel, architecture, str(torch.version.cuda), *_OPTIONS)
    found = read(path)
    if found is None:
        say(f"compiling {what} for this GPU, {architecture}")
        found = _compile(source, kernel, architecture)
        write(path, found)
    return _apart(found)


def _apart(compiled: bytes) -> tuple[bytes, bytes]:
    name, _, code = compiled.partition(b"\0")
    return code, name


def _asked(source: str, kernel: str, architecture: str) -> tuple[str, ...]:
    """What names a kernel's code in the folder of a package. The release of CUDA is not in it: the
    driver decides whether it takes the code."""
    return (source, kernel, architecture, *_OPTIONS)


def built_code(cell: Any, source: str, kernel: str) -> tuple[bytes, bytes] | None:
    """The same as machine_code from the cell's package, if that has it."""
    architecture = architecture_of(*torch.cuda.get_device_capability())
    path = built(cell, ".cubin", *_asked(source, kernel, architecture))
    try:
        return None if path is None else _apart(path.read_bytes())
    except OSError:  # nobody may read it
        return None


def build(source: str, kernel: str, architecture: str, folder: Path) -> None:
    """Compiles a kernel into a folder of a package.

    Raises:
        CannotCompile: NVRTC is missing or refuses.
    """
    path = folder / file_name(".cubin", *_asked(source, kernel, architecture))
    path.write_bytes(_compile(source, kernel, architecture))


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
