"""The source build: what it needs, and the paragraph it prints when that is missing."""

import ast
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

REPOSITORY = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(
    not (REPOSITORY / "setup.py").exists(), reason="needs the source tree"
)
sys.path.insert(0, str(REPOSITORY / "tools/build"))

import preflight  # noqa: E402

GPU_CODE = "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120"


def script(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def toolkit(folder, version, *, compiles=True, code=GPU_CODE):
    """A folder that looks like a CUDA toolkit, with an nvcc that answers as told."""
    (folder / "include").mkdir(parents=True)
    (folder / "include/cuda_runtime_api.h").touch()
    last = "exit 0" if compiles else 'echo "host_config.h: error: unsupported GNU version!"; exit 1'
    answers = f'case "$1" in --version) echo "V{version}";; --list-gpu-code) echo {code};;'
    script(folder / "bin/nvcc", f"{answers} *) {last};; esac")
    return folder


def build(tmp_path, torch="__version__ = '2.13.0'", **environment):
    """Runs setup.py with a stand-in for torch, and returns what it prints when it stops."""
    stand_in = tmp_path / "torch"
    stand_in.mkdir()
    (stand_in / "torch.py").write_text(torch)
    path = os.pathsep.join([str(stand_in), environment.pop("PYTHONPATH", "")])
    ours = re.compile("MY_OPS_|CUDA_|TORCH_CUDA_|MAX_JOBS|CC$|CXX$")
    inherited = {name: value for name, value in os.environ.items() if not ours.match(name)}
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--build-lib", str(tmp_path / "lib")],
        cwd=REPOSITORY,
        env={**inherited, "PYTHONPATH": path, "MAX_JOBS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("my_ops: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


def machine(folder, *, system="Linux", venv=True):
    """Settings that make Python believe it is on another machine."""
    lines = [f"import platform, sys; platform.system = lambda: {system!r}"]
    lines += ["sys.modules['ensurepip'] = None"] * (not venv)
    (folder / "machine").mkdir()
    (folder / "machine/sitecustomize.py").write_text("\n".join(lines))
    return {"PYTHONPATH": str(folder / "machine")}


@pytest.mark.parametrize(("system", "name"), [("Darwin", "macOS"), ("Windows", "Windows")])
def test_another_system(tmp_path, monkeypatch, system, name):
    message = build(tmp_path, **machine(tmp_path, system=system))
    assert f"this machine runs {name}, and my_ops builds and runs on Linux only" in message
    backend = pytest.importorskip("backend")
    monkeypatch.setattr(preflight.platform, "system", lambda: system)
    with pytest.raises(SystemExit, match=f"my_ops: this machine runs {name}"):
        backend.get_requires_for_build_wheel()


def test_missing_torch(tmp_path):
    message = build(tmp_path, torch="raise ImportError(\"No module named 'torch'\")")
    assert "the build needs torch" in message
    assert "No module named 'torch'" in message
    assert "without --no-build-isolation" in message


def test_old_torch(tmp_path):
    message = build(tmp_path, torch="__version__ = '2.9.1+cu128'")
    assert "torch >= 2.10, found 2.9.1+cu128" in message
    assert "pip install 'torch>=2.10'" in message


def test_old_setuptools(tmp_path, monkeypatch):
    (tmp_path / "old/setuptools").mkdir(parents=True)
    stand_in = "__version__ = '65.5.0'\n\ndef setup(): pass\n"
    (tmp_path / "old/setuptools/__init__.py").write_text(stand_in)
    message = build(tmp_path, PYTHONPATH=str(tmp_path / "old"))
    assert "the build needs setuptools >= 77, found 65.5.0" in message
    assert "pip install 'setuptools>=77'" in message
    requires = f'requires = ["setuptools>={preflight.OLDEST_SETUPTOOLS}"]'
    assert requires in (REPOSITORY / "pyproject.toml").read_text()


def test_a_compiler_behind_a_launcher(tmp_path, monkeypatch):
    """As in CXX="ccache g++". nvcc needs the compiler itself."""
    launcher = script(tmp_path / "launcher", 'exec "$@"')
    compiler = shutil.which("g++")
    monkeypatch.setenv("CXX", f"'{launcher}' g++")
    assert preflight.cxx_compiler() == compiler
    monkeypatch.setenv("CXX", "g++ -O1")
    assert preflight.cxx_compiler() == compiler
    monkeypatch.setenv("CXX", f"'{launcher}' absent-c++")
    with pytest.raises(preflight.Unfit, match=r"launcher absent-c\+\+ does not compile"):
        preflight.cxx_compiler()


def test_no_compiler(tmp_path):
    message = build(tmp_path, CXX="absent-c++")
    assert "no C++ compiler: 'absent-c++' is not on PATH" in message
    assert "apt install g++" in message


def test_old_compiler(tmp_path):
    old = script(tmp_path / "c++", "echo 'error: unrecognized option -std=c++20' >&2; exit 1")
    message = build(tmp_path, CXX=str(old))
    assert "does not compile C++20: error: unrecognized option" in message


@pytest.mark.parametrize(
    "option", ["-march=native", "-march=nocona", "-march=haswell", "-march=znver3", "-mavx512f"]
)
def test_processors_in_cflags(tmp_path, option):
    """The kernels' levels compile for any. Even without optimisation a compiler refuses what it
    cannot inline."""
    compiler = preflight.cxx_compiler()
    options = [compiler, option, "-std=c++20", f"-I{REPOSITORY}/include", f"-I{REPOSITORY}/kernels"]
    (tmp_path / "empty.cpp").touch()
    if preflight.run(*options, "-fsyntax-only", tmp_path / "empty.cpp").returncode != 0:
        pytest.skip(f"{compiler} does not know {option}")
    for source in REPOSITORY.glob("kernels/**/*_cpu.cpp"):
        done = preflight.run(*options, "-c", source, "-o", tmp_path / "kernel.o")
        assert done.returncode == 0, done.stderr


def test_no_toolkit(tmp_path):
    message = build(tmp_path, CUDA_HOME=str(tmp_path))
    assert f"no CUDA toolkit (bin/nvcc with include/cuda_runtime_api.h) in {tmp_path}" in message
    for way in ("cuda-toolkit[nvcc,cudart,cccl]", "set CUDA_HOME", "MY_OPS_WITH_CUDA=0"):
        assert way in message


def test_broken_nvcc(tmp_path):
    home = toolkit(tmp_path / "cuda", "13.0.1")
    script(home / "bin/nvcc", "echo 'error while loading shared libraries' >&2; exit 127")
    assert "does not run: error while loading" in build(tmp_path, CUDA_HOME=str(home))


def test_old_nvcc(tmp_path):
    home = toolkit(tmp_path / "cuda", "11.8.89")
    assert "nvcc 11.8.89" in (message := build(tmp_path, CUDA_HOME=str(home)))
    assert "CUDA 12.6 or newer is needed" in message


def test_nvcc_unfit_for_the_compiler(tmp_path):
    home = toolkit(tmp_path / "cuda", "13.0.88", compiles=False)
    message = build(tmp_path, CUDA_HOME=str(home))
    assert "do not work together: host_config.h: error: unsupported GNU version!" in message
    assert "Set CC and CXX" in message


def test_unknown_architecture(tmp_path):
    home = toolkit(tmp_path / "cuda", "12.6.20", code="sm_75 sm_80 sm_90")
    message = build(tmp_path, CUDA_HOME=str(home), TORCH_CUDA_ARCH_LIST="9.0a;10.0a+PTX")
    assert "nvcc 12.6.20 does not support architecture 10.0a+PTX." in message


def test_another_release_than_asked(tmp_path):
    home = toolkit(tmp_path / "cuda", "13.0.88")
    message = build(tmp_path, CUDA_HOME=str(home), MY_OPS_CUDA="12.9")
    assert "MY_OPS_CUDA=12.9 asks for another nvcc than the one found: 13.0.88." in message


def test_unknown_choice(tmp_path):
    message = build(tmp_path, MY_OPS_WITH_CUDA="yes")
    assert message == "my_ops: MY_OPS_WITH_CUDA must be 1, auto or 0, got 'yes'.\n"


def test_auto_falls_back_and_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert preflight.cuda_toolkit("auto", None, "c++") is None
    assert "building for the CPU only: no CUDA toolkit" in capsys.readouterr().err


def test_auto_with_a_release_means_that_release(tmp_path):
    """The wheel is named after the release."""
    home = toolkit(tmp_path / "cuda", "13.0.88")
    message = build(tmp_path, CUDA_HOME=str(home), MY_OPS_CUDA="12.9", MY_OPS_WITH_CUDA="auto")
    assert "MY_OPS_CUDA=12.9 asks for another nvcc than the one found: 13.0.88." in message


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", ["7.5", "8.0", "9.0a", "10.0+PTX", "12.0"]),
        ("Hopper", ["9.0+PTX"]),
        ("7.5;Ampere", ["7.5", "8.0", "8.6+PTX"]),
        ("Ada 9.0a", ["8.9+PTX", "9.0a"]),
        ("Ampere+Tegra;10.0f", ["8.7", "10.0f"]),
    ],
)
def test_names_of_architectures_are_torch_s(tmp_path, monkeypatch, text, wanted):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", text)
    home = toolkit(tmp_path / "cuda", "13.0.88")
    archs = preflight.architectures(preflight.Toolkit(home, "13.0.88"))
    assert archs == wanted


