"""``python -m my_ops explain`` and the C function below it: which kernel computes which product on
which GPU. The answers come from the plan of the CUDA build, on any machine."""

import argparse
import ctypes
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from my_ops import _explain, _gemm_costs

TOOLS = Path(__file__).resolve().parents[2] / "tools/build"

GOLDEN = [  # the question, and the last line of the answer, which is the plan
    ("gemm 4096 4096 4096", "fp32_sm90, tile 128 x 128, 192.3 MiB of workspace"),
    ("gemm 4096 4096 4096 --gpu h100", "fp32_sm90, tile 128 x 128, 192.3 MiB of workspace"),
    ("gemm 4096 4096 4096 --gpu a100", "fp32_sm80"),
    ("gemm 256 6912 4096 --gpu a100", "fp32_sm80"),  # a tile for each SM
    ("gemm 256 7040 4096 --gpu a100", "library: its product"),  # and one more
    ("gemm 128 8192 4096 --gpu a100", "library: its product"),  # for half of them
    ("gemm 256 6912 192 --gpu a100", "library: its product"),
    ("gemm 4096 4096 4096 --gpu a100 --tf32 --precision high", "library: its product"),
    ("gemm 1024 1024 1024 --precision high", "library: its product in TF32"),
    ("gemm 1024 1024 1024 --precision high --tf32", "library: its product"),
    ("linear 1024 1024 1024 --precision high --bias", "library: its product in TF32"),
    ("linear 1024 1024 1024 --precision high --residual", "fp32_sm90, tile 128 x 64, 12.0 MiB of "
     "workspace"),
    ("gemm 4096 4096 4096 --gpu l4", "library: its product"),
    ("gemm 4096 4096 4096 --gpu l4 --tf32", "library: its product"),
    ("gemm 4096 4096 4096 --gpu l4 --tf32 --precision highest", "fp32_sm80"),
    ("gemm 4096 4096 4096 --gpu t4 --tf32", "library: its product"),
    ("gemm 4096 4096 4096 --gpu b200", "library: its product"),
    ("gemm 4096 4096 4096 --dtype float64", "library: its product"),
    ("gemm 4096 4096 4096 --dtype bfloat16", "library: its product"),
    ("gemm 4097 4097 4097 --dtype bfloat16", "half_sm90, tile 128 x 192, 64.1 MiB of workspace"),
    # Each of these two uses its own costs.
    ("gemm 512 447 333 --dtype float16", "library: its product"),
    ("gemm 512 447 333 --dtype float16 --gpu h100", "half_sm90, tile 128 x 64, 0.6 MiB of "
     "workspace"),
    ("gemm 16 4096 4096", "fp32_skinny, k in 8 slices, 2.0 MiB of workspace"),
    ("gemm 13 17 19", "small"),
    ("gemm 0 17 19", "none, the output is empty"),
    ("linear 8192 4096 4096 --dtype float16 --activation silu --bias", "half_sm90, tile 128 x 256, "
     "with epilogue warps"),
    ("linear 8192 4096 4096 --dtype bfloat16 --activation gelu_tanh --bias",
     "library: its product with bias and gelu_tanh in the epilogue"),
    ("linear 8192 4096 512 --dtype float16 --activation gelu --bias",
     "library: its product with the bias, then one kernel for the rest"),
    # cuBLAS may add slices of k in 16 bits, if outputs are few.
    ("linear 256 1024 4096 --dtype bfloat16 --activation silu --bias",
     "library: its product in float32, then one kernel for the rest"),
    ("gemm 768 3072 12608", "fp32_sm90, tile 128 x 96, k in 2 slices, 295.2 MiB of workspace"),
    # Each option matters.
    ("gemm 768 768 8192 --a-transposed", "fp32_sm90, tile 128 x 128, k in 11 slices, 97.3 MiB of "
     "workspace"),
    ("gemm 768 768 8192 --b-transposed", "fp32_sm90, tile 128 x 96, k in 5 slices, 83.3 MiB of "
     "workspace"),
    ("gemm 128 128 128", "small"),
    ("gemm 128 128 128 --batch 64", "library: its product"),
    ("linear 24 2048 2048", "library: its product"),
    ("linear 24 2048 2048 --packed", "fp32_sm90, tile 64 x 64, k in 4 slices, 25.0 MiB of "
     "workspace"),
    ("linear 2048 2048 2048 --dtype bfloat16", "library: its product"),
    ("linear 2048 2048 2048 --dtype bfloat16 --residual",
     "library: its product with the bias, then one kernel for the rest"),
    ("gemm 4096 4096 4096 --gpu rtx4090", "library: its product"),
    ("linear 4194304 1024 1024", "fp32_sm90, tile 128 x 128, 24598.0 MiB of workspace"),
    ("gemm 64 64 1073741824", "library: its product"),
    ("linear 4 4095 4096 --dtype float16", "library: its product in float32, then one kernel for "
     "the rest"),
]  # fmt: skip


