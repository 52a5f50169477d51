"""Times the plans of matrix products for fit_gemm.py: every kernel that could compute a product,
with each of its tiles, and the vendor's library."""

from __future__ import annotations

import ctypes
import json
import os
import random
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from bench import GEMM_SIZES, sweep_sizes
from gemm_costs import START, flat
from measure import Run, environment, gpu_times, save

from my_ops import _gemm_costs
from my_ops._fit import (
    BATCHES,
    DEFAULT,
    FEW_ROWS,
    FLOATS,
    LAYOUT,
    SMALL,
    Family,
    Row,
    drawn,
    plans_of,
    problem_of,
    sizes,
)
from my_ops._gemm_costs import Numbers, Planner, Problem

ROOT = Path(__file__).resolve().parents[1]

LINEAR = {"linear": 1, "b_transposed": 1, "bias": 1}
EPILOGUE = LINEAR | {"activation": ["none", "silu", "gelu"], "residual": [0, 1]}
HALF = {"dtype": ["bfloat16", "float16"]}
FAMILIES: list[Family] = [
    FLOATS,
    FEW_ROWS,
    (
        "float32, packed",
        *(110, 1e6, 4e10),
        LINEAR | {"packed": 1, "m": (2, 512), "n": (512, 8192, 8), "k": (512, 8192, 8)},
    ),
    ("float32 high", 80, 1e9, 2e10, sizes(512, 8192) | LAYOUT | {"high": 1}),
    (
        "float32 high beside TF32",
        *(100, 1e9, 1.5e11),
        sizes(512, 8192) | LAYOUT | {"high": 1, "library_tf32": 1},
    ),
    (
        "float32 beside TF32",
        *(80, 1e4, 1e9),
        LAYOUT | {"m": (4, 512), "n": (4, 512), "k": (96, 4096), "library_tf32": 1},
    ),
    *SMALL,
    *(
        (f"small layers {dtype}", 60, 1e4, 1.6e7, sizes(2, 1024) | EPILOGUE | {"dtype": dtype})
        for dtype in ("float32", "bfloat16")
    ),
    ("16 bits, odd", 260, 1e6, 1e11, sizes(32, 4096) | LAYOUT | BATCHES | HALF),
    (
        "16 bits, layers",
        *(140, 1e6, 4e9),
        EPILOGUE | HALF | {"m": (16, 2048), "n": (64, 2048, 8), "k": (64, 2048, 8)},
    ),
    (
        "16 bits, large layers",
        *(120, 1e9, 2e11),
        EPILOGUE | HALF | {"m": (512, 16384), "n": (512, 16384, 64), "k": (512, 8192, 64)},
    ),
]


def products() -> Iterator[Row]:
    """The products of bench.py and some of each family, without fields that are DEFAULT."""
    for dtype in ("float32", "bfloat16"):
        for m, n, k in (*GEMM_SIZES, *sweep_sizes()):
            if 1e5 <= m * n * k <= 3e10:
                yield {"family": f"bench {dtype}", "m": m, "n": n, "k": k} | (
                    {} if dtype == DEFAULT["dtype"] else {"dtype": dtype}
                )
    yield from drawn(FAMILIES, random.Random(0))


def load(folder: Path, architecture: str) -> ctypes.CDLL:
    """Loads gemm_costs.cpp with the kernels, compiled for that GPU by nvcc."""
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"{architecture}.so"
    sources = [
        Path(__file__).with_name("gemm_costs.cpp"),
        *(s for room in ("gemm", "fp32", "common") for s in ROOT.glob(f"kernels/{room}/**/*.cu")),
    ]
    newest = max(p.stat().st_mtime for p in [*sources, *ROOT.glob("kernels/**/*.*h")])
    if not library.exists() or library.stat().st_mtime < newest:
        nvcc = os.environ.get("CUDA_HOME", "/usr/local/cuda") + "/bin/nvcc"
        options = ["-std=c++20", "-O3", f"-arch={architecture}", "-DMY_OPS_WITH_CUDA"]
        options += [f"-I{ROOT}/kernels", f"-I{ROOT}/include"]
        objects = [folder / f"{source.stem}.o" for source in sources]

        def compile_one(source: Path, target: Path) -> None:
            shared = ["-Xcompiler", "-fPIC", "-x", "cu", "-c"]
            subprocess.run([nvcc, *options, *shared, source, "-o", target], check=True)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(compile_one, sources, objects))
        subprocess.run([nvcc, "-shared", *objects, "-o", library], check=True)
    return ctypes.CDLL(str(library))


def array_of(numbers: Numbers) -> Any:
    """In the order of GemmCosts."""
    values = [numbers[name] for name in _gemm_costs.kinds()]
    return (ctypes.c_double * len(values))(*values)


