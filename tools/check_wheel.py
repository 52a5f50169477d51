# /// script
# requires-python = ">=3.11"
# dependencies = ["auditwheel", "check-wheel-contents", "nvidia-cuda-cuobjdump",
#   "cyclonedx-python-lib[json-validation]", "packaging", "pyelftools", "torch-abi-audit",
#   "trove-classifiers", "twine", "wheel"]
# ///
"""Checks a wheel of my_ops in the form that users get: check_wheel.py WHEEL [--glibc 2.28]

name        the tags are py3-none; file name, metadata, build record and compiler give one version;
            a manylinux wheel without a local version is for every driver, so CUDA 12.9 compiled it
contents    the package's files are those of the source tree, each with its hash; twine accepts it
notices     it has licences, NVIDIA's notice and a bill of materials (CycloneDX)
python      no module uses a symbol of Python, or is named after one version of Python
torch       _C.so only uses torch's stable ABI, of torch 2.10 at the latest (torch-abi-audit)
libraries   it needs libtorch.so, no CUDA, Python or torch_cuda library, and has no run path
symbols     it exports only the C interface my_ops_*; symbols that may be absent are weak
memory      no segment is both writable and executable, nor is the stack; no build path is visible
gpu code    machine code and PTX match the build record, and its compiler made them (cuobjdump)
size        less than 20 MB, or 30 with CUDA 12: drivers before 550 read no code compressed by zstd
platform    glibc and libstdc++ are no newer than the tag says, or than --glibc (auditwheel)
"""

from __future__ import annotations

import argparse
import json
import os
import re
import struct
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path
from typing import Any

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from elftools.elf.constants import P_FLAGS
from elftools.elf.elffile import ELFFile
from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename
from packaging.version import Version
from trove_classifiers import classifiers
from wheel.wheelfile import WheelError, WheelFile

sys.path.append(str(Path(__file__).resolve().parent / "build"))

import preflight

ROOT = Path(__file__).resolve().parents[1]
PLAIN_CUDA = "12.9"
LARGEST = {12: 30_000_000, 13: 20_000_000}  # by the compiler
FORBIDDEN = r"lib(cudart|c10_cuda|torch_cuda|torch_python|python|cublas|cuda\.)"
MODULE = "my_ops/_C.so"
OVERRIDES = "my_ops/_overrides.so"  # with CUDA only; fits some releases of torch, without GPU code
EXPORTS = "my_ops_.*"
# CPU builds of torch lack these.
MAY_BE_ABSENT = r"aoti_torch_(?!device_type_)\w*cuda|cu(da)?[A-Z]|_ZN2at4cuda"
ELF_VERSION = 20  # the offset of e_version
BUILD_PATH = rb"(?<![\w.-])/[\w.+/-]+/(?:csrc|kernels|torch/include)/[\w.]+"


class Module:
    """A shared library of the wheel."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        with path.open("rb") as file:
            elf = ELFFile(file)
            self.segments = {(s["p_type"], s["p_flags"]) for s in elf.iter_segments()}
            self.dynamic = list(elf.get_section_by_name(".dynamic").iter_tags())
            self.symbols = list(elf.get_section_by_name(".dynsym").iter_symbols())

    def tags(self, *names: str) -> list[Any]:
        return [tag for tag in self.dynamic if tag.entry.d_tag in names]

    def exported(self) -> list[str]:
        return [s.name for s in self.symbols if s.name and s["st_shndx"] != "SHN_UNDEF"]

    def required(self) -> list[str]:
        """The symbols that must be found when the module is loaded."""
        return [
            s.name
            for s in self.symbols
            if s["st_shndx"] == "SHN_UNDEF" and s["st_info"]["bind"] != "STB_WEAK"
        ]


class Wheel:
    """The file, and the folder into which it is unpacked."""

    def __init__(self, path: Path, folder: Path, glibc: str | None) -> None:
        self.path = path
        self.folder = folder
        self.glibc = glibc
        with zipfile.ZipFile(path) as archive:
            archive.extractall(folder)
            self.names = archive.namelist()
        paths = sorted(p for p in folder.rglob("*") if re.search(r"\.so(\.|$)", p.name))
        self.modules = [Module(path) for path in paths]
        record = folder / "my_ops/_build.json"
        self.record = json.loads(record.read_text()) if record.exists() else {}

    def metadata(self) -> dict[str, list[str]]:
        message = Parser().parsestr(self.info("METADATA").read_text())
        return {key: message.get_all(key, []) for key in set(message.keys())}

    def info(self, name: str) -> Path:
        """A file of the .dist-info folder."""
        (folder,) = self.folder.glob("*.dist-info")
        return folder / name


def tool(*command: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs a tool that is installed in this Python's environment."""
    scripts = sysconfig.get_path("scripts")
    path = os.pathsep.join([scripts, os.environ.get("PATH", "")])
    return subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PATH": path, "NO_COLOR": "1"},
    )


def cuobjdump() -> Path:
    for folder in sys.path:
        for path in Path(folder).glob("nvidia/*/bin/cuobjdump"):
            return path
    raise SystemExit("check_wheel: pip install nvidia-cuda-cuobjdump")


