"""The costs that plans of products have, and are given; the files of ``python -m my_ops tune`` that
keep them."""

import argparse
import hashlib
import json
import math
import subprocess
import sys
import threading
import warnings

import pytest
import torch
from made_up_gpus import A100, GRID, H200, L4, MODEL, cache_in, gpu_of, planned

from my_ops import _cache, _explain, _fit, _gemm_costs, _tuned
from my_ops._gemm_costs import Model, Planner
from my_ops._tuned import Tuned

CAUTIOUS = "cautious, `python -m my_ops tune` measures this GPU"


@pytest.fixture
def gpu(request):
    return gpu_of(request.node)


@pytest.fixture
def cache(monkeypatch, tmp_path):
    return cache_in(tmp_path, monkeypatch)


def explained(gpu, monkeypatch, asked="gemm 4096 4096 4096"):
    monkeypatch.setitem(_explain.GPUS, "t4", gpu)
    parser = argparse.ArgumentParser()
    _explain.add_arguments(parser)
    said = _explain.explain(parser.parse_args([*asked.split(), "--gpu", "t4"])).splitlines()
    return said[0].rpartition("costs: ")[2], said[-1].strip()


# ------------------------------------------------------------------------------------------- costs


def test_costs_have_a_version():
    """If this fails, raise kCostsVersion of kernels/gemm/costs.h, and put both numbers here."""
    names = "\n".join(f"{name} {kind.__name__}" for name, kind in _gemm_costs.kinds().items())
    digest = hashlib.sha256(names.encode()).hexdigest()[:8]
    assert (_gemm_costs.version(), digest) == (2, "21aa14ea")


@pytest.mark.parametrize("name", _explain.GPUS)
def test_costs_of_gpus_that_were_measured_and_others(name):
    gpu = _explain.GPUS[name]
    measured = name in ("h100", "h200")
    assert _gemm_costs.said_of(gpu) == ("built in" if measured else CAUTIOUS)
    costs, h200 = (_gemm_costs.costs_of(each, own=True) for each in (gpu, _explain.GPUS["h200"]))
    for cost in ("small.max_work_4_bytes", "small.max_outputs"):
        assert costs[cost] == h200[cost] // (1 if measured else 4)
    assert (costs["fp32_sm80.product"] < 1) == (gpu[:2] == (8, 0))
    assert costs["fp32_sm90.launches"] == h200["fp32_sm90.launches"] * (1 if measured else 4)
    for other in (gpu._replace(sm_count=7), gpu._replace(l2_bytes=7), gpu._replace(minor=7)):
        assert _gemm_costs.said_of(other) == CAUTIOUS


@pytest.mark.parametrize(
    "gpu", [H200._replace(sm_count=114), H200._replace(sm_count=78), A100, L4, _explain.GPUS["t4"]]
)
def test_cautious_plans_take_no_product_that_others_leave(gpu):
    """Beside the plans that this GPU would have with an H200's costs."""
    eager = _gemm_costs.costs_of(_explain.GPUS["h200"]) | {"fp32_sm80.product": 0.5}
    tensor_cores = ("fp32_skinny", "fp32_narrow", "fp32_short", "fp32_sm90", "fp32_sm80")
    fewer = 0
    for row, cautious, plan in zip(GRID, planned(gpu), planned(gpu, eager), strict=True):
        if cautious.startswith(tensor_cores):
            assert plan.startswith(tensor_cores), row
        if cautious == "small":
            assert not plan.startswith("library"), row
        fewer += cautious.startswith("library") and not plan.startswith("library")
    assert fewer > 10


@pytest.mark.parametrize(
    ("m", "n", "k", "want"),
    [
        (4096, 4096, 4096, "fp32_sm80"),
        (256, 6912, 4096, "fp32_sm80"),  # a tile for each SM
        (256, 7040, 4096, "library"),  # and two more
        (256, 6912, 192, "library"),  # too short to pay for the launch
        (128, 8192, 4096, "library"),  # SMs without a tile
        (190, 6912, 4096, "library"),  # tiles of which a quarter is empty
    ],
)
def test_a_cautious_plan_fills_the_device(m, n, k, want):
    """On compute capability 8.0, which nobody has timed."""
    row = {"m": m, "n": n, "k": k}
    (plan,) = Planner([_fit.problem_of(row, A100)]).plans(_gemm_costs.costs_of(A100))
    assert plan.split(":")[0] == want


