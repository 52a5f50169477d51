"""Layers over the operators. Each ``forward`` calls one op, so all of them work in TorchScript."""

from my_ops.nn.linear import Linear
from my_ops.nn.lltm import LLTM, LLTMCell
from my_ops.nn.round_ste import RoundSTE

__all__ = ["LLTM", "LLTMCell", "Linear", "RoundSTE"]
