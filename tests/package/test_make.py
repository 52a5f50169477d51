"""make: it builds again when anything changed that a wheel is made from, and says what it does."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(
    not (REPOSITORY / "Makefile").exists() or not shutil.which("make"),
    reason="needs the source tree and make",
)

INSIDE = ("csrc", "include", "kernels", "my_ops", "tools")
BESIDE = ("Makefile", "setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "NOTICE")
STAMPS = ("environment", "tools", "wheel", "installed", "runnable")
BUILT = shutil.ignore_patterns(
    "__pycache__", "*.so", "_build.json", "_recurrent.cuh", "_recurrent.hpp"
)


def kinds():
    """One file of each folder and suffix that goes into a wheel or decides about it."""
    found = {}
    for folder in ("csrc", "include", "kernels", "my_ops", "tools/build"):
        for path in sorted((REPOSITORY / folder).rglob("*")):
            name = path.relative_to(REPOSITORY).as_posix()
            if path.is_file() and not BUILT(folder, [*path.parts[-2:]]):
                depth = name.count("/") if "/recurrent/" in name else 0
                found.setdefault((folder, depth, path.suffix or path.name), name)
    overrides = "csrc/overrides/fast_fp32.cpp"
    return sorted({*found.values(), overrides, *BESIDE[1:], "tools/release/check_wheel.py"})


class Tree:
    """A copy of the source whose wheel, as far as make can tell, is built and installed."""

    def __init__(self, folder):
        self.folder = folder
        for name in INSIDE:
            shutil.copytree(REPOSITORY / name, folder / name, ignore=BUILT)
        for name in BESIDE:
            shutil.copy(REPOSITORY / name, folder)

    def make(self, *arguments, **environment):
        ours = re.compile("MY_OPS_|TORCH|CUDA_|CC$|CXX|CFLAGS|LDFLAGS|MAKE|MFLAGS")
        inherited = {name: value for name, value in os.environ.items() if not ours.match(name)}
        return subprocess.run(
            ["make", *arguments],
            cwd=self.folder,
            env={**inherited, "PYTHON": sys.executable, "PYTHONDONTWRITEBYTECODE": "1"}
            | environment,
            capture_output=True,
            text=True,
            check=False,
        )

    def build(self, *arguments, **environment):
        (self.folder / "build").mkdir(exist_ok=True)
        self.make("-q", "build/installed", *arguments, **environment)
        for stamp in STAMPS:
            (self.folder / "build" / stamp).touch()

    def outdated(self, *arguments, target="build/installed", **environment):
        done = self.make("-q", target, *arguments, **environment)
        assert done.returncode in (0, 1), done.stderr
        return done.returncode == 1


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    return Tree(tmp_path_factory.mktemp("make") / "copy")


@pytest.mark.parametrize("name", kinds())
def test_wheel_is_built_again_after_a_change(tree, name):
    """Of content, to another name, and back: README's `make test` tests the source as it is."""
    path = tree.folder / name
    content, other = path.read_bytes(), path.with_name(f"other_{path.name}")
    tree.build()
    assert not tree.outdated()
    path.write_bytes(content + b"\n")
    assert tree.outdated()
    path.write_bytes(content)
    if name not in BESIDE and name != "tools/release/check_wheel.py":
        tree.build()
        other.write_bytes(content)
        assert tree.outdated()
        tree.build()
        other.unlink()
        assert tree.outdated()
        assert tree.outdated(target="build/runnable")


def test_what_is_no_part_of_a_wheel_builds_nothing(tree):
    tree.build()
    (tree.folder / "my_ops/_C.so").touch()
    (tree.folder / "my_ops/__pycache__").mkdir()
    (tree.folder / "my_ops/__pycache__/nn.cpython-311.pyc").touch()
    for path in tree.folder.rglob("*.py"):
        path.touch()  # a checkout, of the same content
    assert not tree.outdated()


