"""Plain calls of ops in C++, csrc/calls: what a call costs besides its kernel.

They are in a module of their own, compiled against torch's C++ headers. With a release of torch for
which it was not tested, or if it does not load, every call takes the op's general path.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from my_ops._library import cpp_module
from my_ops._private import address

MODULE = Path(__file__).with_name("_calls.so")
# The releases with which the module, compiled with another of them, was tested.
TESTED_TORCH = (213, 213)


def _load(path: Path) -> Any:
    """The module, or None if there is none or it does not fit this torch."""
    module = cpp_module(path, "my_ops_calls_torch", TESTED_TORCH, ctypes.PyDLL)
    if module is None:
        return None
    module.my_ops_calls_function.restype = ctypes.py_object
    start = module.my_ops_calls_start
    start.argtypes = [ctypes.py_object, ctypes.c_void_p, ctypes.c_int64]
    start.argtypes += [ctypes.py_object, ctypes.py_object, ctypes.c_int64]
    one = torch.empty(0, device="cpu")
    base: Any = torch.Tensor.__base__
    place = address(one)
    values = torch.float64, torch.device("cuda", 3), object.__basicsize__
    if place is None or not start(one, place, base.__basicsize__, *values):
        return None
    return module


_module = _load(MODULE)


def _none(*arguments: Any) -> None:
    return None


def plain_call(name: str, otherwise: Callable[..., Any] = _none) -> Callable[..., Any]:
    """The plain call of an op, which returns None where it has to take the general path;
    ``otherwise`` without the module."""
    if _module is None:
        return otherwise
    return _module.my_ops_calls_function(name.encode())  # type: ignore[no-any-return]
