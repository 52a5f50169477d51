"""Plain calls of ops in C++: which calls take them, which take the general path, and that results
are the same."""

import enum
import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import my_ops
from my_ops import _plain, _private
from my_ops._plain import plain_call
from my_ops.ops import elementwise
from my_ops.ops._checks import FLOATING
from my_ops.ops.gemm import calls_aten as gemm_calls_aten
from my_ops.ops.linear import calls_aten as linear_calls_aten

LOADED = pytest.mark.skipif(_plain._module is None, reason="the module does not fit this torch")


def randn(*sizes, **options):
    return torch.randn(sizes, **options)


ELEMENTWISE = {
    "add_one": lambda **options: (randn(3, 4, **options),),
    "custom_add": lambda **options: (randn(3, 4, **options), randn(3, 4, **options)),
    "d_sigmoid": lambda **options: (randn(3, 4, **options),),
    "round_ste": lambda **options: (randn(3, 4, **options),),
}
PRODUCTS = {
    "gemm": lambda **options: (randn(3, 4, **options), randn(4, 2, **options)),
    "linear": lambda **options: (randn(3, 4, **options), randn(2, 4, **options), randn(2)),
}
OPS = ELEMENTWISE | PRODUCTS
every_op = pytest.mark.parametrize("op", OPS)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(58)


def is_taken(op, *arguments):
    return plain_call(op)(*arguments) is not None


def plain(op, **options):
    return OPS[op](**options)


# ---------------------------------------------------------------------------------- what is taken


@LOADED
@every_op
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_plain_call_is_taken(op, requires_grad, mode):
    arguments = plain(op, requires_grad=requires_grad)
    with mode():
        assert is_taken(op, *arguments)
        result = getattr(my_ops, op)(*arguments)
        assert result.requires_grad == (requires_grad and mode is torch.enable_grad)
        assert result.is_inference() == (mode is torch.inference_mode)


@LOADED
@every_op
def test_tensors_of_inference_mode_are_taken_outside_of_it(op):
    with torch.inference_mode():
        arguments = plain(op)
    assert is_taken(op, *arguments)
    assert not plain_call(op)(*arguments).is_inference()


@LOADED
@every_op
def test_parameters_and_strided_views_are_taken(op):
    assert is_taken(op, *map(torch.nn.Parameter, plain(op)))
    repeated = [torch.stack([t, t], -1)[..., 0] for t in plain(op)]
    assert is_taken(op, *repeated)


@LOADED
@pytest.mark.parametrize("op", ELEMENTWISE)
def test_autocast_does_not_act_on_elementwise_ops(op):
    with torch.autocast("cpu"):
        assert is_taken(op, *plain(op))


SIZES = {"none": (0, 3), "one": (1,), "few": (64, 64), "more": (64, 65), "scalar": ()}


@LOADED
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("op", ELEMENTWISE)
def test_results_are_those_of_the_op(op, size):
    """Of few elements, for which the loop is called as it is, and of more."""
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        whole = [randn(*SIZES[size]).to(dtype) for _ in ELEMENTWISE[op]()]
        parts = [torch.stack([t, t], -1)[..., 1] for t in whole]
        shifted = [torch.cat([t.flatten()[:1], t.flatten()])[1:].view_as(t) for t in whole]
        for arguments in (whole, parts, shifted):
            found, want = plain_call(op)(*arguments), getattr(torch.ops.my_ops, op)(*arguments)
            assert torch.equal(found, want)
            assert (found.dtype, found.stride()) == (want.dtype, want.stride())
    integers = [torch.arange(5, dtype=torch.int16) for _ in ELEMENTWISE[op]()]
    if op in ("add_one", "custom_add"):
        assert torch.equal(plain_call(op)(*integers), getattr(torch.ops.my_ops, op)(*integers))


@LOADED
@pytest.mark.parametrize("size", [(0, 2), (2, 0), (1, 1), (64, 64), (64, 65), (3, 20000)])
@pytest.mark.parametrize("dtype", [*FLOATING, torch.int32, torch.int64])
def test_plain_calls_of_fill_index(size, dtype):
    for device in (None, torch.device("cpu"), torch.device("cpu", 0), "cpu", "cpu:0"):
        found = plain_call("fill_index")(*size, dtype, device)
        assert torch.equal(found, torch.ops.my_ops.fill_index(*size, dtype=dtype, device="cpu"))
        assert (found.dtype, found.device.type, tuple(found.shape)) == (dtype, "cpu", size)
    with torch.inference_mode():
        assert plain_call("fill_index")(*size, dtype, None).is_inference()


