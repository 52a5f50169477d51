"""No op writes beyond its arrays: every op at many sizes, forward and backward, with glibc's
checked malloc, which ends a process that frees an array after something was written behind it."""

import signal
import textwrap

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
        for name in samples.CELL:
            tensors = samples.recurrent_inputs(name, 5, 4, 5, hidden, torch.float32, "cpu")
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


IMPORTS = "import ctypes, torch, samples, my_ops\n"
# malloc marks the byte after every array, and checks it in free. On one thread and without a GPU,
# because the checks take time and hold a lock.
CHECKED = {"LD_PRELOAD": "libc_malloc_debug.so.0", "MALLOC_CHECK_": "3"}
CHECKED |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize(
    "script",
    [EVERY_OP, EVERY_HIDDEN_SIZE, LARGE_LAYERS],
    ids=["ops", "hidden-sizes", "large-layers"],
)
def test_nothing_is_written_beyond_an_array(run_python, script):
    run_python(IMPORTS + textwrap.dedent(script), **CHECKED)


def test_a_write_beyond_an_array_is_seen(run_python):
    run_python(IMPORTS + textwrap.dedent(BYTE_BEYOND), status=-signal.SIGABRT, **CHECKED)
