"""``python -m my_ops tune`` without a GPU: the fit to made-up times, and the command with a made-up
GPU. And on a GPU."""

import json
import math
import subprocess
import sys

import pytest
import torch
from conftest import NEEDS_CUDA
from made_up_gpus import A100, H200, L4, MODEL, cache_in, gpu_of, planned

from my_ops import __main__ as command
from my_ops import _fit, _gemm_costs, _tune, _tuned
from my_ops._gemm_costs import Planner


@pytest.fixture
def gpu(request):
    return gpu_of(request.node)


@pytest.fixture
def cache(monkeypatch, tmp_path):
    return cache_in(tmp_path, monkeypatch)


# --------------------------------------------------------------------------------------------- fit


def library_us(row, rate):
    """Microseconds if a library has so many multiply-adds in one."""
    return 4 + _fit.work(row) / rate


def tiles_us(row, rate, sm_count):
    tiles = row.get("batch", 1) * math.ceil(row["m"] / 128) * math.ceil(row["n"] / 128)
    return 5 + math.ceil(tiles / sm_count) * sm_count * 128 * 128 * row["k"] / rate


def made_up_times(gpu, gain):
    """Of a GPU whose fp32_sm80 has so many times the library's rate, where small products of ours
    take 2 us and the time of their multiply-adds at a quarter of the library's."""
    rate = 1e4 * gpu.sm_count / (30 if gain else 1)

    def times_of(problem, plans, *_):
        row = {name: getattr(problem, name) for name in ("batch", "m", "n", "k")}
        known = {
            "fp32_sm80": tiles_us(row, rate * gain, gpu.sm_count),
            "small": 2 + 4 * _fit.work(row) / rate,
            "library: its product": library_us(row, rate),
        }
        return {plan: (known[plan], known[plan]) for plan in plans}

    return times_of


@pytest.fixture
def measured(monkeypatch):
    """Returns a function from a GPU and the gain of fp32_sm80 there to products with times."""

    def measure(gpu, gain):
        monkeypatch.setattr(_tune, "times_of", made_up_times(gpu, gain))
        return _tune.measure(gpu, MODEL, _gemm_costs.costs_of(gpu, own=True), 1000)

    return measure


def regret(gpu, rows, plans, numbers):
    planner = Planner([_fit.problem_of(row, gpu) for row in rows])
    return _fit.Fit(planner, plans, rows, numbers).regrets()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpu", "gain"), [(A100, 1.3), (A100, 2.0), (A100, 0.8), (L4, 0.6), (L4, 1.6)]
)
def test_a_fit_finds_what_the_times_have(gpu, gain, measured):
    rows, plans = measured(gpu, gain)
    own = _gemm_costs.costs_of(gpu, own=True)
    fit = _tune.fitted(gpu, own, rows, plans)
    assert {name for name, x in fit.numbers.items() if x != own[name]} <= set(_tuned.FITTED)
    before, after = (sum(regret(gpu, rows, plans, x)) / len(rows) for x in (own, fit.numbers))
    assert after < 0.02 < before
    takes = any("fp32_sm80" in plan for plan in planned(gpu, fit.numbers))
    assert takes == (gain > 1)
    if gain > 1:
        assert 0.8 / gain < fit.numbers["fp32_sm80.product"] < 1.2 / gain
    # A small product's time is the library's where 2 + 4 x = 4 + x.
    crossover = 2 / 3 * 1e4 * gpu.sm_count / 30
    assert 0.5 < fit.numbers["small.max_work_8_bytes"] / crossover < 2


@pytest.mark.slow
def test_a_fit_keeps_costs_that_fit(measured):
    rows, plans = measured(A100, 1.3)
    own = _gemm_costs.costs_of(A100, own=True)
    once = _tune.fitted(A100, own, rows, plans).numbers
    assert _tune.fitted(A100, once, rows, plans).numbers == once


def test_products_of_hopper_include_few_rows():
    assert {row["family"] for row in _tune.products(H200)} - {
        row["family"] for row in _tune.products(A100)
    } == {"float32, few rows"}


def test_candidates_choose_each_tile_alone():
    """Of 16-bit products, with the epilogue in the kernel and without."""
    tiles = [f"half_sm90.{size}_us" for size in ("large", "wide", "medium", "small")]
    own = _gemm_costs.costs_of(H200)
    changed = [numbers for numbers in _fit.candidates(own) if numbers[tiles[0]] != own[tiles[0]]]
    chosen = [[name for name in tiles if numbers[name] < own[name]] for numbers in changed]
    assert chosen == [[tile] for tile in tiles] * 2


