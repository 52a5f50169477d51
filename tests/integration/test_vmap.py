"""torch.vmap of every op, with our rules: any arguments over any dimension, nested, in
transforms."""

import functools
import itertools
import warnings

import pytest
import samples
import torch
import torch.nn.functional as F
from samples import DIFFERENTIABLE, SIXTEEN_BIT, as_tuple, lltm_inputs, named

import my_ops

SMOOTH = [op for op in DIFFERENTIABLE if op.smooth]
SIZE = 3
assert_close = functools.partial(samples.assert_close, limit=2.0**-47)


@pytest.fixture(autouse=True)
def no_loops():
    """torch warns if it has no rule and loops."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*performance drop.*")
        warnings.filterwarnings("error", message=".*batching rule.*")
        yield


def mapped(tensors, in_dims):
    """The tensors; those with a dim are repeated along it with other values."""
    return tuple(
        t if d is None else torch.stack([t, t + 0.5, -t], d)
        for t, d in zip(tensors, in_dims, strict=True)
    )


def looped(function, in_dims, tensors):
    rows = [
        as_tuple(
            function(*(t if d is None else t.select(d, i)
                       for t, d in zip(tensors, in_dims, strict=True)))
        )
        for i in range(SIZE)
    ]  # fmt: skip
    return tuple(torch.stack(results) for results in zip(*rows, strict=True))


def tensors_of(op, device, dtype=torch.float64):
    return op.tensors(2, dtype, device)


@pytest.mark.parametrize(**named(DIFFERENTIABLE))
def test_every_choice_of_arguments(op, device):
    tensors = tensors_of(op, device)
    for choice in itertools.product([None, 0, -1], repeat=len(tensors)):
        if len(tensors) > 3:  # each argument alone, all, and all but one are enough
            alone = sum(d is not None for d in choice)
            if alone not in (1, len(tensors) - 1, len(tensors)) or len({*choice} - {None}) != 1:
                continue
        if any(d is not None for d in choice):
            args = mapped(tensors, choice)
            got = torch.vmap(op, in_dims=choice)(*args)
            assert_close(got, looped(op, choice, args))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(**named(DIFFERENTIABLE))
def test_dtypes(op, dtype, device):
    tensors = tensors_of(op, device, dtype)
    args = mapped(tensors, (0,) * len(tensors))
    got = torch.vmap(op)(*args)
    limit = 4 * torch.finfo(dtype).eps
    for ours, exact in zip(got, looped(op, (0,) * len(tensors), args), strict=True):
        assert ours.dtype == exact.dtype
        torch.testing.assert_close(ours, exact, rtol=limit, atol=limit)


@pytest.mark.parametrize(**named(DIFFERENTIABLE))
def test_nested(op, device):
    tensors = tensors_of(op, device)
    dims = (0,) * len(tensors)
    args = mapped(mapped(tensors, dims), dims)
    got = torch.vmap(torch.vmap(op))(*args)
    assert_close(got, looped(lambda *ts: looped(op, dims, ts), dims, args))


def loss_of(function):
    return lambda *ts: sum(r.sin().sum() for r in as_tuple(function(*ts)))


@pytest.mark.parametrize(**named(SMOOTH))
def test_gradient_per_sample(op, device):
    """vmap of grad, with shared weights and with each sample's own."""
    tensors = tensors_of(op, device)
    places = tuple(range(len(tensors)))
    for in_dims in ((0,) * len(tensors), (0, *[None] * (len(tensors) - 1))):
        args = mapped(tensors, in_dims)
        got, want = (
            torch.vmap(torch.func.grad(loss_of(f), places), in_dims=in_dims)(*args)
            for f in (op, op.reference)
        )
        assert_close(got, want)


@pytest.mark.parametrize(**named(SMOOTH))
def test_gradient_through_vmap(op, device):
    tensors = tensors_of(op, device)
    dims, places = (0,) * len(tensors), tuple(range(len(tensors)))
    args = mapped(tensors, dims)
    got, want = (torch.func.grad(loss_of(torch.vmap(f)), places)(*args) for f in (op, op.reference))
    assert_close(got, want)


@pytest.mark.parametrize(**named(SMOOTH))
def test_jacrev(op, device):
    tensors = tensors_of(op, device)
    got, want = (torch.func.jacrev(lambda x, f=f: as_tuple(f(x, *tensors[1:])))(tensors[0])
                 for f in (op, op.reference))  # fmt: skip
    assert_close(got, want)


