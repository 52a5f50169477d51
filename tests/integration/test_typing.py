"""A user's program under mypy --strict: py.typed is there, and the public names have types."""

import importlib.util
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="needs mypy")

PROGRAM = """
import torch
from typing_extensions import assert_type

import my_ops

x = torch.zeros(3, 4)
assert_type(my_ops.add_one(x), torch.Tensor)
assert_type(my_ops.add_one(1), int)
assert_type(my_ops.d_sigmoid(x), torch.Tensor)
assert_type(my_ops.gemm(x, x.T), torch.Tensor)
assert_type(my_ops.fill_index(3, 4, dtype=torch.int32), torch.Tensor)
assert_type(my_ops.linear(x, x, activation="relu"), torch.Tensor)
assert_type(my_ops.nn.Linear(4, 3).forward(x), torch.Tensor)
assert_type(my_ops.get_include(), str)
assert_type(my_ops.cmake_prefix_path, str)
assert_type(my_ops.__version__, str)
"""

MISTAKES = """
import torch

import my_ops

x = torch.zeros(3, 4)
my_ops.gemm(x)
my_ops.add_one("1")
my_ops.linear(x, x, activation=1)
"""


def test_strict(tmp_path):
    """One run for both, because mypy reads all of torch."""
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "mistakes.py").write_text(MISTAKES)
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", tmp_path / "cache"]
    lines = subprocess.run(
        [*command, "--no-error-summary", "program.py", "mistakes.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.splitlines()
    assert [line for line in lines if line.startswith("program.py")] == []
    assert {line.split(": error")[0] for line in lines if ": error" in line} == {
        "mistakes.py:7",
        "mistakes.py:8",
        "mistakes.py:9",
    }
