"""The one line that installs a my_ops which runs on this machine, from a place that is known.

Known are what this copy was installed from, which pip notes (PEP 610); the folder it stands in; and
for a released wheel the repository that released it, ``home`` in the build record.
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
    """No my_ops runs here, or none is known; the text says why."""


def check_system() -> None:
    system = {"Darwin": "macOS"}.get(platform.system(), platform.system())
    if system != "Linux":
        raise NoBuildError(
            f"my_ops runs on Linux only, and this machine runs {system}; on Windows, WSL is Linux"
        )


def origin(package: Path) -> str | None:
    """What this copy was installed from or stands in, as pip takes it, if that is still there."""
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
    """The major release of CUDA that the driver and a GPU take; None where there is no GPU."""
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
            f"my_ops needs a driver of CUDA 12 (525) or newer, and this one knows {here['cuda']}: "
            "update the NVIDIA driver"
        )
    return cuda


def from_source(source: str, cuda: int | None) -> str:
    """A build on this machine: pip brings the compiler of CUDA 13, that of 12 must be there."""
    line = f"{PIP} {shlex.quote(source)}"
    if cuda is None:
        return f"MY_OPS_WITH_CUDA=0 {line}"
    if cuda > OLDEST_CUDA:
        return line
    toolkits = [f for f in TOOLKITS.glob("cuda-12.*") if (f / "bin/nvcc").exists()]
    newest = max(toolkits, key=lambda f: int(f.name.split(".")[1]), default=None)
    if newest is None or int(newest.name.split(".")[1]) < 6:
        raise NoBuildError(
            "the driver knows CUDA 12, and the compiler that pip brings is of CUDA 13: update the "
            f"NVIDIA driver to 580, or install CUDA 12.9's toolkit and CUDA_HOME=... {line}"
        )
    return f"CUDA_HOME={shlex.quote(str(newest))} {line}"


def install_hint(
    build: dict[str, Any] | None, here: dict[str, Any] | None, fits: bool, source: str | None
) -> str:
    """Raises NoBuildError. ``fits``: this build runs on these GPUs; then it is the one named."""
    check_system()
    cuda = cuda_of(here)
    is_wheel = bool(source) and urlparse(str(source)).path.endswith(".whl")
    if source and (fits or not is_wheel):
        return f"{PIP} {shlex.quote(source)}" if is_wheel else from_source(source, cuda)
    if build and build.get("home"):
        version = build["version"].split("+")[0]
        return f"{PIP} my_ops=={version}"  # the plain wheel, for every driver of CUDA 12 and newer
    raise NoBuildError(
        "this copy does not know where it came from: build my_ops from its source, by pip install "
        "and the folder"
    )
