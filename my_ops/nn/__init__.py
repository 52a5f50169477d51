"""Layers that call the functions of my_ops, or torch.ops.my_ops in TorchScript."""

from my_ops.nn.linear import Linear, LinearActivation
from my_ops.nn.round_ste import RoundSTE
from my_ops.recurrent.gru import GRU, GRUCell
from my_ops.recurrent.lltm import LLTM, LLTMCell
from my_ops.recurrent.lstm import LSTM, LSTMCell
from my_ops.recurrent.rnn import RNN, RNNCell

__all__ = [
    "GRU",
    "LLTM",
    "LSTM",
    "RNN",
    "GRUCell",
    "LLTMCell",
    "LSTMCell",
    "Linear",
    "LinearActivation",
    "RNNCell",
    "RoundSTE",
]
