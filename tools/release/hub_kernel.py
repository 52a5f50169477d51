# /// script
# requires-python = ">=3.10"
# dependencies = ["packaging"]
# ///
"""A repository for Hugging Face's Kernel Hub from wheels: hub_kernel.py FOLDER WHEEL ...

FOLDER/build has a variant for each backend, for every torch from 2.10 on (its stable ABI). A wheel
with GPU code gives the variant of its CUDA, and a plain wheel that of the CPU too. A variant holds
_C.so and the modules of hub/, with those of my_ops that they import. It may be loaded beside
other versions and beside my_ops itself, so its ops have a namespace of their own, and its imports
are relative. FOLDER/README.md is the repository's card.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import json
import re
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

from packaging.utils import parse_wheel_filename

OWN = Path(__file__).with_name("hub")
NAME, VERSION = "my-ops", 0
# The oldest toolkit of a CUDA release: a variant serves torch of the same and of newer ones, and
# the CUDA runtime is inside.
OLDEST = {"12": "126", "13": "130"}
# What each name of the namespace becomes, in Python.
NAMES = {"torch.ops.my_ops": "torch.ops.{}", '"my_ops::': '"{}::', '("my_ops"': '("{}"'}
IMPORT = re.compile(r"^( *)from my_ops(?:\.([\w.]+))? import", re.MULTILINE)


def relative(text: str, depth: int) -> str:
    """The imports of a module ``depth`` folders below the package."""
    return IMPORT.sub(rf"\1from {'.' * (depth + 1)}\2 import", text)


def imported(text: str, depth: int, place: Path) -> set[Path]:
    """The modules of the package that a module at ``place`` imports relatively."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        folder = Path(*place.parts[: depth + 1 - node.level])
        base = folder.joinpath(*(node.module or "").split(".")) if node.module else folder
        found |= {base, *(base / alias.name for alias in node.names)}
    return found


def modules(package: Path) -> dict[Path, str]:
    """The modules of a variant by their place: those of hub/, and what they import."""
    texts: dict[Path, str] = {}
    wanted = {Path(path.stem) for path in OWN.glob("*.py")}
    while wanted:
        name = wanted.pop()
        for place in (name.with_suffix(".py") if name.name else name, name / "__init__.py"):
            source = OWN / place if (OWN / place).is_file() else package / place
            if place in texts or not source.is_file():
                continue
            depth = len(place.parts) - 1
            texts[place] = relative(source.read_text(), depth)
            wanted |= imported(texts[place], depth, place)
            wanted |= set(place.parents[:-1]) if depth else set()
    return texts


def library(content: bytes, name: str) -> bytes:
    """_C.so with another namespace: my_ops is in it once alone, and before :: in names of ops."""
    before, after = b"my_ops", name.encode()
    assert len(before) == len(after)
    assert content.count(b"\0" + before + b"\0") == 1, "the namespace is not in _C.so once"
    content = content.replace(b"\0" + before + b"\0", b"\0" + after + b"\0")
    return content.replace(b"\0" + before + b"::", b"\0" + after + b"::")


def write_variant(package: Path, folder: Path, backend: str) -> Path:
    """Writes the variant of a package, an installed one or a wheel's, into the repository."""
    record = json.loads((package / "_build.json").read_text())
    texts, content = modules(package), (package / "_C.so").read_bytes()
    parts = [backend.encode(), content, *(t.encode() for _, t in sorted(texts.items()))]
    # As long as the name that it replaces; the same for the same content.
    digest = base64.b32encode(hashlib.sha256(b"\0".join(parts)).digest()).decode().lower()
    name = f"m{digest[:5]}"
    system = "cpu"
    about: dict[str, object] = {"type": backend}
    if backend == "cuda":
        system = f"cu{OLDEST[record['nvcc'].split('.')[0]]}"
        about["archs"] = record["architectures"]
    machine = {62: "x86_64", 183: "aarch64"}[int.from_bytes(content[18:20], "little")]  # of ELF
    variant = folder / f"build/torch-stable-abi210-{system}-{machine}-linux"
    shutil.rmtree(variant, ignore_errors=True)
    for place, text in texts.items():
        for before, after in NAMES.items():
            text = text.replace(before, after.format(name))
        (variant / place).parent.mkdir(parents=True, exist_ok=True)
        (variant / place).write_text(text)
    (variant / "_C.so").write_bytes(library(content, name))
    shutil.copy(package / "_build.json", variant)
    hashes = {
        path.relative_to(variant).as_posix(): base64.b64encode(
            hashlib.sha256(path.read_bytes()).digest()
        ).decode()
        for path in sorted(variant.rglob("*"))
        if path.is_file()
    }
    metadata = {
        "name": NAME,
        "id": name,
        "version": VERSION,
        "license": "mit",
        "python-depends": [],
        "backend": about,
        "digest": {"algorithm": "sha256", "files": hashes},
    }
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    return variant


def main() -> None:
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    folder, *wheels = map(Path, sys.argv[1:])
    for wheel in wheels:
        with tempfile.TemporaryDirectory() as unpacked, zipfile.ZipFile(wheel) as file:
            file.extractall(unpacked)
            package = Path(unpacked, "my_ops")
            has_cuda = json.loads((package / "_build.json").read_text())["nvcc"] is not None
            plain = parse_wheel_filename(wheel.name)[1].local is None
            for backend in ["cuda"] * has_cuda + ["cpu"] * plain:
                print(write_variant(package, folder, backend))
    shutil.copy(OWN / "README.md", folder)


if __name__ == "__main__":
    main()