@pytest.mark.parametrize(
    "variable",
    [
        *("MY_OPS_WITH_CUDA=0", "MY_OPS_CUDA=13.2", "MY_OPS_HOME=https://example.org/o'clock"),
        *("TORCH_CUDA_ARCH_LIST=8.0;9.0a", "TORCH=torch==2.10.0", "CUDA_HOME=/opt/cuda"),
        *("CXX=clang++", "CFLAGS=-O1 -g", "LDFLAGS=-Wl,-z,lazy", "PYTHON=python3"),
    ],
)
def test_wheel_is_built_again_with_another_setting(tree, variable):
    """And again without it: `MY_OPS_WITH_CUDA=0 make docs` leaves no wheel for `make test`."""
    name, value = variable.split("=", 1)
    tree.build()
    assert tree.outdated(**{name: value})
    tree.build(**{name: value})
    assert tree.outdated()
    tree.build()
    assert tree.outdated(variable)  # on make's command line


@pytest.mark.parametrize("variable", ["TORCH=torch==2.10.0", "MY_OPS_CUDA=13.2", "PYTHON=python3"])
def test_environment_is_made_again_for_another_python_or_torch(tree, variable):
    tree.build()
    assert not tree.outdated("MY_OPS_WITH_CUDA=0", target="build/environment")
    assert tree.outdated(variable, target="build/environment")


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_wheel_is_built_again_for_another_commit(tmp_path):
    """The wheel names it."""
    tree = Tree(tmp_path / "copy")
    identity = ("-c", "user.name=tester", "-c", "user.email=tester@localhost")
    git = ("git", "-C", str(tree.folder), *identity)
    subprocess.run([*git, "init", "-q"], check=True)
    for word in ("one", "two"):
        subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", word], check=True)
        assert tree.outdated()
        tree.build()


def test_make_alone_lists_the_commands(tree):
    done = tree.make()
    assert done.stderr == ""
    named = re.findall(r"^make (\w+) +\w", done.stdout, re.MULTILINE)
    assert named[:2] == ["demo", "test"]
    makefile = (REPOSITORY / "Makefile").read_text()
    (phony,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert set(named) <= set(phony.split())
    assert not (tree.folder / "build/venv").exists()


def test_files_of_tests_that_make_names_are_there():
    """Those of the sanitizers, and those that count no lines."""
    text = (REPOSITORY / "Makefile").read_text().replace("\\\n", " ")
    (calls,) = re.findall(r"^OF_CALLS := (.*)$", text, re.MULTILINE)
    (threads,) = re.findall(r"addsuffix \.py,([\w ]+)\)", text)
    (others,) = re.findall(r"^ABOUT_THE_MODULE := (.*)$", text, re.MULTILINE)
    names = [f"*/test_{name}.py" for name in (*calls.split(), *threads.split())] + others.split()
    assert len(names) > 20
    assert [name for name in names if not list((REPOSITORY / "tests").glob(name))] == []


PIP = """
echo 'Collecting torch==2.13.0'
echo '  Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl.metadata (29 kB)'
echo 'Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (900.1 MB)'
echo '     ---------------- 900.1/900.1 MB 80.2 MB/s eta 0:00:00'
echo 'Downloading https://example.org/nvidia_cublas-13.1.0.3-py3-none-linux_x86_64.whl (1.2 GB)'
echo 'Downloading sympy-1.14.0-py3-none-any.whl (6.3 MB)'
echo 'Installing collected packages: torch'
exit {status}
"""


@pytest.mark.parametrize("status", [0, 1])
def test_only_large_downloads_are_named(tmp_path, status):
    """pip's eighty lines would bury what make says; all of them are shown if it fails."""
    progress = REPOSITORY / "tools/build/progress.py"
    done = subprocess.run(
        [sys.executable, progress, tmp_path / "log", "sh", "-c", PIP.format(status=status)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status
    assert re.fullmatch(r"torch: 900\.1 MB, \d+ s\nnvidia_cublas: 1\.2 GB, \d+ s\n", done.stdout)
    assert ("Installing collected packages" in done.stderr) == bool(status)
