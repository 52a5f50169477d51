"""check_wheel.py on the installed package as a wheel, and on wheels with planted defects."""

import importlib.util
import json
import random
import re
import stat
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from planted_wheel import DISTRIBUTION, MODULE, RECORD, SBOM, TOOLS, Wheel, info, installed

import my_ops

CHECK = Path(__file__).resolve().parents[2] / "tools/release/check_wheel.py"

pytestmark = pytest.mark.skipif(
    not CHECK.exists() or any(importlib.util.find_spec(tool) is None for tool in TOOLS),
    reason="needs the source tree and the tools that check wheels",
)


@pytest.fixture(scope="session")
def check_wheel():
    sys.path.insert(0, str(CHECK.parent))
    import check_wheel

    return check_wheel


@pytest.fixture(scope="session")
def contents():
    files = installed()
    if MODULE not in files:
        pytest.skip("needs the installed wheel, not a build in place")
    return files


@pytest.fixture
def wheel(contents, tmp_path):
    return Wheel(contents, tmp_path)


@pytest.fixture
def found(check_wheel, wheel):
    """What one of the checks finds in the wheel."""

    def run(check):
        folder = wheel.folder / "unpacked"
        folder.mkdir()
        return list(check_wheel.CHECKS[check](check_wheel.Wheel(wheel.write(), folder, None)))

    return run


