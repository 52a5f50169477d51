"""A wheel for check_wheel.py, and the checks of what can be read in it: names and text."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
import sysconfig
import zipfile
from collections import Counter
from collections.abc import Iterator
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import Any

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from elftools.elf.constants import SH_FLAGS
from elftools.elf.elffile import ELFFile
from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename
from trove_classifiers import classifiers
from wheel.wheelfile import WheelError, WheelFile

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

sys.path.append(str(Path(__file__).resolve().parents[1] / "build"))

import kernel_text
import page
import source
from check_release import PLAIN_CUDA

ROOT = Path(__file__).resolve().parents[2]
MODULE = "my_ops/_C.so"
CALLS = "my_ops/_calls.so"  # fits some releases of torch, without GPU code
OVERRIDES = "my_ops/_overrides.so"  # with CUDA only; fits some releases of torch, without GPU code
BUILD_RECORD = "my_ops/_build.json"
SBOM = "sboms/my_ops.cdx.json"
LICENCES = ("LICENSE", "NOTICE")
DIST_INFO = {"METADATA", "RECORD", "WHEEL", "top_level.txt", SBOM}
DIST_INFO |= {f"licenses/{name}" for name in LICENCES}
WRITTEN_BY_SETUPTOOLS = {"metadata-version", "dynamic", "provides-extra"}
# An absolute path. What the kernel provides is the same on every machine.
BUILD_PATH = rb"(?<![\w.+/%-])(?!/(?:dev|proc|sys)/)/[\w.+-]{3,}(?:/[\w.+-]{2,})+"


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
            self.sections = {s.name for s in elf.iter_sections()}
            # What the file holds besides code, whose bytes look like anything.
            host = bytearray(path.read_bytes())
            for section in elf.iter_sections():
                executable = section["sh_flags"] & SH_FLAGS.SHF_EXECINSTR
                if executable or "nv" in section.name.lower():
                    start, size = section["sh_offset"], section["sh_size"]
                    host[start : start + size] = bytes(size)
            self.host = bytes(host)

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
            self.entries = archive.infolist()
            self.names = archive.namelist()
        paths = sorted(p for p in folder.rglob("*") if re.search(r"\.so(\.|$)", p.name))
        self.modules = [Module(path) for path in paths]
        record = folder / BUILD_RECORD
        self.record = json.loads(record.read_text()) if record.exists() else {}

    @property
    def version(self) -> Any:
        return parse_wheel_filename(self.path.name)[1]

    @property
    def released(self) -> bool:
        """Whether its tags are those that an index takes, which auditwheel gives."""
        return all("manylinux" in tag.platform for tag in parse_wheel_filename(self.path.name)[3])

    def metadata(self) -> Message:
        return Parser().parsestr(self.info("METADATA").read_text(encoding="utf-8"))

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


def release(version: str | None) -> str:
    """13.0 for 13.0.88; 0 for None."""
    return ".".join((version or "0").split(".")[:2])


def check_name(wheel: Wheel) -> Iterator[str]:
    name, version, _, tags = parse_wheel_filename(wheel.path.name)
    if name != "my-ops":
        yield f"the file name says {name}, not my_ops"
    for tag in tags:
        if (tag.interpreter, tag.abi) != ("py3", "none") or "linux" not in tag.platform:
            yield f"the tag is {tag}, not py3-none-<linux platform>"
    metadata = wheel.metadata()
    if metadata.get_all("Version") != [str(version)]:
        yield f"the file name says {version}, METADATA {metadata.get_all('Version')}"
    if wheel.record.get("version") != str(version):
        yield f"the file name says {version}, the build record {wheel.record.get('version')}"
    text = wheel.info("WHEEL").read_text()
    written = set(re.findall(r"^Tag: (.*)$", text, re.MULTILINE))
    if written != {str(tag) for tag in tags}:
        yield f"the file name says {sorted(map(str, tags))}, WHEEL says {sorted(written)}"
    if "Root-Is-Purelib: false\n" not in text:
        yield "WHEEL says that it has no module for one platform alone"


def check_build(wheel: Wheel) -> Iterator[str]:
    nvcc, commit = wheel.record.get("nvcc"), wheel.record.get("commit")
    local = wheel.version.local
    if local and local != f"cu{release(nvcc).replace('.', '')}":
        yield f"the file name says {local}, and nvcc was {nvcc}"
    if wheel.released and not nvcc:
        yield "a wheel for an index has GPU code, and this was built for the CPU only"
    if wheel.released and nvcc and not local and release(nvcc) != PLAIN_CUDA:
        yield f"the plain wheel is for drivers that know CUDA {PLAIN_CUDA}, and nvcc was {nvcc}"
    if commit is not None and not re.fullmatch(r"[0-9a-f]{40}\+?", commit):
        yield f"the build record names '{commit}', which is no commit"
    if wheel.released and (commit is None or commit.endswith("+")):
        yield f"a wheel for an index is built from a commit, and this from {commit}"
    here = source.commit(ROOT)
    if here and commit and commit.rstrip("+") != here.rstrip("+"):
        yield f"the build record names commit {commit}, and this source is at {here}"


def expected_metadata(wheel: Wheel) -> dict[str, list[str]]:
    """What pyproject.toml and README.md say, in METADATA's fields."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requires = [Requirement(text) for text in project["dependencies"]]
    for extra, texts in project["optional-dependencies"].items():
        requires += [Requirement(f'{text}; extra == "{extra}"') for text in texts]
    version = wheel.version.public
    urls = page.arguments(ROOT / "README.md", version, wheel.record.get("home"))["project_urls"]
    return {
        "Name": [project["name"]],
        "Version": [str(wheel.version)],
        "Summary": [project["description"]],
        "License-Expression": [project["license"]],
        "License-File": project["license-files"],
        "Requires-Python": [project["requires-python"]],
        "Requires-Dist": [str(requirement) for requirement in requires],
        "Classifier": project["classifiers"],
        "Description-Content-Type": ["text/markdown"],
        "Project-URL": [f"{name}, {url}" for name, url in urls.items()],
    }


