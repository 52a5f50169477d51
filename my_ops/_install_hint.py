"""The line that installs a my_ops which runs on this machine.

It installs from one of these places: what this copy was installed from, which pip records (PEP
610); the folder this copy is in; or, for a released wheel, the repository that released it
(``home`` in the build record).
"""

from __future__ import annotations

import json
import platform
import shlex
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

OLDEST_GPU = (7, 5)
OLDEST_CUDA = 12
PIP = "pip install --force-reinstall --no-deps"
TOOLKITS = Path("/usr/local")


class NoBuildError(ImportError):
    """No build of my_ops runs here, or none is known; the text says why."""


def check_system() -> None:
    system = {"Darwin": "macOS"}.get(platform.system(), platform.system())
    if system != "Linux":
        raise NoBuildError(
            f"my_ops runs on Linux only, and this machine runs {system}; on Windows, use WSL"
        )


def origin(package: Path) -> str | None:
    """What this copy was installed from or is in, as an argument of pip, if it still exists."""
    if (package.parent / "kernels").is_dir():  # the source tree
        return str(package.parent)
    try:
        text = distribution("my_ops").read_text("direct_url.json")
    except PackageNotFoundError:
        text = None
    if text is None:
        return None
    noted = json.loads(text)
    if vcs := noted.get("vcs_info"):
        return f"{vcs['vcs']}+{noted['url']}@{vcs['commit_id']}"
    url = urlparse(noted["url"])
    if url.scheme != "file":
        return str(noted["url"])
    path = Path(unquote(url.path))
    return str(path) if path.exists() else None


def cuda_of(here: dict[str, Any] | None) -> int | None:
    """The major CUDA release that the driver and a GPU support; None without a GPU."""
    if not (here and here["gpus"]):
        return None
    capabilities = [tuple(gpu["capability"]) for gpu in here["gpus"]]
    if max(capabilities) < OLDEST_GPU:
        best = ".".join(map(str, max(capabilities)))
        raise NoBuildError(
            f"my_ops has GPU code for compute capability 7.5 and newer, and this GPU has {best}: "
            "my_ops runs on the CPU here"
        )
    cuda = int(here["cuda"].split(".")[0])
    if cuda < OLDEST_CUDA:
        raise NoBuildError(
            f"my_ops needs a driver for CUDA 12 (525) or newer, and this one supports "
            f"{here['cuda']}: update the NVIDIA driver"
        )
    return cuda


def from_source(source: str, cuda: int | None) -> str:
    """A build on this machine: pip installs the compiler of CUDA 13; CUDA 12's must be there."""
    line = f"{PIP} {shlex.quote(source)}"
    if cuda is None:
        return f"MY_OPS_WITH_CUDA=0 {line}"
    if cuda > OLDEST_CUDA:
        return line
    toolkits = [f for f in TOOLKITS.glob("cuda-12.*") if (f / "bin/nvcc").exists()]
    newest = max(toolkits, key=lambda f: int(f.name.split(".")[1]), default=None)
    if newest is None or int(newest.name.split(".")[1]) < 6:
        raise NoBuildError(
            "the driver supports CUDA 12, and the compiler that pip installs is CUDA 13's: update "
            f"the NVIDIA driver to 580, or install CUDA 12.9's toolkit and run CUDA_HOME=... {line}"
        )
    return f"CUDA_HOME={shlex.quote(str(newest))} {line}"


def install_hint(
    build: dict[str, Any] | None, here: dict[str, Any] | None, fits: bool, source: str | None
) -> str:
    """May raise NoBuildError. ``fits``: this build runs on these GPUs, so the line names it."""
    check_system()
    cuda = cuda_of(here)
    is_wheel = bool(source) and urlparse(str(source)).path.endswith(".whl")
    if source and (fits or not is_wheel):
        return f"{PIP} {shlex.quote(source)}" if is_wheel else from_source(source, cuda)
    if build and build.get("home"):
        version = build["version"].split("+")[0]
        return f"{PIP} my_ops=={version}"  # the plain wheel, for every driver from CUDA 12 on
    raise NoBuildError(
        "this copy does not know where it came from: build my_ops from source, with pip install "
        "and the source folder"
    )
