"""Gradients of every op: numerically, with torch.func, and for out=."""

import itertools

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from samples import ACTIVATIONS, DIFFERENTIABLE, as_tuple, assert_close, leaves, named
from torch._dynamo import compiled_autograd
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.flop_counter import FlopCounterMode

import my_ops
from my_ops import _autograd, reference

FLOAT32_LIMIT = 2.0**-19  # for float32 sums of a few products, and for fused compiled kernels

SIZES = [7, 9, 11]  # different from all other sizes of an op: equal dynamic sizes share a symbol

SMOOTH = [op for op in DIFFERENTIABLE if op.smooth]
COMPILED_BACKWARD = ("custom_add", "gemm", "linear-gelu", "lltm_cell", "lstm-lengths-reset-zoneout")


def inputs(op, device, size=2):
    return leaves(op.tensors(size, torch.float64, device))


@pytest.mark.parametrize(**named(SMOOTH))
def test_gradient(op, device):
    assert gradcheck(op, inputs(op, device), check_forward_ad=True)


@pytest.mark.parametrize(**named(SMOOTH))
def test_gradient_of_each_argument_alone(op, device):
    tensors = [t.detach() for t in inputs(op, device)]
    for place in range(len(tensors)):
        args = [t.requires_grad_(i == place) for i, t in enumerate(tensors)]
        assert gradcheck(op, args)
        results = [r for r in op(*args) if r.requires_grad]
        assert results  # every argument reaches a result


@pytest.mark.parametrize(**named(SMOOTH))
def test_gradient_of_every_choice_of_arguments(op, device):
    tensors = [t.detach() for t in inputs(op, device)]
    for choice in itertools.product([False, True], repeat=len(tensors)):
        if not any(choice):
            continue
        found = []
        for function in (op, op.reference):
            args = [t.clone().requires_grad_(c) for t, c in zip(tensors, choice, strict=True)]
            total = sum(r.sin().sum() for r in as_tuple(function(*args)))
            found.append(torch.autograd.grad(total, [t for t in args if t.requires_grad]))
        assert_close(*found)


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize(**named(SMOOTH))
def test_asking_for_every_choice_of_gradients(op, device, create_graph, monkeypatch):
    """All arguments require a gradient, but backward is asked for some. Half of them are leaves."""
    monkeypatch.setattr(_autograd, "GRADIENTS", _autograd.GRADIENTS._replace(work_to_ask=0))
    found = inputs(op, device)
    tensors = [t if i % 2 else t.clone() for i, t in enumerate(found)]
    total = sum(r.sin().sum() for r in as_tuple(op(*tensors)))
    want = torch.autograd.grad(total, tensors, retain_graph=True)
    for choice in itertools.product([False, True], repeat=len(tensors)):
        asked = list(itertools.compress(tensors, choice))
        if not asked:
            continue
        got = torch.autograd.grad(total, asked, retain_graph=True, create_graph=create_graph)
        assert_close(got, tuple(itertools.compress(want, choice)))
        leaf = [t for t in asked if t.is_leaf]
        if leaf:
            total.backward(inputs=leaf, retain_graph=True)
            assert_close(
                [t.grad for t in leaf], [g for g, t in zip(got, asked, strict=True) if t.is_leaf]
            )
        for t in leaf:
            t.grad = None
        assert all(t.grad is None for t in found)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch looks at that of results
@pytest.mark.parametrize(**named([op for op in SMOOTH if op.name in COMPILED_BACKWARD]))
def test_compiled_autograd(op, device):
    """torch.compile captures the graph of an eager call's backward when it runs."""
    tensors, found = inputs(op, device), []
    for function in (op, op.reference):
        args = [t.detach().requires_grad_() for t in tensors]
        total = sum(r.sin().sum() for r in as_tuple(function(*args)))
        if found:
            total.backward()
        else:
            with compiled_autograd._enable(torch.compile(backend="eager")):
                total.backward()
        found.append(tuple(t.grad for t in args))
    assert_close(*found)


def flops(results, asked, **how):
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(results.sum(), asked, retain_graph=True, **how)
    return counter.get_total_flops()


