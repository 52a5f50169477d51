"""Cells that a package has compiled when it was built (my_ops.build): they run without a compiler,
and what the package lacks is compiled at run time as ever."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import own_cells
import pytest
import torch
from own_cell_runs import LIMIT, check

from my_ops._explain import GPUS
from my_ops.recurrent import _compiled, _nvrtc, _own_cpu, _own_kernels

pytest.importorskip("setuptools", "77")
from setuptools import Distribution, Extension
from setuptools.errors import CompileError
from torch.utils.cpp_extension import BuildExtension

from my_ops.build import BuildCells, CellExtension

SIZES = (7, 3, 4, 7)
OF_MANY_FUNCTIONS = """
import torch, my_ops

@my_ops.cell(gates="f g", carried="c", parameters="p")
def {name}(f, g, c, p, scale={scale}):
    c = torch.exp(-f * f) * torch.log1p(c * c) + torch.tanh(g + p)
    return torch.sigmoid(scale * c), c
"""
CELL = """
import torch, my_ops

@my_ops.cell(gates="f g")
def {name}(f, g, h, scale={scale}):
    f = torch.sigmoid(f)
    return f * h + (1 - f) * torch.tanh(scale * g)
"""
scales = itertools.count(2)  # a cell is known by what it computes, so that of each test is another


def build(folder, module, **options):
    """In place."""
    given = {"package_dir": {"": str(folder)}, "py_modules": [module]}
    given["ext_modules"] = [CellExtension(module, **options)]
    command = BuildCells(Distribution(given))
    command.inplace = True
    command.ensure_finalized()
    command.run()


def write(folder, text=CELL):
    """A module with a cell. Returns the name of both."""
    scale = next(scales)
    name = f"units_{scale}"
    (folder / f"{name}.py").write_text(text.format(name=name, scale=scale))
    return name


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A cell for the CPU, and its code."""
    folder = tmp_path_factory.mktemp("package")
    name = write(folder)
    build(folder, name)
    return getattr(sys.modules[name], name), folder / f"{name}.compiled"