@pytest.mark.parametrize("text", ["Hoppper", "9", "sm_90", "9.0a+ptx"])
def test_unknown_name_of_an_architecture(tmp_path, text):
    home = toolkit(tmp_path / "cuda", "13.0.88")
    message = build(tmp_path, CUDA_HOME=str(home), TORCH_CUDA_ARCH_LIST=f"8.0;{text}")
    assert f"TORCH_CUDA_ARCH_LIST names '{text}', which is not an architecture" in message
    assert "Hopper" in message


@pytest.mark.parametrize(
    ("version", "wanted"),
    [
        ("12.6.20", ["7.5", "8.0", "9.0a", "9.0+PTX"]),
        ("12.9.41", ["7.5", "8.0", "9.0a", "10.0+PTX", "12.0"]),
        ("13.2.1", ["7.5", "8.0", "9.0a", "10.0+PTX", "12.0"]),
    ],
)
def test_architectures_of_a_release(tmp_path, monkeypatch, version, wanted):
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(toolkit(tmp_path / "cuda", version)))
    found, archs = preflight.cuda_toolkit("auto", version.rpartition(".")[0], "c++")
    assert found.version == version
    assert archs == wanted


@pytest.mark.parametrize(
    ("archs", "wanted", "wanted_sm90"),
    [
        (["7.5"], ["75 sm_75"], ["75 sm_75"]),
        (["9.0a"], ["90a sm_90a"], ["90a sm_90a"]),
        (["8.0", "9.0a"], ["80 sm_80", "80 sm_90"], ["90a sm_90a"]),
        (
            ["8.0", "8.0+PTX", "9.0"],
            ["80 sm_80", "80 compute_80", "80 sm_90"],
            ["90 sm_90"],
        ),
        (["8.9", "8.6"], ["86 sm_89", "86 sm_86"], ["89 sm_89", "86 sm_86"]),
        (
            ["9.0a", "9.0+PTX"],
            ["90 sm_90", "90 compute_90"],
            ["90a sm_90a", "90 sm_90", "90 compute_90"],
        ),
        (
            ["12.0", "10.0a+PTX"],
            ["120 sm_120", "100a sm_100a", "100a compute_100a"],
            ["120 sm_120", "100a sm_100a", "100a compute_100a"],
        ),
        (
            ["7.5", "8.0", "9.0a", "10.0+PTX", "12.0"],
            ["75 sm_75", "80 sm_80", "80 sm_90", "80 sm_100", "80 compute_80", "80 sm_120"],
            ["90a sm_90a", "100 sm_100", "100 compute_100", "100 sm_120"],
        ),
    ],
)
def test_machine_code_is_assembled_from_ptx_of_the_build(archs, wanted, wanted_sm90):
    for sm90, pairs in ((False, wanted), (True, wanted_sm90)):
        assert preflight.gencode(archs, sm90) == [
            f"-gencode=arch=compute_{ptx},code={code}" for ptx, code in map(str.split, pairs)
        ]


