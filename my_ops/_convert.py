"""Replaces torch.nn's layers in a model by those of my_ops."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from my_ops import nn as layers
from my_ops.ops._checks import FLOATING, HALF
from my_ops.ops.gemm import in_whole_vectors

KINDS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: layers.Linear,
    nn.LSTM: layers.LSTM,
    nn.GRU: layers.GRU,
    nn.LSTMCell: layers.LSTMCell,
    nn.GRUCell: layers.GRUCell,
}


# Attributes of our layers that torch's do not have.
OPTIONS = (
    *("weight_dropout", "zoneout"),
    *("_has_dropout", "_has_weight_dropout", "_has_zoneout", "_was_torchs"),
)


@dataclass(frozen=True)
class Conversion:
    """What :func:`convert` did. Printed, it has one line per module.

    Attributes:
        swapped: for each module that became a layer of my_ops, the name of its class before.
        left: for each of torch.nn's layers that was not converted, the reason.
    """

    swapped: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    _modules: list[tuple[nn.Module, type[nn.Module]]] = field(
        default_factory=list, init=False, repr=False
    )

    def undo(self) -> None:
        """Restores the swapped modules. One whose class has changed since, as a parametrization
        does, is left, and restored by an ``undo()`` after that has been removed."""
        left = []
        for module, kind in self._modules:
            if type(module) is not KINDS[kind]:
                left.append((module, kind))
                continue
            module.__class__ = kind
            for name in OPTIONS:
                module.__dict__.pop(name, None)
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters()
        self._modules[:] = left

    def __str__(self) -> str:
        lines = [
            f"{name or '(the model)'}: {kind} to my_ops" for name, kind in self.swapped.items()
        ]
        lines += [f"{name or '(the model)'}: left, {why}" for name, why in self.left.items()]
        return "\n".join(lines) or "nothing to convert"


def convert(model: nn.Module) -> Conversion:
    """Turns the model's Linear, LSTM, GRU, LSTMCell and GRUCell into those of :mod:`my_ops.nn`.

    This happens in place. Each module stays the same object, with its parameters, buffers, hooks,
    device and mode; only its class changes. So optimizers, state dicts and references to it stay
    valid. These modules are left as they are, and reported: instances of a subclass, parametrized
    modules, modules whose ``forward`` was replaced or that have an attribute of their own with the
    name of one of ours, such as ``zoneout``, modules being quantized, modules for which my_ops has
    no kernel, Linear layers without a weight, and those of 16 bits whose features are multiples of
    8, which would call torch's own product.

    A converted LSTM or GRU calls cuDNN, as before, where that is faster: in float32 with many rows
    or more than 1024 units, while torch lets cuDNN use TF32 and products not; in 16 bits with two
    directions of at least 1024 units; and for small calls of several layers or directions, or with
    packed data. These calls have no second derivative, as before;
    ``torch.backends.cudnn.flags(enabled=False)`` makes them ours.

    Args:
        model: any module, which may itself be one of these layers.

    Returns:
        A :class:`Conversion`: what was swapped, what was left, and why. Its ``undo()`` restores
        torch's layers.

    Raises:
        TypeError: ``model`` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"convert: model must be a torch.nn.Module, got {type(model).__name__}")
    report = Conversion()
    for name, module in model.named_modules():
        kind = next((k for k in KINDS if isinstance(module, k)), None)
        if kind is None or type(module) is KINDS[kind]:
            continue
        why = _reason_to_leave(module, kind)
        if why is not None:
            report.left[name] = why
            continue
        report.swapped[name] = kind.__name__
        report._modules.append((module, kind))
    for module, kind in report._modules:
        module.__class__ = KINDS[kind]
        if isinstance(module, nn.RNNBase):
            module._was_torchs = True
    return report


def _reason_to_leave(module: nn.Module, kind: type[nn.Module]) -> str | None:
    if is_parametrized(module):
        return "as it is parametrized"
    if type(module) is not kind:
        return f"as it is of a subclass of {kind.__name__}, {type(module).__name__}"
    if "forward" in module.__dict__:
        return "as its forward was replaced"
    if getattr(module, "qconfig", None) is not None:
        return "as it is being quantized"
    if getattr(module, "proj_size", 0) > 0:
        return "as it has projections, which run torch's own LSTM"
    for name in module.__dict__:
        if hasattr(KINDS[kind], name) and not hasattr(kind, name):
            return f"as it has an attribute {name} of its own"
    for name, t in module.named_parameters(recurse=False):
        if type(t) not in (nn.Parameter, torch.Tensor) and not hasattr(t, "placements"):
            return f"as its {name} is a {type(t).__name__}"
        if t.layout != torch.strided:
            return f"as its {name} is of layout {t.layout}"
        if t.dtype not in FLOATING:
            return f"as its {name} is of dtype {str(t.dtype).removeprefix('torch.')}"
        if t.device.type not in ("cpu", "cuda", "meta"):
            return f"as its {name} is on {t.device}"
    if isinstance(module, nn.Linear):
        weight = getattr(module, "weight", None)
        if not isinstance(weight, torch.Tensor):
            return "as it has no weight"
        if weight.dtype in HALF and in_whole_vectors(*weight.shape):
            return "as its products of 16 bits are torch's own"
    return None
