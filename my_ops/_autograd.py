"""Puts gradients on the dispatcher's Autograd key.

A gradient is a ``torch.autograd.Function`` with ``forward``, ``setup_context``, ``backward`` and,
for forward mode, ``jvp``; ``forward`` may return more than the op does, for ``setup_context`` to
save. :func:`register_gradient` makes it the op's Autograd kernel, so that ``torch.ops.my_ops.X`` is
differentiable alike from Python, TorchScript, ``torch.compile`` and the transforms of
``torch.func``. ``torch.library.register_autograd`` would raise under ``torch.func.grad`` and give
zero tangents under ``torch.func.jvp`` (torch 2.10 to 2.15).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import is_grad_enabled, is_inference_mode_enabled
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from my_ops._errors import raise_out_of_memory

__all__ = ["differentiated", "library", "register_gradient", "register_out"]

try:  # private names, present in torch 2.10 to 2.15
    from torch._C import (
        _any_requires_grad,
        _are_functorch_transforms_active,
        _AutoDispatchBelowAutograd,
        _get_tracing_state,
        _has_torch_function,
        _is_any_autocast_enabled,
    )
    from torch._functorch.utils import enable_single_level_autograd_function
    from torch.autograd.forward_ad import _current_level as _current_level  # read in its module
    from torch.autograd.forward_ad import _set_fwd_grad_enabled
    from torch.autograd.function import _SingleLevelFunction

    _HAVE_PRIVATE_NAMES = True
except ImportError as error:
    _HAVE_PRIVATE_NAMES = False
    warnings.warn(
        f"my_ops: torch {torch.__version__} lacks a private name that my_ops registers gradients "
        f"with ({error}); gradients work, torch.func transforms and forward mode do not, and out= "
        "is not noticed by autograd: update my_ops.",
        stacklevel=2,
    )

library = torch.library.Library("my_ops", "IMPL")  # kept alive: it owns the registrations


def differentiated() -> bool:
    """Whether what a backward computes is differentiated again, in reverse or forward mode."""
    return is_grad_enabled() or (_HAVE_PRIVATE_NAMES and forward_ad._current_level >= 0)


def register_gradient(
    op: torch._ops.OpOverload, function: type[torch.autograd.Function]
) -> Callable[..., Any]:
    """Makes ``function`` the gradient of ``op``. Arguments of the op must be positional.

    Returns ``op`` for callers in a hurry: the same result from the same arguments, all of them
    given, without the way through the dispatcher to the Autograd key where nothing asks for it.
    """
    if not _HAVE_PRIVATE_NAMES:
        _register_public(op, function)
        return op

    defaults = [argument.default_value for argument in op._schema.arguments]
    returns = len(op._schema.returns)
    run, setup_context = function.forward, function.setup_context

    def forward(ctx: Any, *args: Any) -> Any:
        transformed = _are_functorch_transforms_active()
        if transformed:
            # Function.apply has switched the grad modes off; outer levels must still record.
            with torch.enable_grad(), _set_fwd_grad_enabled(True), _AutoDispatchBelowAutograd():
                output = run(*args)
        else:
            with _AutoDispatchBelowAutograd():
                output = run(*args)
        setup_context(ctx, args, output)
        if transformed or forward_ad._current_level >= 0:
            ctx.save_for_forward(*(getattr(ctx, "to_save", None) or ()))
        if isinstance(output, tuple) and len(output) > returns:
            output = output[0] if returns == 1 else output[:returns]  # the rest is for backward
        return output

    def jvp(ctx: Any, *tangents: Any) -> Any:
        # Formulas see the primals of this level, with forward AD on for the levels above it.
        with torch.enable_grad(), _set_fwd_grad_enabled(True):
            return function.jvp(_Primals(ctx), *tangents)

    members = {
        "forward": staticmethod(forward),
        "backward": staticmethod(function.backward),
        "jvp": staticmethod(jvp),
    }
    function_class: Any = type(function.__name__, (_SingleLevelFunction,), members)
    apply = function_class.apply

    def kernel(*args: Any) -> Any:
        if len(args) < len(defaults):  # the dispatcher strips trailing defaults
            args = (*args, *defaults[len(args) :])
        try:
            if _are_functorch_transforms_active():
                with enable_single_level_autograd_function():
                    return apply(*args)
            if forward_ad._current_level < 0 and not (
                is_grad_enabled() and _any_requires_grad(*args)
            ):
                with _AutoDispatchBelowAutograd():
                    return op(*args)
            return apply(*args)
        except RuntimeError as error:
            raise_out_of_memory(error)
            raise

    def call(*args: Any) -> Any:
        if is_compiling():
            return op(*args)
        try:
            if is_inference_mode_enabled():
                return op(*args)
            if _are_functorch_transforms_active() or forward_ad._current_level >= 0:
                return op(*args)
            if not (is_grad_enabled() and _any_requires_grad(*args)):
                with _AutoDispatchBelowAutograd():
                    return op(*args)
            # What acts before the Autograd key must see the op: overrides, autocast, jit.trace.
            if _has_torch_function(args) or _is_any_autocast_enabled() or _get_tracing_state():
                return op(*args)
            return apply(*args)
        except RuntimeError as error:
            raise_out_of_memory(error)
            raise

    library.impl(_name(op), kernel, "Autograd")
    return call


def register_out(op: torch._ops.OpOverload) -> None:
    """Gives an op that writes into its argument ``out`` the rules of torch's ``out=``.

    Refused while a gradient is being recorded; the version counter of ``out`` moves, so that
    backward notices an overwritten saved tensor.
    """
    if not _HAVE_PRIVATE_NAMES:
        return

    at = [argument.name for argument in op._schema.arguments].index("out")

    def kernel(*args: Any) -> None:
        out = args[at]
        if torch.is_grad_enabled() and _any_requires_grad(*args):
            raise RuntimeError(
                f"{_name(op).split('.')[0]}: out= does not support automatic "
                "differentiation, but one of the arguments requires grad"
            )
        try:
            with _AutoDispatchBelowAutograd():
                op(*args)
        except RuntimeError as error:
            raise_out_of_memory(error)
            raise
        torch.autograd.graph.increment_version(out)

    library.impl(_name(op), kernel, "Autograd")


def _name(op: torch._ops.OpOverload) -> str:
    return op.name().split("::")[1]  # with the overload, but for the default one


class _Primals:
    """A context whose saved tensors are the primals of the innermost forward-mode level."""

    def __init__(self, ctx: Any) -> None:
        self._ctx = ctx

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        return tuple(
            forward_ad.unpack_dual(t, level=0).primal if isinstance(t, torch.Tensor) else t
            for t in self._ctx.saved_tensors
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


def _register_public(op: torch._ops.OpOverload, function: type[torch.autograd.Function]) -> None:
    """Registration by public names only: no torch.func and no forward mode."""
    defaults = tuple(argument.default_value for argument in op._schema.arguments)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        # The dispatcher strips trailing defaults; backward must return as many gradients.
        ctx.given = len(inputs)
        function.setup_context(ctx, (*inputs, *defaults[len(inputs) :]), output)

    def backward(ctx: Any, *grads: Any) -> Any:
        result = function.backward(_AllInputs(ctx, len(defaults)), *grads)
        return result[: ctx.given] if isinstance(result, tuple) else result

    torch.library.register_autograd(op.name(), backward, setup_context=setup_context, lib=library)


class _AllInputs:
    """A context that speaks of every argument of the op, given or not."""

    def __init__(self, ctx: Any, count: int) -> None:
        self._ctx = ctx
        missing = count - len(ctx.needs_input_grad)
        self.needs_input_grad = (*ctx.needs_input_grad, *([False] * missing))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)