def test_kernels_that_differ_on_hopper_are_in_files_of_their_own():
    """Code for 9.0 and newer is compiled as such in files named _sm90 only."""
    include = re.compile(r'#include "(.+)"')

    def includes(path):
        found = {path}
        for name in include.findall(path.read_text()):
            for folder in (REPOSITORY / "kernels", REPOSITORY / "include"):
                if (folder / name).exists():
                    found |= includes(folder / name)
        return found

    differs = re.compile(r"__CUDA_ARCH__ [<>=]+ (9|1\d)\d0|__CUDA_ARCH_FEAT|__CUDA_ARCH_SPECIFIC")
    for path in REPOSITORY.glob("kernels/**/*.cu"):
        if path.name == "own.cu":  # no device code: it launches what NVRTC compiles
            continue
        found = any(differs.search(file.read_text()) for file in includes(path))
        assert found == path.stem.endswith("_sm90"), path


@pytest.mark.parametrize(("jobs", "wanted"), [("1", 1), ("7", 1), ("8", 2), ("all", 2)])
def test_architectures_at_once(monkeypatch, jobs, wanted):
    monkeypatch.setenv("MAX_JOBS", jobs)
    assert preflight.architectures_at_once() == wanted


def test_jobs_follow_memory(monkeypatch):
    monkeypatch.delenv("MAX_JOBS", raising=False)
    monkeypatch.setattr(preflight, "free_memory", lambda: 2 * preflight.GIB + 1)
    monkeypatch.setattr(preflight.os, "sched_getaffinity", lambda _: set(range(64)))
    preflight.set_jobs()
    assert os.environ["MAX_JOBS"] == "2"
    preflight.set_jobs()
    assert os.environ["MAX_JOBS"] == "2"


