"""The repository for Hugging Face's Kernel Hub: tools/release/hub_kernel.py."""

import ast
import base64
import hashlib
import importlib
import importlib.util
import inspect
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import my_ops

TOOLS = Path(__file__).resolve().parents[2] / "tools/release"
PACKAGE = Path(my_ops.__file__).parent
pytestmark = pytest.mark.skipif(not TOOLS.is_dir(), reason="needs the repository")


@pytest.fixture(scope="module")
def hub_kernel():
    sys.path.insert(0, str(TOOLS))
    yield importlib.import_module("hub_kernel")
    sys.path.remove(str(TOOLS))


@pytest.fixture(scope="module")
def variant(hub_kernel, tmp_path_factory):
    return hub_kernel.write_variant(PACKAGE, tmp_path_factory.mktemp("hub"), "cpu")


def metadata(variant):
    return json.loads((variant / "metadata.json").read_text())


def test_imports_are_relative_or_torchs(variant):
    for path in variant.rglob("*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                roots = {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                roots = {node.module.partition(".")[0]}
            else:
                continue
            assert roots <= {"torch", *sys.stdlib_module_names}, path.name
        assert "torch.ops.my_ops" not in text
        assert "my_ops::" not in text


def test_only_what_the_kernel_imports_is_in_it(variant):
    places = {path.relative_to(variant).as_posix() for path in variant.rglob("*.py")}
    assert {"__init__.py", "layers.py", "nn/linear.py", "recurrent/lstm.py"} <= places
    assert not places & {"__main__.py", "_run.py", "_convert.py", "_fast_fp32.py", "_explain.py"}


def test_digest_is_of_every_file(variant):
    digest = metadata(variant)["digest"]
    files = {
        path.relative_to(variant).as_posix(): base64.b64encode(
            hashlib.sha256(path.read_bytes()).digest()
        ).decode()
        for path in variant.rglob("*")
        if path.is_file() and path.name != "metadata.json" and "__pycache__" not in path.parts
    }
    assert digest == {"algorithm": "sha256", "files": files}


def test_other_content_has_another_namespace(hub_kernel, variant, tmp_path):
    again = hub_kernel.write_variant(PACKAGE, tmp_path, "cpu")
    assert again.name == variant.name
    assert metadata(again) == metadata(variant)
    ignored = shutil.ignore_patterns("__pycache__", "include", "share")
    package = shutil.copytree(PACKAGE, tmp_path / "my_ops", ignore=ignored)
    with (package / "_costs.py").open("a") as file:
        file.write("# another\n")
    other = hub_kernel.write_variant(package, tmp_path, "cpu")
    assert metadata(other)["id"] != metadata(variant)["id"]


@pytest.mark.parametrize(
    "local, nvcc, systems",
    [
        ("", None, ["cpu"]),
        ("", "12.9.86", ["cpu", "cu126"]),
        ("+cu130", "13.0.88", ["cu130"]),
    ],
)
def test_variants_of_a_wheel(tmp_path, local, nvcc, systems):
    wheel = tmp_path / f"my_ops-1.2.3{local}-py3-none-linux_x86_64.whl"
    record = json.loads((PACKAGE / "_build.json").read_text())
    record |= {"nvcc": nvcc, "architectures": ["8.0", "9.0a"] if nvcc else []}
    with zipfile.ZipFile(wheel, "w") as file:
        for path in (*PACKAGE.rglob("*.py"), PACKAGE / "_C.so"):
            file.write(path, Path("my_ops") / path.relative_to(PACKAGE))
        file.writestr("my_ops/_build.json", json.dumps(record))
    command = [sys.executable, TOOLS / "hub_kernel.py", tmp_path / "hub", wheel]
    subprocess.run(command, check=True, capture_output=True)
    variants = sorted((tmp_path / "hub/build").iterdir())
    assert [variant.name.split("-")[3] for variant in variants] == systems
    backends = {"cpu": {"type": "cpu"}}
    of_cuda = {"type": "cuda", "archs": ["8.0", "9.0a"]}
    for variant, system in zip(variants, systems, strict=True):
        assert metadata(variant)["backend"] == backends.get(system, of_cuda)
    assert (tmp_path / "hub/README.md").is_file()


def test_a_library_without_the_namespace_is_refused(hub_kernel):
    with pytest.raises(AssertionError, match="the namespace is not in"):
        hub_kernel.library(b"\0my_ops: \0", "mabcde")


LOADED = """
import importlib.util, sys
from types import MethodType
import torch, my_ops
import try_hub_kernel
name, path = {arguments}
spec = importlib.util.spec_from_file_location(name, path + "/__init__.py")
kernel = sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernel)

def replace(layer, name):
    layer.forward = MethodType(getattr(kernel.layers, name).forward, layer)

try_hub_kernel.compare(kernel, replace)
a = torch.randn(3, 3)
assert torch.equal(getattr(torch.ops, name).add_one(a), my_ops.add_one(a))
assert kernel.nn.LSTM is not my_ops.nn.LSTM
print("loaded")
"""


def test_it_is_loaded_beside_my_ops(variant, run_python):
    script = LOADED.replace("{arguments}", repr((metadata(variant)["id"], str(variant))))
    said = run_python(f"import sys; sys.path.insert(0, {str(TOOLS)!r})\n{script}")
    assert said == "loaded\n"


def test_layers_hold_nothing():
    """What the package kernels asks of a layer."""
    spec = importlib.util.spec_from_file_location("my_ops._hub_layers", TOOLS / "hub/layers.py")
    layers = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(layers)
    ours = {
        name: kind
        for name, kind in vars(layers).items()
        if getattr(kind, "__module__", None) == layers.__name__ and isinstance(kind, type)
    }
    assert set(ours) == {"LSTM", "GRU", "LSTMCell", "GRUCell", "Linear"}
    members = {name for name, _ in inspect.getmembers(torch.nn.Module)}
    for name, kind in ours.items():
        assert kind.__init__ is torch.nn.Module.__init__
        more = {member for member, _ in inspect.getmembers(kind)} - members
        assert more <= {"can_torch_compile"}
        theirs = inspect.signature(getattr(torch.nn, name).forward).parameters.values()
        parameters = inspect.signature(kind.forward).parameters.values()
        assert [p.kind for p in parameters] == [p.kind for p in theirs]


def test_the_package_kernels_loads_it(variant):
    pytest.importorskip("kernels")
    pytest.importorskip("kernel_abi_check")
    done = subprocess.run(
        [sys.executable, TOOLS / "try_hub_kernel.py", variant.parents[1]],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"my-ops {metadata(variant)['id']}: {variant.name}\n"