class Count(enum.IntEnum):
    TWO = 2


@pytest.mark.parametrize(
    "arguments",
    [
        (True, 2, torch.float32, None),
        (Count.TWO, 2, torch.float32, None),
        (2.0, 2, torch.float32, None),
        (2, None, torch.float32, None),
        (-1, 2, torch.float32, None),
        (2, -1, torch.float32, None),
        (1 << 40, 1 << 40, torch.float32, None),
        (1 << 64, 2, torch.float32, None),
        (1 << 31, 2, torch.int32, None),
        (2, 2, torch.bool, None),
        (2, 2, torch.complex64, None),
        (2, 2, "float32", None),
        (2, 2, torch.float32, "nowhere"),
        (2, 2, torch.float32, "\ud800"),
        (2, 2, torch.float32, "meta"),
        (2, 2, torch.float32, 0),
        (2, 2, torch.float32, torch.device("meta")),
        (2, 2, torch.float32, torch.device("xpu")),
        (2, 2, torch.float32),
    ],
)
def test_calls_of_fill_index_that_are_left(arguments):
    assert not is_taken("fill_index", *arguments)


def test_fill_index_below_modes_and_transforms_is_left():
    arguments = 2, 2, torch.float32, None
    for mode in (FunctionMode, DispatchMode, FakeTensorMode, lambda: torch.device("meta")):
        with mode():
            assert not is_taken("fill_index", *arguments)
    seen = []
    torch.func.vmap(lambda t: seen.append(is_taken("fill_index", *arguments)) or t)(randn(2))
    traced = lambda t: seen.append(is_taken("fill_index", *arguments)) or t + 1  # noqa: E731
    torch.jit.trace(traced, randn(2), check_trace=False)
    assert seen == [False, False]


@LOADED
def test_fill_index_without_the_general_path(monkeypatch):
    monkeypatch.setattr(elementwise, "ops", None)
    assert my_ops.fill_index(2, 2).tolist() == [[0, 1], [1, 2]]


@pytest.mark.parametrize("op", PRODUCTS)
def test_autocast_acts_on_products(op):
    with torch.autocast("cpu"):
        assert not is_taken(op, *plain(op))


@LOADED
def test_products_that_torch_computes_on_the_cpu():
    """By the same call, so the gradient's node is torch's."""
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        a, b = (randn(4, 4).to(dtype).requires_grad_() for _ in range(2))
        product = my_ops.gemm(a, b)
        assert torch.equal(product, a @ b) and product.grad_fn.name() == "MmBackward0"
        layer = my_ops.nn.Linear(4, 4, dtype=dtype)
        for x in (a, randn(2, 3, 4).to(dtype)):
            assert is_taken("linear", x, layer.weight, layer.bias)
            found = my_ops.linear(x, layer.weight, layer.bias)
            assert torch.equal(found, torch.nn.functional.linear(x, layer.weight, layer.bias))
            assert torch.equal(found, layer(x))
        assert is_taken("linear", a, b, None) and is_taken("linear", a[0], b, None)


def test_products_that_are_left():
    """Batches, rows whose bias torch adds after rounding, two dtypes, other shapes."""
    a, b, bias = randn(2, 4, 4), randn(4, 4), randn(4)
    assert not is_taken("gemm", a, a)
    assert not is_taken("gemm", a, b)
    assert not is_taken("gemm", b, b.double())
    assert not is_taken("gemm", b.int(), b.int())
    assert not is_taken("gemm", b, randn(3, 4))
    assert not is_taken("linear", a.mT, b, bias)
    assert not is_taken("linear", bias, b, bias)
    assert not is_taken("linear", b, a, None)
    assert not is_taken("linear", b, bias, None)
    assert not is_taken("linear", b, b.double(), None)
    assert not is_taken("linear", b, b, bias.double())
    assert not is_taken("linear", b, b, randn(1))
    assert not is_taken("linear", b, b, b)
    with pytest.raises(RuntimeError, match=r"gemm: b must have k = 4 rows"):
        my_ops.gemm(b, randn(3, 4))


