"""Finds what a build needs, and explains in one paragraph what is missing and how to get it.

As a program it prints what this machine lacks for `make`, before anything is downloaded. With the
argument `torch` or `toolkit` it prints the requirement for pip that `make` then installs.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

OLDEST_PYTHON = (3, 10)
OLDEST_TORCH = (2, 10)
OLDEST_SETUPTOOLS = 77  # as in pyproject.toml
OLDEST_CUDA = (12, 6)
GIB = 1 << 30
JOB_MEMORY = GIB  # for one compiler; nvcc compiles up to two architectures at a time
DISK = 10 * GIB  # while pip installs torch and its CUDA libraries, including pip's cache

# Machine code for each generation that the compiler supports (8.0 also runs on 8.6 and 8.9, 10.0 on
# 10.3, 12.0 on 12.1), and PTX for later ones. 9.0a: Hopper with its own matrix instructions.
BEFORE_BLACKWELL = "7.5;8.0;9.0a;9.0+PTX"
WITH_BLACKWELL = "7.5;8.0;9.0a;10.0+PTX;12.0"

# The torch to compile against, by the CUDA release that PyPI's build of it pins: pip can install
# only the compiler of that release. torch 2.15 has no wheel for Python 3.10, 2.13 none for 3.15.
TORCH = {"13.0": "torch==2.13.0", "13.2": "torch==2.15.0"}

# torch's names, as torch.utils.cpp_extension takes them in TORCH_CUDA_ARCH_LIST.
NAMES = {
    "Turing": "7.5+PTX",
    "Ampere": "8.0 8.6+PTX",
    "Ampere+Tegra": "8.7",
    "Ada": "8.9+PTX",
    "Hopper": "9.0+PTX",
    "Blackwell": "10.0 10.3 12.0 12.1+PTX",
    "Blackwell+Tegra": "11.0",
}

APT = "On Debian and Ubuntu, all that make needs: apt install git make g++ python3-venv"
PIP_TOOLKIT = "pip install 'cuda-toolkit[nvcc,cudart,cccl]==13.0.*'"
CPU_ONLY = "set MY_OPS_WITH_CUDA=0 for a build that runs on the CPU only"


class Unfit(Exception):
    """The build cannot succeed. The text says why, and what to do."""


@dataclass(frozen=True)
class Toolkit:
    home: Path
    version: str  # as nvcc prints it: 13.0.88

    @property
    def release(self) -> tuple[int, int]:
        major, minor = self.version.split(".")[:2]
        return int(major), int(minor)

    def takes(self, option: str) -> bool:
        return f"{option} " in run(self.home / "bin/nvcc", "--help").stdout


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False
    )


def first_error(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), "\n".join(lines[:1]))


def check_system() -> None:
    name = {"Darwin": "macOS"}.get(platform.system(), platform.system())
    if name != "Linux":
        raise Unfit(
            f"this machine runs {name}, and my_ops builds and runs on Linux only. Use a Linux "
            "machine or container; on Windows, use WSL."
        )


def check_python() -> None:
    if sys.version_info < OLDEST_PYTHON:
        raise Unfit(
            f"Python {platform.python_version()} ({sys.executable}) is too old: 3.10 or newer is "
            "needed. Install one, and name it, for example: make PYTHON=python3.12 demo."
        )


def check_venv() -> None:
    if importlib.util.find_spec("ensurepip") is None:
        raise Unfit(
            f"this Python ({sys.executable}) cannot make an environment with pip in it. Install "
            "its venv package (Debian: apt install python3-venv)."
        )


def check_disk() -> None:
    free = shutil.disk_usage(".").free
    if free < DISK and not Path("build/environment").exists():
        raise Unfit(
            f"{free / GIB:.1f} GiB of free disk space is too little for torch with its CUDA "
            f"libraries, the compiler and the build, which take up to {DISK // GIB} GiB. Free some."
        )


def check_setuptools() -> None:
    import setuptools

    if int(setuptools.__version__.split(".")[0]) < OLDEST_SETUPTOOLS:
        raise Unfit(
            f"the build needs setuptools >= {OLDEST_SETUPTOOLS}, found {setuptools.__version__}. "
            "Let pip install it (pip install . without --no-build-isolation), or run pip install "
            f"'setuptools>={OLDEST_SETUPTOOLS}' in this environment first."
        )


def check_torch() -> None:
    ways = (
        "Let pip install it (pip install . without --no-build-isolation), or run "
        "pip install 'torch>=2.10' ninja in this environment first."
    )
    try:
        import torch
    except ImportError as error:
        raise Unfit(
            f"the build needs torch, which this Python ({sys.executable}) cannot import: {error}. "
            + ways
        ) from None
    release = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if release < OLDEST_TORCH:
        raise Unfit(f"the build needs torch >= 2.10, found {torch.__version__}. {ways}")


def cxx_compiler() -> str:
    """The C++ compiler, after the command in CXX has compiled a small C++20 program with it."""
    name, *more = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    path = shutil.which(name) or (not os.environ.get("CXX") and shutil.which("g++")) or None
    ways = "Install g++ 11 or newer (Debian: apt install g++), or set CXX to one."
    if path is None:
        raise Unfit(f"no C++ compiler: '{name}' is not on PATH. {ways}")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cpp")
        source.write_text("#include <concepts>\n#include <span>\nstd::span<int> probe();\n")
        done = run(path, *more, "-std=c++20", "-c", source, "-o", Path(folder, "probe.o"))
    if done.returncode != 0:
        command = shlex.join([path, *more])
        raise Unfit(
            f"the C++ compiler {command} does not compile C++20: {first_error(done.stderr)}. {ways}"
        )
    behind = shutil.which(more[0]) if more else None  # the compiler of a launcher: ccache g++
    return behind or path


def toolkit_folders() -> list[Path]:
    """Where a CUDA toolkit may be, best first: CUDA_HOME, installed, from pip, on PATH."""
    asked = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if asked:
        return [Path(asked)]
    folders = [Path("/usr/local/cuda"), *sorted(Path("/usr/local").glob("cuda-*"), reverse=True)]
    folders += [Path(p, "nvidia", "cu13") for p in sys.path]
    if nvcc := shutil.which("nvcc"):
        folders.append(Path(nvcc).resolve().parents[1])
    return folders


def is_toolkit(home: Path) -> bool:
    return (home / "bin/nvcc").exists() and (home / "include/cuda_runtime_api.h").exists()


def nvcc_version(home: Path) -> str:
    done = run(home / "bin/nvcc", "--version")
    match = re.search(r"V(\d+\.\d+\.\d+)", done.stdout)
    if match is None:
        raise Unfit(
            f"{home}/bin/nvcc does not run: {first_error(done.stderr) or 'it prints no version'}. "
            f"Reinstall it, set CUDA_HOME to another toolkit, or {CPU_ONLY}."
        )
    return match[1]


def find_toolkit(wanted: str | None = None) -> Toolkit:
    """The first toolkit found, or the first one of the wanted release ("13.0")."""
    found = [Toolkit(home, nvcc_version(home)) for home in toolkit_folders() if is_toolkit(home)]
    if not found:
        raise Unfit(
            "no CUDA toolkit (bin/nvcc with include/cuda_runtime_api.h) in "
            f"{os.environ.get('CUDA_HOME') or '/usr/local/cuda* or site-packages/nvidia/cu13'}. "
            f"Install one ({PIP_TOOLKIT} is enough), set CUDA_HOME to its folder, or {CPU_ONLY}."
        )
    for toolkit in found:
        if wanted is None or toolkit.version.startswith(wanted + "."):
            return toolkit
    raise Unfit(
        f"MY_OPS_CUDA={wanted} asks for another nvcc than the one found: "
        f"{', '.join(sorted({t.version for t in found}))}. Set CUDA_HOME to a toolkit of CUDA "
        f"{wanted}, unset MY_OPS_CUDA, or {CPU_ONLY}."
    )


def architectures(toolkit: Toolkit) -> list[str]:
    """Architectures to compile for, as numbers: TORCH_CUDA_ARCH_LIST or this nvcc's default."""
    default = WITH_BLACKWELL if toolkit.release >= (12, 8) else BEFORE_BLACKWELL
    text = os.environ.get("TORCH_CUDA_ARCH_LIST") or default
    if text == "native":
        return gpus_of_this_machine()
    found = []
    for name in text.replace(";", " ").split():
        if name not in NAMES and not re.fullmatch(r"\d+\.\d[af]?(\+PTX)?", name):
            raise Unfit(
                f"TORCH_CUDA_ARCH_LIST names '{name}', which is not an architecture. Give numbers, "
                f"as in 8.0;9.0a;12.0+PTX, or native, or names: {', '.join(NAMES)}."
            )
        found += NAMES.get(name, name).split()
    return found


