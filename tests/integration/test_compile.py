"""Every op in TorchScript and in torch.compile, with gradients."""

import io

import pytest
import torch
from samples import DIFFERENTIABLE, NO_INDUCTOR, as_tuple, assert_close, leaves, named
from torch._dynamo.testing import CompileCounterWithBackend

import my_ops

FLOAT32_LIMIT = 2.0**-19  # for float32 sums of a few products, and for fused compiled kernels
SIZES = [7, 9, 11]  # different from all other sizes of an op: equal dynamic sizes share a symbol


def test_torchscript_of_the_ops(device):
    """A scripted function with every op is saved, loaded and differentiated."""

    def model(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.ops.my_ops.gemm(torch.ops.my_ops.add_one(x), w)
        y = torch.ops.my_ops.d_sigmoid(torch.ops.my_ops.custom_add(y, y))
        y = torch.ops.my_ops.linear(y, w, None, "gelu") + torch.ops.my_ops.fill_index(3, 3)
        return torch.ops.my_ops.round_ste(y)

    x, w = (torch.randn(3, 3, requires_grad=True) for _ in range(2))
    saved = io.BytesIO()
    torch.jit.save(torch.jit.script(model), saved)
    saved.seek(0)
    loaded = torch.jit.load(saved)
    for function in (torch.jit.script(model), loaded):
        assert torch.equal(function(x, w), model(x, w))
        got = torch.autograd.grad(function(x, w).sum(), (x, w))
        assert_close(got, torch.autograd.grad(model(x, w).sum(), (x, w)), FLOAT32_LIMIT)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit's
@pytest.mark.parametrize(**named(DIFFERENTIABLE))
def test_traced_ops(op, device):
    """With gradients: the op is in the graph, which is saved, loaded and differentiated."""
    tensors = leaves(op.tensors(2, torch.float64, device))
    traced = torch.jit.trace(lambda *ts: op(*ts), tensors, check_trace=False)
    assert op.overload.name() in {node.kind() for node in traced.graph.nodes()}
    saved = io.BytesIO()
    torch.jit.save(traced, saved)
    saved.seek(0)
    want = op(*tensors)
    got = as_tuple(torch.jit.load(saved)(*tensors))
    assert_close(got, want)
    grads = [torch.randn_like(r) for r in want]
    got = torch.autograd.grad(got, tensors, grads)
    assert_close(got, torch.autograd.grad(want, tensors, grads))


def compiled_like_eager(op, backend, device, sizes):
    compiled = torch.compile(op, fullgraph=True, dynamic=True, backend=backend)
    for size in sizes:
        tensors = leaves(op.tensors(size, torch.float32, device))
        got, want = compiled(*tensors), op(*tensors)
        assert_close(got, want, FLOAT32_LIMIT)
        grads = [torch.randn_like(r) for r in want]
        got = torch.autograd.grad(got, tensors, grads)
        assert_close(got, torch.autograd.grad(want, tensors, grads), FLOAT32_LIMIT)
    without = op.tensors(sizes[0], torch.float32, device)
    assert_close(compiled(*without), op(*without), FLOAT32_LIMIT)


@pytest.mark.slow
@pytest.mark.parametrize(**named(DIFFERENTIABLE))
def test_compile_to_one_graph(op, device):
    counter = CompileCounterWithBackend("aot_eager")
    compiled_like_eager(op, counter, device, SIZES)
    assert counter.frame_count == 2  # one for all sizes with gradients, one without


@pytest.mark.slow
@pytest.mark.skipif(**NO_INDUCTOR)
@pytest.mark.parametrize(
    **named([op for op in DIFFERENTIABLE if op.name in ("custom_add", "linear-gelu", "lltm")])
)
def test_compile_with_inductor(op, device):
    compiled_like_eager(op, "inductor", device, SIZES[:2])


@pytest.mark.slow
def test_compile_fill_index_and_out(device):
    def function(a, b, out):
        my_ops.gemm(a, b, out=out)
        index = my_ops.fill_index(a.shape[0], b.shape[1])  # on the default device
        return out + my_ops.fill_index(a.shape[0], b.shape[1], device=a.device) + index.to(a)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    for m in SIZES:
        a, b = torch.randn(m, 3, device=device), torch.randn(3, 4, device=device)
        out, want = (torch.zeros(m, 4, device=device) for _ in range(2))
        assert torch.equal(compiled(a, b, out), function(a, b, want))
        assert torch.equal(out, want)
    assert counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", [my_ops.nn.LLTM, my_ops.nn.LLTMCell])
def test_compile_a_layer_with_dynamic_batch(kind, device):
    layer = kind(3, 4).to(device)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    for batch in SIZES:
        shape = (5, batch, 3) if kind is my_ops.nn.LLTM else (batch, 3)
        input = torch.randn(shape, device=device)
        found = []
        for model in (compiled, layer):
            layer.zero_grad()
            output = model(input)[0]
            output.square().sum().backward()
            found.append((output.detach(), *(p.grad.clone() for p in layer.parameters())))
        assert_close(*found, FLOAT32_LIMIT)
    assert counter.frame_count == 1
