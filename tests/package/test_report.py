"""``python -m my_ops``: right if all is well, and available if torch or the module is broken."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import my_ops
import my_ops.__main__ as report
from my_ops import _install_hint

PACKAGE = Path(my_ops.__file__).parent
RECORD = {
    "version": "0.1.0",
    "commit": None,
    "torch_built_against": "2.13.0",
    "torch_minimum": "2.10",
    "nvcc": "13.0.88",
    "architectures": ["7.5", "8.0", "9.0a", "10.0+PTX", "12.0"],
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
    assert "pip install " in hint.stdout + hint.stderr


def test_damaged_module(tmp_path):
    (copy_package(tmp_path) / "my_ops/_C.so").write_bytes(b"no module")
    (problem,) = found(run(tmp_path, "--json", PYTHONPATH=str(tmp_path)).stdout)
    assert problem.startswith("import my_ops fails: ImportError: my_ops: _C.so does not load: /")
    assert "_C.so: file too short" in problem  # the linker's own words


def test_source_folder(tmp_path):
    (copy_package(tmp_path) / "kernels").mkdir()
    (tmp_path / "my_ops/_C.so").unlink()
    (tmp_path / "my_ops/_build.json").unlink()
    done = run(tmp_path, "--json", PYTHONPATH=str(tmp_path))
    (problem,) = json.loads(done.stdout)["problems"]
    assert problem["problem"].startswith("this is the source folder")
    assert problem["fix"].startswith("run Python in another folder; if my_ops is not installed")


def test_a_package_without_its_module(tmp_path):
    copy_package(tmp_path)
    (tmp_path / "my_ops/_C.so").unlink()
    program = "import sys; sys.frozen = {}; import my_ops"
    for frozen, why in ((False, "the package is not whole"), (True, "the frozen program left it")):
        done = subprocess.run(
            [sys.executable, "-c", program.format(frozen)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert f"my_ops: _C.so is missing beside {tmp_path}" in done.stderr
        assert why in done.stderr
    (tmp_path / "my_ops/_build.json").unlink()
    (problem,) = found(run(tmp_path, "--json", PYTHONPATH=str(tmp_path)).stdout)
    assert problem == "the package is not whole: it has no record of its build"


def test_a_package_in_an_archive(tmp_path):
    copy_package(tmp_path / "folder")
    archive = shutil.make_archive(str(tmp_path / "all"), "zip", tmp_path / "folder")
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {archive!r}); import my_ops"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "the package is in an archive, and the module loads from a folder only" in done.stderr


def test_a_package_without_its_distribution(tmp_path):
    """As in programs that are frozen or bring a copy of it."""
    copy_package(tmp_path)
    script = """
import importlib.metadata as metadata
def missing(name, of=metadata.version):
    if name == "my_ops":
        raise metadata.PackageNotFoundError(name)
    return of(name)
metadata.version = missing
import my_ops
print(my_ops.__file__, my_ops.__version__)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [str(tmp_path / "my_ops/__init__.py"), my_ops.__version__]