@pytest.mark.parametrize("create_graph", [False, True])
def test_products_that_backward_is_not_asked_for(device, create_graph):
    """As with torch's own linear, they are not computed, though their gradients are required."""
    x = torch.randn(512, 512, device=device, requires_grad=True)
    weight = torch.randn(512, 512, device=device, requires_grad=True)
    bias = torch.randn(512, device=device, requires_grad=True)
    ours = my_ops.linear(x, weight, bias), my_ops.gemm(x, weight)
    layer = my_ops.nn.LSTM(512, 256, device=device)
    layers = layer(x.view(32, 16, 512))[0]
    torchs = torch.nn.functional.linear(x, weight, bias)
    for asked in ((x,), (weight,), (x, weight)):
        want = flops(torchs, asked, create_graph=create_graph)
        assert [flops(y, asked, create_graph=create_graph) for y in ours] == [want, want]
    products = x.numel() * 4 * layer.hidden_size * 2
    every = flops(layers, (x, layer.weight_ih_l0), create_graph=create_graph)
    # A plain call has the gradients of all parameters from one op, or of none.
    weights = products if create_graph else products + 32 * 16 * layer.weight_hh_l0.numel() * 2
    assert every - flops(layers, (x,), create_graph=create_graph) == weights
    assert every - flops(layers, (layer.weight_ih_l0,), create_graph=create_graph) == products


def test_a_node_that_another_backward_calls(device):
    """It has all its gradients, though the engine runs none of the nodes that they are for."""
    x, weight = leaves((torch.randn(512, 512, device=device), torch.randn(512, 512, device=device)))
    y = my_ops.linear(x, weight, residual=torch.zeros_like(x))

    class Outer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, t):
            return t.clone()

        @staticmethod
        def backward(ctx, grad):
            return y.grad_fn.apply(grad)[0]

    start, grad = torch.zeros_like(x).requires_grad_(), torch.randn_like(x)
    (got,) = torch.autograd.grad(Outer.apply(start), start, grad)
    assert_close(got, grad @ weight)


@pytest.mark.parametrize(**named(SMOOTH))
def test_second_gradient(op, device):
    assert gradgradcheck(op, inputs(op, device), check_fwd_over_rev=False)


@pytest.mark.slow
@pytest.mark.parametrize(**named(SMOOTH))
def test_forward_over_reverse(op, device):
    assert gradgradcheck(
        op,
        inputs(op, device),
        check_fwd_over_rev=True,
        check_rev_over_rev=False,
        check_undefined_grad=False,
    )


@pytest.mark.parametrize(**named(DIFFERENTIABLE))
def test_gradient_on_the_dispatcher(op, device):
    """torch.ops.my_ops.X and my_ops.X have the same gradient."""
    tensors = inputs(op, device)
    results = as_tuple(op.overload(*op.arguments(*tensors)))
    grads = [torch.randn_like(r) for r in results]
    got = torch.autograd.grad(results, tensors, grads)
    assert_close(got, torch.autograd.grad(op(*tensors), tensors, grads))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("with_residual", [False, True])
def test_recording_linear_changes_no_value(with_residual, activation, device):
    """When recording, the activation and the residual are applied after the product."""
    shapes = (5, 3), (4, 3), (4,), (5, 4)
    x, weight, bias, residual = leaves(
        tuple(torch.randn(shape, dtype=torch.float64, device=device) for shape in shapes)
    )
    options = {"activation": activation, "residual": residual if with_residual else None}
    got = my_ops.linear(x, weight, bias, **options)
    with torch.no_grad():
        assert_close(got, my_ops.linear(x, weight, bias, **options))


@pytest.mark.parametrize(**named(DIFFERENTIABLE))
def test_no_graph_without_a_need(op, device):
    tensors = op.tensors(2, torch.float32, device)
    assert not any(r.requires_grad for r in op(*tensors))
    with torch.no_grad():
        assert not any(r.requires_grad for r in op(*leaves(tensors)))
    with torch.inference_mode():
        assert all(r.is_inference() for r in op(*tensors))


