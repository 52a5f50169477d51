"""Replaces torch.nn's recurrent layers in a model by those of my_ops, and the other way round."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from my_ops import nn as layers
from my_ops.ops._checks import FLOATING

# What revert turns back, and convert forth, unless it is among STAYING.
KINDS: dict[type[nn.Module], type[nn.Module]] = {
    nn.LSTM: layers.LSTM,
    nn.GRU: layers.GRU,
    nn.RNN: layers.RNN,
    nn.LSTMCell: layers.LSTMCell,
    nn.GRUCell: layers.GRUCell,
    nn.RNNCell: layers.RNNCell,
}
# Layers that a reader of the report may look for, and why convert leaves them.
STAYING: dict[type[nn.Module], str] = {
    nn.Linear: "fast_fp32() takes its products",
    nn.LSTMCell: "torch's own costs the host less",
    nn.GRUCell: "torch's own costs the host less",
    nn.RNNCell: "torch's own costs the host less",
}
# What our layers have and torch's do not: options, by their values when not used, and attributes.
OPTIONS = {"weight_dropout": 0.0, "zoneout": 0.0, "heads": 1}
ATTRIBUTES = (*OPTIONS, "_has_dropout", "_has_weight_dropout", "_has_zoneout", "_was_torchs")
SHOWN = 3  # names in a line of the report
Which = str | type[nn.Module]


@dataclass(frozen=True)
class Conversion:
    """What :func:`convert` or :func:`revert` did. Printed, it has a line for each class and reason.

    Attributes:
        converted: the modules that changed: their names, and the names of their classes before.
        skipped: the layers of torch.nn, or of my_ops, that did not change, and the reasons.
    """

    converted: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    _modules: list[tuple[nn.Module, type[nn.Module]]] = field(
        default_factory=list, init=False, repr=False
    )
    _kinds: dict[str, str] = field(default_factory=dict, init=False, repr=False)

    def undo(self) -> None:
        """Restores the classes of the modules. One whose class or ``forward`` was replaced
        meanwhile, as by a parametrization or a hook, keeps it, and an ``undo()`` after that has
        been removed restores it. :func:`revert` needs no Conversion."""
        left = []
        for module, kind in self._modules:
            if type(module) is not _other_class(kind) or _forward_was_replaced(module):
                left.append((module, kind))
            else:
                _become(module, kind)
        self._modules[:] = left

    def _add(self, name: str, module: nn.Module, why: str | None) -> None:
        self._kinds[name] = type(module).__name__
        if why is None:
            self.converted[name] = type(module).__name__
            self._modules.append((module, type(module)))
        else:
            self.skipped[name] = why

    def __str__(self) -> str:
        grouped: dict[tuple[str, str], list[str]] = {}
        for name, kind in self._kinds.items():
            why = self.skipped.get(name)
            said = "converted" if why is None else f"skipped: {why}"
            grouped.setdefault((kind, said), []).append(name or "(the model)")
        lines = []
        for (kind, said), names in grouped.items():
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            lines.append(f"{', '.join(names[:SHOWN])}{more}: {kind}, {said}")
        return "\n".join(lines) or "nothing to convert"


def convert(
    model: nn.Module,
    *,
    only: Which | Iterable[Which] | None = None,
    skip: Which | Iterable[Which] = (),
) -> Conversion:
    """Turns the model's LSTM, GRU and RNN layers into those of :mod:`my_ops.nn`.

    This happens in place. Each module stays the same object, with its parameters, buffers, hooks,
    device and mode; only its class changes. So optimizers, state dicts and references to it stay
    valid. These modules are skipped, and reported: instances of a subclass, parametrized modules,
    modules whose ``forward`` was replaced or that have an attribute of their own with the name of
    one of ours, such as ``zoneout``, modules being quantized, and modules for which my_ops has no
    kernel. ``Linear`` stays torch's: :class:`fast_fp32` takes the same products, at less cost to
    the host. So do ``LSTMCell``, ``GRUCell`` and ``RNNCell``: a step at a time, torch's cost the
    host less.

    A converted LSTM or GRU calls cuDNN, as before, where that is faster: in float32 with many
    sequences or more than 1024 units, while torch lets cuDNN use TF32 and products not; in 16 bits
    with two directions of at least 1024 units; and for small calls of several layers or directions,
    or with packed data. These calls have no second derivative, as before;
    ``torch.backends.cudnn.flags(enabled=False)`` makes them ours. A converted RNN is ours in calls
    of many steps, as :class:`my_ops.nn.RNN` says; the first of them compiles its kernels, once for
    the machine.

    Args:
        model: any module, which may itself be one of these layers.
        only: converts these modules alone. Each is named as in ``model.named_modules()``, which
            also stands for the modules below it, or is a class, such as ``nn.LSTM``.
        skip: does not convert these, which are named likewise.

    Returns:
        A :class:`Conversion`: what was converted, what was skipped, and why.

    Raises:
        TypeError: ``model`` is not a module, or ``only`` or ``skip`` has something that is neither
            a name nor a class of modules.
        ValueError: the model has no module of a name.
    """
    _check_model("convert", model)
    taken, skipped = _chosen(model, "only", only), _chosen(model, "skip", skip)
    report = Conversion()
    for name, module in model.named_modules():
        kind = next((k for k in (*KINDS, *STAYING) if isinstance(module, k)), None)
        if kind is None or type(module) in (layers.Linear, *KINDS.values()):
            continue
        if (taken is not None and name not in taken) or name in (skipped or ()):
            continue
        report._add(name, module, STAYING.get(kind) or _reason_to_skip(module, kind))
    for module, kind in report._modules:
        _become(module, KINDS[kind])
    return report


def revert(model: nn.Module) -> Conversion:
    """Turns the model's LSTM, GRU, RNN and their cells of :mod:`my_ops.nn` into torch's, in place.

    It needs no :class:`Conversion`, so it serves copies and loaded models too, and layers that were
    made as those of my_ops. What asks for torch's own classes, such as ``quantize_dynamic`` and the
    exporters to ONNX, finds them afterwards. Layers that use an option torch's do not have, and
    those whose ``forward`` was replaced, are skipped.

    Args:
        model: any module, which may itself be one of these layers.

    Returns:
        A :class:`Conversion`: what was converted, what was skipped, and why. Its ``undo()``
        restores my_ops's layers.

    Raises:
        TypeError: ``model`` is not a module.
    """
    _check_model("revert", model)
    report = Conversion()
    for name, module in model.named_modules():
        if type(module) in KINDS.values():
            used = next((o for o, none in OPTIONS.items() if getattr(module, o, none) > none), None)
            why = f"it has {used}" if used else None
            if _forward_was_replaced(module):
                why = "its forward was replaced"
            report._add(name, module, why)
    for module, kind in report._modules:
        _become(module, _other_class(kind))
    return report


def _other_class(kind: type[nn.Module]) -> type[nn.Module]:
    """The class of my_ops for one of torch's, and the other way round."""
    back = {ours: theirs for theirs, ours in KINDS.items()}
    return KINDS.get(kind) or back[kind]


