"""Runs torch's own float32 products on our kernels, with one switch per process.

The kernels that replace torch's are C++, csrc/overrides/fast_fp32.cpp. With a release of torch for
which that was not tested they are Python, here. So are those of ops that torch itself overrides in
Python, such as ``bmm`` for outer products (torch >= 2.13, for CUDA).
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import re
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_compiling

from my_ops._library import MODULE, cpp_module, start_fast_fp32
from my_ops._private import dispatch_table

# Only compiled kernels replace torch's convolutions and attention.
CONVOLUTIONS = ("convolution", "convolution_backward")
OPS = ("mm", "mm.out", "bmm", "bmm.out", "addmm", "addmm.out", "baddbmm", "baddbmm.out")
ATTENTION = (  # the ops in which float32's scaled_dot_product_attention ends, on CUDA only
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_efficient_attention_backward",
)
P = ParamSpec("P")
R = TypeVar("R")
SHOWN = 30  # shapes in the report's table
# The releases with which csrc/overrides, compiled with another of them, was tested.
TESTED_TORCH = (210, 215)


class Taken(NamedTuple):
    """Products of one shape that the switch took, of real or complex matrices, and how many
    (``times``). Of attention, ``batch`` counts all heads, ``m`` the queries, ``n`` the keys and
    ``k`` the size of a head."""

    op: str
    batch: int
    m: int
    n: int
    k: int
    times: int


class Report(NamedTuple):
    """What the switch has done since the process began. ``str()`` gives a table, of at most 30
    shapes."""

    on: bool
    taken: tuple[Taken, ...]
    # how many large products in float32 or complex64, and calls of attention, stayed torch's, for
    # each reason
    left: dict[str, int]
    others: tuple[str, ...]  # ops that keep the kernel of another package

    def __str__(self) -> str:
        lines = [f"fast_fp32 is {'on' if self.on else 'off'}"]
        if self.on and not self.taken:
            lines[0] += "; no product taken"
            if not torch.cuda.is_available():
                lines[0] += ": torch sees no GPU"
            elif not _switch.has_kernels():
                lines[0] += ": this build of my_ops is for the CPU only"
        most = sorted(self.taken, key=lambda taken: -taken.times)
        for op, batch, m, n, k, times in most[:SHOWN]:
            shape = f"{m} x {n} x {k}" + (f", batch {batch}" if batch != 1 else "")
            lines.append(f"  taken  {times:>8}  {op} {shape}")
        if len(most) > SHOWN:
            total = sum(taken.times for taken in most[SHOWN:])
            lines.append(f"  taken  {total:>8}  of {len(most) - SHOWN} other shapes")
        lines += [f"  left   {times:>8}  {why}" for why, times in self.left.items()]
        lines += [f"  not touched: {op}, another package's" for op in self.others]
        return "\n".join(lines)


def _registered_at(op: str, key: str) -> Path | None:
    """The file that registered the kernel of an op at a key, if torch says so."""
    found = re.search(rf"^{key}: registered at (\S*)", dispatch_table(f"aten::{op}"), re.MULTILINE)
    return Path(found[1]) if found else None


def _is_torchs_python(kernel: Path | None) -> bool:
    return kernel is not None and kernel.is_relative_to(Path(torch.__file__).with_name("_native"))


def _is_torchs(kernel: Path | None, key: str) -> bool:
    """Whether the kernel is torch's own."""
    return kernel is None or kernel.name.startswith(f"Register{key}") or _is_torchs_python(kernel)


