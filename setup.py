"""Builds my_ops/_C: one module for every Python >= 3.10 and torch >= 2.10, on CPU builds too.
Beside it, _calls and _overrides spare host time with the releases of torch that they fit.

MY_OPS_WITH_CUDA=1      build the CUDA kernels, or fail (the default)
                 auto   build them if the CUDA compiler works, else for the CPU only
                 0      build for the CPU only
MY_OPS_CUDA=13.0        compile with this release of CUDA, and name the wheel X.Y.Z+cu130
CUDA_HOME               the toolkit to use (default: the newest installed one, then pip's)
TORCH_CUDA_ARCH_LIST    GPU architectures, as torch spells them, or native for this machine's GPUs
                        (default: all, see preflight.py)
MY_OPS_HOME             the repository's URL, for the links of the page on PyPI (default: none)
MAX_JOBS                compilers that run at once (default: as cores and free memory allow)
"""

import json
import os
import sys
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "tools/build"))

import preflight  # noqa: E402

try:
    preflight.check_setuptools()
except preflight.Unfit as unfit:
    raise SystemExit(f"my_ops: {unfit}") from None

import kernel_text  # noqa: E402
import page  # noqa: E402
import sbom  # noqa: E402
import source  # noqa: E402
from setuptools.command.bdist_wheel import bdist_wheel  # noqa: E402
from setuptools.command.editable_wheel import editable_wheel  # noqa: E402

VERSION = "0.1.0"
TORCH_2_10 = "0x020a000000000000"

WITH_CUDA = os.environ.get("MY_OPS_WITH_CUDA", "1")
CUDA = (WITH_CUDA != "0" and os.environ.get("MY_OPS_CUDA")) or None
HOME = os.environ.get("MY_OPS_HOME") or None
COMPILES = not {"sdist", "egg_info", "dist_info", "clean"}.intersection(sys.argv[1:])


def version():
    return f"{VERSION}+cu{CUDA.replace('.', '')}" if CUDA else VERSION


