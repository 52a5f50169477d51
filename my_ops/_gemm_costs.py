"""The costs of products that the compiled module has for each GPU, and its plans with costs of any
value. The functions are those of csrc/gemm_costs.h; no GPU is needed."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any, NamedTuple

Numbers = dict[str, float]  # by the names of GemmCosts, such as fp32_sm90.element; int or float


class Gpu(NamedTuple):
    """A GPU's numbers, from the CUDA programming guide; the L2 cache's, from its white paper."""

    major: int
    minor: int
    sm_count: int
    shared_bytes: int
    l2_bytes: int
    code: int  # the architecture that a wheel with code for all GPUs runs there
    hopper_code: int = 0


class AskedDevice(ctypes.Structure):
    """AskedDevice of csrc/explain.h."""

    _fields_ = [(name, ctypes.c_int) for name in Gpu.__annotations__]


class Problem(ctypes.Structure):
    """AskedProduct of csrc/explain.h."""

    _fields_ = [
        *AskedDevice._fields_,
        *((name, ctypes.c_char_p) for name in ("dtype", "activation")),
        *((name, ctypes.c_int64) for name in ("batch", "m", "n", "k")),
        *((name, ctypes.c_int) for name in ("a_transposed", "b_transposed", "linear")),
        *((name, ctypes.c_int) for name in ("bias", "residual", "packed")),
        *((name, ctypes.c_int) for name in ("high", "library_tf32")),
    ]


class Model(NamedTuple):
    """What tells GPUs of the same numbers apart."""

    name: str
    clock_khz: int  # at most


@functools.cache
def module() -> Any:
    """The compiled module. Raises ImportError or OSError if there is none here."""
    import torch  # noqa: F401  loads the libraries that the module needs

    return ctypes.CDLL(str(Path(__file__).with_name("_C.so")))


def answer(name: str, *asked: Any) -> str | None:
    """The text of one of the module's functions; None if it cannot answer."""
    function = module()[name]
    function.restype = ctypes.c_int64
    size = 1 << 12
    while True:
        text = ctypes.create_string_buffer(size)
        length = function(*asked, text, ctypes.c_int64(size))
        if length < size:
            return text.value.decode() if length >= 0 else None
        size = length + 1


@functools.cache
def _names() -> tuple[int, dict[str, type]]:
    version, *rest = (answer("my_ops_gemm_costs_names") or "").split()
    kinds = {"int": int, "float": float}
    named = zip(rest[::2], rest[1::2], strict=True)
    return int(version), {name: kinds[kind] for name, kind in named}


def version() -> int:
    """Of what the costs mean."""
    return _names()[0]


def kinds() -> dict[str, type]:
    """The name of each cost, and int or float."""
    return _names()[1]


def _array(numbers: Numbers) -> tuple[Any, ctypes.c_int64]:
    values = [numbers[name] for name in kinds()]
    return (ctypes.c_double * len(values))(*values), ctypes.c_int64(len(values))


def costs_of(gpu: Gpu, own: bool = False) -> Numbers:
    """The costs of a GPU in this process; with ``own``, those it has if it was given none."""
    found = (ctypes.c_double * len(kinds()))()
    asked = ctypes.byref(AskedDevice(*gpu))
    module().my_ops_gemm_costs_get(asked, own, found, ctypes.c_int64(len(found)))
    return {name: kind(x) for (name, kind), x in zip(kinds().items(), found, strict=True)}


def said_of(gpu: Gpu) -> str:
    """Where the costs of a GPU are from: built in, cautious or tuned."""
    return answer("my_ops_gemm_costs_said", ctypes.byref(AskedDevice(*gpu))) or ""


def give(gpu: Gpu, model: Model, numbers: Numbers, said: str) -> None:
    """Plans of this process use these costs on such GPUs from now on. Raises ValueError if one is
    negative, infinite, or not whole where it must be."""
    function = module().my_ops_gemm_costs_give
    function.restype = ctypes.c_int64
    asked = ctypes.byref(AskedDevice(*gpu))
    name = model.name.encode(), ctypes.c_int(model.clock_khz)
    if function(asked, *name, *_array(numbers), said.encode()) < 0:
        raise ValueError("my_ops: costs must be finite and not negative, and whole where they are")


def current_gpu() -> tuple[Gpu, Model] | None:
    """The current GPU; None if this build is for the CPU only."""
    if not hasattr(module(), "my_ops_gemm_costs_gpu"):
        return None  # my_ops for the CPU only
    asked, name, clock = AskedDevice(), ctypes.create_string_buffer(256), ctypes.c_int()
    function = module().my_ops_gemm_costs_gpu
    size = ctypes.c_int64(len(name))
    status = function(ctypes.byref(asked), name, size, ctypes.byref(clock))
    if status != 0:
        raise RuntimeError(f"my_ops: the current GPU cannot be asked: CUDA error {status}")
    numbers = (getattr(asked, field) for field in Gpu._fields)
    return Gpu(*numbers), Model(name.value.decode(errors="replace"), clock.value)


class Planner:
    """Plans many products at once."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = (Problem * len(problems))(*problems)
        self._codes = (ctypes.c_int64 * len(problems))()
        self._words: dict[int, str] = {}

    def plans(self, numbers: Numbers) -> list[str]:
        """With these costs, in the words of ``python -m my_ops explain``, without k-slices."""
        module().my_ops_gemm_plans(
            self.problems,
            ctypes.c_int64(len(self.problems)),
            *_array(numbers),
            self._codes,
        )
        for code in {*self._codes} - self._words.keys():
            self._words[code] = answer("my_ops_gemm_plan_words", ctypes.c_int64(code)) or ""
        return [self._words[code] for code in self._codes]