def gencode(archs: list[str], sm90: bool) -> list[str]:
    """nvcc's options for them. From 8.0 on, or 10.0 on in files named _sm90, no kernel differs, so
    machine code for newer ones is assembled from the PTX of the oldest of them: generating PTX is
    half of the compiler's time. Files named _sm90 have no kernels before 9.0, so they are compiled
    for older GPUs only if there are no others."""
    alike_from = 100 if sm90 else 80
    if sm90:
        archs = [arch for arch in archs if int(sm(arch)[3:]) >= 90] or archs
    options = []
    numbers = [arch.removesuffix("+PTX").replace(".", "") for arch in archs]
    alike = [int(n) for n in numbers if n.isdigit() and int(n) >= alike_from]
    for arch, number in zip(archs, numbers, strict=True):
        digits = number.rstrip("af")
        if alike and int(digits) >= min(alike):
            ptx, number = str(min(alike)), digits
        else:
            ptx = number
        options.append(f"-gencode=arch=compute_{ptx},code=sm_{number}")
        if arch.endswith("+PTX"):
            options.append(f"-gencode=arch=compute_{ptx},code=compute_{ptx}")
    return list(dict.fromkeys(options))


def gpus_of_this_machine() -> list[str]:
    import torch

    if not torch.cuda.is_available():
        raise Unfit(
            "TORCH_CUDA_ARCH_LIST=native means the GPUs of this machine, and torch sees none. Name "
            f"architectures, as in 8.0;9.0a, unset it to build for all, or {CPU_ONLY}."
        )
    found = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    return ["9.0a" if arch == (9, 0) else f"{arch[0]}.{arch[1]}" for arch in sorted(found)]