def test_a_gpu_with_few_tensor_cores_splits_nothing():
    full, few = (planned(H200._replace(sm_count=count)) for count in (114, 78))
    assert any("fp32_sm90" in plan for plan in full)
    assert not any("fp32_sm90" in plan for plan in few)


def test_costs_that_are_given(gpu, monkeypatch):
    own = _gemm_costs.costs_of(gpu)
    before = planned(gpu)
    assert explained(gpu, monkeypatch) == (CAUTIOUS, "library: its product")
    given = own | {"fp32_sm80.product": 0.5}
    _gemm_costs.give(gpu, MODEL, given, "tuned on 2026-01-02")
    assert _gemm_costs.costs_of(gpu) == given
    assert _gemm_costs.costs_of(gpu, own=True) == own
    assert explained(gpu, monkeypatch) == ("tuned on 2026-01-02", "fp32_sm80")
    changed = [i for i, (a, b) in enumerate(zip(before, planned(gpu), strict=True)) if a != b]
    assert changed
    assert {GRID[i]["dtype"] for i in changed} == {"float32"}
    for other in (gpu._replace(sm_count=1), gpu._replace(l2_bytes=1), gpu._replace(major=9)):
        assert _gemm_costs.said_of(other) == CAUTIOUS
    _gemm_costs.give(gpu, MODEL, own, "again")  # the newest hold
    assert explained(gpu, monkeypatch) == ("again", "library: its product")
    assert planned(gpu) == before


@pytest.mark.parametrize(
    "wrong",
    [
        {"fp32_sm80.product": -1.0},
        {"fp32_sm80.product": math.nan},
        {"fp32_sm80.product": math.inf},
        {"small.max_outputs": 0.5},
        {"small.max_outputs": 1e300},
    ],
)
def test_costs_that_cannot_be(wrong, gpu):
    with pytest.raises(ValueError, match="costs must be finite and not negative, and whole"):
        _gemm_costs.give(gpu, MODEL, _gemm_costs.costs_of(gpu) | wrong, "wrong")
    assert _gemm_costs.said_of(gpu) == CAUTIOUS


def test_any_costs_leave_products_that_a_kernel_cannot_index(gpu):
    """gemm_small counts k in 32 bits."""
    row = {"m": 1, "n": 1, "k": 1 << 31, "dtype": "float64"}
    own = _gemm_costs.costs_of(gpu)
    costs = {name: _fit.NEVER if name.startswith("small.max") else x for name, x in own.items()}
    planner = Planner([_fit.problem_of(row, gpu)])
    assert planner.plans(costs) == ["library: its product"]