@pytest.mark.parametrize(
    ("capability", "covered"),
    [
        ((7, 0), False),
        ((7, 5), True),
        ((8, 9), True),
        ((9, 0), True),
        ((10, 3), True),
        ((11, 0), True),
    ],
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
    """A fake libcuda.so.1: a driver for CUDA 12.9 and two GPUs."""

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


def test_a_name_in_another_encoding(monkeypatch):
    cuda = FakeCuda()
    cuda.cuDeviceGetName = lambda name, size, device: setattr(name, "value", b"GPU \xe9")
    monkeypatch.setattr(report.ctypes, "CDLL", lambda name: cuda)
    assert [gpu["name"] for gpu in report.driver()["gpus"]] == ["GPU \ufffd"] * 2


def test_version(tmp_path):
    done = run(tmp_path, "--version")
    assert (done.returncode, done.stdout) == (0, f"my_ops {my_ops.__version__}\n")


def test_fits_every_gpu():
    assert report.fits(RECORD, machine("13.0", (9, 0), (8, 0)))
    assert not report.fits(RECORD, machine("13.0", (9, 0), (7, 0)))
    assert not report.fits(RECORD, machine("12.9", (9, 0)))
    assert report.fits(RECORD, None) and not report.fits(None, None)


def machine(cuda, *capabilities):
    gpus = [{"name": "GPU", "capability": list(c)} for c in capabilities]
    for gpu in gpus:
        gpu["covered"] = report.covers(RECORD["architectures"], tuple(gpu["capability"]))
    return {"cuda": cuda, "gpus": gpus}


RELEASED = {**RECORD, "home": "https://example.org/owner/my_ops"}
PLAIN = "my_ops==0.1.0"


@pytest.fixture
def linux(monkeypatch, tmp_path):
    """A machine without a toolkit."""
    monkeypatch.setattr(_install_hint.platform, "system", lambda: "Linux")
    monkeypatch.setattr(_install_hint, "TOOLKITS", tmp_path)
    return tmp_path


def hint(here, build, source):
    return _install_hint.install_hint(build, here, report.fits(build, here), source)


@pytest.mark.parametrize(
    ("here", "build", "source", "line"),
    [
        # a released wheel: the plain one, which works with every driver
        (None, RELEASED, None, PLAIN),
        (machine("13.0", (9, 0)), RELEASED, None, PLAIN),
        (machine("13.0", (9, 0)), {**RELEASED, "version": "0.1.0+cu130"}, None, PLAIN),
        (machine("12.4", (9, 0)), RELEASED, None, PLAIN),
        (machine("12.8", (7, 0), (10, 0)), RELEASED, None, PLAIN),
        # from source: pip installs CUDA 13's compiler
        (None, None, "/a folder", "MY_OPS_WITH_CUDA=0 '/a folder'"),
        (machine("13.0", (9, 0)), None, "/src", "/src"),
        (machine("13.0", (9, 0)), {**RECORD, "nvcc": None}, "/src", "/src"),
        (machine("13.0", (9, 0)), RELEASED, "git+https://a/b@123", "git+https://a/b@123"),
        # the file it came from, if that runs here
        (None, RECORD, "/dist/my_ops.whl", "/dist/my_ops.whl"),
        (machine("13.0", (9, 0)), RECORD, "/dist/my_ops.whl", "/dist/my_ops.whl"),
        (machine("12.4", (9, 0)), RELEASED, "/dist/my_ops.whl", PLAIN),
    ],
)
def test_install_hint(linux, here, build, source, line):
    words = hint(here, build, source).split()
    expected = line.split()
    environment = [expected.pop(0)] if expected[0].startswith("MY_OPS_") else []
    pip = ["pip", "install", "--force-reinstall", "--no-deps"]
    assert words == [*environment, *pip, *expected]


def test_install_hint_names_the_toolkit_for_an_older_driver(linux):
    here = machine("12.4", (9, 0))
    with pytest.raises(_install_hint.NoBuildError, match=r"install CUDA 12\.9's toolkit"):
        hint(here, None, "/src")
    for name in ("cuda-12.4", "cuda-12.6", "cuda-12.10", "cuda-12.11"):
        (linux / name / "bin").mkdir(parents=True)
        if name != "cuda-12.11":
            (linux / name / "bin/nvcc").touch()
    line = f"CUDA_HOME={linux}/cuda-12.10 pip install --force-reinstall --no-deps /src"
    assert hint(here, None, "/src") == line


@pytest.mark.parametrize(
    ("here", "build", "source", "why"),
    [
        (
            machine("13.0", (7, 0)),
            RELEASED,
            "/src",
            "code for compute capability 7.5 and newer, and",
        ),
        (
            machine("11.8", (8, 0)),
            RELEASED,
            "/src",
            "this one supports 11.8: update the NVIDIA driver",
        ),
        (machine("12.4", (9, 0)), RECORD, "/dist/my_ops.whl", "does not know where it came from"),
        (None, RECORD, None, "does not know where it came from"),
    ],
)
def test_no_install_hint(linux, here, build, source, why):
    with pytest.raises(_install_hint.NoBuildError, match=why):
        hint(here, build, source)


@pytest.mark.parametrize(("system", "name"), [("Darwin", "macOS"), ("Windows", "Windows")])
def test_another_system(monkeypatch, capsys, system, name):
    """One sentence, no traceback."""
    sentence = f"my_ops runs on Linux only, and this machine runs {name}; on Windows, use WSL"
    monkeypatch.setattr(_install_hint.platform, "system", lambda: system)
    monkeypatch.setattr(report, "driver", lambda: None)
    monkeypatch.setattr(report.sys, "argv", ["-m", "install-hint"])
    assert report.main() == 1
    assert capsys.readouterr() == ("", f"{sentence}\n")
    monkeypatch.setattr(report.sys, "argv", ["-m"])
    assert report.main() == 1
    assert capsys.readouterr().out.count("\nproblem   ") == 1
    monkeypatch.setattr(report.sys, "argv", ["-m", "--json"])
    report.main()
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert problem["problem"] == sentence


@pytest.fixture
def installed(tmp_path):
    """A my_ops that pip has installed, with pip's record of where it came from."""

    def run_hint(noted):
        site = tmp_path / "site"
        copy_package(site)
        info = site / "my_ops-0.1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my_ops\nVersion: 0.1.0\n")
        if noted:
            (info / "direct_url.json").write_text(json.dumps(noted))
        path = str(site / "my_ops/_build.json")
        Path(path).write_text(json.dumps({**RECORD, "nvcc": None, "architectures": []}))
        return run(tmp_path, "install-hint", PYTHONPATH=str(site))

    return run_hint