def sm(arch: str) -> str:
    """ "9.0a+PTX" is sm_90 in nvcc's list, which has no suffixes."""
    return "sm_" + arch.removesuffix("+PTX").rstrip("af").replace(".", "")


def check_toolkit(toolkit: Toolkit, archs: list[str], cxx: str) -> None:
    """Checks that it is new enough, supports the architectures and works with the compiler."""
    nvcc = toolkit.home / "bin/nvcc"
    if toolkit.release < OLDEST_CUDA:
        raise Unfit(
            f"nvcc {toolkit.version} in {toolkit.home} is too old: CUDA 12.6 or newer is needed. "
            f"Install one ({PIP_TOOLKIT} is enough), set CUDA_HOME to its folder, or {CPU_ONLY}."
        )
    known = run(nvcc, "--list-gpu-code").stdout.split()
    unknown = [arch for arch in archs if sm(arch) not in known]
    if known and unknown:
        raise Unfit(
            f"nvcc {toolkit.version} does not support architecture {', '.join(unknown)}. Remove it "
            "from TORCH_CUDA_ARCH_LIST, or set CUDA_HOME to a toolkit that does."
        )
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cu")
        source.write_text("#include <cuda_runtime_api.h>\n__global__ void probe() {}\n")
        host = os.environ.get("CC", cxx)
        done = run(nvcc, "-ccbin", host, "-std=c++20", "-c", source, "-o", Path(folder, "probe.o"))
    if done.returncode != 0:
        raise Unfit(
            f"nvcc {toolkit.version} and the host compiler {host} do not work together: "
            f"{first_error(done.stderr + done.stdout)}. Set CC and CXX to a compiler that this "
            f"nvcc supports (CUDA 12.6: gcc <= 13, 12.9: <= 14, 13: <= 15), set CUDA_HOME to "
            f"another toolkit, or {CPU_ONLY}."
        )


