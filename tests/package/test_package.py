"""The installed package: what the module links and exports, and its message if it does not load."""

import ast
import importlib.metadata
import json
import pydoc
import re
import shutil
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import my_ops
from my_ops import _fast_fp32, _plain

PACKAGE = Path(my_ops.__file__).parent
MODULE = PACKAGE / "_C.so"
REPOSITORY = Path(__file__).resolve().parents[2]

IN_REPOSITORY = pytest.mark.skipif(
    not (REPOSITORY / "kernels").is_dir(), reason="needs the source tree"
)


# --------------------------------------------------------------------------------- layer rules


def sources(folder):
    files = sorted(p for p in (REPOSITORY / folder).rglob("*") if p.is_file())
    assert files
    return {p.name: without_comments(p.read_text()) for p in files}


def without_comments(text):
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)


def matches(folder, pattern):
    return [
        f"{name}: {line.strip()}"
        for name, text in sources(folder).items()
        for line in text.splitlines()
        if re.search(pattern, line)
    ]


@IN_REPOSITORY
@pytest.mark.parametrize("folder", ["kernels", "include"])
def test_no_torch_below_the_bindings(folder):
    assert matches(folder, r"#\s*include\s*[<\"](torch|ATen|c10|Python)") == []
    assert matches(folder, r"\b(at|c10|torch)::") == []


@IN_REPOSITORY
def test_compiling_needs_no_headers_of_python():
    assert matches("csrc", r"#\s*include\s*[<\"](Python|pybind|torch/(extension|python))") == []


@IN_REPOSITORY
@pytest.mark.parametrize("folder", ["csrc", "include"])
def test_launches_only_in_kernels(folder):
    assert matches(folder, r"<<<|__global__|__device__") == []


@IN_REPOSITORY
def test_launchers_only_launch():
    """Kernels and launchers do not throw, print, allocate, synchronise or end the process."""
    forbidden = (
        r"\bthrow\b|\bprintf\b|std::c(out|err)|\bexit\(|\babort\(|\bassert\(|\bnew\s|\bmalloc\("
        r"|std::(vector|string|map|make_)|cudaMalloc|cudaFree|cudaDeviceSynchronize"
        r"|cudaStreamSynchronize|cudaStreamCreate"
    )
    assert matches("kernels", forbidden) == []


@IN_REPOSITORY
def test_the_binding_chooses_nothing():
    """The plan decides which kernel, tile or library call takes a problem. csrc does not compare
    sizes with numbers or constants of its own, does not ask about the device, and names kernels
    only to show a plan."""
    constants = r"constexpr \w+ (k\w+) = [^;]*(?:\d{2,}|<<)"
    names = [
        name
        for path in (REPOSITORY / "csrc").rglob("*.*")
        for name in re.findall(constants, without_comments(path.read_text()))
    ]
    named = "|".join(sorted(set(names) - {"kMostAsked"}))
    chooses = (
        r"(?<![<>-])[<>]=?\s*\d{2,}|DeviceFacts|current_device|sm_count|\b(cublas|cudnn)\w*\("
        r"|(Gemm|Recurrent)Kernel::(?!kLibrary|kSteps)\w+(?!:)\b"
        rf"|[^<>-][<>]=?\s*({named})\b|\b({named}) [<>]=? "
    )
    others = r"(gemm_|recurrent_)?explain|gemm_(problem|costs)|\S+ #if TORCH_VERSION"
    others += r"|\S+ static_assert"
    assert [m for m in matches("csrc", chooses) if not re.match(others, m)] == []


@IN_REPOSITORY
def test_stream_and_sizes_have_no_defaults():
    assert matches("include", r"\w\s*=\s*[\w{}:]+\s*[,)]") == []