@pytest.fixture
def built(compiled, monkeypatch, tmp_path):
    """The same, under its name in own_cells. Nothing is loaded, and the cache is empty."""
    cell, folder = compiled
    monkeypatch.setenv("MY_OPS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(own_cells, cell.name, cell, raising=False)
    monkeypatch.setattr(_own_cpu, "_numbers", {})
    monkeypatch.setattr(_own_cpu, "_refused", set())
    _own_cpu._compiler.cache_clear()
    yield cell, folder
    _own_cpu._compiler.cache_clear()


def without_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    _own_cpu._compiler.cache_clear()


# -------------------------------------------------------------------------------------------- CPU

PROGRAM = """
import sys, torch
from {name} import {name}
for dtype in (torch.float32, torch.bfloat16, torch.float64):
    layer = {name}.layer(2, 3, dtype=dtype)
    layer(torch.ones(4, 1, 2, dtype=dtype, requires_grad=True))[0].sum().backward()
print(*(line.split()[-1] for line in open("/proc/self/maps") if ".compiled/" in line), sep="\\n")
"""


@pytest.mark.slow
def test_another_process_needs_no_compiler_and_no_cache(built, tmp_path):
    cell, folder = built
    in_the_way = tmp_path / "file"  # root may write to read-only folders
    in_the_way.touch()
    paths = [str(folder.parent), *(p for p in sys.path if p)]
    environment = {
        "PATH": str(tmp_path),
        "MY_OPS_CACHE": str(in_the_way / "cache"),
        "PYTHONPATH": os.pathsep.join(paths),
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(name=cell.name)],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    assert done.stderr == ""
    of_types = {Path(line) for line in done.stdout.split()}
    assert len(of_types) == 2 and of_types < set(folder.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", LIMIT, ids=str)
def test_results_on_every_level(built, monkeypatch, tmp_path, capfd, dtype):
    cell, _ = built
    without_compiler(monkeypatch, tmp_path)
    levels = ("",)
    if _own_cpu._level() in _own_cpu._LEVELS:
        levels = _own_cpu._LEVELS[: _own_cpu._LEVELS.index(_own_cpu._level()) + 1]
    for level in levels:
        monkeypatch.setattr(_own_cpu, "_level", lambda level=level: level)
        monkeypatch.setattr(_own_cpu, "_numbers", {})
        check(cell.name, SIZES, "ragged and zoneout", dtype, "cpu")
        assert _own_cpu.number_of(cell._cell, dtype) is not None
    assert capfd.readouterr().err == ""
    assert not (tmp_path / "cache").exists()


@pytest.mark.slow
def test_a_cell_of_many_functions(monkeypatch, tmp_path, capfd):
    monkeypatch.setenv("MY_OPS_CACHE", str(tmp_path / "cache"))
    name = write(tmp_path, OF_MANY_FUNCTIONS)
    build(tmp_path, name)
    without_compiler(monkeypatch, tmp_path)
    cell = getattr(sys.modules[name], name)
    monkeypatch.setattr(own_cells, name, cell, raising=False)
    for dtype in LIMIT:
        check(name, SIZES, "ragged and zoneout", dtype, "cpu")
        assert _own_cpu.number_of(cell._cell, dtype) is not None
    assert capfd.readouterr().err == ""
    _own_cpu._compiler.cache_clear()


@pytest.mark.slow
def test_another_engine_compiles_again(built, monkeypatch, tmp_path, capfd):
    cell, folder = built
    engine = _own_cpu._engine()
    monkeypatch.setattr(_own_cpu, "_engine", lambda: f"{engine}// of another release\n")
    check(cell.name, SIZES, "plain", torch.float32, "cpu")
    said = capfd.readouterr().err
    assert f"my_ops: compiling {cell.name}, which {folder} lacks, for this CPU" in said
    without_compiler(monkeypatch, tmp_path)
    check(cell.name, SIZES, "plain", torch.float64, "cpu")
    said = capfd.readouterr().err
    assert f"my_ops: {cell.name}, which {folder} lacks, runs step by step: no C++ compiler" in said


@pytest.mark.slow
def test_a_library_that_does_not_load_is_compiled_again(built, monkeypatch, tmp_path, capfd):
    cell, _ = built
    wrong = tmp_path / "wrong.so"
    wrong.write_bytes(b"no library")
    monkeypatch.setattr(_compiled, "built", lambda *_: wrong)
    check(cell.name, SIZES, "plain", torch.float32, "cpu")
    said = capfd.readouterr().err
    assert f"my_ops: {cell.name} is compiled again: its library does not load: {wrong}" in said
    assert f"my_ops: compiling {cell.name}" in said
    assert _own_cpu.number_of(cell._cell, torch.float32) is not None


def test_a_build_removes_what_the_last_one_left(monkeypatch, tmp_path):
    monkeypatch.setattr(_own_cpu, "build", lambda header, folder: (folder / "new.so").touch())
    name = write(tmp_path)
    folder = tmp_path / f"{name}.compiled"
    folder.mkdir()
    (folder / "old.so").touch()
    build(tmp_path, name)
    assert [file.name for file in folder.iterdir()] == ["new.so"]


@pytest.mark.slow
def test_beside_an_extension_of_torch(monkeypatch, tmp_path):
    monkeypatch.setattr(_own_cpu, "build", lambda header, folder: (folder / "cell.so").touch())
    (tmp_path / "other.cpp").write_text("int one() { return 1; }\n")
    name = write(tmp_path)
    other = Extension("other", [str(tmp_path / "other.cpp")])

    class Build(BuildCells, BuildExtension):
        pass

    given = {"package_dir": {"": str(tmp_path)}, "py_modules": [name]}
    command = Build(Distribution({**given, "ext_modules": [CellExtension(name), other]}))
    command.build_lib, command.build_temp = str(tmp_path / "lib"), str(tmp_path / "temp")
    command.ensure_finalized()
    command.run()
    made = {file.suffix for file in (tmp_path / "lib").iterdir()}
    assert made == {".so", ".compiled"}
    assert (tmp_path / "lib" / f"{name}.compiled" / "cell.so").exists()


# ----------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"gpus": ["h300"]}, r"gpus must be of .*h200.*, got 'h300'"),
        ({"dtypes": [torch.float64]}, r"dtypes must be of .*bfloat16, got torch\.float64"),
        ({"hidden_sizes": [0]}, r"hidden_sizes must be at least 1, got \[0\]"),
        ({"batch_sizes": [3, -1]}, r"batch_sizes must be at least 1, got \[3, -1\]"),
        ({"heads": [1, 0]}, r"heads must be at least 1, got \[1, 0\]"),
        (
            {"hidden_sizes": [8, 12], "heads": [1, 3]},
            r"heads must divide hidden_sizes = \[8, 12\], got \[1, 3\]",
        ),
        ({"gpus": ["h200"]}, "hidden_sizes must not be empty where gpus are given"),
    ],
)
def test_arguments(options, says):
    with pytest.raises(ValueError, match=f"CellExtension: {says}"):
        CellExtension("units", **options)