@pytest.mark.parametrize(**named(SMOOTH))
def test_jacfwd_and_second_derivatives(op, device):
    tensors = tensors_of(op, device)
    places = tuple(range(len(tensors)))

    def twice_reverse(function, places):
        return torch.func.jacrev(torch.func.grad(function, places), places)

    for transform in (torch.func.jacfwd, torch.func.hessian, twice_reverse):
        got, want = (transform(loss_of(f), places)(*tensors) for f in (op, op.reference))
        flat = [torch.utils._pytree.tree_leaves(t) for t in (got, want)]
        assert_close(tuple(flat[0]), tuple(flat[1]))


@pytest.mark.slow
@pytest.mark.parametrize(**named(SMOOTH))
def test_vjp_without_a_graph(op, device):
    """Under no_grad backward runs the fused ops; with each sample's own weights, step by step."""
    tensors = tensors_of(op, device)

    def pulled(function):
        def run(*ts):
            results, pull = torch.func.vjp(lambda *inner: as_tuple(function(*inner)), *ts)
            return pull(tuple(torch.cos(r.detach()) for r in results))

        return run

    for in_dims in itertools.product([None, 0], repeat=len(tensors)):
        if any(d is not None for d in in_dims):
            args = mapped(tensors, in_dims)
            with torch.no_grad():
                got = torch.vmap(pulled(op), in_dims=in_dims)(*args)
            assert_close(got, torch.vmap(pulled(op.reference), in_dims=in_dims)(*args))


@pytest.mark.parametrize("shapes", [((1, 2, 4), (2, 4, 3)), ((2, 2, 4), (1, 4, 3))])
@pytest.mark.parametrize("in_dims", [(0, 0), (0, None), (None, 0)])
def test_gemm_of_one_matrix_beside_a_batch(in_dims, shapes, device):
    args = mapped([torch.randn(s, dtype=torch.float64, device=device) for s in shapes], in_dims)
    got = torch.vmap(my_ops.gemm, in_dims=in_dims)(*args)
    assert_close(got, looped(my_ops.gemm, in_dims, args))


@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
def test_own_weights_keep_the_state_of_16_bit_types_in_float32(dtype, device):
    """Every step adds the same small number, which a 16-bit cell state would lose."""
    steps, hidden = 512, 2
    weights = torch.zeros(SIZE, 3 * hidden, hidden + 1, dtype=dtype, device=device)
    bias = torch.tensor([0.0, 0.0, 2.0**-9], device=device).repeat_interleave(hidden).to(dtype)
    zeros = torch.zeros(1, hidden, dtype=dtype, device=device)
    input = torch.zeros(steps, 1, 1, dtype=dtype, device=device)
    run = torch.vmap(lambda w: my_ops.lltm(input, zeros, zeros + 1, w, bias))
    assert torch.equal(run(weights)[2], (zeros + 1 + steps * 2.0**-10).expand(SIZE, 1, hidden))


@pytest.mark.parametrize("weights", [0, None])
def test_no_steps(weights, device):
    """For layers with their own weights, and with shared ones."""
    in_dims = (0, 0, 0, weights, weights)
    args = mapped(lltm_inputs(0, 2, 3, 4, torch.float64, device), in_dims)
    states = args[1:3]
    got = torch.vmap(my_ops.lltm, in_dims=in_dims)(*args)
    assert_close(got, (states[0].new_empty(SIZE, 0, 2, 4), *states))
    grad = torch.func.grad(loss_of(my_ops.lltm), (1, 2))
    with torch.no_grad():
        assert_close(torch.vmap(grad, in_dims=in_dims)(*args), tuple(t.cos() for t in states))


@pytest.mark.parametrize("in_dims", list(itertools.product([None, 0], repeat=2))[1:])
@pytest.mark.parametrize("name", ["gemm", "linear"])
def test_precision_reaches_the_products(name, in_dims, device):
    seen = []

    class Record(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            if op.namespace == "my_ops":
                seen.append("high" in args)
            return op(*args, **(kwargs or {}))

    def run(a, b):
        if name == "gemm":
            return torch.ops.my_ops.gemm(a, b, "high")
        return torch.ops.my_ops.linear(a, b, None, "gelu", None, "high")

    square = torch.randn(4, 4, device=device)
    args = mapped([square, square], in_dims)
    with Record():
        torch.vmap(run, in_dims=in_dims)(*args)
    assert seen == [True]


IN_DIMS = [(0, 0), (0, None), (None, 0)]


def made(shapes, in_dims, size, device, dtypes=(torch.float32,) * 2):
    """Random tensors of these shapes; those with a dim 0 have ``size`` of them."""
    for shape, dim, dtype in zip(shapes, in_dims, dtypes, strict=True):
        yield torch.randn(shape if dim is None else (size, *shape), device=device).to(dtype)


@pytest.mark.parametrize("in_dims", IN_DIMS)
@pytest.mark.parametrize("size, m, k, n", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)])
def test_products_without_elements(size, m, k, n, in_dims, device):
    for ours, theirs, shapes in (
        (my_ops.gemm, torch.matmul, [(m, k), (k, n)]),
        (my_ops.linear, F.linear, [(m, k), (n, k)]),
        (my_ops.linear, F.linear, [(2, m, k), (n, k)]),
    ):
        args = tuple(made(shapes, in_dims, size, device))
        got, want = (torch.vmap(f, in_dims=in_dims)(*args) for f in (ours, theirs))
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("in_dims", IN_DIMS)
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.int64), (torch.float32, torch.float64)])
def test_sums_of_no_samples(dtypes, in_dims, device):
    args = tuple(made([(2,), (2,)], in_dims, 0, device, dtypes))
    got = torch.vmap(my_ops.custom_add, in_dims=in_dims)(*args)
    assert (got.shape, got.dtype) == ((0, 2), torch.result_type(*args))


