"""The build backend: setuptools, plus the CUDA compiler from PyPI when the build needs it."""

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
    """pip's CUDA compiler, where there is no installed one and PyPI has the release."""
    asked = os.environ.get("MY_OPS_CUDA") or None
    release = asked or "13.0"
    wanted = os.environ.get("MY_OPS_WITH_CUDA", "1") != "0" and platform.system() == "Linux"
    if not wanted or not release.startswith("13."):
        return []
    try:
        preflight.find_toolkit(asked)
    except preflight.Unfit:
        return [f"cuda-toolkit[nvcc,cudart,cccl]=={release}.*"]
    return []


get_requires_for_build_editable = get_requires_for_build_wheel