@pytest.mark.slow
def test_every_plan_of_a_product_is_timed():
    rows = _tune.products(H200)
    planner = Planner([_fit.problem_of(row, H200) for row in rows])
    found = _fit.plans_of(rows, planner, _gemm_costs.costs_of(H200))
    seen = {plan for plans in found for plan in plans}
    assert {plan.split(",")[0] for plan in seen} == {
        "library: its product", "fp32_skinny", "fp32_narrow", "fp32_short", "fp32_sm90",
        "fp32_sm80", "small", "half_sm90",
    }  # fmt: skip
    assert len([plan for plan in seen if plan.startswith("fp32_sm90, tile")]) == 4
    for row, plans in zip(rows, found, strict=True):
        assert any(plan.startswith("library") for plan in plans)
        for plan, numbers in plans.items():
            assert Planner([_fit.problem_of(row, H200)]).plans(numbers) == [plan]


# ----------------------------------------------------------------------------------------- command


@pytest.fixture
def tune(monkeypatch, capsys):
    """Runs the command on a made-up GPU; what it prints."""

    def run(*options, gpu, gain=1.6):
        monkeypatch.setattr(_tune, "find_gpu", lambda device: (gpu, MODEL))
        monkeypatch.setattr(_tune, "times_of", made_up_times(gpu, gain))
        monkeypatch.setattr(sys, "argv", ["my_ops", "tune", *options])
        assert command.main() == 0
        return capsys.readouterr()

    return run


@pytest.mark.slow
def test_the_command(tune, cache, gpu):
    said = tune(gpu=gpu)
    assert said.err == ""
    lines = said.out.splitlines()
    assert lines[0] == f"{MODEL.name}: 520 products timed"
    path = _tuned.place_of(gpu, MODEL)
    assert lines[-1] == f"written to {path}, used by every program that starts from now on"
    assert any(line.startswith("  fp32_sm80.product: 1 -> 0.") for line in lines)
    assert any(line.startswith("  float32             200 products") for line in lines)
    tuned = _tuned.read(path)
    assert (tuned.gpu, tuned.model, set(tuned.costs)) == (gpu, MODEL, set(_tuned.FITTED))
    own = _gemm_costs.costs_of(gpu, own=True)
    assert _gemm_costs.costs_of(gpu) == own  # in this process
    assert torch.backends.cuda.matmul.allow_tf32 is False


@pytest.mark.slow
def test_the_command_in_json(tune, cache, gpu):
    said = json.loads(tune("--json", gpu=gpu).out)
    own = _gemm_costs.costs_of(gpu, own=True)
    assert said.pop("path") == str(_tuned.place_of(gpu, MODEL))
    changed, costs = said.pop("changed"), said["costs"]
    assert changed == {n: [own[n], x] for n, x in costs.items() if own[n] != x}
    assert "fp32_sm80.product" in changed
    families = said.pop("families")
    assert families["float32"]["products"] == 200
    assert all(each["after"] <= each["before"] + 0.01 for each in families.values())
    assert said == _tuned.record_of(_tuned.read(_tuned.place_of(gpu, MODEL)))


@pytest.mark.slow
def test_the_command_stops_in_time(tune, cache, gpu, monkeypatch):
    ticks = iter(range(10**6))
    monkeypatch.setattr(_tune.time, "monotonic", lambda: next(ticks))
    assert tune("--seconds", "90", gpu=gpu).out.splitlines()[0].endswith(": 90 products timed")
    with pytest.raises(
        SystemExit, match=r"^tune: 20 products were timed in 20 s, and 50 are needed"
    ):
        tune("--seconds", "20", gpu=gpu)


@pytest.mark.slow
def test_progress_on_a_terminal(tune, cache, gpu, monkeypatch):
    class Terminal:
        text = ""

        def isatty(self):
            return True

        def write(self, text):
            self.text += text

        def flush(self):
            pass

    monkeypatch.setattr(sys, "stderr", Terminal())
    tune(gpu=gpu)
    assert "\rtune: 0 of 120 s, 17 products timed " in sys.stderr.text
    assert sys.stderr.text.endswith("\r\033[K")


