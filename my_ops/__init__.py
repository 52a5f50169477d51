"""Operators and layers for PyTorch in C++ and CUDA.

What a program needs first::

    my_ops.fast_fp32()  # float32 products, attention, convolutions: faster on Hopper GPUs
    my_ops.convert(model)  # faster LSTM and GRU layers; my_ops.revert(model) undoes it
    layer = my_ops.nn.LSTM(64, 128)  # or build the model of these layers

And then::

    gemm, linear, prepack          products, with bias, activation and residual in one kernel
    attention                      torch's scaled_dot_product_attention, fast in float32
    lstm, gru, lltm                the functions of the layers; lstm_cell, ... are one step
    cell                           a recurrent cell of one's own, from a Python function
    nn                             the layers: LSTM, GRU, RNN, LLTM, their cells, Linear, ...
    reference                      every op in plain PyTorch: what it is to compute
    distributed                    import my_ops.distributed for DTensor
    get_include, cmake_prefix_path where C and C++ find headers and libraries
    add_one, custom_add, d_sigmoid, round_ste, fill_index: elementwise ops to learn from

Every op is a function here and ``torch.ops.my_ops.X`` in TorchScript and C++. ``python -m my_ops``
checks the machine and the installation.
"""

import sys as _sys
from pathlib import Path as _Path

if (
    _sys.argv[:1] == ["-m"]
    and _sys.argv[1:2] != ["run"]
    and ("-m", "my_ops") in zip(_sys.orig_argv, _sys.orig_argv[1:], strict=False)
):
    # python -m my_ops: the report must work even if torch or the module does not load.
    from my_ops.__main__ import main as _main

    raise SystemExit(_main())

from my_ops import _inductor as _inductor  # registers itself
from my_ops import _library, _tuned
from my_ops import nn as nn
from my_ops import reference as reference
from my_ops._convert import Conversion as Conversion
from my_ops._convert import convert, revert
from my_ops._fast_fp32 import fast_fp32
from my_ops.ops import PackedWeight as PackedWeight
from my_ops.ops import (
    add_one,
    attention,
    custom_add,
    d_sigmoid,
    fill_index,
    gemm,
    linear,
    prepack,
    round_ste,
)
from my_ops.recurrent.gru import gru, gru_cell
from my_ops.recurrent.lltm import lltm, lltm_cell
from my_ops.recurrent.lstm import lstm, lstm_cell
from my_ops.recurrent.own_cell import cell

__version__ = _library.version()
cmake_prefix_path = str(_Path(__file__).parent / "share" / "cmake")  # for find_package(my_ops)
# Without Conversion and PackedWeight, the classes of results: help() begins with the classes.
__all__ = [
    "add_one",
    "attention",
    "cell",
    "cmake_prefix_path",
    "convert",
    "custom_add",
    "d_sigmoid",
    "fast_fp32",
    "fill_index",
    "gemm",
    "get_include",
    "gru",
    "gru_cell",
    "linear",
    "lltm",
    "lltm_cell",
    "lstm",
    "lstm_cell",
    "nn",
    "prepack",
    "reference",
    "revert",
    "round_ste",
]


def get_include() -> str:
    """Returns the include folder of the C++ header ``my_ops/ops.h``."""
    return str(_Path(__file__).parent / "include")


_tuned.load()  # which kernel computes a product follows from what the user's cache has

# torch.compile's caches must not return gradients that were compiled with another version.
_library.tag_compile_cache(__version__)
