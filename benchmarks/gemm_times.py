"""Times the plans of matrix products for fit_gemm.py: every kernel that could compute a product,
with each of its tiles, and the vendor's library."""

from __future__ import annotations

import ctypes
import json
import math
import random
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from bench import GEMM_SIZES, sweep_sizes
from gemm_costs import DEFAULT, ROOT, START, Numbers, Planner, Problem, Row, flat, load, problem_of
from measure import Run, environment, gpu_times, save

ALWAYS, NEVER = 0, 1 << 40  # a lower limit; for an upper limit the two are swapped


def candidates() -> Iterator[Numbers]:
    """Costs for which one kernel, with one of its tiles, is chosen wherever it can run."""
    library: Numbers = flat(START) | {
        "fp32_skinny.few_min_columns": NEVER,
        "fp32_skinny.min_k": NEVER,
        "fp32_narrow.launches": NEVER,
        "fp32_sm90.min_side": NEVER,
        "fp32_sm90.packed_min_rows": NEVER,
        "half_sm90.copied.min_size": NEVER,
        "half_sm90.in_place.min_size": NEVER,
        "half_sm90.epilogue_max_outputs": NEVER,
        "half_sm90.epilogue_min_side": NEVER,
        "small.max_outputs": 0,
        "small.tile_min_work": NEVER,
    }
    yield library
    yield library | {
        name: NEVER if "max" in name or "many" in name else ALWAYS
        for name in flat(START)
        if name.startswith("small.")
    }
    yield library | {
        name: NEVER if "max" in name else ALWAYS
        for name in flat(START)
        if name.startswith("fp32_skinny.")
    }
    taken = [f"fp32_narrow.{name}" for name in ("launches", "end", "floats.here", "halves.here")]
    yield library | {
        name: ALWAYS if name in taken else NEVER
        for name in flat(START)
        if name.startswith("fp32_narrow.")
    }
    chosen, left = 1e-6, 1e6  # for tiles
    tiles = ["fp32_sm90.wide_slowdown", "fp32_sm90.medium_slowdown", "fp32_sm90.small_slowdown"]
    free = ["min_side", "min_k", "launches", "second_pass", "element", "strided_element"]
    free += ["tf32_launches", "tf32_element", "reduce", "reduce_element"]
    three = library | {f"fp32_sm90.{name}": ALWAYS for name in free}
    three |= {"small.tile_min_work": ALWAYS, "fp32_sm90.single_min_work": 1e30}
    for tile in (None, *tiles):
        yield three | {name: chosen if name == tile else left for name in tiles}
    for slowdown in (chosen, left):
        single = {"fp32_sm90.single_min_work": ALWAYS, "fp32_sm90.promoted_slowdown": slowdown}
        yield three | single
    tiles = [f"half_sm90.{size}_us" for size in ("large", "wide", "medium", "small")]
    half = library | {
        f"half_sm90.{odd}.{name}": NEVER if "max" in name else ALWAYS
        for odd in ("copied", "in_place")
        for name in START["half_sm90"][odd]
    }
    half |= {"half_sm90.epilogue_min_side": ALWAYS, "half_sm90.epilogue_warps_min_share": ALWAYS}
    half["half_sm90.epilogue_max_k"] = NEVER
    half |= {f"half_sm90.epilogue_warps_min_k{slow}": ALWAYS for slow in ("", "_slow")}
    for most, tile in product((ALWAYS, NEVER), tiles):
        half["half_sm90.epilogue_max_outputs"] = most
        yield half | {name: chosen if name == tile else left for name in tiles}


LAYOUT = {"a_transposed": [0, 1], "b_transposed": [0, 1]}
BATCHES = {"batch": [1, 1, 1, (2, 32)]}
LINEAR = {"linear": 1, "b_transposed": 1, "bias": 1}
EPILOGUE = LINEAR | {"activation": ["none", "silu", "gelu"], "residual": [0, 1]}
HALF = {"dtype": ["bfloat16", "float16"]}


def sizes(low: int, high: int) -> Row:
    """A range of sizes, half of which are multiples of a vector."""
    return {name: [(low, high, 1), (low, high, 8)] for name in "mnk"}