@pytest.mark.parametrize("needed", [False, True])
@pytest.mark.parametrize(**named(DIFFERENTIABLE))
def test_one_kernel_without_a_graph(op, needed, device):
    """The op itself runs, and not the ops that replace it when something is saved for backward."""
    seen = []

    class Record(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    tensors = [t.requires_grad_(needed) for t in op.tensors(2, torch.float32, device)]
    arguments = op.arguments(*tensors)
    with torch.set_grad_enabled(not needed), Record():
        op.overload(*arguments)
        op(*tensors)
    assert [f for f in seen if f.namespace == "my_ops"] == [op.overload] * 2


@pytest.mark.parametrize(**named(DIFFERENTIABLE))
def test_func_grad_and_vjp(op, device):
    tensors = tuple(t.detach() for t in inputs(op, device))
    if op.smooth:
        places = tuple(range(len(tensors)))
        got = torch.func.grad(lambda *ts: sum(r.sin().sum() for r in op(*ts)), places)(*tensors)
        want = torch.func.grad(
            lambda *ts: sum(r.sin().sum() for r in as_tuple(op.reference(*ts))), places
        )(*tensors)
        assert_close(got, want)
    results, pull = torch.func.vjp(op, *tensors)
    grads = tuple(torch.randn_like(r) for r in results)
    leaf = leaves(tensors)
    assert_close(pull(grads), torch.autograd.grad(op(*leaf), leaf, grads))


@pytest.mark.parametrize(**named(SMOOTH))
def test_func_jvp_and_nesting(op, device):
    tensors = tuple(t.detach() for t in inputs(op, device))
    tangents = tuple(torch.randn_like(t) for t in tensors)
    places = tuple(range(len(tensors)))

    def of(function):
        def total(*ts):
            return sum(r.sin().sum() for r in as_tuple(function(*ts)))

        def slope(*ts):
            return torch.func.jvp(total, ts, tangents)[1]

        return (
            *torch.func.jvp(total, tensors, tangents),
            *torch.func.grad(slope, places)(*tensors),  # reverse over forward
            *torch.func.jvp(torch.func.grad(total, places), tensors, tangents)[1],  # and back
            torch.func.jvp(slope, tensors, tangents)[1],  # forward over forward
        )

    assert_close(of(op), of(op.reference))


@pytest.mark.parametrize(**named(SMOOTH))
def test_forward_ad_of_one_argument(op, device):
    tensors = [t.detach() for t in inputs(op, device)]
    for place, primal in enumerate(tensors):
        tangents = [torch.randn_like(primal) if i == place else None for i in range(len(tensors))]
        for ours, exact in zip(
            *(duals(f, tensors, tangents) for f in (op, op.reference)), strict=True
        ):
            assert_close(ours, exact)


@pytest.mark.parametrize(**named(SMOOTH))
def test_forward_over_reverse_without_a_graph(op, device):
    tensors = inputs(op, device)
    tangents = [torch.randn_like(t) for t in tensors]
    found = []
    for function in (op, op.reference):
        with forward_ad.dual_level():
            args = [forward_ad.make_dual(t, dt) for t, dt in zip(tensors, tangents, strict=True)]
            total = sum(r.sin().sum() for r in as_tuple(function(*args)))
            graph = function is op.reference  # torch's silu has no tangent without it
            grads = torch.autograd.grad(total, tensors, create_graph=graph)
            found.append([forward_ad.unpack_dual(g).tangent for g in grads])
    for ours, exact in zip(*found, strict=True):
        assert_close(torch.zeros_like(exact) if ours is None else ours, exact)


def test_round_ste_forward_ad_is_straight_through(device):
    x, tangent = torch.randn(2, 5, device=device)
    out, out_tangent = torch.func.jvp(my_ops.round_ste, (x,), (tangent,))
    assert torch.equal(out, my_ops.round_ste(x))
    assert torch.equal(out_tangent, tangent)


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.bfloat16, torch.int64)])
def test_custom_add_gradient_has_the_dtype_of_its_argument(dtypes, device):
    a = torch.ones(3, 1, dtype=dtypes[0], device=device, requires_grad=True)
    b = torch.ones(4, dtype=dtypes[1], device=device)
    b.requires_grad_(b.is_floating_point())
    my_ops.custom_add(a, b).sum().backward()
    assert torch.equal(a.grad, torch.full_like(a, 4))
    if b.requires_grad:
        assert torch.equal(b.grad, torch.full_like(b, 3))


