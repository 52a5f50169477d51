# /// script
# requires-python = ">=3.11"
# dependencies = ["auditwheel", "check-wheel-contents", "nvidia-cuda-cuobjdump",
#   "cyclonedx-python-lib[json-validation]", "packaging", "pyelftools", "torch-abi-audit",
#   "trove-classifiers", "twine", "wheel"]
# ///
"""Checks a wheel of my_ops in the form that users get: check_wheel.py WHEEL [--glibc 2.28]

name        the tags are py3-none; file name, metadata and build record give one version
build       its compiler is the one that the name says, and its commit this source's; a manylinux
            wheel has GPU code, from CUDA 12.9 if it has no local version: for every driver
metadata    METADATA says what pyproject.toml and README.md say, and nothing else
contents    its files are those of the source tree, byte by byte; twine accepts it
files       each stands there once, is readable, and only modules are executable
notices     its bill of materials is CycloneDX and names what the build record says
python      no module but _calls.so uses a symbol of Python, or is named after one version of Python
torch       _C.so only uses torch's stable ABI, of torch 2.10 at the latest (torch-abi-audit)
libraries   it needs libtorch.so, and else only torch's CPU libraries and the system's; no run path
symbols     it exports only the C interface my_ops_*; symbols that may be absent are weak
memory      no segment is both writable and executable, nor is the stack; tables of functions are
            read-only; the stack is guarded; no symbol, debug information or build path is left
gpu code    machine code and PTX match the build record, and its compiler made them (cuobjdump)
size        less than 20 MB, or 30 with CUDA 12: drivers before 550 read no code compressed by zstd
platform    glibc and libstdc++ are no newer than the tag says, or than --glibc (auditwheel)
"""

from __future__ import annotations

import argparse
import json
import re
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from elftools.elf.constants import P_FLAGS
from packaging.version import Version

sys.path.append(str(Path(__file__).resolve().parents[1] / "build"))

import preflight
import wheel_text
from wheel_text import BUILD_PATH, CALLS, MODULE, OVERRIDES, Module, Wheel, release, tool

