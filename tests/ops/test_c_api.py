"""The C interface, called through ctypes: values, limits, error codes."""

import ctypes
from pathlib import Path

import pytest
import torch

import my_ops
from my_ops import reference

pytestmark = pytest.mark.slow

pointer, size = ctypes.c_void_p, ctypes.c_int64
INVALID = -1
SIZES = [0, 1, 31, 1000]


@pytest.fixture(scope="module")
def library():
    loaded = ctypes.CDLL(str(Path(my_ops.__file__).with_name("_C.so")))
    loaded.my_ops_error_string.restype = ctypes.c_char_p
    return loaded


def call(library, op, device, arrays, sizes):
    """Returns the error code, after waiting for all queued work."""
    function = getattr(library, f"my_ops_{device}_{op}")
    stream = [] if device == "cpu" else [pointer(torch.cuda.current_stream().cuda_stream)]
    pointers = [pointer(None if a is None else a.data_ptr()) for a in arrays]
    error = function(*pointers, *[size(n) for n in sizes], *stream)
    if device == "cuda":
        torch.cuda.synchronize()
    return error


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(
    "op, inputs",
    [
        ("add_one", 1),
        ("custom_add", 2),
        ("d_sigmoid", 1),
        ("round_ste", 1),
    ],
)
def test_values(op, inputs, n, device, library):
    given = [torch.randn(n, device=device) for _ in range(inputs)]
    out = torch.full((n + 1,), 7.0, device=device)
    assert call(library, op, device, [*given, out], [n]) == 0
    assert torch.equal(out[:n], getattr(my_ops, op)(*given))
    assert out[n] == 7.0
    want = out[:n].clone()
    assert call(library, op, device, [*given, given[0]], [n]) == 0  # in place
    assert torch.equal(given[0], want)


@pytest.mark.parametrize("height, width", [(0, 3), (3, 0), (1, 1), (31, 65)])
def test_fill_index(height, width, device, library):
    out = torch.empty(height, width, device=device)
    assert call(library, "fill_index", device, [out], [height, width]) == 0
    assert torch.equal(out, reference.fill_index(height, width, device=device))


def test_invalid_arguments(device, library):
    x = torch.ones(3, device=device)
    for op, arrays, sizes in (
        ("add_one", [x, x], [-1]),
        ("add_one", [None, x], [3]),
        ("d_sigmoid", [x, None], [3]),
        ("round_ste", [None, None], [1]),
        ("custom_add", [x, None, x], [3]),
        ("fill_index", [x], [-1, 3]),
        ("fill_index", [x], [3, -1]),
        ("fill_index", [None], [1, 1]),
        ("fill_index", [x], [2**40, 2**40]),
    ):
        assert call(library, op, device, arrays, sizes) == INVALID
    assert torch.equal(x, torch.ones(3, device=device))
    assert call(library, "add_one", device, [None, None], [0]) == 0


def test_more_than_a_launch_takes(cuda, library):
    """The call is refused, not done in part. The error is not reported again."""
    out = torch.zeros(1024, device=cuda)
    wide = ((1 << 32) + 1) * 1024
    assert call(library, "fill_index", cuda, [out], [1, wide]) > 0
    assert call(library, "add_one", cuda, [out, out], [wide]) > 0
    assert torch.equal(out, torch.zeros_like(out))
    assert call(library, "add_one", cuda, [out, out], [1024]) == 0
    assert torch.equal(out, torch.ones_like(out))


def test_error_strings(library):
    assert library.my_ops_error_string(0) == b"no error"
    assert b"below 0" in library.my_ops_error_string(INVALID)
    assert b"no CUDA kernels" in library.my_ops_error_string(-2)
    assert library.my_ops_error_string(12345)
