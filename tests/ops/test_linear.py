"""linear: values, layouts, activations, gradients. Its errors are in test_gemm.py."""

import pytest
import torch
from samples import ACTIVATIONS, FLOATING, GEMM_LIMIT
from test_gemm import LAYOUTS, SHAPES, linear_excess, matrix_layouts, normal

import my_ops
from my_ops import reference

# The training tolerance of gradients, which are sums of products of gemm results, in units of its
# limit. In float64 both sides round; with sums in another order they differ by up to 2^-45.3
# (gelu).
GRAD_LIMIT = {torch.float64: 2.0**-44, torch.float32: 2.0**-16}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", FLOATING)
def test_linear_values(dtype, shape, activation, device):
    m, k, n = shape
    x, weight = normal((m, k), dtype, device), normal((n, k), dtype, device)
    for bias in (None, normal((n,), dtype, device)):
        got = my_ops.linear(x, weight, bias, activation=activation)
        assert linear_excess(got, x, weight, bias, activation) <= 1


@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("shape", [*SHAPES, (640, 300, 640)])
@pytest.mark.parametrize("dtype", FLOATING)
def test_linear_residual(dtype, shape, activation, device):
    m, k, n = shape
    x, weight, bias = (normal(s, dtype, device) for s in ((m, k), (n, k), (n,)))
    for residual in (normal((m, n), dtype, device), normal((n, 2 * m), dtype, device)[:, ::2].T):
        got = my_ops.linear(x, weight, bias, activation=activation, residual=residual)
        assert linear_excess(got, x, weight, bias, activation, residual) <= 1


def test_linear_residual_of_a_batch(device):
    x, weight, residual = (normal(s, torch.float64, device) for s in ((2, 3, 5), (4, 5), (3, 2, 4)))
    residual = residual.transpose(0, 1)
    got = my_ops.linear(x, weight, residual=residual)
    assert linear_excess(got, x, weight, None, None, residual) <= 1


@pytest.mark.parametrize("leading", [(), (1,), (0,), (2, 3), (2, 0, 3), (2, 1, 2, 3)])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("dtype", FLOATING)
def test_linear_leading_shapes(dtype, activation, leading, device):
    x, weight = normal((*leading, 5), dtype, device), normal((4, 5), dtype, device)
    bias = normal((4,), dtype, device)
    got = my_ops.linear(x, weight, bias, activation=activation)
    assert got.is_contiguous()
    assert linear_excess(got, x, weight, bias, activation) <= 1


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("leading", [(), (6,), (0,), (2, 3), (2, 3, 2)])
@pytest.mark.parametrize("activation", [None, "gelu_tanh", "silu"])
@pytest.mark.parametrize("dtype", FLOATING)
def test_a_result_may_be_changed_in_place(dtype, activation, leading, recorded, device):
    """It is no view, which autograd would not let a program change: ``y += residual``."""
    x, weight = normal((*leading, 8), dtype, device), normal((4, 8), dtype, device)
    x.requires_grad_(recorded)
    got = torch.ops.my_ops.linear(x, weight, None, activation or "none")
    assert not got._is_view()
    before = got.detach().clone()
    got += 1
    torch.testing.assert_close(got.detach(), before + 1, rtol=0, atol=0)
    if recorded:
        (grad,) = torch.autograd.grad(got.sum(), x)
        want = my_ops.linear(x, weight, activation=activation)
        assert torch.equal(grad, torch.autograd.grad(want.sum(), x)[0])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATING)
def test_linear_layouts(dtype, layout, device):
    x = matrix_layouts(70, 33, dtype, device)[layout]
    weight = matrix_layouts(65, 33, dtype, device)[layout]
    bias = normal((130,), dtype, device)[::2]
    assert linear_excess(my_ops.linear(x, weight, bias), x, weight, bias, None) <= 1


