"""The source build: what it needs, and the one paragraph it says when that is missing."""

import ast
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
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
    """A folder that looks like a CUDA toolkit, and whose nvcc answers as told."""
    (folder / "include").mkdir(parents=True)
    (folder / "include/cuda_runtime_api.h").touch()
    last = "exit 0" if compiles else 'echo "host_config.h: error: unsupported GNU version!"; exit 1'
    answers = f'case "$1" in --version) echo "V{version}";; --list-gpu-code) echo {code};;'
    script(folder / "bin/nvcc", f"{answers} *) {last};; esac")
    return folder


def build(tmp_path, torch="__version__ = '2.13.0'", **environment):
    """Runs setup.py beside a stand-in for torch; returns what it says when it stops."""
    stand_in = tmp_path / "torch"
    stand_in.mkdir()
    (stand_in / "torch.py").write_text(torch)
    ours = re.compile("MY_OPS_|CUDA_|TORCH_CUDA_|MAX_JOBS|CC$|CXX$")
    inherited = {name: value for name, value in os.environ.items() if not ours.match(name)}
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--build-lib", str(tmp_path / "lib")],
        cwd=REPOSITORY,
        env={**inherited, "PYTHONPATH": str(stand_in), "MAX_JOBS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("my_ops: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_missing_torch(tmp_path):
    message = build(tmp_path, torch="raise ImportError(\"No module named 'torch'\")")
    assert "the build needs torch" in message
    assert "No module named 'torch'" in message
    assert "without --no-build-isolation" in message


def test_old_torch(tmp_path):
    message = build(tmp_path, torch="__version__ = '2.9.1+cu128'")
    assert "torch >= 2.10, found 2.9.1+cu128" in message
    assert "pip install 'torch>=2.10'" in message


def test_no_compiler(tmp_path):
    message = build(tmp_path, CXX="absent-c++")
    assert "no C++ compiler: 'absent-c++' is not on PATH" in message
    assert "apt install g++" in message


def test_old_compiler(tmp_path):
    old = script(tmp_path / "c++", "echo 'error: unrecognized option -std=c++20' >&2; exit 1")
    message = build(tmp_path, CXX=str(old))
    assert "does not compile C++20: error: unrecognized option" in message


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
    assert "nvcc 12.6.20 does not know architecture 10.0a+PTX." in message


def test_another_release_than_asked(tmp_path):
    home = toolkit(tmp_path / "cuda", "13.0.88")
    message = build(tmp_path, CUDA_HOME=str(home), MY_OPS_CUDA="12.9")
    assert "MY_OPS_CUDA=12.9 asks for another nvcc than the one found: 13.0.88." in message


def test_unknown_choice(tmp_path):
    message = build(tmp_path, MY_OPS_WITH_CUDA="yes")
    assert message == "my_ops: MY_OPS_WITH_CUDA is 1, auto or 0, not 'yes'.\n"


def test_auto_falls_back_and_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert preflight.cuda_toolkit("auto", None, "c++") is None
    assert "building for the CPU only: no CUDA toolkit" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("version", "wanted"),
    [
        ("12.6.20", ["7.5", "8.0", "8.6", "9.0a", "9.0+PTX"]),
        ("12.9.41", ["7.5", "8.0", "8.6", "9.0a", "10.0+PTX", "12.0+PTX"]),
        ("13.2.1", ["7.5", "8.0", "8.6", "9.0a", "10.0+PTX", "12.0+PTX"]),
    ],
)
def test_architectures_of_a_release(tmp_path, monkeypatch, version, wanted):
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(toolkit(tmp_path / "cuda", version)))
    found, archs = preflight.cuda_toolkit("auto", version.rpartition(".")[0], "c++")
    assert found.version == version
    assert archs == wanted


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
    preflight.set_jobs()  # asked for
    monkeypatch.delenv("MAX_JOBS")
    with pytest.raises(preflight.Unfit, match=r"0\.5 GiB of free memory is too little"):
        preflight.set_jobs()


def test_free_memory_is_that_of_this_machine():
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < preflight.free_memory() <= total


# ------------------------------------------------------------------------------- troubleshooting


def message(node):
    """A message with ... for what varies."""
    if isinstance(node, ast.BinOp):
        return message(node.left) + message(node.right)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(message, node.values))
    return node.value if isinstance(node, ast.Constant) else "..."


def raised():
    """Every message of installation, import, the report and a launch that cannot run."""
    for name, prefix in (("tools/build/preflight.py", "my_ops: "), ("my_ops/_library.py", "")):
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
    page = (REPOSITORY / "docs/troubleshooting.md").read_text()
    keys = re.findall(r"^(?:### |\| )`(.*?)`(?=$| )", page, re.MULTILINE)
    messages = list(raised())
    assert len(messages) >= 20
    assert [text for text in messages if not any(key in text for key in keys)] == []
    assert [key for key in keys if not any(key in text for text in messages)] == []