def operands(sizes, device):
    """Each way that a product's operand may lie, in two of the dtypes that decide who computes it
    and one that nobody does."""
    for size, dtype in itertools.product(sizes, (torch.float32, torch.bfloat16, torch.int32)):
        t = torch.ones(size, dtype=dtype, device=device)
        yield t
        if len(size) > 1:
            yield t.mT.contiguous().mT


@LOADED
def test_the_rule_of_gemm_is_that_of_the_general_path(device):
    sizes = (8,), (8, 16), (4, 16), (5, 16), (8, 5), (0, 8), (2, 8, 16), (3, 8, 16), (2, 5, 16)
    others = (8,), (16, 8), (16, 5), (5, 8), (8, 0), (2, 16, 8), (1, 16, 8), (2, 2, 16, 8)
    for a in operands(sizes, device):
        for b in operands(others, device):
            # Those that do not fit are left, as is each call that fails.
            fits = a.dim() == b.dim() and a.dim() > 1 and a.shape[-1] == b.shape[-2]
            want = a.dtype == b.dtype and fits and gemm_calls_aten(a, b)
            assert is_taken("gemm", a, b) == want, (a.shape, a.stride(), b.shape, a.dtype, b.dtype)


@LOADED
def test_the_rule_of_linear_is_that_of_the_general_path(device):
    sizes = (16,), (4, 16), (0, 16), (2, 8, 16), (2, 2, 8, 16), (8, 5), (2, 5)
    weights = (8, 16), (5, 16), (8, 5), (16,), (1, 8, 16)
    for x in operands(sizes, device):
        for weight in operands(weights, device):
            rows = x.dim() == 2 or (x.dim() == 3 and x.is_contiguous())
            for bias in (None, *operands([(8,), (5,), (1,)], device)):
                fits = x.shape[-1] == weight.shape[-1] and (bias is None or rows)
                fits = fits and all(t is None or t.dtype == x.dtype for t in (weight, bias))
                want = fits and linear_calls_aten(x, weight, bias)
                assert is_taken("linear", x, weight, bias) == want, (x.shape, weight.shape, bias)


@LOADED
@pytest.mark.parametrize("op", ELEMENTWISE)
def test_nodes_have_the_names_of_the_general_path(op, monkeypatch):
    """And are of C++, which is how one sees that the function itself makes a plain call."""
    arguments = plain(op, requires_grad=True)
    fast = getattr(my_ops, op)(*arguments).grad_fn
    slow = getattr(torch.ops.my_ops, op)(*arguments).grad_fn
    assert fast.name() == slow.name().removeprefix("_")
    assert type(fast).__name__ == "CppFunction"


# ------------------------------------------------------------------------------ what is left alone


class Subclass(torch.Tensor):
    pass


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, function, types, arguments=(), options=None):
        return function(*arguments, **(options or {}))


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        return function(*arguments, **(options or {}))


OTHER_TENSORS = {
    "a subclass": lambda t: t.as_subclass(Subclass),
    "a meta tensor": lambda t: t.to("meta"),
    "a sparse tensor": lambda t: t.to_sparse(),
    "a conjugate": lambda t: torch.complex(t, t).conj(),
    "a negative view": lambda t: torch.complex(t, t).conj().imag,
    "complex": lambda t: torch.complex(t, t),
    "a number": lambda t: 1.0,
    "None": lambda t: None,
    "a quantized tensor": lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8),
}
ignoring = pytest.mark.filterwarnings("ignore:.*quantize.*")


@ignoring
@every_op
@pytest.mark.parametrize("other", OTHER_TENSORS)
def test_other_tensors_are_left(op, other):
    arguments = plain(op)
    for i in range(len(arguments)):
        if (op, i, other) == ("linear", 2, "None"):
            continue  # it may have no bias
        changed = list(arguments)
        changed[i] = OTHER_TENSORS[other](arguments[i])
        assert not is_taken(op, *changed)


@every_op
@pytest.mark.parametrize("mode", [FunctionMode, DispatchMode, lambda: torch.device("cpu")])
def test_modes_are_left(op, mode):
    arguments = plain(op)
    with mode():
        assert not is_taken(op, *arguments)


@every_op
@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.functionalize])
def test_transforms_are_left(op, transform):
    seen = []

    def function(*arguments):
        seen.append(is_taken(op, *arguments))
        return arguments[0]

    arguments = plain(op)
    transform(function)(*(torch.stack([t, t]) for t in arguments))
    torch.func.grad(lambda *arguments: function(*arguments).sum())(*arguments)
    assert seen == [False, False]


