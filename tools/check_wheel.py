# /// script
# requires-python = ">=3.10"
# dependencies = ["auditwheel", "check-wheel-contents", "nvidia-cuda-cuobjdump", "packaging",
#                 "pyelftools", "torch-abi-audit", "twine"]
# ///
"""Checks a wheel of my_ops as a user's machine will meet it: check_wheel.py WHEEL [--glibc 2.28]

name        the tags are py3-none, and file name, metadata and build record give one version
contents    headers, CMake package, type marker, record and one module are there; twine takes it
python      no module uses a symbol of Python, nor is named after one Python
torch       it uses torch's stable ABI only, of torch 2.10 at the latest (torch-abi-audit)
libraries   it needs libtorch.so, and no CUDA, Python or torch_cuda library
exports     it exports the C interface my_ops_* and nothing else
gpu code    machine code and PTX are those of the build record (cuobjdump); sizes are printed
size        less than 20 MB
platform    glibc and libstdc++ are no newer than the tag says, or than --glibc (auditwheel)
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import Symbol, SymbolTableSection
from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename
from packaging.version import Version

LARGEST = 20_000_000
FORBIDDEN = r"lib(cudart|c10_cuda|torch_cuda|torch_python|python|cublas|cuda\.)"
REQUIRED = [
    "my_ops/py.typed",
    "my_ops/include/my_ops/ops.h",
    "my_ops/share/cmake/my_ops/my_opsConfig.cmake",
    "my_ops/share/cmake/my_ops/my_opsConfigVersion.cmake",
    "my_ops/_build.json",
    "my_ops/_C.so",
]


class Wheel:
    """The file, and the folder it is unpacked in."""

    def __init__(self, path: Path, folder: Path, glibc: str | None) -> None:
        self.path = path
        self.folder = folder
        self.glibc = glibc
        with zipfile.ZipFile(path) as archive:
            archive.extractall(folder)
            self.names = archive.namelist()
        self.modules = sorted(p for p in folder.rglob("*") if re.search(r"\.so(\.|$)", p.name))
        record = folder / "my_ops/_build.json"
        self.record = json.loads(record.read_text()) if record.exists() else {}

    def metadata(self) -> dict[str, list[str]]:
        (file,) = self.folder.glob("*.dist-info/METADATA")
        message = Parser().parsestr(file.read_text())
        return {key: message.get_all(key, []) for key in set(message.keys())}


def tool(*command: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs a tool that pip installed beside this Python."""
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
    (inner,) = wheel.folder.glob("*.dist-info/WHEEL")
    written = set(re.findall(r"^Tag: (.*)$", inner.read_text(), re.MULTILINE))
    if written != {str(tag) for tag in tags}:
        yield f"the file name says {sorted(map(str, tags))}, WHEEL says {sorted(written)}"
    needs = [r for r in map(Requirement, metadata["Requires-Dist"]) if r.marker is None]
    if [(r.name, str(r.specifier)) for r in needs] != [("torch", ">=2.10")]:
        yield f"it requires {list(map(str, needs))}, not torch>=2.10 alone"


def check_contents(wheel: Wheel) -> Iterator[str]:
    for name in REQUIRED:
        if name not in wheel.names:
            yield f"{name} is missing"
    for command in (
        ("check-wheel-contents", wheel.path),
        ("twine", "check", "--strict", wheel.path),
    ):
        done = tool(*command)
        if done.returncode != 0:
            yield f"{command[0]}: {done.stdout.strip()} {done.stderr.strip()}"


def check_python(wheel: Wheel) -> Iterator[str]:
    for module in wheel.modules:
        if module.suffixes != [".so"]:
            yield f"{module.name} does not end in .so alone"
        with module.open("rb") as file:
            names = [symbol.name for symbol in dynamic_symbols(ELFFile(file))]
        if python := [name for name in names if re.match("_?Py", name)]:
            yield f"{module.name} uses or exports {python[:5]}"


