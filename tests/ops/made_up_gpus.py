"""GPUs that nobody has, and the plans of products on them, for the tests of costs."""

import hashlib

from my_ops import _explain, _fit, _gemm_costs
from my_ops._gemm_costs import Model, Planner

# The L2 cache is none that a GPU has: what a test gives to one of them, no other plans with.
L4, A100, H200 = (_explain.GPUS[name]._replace(l2_bytes=12345) for name in ("l4", "a100", "h200"))
MODEL = Model("NVIDIA Invented 9-GB", 1_980_000)


def gpu_of(test):
    """An L4 that no other test asks for."""
    return L4._replace(l2_bytes=int(hashlib.sha256(test.nodeid.encode()).hexdigest()[:7], 16))


def cache_in(folder, monkeypatch):
    """Where the costs of GPUs are if the cache is in this folder."""
    monkeypatch.setenv("MY_OPS_CACHE", str(folder / "cache"))
    return folder / "cache/costs"


GRID = [
    {"m": m, "n": n, "k": k, "dtype": dtype, "packed": packed, "linear": packed,
     "b_transposed": packed}
    for m in (4, 16, 64, 128, 512, 2048, 8192)
    for n in (16, 100, 512, 2048, 8192)
    for k in (16, 128, 1024, 8192)
    for dtype in ("float32", "float64", "bfloat16")
    for packed in (0, 1)
]  # fmt: skip


def planned(gpu, numbers=None):
    numbers = numbers or _gemm_costs.costs_of(gpu)
    return Planner([_fit.problem_of(row, gpu) for row in GRID]).plans(numbers)