def default_cuda() -> str:
    return "13.2" if sys.version_info >= (3, 15) else "13.0"


def torch_to_build_with() -> str:
    """The requirement for pip."""
    return TORCH.get(os.environ.get("MY_OPS_CUDA", ""), TORCH[default_cuda()])


def toolkit_to_install(release: str) -> str | None:
    """pip's requirement for a CUDA compiler, if the build needs one and only PyPI has it."""
    wanted = os.environ.get("MY_OPS_CUDA") or None
    if os.environ.get("MY_OPS_WITH_CUDA") == "0":
        return None
    try:
        find_toolkit(wanted)
    except Unfit:
        release = wanted or release
        return f"cuda-toolkit[nvcc,cudart,cccl]=={release}.*" if release >= "13" else None
    return None


def cuda_toolkit(with_cuda: str, wanted: str | None, cxx: str) -> tuple[Toolkit, list[str]] | None:
    """The toolkit and the architectures, both checked; None for a CPU-only build."""
    if with_cuda not in ("0", "1", "auto"):
        raise Unfit(f"MY_OPS_WITH_CUDA must be 1, auto or 0, got {with_cuda!r}.")
    if with_cuda == "0":
        return None
    try:
        toolkit = find_toolkit(wanted)
        archs = architectures(toolkit)
        check_toolkit(toolkit, archs, cxx)
    except Unfit as unfit:
        if with_cuda == "1" or wanted:  # a wheel named after a release must have its code
            raise
        print(f"my_ops: building for the CPU only: {unfit}", file=sys.stderr)
        return None
    return toolkit, archs


def free_memory() -> int:
    """Bytes that the build may use on this machine, and in the container if it has a limit."""
    meminfo = Path("/proc/meminfo").read_text()
    match = re.search(r"MemAvailable:\s+(\d+) kB", meminfo)
    free = int(match[1]) * 1024 if match else JOB_MEMORY
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        free = min(free, max(int(text) - int(used.read_text()), 0))
    return free


def find_ninja() -> None:
    """Adds pip's ninja to PATH; without ninja, torch compiles one file at a time."""
    scripts = sysconfig.get_path("scripts")
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), scripts])


def set_jobs() -> None:
    """Sets MAX_JOBS, if it is unset: one compiler per GiB of free memory, at most one per core."""
    if os.environ.get("MAX_JOBS"):
        return
    free = free_memory()
    if free < JOB_MEMORY:
        raise Unfit(
            f"{free / GIB:.1f} GiB of free memory is too little for the compiler, which takes "
            "up to 1 GiB. Free some or add swap, or set MAX_JOBS=1 to try anyway."
        )
    os.environ["MAX_JOBS"] = str(max(1, min(len(os.sched_getaffinity(0)), free // JOB_MEMORY)))


def missing() -> list[str]:
    """Everything that this machine lacks for `make`, which installs the rest itself."""
    found = []
    for check in (check_system, check_python, check_venv, cxx_compiler, check_disk, set_jobs):
        try:
            check()
        except Unfit as unfit:
            found.append(str(unfit))
            if check is check_system:
                break
    return found


def cuda_of_torch() -> str:
    """The release of CUDA 13 that the installed torch pins; the default if it pins none."""
    import torch

    release = torch.version.cuda or ""
    return release if release.startswith("13.") else default_cuda()


def architectures_at_once() -> int:
    """How many of a file's architectures nvcc compiles at once. With few compilers, all of a
    machine's cores have work, and more processes only take each other's caches: a tenth of the
    time. With many, the build waits for the largest files."""
    jobs = os.environ.get("MAX_JOBS", "")
    return 1 if jobs.isdecimal() and int(jobs) < 8 else 2


def main(arguments: list[str]) -> int:
    if arguments == ["torch"]:
        print(torch_to_build_with())
    elif arguments == ["toolkit"]:
        print(toolkit_to_install(cuda_of_torch()) or "")
    else:
        for text in (found := missing()):
            print(f"my_ops: {text}", file=sys.stderr)
        if found:
            print(APT, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
