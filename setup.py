"""Builds my_ops/_C: one module for every Python >= 3.10 and torch >= 2.10, CPU-only ones included.

MY_OPS_WITH_CUDA=0      build without the CUDA kernels (default: with them, or fail)
CUDA_HOME               the toolkit to use (default: the newest installed one, then pip's)
TORCH_CUDA_ARCH_LIST    GPU architectures, as torch spells them (default: below)
"""

import os
import shutil
import sys
from pathlib import Path

import torch
import torch.utils.cpp_extension as cpp
from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel

HERE = Path(__file__).parent
WITH_CUDA = os.environ.get("MY_OPS_WITH_CUDA", "1") != "0"

# Machine code for every generation that CUDA 13 knows (8.6 also runs on 8.9, 10.0 on 10.3, 12.0 on
# 12.1), and PTX for the rest and for what comes. 9.0a: Hopper with its own matrix instructions.
ARCHITECTURES = "7.5;8.0;8.6;9.0a;10.0+PTX;12.0+PTX"

TORCH_2_10 = "0x020a000000000000"
PYTHON_3_10 = "0x030A0000"


def find_cuda_home() -> Path:
    """The folder that holds bin/nvcc and include/cuda_runtime_api.h of one toolkit."""
    candidates = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    candidates += ["/usr/local/cuda"]
    candidates += sorted(map(str, Path("/usr/local").glob("cuda-*")), reverse=True)
    candidates += [str(Path(p) / "nvidia" / "cu13") for p in sys.path]  # pip install cuda-toolkit
    if nvcc := shutil.which("nvcc"):
        candidates.append(str(Path(nvcc).resolve().parent.parent))
    for home in map(Path, filter(None, candidates)):
        if (home / "bin/nvcc").exists() and (home / "include/cuda_runtime_api.h").exists():
            return home
    raise SystemExit(
        "my_ops: no CUDA toolkit (bin/nvcc with include/cuda_runtime_api.h) in CUDA_HOME, "
        "/usr/local/cuda* or site-packages/nvidia/cu13.\n"
        "Install one (pip install 'cuda-toolkit[nvcc,cudart,cccl]==13.0.*' is enough), set "
        "CUDA_HOME to where it is, or set MY_OPS_WITH_CUDA=0 for a build that runs on the CPU only."
    )


def extension():
    macros = [("TORCH_TARGET_VERSION", TORCH_2_10), ("Py_LIMITED_API", PYTHON_3_10)]
    # C++20 for torch's headers; source paths out of the binary. No traps on floating exceptions:
    # else the loops of the CPU kernels, which compute both sides of a choice, stay scalar.
    flags = ["-O3", "-std=c++20", "-fno-trapping-math", "-fvisibility=hidden"]
    for folder in (HERE.resolve(), Path(torch.__file__).resolve().parents[1]):
        flags.append(f"-ffile-prefix-map={folder}/=")
    sources = sorted([*HERE.glob("csrc/*.cpp"), *HERE.glob("kernels/*_cpu.cpp")])
    kwargs = {
        # stdc++ first: else a few of its symbols bind, unversioned, to the copies in libc10.so.
        "libraries": ["stdc++"],
        # libtorch.so is what brings libtorch_cuda.so, where it exists, into the module's scope.
        "extra_link_args": [
            *("-Wl,--no-as-needed", "-ltorch", "-Wl,--as-needed"),
            *("-Wl,--version-script=csrc/exports.map", "-Wl,-s"),
        ],
        "include_dirs": [str(HERE / "include")],
        "py_limited_api": True,
    }
    if not WITH_CUDA:
        sources = [s for s in sources if not s.stem.endswith("_cuda")]
        ext = cpp.CppExtension(
            "my_ops._C",
            [str(s.relative_to(HERE)) for s in sources],
            define_macros=macros,
            extra_compile_args={"cxx": [*flags, "-Wall"]},
            **kwargs,
        )
        ext.libraries = ["stdc++"]
        return ext

    home = find_cuda_home()
    cpp.CUDA_HOME = os.environ["CUDA_HOME"] = str(home)
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", ARCHITECTURES)
    ext = cpp.CUDAExtension(
        "my_ops._C",
        [str(s.relative_to(HERE)) for s in sorted([*sources, *HERE.glob("kernels/*.cu")])],
        define_macros=[*macros, ("MY_OPS_WITH_CUDA", None), ("USE_CUDA", None)],
        extra_compile_args={
            "cxx": [*flags, "-Wall"],
            "nvcc": ["-O3", "-std=c++20", "-Xcompiler", ",".join(flags[3:]), "--threads=2"],
        },
        library_dirs=[str(home / d) for d in ("lib64", "lib") if (home / d).is_dir()],
        **kwargs,
    )
    # The CUDA runtime is linked in: the wheel needs a driver, and no CUDA library of any version.
    ext.libraries = ["stdc++", "cudart_static", "rt", "pthread", "dl"]
    return ext


class Wheel(bdist_wheel):
    """Tags the wheel py3-none-<platform>: the module needs no Python ABI, so all take it."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[extension()],
    cmdclass={"build_ext": cpp.BuildExtension, "bdist_wheel": Wheel},
)