def check_torch(wheel: Wheel) -> Iterator[str]:
    done = tool("torch-abi-audit", "--check", "both", "--json", wheel.folder / "my_ops")
    if done.returncode != 0:
        yield f"torch-abi-audit: {done.stdout.strip()[:600]} {done.stderr.strip()}"
        return
    for extension in json.loads(done.stdout)["extensions"]:
        minimum = extension["torch"]["min_torch_version"]
        if minimum is None or Version(minimum) > Version("2.10"):
            yield f"{Path(extension['path']).name} needs torch {minimum}, not 2.10"


def dynamic_symbols(elf: ELFFile) -> list[Symbol]:
    table = elf.get_section_by_name(".dynsym")
    assert isinstance(table, SymbolTableSection)
    return [symbol for symbol in table.iter_symbols() if symbol.name]


def check_libraries(wheel: Wheel) -> Iterator[str]:
    for module in wheel.modules:
        with module.open("rb") as file:
            section = ELFFile(file).get_section_by_name(".dynamic")
            assert isinstance(section, DynamicSection)
            needed = [tag.needed for tag in section.iter_tags() if tag.entry.d_tag == "DT_NEEDED"]
        for name in needed:
            if re.match(FORBIDDEN, name):
                yield f"{module.name} needs {name}"
        if "libtorch.so" not in needed:
            yield f"{module.name} does not need libtorch.so: no CUDA stream under CUDA torch"


def check_exports(wheel: Wheel) -> Iterator[str]:
    for module in wheel.modules:
        with module.open("rb") as file:
            symbols = dynamic_symbols(ELFFile(file))
        exported = [s.name for s in symbols if s["st_shndx"] != "SHN_UNDEF"]
        stray = [name for name in exported if not re.fullmatch("my_ops_.*", name)]
        if stray or not exported:
            yield f"{module.name} exports {stray[:5]}, not my_ops_* alone"


def check_gpu_code(wheel: Wheel) -> Iterator[str]:
    wanted = wheel.record.get("architectures", [])
    names = {a: "sm_" + a.removesuffix("+PTX").replace(".", "") for a in wanted}
    expected = {
        "elf": set(names.values()),
        "ptx": {name for arch, name in names.items() if arch.endswith("+PTX")},
    }
    for module in wheel.modules:
        for kind, archs in expected.items():
            done = tool(cuobjdump(), f"--list-{kind}", module)
            found = Counter(
                re.findall(
                    rf"\.(sm_\w+)(?:\.\w+)?\.{kind if kind == 'ptx' else 'cubin'}", done.stdout
                )
            )
            if set(found) != archs:
                yield f"{module.name} has {kind} for {sorted(found)}, the record {sorted(archs)}"
        if "cubin" not in tool(cuobjdump(), "--list-elf", module).stdout:
            continue
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(
                [cuobjdump(), "-xelf", "all", module.resolve()],
                cwd=folder,
                check=True,
                capture_output=True,
            )
            sizes: Counter[str] = Counter()
            for cubin in Path(folder).iterdir():
                (arch,) = re.findall(r"sm_\w+", cubin.name)[-1:]
                sizes[arch] += cubin.stat().st_size
        for arch, size in sorted(sizes.items()):
            print(f"  {arch}: {size / 1e6:.2f} MB of machine code")


def check_size(wheel: Wheel) -> Iterator[str]:
    size = wheel.path.stat().st_size
    print(f"  wheel: {size / 1e6:.2f} MB")
    if size > LARGEST:
        yield f"{size / 1e6:.1f} MB is more than {LARGEST / 1e6:.0f} MB"


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
    "python": check_python,
    "torch": check_torch,
    "libraries": check_libraries,
    "exports": check_exports,
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
            findings = list(check(wheel))
            for finding in findings:
                print(f"FAILED {name}: {finding}")
            failed += bool(findings)
            if not findings:
                print(f"ok     {name}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
