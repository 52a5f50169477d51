"""The source: its commit, and for make, what a build is made from: source.py FOLDER [NAME=VALUE]

Writes FOLDER/wheel.inputs: the hash of every file that determines the wheel or its checks, the
commit, the Python and torch that build, and the variables that steer it; and
FOLDER/environment.inputs: that Python and torch. A file that would not change is left alone, so its
time is that of the last change: also of a file's deletion and of a variable, which no file's time
tells.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("csrc", "include", "kernels", "my_ops", "tools/build")
FILES = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "NOTICE")
CHECKS = tuple(
    f"tools/release/{name}.py" for name in ("check_wheel", "wheel_text", "check_release")
)
CHECKS += ("tools/requirements/audit.txt",)
BUILT = (".pyc", ".so", "_build.json", "_recurrent.cuh", "_recurrent.hpp")


def commit(root: Path = ROOT) -> str | None:
    """The git commit of the source, with a + if files differ from it; None outside git."""
    # --git-dir: only this folder's, not that of a repository in which an sdist was unpacked.
    git = ["git", "-c", "safe.directory=*", "-C", str(root), "--git-dir=.git", "--work-tree=."]
    try:
        text = subprocess.run(
            [*git, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return text.strip()


def files(root: Path) -> Iterator[Path]:
    for folder in FOLDERS:
        yield from (p for p in (root / folder).rglob("*") if p.is_file())
    yield from (root / name for name in (*FILES, *CHECKS) if (root / name).exists())


def hashes(root: Path) -> list[str]:
    return sorted(
        f"{path.relative_to(root).as_posix()} {hashlib.sha256(path.read_bytes()).hexdigest()}"
        for path in files(root)
        if not path.name.endswith(BUILT)
    )


def write(path: Path, lines: list[str]) -> None:
    text = "\n".join([*lines, ""])
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def main(folder: str, *variables: str) -> None:
    import preflight

    values = dict(variable.split("=", 1) for variable in variables)
    os.environ.update(values)  # make hands over those of its command line here alone
    torch = values.pop("TORCH", "") or preflight.torch_to_build_with()
    environment = [f"Python {values.pop('PYTHON', '')}", f"torch {torch}"]
    settings = [f"{name}={value}" for name, value in sorted(values.items()) if value]
    write(Path(folder, "environment.inputs"), environment)
    wheel = [f"commit {commit()}", *environment, *settings, *hashes(ROOT)]
    write(Path(folder, "wheel.inputs"), wheel)


if __name__ == "__main__":
    main(*sys.argv[1:])
