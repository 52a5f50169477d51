"""What my_ops.cell does on CUDA before a kernel runs, without a GPU: NVRTC compiles the engine's
kernels, and a folder keeps their machine code."""

import io
import sys

import own_cells
import pytest
import torch

from my_ops import _cache
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


def compiled(cell, family, backward, dtype, architecture):
    header = getattr(own_cells, cell).header()
    struct = struct_of(header)
    kernel = f"{family}_{'backward' if backward else 'forward'}_kernel"
    name = f"my_ops::cuda::{kernel}<my_ops::{struct}, {dtype}, {SIZES[family]}>"
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
