"""Costs of products that ``python -m my_ops tune`` has measured, in the user's cache.

A file for each GPU: what identifies the GPU, and the costs that were fitted to its times. It is
read when my_ops is imported. Costs only decide which kernel computes a product, never its result.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from my_ops import _cache, _gemm_costs
from my_ops._gemm_costs import Gpu, Model, Numbers

# The costs that are fitted: from which sizes on a kernel pays, and which tile is the fastest. The
# others say what a kernel is for, or how accurate it is, or need more times than two minutes give.
FITTED = (
    "fp32_skinny.few_min_weight",
    "fp32_skinny.max_columns",
    "fp32_narrow.launches",
    "fp32_narrow.floats.here",
    "fp32_narrow.halves.here",
    "fp32_short.launches",
    "fp32_short.byte",
    "fp32_sm90.launches",
    "fp32_sm90.element",
    "fp32_sm90.strided_element",
    "fp32_sm90.wide_slowdown",
    "fp32_sm90.medium_slowdown",
    "fp32_sm90.small_slowdown",
    "fp32_sm80.launches",
    "fp32_sm80.product",
    "small.max_outputs",
    "small.max_work_of_many",
    "small.max_work_8_bytes",
    "small.max_work_4_bytes",
    "small.max_work_2_bytes",
)
_SUFFIX = ".costs"


class Tuned(NamedTuple):
    gpu: Gpu
    model: Model
    costs: Numbers  # some or all of FITTED
    date: str  # 2026-11-30

    @property
    def said(self) -> str:
        return f"tuned on {self.date}"


class _UnfitError(Exception):
    """What is wrong with a file."""


def folder() -> Path:
    return _cache.cache_folder() / "costs"


def place_of(gpu: Gpu, model: Model) -> Path:
    """The file of a GPU: its name, for people, and a digest of all that identifies it."""
    facts = json.dumps([gpu.major, gpu.minor, gpu.sm_count, gpu.l2_bytes, *model])
    name = re.sub(r"[^a-z0-9]+", "-", model.name.lower()).strip("-")
    return folder() / f"{name}-{hashlib.sha256(facts.encode()).hexdigest()[:12]}{_SUFFIX}"


def record_of(tuned: Tuned) -> dict[str, Any]:
    """What a file has."""
    return {
        "version": _gemm_costs.version(),
        "date": tuned.date,
        "gpu": {**tuned.model._asdict(), **tuned.gpu._asdict()},
        "costs": tuned.costs,
    }


def write(tuned: Tuned) -> Path | None:
    """Returns the file, or None if the folder cannot be written to."""
    path = place_of(tuned.gpu, tuned.model)
    return path if _cache.write(path, json.dumps(record_of(tuned)).encode()) else None


def _number(kind: type, value: object) -> bool:
    return type(value) is int or (kind is float and type(value) is float)


def _tuned(record: Any) -> Tuned:
    if not isinstance(record, dict) or set(record) != {"version", "date", "gpu", "costs"}:
        raise _UnfitError("it does not hold what tune writes")
    if record["version"] != _gemm_costs.version():
        raise _UnfitError("it is of a release of my_ops with other costs")
    date, found, costs = record["date"], record["gpu"], record["costs"]
    if not isinstance(date, str) or not re.fullmatch(r"\d{4}-\d\d-\d\d", date):
        raise _UnfitError(f"its date is {date!r}")
    if not isinstance(found, dict) or set(found) != {*Model._fields, *Gpu._fields}:
        raise _UnfitError("it does not say of which GPU it is")
    name, *numbers = (found[field] for field in (*Model._fields, *Gpu._fields))
    if not isinstance(name, str) or not all(_number(int, x) and 0 <= x < 1 << 31 for x in numbers):
        raise _UnfitError(f"its GPU is {found}")
    kinds = _gemm_costs.kinds()
    if not isinstance(costs, dict) or not set(costs) <= set(FITTED):
        raise _UnfitError("it has costs that are not fitted")
    for cost, value in costs.items():
        if not _number(kinds[cost], value) or not 0 <= value < 1 << 53:
            raise _UnfitError(f"its {cost} is {value!r}")
    return Tuned(Gpu(*numbers[1:]), Model(name, numbers[0]), costs, date)


def read(path: Path) -> Tuned:
    """What :func:`write` has written. Raises _UnfitError, which says what is wrong."""
    content = _cache.read(path)
    if content is None:
        raise _UnfitError("it is damaged")
    try:
        record = json.loads(content)
    except ValueError:
        raise _UnfitError("it is not JSON") from None
    return _tuned(record)


def use(tuned: Tuned) -> None:
    """From now on, in this process, on such GPUs."""
    own = _gemm_costs.costs_of(tuned.gpu, own=True)
    _gemm_costs.give(tuned.gpu, tuned.model, own | tuned.costs, tuned.said)


@functools.cache
def load() -> None:
    """Uses what the cache has, once in a process, and warns of files that are left unused."""
    try:
        names = sorted(os.listdir(folder()))
    except OSError:  # there is none
        return
    for name in names:
        path = folder() / name
        if name.startswith(".") or path.suffix != _SUFFIX:
            continue
        try:
            use(read(path))
        except _UnfitError as why:
            warnings.warn(
                f"my_ops: the costs in {path} are not used: {why}. Run `python -m my_ops tune` "
                "again, or delete the file",
                stacklevel=2,
            )
