"""The programs of this folder, run as their READMEs say: make examples."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

import my_ops

EXAMPLES = Path(__file__).resolve().parent
ROOT = EXAMPLES.parent
sys.path[:0] = [str(EXAMPLES), str(ROOT / "tools/build")]

import char_lm  # noqa: E402
import plots  # noqa: E402
import preflight  # noqa: E402


def run(*command, cwd=None, **environment):
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def output_of(program, *arguments, **environment):
    return run(sys.executable, EXAMPLES / program, *arguments, **environment)


# Without a toolkit beside the GPU the programs build for the CPU.
BUILDS_CUDA = torch.cuda.is_available() and cpp_extension.CUDA_HOME is not None


def compile_for_cuda(folder, *sources, include):
    """Compiles with the CUDA toolkit, if there is one, GPU or not. Nothing is optimised: the code
    only has to compile.
    """
    try:
        nvcc = preflight.find_toolkit().home / "bin/nvcc"
    except preflight.Unfit:
        return
    flags = ["-std=c++20", "-arch=sm_90", "-DUSE_CUDA", "-DMY_OPS_WITH_CUDA"]
    flags += ["-Xcicc=-O0", "-Xptxas=-O0"]
    flags += ["-DTORCH_TARGET_VERSION=0x020a000000000000"]
    flags += [f"-I{path}" for path in (*include, *cpp_extension.include_paths())]
    for source in sources:
        run(nvcc, "-c", *flags, source, "-o", folder / "object.o")


def test_jit_load(tmp_path):
    for _ in range(2):  # the second time from the cache
        lines = output_of("jit_load/jit_load.py", "--build-directory", tmp_path).splitlines()
        assert lines == ["d_sigmoid: [0.1966, 0.25, 0.105]", "gemm: [[3.0, 3.0], [3.0, 3.0]]"]


def test_load_inline(tmp_path):
    lines = output_of("jit_load/load_inline.py", TORCH_EXTENSIONS_DIR=str(tmp_path)).splitlines()
    assert lines[:2] == ["int: 42", "tensor: [2.0, 3.0]"]
    assert lines[2:] == ["CUDA: [2.0, 3.0]"] * BUILDS_CUDA


def test_ctypes_call():
    lines = output_of("ctypes_call/ctypes_call.py").splitlines()
    assert lines[:2] == [
        "NumPy: [0.1966 0.25   0.105 ]",
        "error: a size is below 0, or an array is null where the size is not 0",
    ]
    assert lines[2:] == ["CUDA: [0.1966 0.25   0.105 ]"] * torch.cuda.is_available()


def test_cpp_host(tmp_path):
    output_of("cpp_host/make_models.py", tmp_path)
    prefix = f"{my_ops.cmake_prefix_path};{torch.utils.cmake_prefix_path}"
    build = tmp_path / "build"
    run("cmake", "-S", EXAMPLES / "cpp_host", "-B", build, f"-DCMAKE_PREFIX_PATH={prefix}")
    run("cmake", "--build", build)
    assert run(build / "cpp_host", tmp_path).splitlines() == [
        "TorchScript: as in Python",
        "AOTInductor: as in Python",
        "d_sigmoid(0) = 0.25",
    ]


def test_program_of_the_page(tmp_path):
    """Builds and ships the program of the guide's page From C and C++."""
    page = (ROOT / "docs/from_cpp.md").read_text()
    (cmake,) = re.findall("```cmake\n(.*?)```", page, re.DOTALL)
    program, *_ = re.findall("```cpp\n(.*?)```", page, re.DOTALL)
    build, ship = re.findall("```bash\n(.*?)```", page, re.DOTALL)
    (result,) = re.findall("```\n( .*?)```", page, re.DOTALL)
    (tmp_path / "CMakeLists.txt").write_text(cmake)
    (tmp_path / "main.cpp").write_text(program)
    here = {"PATH": str(Path(sys.executable).parent) + os.pathsep + os.environ["PATH"]}
    assert run("bash", "-ec", build, cwd=tmp_path, **here).endswith(result)
    run("bash", "-ec", ship, cwd=tmp_path)
    shipped = tmp_path / "shipped"
    assert run("./program", cwd=shipped, LD_LIBRARY_PATH="lib") == result
    linked = run("ldd", "./program", cwd=shipped, LD_LIBRARY_PATH="lib")
    assert "_C.so => lib/_C.so" in linked
    assert re.search(r"libtorch_cpu.so => lib/", linked)


