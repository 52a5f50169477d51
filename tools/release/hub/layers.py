"""The forward of torch.nn's layers with our kernels. These classes hold nothing: ``self`` is the
layer of torch.nn whose forward they replace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from . import nn

if TYPE_CHECKING:
    from torch.nn.utils.rnn import PackedSequence

Layer = TypeVar("Layer", bound=torch.nn.Module)


def _as(kind: type[Layer], layer: torch.nn.Module, **more: Any) -> Layer:
    """One of our layers with the parameters and options of torch's."""
    ours = kind.__new__(kind)
    ours.__dict__.update(layer.__dict__, **more)
    return ours


class LSTM(torch.nn.Module):
    def forward(self, input: Tensor | PackedSequence, hx: Any = None) -> Any:
        return nn.LSTM.forward(_as(nn.LSTM, self, _was_torchs=True), input, hx)


class GRU(torch.nn.Module):
    def forward(self, input: Tensor | PackedSequence, hx: Any = None) -> Any:
        return nn.GRU.forward(_as(nn.GRU, self, _was_torchs=True), input, hx)


class LSTMCell(torch.nn.Module):
    can_torch_compile: bool = True

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        return nn.LSTMCell.forward(_as(nn.LSTMCell, self), input, hx)


class GRUCell(torch.nn.Module):
    can_torch_compile: bool = True

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        return nn.GRUCell.forward(_as(nn.GRUCell, self), input, hx)


class Linear(torch.nn.Module):
    can_torch_compile: bool = True

    def forward(self, input: Tensor) -> Tensor:
        return nn.Linear.forward(_as(nn.Linear, self), input)