@IN_REPOSITORY
def test_asm_only_in_ptx():
    """One function for each: code that needs an instruction finds it in kernels/ptx, or adds it
    there."""
    found = [
        str(path.relative_to(REPOSITORY))
        for folder in ("kernels", "include", "csrc")
        for path in sorted((REPOSITORY / folder).rglob("*"))
        if path.is_file() and path.parent != REPOSITORY / "kernels/ptx"
        if re.search(r"\b(asm|__asm__)\b", without_comments(path.read_text()))
    ]
    assert found == []


def imports_of(path):
    """The modules of the package that a file imports, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("my_ops"):
            for name in node.names:
                yield f"{node.module}.{name.name}"
                yield node.module


def test_imports_make_no_circle():
    modules = {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path
        for path in PACKAGE.rglob("*.py")
        if path.name != "__init__.py"
    }
    left = {name: set(imports_of(path)) & set(modules) for name, path in modules.items()}
    while free := [name for name, needs in left.items() if not needs & set(left)]:
        for name in free:
            del left[name]
    assert left == {}


# ----------------------------------------------------------------------------------- the module


@dataclass
class Symbol:
    name: str
    defined: bool
    weak: bool


class Elf:
    """The dynamic section and symbols of a 64-bit little-endian ELF file."""

    DYNAMIC, DYNSYM, NEEDED, RUNPATHS = 6, 11, 1, (15, 29)

    def __init__(self, path):
        self.data = path.read_bytes()
        assert self.data[:6] == b"\x7fELF\x02\x01"
        (offset,) = struct.unpack_from("<Q", self.data, 40)
        size, count = struct.unpack_from("<HH", self.data, 58)
        self.sections = [
            struct.unpack_from("<IIQQQQIIQQ", self.data, offset + i * size) for i in range(count)
        ]

    def _entries(self, kind, form):
        for _, type_, _, _, offset, size, link, _, _, _ in self.sections:
            if type_ == kind:
                for entry in struct.iter_unpack(form, self.data[offset : offset + size]):
                    yield entry, self.sections[link][4]

    def _text(self, at):
        return self.data[at : self.data.index(b"\0", at)].decode()

    def dynamic(self, *tags):
        return [
            self._text(strings + value)
            for (tag, value), strings in self._entries(self.DYNAMIC, "<qQ")
            if tag in tags
        ]

    def symbols(self):
        return [
            Symbol(self._text(strings + name), section != 0, info >> 4 == 2)
            for (name, info, _, section, _, _), strings in self._entries(self.DYNSYM, "<IBBHQQ")
            if name
        ]


@pytest.fixture(scope="module")
def elf():
    return Elf(MODULE)


@pytest.fixture(scope="module")
def overrides():
    if not _fast_fp32.OVERRIDES.exists():
        pytest.skip("a build for the CPU only has no overrides")
    return Elf(_fast_fp32.OVERRIDES)


def test_elf_reader_reads(elf):
    assert "libc.so.6" in elf.dynamic(Elf.NEEDED)
    assert any(s.name == "aoti_torch_get_sizes" and not s.defined for s in elf.symbols())


def test_needed_libraries(elf):
    needed = elf.dynamic(Elf.NEEDED)
    assert "libtorch.so" in needed
    forbidden = r"lib(cudart|cuda\.|c10_cuda|torch_cuda|torch_python|python|cublas|nvrtc|c10\.)"
    assert [name for name in needed if re.match(forbidden, name)] == []


def test_no_run_path(elf):
    assert elf.dynamic(*Elf.RUNPATHS) == []


def test_exports_the_c_interface_alone(elf):
    header = Path(my_ops.get_include(), "my_ops/c_api.h").read_text()
    declared = re.findall(r"^(?:int|int64_t|const char\*) (my_ops_\w+)\(", header, re.MULTILINE)
    assert len(declared) == 11
    declared += ["my_ops_explain_gemm", "my_ops_explain_recurrent"]  # csrc/explain.h
    costs = (PACKAGE / "_gemm_costs.py").read_text()
    declared += set(re.findall(r"my_ops_gemm_\w+", costs)) - {"my_ops_gemm_costs_gpu"}
    switch = "".join((PACKAGE / name).read_text() for name in ("_fast_fp32.py", "_library.py"))
    called = set(re.findall(r"my_ops_fast_fp32_\w+", switch))
    own_kernels = (PACKAGE / "recurrent/_own_kernels.py").read_text()
    called |= {"my_ops_gemm_costs_gpu", *re.findall(r"my_ops_\w+_own_kernel", own_kernels)}
    own_cpu = (PACKAGE / "recurrent/_own_cpu.py").read_text()
    declared += set(re.findall(r"my_ops_\w+_own_cell", own_cpu))
    for_cuda = json.loads((PACKAGE / "_build.json").read_text())["nvcc"] is not None
    exported = {s.name for s in elf.symbols() if s.defined}
    assert exported == set(declared) | (called if for_cuda else set())  # only CUDA has these


def test_imports_only_the_stable_interface(elf):
    wanted = {s.name: s.weak for s in elf.symbols() if not s.defined}
    assert [name for name in wanted if re.match(r"_ZNK?(2at|3c10|5torch)", name)] == []
    assert [name for name in wanted if re.match(r"_?Py", name)] == []
    cuda = [
        name for name in wanted if re.match(r"aoti_torch_get_current_cuda_stream|cu[A-Z]", name)
    ]
    assert all(wanted[name] for name in cuda)  # CPU builds of torch lack these


def test_the_overrides_need_no_build_of_torch_in_particular(overrides):
    """They use torch's C++ interface, but no name that only builds for CUDA or Python have."""
    assert "libtorch.so" in overrides.dynamic(Elf.NEEDED)
    assert overrides.dynamic(*Elf.RUNPATHS) == []
    names = {s.name: s.defined for s in overrides.symbols()}
    assert not any(re.match(r"_ZN2at4cuda|cu[A-Z]|\w*c10_cuda|_?Py", name) for name in names)
    exported = {name for name, defined in names.items() if defined}
    assert exported == {"my_ops_overrides_torch", "my_ops_overrides_put"}