SINE = """
import torch, my_ops

@my_ops.cell(gates="a")
def sine(a):
    return torch.sin(a)
"""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("from own_cells import minimal", "has no cell of my_ops.cell at its top level"),
        (SINE, r"sine: .*no header: the kernels have no cos"),
    ],
)
def test_modules_that_cannot_be_compiled(monkeypatch, tmp_path, text, says):
    name = f"units_{next(scales)}"
    (tmp_path / f"{name}.py").write_text(text)
    with pytest.raises(CompileError, match=rf"^{name}[:.] ?{says}"):
        build(tmp_path, name)


def test_a_module_from_elsewhere_is_refused(tmp_path):
    with pytest.raises(CompileError, match=f"own_cells: must be a module in {tmp_path}, got "):
        build(tmp_path, "own_cells")


def test_a_build_without_a_compiler(monkeypatch, tmp_path):
    without_compiler(monkeypatch, tmp_path)
    name = write(tmp_path)
    with pytest.raises(CompileError, match=rf"^{name}\.{name}: no C\+\+ compiler: CXX, "):
        build(tmp_path, name)
    _own_cpu._compiler.cache_clear()


def test_gpus_need_a_build_for_cuda(monkeypatch, tmp_path):
    monkeypatch.setattr(_own_cpu, "build", lambda *_: None)
    monkeypatch.setattr(_own_kernels, "_module", lambda: None)
    with pytest.raises(CompileError, match=r"16 units of torch\.float32 on a100: this my_ops is"):
        build(tmp_path, write(tmp_path), gpus=["a100"], hidden_sizes=[16])


# ------------------------------------------------------------------------------- CUDA, without GPU


class Module:
    """What loads a kernel, with each status in turn."""

    def __init__(self, *statuses):
        self.statuses, self.codes = list(statuses), []

    def my_ops_load_own_kernel(self, code, name, plan, handle):
        self.codes.append((code, name))
        return self.statuses.pop(0)

    def my_ops_error_string(self, status):
        return b"device kernel image is invalid"