@pytest.mark.parametrize(
    ("url", "noted", "line"),
    [
        ("file://{folder}/my%20source", {"dir_info": {}}, "MY_OPS_WITH_CUDA=0 {pip} '{source}'"),
        ("file://{folder}/a.whl", {"archive_info": {}}, "{pip} {folder}/a.whl"),
        ("file://{folder}/gone.whl", {"archive_info": {}}, None),
        (
            "https://a/b.git",
            {"vcs_info": {"vcs": "git", "commit_id": "12"}},
            "MY_OPS_WITH_CUDA=0 {pip} git+https://a/b.git@12",
        ),
        (None, None, None),
    ],
)
def test_install_hint_follows_what_pip_noted(installed, tmp_path, url, noted, line):
    (tmp_path / "my source").mkdir()
    (tmp_path / "a.whl").touch()
    names = {"folder": tmp_path, "source": tmp_path / "my source", "pip": _install_hint.PIP}
    done = installed(url and {"url": url.format(**names), **noted})
    if json.loads(run(tmp_path, "--json").stdout)["driver"]:
        pytest.skip("needs a machine without a driver")
    if line:
        assert (done.returncode, done.stdout) == (0, line.format(**names) + "\n")
    else:
        assert (done.returncode, done.stdout) == (1, "")
        assert "does not know where it came from" in done.stderr


@pytest.mark.parametrize(
    ("here", "build", "torch", "start"),
    [
        (machine("13.0", (9, 0)), {}, {}, None),
        (
            machine("12.4", (9, 0)),
            {},
            {},
            "the driver supports CUDA 12.4, and this build needs CUDA",
        ),
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
            "no_install_hint": None,
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
        "code for  7.5, 8.0, 9.0a, 10.0+PTX, 12.0",
        "python    3.11.7 on Linux",
        "torch     2.13.0, CUDA 13.0",
        "driver    CUDA 13.0",
        "GPU       GPU, compute capability 9.0: covered",
        "GPU       GPU, compute capability 7.0: not covered",
        "",
        "problem   an old GPU",
        "fix       another",
    ]
