"""Tables that tools/docs/measured.py writes about layers and gains, from a few made-up results."""

import importlib
import itertools
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results/nvidia-h200-recurrent.json"
pytestmark = pytest.mark.skipif(not RESULTS.is_file(), reason="needs the repository")
NAMES = "LSTM", "GRU", "LLTM"
WAYS = "forward", "forward + backward"


def lines(text):
    """The sentence and the cells of every row."""
    told, _, shown = text.partition("\n\n")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in shown.splitlines()]
    assert len({len(row) for row in rows}) == 1
    return told, rows[2:]


@pytest.fixture
def layers(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "tools/docs"))
    shutil.copy(RESULTS, tmp_path)
    return importlib.import_module("measured_layers").Layers(tmp_path)


def test_slower_layers_are_counted(layers):
    def case(size, ratio, **other):
        return {"case": size, "x cuDNN": ratio, **other}

    strict = "x cuDNN strict"
    layers.layers = {
        "table": [
            case("LLTM bfloat16 T2 B16 H32 forward", 1.5),
            case("LLTM float16 T2 B16 H32 forward", 0.9),
            case("LLTM float16 T2 B16 H32 forward + backward", 2.0),
        ],
        "sweep": [
            case("GRU float16 T8 B16 H32 forward", 0.5),
            case("GRU float16 T8 B16 H32 forward + backward", 0.98),
            case("GRU float32 T8 B4 H256 forward", 0.6, **{strict: 2.0}),
            case("GRU float32 T8 B4 H32 forward", 1.0, **{strict: 0.4}),
            case("GRU float32 T8 B4 H64 forward", 1.0, **{strict: 1.0}),
        ],
    }
    told, rows = lines(layers.slower_layers())
    assert "0 of 1 in bf16, 2 of 4 in fp16, 1 of 3 in fp32" in told
    assert "TF32, 1 fp32 cases" in told
    assert rows == [
        ["32", "4", "", "", "1 / 0 of 1: 0.40", ""],
        ["32", "16", "", "2 / 0 of 2: 0.50", "", ""],
        ["256", "4", "", "", "", "1 / 0 of 1: 0.60"],
    ]


def test_memory_of_layers(layers):
    layers.layers = {
        "memory": [
            {"case": f"{name} {dtype} T2 B3 H4", "my_ops MiB": held, "cuDNN MiB": 2.0}
            for dtype, held in (("bfloat16", 1.0), ("float16", 3.0), ("float32", 200.0))
            for name in NAMES
        ]
    }
    told, rows = lines(layers.layer_memory())
    assert "GRU 0.50 to 100.00" in told
    few, many = "1.00 / 2.00 (0.50)", "200 / 2.00 (100.00)"
    assert rows == [["2, 3, 4", few, few, many, many]]


def test_resets_of_layers(layers):
    sizes = "bfloat16 T2 B3 H4", "float32 T2 B3 H4"
    layers.layers = {
        "reset": [
            {"case": f"{name} {size} {way}", "my_ops us": 101.0, "no reset us": 100.0}
            for size, name, way in itertools.product(sizes, NAMES, WAYS)
        ]
    }
    layers.layers["reset"][-1]["my_ops us"] = 112.0
    told, rows = lines(layers.layer_resets())
    assert "1.0 % forward and 1.0 % forward + backward. 1 of 12" in told
    assert rows == [["2, 3, 4", "fp32", "1.0 / 1.0", "1.0 / 1.0", "1.0 / 12.0"]]


def test_layers_on_the_clock_of_the_host(layers):
    case = "float16 T4 B3 H4 forward + backward"
    layers.layers = {
        "host": [
            {"case": f"{name} {case}", "my_ops us": time, "cuDNN us": 1000.0}
            for name, time in zip(NAMES, (400.0, 1500.0, 600.0), strict=True)
        ]
    }
    told, rows = lines(layers.layer_host())
    assert "0.40 to 1.50 of cuDNN's time, 0.60 in the median; 1 of them" in told
    cells = ["0.400 / 1.00 (0.40)", "1.50 / 1.00 (1.50)", "0.600 / 1.00 (0.60)"]
    assert rows == [["4, 3, 4", "fp16", *cells]]