class Switch:
    """The switch of one dispatch key, whose products the module at ``path`` computes."""

    def __init__(self, path: Path, key: str) -> None:
        self._path, self._key = path, key
        self._lock = threading.Lock()
        self._module: Any = None  # set once its kernels are registered; they stay registered
        self._library: torch.library.Library | None = None
        self._on = False
        self._others: tuple[str, ...] = ()

    def set(self, on: bool) -> bool:
        """Returns the previous state."""
        with self._lock:
            if on and self._module is None:
                # In a thread of its own, which has none of the caller's modes and transforms:
                # FakeTensorMode or torch.func.grad would take the tensor that _register needs.
                with ThreadPoolExecutor(1) as thread:
                    thread.submit(self._register).result()
            previous, self._on = self._on, on
            if self._module is not None:
                self._module.my_ops_fast_fp32_set(on)
        return previous

    def has_kernels(self) -> bool:
        """Whether the module has kernels of this key. Known once the switch has been on."""
        return self._module is not None

    def _register(self) -> None:
        loaded = start_fast_fp32(self._path, self._key)
        if loaded is None:
            return
        module, native = loaded
        overrides = cpp_module(OVERRIDES, "my_ops_overrides_torch", TESTED_TORCH)
        attention = ATTENTION if self._key == "CUDA" else ()
        ops = (*OPS, *CONVOLUTIONS, *attention)
        kernels = {op: _registered_at(op, self._key) for op in ops}
        self._others = tuple(op for op, at in kernels.items() if not _is_torchs(at, self._key))
        self._library = torch.library.Library("aten", "IMPL")

        def override(_: object) -> float:
            for op, at in kernels.items():
                if op in self._others:
                    continue
                names = op.encode(), self._key.encode()
                compiled = (
                    overrides is not None
                    and (at is not None or op in CONVOLUTIONS)  # torch has one for all devices
                    and not _is_torchs_python(at)
                    and overrides.my_ops_overrides_put(*names, native)
                )
                if not compiled and op in OPS:
                    self._override_in_python(op, native.contents.least)
            return 0.0

        with warnings.catch_warnings():
            # torch reports an override on stderr, but as a warning if it happens inside an op.
            warnings.simplefilter("ignore")
            torch.tensor([0.0], device="cpu").apply_(override)
        self._module = module

    def _override_in_python(self, op: str, least: int) -> None:
        """``least``: products with a smaller batch * m * n * k stay torch's."""
        call_torchs = torch.library.get_kernel(f"aten::{op}", self._key).call_boxed
        take = torch.ops.my_ops.fast_fp32.default
        rank = 3 if op.startswith("b") else 2

        # tensors include the one that is added; rest has out, and scalars other than the default,
        # the integer 1. We never take outer products. The first test of sizes is the cheapest.
        def kernel(keys: Any, *tensors: Tensor, **rest: Any) -> Tensor:
            *added, a, b = tensors
            if (
                self._on
                and a.numel() * b.numel() >= least
                and a.dtype in (torch.float32, torch.complex64)
                and a.dim() == b.dim() > 1
                and a.numel() * b.size(-1) >= least
                and a.size(-1) > 1
                and rest.get("beta", 1) == 1 == rest.get("alpha", 1)
            ):
                out = rest.get("out")
                taken = take(rank, added[0] if added else None, a, b, out)
                if taken is not None:
                    return taken if out is None else out
            return call_torchs(keys, *tensors, **rest)

        assert self._library is not None
        self._library.impl(op, kernel, self._key, with_keyset=True, allow_override=True)

    def report(self) -> Report:
        taken, left = [], {}
        for line in self._counts().splitlines():
            what, rest = line.split(" ", 1)
            if what == "taken":
                op, *numbers = rest.split()
                taken.append(Taken(op, *(int(number) for number in numbers)))
            else:
                times, why = rest.split(" ", 1)
                if times != "0":
                    left[why] = int(times)
        return Report(self._on, tuple(taken), left, self._others)

    def _counts(self) -> str:
        if self._module is None:
            return ""
        size = 1 << 12
        while True:
            text = ctypes.create_string_buffer(size)
            length = self._module.my_ops_fast_fp32_report(text, ctypes.c_int64(size))
            if length < size:
                return text.value.decode()
            size = 2 * length


OVERRIDES = Path(__file__).with_name("_overrides.so")
_switch = Switch(MODULE, "CUDA")


