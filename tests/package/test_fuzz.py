"""tests/fuzz.py finds planted errors and prints code that repeats them; without them it finds
nothing."""

import json
import math
import random
import runpy
import subprocess
import sys

import fuzz
import fuzzing.run
import pytest
import torch
from fuzzing.judge import excess
from fuzzing.run import OPS, Case, T, draw, examine, run

import my_ops

MOST = 60  # in units of fuzz.TOGETHER cases

# A result that is wrong in a rare layout, which every tenth product of matrices has.
RARE = """
import my_ops
product = my_ops.gemm

def gemm(a, b, **options):
    y = product(a, b, **options)
    if a.dim() == 2 and a.stride(0) == 1 and a.storage_offset() % 2 and y.numel():
        y.detach().select(0, -1).select(0, -1).mul_(1.001).add_(1.0)
    return y

my_ops.gemm = gemm
"""


def search(fuzzed):
    for _ in range(MOST):
        fuzzed.some()
        if fuzzed.wrong:
            return fuzzed.wrong[0]
    pytest.fail("nothing was found")


def test_a_result_that_is_wrong_in_a_rare_layout(tmp_path, monkeypatch, capsys):
    plant = tmp_path / "sitecustomize.py"  # Python imports this file when it starts
    plant.write_text(RARE)
    monkeypatch.setattr(my_ops, "gemm", my_ops.gemm)
    runpy.run_path(str(plant))
    with monkeypatch.context() as child:
        child.setenv("PYTHONPATH", str(tmp_path), prepend=":")
        found = search(fuzz.Fuzz("cpu", 1))
    assert found["op"] == "gemm"
    assert found["repeats"]
    printed = capsys.readouterr().out
    assert "It repeats:" in printed
    case = eval(found["case"], {"Case": Case, "T": T, "torch": torch})
    assert fuzz.lines(case) in printed
    assert examine(case).wrong
    assert not fuzz.repeats(case)  # without the planted error


def off_in_a_gradient(x):
    return (x + 1) if not x.requires_grad else (x + 1 + x.sum() - x.sum().detach())


def changes_what_it_got(x):
    if isinstance(x, torch.Tensor) and not x.requires_grad and x.dtype != torch.bool and x.numel():
        x.view(torch.uint8 if x.dim() and x.stride(-1) == 1 else x.dtype).add_(1)
        return x.clone()
    return torch.ops.my_ops.add_one(x)


def test_memory_that_others_hold_is_no_wrong_result(monkeypatch):
    def refused(*_, **__):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(my_ops, "fill_index", refused)
    monkeypatch.setattr(fuzzing.run, "WRONG_ARGUMENT", 0)  # to which another error is an answer
    fuzzed = fuzz.Fuzz("cpu", 3)
    while not fuzzed.without_memory:
        fuzzed.some()
    assert not fuzzed.wrong


def test_an_error_after_a_refused_allocation_is_no_wrong_result(monkeypatch):
    attempts = []

    def refused(*args, **_):
        attempts.append(args)
        raise RuntimeError("my_ops: aten::linear failed")

    monkeypatch.setattr(my_ops, "fill_index", refused)
    monkeypatch.setattr(fuzzing.run, "WRONG_ARGUMENT", 0)
    monkeypatch.setattr(fuzz, "allocations_refused", lambda: len(attempts))
    fuzzed = fuzz.Fuzz("cpu", 3)
    while not attempts:
        fuzzed.some()
    assert (fuzzed.without_memory, fuzzed.wrong) == (len(attempts), [])
    monkeypatch.setattr(fuzz, "allocations_refused", lambda: 0)
    assert search(fuzz.Fuzz("cpu", 3))["op"] == "fill_index"


def takes_anything(x):
    return torch.ops.my_ops.add_one(x) if isinstance(x, torch.Tensor) else x


@pytest.mark.parametrize("wrong", [off_in_a_gradient, changes_what_it_got, takes_anything])
def test_what_else_is_found(wrong, monkeypatch):
    monkeypatch.setattr(my_ops, "add_one", wrong)
    monkeypatch.setattr(fuzz, "repeats", lambda case: True)
    assert search(fuzz.Fuzz("cpu", 2))["op"] == "add_one"


def test_nothing_is_found_and_every_op_is_called(device):
    fuzzed = fuzz.Fuzz(device, 3)
    for _ in range(12):
        fuzzed.some()
        assert not fuzzed.wrong
    called = fuzzed.record()["calls by op"]
    assert set(called) == set(OPS)
    assert {kind for kinds in called.values() for kind in kinds} == {
        "result",
        "gradient",
        "out=",
        "wrong argument",
        "arguments as they were",
    }


def test_processes_are_counted_together(tmp_path):
    output = tmp_path / "counts.json"
    how = ["--seconds", "0.1", "--seed", "5", "--processes", "2", "--device", "cpu"]
    done = subprocess.run(
        [sys.executable, fuzz.__file__, *how, "--output", output],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "seeds 5 to 6" in done.stdout
    (found,) = json.loads(output.read_text())["devices"]
    alone = [fuzz.Fuzz("cpu", seed) for seed in (5, 6)]
    for fuzzed in alone:
        fuzzed.some()
    assert found["calls"] >= sum(fuzzed.record()["calls"] for fuzzed in alone)
    assert found["calls"] == sum(sum(kinds.values()) for kinds in found["calls by op"].values())


def test_cases_are_the_python_that_they_print():
    choose = random.Random(4)
    for _ in range(300):
        case = draw(choose, "cpu")
        again = eval(repr(case), {"Case": Case, "T": T, "torch": torch})
        assert again == case
        first, second = run(case), run(again)
        assert [(kind, share.item()) for kind, share in first] == [
            (kind, share.item()) for kind, share in second
        ]


INF, NAN, MAX = math.inf, math.nan, torch.finfo(torch.float32).max
HALF_ULP = MAX * 2.0**-25
COMPARED = [  # got, exact, allowed, share
    (1.0, 1.0, 0.0, 0.0),
    (1.5, 1.0, 0.25, 2.0),
    (NAN, 1.0, 1.0, INF),
    (1.0, NAN, INF, INF),
    (NAN, NAN, NAN, 0.0),
    (INF, INF, NAN, 0.0),
    (-INF, INF, INF, INF),
    (1.0, INF, INF, INF),
    (INF, 1.0, 1.0, MAX),
    (INF, 2 * MAX, 0.0, 0.0),  # too large numbers round to infinity
    (MAX, MAX + 0.5 * HALF_ULP, HALF_ULP, 0.5),
    (INF, MAX - HALF_ULP, 3 * HALF_ULP, 2 / 3),
]


@pytest.mark.parametrize("got, want, allowed, share", COMPARED)
def test_shares_of_what_is_allowed(got, want, allowed, share):
    got = torch.tensor([got, 0.0], dtype=torch.float32)
    want, allowed = (torch.tensor([x, 0.0], dtype=torch.float64) for x in (want, allowed))
    assert excess(got, want, allowed).item() == pytest.approx(share, rel=1e-6)
