"""More elements than an int counts, on a GPU with room for them."""

import functools

import pytest
import torch
from samples import (
    FLOATING,
    gemm_excess,
    ulps,
)

import my_ops
from my_ops import reference

pytestmark = pytest.mark.large

BEYOND_INT32 = (1 << 31) + 12_345
SPARE_BYTES = 2 << 30
D_SIGMOID_ULP = 4.0


@pytest.fixture
def room(cuda):
    """Skips if the GPU is too small. Nothing else in this process may hold its memory."""

    def ask(nbytes):
        torch.utils.deterministic.fill_uninitialized_memory = (
            False  # it takes too long at this size
        )
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        if free < nbytes + SPARE_BYTES:
            pytest.skip(f"needs {(nbytes + SPARE_BYTES) >> 30} GiB of free GPU memory")

    yield ask
    torch.cuda.empty_cache()


def spots(n):
    """Indices around everything that could wrap, and at the ends."""
    edges = [0, 1, (1 << 30), (1 << 31) - 1, (1 << 31), (1 << 31) + 1, n - 2, n - 1]
    return torch.tensor([i for i in edges if i < n])


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16])
def test_large_add_one(dtype, cuda, room):
    room(2 * BEYOND_INT32 * dtype.itemsize)
    x = torch.randint(-100, 100, (BEYOND_INT32,), dtype=torch.int8, device=cuda).to(dtype)
    got = my_ops.add_one(x)
    for part, want in zip(got.split(1 << 28), x.split(1 << 28), strict=True):
        assert torch.equal(part, want + 1)


@pytest.mark.parametrize("flat", [True, False])
def test_large_custom_add(flat, cuda, room):
    room(3 * BEYOND_INT32)
    rows, columns = 3, BEYOND_INT32 // 3 + 1
    a = torch.randint(-50, 50, (rows, columns), dtype=torch.int8, device=cuda)
    b = a.flip(0) if flat else torch.randint(-50, 50, (columns,), dtype=torch.int8, device=cuda)
    got = my_ops.custom_add(a, b)
    for row in range(rows):
        assert torch.equal(got[row], a[row] + (b[row] if flat else b) + 1)


@pytest.mark.parametrize("vectors", [True, False])
@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.int16, torch.int32, torch.int64, *FLOATING], ids=str
)
def test_large_broadcast(dtype, vectors, cuda, room):
    """More vectors, or single elements, than an int counts."""
    columns = 48 if vectors else 49
    rows = (BEYOND_INT32 * (16 // dtype.itemsize if vectors else 1)) // columns + 1
    room(rows * columns * dtype.itemsize + 8 * rows)
    a = torch.randint(-50, 50, (rows, 1), dtype=torch.int8, device=cuda).to(dtype)
    b = torch.arange(columns, device=cuda).to(dtype)
    got = my_ops.custom_add(a, b)
    for part, x in zip(got.split(1 << 20), a.split(1 << 20), strict=True):
        assert torch.equal(part, x + b + 1)


@pytest.mark.parametrize("name", ["d_sigmoid", "round_ste"])
def test_large_unary(name, cuda, room):
    room(5 * BEYOND_INT32)
    x = torch.empty(BEYOND_INT32, dtype=torch.bfloat16, device=cuda).normal_()
    got = getattr(my_ops, name)(x)
    at = torch.cat([spots(BEYOND_INT32), torch.randint(BEYOND_INT32, (100_000,))]).to(cuda)
    want = getattr(reference, name)(x[at].cpu().double())
    assert ulps(got[at].cpu(), want) <= (D_SIGMOID_ULP if name == "d_sigmoid" else 0)


@pytest.mark.parametrize("shape", [(3, BEYOND_INT32 // 3 + 1), (BEYOND_INT32 // 2 + 1, 2)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32])
def test_large_fill_index(dtype, shape, cuda, room):
    room(4 * BEYOND_INT32 * dtype.itemsize)
    got = my_ops.fill_index(*shape, dtype=dtype, device=cuda)
    y = spots(shape[0]).to(cuda)[:, None]
    x = spots(shape[1]).to(cuda)[None, :]
    assert torch.equal(got[y, x], (y + x).to(dtype))
    assert torch.equal(got[-1], (torch.arange(shape[1], device=cuda) + shape[0] - 1).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_large_gemm_result(dtype, cuda, room):
    m, k, n = 65_539, 8, 32_771
    room(2 * m * n * dtype.itemsize)
    a = torch.randn(m, k, device=cuda).to(dtype)
    b = torch.randn(k, n, device=cuda).to(dtype)
    got = my_ops.gemm(a, b)
    rows = torch.cat([spots(m), torch.arange(m - 64, m)]).to(cuda)
    assert gemm_excess(got[rows], a[rows], b) <= 1


def test_large_gemm_operand(cuda, room):
    m, k = (1 << 20) + 3, 2053
    room(3 * m * k * 2)
    a = torch.empty(m, k, dtype=torch.bfloat16, device=cuda).normal_()
    b = torch.randn(k, 3, device=cuda).to(torch.bfloat16)
    got = my_ops.gemm(a, b)
    rows = torch.cat([spots(m), torch.arange(m - 64, m)]).to(cuda)
    assert gemm_excess(got[rows], a[rows], b) <= 1


def test_large_lltm_cell(cuda, room):
    """More than 2^31 pre-activations."""
    batch, inputs, hidden = 700_001, 1, 1024
    rows = torch.tensor([0, 1, batch // 2, batch - 2, batch - 1], device=cuda)
    room(batch * hidden * 60)
    make = functools.partial(torch.randn, device=cuda)
    input, weights = make(batch, inputs), make(3 * hidden, hidden + inputs) * hidden**-0.5
    bias, state = make(3 * hidden), make(batch, hidden)
    tensors = [t.to(torch.bfloat16) for t in (input, weights, bias, state)]
    del state
    input, weights, bias, state = tensors
    got = my_ops.lltm_cell(input, weights, bias, state, state)
    part = [input[rows], weights, bias, state[rows], state[rows]]
    want = reference.lltm_cell(*(t.double() for t in part))
    theirs = reference.lltm_cell(*part)
    for ours, exact, plain in zip(got, want, theirs, strict=True):
        assert (ours[rows] - exact).abs().max() <= (plain - exact).abs().max()
