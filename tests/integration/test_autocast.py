"""Autocast: products run in autocast's dtype, elementwise ops in that of their arguments;
GradScaler."""

import contextlib
import gc
import threading
import weakref

import pytest
import torch
from samples import DIFFERENTIABLE, OF_TORCH, SIXTEEN_BIT, as_tuple, leaves, named
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import my_ops

OF_PRODUCTS = ("gemm", "linear", "attention", "lltm", *OF_TORCH)
PRODUCTS = [op for op in DIFFERENTIABLE if op.name.startswith(OF_PRODUCTS)]
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
    for ours, exact, leaf in zip(got, want, tensors, strict=True):
        assert ours.dtype == leaf.dtype
        assert torch.equal(ours, exact.to(leaf.dtype))


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


@pytest.mark.slow
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


# ------------------------------------------------------------------------------ casts of weights


aten = torch.ops.aten


class Casts(TorchDispatchMode):
    """Counts the casts of each tensor, and holds weak references to them."""

    def __init__(self):
        super().__init__()
        self.count, self.alive = {}, weakref.WeakSet()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function in (aten._to_copy.default, aten.to.dtype) and args[0].numel():
            self.count[id(args[0])] = self.count.get(id(args[0]), 0) + 1
            self.alive.add(result)
        return result

    def of(self, tensors):
        return [self.count.get(id(t), 0) for t in tensors]


MODES = {
    "gradient": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(**named(PRODUCTS))
def test_a_weight_is_cast_once_in_a_region(op, mode, device):
    weights = leaves(op.tensors(3, torch.float32, device))
    with MODES[mode]():  # with gradients, linear rounds its activation's input to save it
        want = op(*(w.to(torch.bfloat16) for w in weights))
    with Casts() as casts, MODES[mode]():
        for region in (1, 2):
            with torch.autocast(device, torch.bfloat16):
                for _ in range(3):
                    got = op(*weights)
                with torch.autocast(device, torch.float16):  # another cast, kept with the first
                    op(*weights)
                op(*weights)
            each = [2 if w.dtype == torch.float32 else 1 for w in weights]  # else in float16's
            assert casts.of(weights) == [region * count for count in each]
    for ours, exact in zip(got, want, strict=True):
        assert torch.equal(ours, exact)
    del got, ours
    gc.collect()
    assert not casts.alive  # nothing is kept


@pytest.mark.parametrize(**named(PRODUCTS))
def test_what_is_no_weight_is_cast_in_each_call(op, device):
    plain = op.tensors(3, torch.float32, device)
    results = tuple(t * 1 for t in leaves(plain))
    for tensors in (plain, results):
        with Casts() as casts, torch.autocast(device, torch.bfloat16):
            for _ in range(3):
                op(*tensors)
        assert casts.of(tensors) == [3 if t.dtype == torch.float32 else 0 for t in tensors]


def test_the_cache_may_be_switched_off(device):
    """torch asks for this when a CUDA graph is captured in a region."""
    x, weight = torch.randn(2, 3, device=device), torch.randn(4, 3, device=device)
    weight.requires_grad_()
    with Casts() as casts:
        with torch.autocast(device, torch.bfloat16, cache_enabled=False):
            for _ in range(3):
                my_ops.linear(x, weight)
        assert casts.of([weight]) == [3]
        with torch.autocast(device, torch.bfloat16):
            my_ops.linear(x, weight)
            with torch.autocast(device, torch.bfloat16, cache_enabled=False):
                my_ops.linear(x, weight)
        assert casts.of([weight]) == [5]
        with torch.autocast(device, torch.bfloat16):
            my_ops.linear(x, weight)
            torch.clear_autocast_cache()
            my_ops.linear(x, weight)
        assert casts.of([weight]) == [7]


def test_a_gradient_flows_through_the_one_cast(device):
    """As in torch's own casts: 16-bit gradients of all uses are summed, then cast."""
    xs = torch.randn(3, 5, 4, device=device)
    found = []
    for product in (my_ops.gemm, torch.mm):
        torch.manual_seed(1)
        weight = torch.randn(4, 3, device=device, requires_grad=True)
        with torch.autocast(device, torch.bfloat16):
            loss = sum(product(x, weight).float().square().sum() for x in xs)
        loss.backward()
        found.append((loss.detach(), weight.grad))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2.0**-7, atol=2.0**-7)
    assert found[0][1].dtype == torch.float32


def test_a_changed_weight_is_cast_again(device):
    """Changed in place, by an optimizer or a cell's reset. torch's own products use the old
    cast."""
    x = torch.randn(2, 3, device=device)
    weight = torch.randn(4, 3, device=device, requires_grad=True)
    optimizer = torch.optim.SGD([weight], 0.5)
    with torch.autocast(device, torch.bfloat16):
        for _ in range(3):
            y = my_ops.linear(x, weight)
            assert torch.equal(y, my_ops.linear(x.bfloat16(), weight.bfloat16()))
            y.float().square().sum().backward()
            optimizer.step()
        with torch.no_grad():
            weight.zero_()
        assert not my_ops.linear(x, weight).any()


