"""Loads the compiled module, which registers its ops as ``torch.ops.my_ops``."""

from __future__ import annotations

import hashlib
import json
import sys
from importlib import metadata
from pathlib import Path

import torch

from my_ops._install_hint import check_system


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
    path = Path(__file__).with_name("_C.so")
    if not path.exists():
        raise ImportError(f"my_ops: {path.name} is missing beside {__file__}: {_why_missing(path)}")
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        reason = error.__cause__ or error  # the linker's own words; torch's only name the file
        raise ImportError(
            f"my_ops: {path.name} does not load: {reason}. `python -m my_ops` says what does not "
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