@every_op
def test_tangents_are_left(op):
    with forward_ad.dual_level():
        arguments = plain(op)
        dual = forward_ad.make_dual(arguments[0], torch.ones_like(arguments[0]))
        assert not is_taken(op, dual, *arguments[1:])


@every_op
def test_tracing_is_left(op):
    seen = []

    def function(*arguments):
        seen.append(is_taken(op, *arguments))
        return getattr(my_ops, op)(*arguments)

    traced = torch.jit.trace(function, plain(op), check_trace=False)
    assert seen == [False]
    assert f"my_ops::{op}" in str(traced.graph)


@pytest.mark.slow
@every_op
def test_compiled_functions_have_the_op(op):
    graphs = []

    def backend(graph, _):
        graphs.append([node.target for node in graph.graph.nodes])
        return graph

    arguments = plain(op)
    function = getattr(my_ops, op)
    found = torch.compile(function, fullgraph=True, backend=backend)(*arguments)
    assert torch.equal(found, function(*arguments))
    assert any(f"my_ops.{op}" in str(target) for target in graphs[0])


@every_op
def test_a_wrong_number_of_arguments_is_left(op):
    arguments = plain(op)
    assert not is_taken(op)
    assert not is_taken(op, *arguments, *[arguments[0]] * 3)
    assert not is_taken(op, *arguments[:-1])


