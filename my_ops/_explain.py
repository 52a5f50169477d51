"""``python -m my_ops explain gemm M N K`` and ``explain lstm STEPS BATCH HIDDEN``: which kernel
computes a product or a layer on a GPU, and why.

The answer comes from the compiled module. The host code that plans needs only sizes and a few
numbers of the device, so it answers for any GPU on any machine, in builds without CUDA too.
"""

from __future__ import annotations

import argparse
import ctypes
import json
from math import prod
from typing import Any

from my_ops import _gemm_costs, _tuned
from my_ops._gemm_costs import AskedDevice, Gpu, Problem

DTYPES = ("float64", "float32", "float16", "bfloat16")
SHORT = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
DEFAULT_GPU = "h200"
KIB, MIB = 1024, 1024**2
MOST_ELEMENTS = 2**40  # kMostElements of csrc/explain.h
# The options of some ops, and their values if not given.
OWN: dict[str, dict[str, object]] = {
    "gemm": {"batch": 1, "a_transposed": False, "b_transposed": False},
    "linear": {"bias": False, "activation": "none", "residual": False, "packed": False},
    "gemm, linear": {"precision": None},
}


GPUS = {
    "t4": Gpu(7, 5, 40, 64 * KIB, 4 * MIB, 75),
    "a100": Gpu(8, 0, 108, 163 * KIB, 40 * MIB, 80),
    "a10": Gpu(8, 6, 72, 99 * KIB, 6 * MIB, 80),
    "a6000": Gpu(8, 6, 84, 99 * KIB, 6 * MIB, 80),
    "rtx3090": Gpu(8, 6, 82, 99 * KIB, 6 * MIB, 80),
    "l4": Gpu(8, 9, 58, 99 * KIB, 48 * MIB, 80),
    "l40s": Gpu(8, 9, 142, 99 * KIB, 96 * MIB, 80),
    "rtx4090": Gpu(8, 9, 128, 99 * KIB, 72 * MIB, 80),
    "h100": Gpu(9, 0, 132, 227 * KIB, 50 * MIB, 90, 1),
    "h200": Gpu(9, 0, 132, 227 * KIB, 60 * MIB, 90, 1),
    "b200": Gpu(10, 0, 148, 227 * KIB, 126 * MIB, 100),
    "rtx5090": Gpu(12, 0, 170, 99 * KIB, 96 * MIB, 120),
}


