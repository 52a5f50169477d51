"""The build backend: setuptools, and what only compiling needs: torch and a CUDA compiler."""

from __future__ import annotations

import preflight
from setuptools.build_meta import (
    build_editable,
    build_sdist,
    build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]


def get_requires_for_build_sdist(config_settings: dict | None = None) -> list[str]:
    return []


def get_requires_for_build_wheel(config_settings: dict | None = None) -> list[str]:
    """torch, ninja, and pip's CUDA compiler. First names what the machine lacks, before any
    download."""
    try:
        preflight.check_system()
        preflight.cxx_compiler()
    except preflight.Unfit as unfit:
        raise SystemExit(f"my_ops: {unfit}") from None
    toolkit = preflight.toolkit_to_install(preflight.default_cuda())
    return [preflight.torch_to_build_with(), "ninja", "numpy", *([toolkit] if toolkit else [])]


get_requires_for_build_editable = get_requires_for_build_wheel
