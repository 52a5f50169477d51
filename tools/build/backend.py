"""The build backend: setuptools, plus what only compiling needs: torch and a CUDA compiler."""

from __future__ import annotations

import os
import platform

import preflight
from setuptools.build_meta import (
    build_editable,
    build_sdist,
    build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

# The torch to compile against. PyPI's builds of torch pin the toolkit's release, so that it must be
# the compiler's.
TORCH = {
    None: ["torch==2.13.0; python_version < '3.15'", "torch==2.15.0; python_version >= '3.15'"],
    "13.2": ["torch==2.15.0"],
}

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
    """torch, ninja, and pip's CUDA compiler where none is installed and PyPI has the release."""
    asked = os.environ.get("MY_OPS_CUDA") or None
    requires = [*TORCH.get(asked, TORCH[None]), "ninja", "numpy"]
    if os.environ.get("MY_OPS_WITH_CUDA", "1") == "0" or platform.system() != "Linux":
        return requires
    release = asked or "13.0"
    try:
        preflight.find_toolkit(asked)
    except preflight.Unfit:
        if release.startswith("13."):
            requires.append(f"cuda-toolkit[nvcc,cudart,cccl]=={release}.*")
    return requires


get_requires_for_build_editable = get_requires_for_build_wheel