LAYERS = [  # the question, and the plans of forward and backward
    ("gru 100 1 32", "warp, batch rows of a block: 1", "warp, batch rows of a block: 1"),
    ("lltm 100 512 64 --dtype fp16", "block, batch rows of a block: 4",
     "block, batch rows of a block: 4"),
    ("gru 100 8 256", "cluster of 8 blocks, batch rows: 1", "cluster of 8 blocks, batch rows: 1"),
    ("lstm 100 64 512 --dtype bf16", "grid, groups of 32 blocks: 4, 4.0 MiB of workspace",
     "grid, groups of 32 blocks: 4, 16.0 MiB of workspace"),
    ("lstm 20 64 1024", "warpgroup, groups of 128 blocks: 1, 0.5 MiB of workspace",
     "warpgroup, groups of 15 clusters of 8 blocks: 1, 2.1 MiB of workspace"),
    ("lstm 20 512 768", "warpgroup, groups of 96 blocks: 1, 3.0 MiB of workspace",
     "warpgroup, groups of 11 clusters of 8 blocks: 1, 12.4 MiB of workspace"),
    ("lstm 20 512 768 --tf32", "steps: a product and a kernel for each step",
     "steps: a product and a kernel for each step"),
    ("gru 20 64 1024 --gpu l4", "steps: a product and a kernel for each step",
     "steps: a product and a kernel for each step"),
    ("gru 20 64 64 --dtype fp64", "steps: a product and a kernel for each step",
     "steps: a product and a kernel for each step"),
]  # fmt: skip


def answer(line):
    parser = argparse.ArgumentParser()
    _explain.add_arguments(parser)
    return _explain.explain(parser.parse_args(line.split())).splitlines()


@pytest.mark.parametrize("asked, plan", GOLDEN)
def test_plan(asked, plan):
    assert answer(asked)[-1] == f"  {plan}"


@pytest.mark.parametrize("asked, forward, backward", LAYERS)
def test_plan_of_a_layer(asked, forward, backward):
    said = answer(asked)
    where = said.index("  backward")
    assert said[1] == "  forward"
    assert [said[where - 1], said[-1]] == [f"    {forward}", f"    {backward}"]
    for line in (*said[2 : where - 1], *said[where + 1 : -1]):
        assert ": no, " in line


def test_a_layer_as_json():
    said = json.loads("\n".join(answer("lstm 20 64 1024 --json --gpu h100")))
    plain = answer("lstm 20 64 1024 --gpu h100")
    assert plain[0] == "lstm of float32, steps x batch x hidden = 20 x 64 x 1024, on h100"
    where = plain.index("  backward")
    for name, lines in (("forward", plain[2:where]), ("backward", plain[where + 1 :])):
        *refused, plan = (line.strip() for line in lines)
        not_taken = dict(line.split(": no, ") for line in refused)
        assert said.pop(name) == {"plan": plan, "not taken": not_taken}
    assert said == {
        "op": "lstm", "gpu": "h100", "dtype": "float32", "steps": 20, "batch": 64, "hidden": 1024,
    }  # fmt: skip


@pytest.mark.parametrize("short, dtype", _explain.SHORT.items())
def test_short_names_of_dtypes(short, dtype):
    asked = "gemm 512 447 333 --gpu h200 --dtype"
    assert answer(f"{asked} {short}") == answer(f"{asked} {dtype}")