@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("dtype", FLOATING)
def test_linear_strided_batch_rounds_once_before_the_activation(dtype, activation, device):
    x, weight = normal((5, 33, 4), dtype, device).mT, normal((65, 33), dtype, device)
    bias = normal((130,), dtype, device)[::2]
    got = my_ops.linear(x, weight, bias, activation=activation)
    assert linear_excess(got, x, weight, bias, activation) <= 1


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    "size", [(700, 320, 512), (700, 1032, 512), (700, 333, 777), (700, 333, 512)]
)
@pytest.mark.parametrize("dtype", FLOATING)
def test_linear_special_sums(dtype, size, activation, device):
    """NaN stays NaN after products that are not small, whatever applies the activation."""
    m, k, n = size
    x, weight = normal((m, k), dtype, device), normal((n, k), dtype, device)
    bias = torch.zeros(n, dtype=dtype, device=device)
    bias[0], bias[1], bias[2] = float("nan"), 1e4, -1e4
    got = my_ops.linear(x, weight, bias, activation=activation)
    want = reference.linear(x.double(), weight.double(), bias.double(), activation=activation)
    assert torch.equal(got.isnan(), want.isnan())
    assert linear_excess(got[:, 1:], x, weight[1:], bias[1:], activation) <= 1


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", FLOATING)
def test_linear_activations_far_out(dtype, activation, device):
    ends = [-1e4, -100.0, -20.0, -1.0, -0.0, 0.0, 1.0, 20.0, 100.0, 1e4]
    x = torch.tensor(ends, dtype=dtype, device=device)[:, None]
    one = torch.ones(1, 1, dtype=dtype, device=device)
    got = my_ops.linear(x, one, activation=activation)
    assert linear_excess(got, x, one, None, activation) <= 1
    limits = torch.tensor([[float("nan")], [float("inf")]], dtype=dtype, device=device)
    got = my_ops.linear(limits, one, activation=activation)
    want = reference.activate(limits, activation)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_linear_gradient_values(dtype, activation, device):
    args = [normal(s, dtype, device).requires_grad_() for s in ((9, 65), (33, 65), (33,))]
    args64 = [t.detach().double().requires_grad_() for t in args]
    grad = normal((9, 33), dtype, device)
    got = torch.autograd.grad(my_ops.linear(*args, activation=activation), args, grad)
    want = torch.autograd.grad(
        reference.linear(*args64, activation=activation), args64, grad.double()
    )
    for ours, theirs in zip(got, want, strict=True):
        limit = GRAD_LIMIT[dtype]
        torch.testing.assert_close(ours.double(), theirs, rtol=limit, atol=limit)


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu"])
@pytest.mark.parametrize("rows", [(4,), (2, 3)])
def test_linear_batched_gradients(rows, activation, device):
    """is_grads_batched runs backward under a vmap of its own kind."""
    args = [normal(s, torch.float64, device) for s in ((*rows, 5), (6, 5), (6,))]
    args = [t.requires_grad_() for t in args]
    y = my_ops.linear(*args, activation=activation)
    grads = normal((3, *rows, 6), torch.float64, device)
    got = torch.autograd.grad(y, args, grads, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(y, args, grad, retain_graph=True) for grad in grads]
    for ours, wanted in zip(got, zip(*each, strict=True), strict=True):
        torch.testing.assert_close(ours, torch.stack(wanted))


@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("sizes", [(0, 4, 5), (3, 0, 5), (3, 4, 0), (0, 0, 0)])
def test_linear_gradients_of_empty_problems(sizes, activation, device):
    m, k, n = sizes
    shapes = ((m, k), (n, k), (n,))
    x, weight, bias = (torch.ones(s, device=device, requires_grad=True) for s in shapes)
    got = my_ops.linear(x, weight, bias, activation=activation)
    grads = torch.autograd.grad(got.sum(), (x, weight, bias))
    want = reference.linear(x, weight, bias, activation=activation)
    for ours, exact in zip(grads, torch.autograd.grad(want.sum(), (x, weight, bias)), strict=True):
        limit = GEMM_LIMIT[torch.float32]
        torch.testing.assert_close(ours, exact, rtol=limit, atol=limit)


@pytest.mark.parametrize("activation", ["none", None])
def test_linear_no_activation_by_name(activation, device):
    x, weight = normal((3, 4), torch.float32, device), normal((5, 4), torch.float32, device)
    assert torch.equal(my_ops.linear(x, weight, activation=activation), my_ops.linear(x, weight))


def test_an_empty_activation_is_none_of_them():
    x = torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"^linear: activation must be none, relu, .*, got ''$"):
        my_ops.linear(x, x, activation="")
