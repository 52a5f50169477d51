"""The checks that each of the two processes of test_distributed.py runs."""

import copy
import itertools
import traceback

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from samples import DIFFERENTIABLE, as_tuple, leaves
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import my_ops
import my_ops.distributed
from my_ops._dtensor import flattenable

RANKS = 2
LIMIT = 2.0**-45  # for float64 sums in another order
OPS = {op.name: op for op in DIFFERENTIABLE}


def serve(rank, device, store, tasks, results):
    """Runs the checks that arrive, until None does."""
    torch.set_num_threads(1)
    backend = "gloo"
    if device == "cuda":
        torch.cuda.set_device(rank)
        torch.set_default_device(torch.device(device, rank))
        backend = "cpu:gloo,cuda:nccl"  # gloo for the data that a checkpoint exchanges
    dist.init_process_group(
        backend, store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS
    )
    mesh = init_device_mesh(device, (RANKS,))
    while (task := tasks.get()) is not None:
        name, args = task
        torch.manual_seed(20)
        try:
            globals()[name](mesh, *args)
            results.put(None)
        except BaseException:
            results.put(traceback.format_exc())
    dist.destroy_process_group()


def assert_close(got, want, limit=LIMIT):
    for ours, exact in zip(as_tuple(got), as_tuple(want), strict=True):
        ours = ours.full_tensor() if isinstance(ours, DTensor) else ours
        torch.testing.assert_close(ours, exact, rtol=limit, atol=limit)


def assert_second_gradients_close(got, want):
    """Relative to a tensor's largest element, as sums in another order are: an element may be a
    small difference of large terms. Inputs that differ by half an ulp move one by up to 0.41 of
    this limit, and by up to 1.3 of that of assert_close (log/sharding_bound.json)."""
    for ours, exact in zip(got, want, strict=True):
        ours = ours.full_tensor() if isinstance(ours, DTensor) else ours
        largest = exact.abs().max().item() if exact.numel() else 0.0
        torch.testing.assert_close(ours, exact, rtol=0.0, atol=LIMIT * largest)


def gradients(results, tensors, slopes):
    """The gradients, and those of the sum of their squares, if there are any."""
    first = torch.autograd.grad(results, tensors, slopes, create_graph=True)
    squares = [f.square().sum() for f in first if f.requires_grad]
    if not squares:
        return first, ()
    return first, torch.autograd.grad(sum(squares), tensors, materialize_grads=True)


def every_sharding(mesh, name, size):
    """Shards each argument in turn along each of its dimensions, or replicates all."""
    op = OPS[name]
    tensors = op.tensors(size, torch.float64, mesh.device_type)
    plain = leaves(tensors)
    want = op(*plain)
    grads = [torch.randn_like(r) for r in want]
    wanted, wanted_twice = gradients(want, plain, grads)
    whole = [Replicate()] * len(tensors)
    layouts = [whole]
    for place, tensor in enumerate(tensors):
        for d in range(tensor.dim()):
            layouts.append([*whole[:place], Shard(d), *whole[place + 1 :]])
    for layout in layouts:
        sharded = tuple(
            distribute_tensor(t, mesh, [p]).requires_grad_()
            for t, p in zip(tensors, layout, strict=True)
        )
        got = op(*sharded)
        assert_close(got, want)
        slopes = [
            distribute_tensor(g, mesh, [Replicate()]).redistribute(mesh, r.placements)
            if not any(p.is_partial() for p in r.placements)
            else distribute_tensor(g, mesh, [Replicate()])
            for g, r in zip(grads, got, strict=True)
        ]
        first, twice = gradients(got, sharded, slopes)
        assert_close(first, wanted)
        assert_second_gradients_close(twice, wanted_twice)