# Families of products, at the limits where kernels start to pay: a name, how many, the fewest and
# the most multiply-adds, and a description. A tuple is a range of sizes, even on a logarithmic
# scale, and what they are multiples of; from a list one is picked.
FAMILIES: list[tuple[str, int, float, float, Row]] = [
    ("float32", 200, 1e6, 2e10, sizes(48, 6000) | LAYOUT | BATCHES),
    (
        "float32, few rows",
        *(220, 1e6, 4e9),
        {"m": (2, 64), "n": (32, 16384, 4), "k": (512, 32768, 4), "b_transposed": [0, 1]},
    ),
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
    *(
        (f"small {dtype}", 80, 1e4, 1.6e7, sizes(2, 1024) | LAYOUT | BATCHES | {"dtype": dtype})
        for dtype in ("float64", "float32", "float16", "bfloat16")
    ),
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
    pick = random.Random(0)

    def drawn(field: Any) -> Any:
        if isinstance(field, list):
            return drawn(pick.choice(field))
        if not isinstance(field, tuple):
            return field
        low, high, multiple = (*field, 1)[:3]
        value = math.exp(pick.uniform(math.log(low), math.log(high)))
        return max(1, round(value / multiple)) * multiple

    for dtype in ("float32", "bfloat16"):
        for m, n, k in (*GEMM_SIZES, *sweep_sizes()):
            if 1e5 <= m * n * k <= 3e10:
                yield {"family": f"bench {dtype}", "m": m, "n": n, "k": k} | (
                    {} if dtype == DEFAULT["dtype"] else {"dtype": dtype}
                )
    for family, count, least, most, fields in FAMILIES:
        found = 0
        while found < count:
            row = {name: drawn(field) for name, field in fields.items()}
            if least <= work(row) <= most:
                yield {"family": family, **{n: x for n, x in row.items() if x != DEFAULT.get(n, 0)}}
                found += 1


def work(row: Row) -> int:
    return row.get("batch", 1) * row["m"] * row["n"] * row["k"]


def runs_of(
    row: Row, problem: Problem, module: ctypes.CDLL, plans: dict[str, Numbers], bytes_: int
) -> Any:
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

    def planned(numbers: Numbers) -> Callable[[], None]:
        costs = (ctypes.c_double * len(numbers))(*numbers.values())
        return lambda: check(module.multiply(ctypes.byref(problem), costs, operands, stream))

    return {
        words: (lambda words=words: library(words))
        if words.startswith("library")
        else planned(numbers)
        for words, numbers in plans.items()
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
    device = Problem()
    module.ask_device(ctypes.byref(device))
    facts = {name: getattr(device, name) for name, _ in Problem._fields_[:7]}
    rows = list(products())
    random.Random(0).shuffle(rows)  # so that after Control-C there are some of every family
    planner = Planner(module, [problem_of(row, list(facts.values())) for row in rows])
    plans: list[dict[str, Numbers]] = [{} for _ in rows]
    bytes_ = [0] * len(rows)
    for numbers in (flat(START), *candidates()):
        codes = planner.codes(numbers)
        for i, (code, size) in enumerate(zip(codes, planner.workspaces(), strict=True)):
            words = planner.describe(code)
            if words != "small" or work(rows[i]) < 1e8:
                plans[i].setdefault(words, numbers)
            bytes_[i] = max(bytes_[i], size)
    print(f"{len(rows)} products, {sum(map(len, plans))} plans")
    names = sorted({words for found in plans for words in found})
    try:
        with torch.cuda.stream(torch.cuda.Stream()):  # the default stream cannot be captured
            for i, row in enumerate(rows):
                torch.backends.cuda.matmul.allow_tf32 = bool(row.get("library_tf32"))
                runs = runs_of(row, planner.problems[i], module, plans[i], bytes_[i])
                times = [(names.index(words), *us) for words, us in timed(runs).items()]
                row["us"] = [
                    [plan, *(float(f"{t:.3g}") for t in us)] for plan, *us in sorted(times)
                ]
    except KeyboardInterrupt:
        pass
    done = sorted((row for row in rows if "us" in row), key=json.dumps)
    record = environment()
    path = results / f"{record['gpu'].lower().replace(' ', '-')}.json"
    save(path, {"device": facts, "plans": names, "products": done}, record)
    print(f"{path}: {len(done)} products")
