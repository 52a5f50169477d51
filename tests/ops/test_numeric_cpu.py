"""kernels/common/numeric_cpu.h on processors that this one may not be."""

import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
EXP_ULP = 2.0  # a polynomial and a rounded sum


@pytest.mark.skipif(
    not shutil.which("c++") or not (ROOT / "kernels").exists(),
    reason="needs a C++ compiler and the source tree",
)
def test_exponentials_of_any_processor(tmp_path):
    """The oldest one of its kind has no fused multiply-add, so a product on the way is rounded or
    flushed by itself."""
    program, source = tmp_path / "numeric", Path(__file__).with_name("numeric_cpu.cpp")
    includes = [f"-I{ROOT}/kernels"]
    command = ["c++", "-std=c++20", "-O2", *includes, str(source), "-o", str(program)]
    subprocess.run(command, check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=True)
    assert max(map(float, done.stdout.split())) <= EXP_ULP