@pytest.mark.parametrize("before", ["no_grad", "inference"])
def test_a_cast_without_a_gradient_serves_no_call_with_one(before, device):
    x, weight = torch.randn(2, 3, device=device), torch.randn(4, 3, device=device)
    weight.requires_grad_()
    with torch.autocast(device, torch.bfloat16):
        with MODES[before]():
            want = my_ops.linear(x, weight)
        y = my_ops.linear(x, weight)
        with MODES[before]():
            again = my_ops.linear(x, weight)
    assert torch.equal(y, want)
    assert torch.equal(again, want)
    assert not again.requires_grad
    y.sum().backward()
    assert torch.equal(weight.grad, x.bfloat16().sum(0).float().expand(4, 3))


def test_a_weight_that_is_gone_leaves_no_cast_to_the_next(device):
    x = torch.randn(2, 3, device=device)
    with torch.autocast(device, torch.bfloat16), torch.no_grad():
        for _ in range(20):
            weight = torch.randn(4, 3, device=device, requires_grad=True)
            got = my_ops.linear(x, weight)
            assert torch.equal(got, my_ops.linear(x.bfloat16(), weight.bfloat16()))
            del weight


def test_regions_of_several_threads(device):
    """The end of one thread's region must not affect another's."""
    x = torch.randn(2, 3, device=device)
    weight = torch.randn(4, 3, device=device, requires_grad=True)
    want, wrong = my_ops.linear(x.bfloat16(), weight.bfloat16()), []

    def work():
        for _ in range(50):
            with torch.autocast(device, torch.bfloat16):
                for _ in range(4):
                    y = my_ops.linear(x, weight)
                    (grad,) = torch.autograd.grad(y.sum(), weight)
                    if not torch.equal(y, want) or not grad.any():
                        wrong.append(y)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize("around", ["grad", "vmap", "compile", "trace", "checkpoint"])
def test_weights_of_a_transform_are_cast_in_it(around, device):
    """A cast made in a transform does not outlive it, and a graph has no cast from another run."""
    x = torch.randn(2, 3, device=device)
    layer = my_ops.nn.LinearActivation(3, 4, activation="silu").to(device)
    twice = torch.nn.Sequential(layer, my_ops.nn.Linear(4, 3).to(device), layer)

    def run(x):
        if around == "grad":
            return torch.func.grad(lambda x: twice(x).float().sum())(x)
        if around == "vmap":
            return torch.vmap(twice)(x)
        if around == "compile":
            return torch.compile(twice, fullgraph=True, backend="aot_eager")(x)
        if around == "trace":
            return torch.jit.trace(twice, (x,), check_trace=False)(x)
        return torch.utils.checkpoint.checkpoint(twice, x, use_reentrant=False)

    def results():
        layer.zero_grad()
        y = run(x).float()
        y.sum().backward()
        return y.detach(), layer.linear.weight.grad

    with torch.autocast(device, torch.bfloat16):
        first = results()
        twice(x)
        second = results()
    with torch.autocast(device, torch.bfloat16, cache_enabled=False):
        want = results()
    for got in (first, second):
        for ours, exact in zip(got, want, strict=True):
            torch.testing.assert_close(ours, exact, rtol=2.0**-7, atol=2.0**-7)


def test_weights_of_func_grad_leave_no_casts_in_the_region(device):
    x, weight = torch.randn(2, 3, device=device), torch.randn(4, 3, device=device)
    with Casts() as casts, torch.autocast(device, torch.bfloat16):
        for _ in range(3):
            torch.func.grad(lambda w: my_ops.linear(x, w).float().sum())(weight)
        gc.collect()
        assert casts.count
        assert not casts.alive


def test_casts_of_a_fake_mode_do_not_leave_it(device):
    x, weight = torch.randn(2, 3, device=device), torch.randn(4, 3, device=device)
    weight.requires_grad_()
    with torch.autocast(device, torch.bfloat16):
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert isinstance(my_ops.linear(x, weight), FakeTensor)
        got = my_ops.linear(x, weight)
    assert torch.equal(got, my_ops.linear(x.bfloat16(), weight.bfloat16()))


def test_a_layer_casts_its_parameters_once(device):
    """Once for all steps of a sequence, as torch.nn.LSTMCell does."""
    x = torch.randn(5, 2, 3, device=device)
    cells = my_ops.nn.LLTMCell(3, 4).to(device), torch.nn.LSTMCell(3, 4).to(device)
    linear = my_ops.nn.LinearActivation(3, 4, activation="gelu").to(device)
    with Casts() as casts, torch.autocast(device, torch.bfloat16):
        for cell in cells:
            state = None
            for step in x:
                state = cell(step, state)
        for step in x:
            linear(step)
    for layer in (*cells, linear):
        assert set(casts.of(layer.parameters())) == {1}


# ----------------------------------------------------------------------------------------- scaler


def test_training_with_a_gradient_scaler(device):
    """float16 under autocast with scaled losses: the loss falls, and an overflow skips the step."""
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
