"""The table in docs/reference.md: everything it says holds, on every device there is."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import my_ops  # noqa: F401  registers the ops

pytestmark = pytest.mark.slow

TABLE = Path(__file__).resolve().parents[2] / "tools/docs/op_table.py"


@pytest.fixture(scope="module")
def tables():
    done = subprocess.run(
        [sys.executable, str(TABLE)], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if "|" in line]
    second = rows.index(next(row for row in rows if "vmap" in row))
    return rows[:second], rows[second:], done.stderr


def test_every_feature_of_every_op(tables, device):
    _, (header, _, *rows), exceptions = tables
    assert len(rows) == 14
    for op, *cells in rows:
        for feature, cell in zip(header[1:], cells, strict=True):
            if op != "`fill_index`" or cell != "no argument":
                holds = cell == "yes" or device.upper() in cell.split(", ")
                assert holds, f"{feature} of {op}: {exceptions}"


def test_every_op_has_dtypes_and_kernels(tables):
    """A build without CUDA does not deny CUDA's kernels, which other builds have."""
    (header, _, *rows), _, _ = tables
    with_cuda = torch._C._dispatch_has_kernel_for_dispatch_key("my_ops::add_one", "CUDA")
    kernels = ["CPU kernel", "CUDA kernel"] if with_cuda else []
    assert header == ["op", "dtypes", *kernels, "gradient"]
    for op, dtypes, *found, gradient in rows:
        assert dtypes.startswith("floating")
        assert found == ["yes" for _ in kernels]
        assert gradient == ("no" if op == "`fill_index`" else "twice")