def cxx_flags():
    import torch

    # C++20 for torch's headers; no source paths in the binary. No traps on floating exceptions:
    # otherwise the loops of the CPU kernels, which compute both sides of a choice, stay scalar.
    flags = ["-O3", "-std=c++20", "-fno-trapping-math", "-fvisibility=hidden"]
    for folder in (HERE, Path(torch.__file__).resolve().parents[1]):
        flags.append(f"-ffile-prefix-map={folder}/=")
    # Overruns of the stack and of buffers end the process. GCC's sanitizers, which say more, know
    # the unguarded calls alone.
    if "-fsanitize" not in os.environ.get("CFLAGS", ""):
        flags += ["-fstack-protector-strong", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2"]
    return flags


# The linker strips the modules, so nothing needs what -g, an option of Python's build, adds.
CXX_ALONE = ["-Wall", "-g0"]
# libtorch.so brings libtorch_cuda.so, if it exists, into the module's scope.
LINK = ["-Wl,--no-as-needed", "-ltorch", "-Wl,--as-needed"]
LINK += ["-Wl,--version-script=csrc/exports.map", "-Wl,-s"]
LINK += ["-Wl,-z,relro,-z,now"]  # the tables of functions are read-only once it is loaded


def with_torchs_headers(name, libraries=()):
    """A module that needs torch's C++ headers: _calls, the plain calls of ops, or _overrides, the
    kernels that replace torch's own on CUDA."""
    import torch.utils.cpp_extension as cpp

    ext = cpp.CppExtension(
        f"my_ops.{name}",
        [str(s.relative_to(HERE)) for s in sorted(HERE.glob(f"csrc/{name[1:]}/*.cpp"))],
        include_dirs=[str(HERE / "include"), str(HERE / "kernels")],
        # Hidden, as the linker for aarch64 keeps the names of templates that libtorch has too.
        extra_compile_args={"cxx": [*cxx_flags(), *CXX_ALONE, "-fvisibility-inlines-hidden"]},
        extra_link_args=LINK,
    )
    ext.libraries = ["stdc++", *libraries, "dl"]
    return ext


def extension(cuda):
    import torch
    import torch.utils.cpp_extension as cpp

    macros = [("TORCH_TARGET_VERSION", TORCH_2_10)]
    flags = cxx_flags()
    cxx = [*flags, *CXX_ALONE]
    sources = sorted([*HERE.glob("csrc/*.cpp"), *HERE.glob("kernels/**/*_cpu.cpp")])
    kwargs = {
        "extra_link_args": LINK,
        "include_dirs": [str(HERE / "include"), str(HERE / "kernels")],
    }
    if cuda is None:
        sources = [s for s in sources if not s.stem.endswith("_cuda")]
        ext = cpp.CppExtension(
            "my_ops._C",
            [str(s.relative_to(HERE)) for s in sources],
            define_macros=macros,
            extra_compile_args={"cxx": cxx},
            **kwargs,
        )
        # stdc++ first: otherwise a few of its symbols bind, unversioned, to copies in libc10.so.
        ext.libraries = ["stdc++", "dl"]
        return ext

    toolkit, archs = cuda
    cpp.CUDA_HOME = os.environ["CUDA_HOME"] = str(toolkit.home)
    # The module contains the CUDA runtime, so torch's own CUDA version does not matter. preflight
    # has checked that nvcc works with the host compiler.
    cpp._check_cuda_version = lambda *_: None
    # Only with this does BuildExtension tell ninja which headers a .cu file includes.
    torch.version.cuda = torch.version.cuda or toolkit.version
    names = ", ".join(archs)
    ext = cpp.CUDAExtension(
        "my_ops._C",
        [str(s.relative_to(HERE)) for s in sorted([*sources, *HERE.glob("kernels/**/*.cu")])],
        define_macros=[*macros, ("MY_OPS_WITH_CUDA", None), ("USE_CUDA", None)],
        extra_compile_args={
            "cxx": [*cxx, f'-DMY_OPS_ARCHITECTURES="{names}"'],
            # The seed replaces nvcc's process id in the names of kernels. These contain the file's
            # path too, so one seed is enough for all files.
            "nvcc": [
                *("-O3", "-std=c++20", "-Xcompiler", ",".join(flags[3:])),
                f"--threads={preflight.architectures_at_once()}",
                *(["-frandom-seed=my_ops"] if toolkit.takes("--frandom-seed") else []),
                # Half the size, and works with every driver that CUDA 13 supports.
                *(["--compress-mode=size"] if toolkit.release >= (13, 0) else []),
            ],
        },
        library_dirs=[str(toolkit.home / d) for d in ("lib64", "lib")],
        **kwargs,
    )
    # The CUDA runtime is linked in: the wheel needs a driver, but no CUDA library of any version.
    ext.libraries = ["stdc++", "cudart_static", "rt", "pthread", "dl"]
    return ext


def record(cuda):
    """What `python -m my_ops` says about this build. No time or folder: builds are repeatable."""
    import torch

    return {
        "version": version(),
        "commit": source.commit(),
        "torch_built_against": torch.__version__,
        "torch_minimum": "2.10",
        "home": HOME,
        "nvcc": cuda[0].version if cuda else None,
        "architectures": cuda[1] if cuda else [],
    }


def build():
    """The modules and the command that compiles them; stops with a message if it cannot build."""
    try:
        preflight.check_system()
        preflight.check_torch()
        cuda = preflight.cuda_toolkit(WITH_CUDA, CUDA, preflight.cxx_compiler())
        preflight.find_ninja()
        preflight.set_jobs()
    except preflight.Unfit as unfit:
        raise SystemExit(f"my_ops: {unfit}") from None
    import torch.utils.cpp_extension as cpp

    class Build(cpp.BuildExtension):
        def build_extension(self, ext):
            """Gives the kernels for Hopper and newer other architectures than the rest has."""
            compile_alike = self.compiler.compile

            def compile_all(sources, extra_postargs, **arguments):
                objects = []
                for sm90 in (False, True):
                    code = preflight.gencode(cuda[1], sm90)
                    options = {**extra_postargs, "nvcc": [*extra_postargs["nvcc"], *code]}
                    # What takes longest comes first, so that no core waits long for the last file.
                    slow = ("fp32_sm90.cu", "recurrent", "half_sm90.cu", "split_sm90.cu", ".cu")
                    some = [s for s in sources if s.endswith("_sm90.cu") == sm90]
                    some.sort(key=lambda source: [name not in source for name in slow])
                    if some:
                        objects += compile_alike(some, extra_postargs=options, **arguments)
                return objects

            if cuda:
                self.compiler.compile = compile_all
            super().build_extension(ext)
            self.compiler.compile = compile_alike

        def run(self):
            super().run()
            module = Path(self.get_ext_fullpath("my_ops._C"))
            text = json.dumps(record(cuda), indent=2)
            module.with_name("_build.json").write_text(text + "\n")
            module.with_name(kernel_text.CUDA).unlink(missing_ok=True)
            for name in [kernel_text.CPU, *([kernel_text.CUDA] if cuda else [])]:
                module.with_name(name).write_text(kernel_text.text(HERE, name))

    # Named _C.so, because it is not a Python module and belongs to no version of Python.
    command = Build.with_options(no_python_abi_suffix=True)
    modules = [extension(cuda), with_torchs_headers("_calls", ["torch_python"])]
    if cuda:
        modules.append(with_torchs_headers("_overrides"))
    return {"ext_modules": modules, "cmdclass": {"build_ext": command}}


class Editable(editable_wheel):
    """Puts this folder on Python's path. The default, an import hook, comes after the path: in the
    folder above a clone called my_ops, Python would take that for a namespace package."""

    def finalize_options(self):
        super().finalize_options()
        self.mode = self.mode or "compat"


class Wheel(bdist_wheel):
    """Tags the wheel py3-none-<platform>: the module needs no Python ABI, so all take it."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]

    def write_wheelfile(self, folder, *arguments, **kwargs):
        super().write_wheelfile(folder, *arguments, **kwargs)
        record = Path(self.bdist_dir, "my_ops/_build.json")
        if record.exists():  # not in an editable wheel, whose module stays in this folder
            bom = Path(folder, sbom.PLACE)
            bom.parent.mkdir(exist_ok=True)
            bom.write_text(json.dumps(sbom.sbom(json.loads(record.read_text())), indent=2) + "\n")


arguments = build() if COMPILES else {}
arguments.setdefault("cmdclass", {}).update(bdist_wheel=Wheel, editable_wheel=Editable)
setup(version=version(), **page.arguments(HERE / "README.md", VERSION, HOME), **arguments)