def test_too_little_memory(monkeypatch):
    monkeypatch.setattr(preflight, "free_memory", lambda: preflight.GIB // 2)
    monkeypatch.setenv("MAX_JOBS", "1")
    preflight.set_jobs()  # MAX_JOBS was set
    monkeypatch.delenv("MAX_JOBS")
    with pytest.raises(preflight.Unfit, match=r"0\.5 GiB of free memory is too little"):
        preflight.set_jobs()


def test_ninja_beside_this_python_is_found(tmp_path, monkeypatch):
    """As with `venv/bin/python -m pip`, when venv/bin is not on PATH."""
    ninja = script(tmp_path / "scripts/ninja", "echo 1.13")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(preflight.sysconfig, "get_path", lambda _: str(ninja.parent))
    preflight.find_ninja()
    assert shutil.which("ninja") == str(ninja)


def test_native_means_the_gpus_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "native")
    found = [(12, 0), (9, 0), (9, 0), (8, 6)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(found))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(found))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: found[index])
    toolkit = preflight.Toolkit(tmp_path, "13.0.88")
    assert preflight.architectures(toolkit) == ["8.6", "9.0a", "12.0"]
    found.clear()
    with pytest.raises(preflight.Unfit, match="native means the GPUs of this machine"):
        preflight.architectures(toolkit)


# What pip installs for a build from source, by MY_OPS_CUDA and Python. torch's wheels on PyPI pin
# the toolkit's release: 2.13's wheels pin 13.0, and 2.15's pin 13.2. 2.15 has no wheel for Python
# 3.10.
@pytest.mark.parametrize(
    ("asked", "python", "wanted"),
    [
        ("", 10, {"torch": "==2.13.0", "cuda-toolkit": "==13.0.*"}),
        ("", 15, {"torch": "==2.15.0", "cuda-toolkit": "==13.2.*"}),
        ("12.9", 11, {"torch": "==2.13.0"}),
        ("13.0", 11, {"torch": "==2.13.0", "cuda-toolkit": "==13.0.*"}),
        ("13.2", 11, {"torch": "==2.15.0", "cuda-toolkit": "==13.2.*"}),
    ],
)
def test_requirements_of_a_build(tmp_path, monkeypatch, asked, python, wanted):
    backend = pytest.importorskip("backend")
    requirements = pytest.importorskip("packaging.requirements")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("MY_OPS_CUDA", asked)
    monkeypatch.delenv("MY_OPS_WITH_CUDA", raising=False)
    monkeypatch.setattr(preflight.sys, "version_info", (3, python))
    needs = map(requirements.Requirement, backend.get_requires_for_build_wheel())
    found = {r.name: str(r.specifier) for r in needs}
    assert {name: found[name] for name in found if name in ("torch", "cuda-toolkit")} == wanted