@pytest.mark.parametrize(
    **named([op for op in DIFFERENTIABLE if op.name not in ("add_one", "custom_add", "round_ste")])
)
def test_overwritten_arguments_are_noticed(op, device):
    """Backward needs the arguments or raises; it never computes with changed values."""
    tensors = inputs(op, device)
    copies = [t.clone() for t in tensors]  # not leaves, as they are written to
    results = op(*copies)
    with torch.no_grad():
        copies[0].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(results, tensors, [torch.ones_like(r) for r in results])


def duals(function, tensors, tangents):
    """The results of ``function`` for tensors, some of which have a tangent, and their tangents."""
    with forward_ad.dual_level():
        args = [
            t if dt is None else forward_ad.make_dual(t, dt)
            for t, dt in zip(tensors, tangents, strict=True)
        ]
        return [tuple(forward_ad.unpack_dual(r)) for r in as_tuple(function(*args))]


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("shapes", [((3, 1), (4,)), ((4,), (4,)), ((), (2, 3))])
def test_custom_add_forward_ad_beside_integers(shapes, place, device):
    """An integer operand has no tangent. The tangent has the shape of the sum."""
    tensors = [torch.randint(0, 9, shape, device=device) for shape in shapes]
    tensors[place] = tensors[place].double()
    tangents = [None, None]
    tangents[place] = torch.randn_like(tensors[place])
    want = duals(reference.custom_add, tensors, tangents)
    assert_close(*[found[0] for found in (duals(my_ops.custom_add, tensors, tangents), want)])

    def of_one(function):
        def alone(t):
            return function(*[t if i == place else other for i, other in enumerate(tensors)])

        return torch.func.jvp(alone, (tensors[place],), (tangents[place],))

    assert_close(of_one(my_ops.custom_add), want[0])


@pytest.mark.parametrize(
    **named([op for op in DIFFERENTIABLE if op.name in ("add_one", "round_ste")])
)
def test_in_place_on_a_dual_result_leaves_the_argument(op, device):
    """Its tangent is that of the argument, but not a view of it."""
    x, tangent = torch.randn(3, device=device), torch.randn(3, device=device)
    before = tangent.clone()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, tangent)
        (result,) = op(dual)
        result.mul_(2)
        assert torch.equal(forward_ad.unpack_dual(dual).tangent, before)
        assert torch.equal(forward_ad.unpack_dual(result).tangent, 2 * before)


# ----------------------------------------------------------------------------------------- out=


def test_out_moves_the_version_counter(device):
    a, b = torch.randn(2, 3, device=device), torch.randn(3, 4, device=device)
    out = torch.zeros(2, 4, device=device)
    before = out._version
    my_ops.gemm(a, b, out=out)
    assert out._version == before + 1
    assert (a._version, b._version) == (0, 0)


def test_out_over_a_saved_tensor_is_noticed(device):
    a, b = torch.randn(2, 3, device=device), torch.randn(3, 4, device=device)
    x = torch.randn(2, 4, device=device, requires_grad=True)
    saved = x.exp()  # backward needs it
    with torch.no_grad():
        my_ops.gemm(a, b, out=saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()


def test_out_refuses_leaves_that_require_grad(device, rejects):
    a, b = torch.randn(2, 3, device=device), torch.randn(3, 4, device=device)
    out = torch.zeros(2, 4, device=device, requires_grad=True)
    with rejects(RuntimeError, "gemm: out= does not support automatic differentiation", a, b, out):
        my_ops.gemm(a, b, out=out)


def test_out_without_a_gradient_under_no_grad(device):
    a = torch.randn(2, 3, device=device, requires_grad=True)
    b, out = torch.randn(3, 4, device=device), torch.zeros(2, 4, device=device)
    with torch.no_grad():
        my_ops.gemm(a, b, out=out)
        assert torch.equal(out, my_ops.gemm(a, b))
    assert not out.requires_grad
