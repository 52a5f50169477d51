"""Autocast: products in the ambient dtype, elementwise ops in their arguments'; GradScaler."""

import pytest
import torch
from samples import DIFFERENTIABLE, SIXTEEN_BIT, as_tuple, leaves, named

import my_ops

PRODUCTS = [op for op in DIFFERENTIABLE if op.name.startswith(("gemm", "linear", "lltm"))]
ELEMENTWISE = [op for op in DIFFERENTIABLE if op not in PRODUCTS]


@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
@pytest.mark.parametrize(**named(PRODUCTS))
def test_products_take_the_ambient_dtype(op, dtype, device):
    tensors = op.tensors(3, torch.float32, device)
    with torch.autocast(device, dtype):
        got = op(*tensors)
        on_dispatcher = as_tuple(op.overload(*op.arguments(*tensors)))
    want = op(*(t.to(dtype) for t in tensors))
    for ours, other, exact in zip(got, on_dispatcher, want, strict=True):
        assert ours.dtype == dtype
        assert torch.equal(ours, exact)
        assert torch.equal(other, exact)


@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
@pytest.mark.parametrize(**named(PRODUCTS))
def test_gradients_have_the_dtype_of_the_leaves(op, dtype, device):
    tensors = leaves(op.tensors(3, torch.float32, device))
    with torch.autocast(device, dtype):
        results = op(*tensors)
    grads = [torch.randn_like(r) for r in results]
    got = torch.autograd.grad(results, tensors, grads)
    lower = leaves(tuple(t.to(dtype) for t in tensors))
    want = torch.autograd.grad(op(*lower), lower, grads)
    for ours, exact in zip(got, want, strict=True):
        assert ours.dtype == torch.float32
        assert torch.equal(ours, exact.float())


@pytest.mark.parametrize(**named(PRODUCTS))
def test_float64_and_disabled_autocast_change_nothing(op, device):
    double = op.tensors(2, torch.float64, device)
    single = op.tensors(2, torch.float32, device)
    with torch.autocast(device, torch.bfloat16):
        assert all(r.dtype == torch.float64 for r in op(*double))
        with torch.autocast(device, enabled=False):
            assert all(r.dtype == torch.float32 for r in op(*single))


@pytest.mark.parametrize(**named(ELEMENTWISE))
def test_elementwise_ops_follow_their_arguments(op, device):
    tensors = op.tensors(2, torch.float32, device)
    with torch.autocast(device, torch.bfloat16):
        assert all(r.dtype == torch.float32 for r in op(*tensors))


@pytest.mark.parametrize(
    **named(
        [op for op in PRODUCTS if op.name in ("gemm", "linear-gelu", "linear-residual", "lltm")]
    )
)
def test_under_vmap_and_compile(op, device):
    tensors = op.tensors(3, torch.float32, device)
    want = op(*(t.bfloat16() for t in tensors))
    compiled = torch.compile(lambda *ts: op(*ts), fullgraph=True, backend="aot_eager")
    with torch.autocast(device, torch.bfloat16):
        compiled_got = compiled(*tensors)
        mapped = torch.vmap(op)(*(t.expand(2, *t.shape) for t in tensors))
    limit = 4 * torch.finfo(torch.bfloat16).eps  # rules round where fused kernels do not
    for got, rows, exact in zip(compiled_got, mapped, want, strict=True):
        assert got.dtype == rows.dtype == torch.bfloat16
        assert torch.equal(got, exact)
        torch.testing.assert_close(rows[1], exact, rtol=limit, atol=limit)


def test_training_with_a_gradient_scaler(device):
    """float16 under autocast with scaled losses: the loss falls, an overflow skips the step."""
    model = torch.nn.Sequential(
        my_ops.nn.LinearActivation(8, 16, activation="relu"), my_ops.nn.Linear(16, 1)
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10)
    x = torch.randn(64, 8, device=device)
    target = x.sum(1, keepdim=True)

    def step(target):
        optimizer.zero_grad()
        with torch.autocast(device, torch.float16):
            loss = torch.nn.functional.mse_loss(model(x).float(), target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    losses = [step(target) for _ in range(60)]
    assert losses[-1] < 0.2 * losses[0]
    before, scale = [p.clone() for p in model.parameters()], scaler.get_scale()
    step(target * float("inf"))
    assert scaler.get_scale() < scale
    assert all(torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))