@pytest.mark.skipif(not TOOLS.is_dir(), reason="needs the repository")
@pytest.mark.parametrize("name", _explain.GPUS)
def test_the_code_that_a_gpu_runs(name, monkeypatch):
    """Of a wheel with code for all GPUs: the newest of its generation that is no newer than it."""
    monkeypatch.syspath_prepend(str(TOOLS))
    preflight = importlib.import_module("preflight")
    wheel = re.findall(r"(\d+)\.(\d)(a?)", preflight.WITH_BLACKWELL)
    gpu = _explain.GPUS[name]
    fits = [(int(minor), a) for major, minor, a in wheel if int(major) == gpu.major]
    minor, a = max(code for code in fits if code[0] <= gpu.minor)
    assert (gpu.code, gpu.hopper_code) == (10 * gpu.major + minor, a == "a")


def test_an_assumed_gpu_is_named():
    costs = "; costs: built in"
    assert answer("gemm 8 8 8")[0].endswith(f"on h200 (assumed: --gpu names another){costs}")
    assert answer("gemm 8 8 8 --gpu h200")[0].endswith(f"on h200{costs}")


@pytest.mark.parametrize("gpu", _explain.GPUS)
def test_the_costs_of_a_gpu_are_named(gpu):
    cautious = "cautious, `python -m my_ops tune` measures this GPU"
    said = "built in" if gpu in ("h100", "h200") else cautious
    assert answer(f"gemm 8 8 8 --gpu {gpu}")[0].endswith(f"on {gpu}; costs: {said}")
    assert json.loads("\n".join(answer(f"linear 8 8 8 --gpu {gpu} --json")))["costs"] == said
    assert answer(f"gru 8 8 8 --gpu {gpu}")[0].endswith(f"on {gpu}")


@pytest.mark.parametrize(
    "asked, taken",
    [
        ("gemm 1099511627776 1 1", True),
        ("gemm 1048576 1048576 1048576", True),
        ("gemm 1048577 1048576 1", False),  # out
        ("gemm 1048577 1 1048576", False),  # a
        ("gemm 1 1048577 1048576", False),  # b
        ("gemm 1024 1024 1024 --batch 1048576", True),
        ("gemm 1024 1024 1024 --batch 1048577", False),
        ("gemm 0 0 1099511627776", True),
        ("gemm 0 0 1099511627777", False),
        ("gemm -1 8 8", False),
        ("linear 9223372036854775807 9223372036854775807 2", False),
        ("linear 8 8 9223372036854775808", False),
        ("gru 1099511627776 1 1", True),
        ("gru 1024 1024 1048576", True),
        ("gru 1024 1025 1048576", False),
        ("gru 1 1 1048577", False),  # weight_hh
        ("gru -1 1 1", False),
    ],
)
def test_sizes_are_limited_by_their_tensors(asked, taken):
    """In Python and in C++ alike."""
    if taken:
        assert answer(f"{asked} --gpu h200")[-1].startswith("  ")
    else:
        with pytest.raises(SystemExit, match="tensors have at most 2\\^40 elements, got"):
            answer(f"{asked} --gpu h200")
    op, *sizes, batch = f"{asked} 1".replace("--batch ", "").split()[:5]
    sizes, gpu = list(map(int, sizes)), _explain.GPUS["h200"]
    if max(sizes) < 2**63:
        module = ctypes.CDLL(str(Path(_explain.__file__).with_name("_C.so")))
        function, problem = module.my_ops_explain_recurrent, None
        if op == "gru":
            problem = _explain._Layer(*gpu, b"gru", b"float32", *sizes)
        else:
            function = module.my_ops_explain_gemm
            problem = _gemm_costs.Problem(*gpu, b"float32", b"none", int(batch), *sizes)
        function.restype = ctypes.c_int64
        assert (function(ctypes.byref(problem), None, ctypes.c_int64(0)) > 0) == taken


def test_as_json():
    said = json.loads("\n".join(answer("gemm 200 8192 64 --tf32 --json --dtype bf16")))
    plain = answer("gemm 200 8192 64 --tf32 --dtype bf16")
    assert said.pop("not taken") == dict(line.strip().split(": no, ") for line in plain[1:-1])
    assert said == {
        "op": "gemm", "gpu": "h200", "dtype": "bfloat16", "precision": "high",
        "batch": 1, "m": 200, "n": 8192, "k": 64, "plan": plain[-1].strip(), "costs": "built in",
    }  # fmt: skip


