"""Products and recurrent layers of my_ops, for Hugging Face's Kernel Hub.

The functions are those of the package my_ops, and so are the layers of ``nn``. Those of ``layers``
have a forward alone, which replaces that of torch.nn's layer of the same name.
"""

from . import _inductor as _inductor  # registers itself
from . import layers, nn
from .ops import gemm, linear, prepack
from .recurrent.gru import gru, gru_cell
from .recurrent.lltm import lltm, lltm_cell
from .recurrent.lstm import lstm, lstm_cell

__all__ = [
    "gemm",
    "gru",
    "gru_cell",
    "layers",
    "linear",
    "lltm",
    "lltm_cell",
    "lstm",
    "lstm_cell",
    "nn",
    "prepack",
]