@pytest.mark.parametrize(
    ("cuda", "wanted"),
    [("13.2", "==13.2.*"), ("13.0", "==13.0.*"), ("12.8", "==13"), (None, "==13")],
)
def test_make_keeps_the_cuda_runtime_of_the_installed_torch(tmp_path, monkeypatch, cuda, wanted):
    """It takes that release of the compiler; otherwise pip would replace torch's runtime."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    for name in ("MY_OPS_CUDA", "MY_OPS_WITH_CUDA"):
        monkeypatch.delenv(name, raising=False)
    assert wanted in preflight.toolkit_to_install(preflight.cuda_of_torch())


@pytest.fixture
def copy(tmp_path):
    """setup.py and the files it imports, in a separate folder."""
    folder = tmp_path / "outer" / "copy"
    for name in ("setup.py", "tools/build", "pyproject.toml", "README.md", "LICENSE"):
        source, target = REPOSITORY / name, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
    return folder


def git(folder, *arguments):
    identity = ("-c", "user.name=tester", "-c", "user.email=tester@localhost")
    done = subprocess.run(
        ["git", "-C", folder, *identity, *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def recorded_commit(folder, **environment):
    script = "import sys; sys.argv[1:] = ['clean', '-q']; import setup; print(setup.record(None))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=folder,
        # No bytecode: git would add it, and every checkout would change it.
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return ast.literal_eval(done.stdout.splitlines()[-1])["commit"]


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_commit_is_that_of_this_source(copy):
    """None in an unpacked sdist, even inside another repository or if a git hook runs the build."""
    outer = copy.parent
    git(outer, "init", "-q")
    git(outer, "add", ".")
    git(outer, "commit", "-qm", "another project")
    assert recorded_commit(copy) is None
    assert recorded_commit(copy, GIT_DIR=str(outer / ".git")) is None
    git(copy, "init", "-q")
    git(copy, "add", ".")
    git(copy, "commit", "-qm", "this project")
    head = git(copy, "rev-parse", "HEAD")
    assert recorded_commit(copy) == head
    assert recorded_commit(copy, GIT_DIR=str(outer / ".git")) == head
    (copy / "README.md").write_text("changed")
    assert recorded_commit(copy) == f"{head}+"
    git(copy, "worktree", "add", "-q", copy.parent.parent / "worktree")
    assert recorded_commit(copy.parent.parent / "worktree") == head


# -------------------------------------------------------------------------------------- make


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
@pytest.mark.parametrize("target", ["demo", "test"])
def test_make_names_all_that_is_missing_before_it_downloads(tmp_path, target):
    def ignored(path, names):
        """Results and environments, such as .nox, which may hold tmp_path itself."""
        results = {"build", "dist", "wheelhouse", *(name for name in names if name[0] == ".")}
        return results if Path(path) == REPOSITORY else ()

    folder = shutil.copytree(REPOSITORY, tmp_path / "copy", ignore=ignored)

    def make(**environment):
        done = subprocess.run(
            ["make", target],
            cwd=folder,
            env={**os.environ, "PYTHON": sys.executable, **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2
        assert not (folder / "build/venv").exists()
        return [line for line in done.stderr.splitlines() if not line.startswith("make")]

    lacking = make(CXX="absent-c++", **machine(tmp_path, venv=False))
    assert len(lacking) == 3
    assert "cannot make an environment" in lacking[0]
    assert "no C++ compiler: 'absent-c++' is not on PATH" in lacking[1]
    assert lacking[2].endswith(": apt install git make g++ python3-venv")
    assert make(PYTHON="absent-python")[0].startswith("my_ops: there is no absent-python")


def test_make_names_an_old_python_and_a_full_disk(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(preflight.sys, "version_info", (3, 9, 2))
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 8, 1))
    old, full = preflight.missing()
    assert "is too old: 3.10 or newer is needed" in old
    assert "0.0 GiB of free disk space is too little" in full


def test_reasons_to_skip_are_counted(tmp_path, run_pytest):
    """The suite's conftest.py counts them, in the one line that people read."""
    (tmp_path / "test_one.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('i', range(3))\n"
        "def test_cuda(cuda, i): pass\n"
        "def test_other(): pytest.skip('needs luck')\n"
    )
    here = {"PYTHONPATH": str(REPOSITORY / "tests"), "CUDA_VISIBLE_DEVICES": ""}
    printed = run_pytest("-p", "conftest", tmp_path, **here)
    assert "\nskipped 3: needs a CUDA device\nskipped 1: needs luck\n" in printed