def test_the_plain_calls_need_no_python_in_particular():
    """They have no Python header, and what they use of Python is in its stable ABI."""
    calls = Elf(_plain.MODULE)
    assert {"libtorch.so", "libtorch_python.so"} <= set(calls.dynamic(Elf.NEEDED))
    assert calls.dynamic(*Elf.RUNPATHS) == []
    names = {s.name: s.defined for s in calls.symbols()}
    assert not any(re.match(r"_ZN2at4cuda|cu[A-Z]|\w*c10_cuda", name) for name in names)
    stable = {"PyCFunction_NewEx", "PyObject_Type", "Py_IncRef", "Py_DecRef", "_Py_NoneStruct"}
    stable |= {"PyEval_SaveThread", "PyEval_RestoreThread", "PyLong_AsLongLong", "PyLong_Type"}
    stable |= {"PyUnicode_AsUTF8AndSize", "PyUnicode_Type", "PyErr_Occurred", "PyErr_Clear"}
    stable |= {"PyObject_IsTrue", "PyTuple_New", "PyTuple_SetItem"}
    assert {name for name in names if re.match(r"_?Py", name)} == stable
    exported = {name for name, defined in names.items() if defined}
    assert exported == {"my_ops_calls_torch", "my_ops_calls_start", "my_ops_calls_function"}


def test_no_build_paths_in_the_module():
    """Messages of torch's headers name their file, but not its place on the build machine."""
    assert re.findall(rb"/[^\0]*/torch/include/[^\0]*", MODULE.read_bytes()) == []


# ----------------------------------------------------------------------------------- the package


def test_version():
    assert my_ops.__version__ == importlib.metadata.version("my_ops")


