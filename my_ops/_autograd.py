"""Registers gradients at the dispatcher's Autograd key.

A gradient is a ``torch.autograd.Function`` with ``forward``, ``setup_context``, ``backward`` and,
for forward mode, ``jvp``. ``forward`` may return more than the op does, for ``setup_context`` to
save. :func:`register_gradient` makes it the op's Autograd kernel, so that ``torch.ops.my_ops.X`` is
differentiable from Python, TorchScript, ``torch.compile`` and the transforms of ``torch.func``.
``torch.library.register_autograd`` would raise under ``torch.func.grad`` and give zero tangents
under ``torch.func.jvp`` (torch 2.10 to 2.15).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, is_grad_enabled, is_inference_mode_enabled
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version
from torch.compiler import is_compiling

from my_ops._costs import GRADIENTS
from my_ops._errors import raise_clearer
from my_ops._private import (
    BelowAutograd,
    SingleLevelFunction,
    any_autocast,
    any_requires_grad,
    forward_mode,
    forward_mode_enabled,
    single_level,
    tracing,
    transforms_active,
    will_run,
)

__all__ = ["asked_for", "differentiated", "library", "register_gradient", "register_out", "save"]

library = torch.library.Library("my_ops", "IMPL")  # kept alive: it owns the registrations


def differentiated() -> bool:
    """Whether the result of a backward will be differentiated again, in reverse or forward mode."""
    return is_grad_enabled() or forward_mode()


def asked_for(ctx: Any, work: int) -> Sequence[bool]:
    """Which inputs of a Function this backward computes gradients of.

    ``ctx.needs_input_grad`` is known since forward, so it has those that torch.autograd.grad or
    ``backward(inputs=...)`` leaves out too. ``work`` is that of the gradients, in multiply-adds:
    asking takes 1 us, but 13 for each leaf that torch.autograd.grad is asked for.
    """
    needs = ctx.needs_input_grad
    if (
        is_compiling()
        or not isinstance(work, int)
        or work < GRADIENTS.work_to_ask
        or sum(needs) < 2
    ):
        return needs
    nodes = (node for node, _ in ctx.next_functions if node is not None)
    asked = [need and will_run(next(nodes)) for need in needs]
    return asked if any(asked) else needs  # none: a function calls this node, not the engine


def save(ctx: Any, *tensors: Tensor | None) -> None:
    """Saves tensors for backward, and for jvp if that may follow.

    Tensors saved for jvp live as long as the graph, and a saved result keeps the graph alive.
    """
    ctx.save_for_backward(*tensors)
    if transforms_active() or forward_mode():
        ctx.save_for_forward(*tensors)


def register_gradient(
    op: torch._ops.OpOverload, function: type[torch.autograd.Function], returns: int = 1
) -> Callable[..., Any]:
    """Makes ``function`` the gradient of ``op``; ``returns`` is the number of its results.

    ``function.forward`` has the arguments of the op, and their defaults. All are positional.

    Returns a faster way to call ``op``. It takes all arguments and gives the same result, but skips
    the dispatcher's Autograd key if no gradient and no transform needs it.
    """
    run, setup_context = function.forward, function.setup_context
    parameters = inspect.signature(run).parameters
    names, defaults = list(parameters), [p.default for p in parameters.values()]
    if BelowAutograd is None:
        _register_public(op, function, defaults)
        return op

    def forward(ctx: Any, *args: Any) -> Any:
        if transforms_active():
            # Function.apply has switched the grad modes off, but outer levels must still record.
            with torch.enable_grad(), forward_mode_enabled(True), BelowAutograd():
                output = run(*args)
        else:
            with BelowAutograd():
                output = run(*args)
        setup_context(ctx, args, output)
        if isinstance(output, tuple) and len(output) > returns:
            output = output[0] if returns == 1 else output[:returns]  # the rest is for backward
        return output

    def jvp(ctx: Any, *tangents: Any) -> Any:
        # Formulas see the primals of this level; forward AD is on for the levels above it.
        with torch.enable_grad(), forward_mode_enabled(True):
            return function.jvp(_Primals(ctx), *tangents)

    members = {
        "forward": staticmethod(forward),
        "backward": staticmethod(function.backward),
        "jvp": staticmethod(jvp),
    }
    function_class: Any = type(function.__name__, (SingleLevelFunction,), members)
    apply = function_class.apply

    def kernel(*args: Any) -> Any:
        if len(args) < len(defaults):  # the dispatcher strips trailing defaults
            args = (*args, *defaults[len(args) :])
        try:
            if transforms_active():
                with single_level():
                    return apply(*args)
            if not forward_mode() and not (is_grad_enabled() and any_requires_grad(*args)):
                with BelowAutograd():
                    return op(*args)
            return apply(*args)
        except RuntimeError as error:
            raise_clearer(error, op, names, args)
            raise

    def call(*args: Any) -> Any:
        if is_compiling():
            return op(*args)
        try:
            if is_inference_mode_enabled() or transforms_active() or forward_mode():
                return op(*args)
            if not (is_grad_enabled() and any_requires_grad(*args)):
                with BelowAutograd():
                    return op(*args)
            if any_autocast() or tracing():  # these act before the Autograd key
                return op(*args)
            return apply(*args)
        except RuntimeError as error:
            raise_clearer(error, op, names, args)
            raise

    library.impl(_name(op), kernel, "Autograd")
    return call


def register_out(op: torch._ops.OpOverload, *names: str) -> Callable[..., None]:
    """Gives an op the rules of torch's ``out=``. ``names`` are its arguments, including ``out``.

    The op refuses calls while a gradient is recorded. It increments the version counter of ``out``,
    so that backward notices an overwritten saved tensor. Returns a faster way to call ``op``, as
    above.
    """
    at = names.index("out")
    name, below = _name(op).split(".")[0], BelowAutograd or nullcontext

    def kernel(*args: Any) -> None:
        recorded = is_grad_enabled() and any_requires_grad(*args)
        if recorded or (forward_mode() and any(map(_has_tangent, args))):
            raise RuntimeError(
                f"{name}: out= does not support automatic differentiation, but one of the "
                f"arguments {'requires grad' if recorded else 'has a tangent'}"
            )
        out = args[at]
        if isinstance(out, Tensor) and out.is_inference() and not is_inference_mode_enabled():
            raise RuntimeError(
                f"{name}: out must not be an inference tensor outside torch.inference_mode()"
            )
        try:
            with below():
                op(*args)
        except RuntimeError as error:
            raise_clearer(error, op, names, args)
            raise
        increment_version(out)

    def call(*args: Any) -> None:
        if is_compiling() or transforms_active():
            op(*args)
        else:
            kernel(*args)

    def negative(*args: Any) -> None:
        """For views with the negative bit. torch's own rule needs an op that returns ``out``."""
        resolved = [t.resolve_neg() if isinstance(t, Tensor) else t for t in args]
        op(*resolved)
        if args[at].is_neg():
            args[at].copy_(resolved[at])

    library.impl(_name(op), negative, "Negative")
    if BelowAutograd is not None:
        library.impl(_name(op), kernel, "Autograd")
    return call


def _has_tangent(value: Any) -> bool:
    return isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None


def _name(op: torch._ops.OpOverload) -> str:
    return op.name().split("::")[1]  # with the overload, unless it is the default one


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


def _register_public(
    op: torch._ops.OpOverload, function: type[torch.autograd.Function], defaults: list[Any]
) -> None:
    """Registers a gradient with public names only: without torch.func and forward mode."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        # The dispatcher strips trailing defaults; backward must return a gradient for the rest.
        ctx.given = len(inputs)
        function.setup_context(ctx, (*inputs, *defaults[len(inputs) :]), output)

    def backward(ctx: Any, *grads: Any) -> Any:
        result = function.backward(_AllInputs(ctx, len(defaults)), *grads)
        return result[: ctx.given] if isinstance(result, tuple) else result

    torch.library.register_autograd(op.name(), backward, setup_context=setup_context, lib=library)


class _AllInputs:
    """A context that covers every argument of the op, given or not."""

    def __init__(self, ctx: Any, count: int) -> None:
        self._ctx = ctx
        missing = count - len(ctx.needs_input_grad)
        self.needs_input_grad = (*ctx.needs_input_grad, *([False] * missing))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)
