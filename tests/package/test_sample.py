"""What pytest runs without arguments: conftest.py."""

import re
from pathlib import Path

import samples

import my_ops

REPOSITORY = Path(__file__).resolve().parents[2]


def test_the_sample_has_every_op_layer_and_gradient(run_pytest):
    place = ("-c", REPOSITORY / "pyproject.toml", "--rootdir", REPOSITORY)
    lines = run_pytest("--collect-only", "--sample", REPOSITORY / "tests", *place).splitlines()
    cases = [
        match.groups() for line in lines if (match := re.fullmatch(r"tests/(.+)\[(.+)\]", line))
    ]
    assert not [
        test for test, _ in cases if test.startswith(("package", "integration/test_inductor"))
    ]
    for test in ("test_gradient", "test_second_gradient"):
        ops = {f"cpu-{op.name}" for op in samples.DIFFERENTIABLE if op.smooth}
        assert ops <= {case for name, case in cases if name.endswith(f"test_autograd.py::{test}")}
    shown = {part for _, case in cases for part in case.split("-")}
    assert {*my_ops.nn.__all__, *samples.ACTIVATIONS} - {None} <= shown
    assert {str(dtype).removeprefix("torch.") for dtype in samples.ALL} <= shown
