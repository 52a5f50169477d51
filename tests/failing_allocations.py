"""Allocations that fail on purpose, one at a time: for test_faults.py and test_faults_cuda.py."""

import gc
import itertools
import re
import time

import torch

import my_ops
from my_ops import _plain

# By the texts of both allocators: torch's of the CPU, and that of failing_memory_cuda.cpp.
SAID = r"can't allocate memory|out of memory"
if torch.__version__ < torch.torch_version.TorchVersion("2.13"):  # keeps its text to itself
    SAID += r"|my_ops: (empty|aten::\w+) failed"


def without_gradients(device):
    """Cases of what is not differentiable."""
    x, weight = (torch.randn(512, 512, device=device) for _ in range(2))
    return [
        ("fill_index", lambda: (my_ops.fill_index(5, 7, device=device),), ()),
        ("prepack", lambda x, weight: (my_ops.linear(x, my_ops.prepack(weight)),), (x, weight)),
    ]


def every_allocation(memory, cases):
    """Lets allocation number n of forward and backward fail, for every n of every case: a name, a
    call and its tensors. The error says so, no tensor changes, the next call works, and nothing
    stays allocated. Returns how many failed."""

    def attempt(call, tensors, n=0):
        memory.fail_at(n)
        results = call(*tensors)
        inputs = [t for t in tensors if t.requires_grad]
        if not inputs:
            return results
        grads = torch.autograd.grad(results, inputs, results, allow_unused=True)
        return [*results, *grads]

    def same(got, want):
        return all(a is b or torch.equal(a, b) for a, b in zip(got, want, strict=True))

    def settled(count):
        """A thread of autograd may let go of its last tensor a little later."""
        gc.collect()
        end = time.monotonic() + 5
        while memory.live() > count and time.monotonic() < end:
            time.sleep(0.01)
        return memory.live()

    total = 0
    for name, call, tensors in cases:
        before = [t.detach().clone() for t in tensors]
        attempt(call, tensors)  # a library may allocate at its first call
        want = attempt(call, tensors)
        gc.collect()
        held = memory.live()
        for n in itertools.count(1):
            try:
                got = attempt(call, tensors, n)
            except RuntimeError as error:
                assert memory.failures() == 1, (name, n)
                assert re.search(SAID, str(error)), (name, n, str(error))
                total += 1
            else:
                failed = memory.failures()
                memory.fail_at(0)
                assert same(got, want), (name, n)
                del got
                if not failed:
                    assert n > 1, name
                    break
                # A plain call that fails is made again by the op's general path.
                assert _plain.MODULE.exists(), (name, n, "went on without its memory")
            memory.fail_at(0)
            assert same([t.detach() for t in tensors], before), (name, n)
            assert same(attempt(call, tensors), want), (name, n, "the next call")
        assert settled(held) <= held, (name, "something stays allocated")
    return total