def runs_of(row: Row, problem: Problem, module: ctypes.CDLL, plans: dict[str, Numbers]) -> Any:
    """For each plan, in words, a function that runs it on the same random data."""
    dtype, batch = getattr(torch, problem.dtype.decode()), problem.batch

    def matrix(rows: int, columns: int, transposed: int) -> torch.Tensor:
        sizes = (batch, columns, rows) if transposed else (batch, rows, columns)
        x = torch.randn(sizes, device="cuda", dtype=dtype)
        x = x.mT if transposed else x
        return x if batch > 1 else x[0]

    def buffer(size: int) -> torch.Tensor:
        return torch.empty(size, device="cuda", dtype=torch.uint8)

    def check(status: int) -> None:
        if status:
            raise RuntimeError(f"CUDA error {status} of {row}")

    a = matrix(problem.m, problem.k, problem.a_transposed)
    b = matrix(problem.k, problem.n, problem.b_transposed)
    out, residual = matrix(problem.m, problem.n, 0), matrix(problem.m, problem.n, 0)
    bias = torch.randn(problem.n, device="cuda", dtype=dtype)
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    costs = {words: array_of(numbers) for words, numbers in plans.items()}
    bytes_ = max(module.workspace(ctypes.byref(problem), each) for each in costs.values())
    packed = None
    if problem.packed:
        scratch = ctypes.c_int64()
        packed = buffer(module.packed_bytes(ctypes.byref(problem), ctypes.byref(scratch)))
        pointers = [ctypes.c_void_p(x.data_ptr()) for x in (b, packed, buffer(scratch.value))]
        check(module.pack(ctypes.byref(problem), *pointers, stream))
    given = [
        a,
        b,
        bias if problem.bias else None,
        residual if problem.residual else None,
        packed,
        out,
        buffer(bytes_),
    ]
    operands = (ctypes.c_void_p * len(given))(*(None if x is None else x.data_ptr() for x in given))

    def finish(sums: torch.Tensor) -> None:
        floats = ctypes.c_bool(sums.dtype == torch.float32)
        at = ctypes.c_void_p(sums.data_ptr())
        check(module.finish(ctypes.byref(problem), floats, at, operands, stream))

    def library(words: str) -> None:
        """Calls it as csrc/gemm_cuda.cpp does."""
        if words.startswith("library: its product in float32"):
            return finish(torch.mm(a, b, out_dtype=torch.float32))
        if not problem.linear:
            torch.matmul(a, b, out=out)
            return None
        y = F.linear(a, b.mT, given[2])
        if words.startswith("library: its product with the bias"):
            return finish(y)
        if problem.activation == b"silu":
            F.silu(y, inplace=True)
        if problem.activation == b"gelu":
            torch.ops.aten.gelu_(y)
        if problem.residual:
            torch.add(y, residual)
        return None

    def planned(words: str) -> Callable[[], None]:
        each = costs[words]
        return lambda: check(module.multiply(ctypes.byref(problem), each, operands, stream))

    return {
        words: (lambda words=words: library(words))
        if words.startswith("library")
        else planned(words)
        for words in plans
    }


def timed(runs: dict[str, Run]) -> dict[str, tuple[float, float]]:
    """Microseconds of each alone, after other work, and as one of a few in a row."""
    alone = gpu_times(runs, repeats=5)
    calls = {words: max(1, min(5, int(200 / us))) for words, us in alone.items()}
    graphs = {}
    for words, run in runs.items():
        graphs[words] = torch.cuda.CUDAGraph()
        graphs[words].capture_begin()
        for _ in range(calls[words]):
            run()
        graphs[words].capture_end()
    row = gpu_times({words: graph.replay for words, graph in graphs.items()}, repeats=5)
    return {words: (us, row[words] / calls[words]) for words, us in alone.items()}


def measure(results: Path) -> None:
    """Writes <gpu>.json into a folder. Control-C ends it early."""
    major, minor = torch.cuda.get_device_capability()
    module = load(ROOT / "build/fit_gemm", f"sm_{major}{minor}{'a' if major == 9 else ''}")
    module.workspace.restype = module.packed_bytes.restype = ctypes.c_int64
    found = _gemm_costs.current_gpu()
    assert found is not None, "my_ops has no code for this GPU"
    rows, gpu = list(products()), found[0]
    random.Random(0).shuffle(rows)  # so that after Control-C there are some of every family
    planner = Planner([problem_of(row, gpu) for row in rows])
    plans = plans_of(rows, planner, flat(START))
    print(f"{len(rows)} products, {sum(map(len, plans))} plans")
    names = sorted({words for found in plans for words in found})
    try:
        with torch.cuda.stream(torch.cuda.Stream()):  # the default stream cannot be captured
            for i, row in enumerate(rows):
                torch.backends.cuda.matmul.allow_tf32 = bool(row.get("library_tf32"))
                runs = runs_of(row, planner.problems[i], module, plans[i])
                times = [(names.index(words), *us) for words, us in timed(runs).items()]
                row["us"] = [
                    [plan, *(float(f"{t:.3g}") for t in us)] for plan, *us in sorted(times)
                ]
    except KeyboardInterrupt:
        pass
    done = sorted((row for row in rows if "us" in row), key=json.dumps)
    record = environment()
    path = results / f"{record['gpu'].lower().replace(' ', '-')}.json"
    save(path, {"device": gpu._asdict(), "plans": names, "products": done}, record)
    print(f"{path}: {len(done)} products")