def test_cmake(tmp_path):
    compiler = {"CUDACXX": f"{cpp_extension.CUDA_HOME}/bin/nvcc" if BUILDS_CUDA else "none"}
    torch_folder = f"-DTORCH={Path(torch.__file__).parent}"
    run("cmake", "-S", EXAMPLES / "cmake", "-B", tmp_path, torch_folder, **compiler)
    run("cmake", "--build", tmp_path, "--parallel")
    assert run(tmp_path / "program").splitlines() == ["gemm: 12"]
    lines = output_of("cmake/load.py", tmp_path / "libmy_ops.so").splitlines()
    assert lines[0] == "d_sigmoid: [0.1966, 0.25, 0.105]"
    cuda = "[0.1966, 0.25, 0.105]" if BUILDS_CUDA else "no kernels in this library"
    assert lines[1:] == [f"CUDA: {cuda}"] * torch.cuda.is_available()


def test_cmake_where_there_is_a_toolkit_and_no_gpu(tmp_path):
    """There CMake stops at `native`, or has nvcc compile for its oldest GPU. Only configured: torch
    here may be a build for the CPU."""
    try:
        nvcc = preflight.find_toolkit().home / "bin/nvcc"
    except preflight.Unfit:
        pytest.skip("needs a CUDA toolkit")
    torch_folder, tools, build = (tmp_path / name for name in ("torch", "bin", "build"))
    (torch_folder / "lib").mkdir(parents=True)
    for name in ("torch", "torch_cpu", "c10", "torch_cuda"):
        (torch_folder / f"lib/lib{name}.so").touch()
    tools.mkdir()
    (tools / "nvidia-smi").write_text("#!/bin/sh\necho 'no driver'\nexit 9\n")
    (tools / "nvidia-smi").chmod(0o755)
    no_gpu = {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": ""}
    configure = ("cmake", "-G", "Unix Makefiles", "-S", EXAMPLES / "cmake", "-B", build)
    run(*configure, f"-DTORCH={torch_folder}", CUDACXX=str(nvcc), **no_gpu)
    flags = (build / "CMakeFiles/my_ops.dir/flags.make").read_text()
    assert set(re.findall(r"code=\[?[\w,]*sm_(\w+)", flags)) == {"80", "90a"}


def test_char_lm(tmp_path):
    """It prints a row for every operator and fails if the model has learned nothing."""
    printed = run(sys.executable, EXAMPLES / "char_lm.py", "--steps", "120", cwd=tmp_path)
    assert (tmp_path / "demo.png").stat().st_size > 10_000
    assert f"Plot in {tmp_path / 'demo.png'}\n" in printed
    rows = re.findall(r"^(\w+) +([\d.]+)% +([\d.]+)% +([\d.]+)%   ok$", printed, re.MULTILINE)
    layers = re.findall(r"^(LSTM|GRU) +([\d.]+) +([\d.]+) +([\d.]+)x$", printed, re.MULTILINE)
    assert [name for name, *_ in layers] == ["LSTM", "GRU"]
    assert all(0.9 < float(b) / float(a) / float(ratio) < 1.1 for _, a, b, ratio in layers)
    assert "LLTM is a loop over the time steps in Python" in printed
    operators = {name for name in vars(my_ops.reference) if name in my_ops.__all__}
    assert {name for name, *_ in rows} == operators
    assert all(float(share) <= 100 for _, *shares in rows for share in shares)


@pytest.mark.parametrize("result", [float("nan"), 1.0])
def test_char_lm_names_an_operator_that_is_off(result, monkeypatch, capsys):
    exact = my_ops.add_one
    monkeypatch.setattr(my_ops, "add_one", lambda x: exact(x) + result)
    assert not char_lm.compare(torch.device("cpu"))
    (row,) = re.findall(r"^.* OFF$", capsys.readouterr().out, re.MULTILINE)
    assert row.startswith("add_one ")


def trained(loss):
    trainer = char_lm.Trainer(torch.nn.Linear(1, 1), 2)
    trainer.losses, trainer.seconds = [loss, loss], [0.1, 0.1]
    return trainer


@pytest.mark.parametrize("first, second, word", [(2.0, 2.0, "ok"), (2.0, 2.1, "OFF")])
def test_char_lm_compares_the_losses(first, second, word, capsys):
    assert char_lm.losses_agree(trained(first), trained(second)) == (word == "ok")
    assert capsys.readouterr().out.endswith(f"   {word}\n")


def test_char_lm_judges_a_run_that_was_stopped_early_by_its_end():
    trainer = trained(2.0)
    trainer.losses = [4.0] * 72 + [2.5] * 24
    assert trainer.last_loss() == 2.5


@pytest.mark.parametrize("speeds", [True, False])
def test_char_lm_titles_its_plot_with_versions_and_where_speeds_are_shown_the_machine(speeds):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    figure = char_lm.plot(trained(2.0), trained(2.0), device, speeds)
    (made_with,) = [text.get_text() for text in figure.texts if "my_ops" in text.get_text()]
    assert f"my_ops {my_ops.__version__}, torch {torch.__version__}" in made_with
    assert (plots.machine(device) in made_with) == speeds
    assert len(figure.axes) == 1 + speeds


# Steps that suffice for what each program claims. own_cell.py runs where its cell is built.
GALLERY = {"recurrent_ppo": "--iterations=30", "speech_ctc": "--steps=120", "pinn": "--steps=800"}


@pytest.mark.parametrize("name", GALLERY)
def test_gallery(name, tmp_path):
    """A program fails if it does not reach what it claims."""
    printed = run(sys.executable, EXAMPLES / f"{name}.py", GALLERY[name], cwd=tmp_path)
    assert f"Plot in {tmp_path / name}.png\n" in printed
    assert 10_000 < (tmp_path / f"{name}.png").stat().st_size < 60_000


@pytest.mark.parametrize(
    "program, arguments, status, message",
    [
        ("recurrent_ppo", "--iterations=1", 1, "FAILED: "),
        ("speech_ctc", "--steps=1", 1, "FAILED: "),
        ("pinn", "--steps=2", 1, "FAILED: "),
        ("pinn", "--output=nowhere/pinn.png", 2, "must lie in a folder that exists, got nowhere/"),
        ("pinn", "--output=pinn.svg", 2, "must end in .png, got pinn.svg"),
        ("own_cell", "--steps=2", 2, "my_ops has no cell leaky: write and build it first"),
    ],
)
def test_gallery_fails(program, arguments, status, message, tmp_path):
    command = (sys.executable, EXAMPLES / f"{program}.py", arguments)
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == status
    assert message in done.stderr


FIRST_OPERATOR = """
import torch, first_operator
for device in ["cpu", "cuda"][: 1 + {cuda}]:
    x = torch.full((2,), 3.0, device=device, requires_grad=True)
    y = first_operator.nn.Square()(x) if device == "cpu" else first_operator.square(x)
    y.sum().backward()
    print(y.tolist(), x.grad.tolist())
"""


def test_first_operator(tmp_path):
    source, site = tmp_path / "source", tmp_path / "site"
    shutil.copytree(EXAMPLES / "first_operator", source)
    readme = (source / "README.md").read_text()
    commands = "\n".join(re.findall("^    (.*)", readme, re.MULTILINE))
    scripts = sysconfig.get_path("scripts") + os.pathsep + os.environ["PATH"]
    here = {"PATH": scripts, "PYTHONPATH": str(site), "PIP_TARGET": str(site), "PIP_NO_DEPS": "1"}
    printed = run("bash", "-ec", commands, cwd=source, **here)
    assert f"prints `{printed.splitlines()[-1]}`" in readme
    assert len(list(source.glob("dist/first_operator-*-py3-none-*.whl"))) == 1
    script = FIRST_OPERATOR.format(cuda=BUILDS_CUDA)
    lines = run(sys.executable, "-c", script, PYTHONPATH=str(site)).splitlines()
    assert lines == ["[9.0, 9.0] [6.0, 6.0]"] * (1 + BUILDS_CUDA)
    compile_for_cuda(tmp_path, source / "square_cuda.cu", include=[])


def test_own_cell_package(tmp_path):
    """Built and tested as its README says; then without compilers and where nothing can be kept.
    What is not in the wheel would be compiled or run step by step, and a line would say so."""
    source, site = tmp_path / "source", tmp_path / "site"
    shutil.copytree(EXAMPLES / "own_cell_package", source)
    commands = "\n".join(re.findall("^    (.*)", (source / "README.md").read_text(), re.MULTILINE))
    found = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    scripts = sysconfig.get_path("scripts") + os.pathsep + os.environ["PATH"]
    here = {"cwd": source, "PYTHONPATH": found, "PYTEST_ADDOPTS": ""}
    to_site = {"PIP_TARGET": str(site), "PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1"}
    run("bash", "-ec", commands, **here, **to_site, PATH=scripts)
    assert len(list(source.glob("dist/my_cells-*-py3-none-*.whl"))) == 1
    (tmp_path / "file").touch()  # root may write to read-only folders
    bare = {"PATH": "/nowhere", "CXX": "", "MY_OPS_CACHE": str(tmp_path / "file/cache")}
    command = f"exec {sys.executable} -m pytest -sq test.py 2>&1"
    printed = run("/bin/sh", "-c", command, **here, **bare, CUDA_VISIBLE_DEVICES="")
    assert "3 passed" in printed and "my_ops: " not in printed


def test_pybind11(tmp_path):
    lines = output_of("pybind11/d_sigmoid.py", TORCH_EXTENSIONS_DIR=str(tmp_path)).splitlines()
    assert lines == [
        "forward: [0.1966, 0.25, 0.105]",
        "backward: [0.0909, 0.0, -0.08]",
        "doc: s(1 - s) of each element, s = sigmoid(z); float32 or float64.",
        "error: d_sigmoid: z must be of dtype float32 or float64, got Long",
    ]


def test_calling_python_from_cpp(tmp_path):
    pybind11 = run(sys.executable, "-m", "pybind11", "--cmakedir").strip()
    run(
        *("cmake", "-S", EXAMPLES / "calling_python_from_cpp", "-B", tmp_path),
        *(f"-DPython_EXECUTABLE={sys.executable}", f"-Dpybind11_DIR={pybind11}"),
    )
    run("cmake", "--build", tmp_path)
    assert run(tmp_path / "calling_python_from_cpp").splitlines() == [
        "d_sigmoid(0) = 0.25",
        "from a thread: 0.25",
        "TypeError: d_sigmoid: z must be a torch.Tensor, got str",
    ]


def copied(folder):
    """Copies the repository. Returns how to run programs there."""
    folders = ["benchmarks", "csrc", "docs", "include", "kernels", "my_ops", "tests", "tools"]
    built = shutil.ignore_patterns("__pycache__", "*.so")
    for source in folders:
        shutil.copytree(ROOT / source, folder / source, ignore=built)
    for file in ROOT.iterdir():
        if file.is_file():
            shutil.copy(file, folder)
    return {"cwd": folder, "PYTHONPATH": str(folder), "CUDA_VISIBLE_DEVICES": ""}


def new_op(here, *arguments):
    return run(sys.executable, "tools/new_op", *arguments, **here)


def check_generated(name, printed, here, *for_cuda):
    """The generated code passes lint, compiles, and passes its tests."""
    run("ruff", "check", ".", **here)
    run("ruff", "format", "--check", ".", **here)
    cxx = [line.split()[1] for line in printed.splitlines() if re.search(r"\.(h|cpp|cu)$", line)]
    run("clang-format", "--dry-run", "--Werror", *cxx, **here)

    folder = here["cwd"]
    new = [folder / path for path in for_cuda]
    compile_for_cuda(folder, *new, include=[folder / "include", folder / "kernels"])

    for step in (["egg_info"], ["build_ext", "--inplace"]):
        run(sys.executable, "setup.py", "-q", *step, MY_OPS_WITH_CUDA="0", **here)
    layers = "no_torch_below or launches_only or launchers_only or have_no_defaults"
    tests = ("-m", "pytest", "tests", "-q", "-p", "no:cacheprovider", "-k", f"{name} or {layers}")
    run(sys.executable, *tests, **here, PYTEST_ADDOPTS="", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")


def test_new_op(tmp_path):
    here = copied(tmp_path)
    printed = new_op(here, "square")
    assert textwrap.indent(printed, "    ") in (EXAMPLES / "new_op/README.md").read_text()
    check_generated("square", printed, here, "kernels/square/square.cu", "csrc/square_cuda.cpp")


# Formulas whose derivative by autograd cancels or is NaN at infinity. In PyTorch: the value, the
# first and the second derivative. In C++: the value, and ``grad`` times the first derivative. Then
# the limit in ulp.
FORMULAS = {
    "softsign": (
        ("x / (1 + abs(x))", "1 / (1 + abs(x)) ** 2", "-2 * torch.sign(x) / (1 + abs(x)) ** 3"),
        ("x / (1 + abs(x))", "grad / ((1 + abs(x)) * (1 + abs(x)))"),
        4.0,
    ),
    "squash": (
        ("torch.tanh(x)", "torch.cosh(x) ** -2", "-2 * torch.tanh(x) / torch.cosh(x) ** 2"),
        ("tanh(x)", "grad / cosh(x) / cosh(x)"),
        8.0,
    ),
    "soft_positive": (
        (
            "torch.logaddexp(x, torch.zeros_like(x))",
            "torch.sigmoid(x)",
            "torch.sigmoid(x) * torch.sigmoid(-x)",
        ),
        ("(x > 0 ? x : 0) + log1p(exp(-abs(x)))", "grad / (1 + exp(-x))"),
        8.0,
    ),
    "cube": (("x * x * x", "3 * x * x", "6 * x"), ("x * x * x", "3 * grad * x * x"), 4.0),
}


def in_cxx(formula, std):
    """With the names of the kernels, and ``std`` before functions."""
    formula = re.sub(r"\bx\b", "value", formula).replace("grad", "load(grad[i])")
    return re.sub(r"\b(abs|tanh|cosh|log1p|exp)\b", rf"{std}\1", formula)


def write_formula(name, folder):
    """Turns a new operator into that of the formula, as a reader of README would."""
    (value, slope, second), (cxx, cxx_grad), limit = FORMULAS[name]
    define = f"def {name}(x: Tensor) -> Tensor:\n    return "
    edits = {
        "my_ops/reference.py": [(f"{define}x * x", f"{define}{value}")],
        f"my_ops/ops/{name}.py": [
            ("``x * x``", f"``{value}``"),
            ("again, is ``2 * x``", f"again, is ``{slope}``"),
            ("2 * (grad_out * grad)", f"grad_out * grad * ({second})"),
            ("2 * (grad * x_t)", f"grad * x_t * ({second})"),
        ],
        f"tests/ops/test_{name}.py": [
            ("return 2 * x", f"return {slope}"),
            ("{torch.float64: 1.0, torch.float32: 1.0}", f"dict.fromkeys(FLOATING, {limit})"),
        ],
    }
    for file, std in (f"{name}_cpu.cpp", "std::"), (f"{name}.cu", ""):
        edits[f"kernels/{name}/{file}"] = [
            ("value * value", in_cxx(cxx, std)),
            ("2 * (load(grad[i]) * value)", in_cxx(cxx_grad, std)),
        ]
    for path, pairs in edits.items():
        text = (folder / path).read_text()
        for old, new in pairs:
            assert text.count(old) == 1, (path, old)
            text = text.replace(old, new)
        (folder / path).write_text(text)


def test_new_op_of_other_formulas(tmp_path):
    here, printed = copied(tmp_path), ""
    for name in FORMULAS:
        printed += new_op(here, name)
        write_formula(name, tmp_path)
    paths = [line.split()[1] for line in printed.splitlines() if line.startswith("wrote ")]
    run("ruff", "format", *(path for path in paths if path.endswith(".py")), **here)
    run("clang-format", "-i", *(path for path in paths if not path.endswith(".py")), **here)
    for_cuda = [f"kernels/{name}/{name}.cu" for name in FORMULAS]
    check_generated(" or ".join(FORMULAS), printed, here, *for_cuda)


def test_new_cell(tmp_path):
    """Checks the page of the guide, what README says of it, and the program that uses the cell."""
    page = (ROOT / "docs/recurrent_cell.md").read_text()
    here = copied(tmp_path)
    printed = new_op(here, "--cell", "leaky")
    assert textwrap.indent(printed, "    ") in page
    run("mypy", **here)
    kernels = [f"kernels/recurrent/leaky{name}.cu" for name in ("", "_sm90")]
    check_generated("leaky", printed, here, *kernels, "csrc/leaky_cuda.cpp")
    (training,) = re.findall("```py\n(.*?)```", page, re.DOTALL)
    run(sys.executable, "-c", training, **here)
    printed = run(sys.executable, EXAMPLES / "own_cell.py", "--steps", "600", **here)
    assert f"Plot in {tmp_path / 'own_cell.png'}\n" in printed
    (layer,) = re.findall("```py\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert f"# {run(sys.executable, '-c', layer, **here)}" in layer


HEADERS = ["features", "locale", "endian", "strings", "errno", "pthread"]


@pytest.mark.parametrize(
    "name, rule",
    [
        ("d_sigmoid", "must be new, and my_ops/reference.py has a 'd_sigmoid'"),
        ("lltm_cell_forward", "must be new, and csrc/bindings.cpp has"),
        ("allow_shared_bytes", "must be new, and kernels/common/launch.cuh has"),
        ("stream", "must be new, and csrc/binding_cuda.h has"),
        ("bounds", "must be new, and there is a file tests/ops/test_bounds.py"),
        ("delete", "must be no word of C++"),
        ("concept", "must be no word of C++"),
        ("lambda", "must be no word of Python"),
        ("enumerate", "must be no name that Python has: 'enumerate' is a builtin"),
        ("--cell value_error", "must be no name that Python has: 'ValueError' is a builtin"),
        ("torch", "must be new, and my_ops/reference.py has a 'torch'"),
        ("distributed", "must be new, and there is my_ops/distributed.py"),
        ("recurrent", "must be new, and there is my_ops/recurrent"),
        *((name, f"there is a header {name}.h") for name in HEADERS),
        ("offsetof", "must be no name that C++ has: there is a macro offsetof"),
        ("Square", "must be lower-case words joined by _"),
        ("prepack", "must be new, and my_ops/__init__.py has a 'prepack'"),
        ("--cell gru", "must be new, and my_ops/reference.py has a 'gru'"),
        ("--cell gru_cell", "must be new, and my_ops/reference.py has a 'gru_cell'"),
        ("--cell cell_math", "must be new, and kernels/recurrent/cpu/step.h has"),
        ("--cell linear_activation", "must be new, and my_ops/nn/__init__.py has"),
        ("x" * 33, "of at most 32 letters"),
    ],
)
def test_new_op_refuses(name, rule):
    command = (sys.executable, ROOT / "tools/new_op", *name.split())
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("new_op: NAME must be ")
    assert rule in done.stderr


def test_porting(tmp_path):
    folder = EXAMPLES / "porting"
    lines = output_of("porting/port.py", TORCH_EXTENSIONS_DIR=str(tmp_path)).splitlines()
    shown = re.findall("^    (cpu|cuda)(:.*)", (folder / "README.md").read_text(), re.MULTILINE)
    devices = ["cpu", "cuda"] if BUILDS_CUDA else ["cpu"]
    assert lines == [device + text for device, text in shown if device in devices]
    include = [folder / "include", ROOT / "csrc", ROOT / "kernels"]
    sources = [folder / name for name in ("before.cu", "kernels/prelu.cu", "csrc/prelu_cuda.cpp")]
    compile_for_cuda(tmp_path, *sources, include=include)