class _Layer(ctypes.Structure):
    """AskedLayer of csrc/explain.h."""

    _fields_ = [
        *AskedDevice._fields_,
        *((name, ctypes.c_char_p) for name in ("op", "dtype")),
        *((name, ctypes.c_int64) for name in ("steps", "batch", "hidden")),
        *((name, ctypes.c_int) for name in ("backward", "library_tf32")),
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("op", help="gemm, linear, or a layer: lltm, lstm, gru")
    add("sizes", type=int, nargs=3, metavar="SIZE", help="M N K, or STEPS BATCH HIDDEN of a layer")
    add("--gpu", choices=sorted(GPUS), help=f"default: {DEFAULT_GPU}")
    add("--dtype", choices=(*DTYPES, *SHORT), default="float32", help="default: %(default)s")
    add("--batch", type=int, default=1, help="gemm: how many products")
    add("--a-transposed", action="store_true", help="gemm: M is a's contiguous index")
    add("--b-transposed", action="store_true", help="gemm: K is b's contiguous index")
    add("--bias", action="store_true", help="linear: with a bias")
    add("--activation", default="none", help="linear: the name of its activation")
    add("--residual", action="store_true", help="linear: with a residual")
    add("--packed", action="store_true", help="linear: with a weight prepared by prepack")
    text = "default: as a call without it, highest, or high with --tf32"
    add("--precision", choices=("highest", "high"), help=text)
    add("--tf32", action="store_true", help="as if torch allowed TF32 in float32 products")
    add("--json", action="store_true", help="print the answer as JSON")


def explain(options: argparse.Namespace) -> str:
    """The lines that ``python -m my_ops explain`` prints; SystemExit if an option is invalid."""
    for ops, defaults in OWN.items():
        for name, default in defaults.items():
            if options.op not in ops.split(", ") and getattr(options, name) != default:
                option = name.replace("_", "-")
                raise SystemExit(f"explain: {options.op} takes no --{option}")
    sizes = (options.batch, *options.sizes)
    batch, m, n, k = sizes
    tensors: list[tuple[int, ...]] = [(batch, m, k), (batch, k, n), (batch, m, n)]
    if options.op not in ("gemm", "linear"):
        tensors = [options.sizes, (k, k)]
    if min(sizes) < 0 or max(*sizes, *map(prod, tensors)) > MOST_ELEMENTS:
        raise SystemExit(
            "explain: sizes must not be negative, and tensors have at most 2^40 elements, "
            f"got {sizes}"
        )
    asked = {
        "op": options.op,
        "gpu": options.gpu or DEFAULT_GPU,
        "dtype": SHORT.get(options.dtype, options.dtype),
    }
    if options.op in ("gemm", "linear"):
        names, passes = "m, n, k", {"": _product(options, asked)}
        asked |= dict(zip(("batch", "m", "n", "k"), sizes, strict=True))
    else:
        names, passes = "steps, batch, hidden", _layer(options, asked)
        asked |= dict(zip(names.split(", "), options.sizes, strict=True))
    if options.json:
        answers: dict[str, Any] = {name: _as_dict(lines) for name, lines in passes.items()}
        return f"{json.dumps(asked | answers.get('', answers), indent=1)}\n"
    shape = " x ".join(str(size) for size in options.sizes)
    batch = f", batch {options.batch}" if options.batch != 1 else ""
    assumed = "" if options.gpu else " (assumed: --gpu names another)"
    costs = f"; costs: {asked['costs']}" if "costs" in asked else ""
    where = f"on {asked['gpu']}{assumed}{costs}"
    said = [
        f"{options.op} of {asked['dtype']}, {names.replace(', ', ' x ')} = {shape}{batch}, {where}"
    ]
    for name, lines in passes.items():
        if name:
            said.append(f"  {name}")
        said += [f"{'    ' if name else '  '}{line}" for line in lines]
    return "\n".join(said) + "\n"


def _as_dict(lines: list[str]) -> dict[str, object]:
    *refused, plan = lines
    return {"plan": plan, "not taken": dict(line.split(": no, ", 1) for line in refused)}


def _product(options: argparse.Namespace, asked: dict[str, object]) -> list[str]:
    precision = options.precision or ("high" if options.tf32 else "highest")
    asked["precision"] = precision
    linear, gpu = options.op == "linear", GPUS[str(asked["gpu"])]
    problem = Problem(
        *gpu,
        str(asked["dtype"]).encode(),
        options.activation.encode(),
        options.batch,
        *options.sizes,
        options.a_transposed,
        options.b_transposed or linear,
        linear,
        options.bias,
        options.residual,
        options.packed,
        precision == "high",
        options.tf32,
    )
    wrong = f"no activation of linear is called {options.activation!r}"
    lines = _answer("my_ops_explain_gemm", problem, wrong)
    asked["costs"] = _gemm_costs.said_of(gpu)
    return lines


def _layer(options: argparse.Namespace, asked: dict[str, object]) -> dict[str, list[str]]:
    gpu, op, dtype = GPUS[str(asked["gpu"])], options.op.encode(), str(asked["dtype"]).encode()
    wrong = f"no op is called {options.op!r}: gemm, linear, lltm, lstm, gru"
    return {
        name: _answer(
            "my_ops_explain_recurrent",
            _Layer(*gpu, op, dtype, *options.sizes, name == "backward", options.tf32),
            wrong,
        )
        for name in ("forward", "backward")
    }


def _answer(name: str, problem: ctypes.Structure, wrong: str) -> list[str]:
    """The lines that the module's function writes; it knows all names but the one of `wrong`."""
    try:
        _tuned.load()
        said = _gemm_costs.answer(name, ctypes.byref(problem))
    except (ImportError, OSError) as error:
        raise SystemExit(f"explain: {error}; `python -m my_ops` says what to do") from None
    if said is None:
        raise SystemExit(f"explain: {wrong}")
    return [line.strip() for line in said.splitlines()]