def test_products_without_room_are_left(tune, cache, gpu, monkeypatch):
    real = made_up_times(gpu, 1)

    def times_of(problem, *rest):
        if problem.m > 1000:
            raise torch.cuda.OutOfMemoryError("no room")
        return real(problem, *rest)

    monkeypatch.setattr(_tune, "find_gpu", lambda device: (gpu, MODEL))
    monkeypatch.setattr(_tune, "times_of", times_of)
    rows, _ = _tune.measure(gpu, MODEL, _gemm_costs.costs_of(gpu), 1000)
    assert 100 < len(rows) < 520
    assert max(row["m"] for row in rows) <= 1000


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_to(tune, gpu, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MY_OPS_CACHE", str(tmp_path / "file/cache"))
    with pytest.raises(SystemExit, match=r"^tune: .*file/cache/costs cannot be written to; MY_OPS"):
        tune(gpu=gpu)


def test_gpus_that_cannot_be_measured(monkeypatch):
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"^tune: torch sees no GPU"):
        _tune.find_gpu(0)
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "device_count", lambda: 2)
    for device in (2, -1):
        with pytest.raises(SystemExit, match=f"^tune: --device must be below 2, got {device}$"):
            _tune.find_gpu(device)
    chosen = []
    monkeypatch.setattr(cuda, "set_device", chosen.append)
    monkeypatch.setattr(cuda, "synchronize", lambda: None)
    monkeypatch.setattr(_gemm_costs, "current_gpu", lambda: None)
    with pytest.raises(SystemExit, match=r"^tune: this build of my_ops is for the CPU only$"):
        _tune.find_gpu(1)
    monkeypatch.setattr(_gemm_costs, "current_gpu", lambda: (L4._replace(code=0), MODEL))
    with pytest.raises(SystemExit, match=r"^tune: this build of my_ops has no code for NVIDIA"):
        _tune.find_gpu(1)
    monkeypatch.setattr(_gemm_costs, "current_gpu", lambda: (L4, MODEL))
    assert _tune.find_gpu(1) == (L4, MODEL)
    assert chosen == [1, 1, 1]


LOGGED = """
import torch
import my_ops

x = torch.randn(512, 512, device="cuda")
my_ops.gemm(x, x)
"""


@NEEDS_CUDA
@pytest.mark.slow
def test_on_cuda(cache, tmp_path, monkeypatch):
    """The command as a user runs it, then a program; the costs that the plan reads are those of the
    file, which is found by the GPU's name."""
    monkeypatch.setenv("MY_OPS_LOG", "plan")

    def run(*arguments):
        command = [sys.executable, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
        return done.stdout, done.stderr

    assert "; costs: tuned on" not in run("-c", LOGGED)[1]
    found = json.loads(run("-m", "my_ops", "tune", "--seconds", "25", "--json")[0])
    assert found["gpu"]["name"] == torch.cuda.get_device_name()
    assert sum(each["products"] for each in found["families"].values()) >= _tune.LEAST_PRODUCTS
    assert f"; costs: tuned on {found['date']}" in run("-c", LOGGED)[1]
    (path,) = cache.iterdir()
    assert str(path) == found["path"]
    gpu, model = _gemm_costs.current_gpu()
    for other in (model._replace(name="another"), model._replace(clock_khz=1)):
        path.unlink()
        path = _tuned.write(_tuned.Tuned(gpu, other, found["costs"], found["date"]))
        assert "; costs: tuned on" not in run("-c", LOGGED)[1]


@NEEDS_CUDA
def test_products_with_costs_that_choose_each_plan(monkeypatch):
    """As they are timed: the kernel that runs is the one that was asked for."""
    gpu, model = _tune.find_gpu(torch.cuda.current_device())
    own = _gemm_costs.costs_of(gpu, own=True)
    row = {"m": 384, "n": 256, "k": 1024, "b_transposed": 1}
    planner = Planner([_fit.problem_of(row, gpu)])
    (plans,) = _fit.plans_of([row], planner, own)
    a = torch.randn(384, 1024, device="cuda")
    b = torch.randn(256, 1024, device="cuda").T
    results = {}
    try:
        for words, numbers in plans.items():
            _gemm_costs.give(gpu, model, numbers, "being tested")
            assert _gemm_costs.costs_of(gpu) == numbers
            results[words] = torch.ops.my_ops.gemm(a, b)
        times = _tune.times_of(planner.problems[0], plans, gpu, model)
    finally:
        _gemm_costs.give(gpu, model, own, "own")
    exact = a.double() @ b.double()
    for result in results.values():
        torch.testing.assert_close(result.double(), exact, rtol=1e-4, atol=1e-3)
    assert len({tuple(result.flatten().tolist()[:1000]) for result in results.values()}) > 1
    assert times.keys() == plans.keys()
    assert all(0 < us < 1e5 for both in times.values() for us in both)