def placements_of_products(mesh):
    a, b = torch.randn(4, 6, dtype=torch.float64), torch.randn(6, 8, dtype=torch.float64)
    for left, right, out in [
        (Shard(0), Replicate(), Shard(0)),
        (Replicate(), Shard(1), Shard(1)),
        (Shard(1), Shard(0), Partial()),
    ]:
        args = distribute_tensor(a, mesh, [left]), distribute_tensor(b, mesh, [right])
        got = my_ops.gemm(*args)
        assert got.placements == (out,), (left, right, got.placements)
        assert_close(got, a @ b)
        if isinstance(right, Shard) or isinstance(left, Shard):
            got = my_ops.linear(args[0], args[1].mT)
            assert got.placements == (out,), (left, right, got.placements)
            assert_close(got, a @ b)
    for batches in ((2, 2), (2, 1), (1, 2)):
        factors = [t.expand(n, *t.shape) for t, n in zip((a, b), batches, strict=True)]
        args = [
            distribute_tensor(t, mesh, [Shard(0) if t.shape[0] == 2 else Replicate()])
            for t in factors
        ]
        got = my_ops.gemm(*args)
        assert got.placements == (Shard(0),), (batches, got.placements)
        assert_close(got, torch.matmul(*factors))
    bias = distribute_tensor(torch.randn(8, dtype=torch.float64), mesh, [Replicate()])
    x, w = distribute_tensor(a, mesh, [Shard(1)]), distribute_tensor(b, mesh, [Shard(0)]).mT
    assert_close(my_ops.linear(x, w, bias), a @ b + bias.full_tensor())
    residual = torch.randn(4, 8, dtype=torch.float64)
    whole = distribute_tensor(residual, mesh, [Replicate()])
    got = my_ops.linear(x, w, residual=whole)
    assert got.placements == (Partial(),)
    assert_close(got, a @ b + residual)
    gelu = torch.nn.functional.gelu(a @ b)
    assert_close(my_ops.linear(x, w, activation="gelu"), gelu)
    assert_close(my_ops.linear(x, w, activation="gelu", residual=whole), gelu + residual)


def placements_of_sums(mesh):
    """Also of tensors that are broadcast: those that lack the dimension are whole."""
    for (shape, left), (other, right), out in [
        (((4, 6), Shard(0)), ((4, 6), Shard(0)), Shard(0)),
        (((4, 6), Shard(0)), ((6,), Replicate()), Shard(0)),
        (((4, 6), Shard(1)), ((6,), Shard(0)), Shard(1)),
        (((4, 1), Shard(0)), ((1, 6), Replicate()), Shard(0)),
        (((4, 1), Replicate()), ((2, 1, 6), Shard(2)), Shard(2)),
    ]:
        a, b = torch.randn(shape, dtype=torch.float64), torch.randn(other, dtype=torch.float64)
        got = my_ops.custom_add(
            distribute_tensor(a, mesh, [left]), distribute_tensor(b, mesh, [right])
        )
        assert got.placements == (out,), (shape, other, got.placements)
        assert_close(got, a + b + 1)


def products_of_two_types(mesh):
    """Of small integers, so that sums in another order are the same."""
    for dtype, other in itertools.permutations((torch.float32, torch.bfloat16)):
        a = torch.randint(-4, 5, (4, 6)).to(dtype).requires_grad_()
        weight = torch.randint(-4, 5, (8, 6)).to(other).requires_grad_()
        grad = torch.randint(-2, 3, (4, 8)).float()
        want = a.float() @ weight.mT.float()
        wanted = torch.autograd.grad(want, (a, weight), grad)
        layouts = itertools.product((Shard(0), Shard(1), Replicate()), repeat=2)
        for places, product in itertools.product(layouts, ("gemm", "linear")):
            args = [
                distribute_tensor(t.detach(), mesh, [place]).requires_grad_()
                for t, place in zip((a, weight), places, strict=True)
            ]
            got = my_ops.linear(*args) if product == "linear" else my_ops.gemm(args[0], args[1].mT)
            slope = distribute_tensor(grad, mesh, [Replicate()])
            grads = torch.autograd.grad(got, args, slope)
            for ours, exact in zip((got, *grads), (want, *wanted), strict=True):
                assert ours.dtype == exact.dtype
                assert torch.equal(ours.full_tensor(), exact), (places, product)


