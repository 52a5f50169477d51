"""Checks of the switch itself, which test_fast_fp32.py runs with those of fast_fp32_checks.py."""

import threading

import pytest
import torch
from fast_fp32_checks import (
    BATCH,
    DEVICE,
    KEY,
    LIMIT,
    MODULE,
    ON_CUDA,
    TWO_GPUS,
    K,
    M,
    N,
    assert_accurate,
    counts,
    gains,  # noqa: F401
    randn,
    switched_on,  # noqa: F401
    takes,
)
from samples import NO_INDUCTOR
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import my_ops
from my_ops import _fast_fp32


def is_on():
    a = torch.ones(M, K, device=DEVICE)
    before = counts()
    torch.mm(a, a.new_ones(K, N))
    on = counts() != before
    assert on == my_ops.fast_fp32.report().on
    return on


def test_calls_and_blocks():
    assert is_on()
    my_ops.fast_fp32(False)
    assert not is_on()
    my_ops.fast_fp32()
    assert is_on()
    with my_ops.fast_fp32(False):
        assert not is_on()
        with my_ops.fast_fp32(True):
            assert is_on()
            my_ops.fast_fp32(False)
            assert not is_on()
        assert not is_on()
    assert is_on()


def test_a_decorator_switches_around_every_call():
    my_ops.fast_fp32(False)

    @my_ops.fast_fp32()
    def inside(x, *, y):
        return is_on(), x, y

    assert not is_on()
    assert inside(1, y=2) == (True, 1, 2)
    assert not is_on()
    assert inside.__name__ == "inside"
    my_ops.fast_fp32()


def test_an_exception_ends_the_block():
    with pytest.raises(KeyError), my_ops.fast_fp32(False):
        raise KeyError
    assert is_on()


def test_threads():
    a, b = randn(M, K), randn(K, N)
    failures = []

    def work():
        try:
            for _ in range(5):
                assert_accurate(torch.mm(a, b), a, b)
                assert_accurate(torch.addmm(b[0], a, b), a, b, b[0].double())
        except BaseException as error:
            failures.append(error)

    with takes(*["mm", "addmm"] * 20):
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures


@pytest.fixture
def mesh(tmp_path):
    """Of one process."""
    backend, store = "gloo" if MODULE else "nccl", f"file://{tmp_path}/store"
    distributed.init_process_group(backend, init_method=store, rank=0, world_size=1)
    yield init_device_mesh(DEVICE, (1,))
    distributed.destroy_process_group()


@pytest.mark.parametrize("sharded", [False, True])
def test_data_parallel(sharded, mesh):
    model = torch.nn.Linear(K, N, device=DEVICE)
    weight, bias = model.weight.detach().clone(), model.bias.detach().clone()
    x, grad = randn(M, K), randn(M, N)
    parallel = fully_shard(model, mesh=mesh) if sharded else DistributedDataParallel(model)
    with takes("addmm", "mm"):
        output = parallel(x)
        output.backward(grad)
    assert_accurate(output, x, weight.mT, bias.double())
    found = model.weight.grad
    assert_accurate(found.full_tensor() if sharded else found, grad.mT, x)


@pytest.mark.parametrize("op", _fast_fp32.OPS)
def test_beside_an_override_made_later(op):
    """It reaches ours through torch's boxed calls."""
    name, _, overload = op.partition(".")
    a, b = randn(BATCH, M, K), randn(BATCH, K, N)
    if "bmm" not in op.removeprefix("add"):
        a, b = a[0], b[0]
    added = (b.flatten()[:N],) if "add" in op else ()
    ours = torch.library.get_kernel(f"aten::{op}", KEY)
    seen = []

    def theirs(keys, *tensors, **rest):
        if tensors[-1].dtype == torch.float32:  # not the reference
            seen.append(op)
        return ours.call_boxed(keys, *tensors, **rest)

    def check():
        more = {"out": a.new_empty(*a.shape[:-1], N)} if overload else {}
        found = getattr(torch, name)(*added, a, b, **more)
        assert_accurate(found, a, b, sum(t.double() for t in added))
        assert found._use_count() == 1

    library = torch.library.Library("aten", "IMPL")
    library.impl(op, theirs, KEY, with_keyset=True, allow_override=True)
    try:
        with takes(name):
            check()
        with my_ops.fast_fp32(False):
            check()
        assert len(seen) == 2
    finally:
        library._destroy()
    with takes(name):
        check()
    assert len(seen) == 2


@pytest.mark.skipif(**NO_INDUCTOR)
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # Inductor suggests allowing them
def test_compiled_code_asks_when_it_runs():
    def mlp(x, weight, bias):
        # Nothing follows addmm, because Inductor would turn it into a product and a sum.
        return torch.addmm(bias, torch.relu(x @ weight), weight)

    x, weight, bias = randn(M, K), randn(K, K), randn(K)
    inputs = x.double(), weight.double(), bias.double()
    size = (torch.relu(inputs[0] @ inputs[1]) + inputs[0].abs() @ inputs[1].abs()) @ inputs[1].abs()
    compiled = torch.compile(mlp)

    def check():
        error = (compiled(x, weight, bias).double() - mlp(*inputs)).abs()
        assert (error <= LIMIT * size).all()

    my_ops.fast_fp32(False)
    with takes():
        check()
    my_ops.fast_fp32()
    with takes("mm", "addmm"):
        check()
    my_ops.fast_fp32(False)
    with takes():
        check()


def test_no_switch_inside_compiled_code():
    @torch.compile(backend="eager", fullgraph=True)
    def switches(x):
        with my_ops.fast_fp32(False):
            return x + 1

    with pytest.raises(Exception, match="fast_fp32"):
        switches(torch.ones(2))


@ON_CUDA
def test_cuda_graph():
    layer = torch.nn.Linear(K, N, device=DEVICE)
    x = randn(M, K)
    with torch.no_grad():
        layer(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with takes("addmm"), torch.cuda.graph(graph):
            y = layer(x)
        x.copy_(randn(M, K))
        my_ops.fast_fp32(False)
        graph.replay()
        assert_accurate(y, x, layer.weight.T, layer.bias.double())


@ON_CUDA
@TWO_GPUS
def test_second_gpu():
    a, b = randn(M, K).to("cuda:1"), randn(K, N).to("cuda:1")
    with takes("mm", "addmm"):
        found = torch.mm(a, b)
        added = torch.addmm(b[0], a, b)
    assert found.device == a.device
    assert torch.cuda.current_device() == 0
    assert_accurate(found, a, b)
    assert_accurate(added, a, b, b[0].double())
