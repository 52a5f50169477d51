"""What my_ops.cell does on CUDA before a kernel runs, without a GPU: NVRTC compiles the engine's
kernels, and a folder keeps their machine code."""

import io
import sys

import own_cells
import pytest
import torch

from my_ops import _cache
from my_ops._explain import GPUS
from my_ops.recurrent import _nvrtc, _own_kernels
from my_ops.recurrent._compiled import CannotCompile, struct_of

SIZES = {"warp": "32, 1", "block": "64", "cluster": "1, 4", "grid": "1, 1, 2"}


@pytest.fixture
def nvrtc(monkeypatch):
    if not _own_kernels._SOURCE.exists():
        pytest.skip("a build for the CPU")
    if torch.version.cuda is None:  # then pip may have brought it all the same
        monkeypatch.setattr(torch.version, "cuda", "13.0")
    try:
        _nvrtc._library()
    except CannotCompile:
        pytest.skip("needs NVRTC")


def compiled(cell, family, backward, dtype, architecture, heads=False):
    header = getattr(own_cells, cell).header()
    struct = f"my_ops::{struct_of(header)}"
    struct = f"my_ops::cuda::Headed<{struct}>" if heads else struct
    kernel = f"{family}_{'backward' if backward else 'forward'}_kernel"
    name = f"my_ops::cuda::{kernel}<{struct}, {dtype}, {SIZES[family]}>"
    return _nvrtc._compile(_own_kernels.source_of(header), name, architecture)


@pytest.mark.slow
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("cell", "family", "dtype", "architecture"),
    [
        ("lstm", "warp", "float", "sm_75"),
        ("gru", "block", "__half", "sm_80"),
        ("minimal", "warp", "__nv_bfloat16", "sm_90a"),
        ("lltm", "block", "float", "sm_86"),
        ("janet", "cluster", "float", "sm_90a"),
        ("tanh_rnn", "grid", "__nv_bfloat16", "sm_90a"),
        ("relu_rnn", "grid", "float", "sm_90a"),
        ("functions", "warp", "float", "sm_90a"),
        ("scaled", "block", "__half", "sm_80"),
        ("peephole", "cluster", "float", "sm_90a"),
        ("slstm", "grid", "__nv_bfloat16", "sm_90a"),
    ],
)
def test_every_family_compiles(nvrtc, cell, family, dtype, architecture, backward):
    name, _, code = compiled(cell, family, backward, dtype, architecture).partition(b"\0")
    assert f"{family}_{'backward' if backward else 'forward'}_kernel".encode() in name
    assert code.startswith(b"\x7fELF")
    assert name in code


@pytest.mark.slow
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("cell", "family", "dtype"),
    [
        ("slstm", "warp", "__nv_bfloat16"),
        ("gru", "block", "__half"),
        ("peephole", "cluster", "float"),
        ("scaled", "grid", "__nv_bfloat16"),
    ],
)
def test_every_family_compiles_for_heads(nvrtc, cell, family, dtype, backward):
    name, _, code = compiled(cell, family, backward, dtype, "sm_90a", True).partition(b"\0")
    assert b"Headed" in name
    assert name in code