@pytest.fixture
def package(monkeypatch, tmp_path):
    """A cell whose package has one kernel, compiled by a stand-in for NVRTC; and how often that was
    asked."""
    asked = []

    def compile(source, kernel, architecture):
        asked.append(kernel)
        return f"name {len(asked)}\0code\0of {kernel} for {architecture}".encode()

    monkeypatch.setattr(_nvrtc, "_compile", compile)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(_own_kernels, "_loaded", {})
    monkeypatch.setenv("MY_OPS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(Cell, "built", tmp_path / "units.compiled")
    Cell.built.mkdir()
    _nvrtc.build("source", "kernel", "sm_90a", Cell.built)
    return asked


class Cell:
    name = "cell_units_0"
    layer = ""
    built = None


def load(module, source="source", kernel=b"kernel"):
    _own_kernels._load(module, source, _own_kernels._Planned(None, 0, kernel), Cell, False)
    return module.codes


def test_a_kernel_of_the_package_is_loaded(package, capfd):
    assert load(Module(0)) == [(b"code\0of kernel for sm_90a", b"name 1")]
    assert package == ["kernel"]
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("asked", [{"source": "another engine"}, {"kernel": b"other"}])
def test_what_the_package_lacks_is_compiled(package, capfd, asked):
    ((_, name),) = load(Module(0), **asked)
    assert name == b"name 2" and len(package) == 2
    line = f"my_ops: compiling units, which {Cell.built} lacks, for this GPU, sm_90a\n"
    assert capfd.readouterr().err == line


def test_another_gpu_compiles(package, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert load(Module(0)) == [(b"code\0of kernel for sm_80", b"name 2")]


def test_a_kernel_that_the_driver_refuses_is_compiled_again(package, capfd):
    assert [name for _, name in load(Module(218, 0))] == [b"name 1", b"name 2"]
    said = capfd.readouterr().err
    assert f"units is compiled again: {Cell.built}: device kernel image is invalid (218)" in said
    with pytest.raises(_compiled.CannotCompile, match="its kernel does not load"):
        _own_kernels._loaded.clear()
        load(Module(218, 218))


@pytest.fixture
def for_cuda(monkeypatch, tmp_path):
    """How to build a cell for CUDA alone."""
    if _own_kernels._module() is None:
        pytest.skip("a build for the CPU")
    if torch.version.cuda is None:  # then pip may have brought NVRTC all the same
        monkeypatch.setattr(torch.version, "cuda", "13.0")
    try:
        _nvrtc._library()
    except _compiled.CannotCompile:
        pytest.skip("needs NVRTC")
    monkeypatch.setenv("MY_OPS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(_own_cpu, "build", lambda *_: None)

    def make(**options):
        name = write(tmp_path)
        build(tmp_path, name, **options)
        cell = getattr(sys.modules[name], name)
        monkeypatch.setattr(own_cells, name, cell, raising=False)
        return cell, tmp_path / f"{name}.compiled"

    return make


def kernels_of(cell, gpu, dtype, batch, hidden, heads=1):
    """The names of both passes' kernels."""
    given = (_own_kernels._module(), cell._cell, cell.header(), dtype)
    of_gpu = None if gpu is None else GPUS[gpu]
    planned = (
        _own_kernels._plan(*given, backward, (5, batch, hidden, heads), of_gpu)
        for backward in (False, True)
    )
    return [p and p.name.decode() for p in planned]


@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["a100", "h200"])
def test_kernels_for_a_gpu_that_is_not_here(for_cuda, monkeypatch, gpu):
    dtype, batches = torch.bfloat16, (1, 64)
    sizes = {"hidden_sizes": [32, 700], "batch_sizes": batches, "heads": [1, 2]}
    cell, folder = for_cuda(gpus=[gpu], dtypes=[dtype], **sizes)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: GPUS[gpu][:2])
    wanted = set()
    for batch, hidden, heads in itertools.product(batches, (32, 700), (1, 2)):
        wanted |= {*kernels_of(cell, gpu, dtype, batch, hidden, heads)}
    assert len(wanted) >= 8 and None not in wanted
    for kernel in wanted:
        source = _own_kernels.source_of(cell.header())
        code, name = _nvrtc.built_code(cell._cell, source, kernel)
        assert code.startswith(b"\x7fELF") and name in code
    assert len(list(folder.glob("*.cubin"))) == len(wanted)


def test_sizes_without_kernels(for_cuda):
    with pytest.raises(CompileError, match=r"9000 units of .* on h200: it runs step by step"):
        for_cuda(gpus=["h200"], hidden_sizes=[9000])


# -------------------------------------------------------------------------------- CUDA, on a GPU


@pytest.fixture
def gpu(for_cuda):
    """The name of this one."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    here = torch.cuda.get_device_properties(0)
    facts = (here.major, here.minor, here.multi_processor_count)
    for name, known in GPUS.items():
        if known[:3] == facts:
            return name
    pytest.skip("not one of the GPUs with a name")


@pytest.mark.parametrize("dtype", _own_kernels.TYPES, ids=str)
def test_plans_for_this_gpu_by_its_name(gpu, dtype):
    for batch, hidden in itertools.product((1, 20, 70, 500), (7, 64, 126, 250, 700, 1500)):
        here = kernels_of(own_cells.minimal, None, dtype, batch, hidden)
        assert kernels_of(own_cells.minimal, gpu, dtype, batch, hidden) == here, (batch, hidden)


GPU_SIZES = [(7, 3, 4, 7), (9, 70, 8, 126), (6, 20, 32, 700)]  # steps, batch, inputs, hidden


@pytest.fixture
def on_gpu(gpu, for_cuda):
    def make(dtype):
        _own_kernels.kernel_of.cache_clear()
        cell, folder = for_cuda(
            gpus=[gpu],
            dtypes=[dtype],
            hidden_sizes=[hidden for *_, hidden in GPU_SIZES],
            batch_sizes=[batch for _, batch, *_ in GPU_SIZES],
        )
        assert list(folder.glob("*.cubin"))
        return cell, folder

    yield make
    _own_kernels.kernel_of.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", _own_kernels.TYPES, ids=str)
def test_a_gpu_runs_what_was_built(on_gpu, monkeypatch, tmp_path, dtype):
    cell, _ = on_gpu(dtype)

    def compile(*_):
        raise AssertionError("compiled at run time")

    monkeypatch.setattr(_nvrtc, "_compile", compile)
    for sizes in GPU_SIZES:
        check(cell.name, sizes, "ragged and zoneout", dtype, "cuda")
        steps, batch, _, hidden = sizes
        for backward in (False, True):
            of_sizes = (backward, steps, batch, hidden, 1)
            assert _own_kernels.kernel_of(cell._cell, dtype, 0, *of_sizes) is not None
    assert not (tmp_path / "cache").exists()


@pytest.mark.slow
def test_a_gpu_runs_although_its_driver_refuses_what_was_built(on_gpu, capfd):
    cell, folder = on_gpu(torch.float32)
    for file in folder.glob("*.cubin"):
        file.write_bytes(b"name\0no code")
    capfd.readouterr()
    check(cell.name, GPU_SIZES[0], "plain", torch.float32, "cuda")
    assert f"{cell.name} is compiled again: {folder}: " in capfd.readouterr().err
