"""The build backend: setuptools, plus what only compiling needs: torch and a CUDA compiler."""

from __future__ import annotations

import os
import platform
import sys

import preflight
from setuptools.build_meta import (
    build_editable,
    build_sdist,
    build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

# The torch to compile against, and the compiler. PyPI's builds of torch pin the toolkit's release:
# 13.0 those of 2.13, 13.2 those of 2.15, which has none for Python 3.10.
TORCH = {"13.0": "torch==2.13.0", "13.2": "torch==2.15.0"}
TOOLKIT = "cuda-toolkit[nvcc,cudart,cccl]=={}.*"

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
    default = "13.2" if sys.version_info >= (3, 15) else "13.0"
    release = asked or default
    requires = [TORCH.get(release, TORCH[default]), "ninja", "numpy"]
    if os.environ.get("MY_OPS_WITH_CUDA", "1") == "0" or platform.system() != "Linux":
        return requires
    try:
        preflight.find_toolkit(asked)
    except preflight.Unfit:
        if release.startswith("13."):
            requires.append(TOOLKIT.format(release))
    return requires


get_requires_for_build_editable = get_requires_for_build_wheel