OF_HEADS = {  # cell, hidden, heads, and the numbers of the kernel's name
    "warp": ("slstm", 512, 8, "64, 1"),
    "block": ("gru", 512, 8, "64"),
    "cluster": ("slstm", 768, 4, "4, 4"),
    "grid": ("slstm", 1536, 4, "1, 2, 2"),
}


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("family", OF_HEADS)
def test_plan_of_heads(family, backward):
    """Each head is planned as a layer of its own on its share of the GPU, and all run at once."""
    module, (name, hidden, heads, numbers) = _own_kernels._module(), OF_HEADS[family]
    if module is None:
        pytest.skip("a build for the CPU")
    cell, share = getattr(own_cells, name), [*GPUS["h200"]]
    share[2] //= heads  # SMs
    given = (module, cell._cell, cell.header(), torch.bfloat16, backward)
    planned = _own_kernels._plan(*given, (5, 16, hidden, heads), GPUS["h200"])
    one = _own_kernels._plan(*given, (5, 16, hidden // heads, 1), share)
    struct, kernel = struct_of(cell.header()), "backward" if backward else "forward"
    want = f"my_ops::cuda::{family}_{kernel}_kernel<{{}}, __nv_bfloat16, {numbers}>"
    assert planned.name.decode() == want.format(f"my_ops::cuda::Headed<my_ops::{struct}>")
    assert one.name.decode() == want.format(f"my_ops::{struct}")
    assert planned.workspace == heads * one.workspace
    assert (one.workspace > 0) == (family == "grid")


def test_heads_that_do_not_run_at_once():
    """The blocks of a grid wait for each other, so those of all heads must be on the GPU."""
    module, cell = _own_kernels._module(), own_cells.slstm
    if module is None:
        pytest.skip("a build for the CPU")
    given = (module, cell._cell, cell.header(), torch.bfloat16, False)
    assert _own_kernels._plan(*given, (5, 16, 64 * 512, 64), GPUS["h200"]) is None
    assert _own_kernels._plan(*given, (5, 16, 512, 1), GPUS["h200"]) is not None
    assert _own_kernels._plan(*given, (5, 16, 70000, 70000), GPUS["h200"]) is None


@pytest.mark.slow
def test_what_nvrtc_refuses(nvrtc):
    with pytest.raises(CannotCompile, match=r"NVRTC: NVRTC_ERROR_COMPILATION: cell\.cu\(1\)"):
        _nvrtc._compile("no_type x;", "x", "sm_90a")


@pytest.fixture
def compile_count(monkeypatch, tmp_path):
    """How often NVRTC was asked, which does not run here."""
    asked = []

    def compile(source, kernel, architecture):
        asked.append(kernel)
        return f"name of {kernel}\0code\0 of {source} for {architecture}".encode()

    monkeypatch.setattr(_nvrtc, "_compile", compile)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setenv("MY_OPS_CACHE", str(tmp_path / "cache"))
    return asked


def test_what_was_compiled_is_read(compile_count, tmp_path, capfd):
    want = b"code\0 of source for sm_90a", b"name of kernel"
    for _ in range(2):
        assert _nvrtc.machine_code("source", "kernel", "cell") == want
    assert compile_count == ["kernel"]
    assert capfd.readouterr().err == "my_ops: compiling cell for this GPU, sm_90a\n"
    _nvrtc.machine_code("source", "other", "cell")
    _nvrtc.machine_code("other", "kernel", "cell")
    assert compile_count == ["kernel", "other", "kernel"]
    assert len(list((tmp_path / "cache").iterdir())) == 3


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: b"", lambda data: data[::-1]]
)
def test_a_damaged_file_is_compiled_again(compile_count, tmp_path, damage):
    want = _nvrtc.machine_code("source", "kernel", "cell")
    (file,) = (tmp_path / "cache").iterdir()
    file.write_bytes(damage(file.read_bytes()))
    for _ in range(2):
        assert _nvrtc.machine_code("source", "kernel", "cell") == want
    assert len(compile_count) == 2


def test_a_folder_that_cannot_be_written(compile_count, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("MY_OPS_CACHE", str(tmp_path / "file" / "cache"))
    for count in (1, 2):
        _nvrtc.machine_code("source", "kernel", "cell")
        assert len(compile_count) == count


def test_a_full_disk_leaves_nothing(compile_count, monkeypatch, tmp_path):
    def replace(*paths):
        raise OSError("no space left on device")

    monkeypatch.setattr(_cache.os, "replace", replace)
    _nvrtc.machine_code("source", "kernel", "cell")
    assert list((tmp_path / "cache").iterdir()) == []


def test_without_stderr(compile_count, monkeypatch):
    closed = io.StringIO()
    closed.close()
    for count, stderr in enumerate((None, closed), 1):
        monkeypatch.setattr(sys, "stderr", stderr)
        _nvrtc.machine_code("source", f"kernel {count}", "cell")
        assert len(compile_count) == count


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_CACHE_HOME", "MY_OPS_CACHE"):
        monkeypatch.delenv(name, raising=False)
    assert _cache.cache_folder() == tmp_path / ".cache" / "my_ops"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert _cache.cache_folder() == tmp_path / "xdg" / "my_ops"
    monkeypatch.setenv("MY_OPS_CACHE", str(tmp_path / "own"))
    assert _cache.cache_folder() == tmp_path / "own"