def check_metadata(wheel: Wheel) -> Iterator[str]:
    metadata, expected = wheel.metadata(), expected_metadata(wheel)
    for key, values in expected.items():
        found = metadata.get_all(key, [])
        if key == "Requires-Dist":
            found = [str(Requirement(text)) for text in found]
        extra = sorted((Counter(found) - Counter(values)).elements())
        lacking = sorted((Counter(values) - Counter(found)).elements())
        if extra or lacking:
            yield f"{key} has {extra}, and lacks {lacking}"
    known = {key.lower() for key in expected} | WRITTEN_BY_SETUPTOOLS
    if unknown := sorted({key for key in set(metadata) if key.lower() not in known}):
        yield f"METADATA has {unknown}, which pyproject.toml does not say"
    home = wheel.record.get("home")
    text = page.arguments(ROOT / "README.md", wheel.version.public, home)["long_description"]
    if metadata.get_payload().strip() != text.strip():
        yield "its page is not README.md"
    for classifier in set(metadata.get_all("Classifier", [])) - classifiers:
        yield f"PyPI knows no classifier '{classifier}'"


def check_contents(wheel: Wheel) -> Iterator[str]:
    endings = (".py", ".typed", ".h", ".cmake")
    tree = (p for p in (ROOT / "my_ops").rglob("*") if p.suffix in endings or p.name in endings)
    sources = {p.relative_to(ROOT).as_posix(): p for p in tree}
    info = wheel.info("").name
    sources |= {f"{info}/licenses/{name}": ROOT / name for name in LICENCES}
    expected = {*sources, MODULE, CALLS, BUILD_RECORD, *(f"{info}/{name}" for name in DIST_INFO)}
    with_cuda = wheel.record.get("nvcc")
    expected |= {OVERRIDES} if with_cuda else set()
    for name in [kernel_text.CPU, *([kernel_text.CUDA] if with_cuda else [])]:
        place = f"my_ops/{name}"
        expected.add(place)
        kernels = wheel.folder / place
        if kernels.exists() and kernels.read_text() != kernel_text.text(ROOT, name):
            yield f"{place} differs from the source tree's"
    found = {name for name in wheel.names if not name.endswith("/")}
    for name in sorted(expected - found):
        yield f"{name} is missing"
    for name in sorted(found - expected):
        yield f"{name} is not of the source tree"
    for name in sorted(sources.keys() & found):
        if (wheel.folder / name).read_bytes() != sources[name].read_bytes():
            yield f"{name} differs from the source tree's"
    if info != f"my_ops-{wheel.version}.dist-info":
        yield f"the file name says {wheel.version}, the folder {info}"
    if (text := wheel.info("top_level.txt").read_text().split()) != ["my_ops"]:
        yield f"top_level.txt names {text}"
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


def check_files(wheel: Wheel) -> Iterator[str]:
    for name, count in Counter(wheel.names).items():
        if count > 1:
            yield f"{name} stands in it {count} times"
    for entry in wheel.entries:
        mode = entry.external_attr >> 16
        if entry.is_dir():
            continue
        if not stat.S_ISREG(mode):
            yield f"{entry.filename} is no regular file"
        wrong = stat.S_ISUID | stat.S_ISGID | stat.S_ISVTX | stat.S_IWOTH
        if not entry.filename.endswith(".so"):
            wrong |= stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH
        if mode & wrong or not mode & stat.S_IRUSR:
            yield f"{entry.filename} has the mode {stat.S_IMODE(mode):04o}"
    for name in (BUILD_RECORD, f"{wheel.info('').name}/{SBOM}"):
        path = wheel.folder / name
        text = re.sub(rb"https?://\S*", b"", path.read_bytes() if path.exists() else b"")
        if leak := re.search(BUILD_PATH, text):
            yield f"{name} names {leak[0].decode()}, a path of the build machine"


def check_notices(wheel: Wheel) -> Iterator[str]:
    path = wheel.info(SBOM)
    if not path.exists():
        return  # check_contents says so
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
