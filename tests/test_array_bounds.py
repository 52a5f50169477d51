"""No op writes beyond its arrays: every op at many sizes, forward and backward, under glibc's
checked malloc, which ends the process that frees an array behind whose end something was written.
"""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

EVERY_OP = """
    for op in samples.DIFFERENTIABLE:
        for dtype in samples.FLOATING:
            for size in [*range(1, 20), 47]:
                tensors = samples.leaves(op.tensors(size, dtype, "cpu"))
                results = op(*tensors)
                torch.autograd.grad(results, tensors, results, allow_unused=True)
"""
EVERY_HIDDEN_SIZE = """
    for dtype in samples.FLOATING:
        for hidden in range(1, 41):
            tensors = samples.leaves(samples.lltm_inputs(2, 3, 5, hidden, dtype, "cpu"))
            results = my_ops.lltm(*tensors)
            torch.autograd.grad(results, tensors, results)
"""
ELEMENT_BEYOND = """
    x = torch.ones(5)
    ctypes.c_float.from_address(x.data_ptr() + 20).value = 1.0
    del x
"""


def run_checked(script):
    """The exit status; malloc marks the byte behind every array, and looks for it in free."""
    start = "import ctypes, torch, samples, my_ops\n"
    return subprocess.run(
        [sys.executable, "-c", start + textwrap.dedent(script)],
        cwd=Path(__file__).parent,
        env={**os.environ, "LD_PRELOAD": "libc_malloc_debug.so.0", "MALLOC_CHECK_": "3"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("script", [EVERY_OP, EVERY_HIDDEN_SIZE], ids=["ops", "hidden-sizes"])
def test_nothing_is_written_beyond_an_array(script):
    done = run_checked(script)
    assert done.returncode == 0, done.stderr


def test_a_write_beyond_an_array_is_seen():
    assert run_checked(ELEMENT_BEYOND).returncode == -signal.SIGABRT
