"""No op writes beyond its arrays: every op at many sizes, forward and backward, with glibc's
checked malloc, which ends a process that frees an array after something was written behind it."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

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
LARGE_LAYERS = """
    for hidden in (301, 320):  # weights beyond the cache, which all threads share
        sizes = 5, 4, 5, hidden, torch.float32, "cpu"
        of_lltm = samples.lltm_inputs(*sizes)
        of_lstm, of_gru = (samples.recurrent_inputs(name, *sizes) for name in ("lstm", "gru"))
        for name, tensors in (("lltm", of_lltm), ("lstm", of_lstm), ("gru", of_gru)):
            getattr(my_ops, name)(*tensors)
            leaves = samples.leaves(tensors)
            results = getattr(my_ops, name)(*leaves)
            torch.autograd.grad(results, leaves, results)
"""
BYTE_BEYOND = """
    x = torch.ones(5)
    byte = ctypes.c_uint8.from_address(x.data_ptr() + x.nbytes)
    byte.value ^= 0xFF
    del x
"""


def run_checked(script):
    """Runs in a process whose malloc marks the byte after every array, and checks it in free.

    On one thread and without a GPU, because the checks take time and hold a lock.
    """
    start = "import ctypes, torch, samples, my_ops\n"
    malloc = {"LD_PRELOAD": "libc_malloc_debug.so.0", "MALLOC_CHECK_": "3"}
    alone = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, "-c", start + textwrap.dedent(script)],
        cwd=Path(__file__).parents[1],
        env={**os.environ, **malloc, **alone},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    "script",
    [EVERY_OP, EVERY_HIDDEN_SIZE, LARGE_LAYERS],
    ids=["ops", "hidden-sizes", "large-layers"],
)
def test_nothing_is_written_beyond_an_array(script):
    done = run_checked(script)
    assert done.returncode == 0, done.stderr


def test_a_write_beyond_an_array_is_seen():
    done = run_checked(BYTE_BEYOND)
    assert done.returncode == -signal.SIGABRT, done.stderr
