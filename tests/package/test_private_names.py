"""my_ops works in a torch without one of the private names it uses, and says what is lost.

All are in my_ops/_private.py, each with a substitute.
"""

import ast
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import my_ops
from my_ops import _autocast, _private
from my_ops.ops import PackedWeight

PACKAGE = Path(my_ops.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
DOCUMENTED = {"_check", "_asdict", "_fields"}  # in torch's guide to torch.library; of namedtuple
UNDOCUMENTED = {"to_save", "saved_for_forward", "dirty_tensors", "tensor_meta"}  # and not private


def is_private(name):
    return name.startswith("_") and not name.startswith("__") and name not in DOCUMENTED


def own_names(trees):
    """The names that the package itself defines: functions, classes, modules, variables,
    attributes."""
    names = {source.stem for source in SOURCES}
    for node in (node for tree in trees.values() for node in ast.walk(tree)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and ast.unparse(node.value) == "self"
        ):
            names.add(node.attr)
    return names


def foreign_names():
    """{file: names that its code imports, or reads with a dot or getattr, from objects not its
    own}."""
    trees = {source: ast.parse(source.read_text()) for source in SOURCES}
    own, found = own_names(trees), {}
    for source, tree in trees.items():
        for node in ast.walk(tree):
            for annotation in ("annotation", "returns"):  # never evaluated
                if hasattr(node, annotation):
                    setattr(node, annotation, None)
        names = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                names.add(node.attr)
            elif isinstance(node, ast.ImportFrom):
                names |= {part for part in (node.module or "").split(".")}
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("attr"):
                names |= {a.value for a in node.args[1:2] if isinstance(a, ast.Constant)}
        found[source.relative_to(PACKAGE).as_posix()] = {
            n for n in names if (is_private(n) and n not in own) or n in UNDOCUMENTED
        }
    return found


def looked_up():
    """(module, name, whether something is lost) for every name that _private.py looks up."""
    for node in ast.walk(ast.parse((PACKAGE / "_private.py").read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "_torch":
            yield node.args[0].value, node.args[1].value, len(node.args) == 4


LOST = {  # everything else works
    "_AutoDispatchBelowAutograd": ["func", "forward", "nested"],
    "_SingleLevelFunction": ["func"],
    "enable_single_level_autograd_function": ["func"],
    "_set_fwd_grad_enabled": ["nested"],
}
LOOKED_UP = [*looked_up(), ("torch.autograd.forward_ad", "_current_level", False)]


def test_private_names_stand_in_one_place():
    found = foreign_names()
    of_objects = {"_cdata", "_compiled_autograd_key", "_current_level", "_dynamo_marked_constant"}
    of_objects |= {"_all_weights", "_flat_weights_names", "_init_flat_weights", "_parameters"}
    of_objects |= {"_op_dispatcher", "_version", "_scaled_dot_product_efficient_attention"}
    of_objects.add("_scaled_dot_product_efficient_attention_backward")
    assert found.pop("_private.py") == of_objects
    # TorchScript reads a layer's parameters there, and cannot read them through another module.
    assert found.pop("recurrent/_torch_layers.py") == {"_flat_weights"}
    assert {file: names for file, names in found.items() if names} == {}
    assert {name for _, name, lost in LOOKED_UP if lost} == set(LOST)


SCRIPT = """
    import importlib, sys, warnings
    import torch
    module, name, *lost = sys.argv[1:]
    importlib.import_module(module)
    value = getattr(sys.modules[module], name)
    delattr(sys.modules[module], name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import my_ops
    setattr(sys.modules[module], name, value)  # torch's own code needs it
    print([str(w.message) for w in caught])
    from torch.autograd import forward_ad, gradcheck

    def draw(*shape):
        return torch.randn(shape, dtype=torch.float64, requires_grad=True)

    def check(function, *tensors):
        assert gradcheck(function, tensors, check_forward_ad="forward" not in lost)

    check(my_ops.add_one, draw(2, 3))
    check(my_ops.custom_add, draw(2, 1), draw(3))
    check(my_ops.d_sigmoid, draw(2, 3))
    check(my_ops.gemm, draw(2, 3), draw(3, 4))
    for activation in (None, "gelu"):
        call = lambda x, w, b: my_ops.linear(x, w, b, activation=activation)
        check(call, draw(2, 3), draw(4, 3), draw(4))
    check(my_ops.linear, draw(2, 3), draw(4, 3))
    state = draw(2, 2), draw(2, 2)
    check(my_ops.lltm_cell, draw(2, 3), draw(6, 5), draw(6), *state)
    check(my_ops.lltm, draw(3, 2, 3), *state, draw(6, 5), draw(6))
    x = draw(5)
    my_ops.round_ste(x).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))

    def sines(x):
        return my_ops.d_sigmoid(x).sin().sum()

    def exact(x):
        return my_ops.reference.d_sigmoid(x).sin().sum()

    x, t = torch.randn(2, 5, dtype=torch.float64)
    jvp = lambda f: lambda x: torch.func.jvp(f, (x,), (t,))[1]
    if "func" not in lost:
        torch.testing.assert_close(torch.func.grad(sines)(x), torch.func.grad(exact)(x))
        twice = lambda f: torch.func.grad(lambda x: torch.func.grad(f)(x).sum())
        torch.testing.assert_close(twice(sines)(x), twice(exact)(x))
        if "nested" not in lost:
            torch.testing.assert_close(torch.func.hessian(sines)(x), torch.func.hessian(exact)(x))
            torch.testing.assert_close(jvp(jvp(sines))(x), jvp(jvp(exact))(x))
    a, b = torch.randn(2, 3), torch.randn(3, 4)
    out = torch.zeros(2, 4)
    saved = torch.zeros(2, 4, requires_grad=True).exp()
    my_ops.gemm(a, b, out=out)
    assert torch.equal(out, my_ops.gemm(a, b)) and out._version == 1
    with torch.no_grad():
        my_ops.gemm(a, b, out=saved)
    for refused in (
        lambda: saved.sum().backward(),
        lambda: my_ops.gemm(a.requires_grad_(), b, out=out),
    ):
        try:
            refused()
        except RuntimeError:
            continue
        raise AssertionError("not noticed")
    a = torch.randn(3, 3, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        product = my_ops.gemm(a, a)
    assert product.dtype == torch.bfloat16
    product.sum().backward()
    assert a.grad.dtype == torch.float32
    rows = torch.randn(5, 3)
    assert torch.equal(torch.vmap(my_ops.add_one)(rows), rows + 1)
    with torch.inference_mode():
        assert torch.equal(my_ops.add_one(rows), rows + 1)
    traced = torch.jit.trace(my_ops.gemm, (a, a))
    assert "my_ops::gemm" in str(traced.graph)
    torch.set_float32_matmul_precision("high")
    assert sys.modules["my_ops.ops.gemm"].effective_precision("gemm", None) == "tf32"
"""

COMPILED = """
    layer = my_ops.nn.LinearActivation(3, 4, activation="gelu")
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(rows), layer(rows))
    compiled(rows).sum().backward()
    assert layer.linear.weight.grad.ne(0).any()
"""


@pytest.fixture
def run_without(run_python):
    """The warnings of a program that does not find a private name of torch."""

    def run(module, name, script):
        return ast.literal_eval(run_python(script, module, name, *LOST.get(name, [])))

    return run


@pytest.mark.parametrize(
    "module, name, lost", LOOKED_UP, ids=[f"{module}.{name}" for module, name, _ in LOOKED_UP]
)
def test_without(run_without, module, name, lost):
    """The public substitute gives the same results; it warns once if it can do less."""
    warned = run_without(module, name, SCRIPT)
    assert len(warned) == lost
    assert all(f"private name that my_ops uses, {module}.{name};" in text for text in warned)


@pytest.mark.parametrize(
    "module, name",
    [
        ("torch._C", "_AutoDispatchBelowAutograd"),
        ("torch._C", "_are_functorch_transforms_active"),
        ("torch.autograd.forward_ad", "_current_level"),
        ("torch.autograd.function", "_SingleLevelFunction"),
    ],
)
def test_compile_without(run_without, module, name):
    run_without(module, name, SCRIPT + COMPILED)


@pytest.mark.parametrize("allowed", [False, True])
def test_compile_without_the_mark_of_a_constant(monkeypatch, allowed):
    """torch.compile traces what it no longer treats as a constant."""
    tf32 = sys.modules["my_ops.ops.gemm"]._cublas_tf32
    monkeypatch.delattr(tf32, "_dynamo_marked_constant")
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    a, precisions = torch.randn(3, 3), []

    def backend(graph, _):
        precisions.extend(n.args[2] for n in graph.graph.nodes if n.op == "call_function")
        return graph

    got = torch.compile(lambda a: my_ops.gemm(a, a), fullgraph=True, backend=backend)(a)
    assert torch.equal(got, my_ops.gemm(a, a))
    torch.set_float32_matmul_precision("highest")
    assert precisions == ["tf32" if allowed else None]


def test_attention_without_torchs_efficient_one(monkeypatch):
    """Nothing is kept for a backward of either side's kernels."""
    attention = sys.modules["my_ops.ops.attention"]

    def kept():
        with FakeTensorMode():
            heads = [torch.empty(1, 2, size, 4, device="cuda") for size in (3, 5, 5)]
            return torch.ops.my_ops.attention_forward(*heads)[1].shape[2]

    assert kept() > 0
    monkeypatch.setattr(attention, "efficient_attention", None)
    assert kept() == 0


def test_without_the_version_of_a_tensor(monkeypatch):
    """Only prepack() and autocast are affected: they no longer notice that a weight changed."""

    class Uncounted:
        def is_inference(self):
            return False

    assert _private.version(Uncounted()) is None
    for module in (sys.modules["my_ops.ops.linear"], _autocast):
        monkeypatch.setattr(module, "version", lambda t: None)
    x, weight = torch.randn(2, 3), torch.randn(4, 3, requires_grad=True)
    packed = my_ops.prepack(weight)
    assert isinstance(packed, PackedWeight)
    assert torch.equal(my_ops.linear(x, packed), my_ops.linear(x, weight))
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            got = my_ops.linear(x, weight)
    assert torch.equal(got, my_ops.linear(x.bfloat16(), weight.bfloat16()))


def test_without_the_arguments_that_sharding_rules_are_asked_for(monkeypatch):
    """Then no sum is left to the caller, since an activation needs it whole."""
    distributed = pytest.importorskip("my_ops.distributed")
    x, weight = torch.randn(2, 3), torch.randn(4, 3)

    def partial():
        layouts = distributed._linear(x, weight)
        return any(place.is_partial() for (place,), _ in layouts)

    assert _private.asked_for_each(torch.ops.my_ops.linear.default)
    assert partial()
    with monkeypatch.context() as without:
        without.delattr("torch.distributed.tensor.DTensor._op_dispatcher")
        assert not _private.asked_for_each(torch.ops.my_ops.linear.default)
    monkeypatch.setattr(distributed, "_knows_activation", False)
    assert not partial()