def test_a_failing_call_is_left_to_the_general_path():
    assert not is_taken("d_sigmoid", torch.ones(2, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="d_sigmoid: z must be of dtype"):
        my_ops.d_sigmoid(torch.ones(2, dtype=torch.int64))
    for count in (3, 5000):
        freed = torch.ones(count)
        freed.untyped_storage().resize_(4 * count - 1)
        for op in ELEMENTWISE:
            assert not is_taken(op, *[freed] * len(plain(op)))


# ------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("op", ELEMENTWISE)
def test_gradients_are_those_of_the_general_path(op):
    found = []
    for function in (getattr(my_ops, op), getattr(torch.ops.my_ops, op)):
        torch.manual_seed(1)
        arguments = plain(op, requires_grad=True)
        result = function(*arguments)
        first = torch.autograd.grad(result.sum(), arguments, create_graph=True)
        if any(grad.requires_grad for grad in first):
            grads = torch.autograd.grad(sum(grad.sum() for grad in first), arguments)
            found.append((result, *first, *grads))
        else:
            found.append((result, *first))
    assert all(map(torch.equal, *found))


@LOADED
def test_gradients_of_broadcast_operands_are_left():
    a, b = randn(3, 4), randn(4)
    assert is_taken("custom_add", a, b) and is_taken("custom_add", a, a.double())
    assert not is_taken("custom_add", a.requires_grad_(), b)
    assert not is_taken("custom_add", a, a.detach().double())


def test_gradients_of_one_operand_and_of_other_dtypes():
    a, b = randn(3, 4, requires_grad=True), randn(4)
    my_ops.custom_add(a, b).sum().backward()
    assert torch.equal(a.grad, torch.ones(3, 4))
    a, b = randn(3, 4, dtype=torch.float64), randn(1, requires_grad=True)
    my_ops.custom_add(a, b).sum().backward()
    assert b.grad.dtype == torch.float32 and b.grad == 12
    counts = torch.ones(4, dtype=torch.int32)
    my_ops.custom_add(counts, b).sum().backward()
    assert b.grad == 16


def test_batched_gradients():
    z = randn(4, requires_grad=True)
    rows = torch.autograd.grad(my_ops.d_sigmoid(z), z, torch.eye(4), is_grads_batched=True)[0]
    once = torch.autograd.grad(my_ops.d_sigmoid(z).sum(), z)[0]
    assert torch.equal(rows, once.diag())


def test_saved_tensors_are_released_and_watched():
    z = randn(4, requires_grad=True)
    result = my_ops.d_sigmoid(z)
    result.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        result.sum().backward()
    x = z * 1
    result = my_ops.d_sigmoid(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


def test_hooks_of_saved_tensors():
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        z = randn(4, requires_grad=True)
        my_ops.d_sigmoid(z).sum().backward()
    assert any(t is z or torch.equal(t, z) for t in packed)


SAVING = {"d_sigmoid": lambda z, w: my_ops.d_sigmoid(z)} | {
    op: getattr(my_ops, op) for op in PRODUCTS
}


@pytest.mark.parametrize("op", SAVING)
def test_what_a_hook_of_saved_tensors_raises(op):
    """It is raised as it is, and the hook is not called again."""
    z, weight = (randn(4, 4, requires_grad=True) for _ in range(2))
    calls = []

    def fail(t):
        calls.append(t)
        raise ValueError("on purpose")

    hooks = torch.autograd.graph.saved_tensors_hooks(fail, lambda t: t)
    with hooks, pytest.raises(ValueError, match="on purpose"):
        SAVING[op](z, weight)
    assert len(calls) == 1


@pytest.mark.parametrize("op", SAVING)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints(op, use_reentrant):
    """Without reentrance they end a call that is made again by an exception."""
    z, weight = (randn(4, 4, requires_grad=True) for _ in range(2))
    want = torch.autograd.grad(SAVING[op](z, weight).sum(), z)[0]
    checkpoint(SAVING[op], z, weight, use_reentrant=use_reentrant).sum().backward()
    assert torch.equal(z.grad, want)


@pytest.mark.slow
def test_threads_that_share_a_leaf(run_python):
    """One holds what belongs to the leaf and waits for the GIL, which another holds."""
    run_python("""
        import faulthandler
        import threading

        import torch
        import my_ops

        faulthandler.dump_traceback_later(120, exit=True)
        weight = torch.randn(5, 5, dtype=torch.float64, requires_grad=True)
        x = torch.randn(4, 5, dtype=torch.float64)

        def work(call, *shared):
            own = x.clone().requires_grad_()
            torch.autograd.grad(call(own, *shared).sum(), own)

        def together(*call):
            threads = [threading.Thread(target=work, args=call) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        for _ in range(400):
            together(my_ops.gemm, weight)
            together(my_ops.d_sigmoid)
            together(my_ops.custom_add, x.clone().requires_grad_())
            together(my_ops.linear, weight)
    """)


def test_the_profiler_sees_the_op():
    with torch.profiler.profile(acc_events=True) as profile:
        my_ops.d_sigmoid(randn(4, requires_grad=True)).sum().backward()
        for op in (*ELEMENTWISE, "linear"):
            getattr(my_ops, op)(*plain(op))
        my_ops.fill_index(2, 2)
    names = {event.name for event in profile.events()}
    assert {f"my_ops::{op}" for op in (*ELEMENTWISE, "fill_index", "d_sigmoid_backward")} <= names
    assert "aten::linear" in names


@LOADED
@pytest.mark.skipif(
    not hasattr(torch.autograd.graph, "node_creation_hook"), reason="torch has it since 2.14"
)
def test_node_creation_hooks():
    nodes = []
    with torch.autograd.graph.node_creation_hook(lambda node: nodes.append(node.name())):
        my_ops.d_sigmoid(randn(4, requires_grad=True))
    assert nodes == ["DSigmoidBackward"]


# ------------------------------------------------------------------------------ without the module


def test_a_module_that_does_not_load(tmp_path):
    assert _plain._load(tmp_path / "none") is None
    (tmp_path / "no_module.so").write_bytes(b"no module")
    assert _plain._load(tmp_path / "no_module.so") is None


@LOADED
@pytest.mark.parametrize("elsewhere", [lambda t: _private.address(t) + 1, lambda t: None])
def test_tensors_of_another_layout(elsewhere, monkeypatch):
    """The module is not used if the place of the data is not in a tensor of Python."""
    address = _private.address
    monkeypatch.setattr(_plain, "address", elsewhere)
    assert _plain._load(_plain.MODULE) is None
    monkeypatch.setattr(_plain, "address", address)
    assert _plain._load(_plain.MODULE) is not None


@pytest.mark.slow
def test_every_call_without_the_module(run_python):
    run_python("""
        import ctypes
        def refuse(path):
            raise OSError(path)
        ctypes.PyDLL = refuse
        import torch
        import my_ops
        from my_ops import _plain

        assert _plain._module is None
        z = torch.randn(4, requires_grad=True)
        result = my_ops.d_sigmoid(z)
        assert type(result.grad_fn).__name__ != "CppFunction"
        result.sum().backward()
        assert my_ops.custom_add(z, z).shape == my_ops.add_one(z).shape == (4,)
        assert my_ops.round_ste(z).requires_grad
    """)