LARGEST = {12: 30_000_000, 13: 20_000_000}  # by the compiler
LIBRARIES = {"libtorch.so", "libtorch_cpu.so", "libc10.so"}
LIBRARIES |= {"libstdc++.so.6", "libgcc_s.so.1"}
LIBRARIES |= {f"lib{name}" for name in ("c.so.6", "m.so.6", "dl.so.2", "rt.so.1", "pthread.so.0")}
LIBRARIES |= {"ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
DEBUG = r"\.(symtab|z?debug|gnu_debug|stab)"
NOW = {"DT_FLAGS": 0x8, "DT_FLAGS_1": 0x1}
EXPORTS = "my_ops_.*"
# CPU builds of torch lack these.
MAY_BE_ABSENT = r"aoti_torch_(?!device_type_)\w*cuda|cu(da)?[A-Z]|_ZN2at4cuda"
ELF_VERSION = 20  # the offset of e_version


def cuobjdump() -> Path:
    for folder in sys.path:
        for path in Path(folder).glob("nvidia/*/bin/cuobjdump"):
            return path
    raise SystemExit("check_wheel: pip install nvidia-cuda-cuobjdump")


def check_python(wheel: Wheel) -> Iterator[str]:
    for module in wheel.modules:
        if module.path.suffixes != [".so"]:
            yield f"{module.name} does not end in .so alone"
        if module.path == wheel.folder / CALLS:
            continue  # it has what the stable ABI of every Python has
        if python := [s.name for s in module.symbols if re.match("_?Py", s.name)]:
            yield f"{module.name} uses or exports {python[:5]}"


def check_torch(wheel: Wheel) -> Iterator[str]:
    done = tool("torch-abi-audit", "--json", wheel.folder / "my_ops")
    if done.returncode != 0:
        yield f"torch-abi-audit: {done.stdout.strip()[:600]} {done.stderr.strip()}"
        return
    report = json.loads(done.stdout)
    for module in report["extensions"] + report["bundled_libs"]:
        path = Path(module["path"])
        if path.name in (Path(CALLS).name, Path(OVERRIDES).name):
            continue
        uses = module["torch"]
        if not uses["stable"]:
            yield f"{path.name} uses {uses['unstable_symbols'][:3]} of torch, which are not stable"
        minimum = uses["min_torch_version"]
        if minimum is None or Version(minimum) > Version("2.10"):
            yield f"{path.name} needs torch {minimum}, not 2.10"


def check_libraries(wheel: Wheel) -> Iterator[str]:
    for module in wheel.modules:
        needed = [tag.needed for tag in module.tags("DT_NEEDED")]
        for name in needed:
            of_calls = name == "libtorch_python.so" and module.path == wheel.folder / CALLS
            if name not in LIBRARIES and not of_calls:
                yield f"{module.name} needs {name}"
        if "libtorch.so" not in needed:
            yield f"{module.name} does not need libtorch.so: no CUDA stream under CUDA torch"
        for tag in module.tags("DT_RPATH", "DT_RUNPATH"):
            yield f"{module.name} has {tag.entry.d_tag}, a path of the build machine"


def check_symbols(wheel: Wheel) -> Iterator[str]:
    for module in wheel.modules:
        exported = module.exported()
        stray = [name for name in exported if not re.fullmatch(EXPORTS, name)]
        if stray or not exported:
            yield f"{module.name} exports {stray[:5]}, not {EXPORTS} alone"
        strong = [name for name in module.required() if re.match(MAY_BE_ABSENT, name)]
        if strong:
            yield f"{module.name} cannot be loaded without {strong[:5]}"


def check_memory(wheel: Wheel) -> Iterator[str]:
    for module in wheel.modules:
        if not any(kind == "PT_GNU_STACK" for kind, _ in module.segments):
            yield f"{module.name} does not say that its stack is not executable"
        for kind, flags in module.segments:
            if flags & P_FLAGS.PF_X and (flags & P_FLAGS.PF_W or kind == "PT_GNU_STACK"):
                yield f"{module.name} has a segment {kind} both writable and executable"
        if module.tags("DT_TEXTREL"):
            yield f"{module.name} has text relocations"
        bound = any(tag.entry.d_val & NOW[tag.entry.d_tag] for tag in module.tags(*NOW))
        if not any(kind == "PT_GNU_RELRO" for kind, _ in module.segments) or not bound:
            yield f"{module.name} can be written to after loading: its link lacks -z relro -z now"
        if found := sorted(name for name in module.sections if re.match(DEBUG, name)):
            yield f"{module.name} is not stripped: it has {found}"
        if path := re.search(BUILD_PATH, module.host):
            yield f"{module.name} names {path[0].decode()}, a path of the build machine"
    for module in wheel.modules:
        if module.path == wheel.folder / MODULE and "__stack_chk_fail" not in module.required():
            yield f"{module.name} was compiled without -fstack-protector-strong"


def code_of(module: Module, kind: str) -> Iterator[tuple[str, bytes]]:
    """Architecture and bytes of each piece of GPU code, "elf" or "ptx"."""
    if not re.search(r"\.sm_\w+\.", tool(cuobjdump(), f"--list-{kind}", module.path).stdout):
        return
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [cuobjdump(), f"-x{kind}", "all", module.path.resolve()],
            cwd=folder,
            check=True,
            capture_output=True,
        )
        for path in Path(folder).iterdir():
            yield re.findall(r"sm_[0-9a-z]+", path.name)[-1], path.read_bytes()


def compilers(code: bytes) -> set[str]:
    """CUDA releases that made GPU code: "12.9" or "13.0" for machine code, "13" for PTX."""
    names = {n.decode() for n in re.findall(rb"Cuda compilation tools, release ([\d.]+)", code)}
    isa = re.findall(rb"^\.version (\d+)", code, re.MULTILINE)  # CUDA 12 has 8.x, CUDA 13 has 9.x
    if code.startswith(b"\x7fELF"):  # before 13.0 only the version of the file's format tells
        (number,) = struct.unpack_from("<I", code, ELF_VERSION)
        names |= {f"{number // 10}.{number % 10}"} if number > 1 else set()
    return names | {str(int(major) + 4) for major in isa}