PROGRESS = [sys.executable, REPOSITORY / "tools/build/progress.py"]
COMPILES = """
echo '[1/2] c++ -O3 -c -c /somewhere/csrc/one.cpp -o /elsewhere/csrc/one.o'
echo 'two.cu(7): warning'
echo 'ptxas info : (C7515) Potential Performance Loss: wgmma.mma_async is serialized'
echo '{last}'
exit {status}
"""


def test_progress_of_a_build(tmp_path):
    """It names each file, and kernels that ptxas serialises; the rest goes to the log."""
    last = "[2/2] nvcc -c /somewhere/kernels/two.cu -o /elsewhere/kernels/two.o --threads=2"
    build = script(tmp_path / "build", COMPILES.format(last=last, status=0))
    printed = subprocess.check_output([*PROGRESS, tmp_path / "log", build], text=True)
    assert re.sub(r"\d+ s$", "0 s", printed, flags=re.MULTILINE).splitlines() == [
        "[1/2] csrc/one.cpp, 0 s",
        "ptxas info : (C7515) Potential Performance Loss: wgmma.mma_async is serialized",
        "[2/2] kernels/two.cu, 0 s",
    ]
    assert "two.cu(7): warning" in (tmp_path / "log").read_text()


def test_progress_of_a_build_that_fails(tmp_path):
    build = script(tmp_path / "build", COMPILES.format(last="FAILED: two.o", status=3))
    done = subprocess.run(
        [*PROGRESS, tmp_path / "log", build], capture_output=True, text=True, check=False
    )
    assert done.returncode == 3
    assert done.stderr == f"FAILED: two.o\nThe whole output is in {tmp_path}/log\n"


def test_free_memory_is_that_of_this_machine():
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < preflight.free_memory() <= total


# ------------------------------------------------------------------------------- troubleshooting


def message(node):
    """A message, with ... for its variable parts."""
    if isinstance(node, ast.BinOp):
        return message(node.left) + message(node.right)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(message, node.values))
    return node.value if isinstance(node, ast.Constant) else "..."


def raised():
    """Every message of installation, import, the report, and a launch that cannot run."""
    for name in ("tools/build/preflight.py", "my_ops/_library.py", "my_ops/_install_hint.py"):
        prefix = "my_ops: " if name.startswith("tools") else ""
        for node in ast.walk(ast.parse((REPOSITORY / name).read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                yield prefix + message(node.exc.args[0])
    for node in ast.walk(ast.parse((REPOSITORY / "my_ops/__main__.py").read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "add":
            yield message(node.args[0])
    for node in ast.walk(ast.parse((REPOSITORY / "my_ops/_private.py").read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "warn":
            yield message(node.args[0])
    binding = (REPOSITORY / "csrc/binding_cuda.h").read_text()
    yield from re.findall(r'op, ": (th[^"]*)"', binding)


def test_every_message_is_in_troubleshooting():
    """In a box, or in the first column of a table."""
    page = (REPOSITORY / "docs/troubleshooting.md").read_text()
    keys = [
        key.removesuffix("...") for key in re.findall(r"^(?:> |\| )`([^`]+)`", page, re.MULTILINE)
    ]
    messages = [text for text in raised() if " " in text]  # the others are not our words
    assert len(messages) >= 20
    assert [text for text in messages if not any(key in text for key in keys)] == []
    assert [key for key in keys if not any(key in text for text in messages)] == []
    assert [key for key in keys if len(key) < 20] == []  # no key fits by chance


def test_headings_of_troubleshooting_are_not_messages():
    headings = re.findall(
        r"^#+ (.*)", (REPOSITORY / "docs/troubleshooting.md").read_text(), re.MULTILINE
    )
    assert [text for text in headings if text.startswith("`") or text.endswith((":", "."))] == []
