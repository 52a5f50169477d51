# /// script
# requires-python = ">=3.10"
# dependencies = ["packaging"]
# ///
"""Checks what is about to be released: check_release.py FOLDER [TAG]

files       FOLDER has the sdist, and a wheel for every CUDA release and processor, which that
            release compiled, all from one commit
version     they have the version that setup.py names
changelog   CHANGELOG.md begins with that version
tag         TAG is v and the version, and the changelog has a date for it, not "unreleased"
"""

from __future__ import annotations

import datetime
import json
import re
import sys
import zipfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from packaging.utils import parse_sdist_filename, parse_wheel_filename

ROOT = Path(__file__).resolve().parents[2]
CUDA = ["", "13.0", "13.2"]  # "" is the plain wheel, which goes to PyPI
PLAIN_CUDA = "12.9"  # old enough for every driver that the code supports
PROCESSORS = ["x86_64", "aarch64"]


def source_version(root: Path) -> str:
    return re.findall(r'^VERSION = "(.*)"$', (root / "setup.py").read_text(), re.MULTILINE)[0]


def check_files(folder: Path, version: str) -> Iterator[str]:
    wanted = {
        f"{version}+cu{cuda.replace('.', '')} {processor}" if cuda else f"{version} {processor}"
        for cuda, processor in product(CUDA, PROCESSORS)
    }
    found, commits = set(), set()
    for path in sorted(folder.glob("*.whl")):
        _, named, _, tags = parse_wheel_filename(path.name)
        with zipfile.ZipFile(path) as archive:
            record = json.loads(archive.read("my_ops/_build.json"))
        commits.add(str(record["commit"]))
        cuda = re.sub(r"cu(\d+)(\d)", r"\1.\2", named.local) if named.local else PLAIN_CUDA
        if not str(record["nvcc"]).startswith(f"{cuda}."):
            yield f"{path.name} was built with the compiler {record['nvcc']}, not with CUDA {cuda}"
        for processor in PROCESSORS:
            if all(tag.platform.endswith(f"_{processor}") for tag in tags):
                found.add(f"{named} {processor}")
        if not all(tag.platform.startswith("manylinux") for tag in tags):
            yield f"{path.name} has no manylinux tag, which an index asks for"
    if len(commits) > 1:
        yield f"the wheels are of several commits: {', '.join(sorted(commits))}"
    for name in sorted(wanted - found):
        yield f"there is no wheel of {name}"
    for name in sorted(found - wanted):
        yield f"there is a wheel of {name}, which belongs to no release of {version}"
    sdists = [str(parse_sdist_filename(path.name)[1]) for path in folder.glob("*.tar.gz")]
    if sdists != [version]:
        yield f"the sdists are of {sdists}, not of {version} alone"


def check_changelog(root: Path, version: str, tag: str | None) -> Iterator[str]:
    heading = re.findall(r"^## (.*)$", (root / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    match = re.fullmatch(r"(\S+) \((.*)\)", heading)
    if match is None or match[1] != version:
        yield f"CHANGELOG.md begins with '{heading}', not with '{version} (DATE)'"
    elif tag or match[2] != "unreleased":
        try:
            datetime.date.fromisoformat(match[2])
        except ValueError:
            yield f"CHANGELOG.md gives {version} the date '{match[2]}', not one like 2026-12-31"
    if tag and tag != f"v{version}":
        yield f"the tag is {tag}, and setup.py names version {version}"


def main() -> int:
    if len(sys.argv) not in (2, 3):
        raise SystemExit(__doc__)
    folder, tag = Path(sys.argv[1]), (sys.argv[2:] or [None])[0]
    version = source_version(ROOT)
    findings = [*check_files(folder, version), *check_changelog(ROOT, version, tag)]
    for finding in findings:
        print(f"FAILED {finding}")
    if not findings:
        print(f"{version} is ready")
    return 1 if findings else 0


if __name__ == "__main__":
    raise SystemExit(main())
