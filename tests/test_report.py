"""``python -m my_ops``: right where all is well, and there where torch or the module is not."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import my_ops
import my_ops.__main__ as report

PACKAGE = Path(my_ops.__file__).parent
RECORD = {
    "version": "0.1.0",
    "commit": None,
    "torch_built_against": "2.13.0",
    "torch_minimum": "2.10",
    "nvcc": "13.0.88",
    "architectures": ["7.5", "8.0", "8.6", "9.0a", "10.0+PTX", "12.0+PTX"],
}


def run(cwd, *arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "my_ops", *arguments],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def found(text):
    return [finding["problem"] for finding in json.loads(text)["problems"]]


def copy_package(folder):
    shutil.copytree(PACKAGE, folder / "my_ops", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def test_report(tmp_path):
    done = run(tmp_path, "--json")
    data = json.loads(done.stdout)
    assert data["load_error"] is None
    assert data["my_ops"] == my_ops.__version__
    assert data["build"]["torch_minimum"] == "2.10"
    assert done.returncode == (1 if data["problems"] else 0)
    text = run(tmp_path).stdout
    assert f"my_ops    {my_ops.__version__} in {PACKAGE}" in text
    assert f"commit {data['build']['commit'] or 'unknown'}" in text


def test_without_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    path = os.pathsep.join([str(tmp_path), str(PACKAGE.parent)])
    done = run(tmp_path, "--json", PYTHONPATH=path)
    assert done.returncode == 1
    assert found(done.stdout) == ["torch cannot be imported: ImportError: no torch here"]
    hint = run(tmp_path, "install-hint", PYTHONPATH=path)
    assert hint.stdout.startswith("pip install ")


def test_damaged_module(tmp_path):
    (copy_package(tmp_path) / "my_ops/_C.so").write_bytes(b"no module")
    (problem,) = found(run(tmp_path, "--json", PYTHONPATH=str(tmp_path)).stdout)
    assert problem.startswith("import my_ops fails: ImportError: my_ops: _C.so does not load")


def test_source_folder(tmp_path):
    copy_package(tmp_path)
    (tmp_path / "my_ops/_C.so").unlink()
    (tmp_path / "my_ops/_build.json").unlink()
    (problem,) = found(run(tmp_path, "--json", PYTHONPATH=str(tmp_path)).stdout)
    assert problem.startswith("this is the source folder")


@pytest.mark.parametrize(
    ("capability", "covered"),
    [((7, 0), False), ((7, 5), True), ((8, 9), True), ((9, 0), True), ((10, 3), True)],
)
def test_covers(capability, covered):
    assert report.covers(RECORD["architectures"], capability) is covered


def test_covers_follows_the_letters():
    assert not report.covers(["9.0a"], (9, 1))
    assert not report.covers(["10.0a"], (10, 3))
    assert not report.covers(["9.0a"], (10, 0))
    assert report.covers(["9.0+PTX"], (12, 0))
    assert not report.covers(["9.0+PTX"], (8, 9))
    assert not report.covers(["8.9+PTX"], (8, 6))
    assert not report.covers([], (9, 0))


class FakeCuda:
    """Of libcuda.so.1: a driver of CUDA 12.9 and two GPUs."""

    CAPABILITIES = ((9, 0), (8, 6))
    init_error = 0

    def cuDriverGetVersion(self, version):
        version._obj.value = 12090

    def cuInit(self, flags):
        return self.init_error

    def cuDeviceGetCount(self, count):
        count._obj.value = len(self.CAPABILITIES)

    def cuDeviceGet(self, device, index):
        device._obj.value = 7 + index

    def cuDeviceGetName(self, name, size, device):
        assert size == len(name)
        name.value = b"GPU %d" % device.value

    def cuDeviceGetAttribute(self, value, attribute, device):
        value._obj.value = self.CAPABILITIES[device.value - 7][{75: 0, 76: 1}[attribute]]


def test_driver(monkeypatch):
    gpus = [{"name": "GPU 7", "capability": [9, 0]}, {"name": "GPU 8", "capability": [8, 6]}]
    monkeypatch.setattr(report.ctypes, "CDLL", lambda name: FakeCuda())
    assert report.driver() == {"cuda": "12.9", "gpus": gpus}
    monkeypatch.setattr(FakeCuda, "init_error", 100)  # no device
    assert report.driver() == {"cuda": "12.9", "gpus": []}


def machine(cuda, *capabilities):
    gpus = [{"name": "GPU", "capability": list(c)} for c in capabilities]
    for gpu in gpus:
        gpu["covered"] = report.covers(RECORD["architectures"], tuple(gpu["capability"]))
    return {"cuda": cuda, "gpus": gpus}


@pytest.mark.parametrize(
    ("here", "line"),
    [
        (None, "pip install my_ops"),
        (machine("11.8", (9, 0)), "pip install my_ops"),
        (machine("13.0", (9, 0)), "pip install my_ops"),
        (machine("12.4", (9, 0)), "pip install 'my_ops==0.1.0+cu126'"),
        (machine("12.8", (10, 0)), "pip install 'my_ops==0.1.0+cu129'"),
        (machine("12.8", (9, 0), (10, 0)), "pip install 'my_ops==0.1.0+cu129'"),
    ],
)
def test_install_hint(here, line):
    assert report.install_hint(here, "0.1.0") == line


@pytest.mark.parametrize(
    ("here", "build", "torch", "start"),
    [
        (machine("13.0", (9, 0)), {}, {}, None),
        (machine("12.4", (9, 0)), {}, {}, "the driver knows CUDA 12.4, and this build needs CUDA"),
        (machine("13.0", (7, 0)), {}, {}, "GPU has compute capability 7.0, and this build has"),
        (machine("13.0", (9, 0)), {"nvcc": None}, {}, "this build runs on the CPU only"),
        (machine("13.0", (9, 0)), {}, {"cuda": None}, "torch is a CPU build"),
        (machine("13.0", (9, 0)), {}, {"cuda": None, "error": "Error"}, "torch cannot be imported"),
        (None, {}, {"cuda": None}, None),
    ],
)
def test_problems(here, build, torch, start):
    problems = report.problems(
        {
            "build": {**RECORD, **build},
            "torch": {"version": "2.13.0", "cuda": "13.0", **torch},
            "driver": here,
            "load_error": None,
            "install_hint": "pip install my_ops",
        }
    )
    assert [p["problem"].startswith(start) for p in problems] == ([True] if start else [])
    assert all(p["fix"] for p in problems)


def test_report_of_a_machine_with_gpus(capsys):
    report.show(
        {
            "my_ops": "0.1.0",
            "path": "/here",
            "build": RECORD,
            "python": "3.11.7",
            "platform": "Linux",
            "torch": {"version": "2.13.0", "cuda": "13.0"},
            "driver": machine("13.0", (9, 0), (7, 0)),
            "problems": [{"problem": "an old GPU", "fix": "another"}],
        }
    )
    assert capsys.readouterr().out.splitlines() == [
        "my_ops    0.1.0 in /here",
        "build     nvcc 13.0.88, against torch 2.13.0 for torch >= 2.10, commit unknown",
        "code for  7.5, 8.0, 8.6, 9.0a, 10.0+PTX, 12.0+PTX",
        "python    3.11.7 on Linux",
        "torch     2.13.0, CUDA 13.0",
        "driver    CUDA 13.0",
        "GPU       GPU, compute capability 9.0: covered",
        "GPU       GPU, compute capability 7.0: not covered",
        "",
        "problem   an old GPU",
        "fix       another",
    ]
