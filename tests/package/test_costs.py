"""Routing on one floor: what was timed is in the costs of the plans, or in my_ops/_costs.py."""

import ast
import re
from pathlib import Path

import pytest

import my_ops
from my_ops import _costs

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(my_ops.__file__).parent
SMALL = 8  # numbers up to this are of dimensions, bytes and vectors
# Python that compares with a number that was not timed.
NOT_TIMED = {
    "_explain.py": "the sizes that it can answer",
    "_fit.py": "which products to time, and when a gain is more than chance",
    "_gemm_costs.py": "the length of a text",
    "_timing.py": "how long a time takes",
    "_tune.py": "how many times are enough",
    "_tuned.py": "what a file may have",
    "_fast_fp32.py": "the length of a text",
    "_install_hint.py": "releases",
    "_library.py": "releases",
    "recurrent/_nvrtc.py": "what NVRTC calls architectures from 9.0 on",
}
needs_source = pytest.mark.skipif(not (ROOT / "kernels").is_dir(), reason="needs the source tree")
SIZES = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)


def numbers(tree):
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and type(node.value) in (int, float)
    ]


def constants(tree):
    """Names that the module gives to a large number, or to something made of them."""
    return {
        name.id
        for node in ast.walk(tree)
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None
        if any(abs(value) > SMALL for value in numbers(node.value))
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        for name in ast.walk(target)
        if isinstance(name, ast.Name)
    }


def compared(source):
    """The comparisons of sizes with a large number, by value or by name."""
    tree = ast.parse(source)
    named = constants(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and any(isinstance(op, SIZES) for op in node.ops):
            sides = [node.left, *node.comparators]
            names = {n.id for side in sides for n in ast.walk(side) if isinstance(n, ast.Name)}
            if names & named or any(abs(x) > SMALL for side in sides for x in numbers(side)):
                yield f"{node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize(
    "wrong",
    [
        "if rows < 256: pass",
        "FEW = 256\nfew = rows <= FEW",
        "FEW = {'cuda': 1 << 28}\nfew = rows <= FEW.get('cuda')",
        "few: int = 1 << 13\nx = work * batch > few",
        "x = 64 <= batch",
    ],
)
def test_the_guard_sees(wrong):
    assert len(list(compared(wrong))) == 1


def test_the_guard_lets_pass():
    right = "if t.dim() < 2 or rows <= COSTS.rows or n % 16 == 0 or len(a) > len(b): pass"
    assert list(compared(right)) == []


def test_python_compares_with_no_number_of_its_own():
    found = {
        str(path.relative_to(PACKAGE)): list(compared(path.read_text()))
        for path in PACKAGE.rglob("*.py")
    }
    assert {name for name, places in found.items() if places} == set(NOT_TIMED)


def test_python_asks_no_device_what_it_is():
    asks = r"get_device_(properties|capability|name)|multi_processor_count|is_bf16_supported"
    for path in PACKAGE.rglob("*.py"):
        # The report on the installation, and what NVRTC compiles for.
        if path.name not in ("__main__.py", "_nvrtc.py", "_own_kernels.py"):
            assert not re.search(asks, path.read_text()), path


# Constants of the binding that are large, and were not timed.
FACTS = {
    "explain.h kMostElements": "the sizes that it can answer",
    "gemm_cuda.cpp kAlign": "bytes, as allocations have it",
    "gemm_cuda.h kOfReducedPrecisionReductions": "torch's flags for other settings",
    "gemm_tf32.h kTf32": "cuBLAS's name of a type",
    "own_kernels_cuda.cpp kPlanBytes": "bytes of a buffer of Python's",
}


@needs_source
def test_the_binding_has_no_number_of_its_own():
    """Neither a constant nor a comparison with a literal; costs are included from kernels/."""
    number = r"(?:int64_t\{)?(\d[\d.e']*)\}?( << \d+)?"
    named = set()
    for path in sorted((ROOT / "csrc").rglob("*.*")):
        text = re.sub(r"//.*|^#.*", "", path.read_text(), flags=re.MULTILINE)
        for line in re.findall(r"constexpr (?:int|int64_t|size_t|double) (k[^;]+);", text):
            for name, value, shift in re.findall(rf"(k\w+) = {number}", line):
                if shift or float(value.replace("'", "")) > SMALL:
                    named.add(f"{path.name} {name}")
        for value, shift in re.findall(rf" [<>]=? {number}(?!\w)", text):
            assert not shift and float(value) <= SMALL, (path.name, value)
    assert named == set(FACTS)


@needs_source
def test_one_launch_of_weight_gradients_is_one_rule():
    """Python and the CUDA code decide alike."""
    text = (ROOT / "kernels/recurrent/costs.h").read_text()
    (found,) = re.findall(r"struct WeightsBackward \{\s*(.+?);", text)
    costs = _costs.WEIGHTS_BACKWARD
    shift = int(costs.work["cuda"]).bit_length() - 1
    assert costs.work["cuda"] == 1 << shift
    assert found == f"int64_t rows = {costs.rows}, work = int64_t{{1}} << {shift}"


@needs_source
def test_attention_is_asked_for_what_its_kernels_take():
    header = (ROOT / "include/attention.h").read_text()
    plan = (ROOT / "kernels/attention/plan.h").read_text()
    bits = re.search(r"kAttentionMinWork = int64_t\{1\} << (\d+)", header)[1]
    assert 1 << int(bits) == _costs.ATTENTION.least_work
    assert int(re.search(r"kMaxDim = (\d+)", plan)[1]) == _costs.ATTENTION.largest_head