def test_threads_give_and_plan(gpu):
    own = _gemm_costs.costs_of(gpu)
    costs = [own | {"fp32_sm80.product": 0.5 + i / 8} for i in range(4)]
    wrong = []

    def run(mine):
        for _ in range(100):
            _gemm_costs.give(gpu, MODEL, mine, "a thread's")
            if _gemm_costs.costs_of(gpu) not in costs:
                wrong.append(1)

    threads = [threading.Thread(target=run, args=(each,)) for each in costs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# -------------------------------------------------------------------------------------------- file


def tuned_for(gpu, **costs):
    return Tuned(gpu, MODEL, {f"fp32_sm80.{n}": x for n, x in costs.items()}, "2026-01-02")


def test_a_file_goes_round(cache, gpu):
    tuned = tuned_for(gpu, product=0.5, launches=2)
    path = _tuned.write(tuned)
    assert path.parent == cache
    assert path.name.startswith("nvidia-invented-9-gb-")
    assert _tuned.read(path) == tuned
    others = [tuned_for(gpu._replace(**{name: 3})) for name in ("sm_count", "l2_bytes", "minor")]
    others += [tuned._replace(model=Model(MODEL.name, 1)), tuned._replace(model=Model("A", 1))]
    places = {_tuned.place_of(each.gpu, each.model) for each in (tuned, *others)}
    assert len(places) == 6


def test_files_are_used(cache, gpu, monkeypatch):
    _tuned.write(tuned_for(gpu, product=0.5))
    (cache / ".half-written.costs").write_text("")
    (cache / "README").write_text("")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _tuned.load.__wrapped__()
    assert explained(gpu, monkeypatch) == ("tuned on 2026-01-02", "fp32_sm80")
    own = _gemm_costs.costs_of(gpu, own=True)  # what the file does not have
    assert _gemm_costs.costs_of(gpu) == own | {"fp32_sm80.product": 0.5}


def test_without_files(cache):
    assert _tuned.load.__wrapped__() is None
    assert not cache.parent.exists()


def write_record(path, change):
    record = json.loads(json.dumps(_tuned.record_of(tuned_for(L4, product=0.5))))
    change(record)
    _cache.write(path, json.dumps(record).encode())


def put(value, *keys):
    def change(record):
        for key in keys[:-1]:
            record = record[key]
        record[keys[-1]] = value

    return change


DAMAGED = {
    "no dict": (lambda path: _cache.write(path, b"[1]"), "it does not hold what tune writes"),
    "no JSON": (lambda path: _cache.write(path, b"{"), "it is not JSON"),
    "no text": (lambda path: _cache.write(path, b"\xff"), "it is not JSON"),
    "empty": (lambda path: path.write_bytes(b""), "it is damaged"),
    "folder": (lambda path: path.mkdir(), "it is damaged"),
    **{
        name: (lambda path, change=change: write_record(path, change), why)
        for name, change, why in (
            ("more", put(1, "more"), "it does not hold what tune writes"),
            ("less", lambda record: record.pop("costs"), "it does not hold what tune writes"),
            ("version", put(0, "version"), "it is of a release of my_ops with other costs"),
            ("date", put("today", "date"), "its date is 'today'"),
            ("no date", put(7, "date"), "its date is 7"),
            ("no GPU", put([], "gpu"), "it does not say of which GPU it is"),
            ("GPU", lambda r: r["gpu"].pop("code"), "it does not say of which GPU it is"),
            ("name", put(1, "gpu", "name"), "its GPU is "),
            ("SMs", put(-1, "gpu", "sm_count"), "its GPU is "),
            ("many SMs", put(1 << 31, "gpu", "sm_count"), "its GPU is "),
            ("bool", put(True, "gpu", "sm_count"), "its GPU is "),
            ("no costs", put([1], "costs"), "it has costs that are not fitted"),
            ("accuracy", put(1.0, "costs", "fp32_sm90.single_min_work"), "it has costs that are"),
            ("unknown", put(1.0, "costs", "fp32_sm70.element"), "it has costs that are not"),
            ("text", put("1", "costs", "fp32_sm80.product"), "its fp32_sm80.product is '1'"),
            ("negative", put(-1, "costs", "fp32_sm80.product"), "its fp32_sm80.product is -1"),
            ("NaN", put(math.nan, "costs", "fp32_sm80.product"), "its fp32_sm80.product is nan"),
            ("large", put(1e16, "costs", "fp32_sm80.product"), "its fp32_sm80.product is 1e"),
            ("part", put(1.5, "costs", "small.max_outputs"), "its small.max_outputs is 1.5"),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize(("damage", "why"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_named(damage, why, cache, gpu):
    """And the others are used."""
    cache.mkdir(parents=True)
    path = cache / "a.costs"
    damage(path)
    _tuned.write(tuned_for(gpu))
    with pytest.warns(UserWarning) as caught:
        _tuned.load.__wrapped__()
    (message,) = [str(warning.message) for warning in caught]
    assert message.startswith(f"my_ops: the costs in {path} are not used: {why}")
    assert message.endswith("Run `python -m my_ops tune` again, or delete the file")
    assert _gemm_costs.said_of(gpu) == "tuned on 2026-01-02"


def test_every_bit_counts(cache, gpu):
    path = _tuned.write(tuned_for(gpu, product=0.5))
    content = path.read_bytes()
    for place in torch.randint(len(content), (50,)).tolist():
        path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        with pytest.raises(_tuned._UnfitError, match="it is damaged"):
            _tuned.read(path)


@pytest.mark.slow
def test_programs_use_the_files(cache, gpu, tmp_path):
    """At import, and in explain, which imports less; C++ reads no file."""
    _tuned.write(tuned_for(gpu, product=0.5))
    (cache / "broken.costs").write_text("")
    script = f"import my_ops\nprint(my_ops._gemm_costs.said_of(my_ops._gemm_costs.Gpu{tuple(gpu)}))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout == "tuned on 2026-01-02\n"
    assert "broken.costs are not used: it is damaged" in done.stderr
    _tuned.write(tuned_for(_explain.GPUS["l4"], product=0.5))
    asked = "gemm 4096 4096 4096 --gpu l4"
    done = subprocess.run(
        [sys.executable, "-m", "my_ops", "explain", *asked.split()],
        capture_output=True, text=True, check=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.stdout.splitlines()[0].endswith("on l4; costs: tuned on 2026-01-02")
    assert done.stdout.splitlines()[-1] == "  fp32_sm80"