def _no_function(decorated: object) -> str | None:
    """What it is, if its code does not run when it is called, or it is no function at all."""
    if isinstance(decorated, type):
        return "a class"
    if not callable(decorated):
        return f"of type {type(decorated).__name__}"
    code = inspect.unwrap(decorated)
    while isinstance(code, functools.partial):
        code = inspect.unwrap(code.func)
    for each in (code, type(code).__call__):
        if inspect.isgeneratorfunction(each) or inspect.isasyncgenfunction(each):
            return "a generator"
        if inspect.iscoroutinefunction(each):
            return "a coroutine"
    return None


class fast_fp32:  # in lower case like torch.set_grad_enabled, which is used in the same way
    """Computes torch's float32 products and attention on CUDA with our kernels if they are faster.

    A call switches it on or off. At the end of a ``with`` statement the previous state returns. As
    a decorator, it does so around every call of the function::

        my_ops.fast_fp32()  # from here on
        with my_ops.fast_fp32(False):
            ...  # torch's own

    It takes ``mm``, ``bmm``, ``addmm`` and ``baddbmm`` with ``beta = alpha = 1``, their ``out=``
    forms, and everything that calls them: ``matmul``, ``einsum``, ``linear``, gradients, and the
    products that Inductor leaves to cuBLAS. It takes convolutions of single points (1 x 1 and the
    like) and their gradients as the products that they are, and on Hopper those of windows in one
    or two dimensions, with one group, and transposed ones. It takes depthwise convolutions on any
    GPU. It takes products of complex64 too, as real ones of twice ``n`` and ``k``. Results have
    float32's accuracy, like those of :func:`gemm` with ``precision="highest"``, but not the same
    bits as torch's. Everything else stays torch's: other dtypes, products that torch computes as
    fast, all products while torch's settings allow TF32, and convolutions while its setting for
    them does, which is torch's default:
    ``torch.backends.cudnn.allow_tf32 = False`` forbids it.

    It also takes ``scaled_dot_product_attention`` of float32 and its gradients, where torch would
    use its memory-efficient kernel. That has float32's accuracy whether TF32 is allowed or not, and
    so has ours. Attention with dropout stays torch's.

    There is one switch for the process, with all its threads and GPUs, as with ``torch.backends``;
    ``with`` statements of several threads should not overlap. Products check it when they run, in
    compiled code too, but not when a CUDA graph is replayed. ``python -m my_ops run SCRIPT``
    switches it on for a script.

    Args:
        mode: whether to switch it on.

    Raises:
        TypeError: ``mode`` is not a bool, or it decorates a generator or a coroutine, whose code
            runs after the call, or a class.
        RuntimeError: it was called inside a function that ``torch.compile`` compiles with
            ``fullgraph=True``. Without that, torch runs the whole function uncompiled.
    """

    def __init__(self, mode: bool = True) -> None:
        if is_compiling():
            raise RuntimeError("fast_fp32: must be called outside of compiled functions")
        if not isinstance(mode, bool):
            raise TypeError(f"fast_fp32: mode must be a bool, got {mode!r}")
        self._mode = mode
        self._previous = _switch.set(mode)

    def __enter__(self) -> None:
        _switch.set(self._mode)

    def __exit__(self, *_: object) -> None:
        _switch.set(self._previous)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        _switch.set(self._previous)
        what = _no_function(function)
        if what is not None:
            name = getattr(function, "__qualname__", repr(function))
            raise TypeError(
                "fast_fp32: must decorate a function that runs when it is called, got "
                f"{name}, {what}; use a with statement inside it"
            )

        @functools.wraps(function)
        def switched(*args: P.args, **kwargs: P.kwargs) -> R:
            with fast_fp32(self._mode):
                return function(*args, **kwargs)

        return switched

    @staticmethod
    def report() -> Report:
        """Returns what it took and what it left to torch, as a named tuple that can be printed."""
        return _switch.report()