def test_gains_count_slow_cases(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools/docs"))
    gains = importlib.import_module("measured_gains").Gains(RESULTS.parent)
    ratios = (0.5, 0.96, 0.98, 2.0, 3.0)
    products = [
        {"case": f"{dtype} 1x1x1", "x cuBLAS": ratio * factor}
        for dtype, factor in (("float32", 1), ("bfloat16", 10))
        for ratio in ratios
    ]
    gains.gains_h200 = gains.gains_h100 = {"sweep": products}
    gains.gains_layers = [
        {"case": f"{name} {dtype} T1 B1 H1", "x cuDNN": ratio, "x cuDNN strict": 2 * ratio}
        for name, dtype, ratio in (
            ("LSTM", "float32", 0.9),
            ("GRU", "float32", 1.1),
            ("LLTM", "float32", 0.1),
            ("GRU", "bfloat16", 0.2),
            ("GRU", "float16", 5.0),
        )
    ]
    gains.gains_cpu = {
        "layers, 1 thread(s)": [{"case": "GRU", "x torch": 0.8}, {"case": "LLTM", "x torch": 0.1}],
        "small, 1 thread(s)": [{"case": "gemm 1 x 1", "x torch": 0.1}],
    }
    _, rows = lines("\n\n" + gains.gains())
    shown = {tuple(row[:2]): row[2:] for row in rows}
    assert shown["fp32 products, H200", "cuBLAS, strict"] == ["5", "2", "0.50", "0.98", "3.00"]
    assert shown["bf16 products, H200", "cuBLAS"] == ["5", "0", "5.00", "9.80", "30.00"]
    assert shown["LSTM, GRU in fp32, H200", "cuDNN with TF32"][:3] == ["2", "1", "0.90"]
    assert shown["the same", "cuDNN, strict"][:3] == ["2", "0", "1.80"]
    assert shown["LSTM, GRU in bf16, H200", "cuDNN"][:2] == ["1", "1"]
    assert shown["LSTM, GRU on a CPU with AVX-512", "torch"][:3] == ["1", "1", "0.80"]


def test_gains_of_programs(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools/docs"))
    gains = importlib.import_module("measured_gains").Gains(RESULTS.parent)
    ways = {"x switch": 2.0, "x both": 1.5, "x tf32": 0.9}
    speeds = {
        way: {"geometric mean": mean, "slowest": mean - 1}
        for way, mean in (("switch", 2.0), ("both", 3.0), ("tf32", 4.0))
    }
    speeds["the better of switch and both"] = {"geometric mean": 3.5, "slowest": 2.5}
    gains.gains_steps = {
        "training step": [{"case": "bert eager", "torch ms": 10.0, **ways}],
        "speeds": speeds,
    }
    told, rows = lines(gains.gains_programs())
    assert (
        "of 1 is 2.00 under the switch (slowest 1.00), 3.00 with `convert` too (slowest 2.00)"
        in told
    )
    assert rows == [["bert", "10.0", "2.00", "1.50", "0.90"]]
    told = gains.programs_headline()
    assert "train 3.00 times as fast" in told and "4.00 with TF32" in told
    assert "2.00 with the first alone. The slowest have 2.00, 3.00 and 1.00." in told


def test_gpu_time_of_programs(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools/docs"))
    results = importlib.import_module("measured").Results(RESULTS.parent)
    times = {
        "torch gpu ms": {"products": 3.0, "copies": 1.0},
        "both gpu ms": {"my_ops": 1.5, "copies": 1.0},
    }
    results.steps = {"training step": [{"case": "bert eager", **times}]}
    _, rows = lines("\n\n" + results.programs_gpu())
    assert rows == [["bert", "4.0 / 2.5", "3.0 / 0.0", "1.0 / 1.0", "0.0 / 1.5"]]