def release(version: str | None) -> str:
    """13.0 for 13.0.88; 0 for None."""
    return ".".join((version or "0").split(".")[:2])


def check_name(wheel: Wheel) -> Iterator[str]:
    _, version, _, tags = parse_wheel_filename(wheel.path.name)
    for tag in tags:
        if (tag.interpreter, tag.abi) != ("py3", "none") or "linux" not in tag.platform:
            yield f"the tag is {tag}, not py3-none-<linux platform>"
    metadata = wheel.metadata()
    if metadata["Version"] != [str(version)]:
        yield f"the file name says {version}, METADATA {metadata['Version']}"
    if wheel.record.get("version") != str(version):
        yield f"the file name says {version}, the build record {wheel.record.get('version')}"
    nvcc = wheel.record.get("nvcc")
    if version.local and version.local != f"cu{release(nvcc).replace('.', '')}":
        yield f"the file name says {version.local}, and nvcc was {nvcc}"
    released = all(tag.platform.startswith("manylinux") for tag in tags)
    if released and nvcc and not version.local and release(nvcc) != PLAIN_CUDA:
        yield f"the plain wheel is for drivers that know CUDA {PLAIN_CUDA}, and nvcc was {nvcc}"
    written = set(re.findall(r"^Tag: (.*)$", wheel.info("WHEEL").read_text(), re.MULTILINE))
    if written != {str(tag) for tag in tags}:
        yield f"the file name says {sorted(map(str, tags))}, WHEEL says {sorted(written)}"
    needs = [r for r in map(Requirement, metadata["Requires-Dist"]) if r.marker is None]
    if [(r.name, str(r.specifier)) for r in needs] != [("torch", ">=2.10")]:
        yield f"it requires {list(map(str, needs))}, not torch>=2.10 alone"
    if metadata.get("Requires-Python") != [">=3.10"]:
        yield f"it is for Python {metadata.get('Requires-Python')}, not >=3.10"


def check_contents(wheel: Wheel) -> Iterator[str]:
    endings = (".py", ".typed", ".h", ".cmake")
    tree = (p for p in (ROOT / "my_ops").rglob("*") if p.suffix in endings or p.name in endings)
    expected = {p.relative_to(ROOT).as_posix() for p in tree} | {MODULE, "my_ops/_build.json"}
    if wheel.record.get("nvcc"):
        expected.add(OVERRIDES)
    found = {n for n in wheel.names if ".dist-info/" not in n and not n.endswith("/")}
    for name in sorted(expected - found):
        yield f"{name} is missing"
    for name in sorted(found - expected):
        yield f"{name} is not of the source tree"
    try:
        with WheelFile(wheel.path) as archive:
            archive.testzip()
    except WheelError as error:
        yield f"RECORD: {error}"
    for command in (
        ("check-wheel-contents", wheel.path),
        ("twine", "check", "--strict", wheel.path),
    ):
        done = tool(*command)
        if done.returncode != 0:
            yield f"{command[0]}: {done.stdout.strip()} {done.stderr.strip()}"
    for classifier in set(wheel.metadata()["Classifier"]) - classifiers:
        yield f"PyPI knows no classifier '{classifier}'"


def check_notices(wheel: Wheel) -> Iterator[str]:
    for name in ("LICENSE", "NOTICE"):
        if not wheel.info(f"licenses/{name}").exists():
            yield f"licenses/{name} is missing"
    path = wheel.info("sboms/my_ops.cdx.json")
    if not path.exists():
        yield f"sboms/{path.name} is missing"
        return
    text = path.read_text()
    if error := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text):
        yield f"sboms/{path.name} is not CycloneDX: {error.data.message}"
        return
    bom = json.loads(text)
    named = bom["metadata"]["component"]["version"]
    if named != wheel.record["version"]:
        yield f"the bill of materials is of {named}, the build record {wheel.record['version']}"
    cuda = [c["version"] for c in bom["components"] if c["name"].startswith("CUDA Runtime")]
    if cuda != ([release(wheel.record["nvcc"])] if wheel.record["nvcc"] else []):
        yield f"the bill of materials names the CUDA Runtime {cuda}, nvcc {wheel.record['nvcc']}"


def check_python(wheel: Wheel) -> Iterator[str]:
    for module in wheel.modules:
        if module.path.suffixes != [".so"]:
            yield f"{module.name} does not end in .so alone"
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
        if path.name == Path(OVERRIDES).name:
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
            if re.match(FORBIDDEN, name):
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
        if path := re.search(BUILD_PATH, module.path.read_bytes()):
            yield f"{module.name} names {path[0].decode()}, a path of the build machine"


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
        if module.path == wheel.folder / OVERRIDES:
            continue
        made: set[str] = set()
        for kind, archs in expected.items():
            sizes: Counter[str] = Counter()
            for arch, code in code_of(module, kind):
                sizes[arch] += len(code)
                made |= compilers(code)
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
    "name": check_name,
    "contents": check_contents,
    "notices": check_notices,
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
