"""Loads the compiled module, which registers its ops as ``torch.ops.my_ops``."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from my_ops._install_hint import check_system

MODULE = Path(__file__).with_name("_C.so")


def _load() -> None:
    check_system()
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if release < (2, 10):
        raise ImportError(
            f"my_ops needs torch >= 2.10, found {torch.__version__}: pip install --upgrade torch"
        )
    if hasattr(torch.ops.my_ops, "gemm"):
        # A second registration of the same ops would abort the process without a Python error.
        raise ImportError(
            "my_ops: the operators of namespace 'my_ops' are registered already, by another copy "
            "of this package or by torch.ops.load_library; one process can hold one copy"
        )
    if not MODULE.exists():
        why = _why_missing(MODULE)
        raise ImportError(f"my_ops: {MODULE.name} is missing beside {__file__}: {why}")
    try:
        torch.ops.load_library(str(MODULE))
    except OSError as error:
        reason = error.__cause__ or error  # the linker's own words; torch's only name the file
        raise ImportError(
            f"my_ops: {MODULE.name} does not load: {reason}. `python -m my_ops` says what does not "
            "fit on this machine"
        ) from error


def _why_missing(path: Path) -> str:
    if (path.parents[1] / "kernels").is_dir():
        return (
            "this is the source folder, not an installed package. Run Python elsewhere, or build "
            "in place with pip install --no-build-isolation -e ."
        )
    if not path.parent.is_dir():
        return "the package is in an archive, and the module loads from a folder only: unpack it"
    if getattr(sys, "frozen", False):
        return "the frozen program left it out: add the data files of my_ops to it"
    return "the package is not whole: pip install --force-reinstall --no-deps my_ops"


def cpp_module(
    path: Path, built: str, tested: tuple[int, int], load: Callable[[str], Any] = ctypes.CDLL
) -> Any:
    """A module that is compiled against torch's C++ headers, or None if there is none or it does
    not fit this torch. ``built``: its function that returns the release of its headers, 213 for
    2.13. ``tested``: the first and the last release with which a module of another was tested."""
    try:
        module = load(str(path))
    except OSError:  # not built, or a torch that lacks one of its symbols
        return None
    major, minor = torch.__version__.split(".")[:2]
    releases = 100 * int(major) + int(minor), getattr(module, built)()
    oldest, newest = tested
    fits = all(oldest <= release <= newest for release in releases)
    return module if fits or releases[0] == releases[1] else None


class FastFp32Switch(ctypes.Structure):
    """The first fields of ``Switch`` in csrc/overrides/fast_fp32_switch.h."""

    _fields_ = (("on", ctypes.c_void_p), ("least", ctypes.c_int64))


def start_fast_fp32(path: Path, key: str) -> tuple[Any, Any] | None:
    """The module at ``path``, and its switch in C++, if it has kernels for ``fast_fp32`` at this
    dispatch key: the ops of those exist from then on. torch's ops stay as they are."""
    module = ctypes.CDLL(str(path))
    if not hasattr(module, "my_ops_fast_fp32_start"):
        return None  # my_ops for the CPU only
    if key == "CUDA" and not torch.backends.cuda.is_built():
        return None  # torch for the CPU only
    module.my_ops_fast_fp32_report.restype = ctypes.c_int64
    module.my_ops_fast_fp32_start.restype = ctypes.POINTER(FastFp32Switch)
    return module, module.my_ops_fast_fp32_start()


@functools.cache
def has_fast_fp32() -> bool:
    """Whether this build has the kernels of ``fast_fp32`` for CUDA; makes their ops exist."""
    return start_fast_fp32(MODULE, "CUDA") is not None


def version() -> str:
    """The distribution's, or the build's where a program brings the package alone."""
    try:
        return metadata.version("my_ops")
    except metadata.PackageNotFoundError:
        record = Path(__file__).with_name("_build.json").read_text()
        return str(json.loads(record)["version"])


def tag_compile_cache(version: str) -> None:
    """Makes this version part of the key of torch.compile's caches, and its decompositions, as two
    builds of one version may differ in them."""
    config = torch.compiler.config
    decompositions = Path(__file__).with_name("_inductor.py").read_bytes()
    tag = f"my_ops-{version}-{hashlib.sha256(decompositions).hexdigest()[:16]}"
    if tag not in config.cache_key_tag:
        config.cache_key_tag += tag


_load()