def check_gpu_code(wheel: Wheel) -> Iterator[str]:
    wanted = wheel.record.get("architectures", [])
    options = [o for sm90 in (False, True) for o in preflight.gencode(wanted, sm90)]
    codes = {option.rpartition("code=")[2] for option in options}
    expected = {
        "elf": {code for code in codes if code.startswith("sm_")},
        "ptx": {code.replace("compute", "sm") for code in codes if code.startswith("compute_")},
    }
    nvcc = release(wheel.record.get("nvcc"))
    for module in wheel.modules:
        if module.path in (wheel.folder / CALLS, wheel.folder / OVERRIDES):
            continue
        made: set[str] = set()
        for kind, archs in expected.items():
            sizes: Counter[str] = Counter()
            for arch, code in code_of(module, kind):
                sizes[arch] += len(code)
                made |= compilers(code)
                if kind == "ptx" and (path := re.search(BUILD_PATH, code)):
                    yield f"{module.name} names {path[0].decode()} in its PTX for {arch}"
            if set(sizes) != archs:
                yield f"{module.name} has {kind} for {sorted(sizes)}, the record {sorted(archs)}"
            for arch, size in sorted(sizes.items()):
                print(f"  {arch}: {size / 1e6:.2f} MB of {kind}")
        for compiler in sorted(made):
            if not f"{nvcc}.".startswith(f"{compiler}."):
                yield f"{module.name} has code made by CUDA {compiler}, the record says {nvcc}"
        if wanted and nvcc not in made:
            yield f"{module.name} has no machine code made by CUDA {nvcc}, as the record says"


def check_size(wheel: Wheel) -> Iterator[str]:
    size = wheel.path.stat().st_size
    largest = LARGEST[12 if release(wheel.record.get("nvcc")).startswith("12.") else 13]
    print(f"  wheel: {size / 1e6:.2f} MB")
    if size > largest:
        yield f"{size / 1e6:.1f} MB is more than {largest / 1e6:.0f} MB"


def check_platform(wheel: Wheel) -> Iterator[str]:
    done = tool("auditwheel", "show", wheel.path)
    text = re.sub(r"\s+", " ", done.stdout)
    match = re.search(r'consistent with the following platform tag: "(\w+)"', text)
    constrained = re.search(r'constrains the platform tag to "manylinux_(\d+)_(\d+)', text)
    if done.returncode != 0 or match is None:
        yield f"auditwheel: {text} {done.stderr.strip()[-300:]}"
        return
    tag = re.search(r"manylinux_(\d+)_(\d+)", wheel.path.name)
    claimed = (int(tag[1]), int(tag[2])) if tag else None
    needed = (int(constrained[1]), int(constrained[2])) if constrained else None
    if needed is None and (own := re.match(r"manylinux_(\d+)_(\d+)", match[1])):
        needed = int(own[1]), int(own[2])
    print(f"  glibc: {'.'.join(map(str, needed)) if needed else 'any'}")
    limit = tuple(map(int, wheel.glibc.split("."))) if wheel.glibc else claimed
    if wheel.glibc and claimed is None:
        yield f"{wheel.path.name} has no manylinux tag: auditwheel repair makes one"
    if limit and needed and needed > limit:
        yield f"it needs glibc {needed[0]}.{needed[1]}, more than {limit[0]}.{limit[1]}"


CHECKS = {
    "name": wheel_text.check_name,
    "build": wheel_text.check_build,
    "metadata": wheel_text.check_metadata,
    "contents": wheel_text.check_contents,
    "files": wheel_text.check_files,
    "notices": wheel_text.check_notices,
    "python": check_python,
    "torch": check_torch,
    "libraries": check_libraries,
    "symbols": check_symbols,
    "memory": check_memory,
    "gpu code": check_gpu_code,
    "size": check_size,
    "platform": check_platform,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--glibc", help="the newest glibc that the wheel may need, as 2.28")
    arguments = parser.parse_args()
    print(arguments.wheel.name)
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        wheel = Wheel(arguments.wheel, Path(folder), arguments.glibc)
        for name, check in CHECKS.items():
            if name == "torch" and sys.version_info < (3, 11):
                print(f"not run {name}: torch-abi-audit needs Python 3.11")
                continue
            findings = list(check(wheel))
            for finding in findings:
                print(f"FAILED {name}: {finding}")
            failed += bool(findings)
            if not findings:
                print(f"ok     {name}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