def test_every_kernel_asked_says_why_not():
    head, *refusals, plan = answer("gemm 200 8192 64 --gpu h200")
    assert head == "gemm of float32, m x n x k = 200 x 8192 x 64, on h200; costs: built in"
    assert [line.split(":")[0].strip() for line in refusals] == [
        "fp32_skinny", "fp32_narrow", "fp32_short", "fp32_sm90", "fp32_sm80", "small",
    ]  # fmt: skip
    assert all(": no, " in line for line in refusals)
    assert plan == "  library: its product"


@pytest.mark.slow
def test_from_the_command_line(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_OPS_CACHE", str(tmp_path))  # no GPU was tuned
    command = [sys.executable, "-m", "my_ops", "explain"]
    done = subprocess.run(
        [*command, "gemm", "4096", "4096", "4096"],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == answer("gemm 4096 4096 4096")
    refused = {
        "tensors have at most 2\\^40 elements, got": ["gemm", "1", "2", str(2**40 + 1)],
        "no op is called 'rnn': gemm, linear, lltm, lstm, gru": ["rnn", "1", "2", "3"],
        "no activation of linear is called 'tanh'": [
            "linear",
            "1",
            "2",
            "3",
            "--activation",
            "tanh",
        ],
    }
    for message, wrong in refused.items():
        done = subprocess.run(
            [*command, *wrong], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode != 0
        assert re.search(message, done.stderr)


@pytest.mark.parametrize(
    "asked, option",
    [
        ("gemm 8 8 8 --bias", "bias"),
        ("gemm 8 8 8 --activation relu", "activation"),
        ("gemm 8 8 8 --residual --packed", "residual"),
        ("gemm 8 8 8 --packed", "packed"),
        ("linear 8 8 8 --batch 3", "batch"),
        ("linear 8 8 8 --a-transposed", "a-transposed"),
        ("linear 8 8 8 --b-transposed", "b-transposed"),
        ("lstm 8 8 8 --batch 3", "batch"),
        ("gru 8 8 8 --bias", "bias"),
        ("lltm 8 8 8 --precision high", "precision"),
    ],
)
def test_an_option_of_the_other_op_is_refused(asked, option):
    with pytest.raises(SystemExit, match=f"explain: {asked.split()[0]} takes no --{option}$"):
        answer(asked)


def test_the_c_function_refuses():
    module = ctypes.CDLL(str(Path(_explain.__file__).with_name("_C.so")))
    function, text = module.my_ops_explain_gemm, ctypes.create_string_buffer(8)
    function.restype = ctypes.c_int64

    def call(dtype=b"float32", m=64, activation=b"none", size=8, buffer=text):
        gpu = _explain.GPUS["h200"]
        problem = _gemm_costs.Problem(*gpu, dtype, activation, 1, m, 64, 64)
        return function(ctypes.byref(problem), buffer, ctypes.c_int64(size))

    whole = call(size=0, buffer=None)
    assert whole > 8
    assert call() == whole
    assert len(text.value) == 7
    for wrong in ({"dtype": b"int8"}, {"m": -1}, {"m": 2**34 + 1}, {"activation": b"tanh"}):
        assert call(**wrong) == -1
    assert call(dtype=None) == call(activation=None) == -1
    assert function(None, text, ctypes.c_int64(8)) == -1
    assert call(size=-1) == call(buffer=None) == -1


def test_the_c_function_of_layers_refuses():
    module = ctypes.CDLL(str(Path(_explain.__file__).with_name("_C.so")))
    function, text = module.my_ops_explain_recurrent, ctypes.create_string_buffer(8)
    function.restype = ctypes.c_int64

    def call(op=b"gru", dtype=b"float32", hidden=64, size=8):
        layer = _explain._Layer(*_explain.GPUS["h200"], op, dtype, 8, 8, hidden)
        return function(ctypes.byref(layer), text, ctypes.c_int64(size))

    assert call() > 8
    assert len(text.value) == 7
    for wrong in ({"op": b"gemm"}, {"dtype": b"int8"}, {"hidden": -1}, {"hidden": 2**20 + 1}):
        assert call(**wrong) == -1
    assert call(op=None) == call(dtype=None) == call(size=-1) == -1
    assert function(None, text, ctypes.c_int64(8)) == -1