def test_public_names():
    ops = ["add_one", "custom_add", "d_sigmoid", "fill_index", "gemm", "linear", "lltm"]
    ops += ["lltm_cell", "lstm", "lstm_cell", "gru", "gru_cell", "nn", "reference", "round_ste"]
    assert set(ops) <= set(my_ops.__all__)
    for name in my_ops.__all__:
        assert getattr(my_ops, name).__doc__
    layers = {"RoundSTE", "Linear", "LinearActivation", "LLTMCell", "LLTM"}
    assert layers | {"LSTMCell", "LSTM", "GRUCell", "GRU"} <= set(my_ops.nn.__all__)
    assert (PACKAGE / "py.typed").exists()


def test_help_begins_with_what_a_user_needs_first():
    text = pydoc.plain(pydoc.render_doc(my_ops))
    described, _, classes = text.partition("\nCLASSES\n")
    names = "fast_fp32()", "convert(model)", "nn.LSTM", "gemm", "lstm", "reference", "add_one"
    places = [described.index(name) for name in names]
    assert places == sorted(places)
    assert re.search(r"^    class (\w+)", classes, re.MULTILINE)[1] == "fast_fp32"
    for result in (my_ops.Conversion, my_ops.PackedWeight):  # named, for annotations
        assert result.__doc__


def run(script, cwd):
    """Runs Python away from the source tree; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


FAILS = """
import sys
{before}
try:
    import my_ops
except ImportError as error:
    sys.stdout.write(str(error))
else:
    sys.exit("imported")
"""


def test_import_is_quiet(tmp_path):
    """No warning and no CUDA context. The cache of compiled gradients depends on the package's
    version and decompositions."""
    script = """
import sys, warnings
import torch
warnings.simplefilter("error")
import my_ops
assert not torch.cuda.is_initialized()
print(torch.compiler.config.cache_key_tag)
"""
    tag = run(script, tmp_path)
    assert my_ops.__version__ in tag
    copy_package(tmp_path, with_module=True)
    with (tmp_path / "my_ops/_inductor.py").open("a") as decompositions:
        decompositions.write("# another build\n")
    assert run(script, tmp_path) not in ("", tag)


def copy_package(folder, *, with_module):
    ignored = shutil.ignore_patterns("__pycache__", *([] if with_module else ["*.so"]))
    shutil.copytree(PACKAGE, folder / "my_ops", ignore=ignored)


def test_a_second_copy_is_refused(tmp_path):
    copy_package(tmp_path, with_module=True)
    before = f"""
import my_ops
for name in [name for name in sys.modules if name.split(".")[0] == "my_ops"]:
    del sys.modules[name]
sys.path.insert(0, {str(tmp_path)!r})
"""
    message = run(FAILS.format(before=before), tmp_path.parent)
    assert "my_ops" in message
    assert "registered already" in message
    assert "another copy" in message


def test_source_folder_without_the_module(tmp_path):
    copy_package(tmp_path, with_module=False)
    message = run(FAILS.format(before=f"sys.path.insert(0, {str(tmp_path)!r})"), tmp_path)
    assert "_C.so is missing" in message
    assert "pip install" in message


def test_another_system_is_refused(tmp_path):
    before = "import platform, torch; platform.system = lambda: 'Darwin'"
    message = run(FAILS.format(before=before), tmp_path)
    assert "my_ops runs on Linux only, and this machine runs macOS" in message


def test_old_torch_is_refused(tmp_path):
    before = "import torch; torch.__version__ = '2.9.1+cu128'"
    message = run(FAILS.format(before=before), tmp_path)
    assert "torch >= 2.10" in message
    assert "2.9.1+cu128" in message
    assert "pip install" in message


@pytest.mark.parametrize("version", ["2.10.0", "2.15.0a0+git123"])
def test_new_torch_is_accepted(version, tmp_path):
    script = f"import torch; torch.__version__ = {version!r}; import my_ops"
    assert run(script, tmp_path) == ""
