"""Layers over the operators, by the functions of my_ops; in TorchScript by torch.ops.my_ops."""

from my_ops.nn.linear import Linear, LinearActivation
from my_ops.nn.lltm import LLTM, LLTMCell
from my_ops.nn.round_ste import RoundSTE

__all__ = ["LLTM", "LLTMCell", "Linear", "LinearActivation", "RoundSTE"]
