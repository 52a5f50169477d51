"""What every op guarantees: opcheck, equal real and fake metadata, repeatability."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import (
    DIFFERENTIABLE,
    FLOATING,
    SIGNED_OR_BYTE,
    gemm_excess,
    leaves,
    named,
    ulps,
    with_dtypes,
)
from strided import build, check_metadata, layouts

import my_ops
from my_ops import reference
from my_ops.ops._common import UNARY

# torch.library.opcheck reads .grad of tensors that are not leaves (torch >= 2.14).
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

REPEATS = 100
ELEMENTWISE_ULP = 4.0
INDEX_DTYPES = [*FLOATING, torch.int32, torch.int64]


@pytest.mark.slow
@pytest.mark.parametrize(**with_dtypes(DIFFERENTIABLE))
def test_opcheck(op, dtype, device):
    tensors = op.tensors(3, dtype, device)
    torch.library.opcheck(op.overload, op.arguments(*tensors))
    torch.library.opcheck(op.overload, op.arguments(*leaves(tensors)))


@pytest.mark.slow
@pytest.mark.parametrize(**named(DIFFERENTIABLE))
def test_opcheck_strided(op, device):
    tensors = [
        t.mT.contiguous().mT if t.dim() > 1 else t for t in op.tensors(3, FLOATING[0], device)
    ]
    torch.library.opcheck(op.overload, op.arguments(*leaves(tuple(tensors))))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FLOATING)
def test_opcheck_gemm_out(dtype, device):
    a, b = (torch.ones(s, dtype=dtype, device=device) for s in ((2, 3), (3, 4)))
    out = torch.zeros(2, 4, dtype=dtype, device=device)
    torch.library.opcheck(torch.ops.my_ops.gemm.out, (a, b, out))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", INDEX_DTYPES)
def test_opcheck_fill_index(dtype, device):
    options = {"dtype": dtype, "device": torch.device(device)}
    torch.library.opcheck(torch.ops.my_ops.fill_index.default, (2, 3), options)


# ------------------------------------------------------------------- shapes and strides, fuzzed


shapes = st.lists(st.integers(0, 5), max_size=5).map(tuple)


@pytest.mark.slow
@pytest.mark.parametrize("name", UNARY)
@given(data=st.data())
def test_unary_fuzzed(name, device, data):
    shape = data.draw(shapes)
    dtypes = [*FLOATING, *SIGNED_OR_BYTE] if name == "add_one" else FLOATING
    dtype = data.draw(st.sampled_from(dtypes))
    x = build(shape, data.draw(layouts(shape)), dtype, device)
    (got,) = check_metadata(getattr(my_ops, name), [x])
    assert got.stride() == (x + x).stride()
    want = getattr(reference, name)(x.double())
    if dtype.is_floating_point:
        assert ulps(got.cpu(), want.cpu()) <= ELEMENTWISE_ULP
    else:
        assert torch.equal(got, reference.add_one(x))


@pytest.mark.slow
@given(data=st.data())
def test_unary_backward_fuzzed(device, data):
    shape = data.draw(shapes)
    drawn = [data.draw(layouts(shape)) for _ in range(2)]
    one_layout = data.draw(st.booleans())
    dtype = data.draw(st.sampled_from(FLOATING))
    grad, z = (build(shape, drawn[i and not one_layout], dtype, device) for i in range(2))
    (got,) = check_metadata(torch.ops.my_ops.d_sigmoid_backward, [grad, z])
    assert got.stride() == (grad + z).stride()
    want = torch.ops.my_ops.d_sigmoid_backward(grad.contiguous(), z.contiguous())
    assert torch.equal(got, want)


@pytest.mark.slow
@given(data=st.data())
def test_custom_add_fuzzed(device, data):
    shape = data.draw(shapes)
    dtypes = st.sampled_from([*FLOATING, *SIGNED_OR_BYTE])
    if data.draw(st.booleans()):  # one shape, and perhaps one layout
        drawn = [data.draw(layouts(shape)) for _ in range(2)]
        one_layout = data.draw(st.booleans())
        pair = [(shape, drawn[i and not one_layout]) for i in range(2)]
    else:
        pair = []
        for _ in range(2):
            ones = [data.draw(st.booleans()) for _ in shape]
            own = tuple(1 if one else size for size, one in zip(shape, ones, strict=True))
            own = own[data.draw(st.integers(0, len(own))) :]
            pair.append((own, data.draw(layouts(own))))
    first = data.draw(dtypes)
    second = first if data.draw(st.booleans()) else data.draw(dtypes)
    tensors = [build(*own, dtype, device) for own, dtype in zip(pair, (first, second), strict=True)]
    (got,) = check_metadata(my_ops.custom_add, tensors)
    a, b = tensors
    like = a + b
    assert (got.dtype, got.shape, got.stride()) == (like.dtype, like.shape, like.stride())
    if got.dtype.is_floating_point:
        a, b = (t.to(got.dtype).double().cpu() for t in tensors)
        assert ulps(got.cpu(), reference.custom_add(a, b), scale=a + b) <= ELEMENTWISE_ULP
    else:
        assert torch.equal(got, reference.custom_add(a, b))


@pytest.mark.slow
@given(data=st.data())
def test_gemm_fuzzed(device, data):
    m, k, n = (data.draw(st.integers(0, 6)) for _ in range(3))
    batch = data.draw(st.integers(0, 3))
    batches = st.sampled_from([(), (1,), (batch,)])
    shapes = (*data.draw(batches), m, k), (*data.draw(batches), k, n)
    dtype = data.draw(st.sampled_from(FLOATING))
    a, b = (build(shape, data.draw(layouts(shape)), dtype, device) for shape in shapes)
    (got,) = check_metadata(my_ops.gemm, [a, b])
    assert gemm_excess(got, a, b) <= 1
    out = torch.full_like(got, float("nan"))
    my_ops.gemm(a, b, out=out)
    assert torch.equal(out, got)


@pytest.mark.slow
@given(data=st.data())
def test_linear_fuzzed(device, data):
    leading = data.draw(st.lists(st.integers(0, 3), max_size=3).map(tuple))
    k, n = (data.draw(st.integers(0, 6)) for _ in range(2))
    dtype = data.draw(st.sampled_from(FLOATING))
    shapes = [(*leading, k), (n, k), (n,)][: data.draw(st.integers(2, 3))]
    tensors = [build(shape, data.draw(layouts(shape)), dtype, device) for shape in shapes]
    activation = data.draw(st.sampled_from([None, "relu"]))
    (got,) = check_metadata(lambda *ts: my_ops.linear(*ts, activation=activation), tensors)
    want = reference.linear(*(t.double() for t in tensors), activation=activation)
    # Quarters of small integers: sums are exact, so only the stored result is rounded.
    assert torch.equal(got, want.to(dtype))


@pytest.mark.slow
@given(data=st.data())
def test_lltm_fuzzed(device, data):
    steps, batch, inputs, hidden = (data.draw(st.integers(0, 4)) for _ in range(4))
    dtype = data.draw(st.sampled_from(FLOATING))
    shapes = [(steps, batch, inputs), (batch, hidden), (batch, hidden)]
    shapes += [
        (3 * hidden, hidden + inputs),
        data.draw(st.sampled_from([(3 * hidden,), (1, 3 * hidden)])),
    ]
    tensors = [build(shape, data.draw(layouts(shape)), dtype, device) for shape in shapes]
    got = check_metadata(my_ops.lltm, tensors)
    assert not any(r.isnan().any() for r in got)
    if steps:
        input, h0, c0, weights, bias = tensors
        cell = [input[0], weights, bias, h0, c0]
        check_metadata(my_ops.lltm_cell, cell)


@pytest.mark.slow
@given(data=st.data())
def test_fill_index_fuzzed(device, data):
    height, width = data.draw(st.integers(0, 70)), data.draw(st.integers(0, 70))
    dtype = data.draw(st.sampled_from(INDEX_DTYPES))
    options = {"dtype": dtype, "device": device}
    (got,) = check_metadata(lambda: my_ops.fill_index(height, width, **options), [])
    assert torch.equal(got, reference.fill_index(height, width, **options))


# -------------------------------------------------------------------------------- repeatability


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(**named(DIFFERENTIABLE))
def test_hundred_runs_are_bitwise_equal(op, dtype, device):
    tensors = leaves(op.tensors(777, dtype, device))

    def run():
        results = op(*tensors)
        ones = [torch.ones_like(r) for r in results]
        return (*results, *torch.autograd.grad(results, tensors, ones))

    first = run()
    for _ in range(REPEATS):
        for once, again in zip(first, run(), strict=True):
            assert torch.equal(once, again)


@pytest.mark.parametrize("threads", [1, 2, 8])
@pytest.mark.parametrize(**named([op for op in DIFFERENTIABLE if "linear" not in op.name]))
def test_any_number_of_threads(op, threads):
    tensors = op.tensors(20_000, torch.float64, "cpu")
    before = torch.get_num_threads()
    want = op(*tensors)
    torch.set_num_threads(threads)
    got = op(*tensors)
    torch.set_num_threads(before)
    for ours, exact in zip(got, want, strict=True):
        torch.testing.assert_close(ours, exact, rtol=0, atol=torch.finfo(torch.float64).eps * 4)