def test_this_build_passes(wheel):
    done = subprocess.run(
        [sys.executable, CHECK, wheel.write()], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert "FAILED" not in done.stdout


def test_a_finding_fails_the_whole(wheel):
    del wheel.files["my_ops/ops/gemm.py"]
    done = subprocess.run([sys.executable, CHECK, wheel.write()], capture_output=True, text=True)
    assert done.returncode == 1
    assert "FAILED contents: my_ops/ops/gemm.py is missing" in done.stdout


def test_hopper_products_keep_their_sums_in_registers(contents, check_wheel):
    """A spilled register would appear as stack."""
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


# ------------------------------------------------------------------------------- planted defects

V = my_ops.__version__
CMAKE = "my_ops/share/cmake/my_ops/my_opsConfig.cmake"
HEADER = "my_ops/include/my_ops/c_api.h"
LAYER = "my_ops/nn/linear.py"
REGULAR = stat.S_IFREG
PT_LOAD, PT_GNU_STACK, PT_GNU_RELRO = 1, 0x6474E551, 0x6474E552
DT_NULL_LIKE, DT_TEXTREL, BIND_NOW, NOW = (0x6FFFFEF0, 0), (22, 0), (30, 8), (0x6FFFFFFB, 1)
OTHER = "a" * 40
FOREIGN_LIBRARIES = (
    *("libcudart.so.13", "libcurl.so.4", "libgomp.so.1", "libnvrtc.so.13", "libcuda.so.1"),
    *("libpython3.11.so.1.0", "libtorch_python.so", "libtorch_cuda.so", "libstdc++.so.5"),
)
PATHS = (
    *("/home/builder/my_ops/csrc/gemm_cpu.cpp", "/srv/checkout/notes", "/root/.cache/pip"),
    *("/opt/conda/lib/python3.12", "/usr/local/cuda-13.0/include"),
)


def numpys_module():
    numpy = importlib.util.find_spec("numpy")
    (path,) = (Path(numpy.origin).parent / "_core").glob("_multiarray_umath*.so")
    return path.read_bytes()


# By check: what is done to a wheel, and what the check then says.
PLANTS = {
    "name": [
        (lambda w: w.rename(f"-{V}-", "-9.9.9-"), "the file name says 9.9.9, METADATA"),
        (lambda w: w.rename("py3-none", "cp311-cp311"), "the tag is cp311-cp311-"),
        (lambda w: w.rename("^my_ops", "my_cups"), "the file name says my-cups, not my_ops"),
        (lambda w: w.text("METADATA", f"\nVersion: {V}", "\nVersion: 9.9"), "METADATA ['9.9']"),
        (lambda w: w.record(version="9.9.9"), "the build record 9.9.9"),
        (lambda w: w.text("WHEEL", "Tag: py3", "Tag: py2"), "WHEEL says ['py2-none-"),
        (lambda w: w.text("WHEEL", "lib: false", "lib: true"), "no module for one platform"),
    ],
    "build": [
        (lambda w: w.rename(f"-{V}-", f"-{V}+cu99-"), "the file name says cu99, and nvcc was"),
        (lambda w: w.release(nvcc=None), "and this was built for the CPU only"),
        (lambda w: w.release(nvcc="13.0.88"), "know CUDA 12.9, and nvcc was 13.0.88"),
        (lambda w: w.release(commit=None), "is built from a commit, and this from None"),
        (lambda w: w.release(commit=f"{OTHER}+"), f"and this from {OTHER}+"),
        (lambda w: w.record(commit="main"), "names 'main', which is no commit"),
    ],
    "metadata": [
        (lambda w: w.text("METADATA", "Name: my_ops", "Name: my-cups"), "Name has ['my-cups']"),
        (lambda w: w.text("METADATA", "ion: MIT", "ion: ISC"), "License-Expression has ['ISC']"),
        (lambda w: w.text("METADATA", "License-File: NOTICE\n", ""), "lacks ['NOTICE']"),
        (lambda w: w.text("METADATA", "Summary: Custom", "Summary: custom"), "Summary has"),
        (lambda w: w.text("METADATA", "Requires-Dist: torch>=2.10\n", ""), "s ['torch>=2.10']"),
        (lambda w: w.text("METADATA", "torch>=2.10", "torch>=2.1"), "has ['torch>=2.1']"),
        (lambda w: w.metadata("Requires-Dist: numpy"), "Requires-Dist has ['numpy']"),
        (
            lambda w: w.metadata('Requires-Dist: torch==2.13.*; python_version >= "3"'),
            "Requires-Dist has ['torch==2.13.*; python_version",
        ),
        (lambda w: w.text("METADATA", 'numpy; extra == "test"', "numpy"), "has ['numpy']"),
        (lambda w: w.text("METADATA", "Python: >=3.10", "Python: >=3.8"), "has ['>=3.8']"),
        (lambda w: w.text("METADATA", ":: 3.10\n", ":: 3.9\n"), "Classifier has"),
        (lambda w: w.text("METADATA", ":: Typed", ":: Types"), "PyPI knows no classifier 'Typing"),
        (lambda w: w.metadata("Project-URL: Home, https://x.example"), "Project-URL has"),
        (lambda w: w.metadata("Obsoletes-Dist: torch"), "METADATA has ['Obsoletes-Dist']"),
        (lambda w: w.text("METADATA", "\n# my_ops", "\n# my_cups"), "its page is not README.md"),
    ],
    "contents": [
        *(
            (lambda w, name=name: w.files.pop(name), f"{name} is missing")
            for name in (LAYER, HEADER, CMAKE, MODULE, "my_ops/py.typed", RECORD)
        ),
        *(
            (lambda w, name=name: w.files.pop(info(name)), f"{name} is missing")
            for name in (SBOM, "licenses/LICENSE", "licenses/NOTICE")
        ),
        (
            lambda w: (w.record(nvcc="13.0.88"), w.files.pop("my_ops/_overrides.so", None)),
            "my_ops/_overrides.so is missing",
        ),
        *(
            (lambda w, name=name: w.files.update({name: b"x"}), f"{name} is not of the source tree")
            for name in (
                *("my_ops/gemm.cu", "my_ops/__pycache__/nn.cpython-311.pyc", "tests/__init__.py"),
                *("my_ops.pth", info("entry_points.txt"), f"my_ops-{V}.data/scripts/python"),
            )
        ),
        *(
            (lambda w, name=name: w.files.update({name: w.files[name] + b" "}), f"{name} differs")
            for name in ("my_ops/__init__.py", LAYER, HEADER, CMAKE, "my_ops/py.typed")
        ),
        (lambda w: w.files.update({info("licenses/LICENSE"): b""}), "licenses/LICENSE differs"),
        (lambda w: w.text("licenses/NOTICE", "NVIDIA", "Nvidia"), "licenses/NOTICE differs"),
        (lambda w: w.text("top_level.txt", "my_ops", "my_ops\ntests"), "names ['my_ops', 'tests']"),
    ],
    "files": [
        (lambda w: w.modes.update({LAYER: REGULAR | 0o777}), f"{LAYER} has the mode 0777"),
        (lambda w: w.modes.update({LAYER: REGULAR | 0o755}), f"{LAYER} has the mode 0755"),
        (lambda w: w.modes.update({LAYER: REGULAR}), f"{LAYER} has the mode 0000"),
        (lambda w: w.modes.update({MODULE: REGULAR | 0o4755}), f"{MODULE} has the mode 4755"),
        (lambda w: w.modes.update({MODULE: REGULAR | 0o757}), f"{MODULE} has the mode 0757"),
        (lambda w: w.modes.update({RECORD: stat.S_IFLNK | 0o644}), f"{RECORD} is no regular file"),
        (lambda w: w.record(home="/home/me/my_ops"), "names /home/me/my_ops, a path"),
        (lambda w: w.text(SBOM, "torch (", "/srv/torch/lib ("), "names /srv/torch/lib, a path"),
    ],
    "notices": [
        (lambda w: w.text(SBOM, '"library"', '"libary"'), "is not CycloneDX"),
        (lambda w: w.text(SBOM, f': "{V}"', ': "0.0.9"'), "the bill of materials is of 0.0.9"),
        (lambda w: w.text(SBOM, "torch (inline", "CUDA Runtime ("), "names the CUDA Runtime"),
    ],
    "python": [
        (
            lambda w: w.files.update({"my_ops/_D.cpython-311.so": w.files[MODULE]}),
            "does not end in .so alone",
        ),
        (lambda w: w.files.update({"my_ops/_D.so": numpys_module()}), "uses or exports ['Py"),
    ],
    "torch": [
        (
            lambda w: w.symbol("aoti_torch_get_sizes", "_ZN3c1010TensorType3getEv"),
            "_C.so uses ['c10::TensorType::get()'] of torch",
        ),
        (
            lambda w: w.symbol("aoti_torch_get_sizes", "aoti_torch_cpu_rand_like"),
            "_C.so needs torch 2.12.0, not 2.10",
        ),
    ],
    "libraries": [
        *(
            (lambda w, name=name: w.patchelf("--add-needed", name), f"_C.so needs {name}")
            for name in FOREIGN_LIBRARIES
        ),
        (lambda w: w.patchelf("--remove-needed", "libtorch.so"), "does not need libtorch.so"),
        (lambda w: w.patchelf("--set-rpath", "/opt/torch"), "has DT_RUNPATH"),
        (lambda w: w.patchelf("--force-rpath", "--set-rpath", "$ORIGIN/.."), "has DT_RPATH"),
    ],
    "symbols": [
        (lambda w: w.symbol("my_ops_cpu_add_one", "sigmoid"), "exports ['sigmoid']"),
        *(
            (
                lambda w, name=name: w.symbol("aoti_torch_get_sizes", name),
                f"_C.so cannot be loaded without ['{name}']",
            )
            for name in ("aoti_torch_get_current_cuda_stream", "cudaMalloc")
        ),
    ],
    "memory": [
        (lambda w: w.patchelf("--set-execstack"), "PT_GNU_STACK both writable and executable"),
        (lambda w: w.segment(PT_LOAD, flags=7), "PT_LOAD both writable and executable"),
        (lambda w: w.segment(PT_GNU_STACK, type=0), "does not say that its stack is not"),
        (lambda w: w.dynamic(BIND_NOW, DT_TEXTREL), "has text relocations"),
        (lambda w: w.segment(PT_GNU_RELRO, type=0), "its link lacks -z relro -z now"),
        (
            lambda w: (w.dynamic(BIND_NOW, DT_NULL_LIKE), w.dynamic(NOW, DT_NULL_LIKE)),
            "its link lacks -z relro -z now",
        ),
        (lambda w: w.module(b".comment\0", b".symtab\0\0"), "is not stripped: it has ['.symtab']"),
        (lambda w: w.module(b".comment\0", b".debug_s\0"), "is not stripped: it has ['.debug_s']"),
        (
            lambda w: w.module(b"__stack_chk_fail\0", b"__stack_chk_good\0"),
            "was compiled without -fstack-protector-strong",
        ),
        *(
            (
                lambda w, path=path: w.files.update(
                    {MODULE: w.files[MODULE] + f" {path}\0".encode()}
                ),
                f"_C.so names {path}, a path of the build machine",
            )
            for path in PATHS
        ),
    ],
    "gpu code": [(lambda w: w.record(architectures=["7.5+PTX"]), "_C.so has ptx for")],
    "size": [
        (
            lambda w: w.files.update({"my_ops/x": random.Random(0).randbytes(30_000_001)}),
            "MB is more than",
        )
    ],
    "platform": [
        (
            lambda w: w.rename(r"(many)?linux\w*_(x86_64|aarch64)", r"manylinux_2_17_\2"),
            "it needs glibc",
        )
    ],
}


@pytest.mark.parametrize(
    ("check", "plant", "finding"),
    [
        pytest.param(check, plant, finding, id=f"{check}: {finding}")
        for check, plants in PLANTS.items()
        for plant, finding in plants
    ],
)
def test_planted_defect(wheel, found, check_wheel, monkeypatch, check, plant, finding):
    """Ours to find: twine and check-wheel-contents, which know some of them, say nothing here."""
    if check == "contents":
        silent = subprocess.CompletedProcess((), 0, "", "")
        monkeypatch.setattr(check_wheel.wheel_text, "tool", lambda *_: silent)
    plant(wheel)
    assert any(finding in said for said in found(check))


@pytest.mark.skipif(not (CHECK.parents[1] / ".git").exists(), reason="needs the repository")
def test_commit_is_that_of_the_source(wheel, found):
    wheel.record(commit=OTHER)
    (finding,) = found("build")
    assert finding.startswith(f"the build record names commit {OTHER}, and this source is at ")


@pytest.mark.parametrize("nvcc", ["12.9.86", "13.0.88"])
def test_wheel_of_a_release(wheel, found, nvcc):
    """For every driver, if it has no local version."""
    wheel.release(nvcc=nvcc)
    local = "" if nvcc == "12.9.86" else "+cu130"
    wheel.rename("-[^-]*-py3", f"-{V.partition('+')[0]}{local}-py3")
    assert found("build") == []


def test_page_of_a_release(wheel, found):
    """With the repository's address its links differ from README's."""
    wheel.record(home="https://example.org/me/my_ops")
    assert any("its page is not README.md" in said for said in found("metadata"))


def test_folders_are_no_files(wheel, found):
    """auditwheel writes an entry for each folder."""
    for name in ("my_ops/", "my_ops/ops/"):
        wheel.files[name], wheel.modes[name] = b"", stat.S_IFDIR | 0o755
    assert found("files") == []


def test_file_that_stands_there_twice(wheel, check_wheel, tmp_path):
    path = wheel.write()
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(path, "a") as archive:
        archive.writestr(LAYER, b"")
    found = list(check_wheel.CHECKS["files"](check_wheel.Wheel(path, tmp_path / "x", None)))
    assert f"{LAYER} stands in it 2 times" in found


def test_file_changed_after_its_hash_was_written(wheel, check_wheel, tmp_path):
    path = wheel.write()
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    files["my_ops/__init__.py"] += b"\n"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    changed = check_wheel.Wheel(path, tmp_path / "x", None)
    found = list(check_wheel.CHECKS["contents"](changed))
    assert any("RECORD: Hash mismatch for file" in said for said in found)


@pytest.fixture
def gpu_module(monkeypatch, tmp_path):
    """A module with code for 8.0 and PTX, and the release that compiled it."""
    monkeypatch.syspath_prepend(CHECK.parent / "build")
    import preflight

    try:
        toolkit = preflight.find_toolkit()
    except preflight.Unfit as unfit:
        pytest.skip(str(unfit))
    source, path = tmp_path / "kernel.cu", tmp_path / "kernel.so"
    source.write_text("__global__ void kernel(int* p) { *p = 1; }\n")
    command = [toolkit.home / "bin/nvcc", "-shared", "-Xcompiler=-fPIC", "-cudart=none"]
    code = "-gencode=arch=compute_80,code=[sm_80,compute_80]"
    subprocess.run([*command, code, "-o", path, source], check=True)
    return path.read_bytes(), toolkit.version


@pytest.mark.parametrize("recorded_nvcc", [None, "12.6.20", "13.9.1"])
def test_compiler_of_the_gpu_code(wheel, found, gpu_module, recorded_nvcc):
    code, nvcc = gpu_module
    wheel.files[MODULE] = code
    wheel.record(nvcc=recorded_nvcc or nvcc, architectures=["8.0+PTX"])
    findings = found("gpu code")
    made = ".".join(nvcc.split(".")[:2])
    if recorded_nvcc:
        assert any(f"_C.so has code made by CUDA {made}" in said for said in findings)
    else:
        assert findings == []


@pytest.mark.parametrize(
    ("version", "release"),
    [(126, "12.6"), (129, "12.9")],
)
def test_compiler_of_machine_code_of_cuda_12(
    wheel, found, check_wheel, monkeypatch, version, release
):
    """It does not name its compiler, only the version of its format."""
    code = b"\x7fELF" + bytes(16) + struct.pack("<I", version)
    monkeypatch.setattr(
        check_wheel, "code_of", lambda _, kind: [("sm_80", code)] if kind == "elf" else []
    )
    wheel.record(architectures=["8.0"], nvcc="12.9.86")
    wrong = ["_C.so has code made by CUDA 12.6, the record says 12.9"]
    wrong += ["_C.so has no machine code made by CUDA 12.9, as the record says"]
    assert found("gpu code") == ([] if release == "12.9" else wrong)


def test_path_in_ptx(wheel, found, check_wheel, monkeypatch):
    """nvcc -lineinfo writes it."""
    code = b'.version 9.0\n.file 1 "/home/builder/kernels/gemm/simt.cu"\n'
    monkeypatch.setattr(
        check_wheel, "code_of", lambda _, kind: [("sm_80", code)] if kind == "ptx" else []
    )
    assert any("_C.so names /home/builder/kernels" in said for said in found("gpu code"))