def _become(module: nn.Module, kind: type[nn.Module]) -> None:
    module.__dict__.pop("forward", None)  # a method of the class, which it has anyway
    module.__class__ = kind
    if kind in KINDS:
        for name in ATTRIBUTES:
            module.__dict__.pop(name, None)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    elif isinstance(module, nn.RNNBase):
        module._was_torchs = True


def _check_model(function: str, model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{function}: model must be a torch.nn.Module, got {type(model).__name__}")


def _chosen(
    model: nn.Module, argument: str, which: Which | Iterable[Which] | None
) -> set[str] | None:
    """The names of the modules that an argument of convert stands for."""
    if which is None:
        return None
    modules = dict(model.named_modules())

    def names() -> Iterator[str]:
        several = isinstance(which, Iterable) and not isinstance(which, (str, type))
        for each in cast(Iterable[Which], which if several else [which]):
            if isinstance(each, str):
                if each not in modules:
                    raise ValueError(f"convert: {argument}: the model has no module {each!r}")
                yield each
                yield from (name for name in modules if name.startswith(f"{each}." if each else ""))
            elif isinstance(each, type) and issubclass(each, nn.Module):
                yield from (name for name, m in modules.items() if isinstance(m, each))
            else:
                raise TypeError(
                    f"convert: {argument} must have names and classes of modules, got {each!r}"
                )

    return set(names())


def _forward_was_replaced(module: nn.Module) -> bool:
    """Not by the method that it is: tools that wrap a forward put that back."""
    forward = module.__dict__.get("forward")
    if forward is None:
        return False
    own = getattr(forward, "__self__", None) is module
    return not (own and getattr(forward, "__func__", None) is type(module).forward)


def _reason_to_skip(module: nn.Module, kind: type[nn.Module]) -> str | None:
    if is_parametrized(module):
        return "parametrized"
    if type(module) is not kind:
        return f"subclass of nn.{kind.__name__}"
    if _forward_was_replaced(module):
        return "its forward was replaced"
    if getattr(module, "qconfig", None) is not None:
        return "being quantized"
    if getattr(module, "proj_size", 0) > 0:
        return "it has projections, which run torch's own LSTM"
    for name in module.__dict__:
        if hasattr(KINDS[kind], name) and not hasattr(kind, name):
            return f"it has an attribute {name} of its own"
    for name, t in module.named_parameters(recurse=False):
        if type(t) not in (nn.Parameter, torch.Tensor):
            return f"its {name} is a {type(t).__name__}"
        if t.layout != torch.strided:
            return f"its {name} is of layout {t.layout}"
        if t.dtype not in FLOATING:
            return f"its {name} is of dtype {str(t.dtype).removeprefix('torch.')}"
        if t.device.type not in ("cpu", "cuda", "meta"):
            return f"its {name} is on {t.device}"
    return None