@pytest.mark.parametrize("weights", [0, None])
def test_layers_of_no_samples(weights, device):
    in_dims = (0, 0, 0, weights, weights)
    args = [t if d is None else t.new_empty(0, *t.shape)
            for t, d in zip(lltm_inputs(5, 2, 3, 4, torch.float64, device), in_dims, strict=True)
            ]  # fmt: skip
    shapes = [t.shape for t in torch.vmap(my_ops.lltm, in_dims=in_dims)(*args)]
    assert shapes == [(0, 5, 2, 4), (0, 2, 4), (0, 2, 4)]
    step = (args[0][:, 0], *args[3:], *args[1:3])
    in_dims = (0, weights, weights, 0, 0)
    assert [t.shape for t in torch.vmap(my_ops.lltm_cell, in_dims=in_dims)(*step)] == shapes[1:]


@pytest.mark.parametrize("in_dims", IN_DIMS)
def test_autocast_casts_before_the_checks(in_dims, device):
    """Without it, two 16-bit types do not mix."""
    args = tuple(made([(2, 3), (4, 3)], in_dims, SIZE, device, SIXTEEN_BIT))
    bias = torch.randn(SIZE, 4, device=device)
    with torch.autocast(device, torch.bfloat16):
        got = torch.vmap(my_ops.linear, in_dims=(*in_dims, 0))(*args, bias)
        assert got.dtype == torch.bfloat16
        want = looped(my_ops.linear, (*in_dims, 0), (*args, bias))
        torch.testing.assert_close(got, want[0], rtol=2.0**-7, atol=2.0**-7)
        with pytest.raises(RuntimeError, match="linear: bias must have the dtype of the result"):
            torch.vmap(my_ops.linear, in_dims=(*in_dims, 0))(*args, bias.double())


def test_numbers_beside_tensors_do_not_promote(device):
    a = torch.ones(3, 2, dtype=torch.bfloat16, device=device)
    b = torch.ones(3, dtype=torch.float32, device=device)  # a number for each sample
    got = torch.vmap(my_ops.custom_add)(a, b)
    assert got.dtype == torch.vmap(torch.add)(a, b).dtype == torch.bfloat16


def test_gemm_folds_the_batch_into_one_call(device):
    calls = []

    class Record(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            if op.namespace == "my_ops":
                calls.append([tuple(t.shape) for t in args[:2]])
            return op(*args, **(kwargs or {}))

    a, b = torch.randn(5, 2, 4, device=device), torch.randn(4, 3, device=device)
    with Record():
        torch.vmap(my_ops.gemm, in_dims=(0, None))(a, b)
        torch.vmap(my_ops.linear, in_dims=(0, None))(a, b.mT)
    assert calls == [[(10, 4), (4, 3)], [(5, 2, 4), (3, 4)]]


@pytest.mark.parametrize("kind", [my_ops.nn.LLTM, my_ops.nn.LLTMCell, my_ops.nn.Linear])
def test_ensemble_of_layers(kind, device):
    """torch.func.stack_module_state: each member has its own weights."""
    members = [kind(3, 4).to(device) for _ in range(SIZE)]
    params, buffers = torch.func.stack_module_state(members)
    input = torch.randn(5, 2, 3, device=device) if kind is my_ops.nn.LLTM else torch.randn(
        2, 3, device=device
    )  # fmt: skip

    def run(p, b):
        out = torch.func.functional_call(members[0], (p, b), input)
        return out if isinstance(out, torch.Tensor) else out[0]

    def run_one(member):
        out = member(input)
        return out if isinstance(out, torch.Tensor) else out[0]

    got = torch.vmap(run)(params, buffers)
    want = torch.stack([run_one(m) for m in members])
    torch.testing.assert_close(got, want, rtol=2.0**-22, atol=2.0**-22)
