"""Custom CUDA and C++ operators for PyTorch.

Every operator is a function here, ``torch.ops.my_ops.X`` for TorchScript and C++, and where it has
parameters a layer in :mod:`my_ops.nn`. :mod:`my_ops.reference` holds each in plain PyTorch.
"""

from importlib.metadata import version as _version

from my_ops import _library
from my_ops import nn as nn
from my_ops import reference as reference
from my_ops.ops import (
    add_one,
    custom_add,
    d_sigmoid,
    fill_index,
    gemm,
    linear,
    lltm,
    lltm_cell,
    round_ste,
)

__version__ = _version("my_ops")
__all__ = [
    "add_one",
    "custom_add",
    "d_sigmoid",
    "fill_index",
    "gemm",
    "linear",
    "lltm",
    "lltm_cell",
    "nn",
    "reference",
    "round_ste",
]

# Compiled gradients of another version must not come out of torch.compile's caches.
_library.tag_compile_cache(__version__)