def heads_of_attention(mesh):
    """Sharded batches and heads stay so, in forward and backward, beside a bias of one for all."""
    ops = torch.ops.my_ops
    query, key, value = (torch.randn(2, 4, n, 6, dtype=torch.float64) for n in (3, 5, 5))
    for shape in (None, (2, 4, 3, 5), (1, 4, 1, 5), (2, 1, 3, 5)):
        bias = None if shape is None else torch.randn(shape, dtype=torch.float64)
        plain = (query, key, value, bias)
        out, logsumexp = ops.attention_forward(*plain)
        grad = torch.randn_like(out)
        for d, needs_bias in itertools.product((0, 1), {False, bias is not None}):
            place = Shard(d)

            def sharded(t, place=place):
                one = t.shape[place.dim] == 1
                return distribute_tensor(t, mesh, [Replicate() if one else place])

            args = [None if t is None else sharded(t) for t in plain]
            got = ops.attention_forward(*args)
            backward = (*args, *got, False, None, needs_bias)
            grads = ops.attention_backward(sharded(grad), *backward)
            want = ops.attention_backward(grad, *plain, out, logsumexp, False, None, needs_bias)
            assert (grads[3] is None) == (want[3] is None) == (not needs_bias)
            for ours, exact in zip((*got, *grads), (out, logsumexp, *want), strict=True):
                if exact is not None:
                    assert ours.placements == (place,)
                    assert_close(ours, exact)
            assert_close(ops.attention(*args), out)


def recurrent_batches(mesh):
    """A sharded batch stays sharded, in forward and backward."""
    for name, places in (
        ("lltm", [Shard(1), Shard(0), Shard(0), Replicate(), Replicate()]),
        ("lltm_cell", [Shard(0), Replicate(), Replicate(), Shard(0), Shard(0)]),
        ("lstm", [Shard(1), Shard(0), Shard(0), *[Replicate()] * 4]),
        ("lstm_cell", [Shard(0), *[Replicate()] * 4, Shard(0), Shard(0)]),
        ("gru", [Shard(1), Shard(0), *[Replicate()] * 4]),
        ("gru_cell", [Shard(0), *[Replicate()] * 4, Shard(0)]),
    ):
        op = OPS[name]
        tensors = op.tensors(4, torch.float64, mesh.device_type)
        args = tuple(
            distribute_tensor(t, mesh, [p]).requires_grad_()
            for t, p in zip(tensors, places, strict=True)
        )
        got = op(*args)
        with torch.no_grad():  # the dispatcher calls another op
            inferred = op(*args)
        for results in (got, inferred):
            assert all(r.placements[0].is_shard() for r in results)
            assert_close(results, op(*tensors))
        plain = leaves(tensors)
        want = op(*plain)
        for used in (slice(1), slice(None)):
            assert_close(
                torch.autograd.grad(sum(r.sum() for r in got[used]), args, retain_graph=True),
                torch.autograd.grad(sum(r.sum() for r in want[used]), plain, retain_graph=True),
            )

    x = torch.randn(5, 4, 3, dtype=torch.float64)
    for layer, input, place in (
        (my_ops.nn.LLTM(3, 2, num_layers=2), x, Shard(1)),
        (my_ops.nn.LLTM(3, 2, bias=False), x, Shard(1)),
        (my_ops.nn.LLTMCell(3, 2), x[0], Shard(0)),
        (my_ops.nn.LLTMCell(3, 2, bias=False), x[0], Shard(0)),
        (my_ops.nn.LSTM(3, 2, num_layers=2, bidirectional=True), x, Shard(1)),
        (my_ops.nn.GRU(3, 2, bias=False), x, Shard(1)),
        (my_ops.nn.LSTMCell(3, 2), x[0], Shard(0)),
    ):
        layer = layer.double()
        want = layer(input)[0]
        distribute_module(layer, mesh)
        got = layer(distribute_tensor(input, mesh, [place]))[0]
        assert got.placements == (place,)
        assert_close(got, want)


def rows_that_are_flattened(mesh):
    """Evenly sharded rows are not gathered, and sharded columns stay where they are."""
    for shape, place, kept in [
        ((4, 3, 2), Shard(0), Shard(0)),
        ((3, 4, 2), Shard(1), Shard(0)),
        ((3, 4, 2), Shard(0), Replicate()),
        ((4, 3, 2), Shard(1), Replicate()),
        ((4, 3, 2), Shard(2), Shard(2)),
    ]:
        t = torch.randn(shape, dtype=torch.float64)
        (got,) = flattenable([distribute_tensor(t, mesh, [place])])
        assert got.placements == (kept,), (shape, place, got.placements)
        assert_close(got, t.movedim(place.dim if place.dim < 2 else 0, 0))


