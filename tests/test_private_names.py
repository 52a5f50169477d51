"""A torch that lacks a private name which my_ops imports: my_ops works without it, and says so."""

import ast
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import my_ops

SOURCES = sorted(Path(my_ops.__file__).parent.rglob("*.py"))
DOCUMENTED = {"torch._check"}  # of torch's guide to torch.library


def is_private(path):
    names = [part for part in path.split(".") if not part.startswith("__")]
    return any(name.startswith("_") for name in names) and path not in DOCUMENTED


def private_names():
    """The private names of torch in the package: those imported, and those reached by a dot."""
    imported, reached = set(), set()
    for source in SOURCES:
        tree = ast.parse(source.read_text())
        modules = {"torch": "torch"}
        for node in ast.walk(tree):
            for annotation in ("annotation", "returns"):  # never evaluated
                if hasattr(node, annotation):
                    setattr(node, annotation, None)
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
                for alias in node.names:
                    modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                    imported.add((node.module, alias.name))
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                path = ast.unparse(node)
                root, _, rest = path.partition(".")
                if root in modules and modules[root].split(".")[0] == "torch":
                    reached.add(f"{modules[root]}.{rest}")
    imported = {pair for pair in imported if is_private(".".join(pair))}
    return sorted(imported), {path for path in reached if is_private(path)}


IMPORTED, REACHED = private_names()

PUBLIC_IS_SLOWER = [  # no less
    "DispatchKey",
    "DispatchKeySet",
    "_ExcludeDispatchKeyGuard",
    "_get_fp32_precision_getter",
    "FakeTensor",  # what make_fx and non-strict export see of Linear is torch's linear
    "FunctionalTensor",
]

SCRIPT = """
    import sys, warnings
    import torch, torch._functorch.utils, torch.utils.flop_counter
    module, name = sys.argv[1:3]
    value = getattr(sys.modules[module], name)
    delattr(sys.modules[module], name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import my_ops
    setattr(sys.modules[module], name, value)  # torch's own code needs it
    print([str(w.message) for w in caught])
    from torch.autograd import gradcheck

    def draw(*shape):
        return torch.randn(shape, dtype=torch.float64, requires_grad=True)

    assert gradcheck(my_ops.add_one, (draw(2, 3),))
    assert gradcheck(my_ops.custom_add, (draw(2, 1), draw(3)))
    assert gradcheck(my_ops.d_sigmoid, (draw(2, 3),))
    assert gradcheck(my_ops.gemm, (draw(2, 3), draw(3, 4)))
    for activation in (None, "gelu"):
        call = lambda x, w, b: my_ops.linear(x, w, b, activation=activation)
        assert gradcheck(call, (draw(2, 3), draw(4, 3), draw(4)))
    assert gradcheck(my_ops.linear, (draw(2, 3), draw(4, 3)))
    state = draw(2, 2), draw(2, 2)
    assert gradcheck(my_ops.lltm_cell, (draw(2, 3), draw(6, 5), draw(6), *state))
    assert gradcheck(my_ops.lltm, (draw(3, 2, 3), *state, draw(6, 5), draw(6)))
    x = draw(5)
    my_ops.round_ste(x).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
    out = torch.zeros(2, 4, dtype=torch.float64)
    my_ops.gemm(draw(2, 3).detach(), draw(3, 4).detach(), out=out)
    assert out.ne(0).all()
    a = torch.randn(3, 3, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        product = my_ops.gemm(a, a)
    assert product.dtype == torch.bfloat16
    product.sum().backward()
    assert a.grad.dtype == torch.float32
    rows = torch.randn(5, 3)
    assert torch.equal(torch.vmap(my_ops.add_one)(rows), rows + 1)
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


def run_without(module, name, script):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), module, name],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return ast.literal_eval(done.stdout)  # the warnings


def test_private_names_are_imported_and_nothing_else():
    assert {module for module, _ in IMPORTED} > {"torch._C"}  # the list is no empty one
    assert {"torch.autograd.forward_ad._current_level"} == REACHED  # which is imported, too


@pytest.mark.parametrize("module, name", IMPORTED, ids=[".".join(pair) for pair in IMPORTED])
def test_without(module, name):
    """The same gradients by the public way: one warning if that can do less, else none."""
    warned = run_without(module, name, SCRIPT)
    if name in PUBLIC_IS_SLOWER:
        assert warned == []
    else:
        assert len(warned) == 1
        assert name in warned[0]
        assert "private name" in warned[0]


def test_compile_without():
    run_without("torch.autograd.function", "_SingleLevelFunction", SCRIPT + COMPILED)
