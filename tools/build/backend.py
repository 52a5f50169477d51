"""The build backend: setuptools, and what only compiling needs: torch and a CUDA compiler."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from pathlib import Path

import preflight
from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
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


def repeatable(path: Path, time: int) -> None:
    """Writes an archive again, with one time for all files, and no owner and mode of a checkout."""
    with tarfile.open(path) as archive:
        members = sorted(archive, key=lambda member: member.name)
        contents = [archive.extractfile(m).read() if m.isfile() else b"" for m in members]
    with (
        path.open("wb") as file,
        gzip.GzipFile("", "wb", 9, file, mtime=time) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for member, content in zip(members, contents, strict=True):
            plain = tarfile.TarInfo(member.name)
            plain.type, plain.size, plain.mtime = member.type, len(content), time
            plain.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            archive.addfile(plain, io.BytesIO(content))


def build_sdist(sdist_directory: str, config_settings: dict | None = None) -> str:
    name = build_meta.build_sdist(sdist_directory, config_settings)
    if time := os.environ.get("SOURCE_DATE_EPOCH"):
        repeatable(Path(sdist_directory, name), int(time))
    return name


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