class Model(torch.nn.Module):
    def __init__(self, dtype=torch.float64, bias=True):
        super().__init__()
        self.layer = my_ops.nn.LLTM(4, 6, 2, bias, dtype=dtype)
        self.lstm = my_ops.nn.LSTM(6, 6, bias=bias, dtype=dtype)
        self.gru = my_ops.nn.GRU(6, 6, bias=bias, dtype=dtype)
        self.up = my_ops.nn.LinearActivation(6, 8, bias, activation="gelu", dtype=dtype)
        self.down = my_ops.nn.Linear(8, 4, bias, dtype=dtype)

    def forward(self, x):
        for layer in (self.layer, self.lstm, self.gru):
            x = layer(x)[0]
        return self.down(self.up(x))


def batch(dtype=torch.float64):
    return torch.randn(5, 4, 4, dtype=dtype)  # steps, batch, features


def mine(mesh, x):
    return x.chunk(RANKS, 1)[mesh.get_rank()]


def trained(model, inputs, steps=3):
    # Grouped steps, the default on a GPU, take no mixture of sharded and whole parameters.
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, foreach=False)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def whole_parameters(model):
    return tuple(
        p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()
    )


def column_then_row(mesh):
    model, x = Model(), batch()
    plain = copy.deepcopy(model)
    parallelize_module(model, mesh, {"up.linear": ColwiseParallel(), "down": RowwiseParallel()})
    assert model.up.linear.weight.placements == (Shard(0),)
    assert model.down.weight.placements == (Shard(1),)
    assert_close(model(x), plain(x))
    assert_close(trained(model, x), trained(plain, x))
    assert_close(whole_parameters(model), whole_parameters(plain))


def data_parallel(mesh, compiled):
    model, x = Model(), batch()
    plain = copy.deepcopy(model)
    parallel = DistributedDataParallel(model)
    if compiled:
        parallel = torch.compile(parallel, backend="aot_eager")
    losses = trained(parallel, mine(mesh, x))
    dist.all_reduce(losses)
    assert_close(losses / RANKS, trained(plain, x))
    assert_close(whole_parameters(model), whole_parameters(plain))


def fully_sharded(mesh, mixed, by_cell, bias):
    """From parameters without values, one layer or one of its cells at a time."""
    dtype = torch.float32 if mixed else torch.float64
    plain, x = Model(dtype, bias), batch(dtype)
    with torch.device("meta"):
        model = Model(dtype, bias)
    options = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)} if mixed else {}
    layers = (*model.layer.cells, model.up.linear) if by_cell else (model.layer, model.up)
    for part in (*layers, model.lstm, model.gru, model.down, model):
        fully_shard(part, mesh=mesh, **options)
    model.to_empty(device=mesh.device_type)
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, plain.state_dict(), options=options)
    losses = trained(model, mine(mesh, x))
    dist.all_reduce(losses)
    limit = 2.0**-5 if mixed else LIMIT  # a few roundings to bfloat16's 8 bits
    assert_close((losses / RANKS).to(dtype), trained(plain, x), limit)
    assert_close(whole_parameters(model), whole_parameters(plain), limit)
    assert all(p.dtype == dtype for p in model.parameters())


def saved_and_loaded(mesh, folder):
    """A checkpoint of sharded parameters, loaded into a model with another sharding."""
    model, x = Model(), batch()
    fully_shard(model, mesh=mesh)
    want = whole_parameters(model)
    checkpoint.save({"model": get_model_state_dict(model)}, checkpoint_id=folder)
    torch.manual_seed(99)
    for shard in (True, False):
        fresh = Model()
        if shard:
            parallelize_module(
                fresh, mesh, {"up.linear": ColwiseParallel(), "down": RowwiseParallel()}
            )
        state = {"model": get_model_state_dict(fresh)}
        checkpoint.load(state, checkpoint_id=folder)
        set_model_state_dict(fresh, state["model"])
        for ours, exact in itertools.zip_longest(whole_parameters(fresh), want):
            assert torch.equal(ours, exact)
        assert_close(fresh(x), model(x))
