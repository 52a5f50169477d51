"""Every private name of torch that my_ops uses, each with a substitute in case torch lacks it.

torch 2.10 to 2.15 have all of them. Most substitutes are public and slower. If one can do less,
importing my_ops warns.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


def _torch(module: str, name: str, substitute: Any, lost: str = "") -> Any:
    try:
        found = getattr(import_module(module), name, None)
    except ImportError:
        found = None
    if found is None and lost:
        warnings.warn(
            f"my_ops: torch {torch.__version__} lacks a private name that my_ops uses, "
            f"{module}.{name}; gradients work, {lost}: update my_ops.",
            stacklevel=3,
        )
    return substitute if found is None else found


def _always() -> bool:
    return True


# ---------------------------------------------------------------------------------------- gradients

# A context in which ops start below the Autograd key.
BelowAutograd: Any = _torch(
    "torch._C", "_AutoDispatchBelowAutograd", None, "torch.func and forward mode do not"
)
# A torch.autograd.Function of one level of torch.func, and the context that it is applied in.
_single_level_function: Any = _torch(
    "torch.autograd.function",
    "_SingleLevelFunction",
    torch.autograd.Function,
    "torch.func does not",
)
# What names a Function to compiled autograd. torch defines it for public ones alone.
_key: Any = getattr(torch.autograd.Function, "_compiled_autograd_key", None)
SingleLevelFunction: Any = type(
    "SingleLevelFunction",
    (_single_level_function,),
    {"_compiled_autograd_key": staticmethod(_key)},
)
single_level: Any = _torch(
    "torch._functorch.utils",
    "enable_single_level_autograd_function",
    nullcontext,
    "torch.func does not",
)
# A context with forward mode on or off. Function.apply has switched it off.
forward_mode_enabled: Any = _torch(
    "torch.autograd.forward_ad",
    "_set_fwd_grad_enabled",
    lambda mode: nullcontext(),
    "forward mode around another transform does not",
)

# Whether torch.func, forward mode, any autocast or jit.trace is active. True if torch does not
# tell; that only makes calls slower.
transforms_active: Any = _torch("torch._C", "_are_functorch_transforms_active", _always)
any_autocast: Any = _torch("torch._C", "_is_any_autocast_enabled", _always)
tracing: Any = _torch("torch._C", "_get_tracing_state", torch.jit.is_tracing)

# Whether a tensor is one that torch.autograd.grad maps over with is_grads_batched.
batched: Any = _torch("torch._C._functorch", "is_legacy_batchedtensor", lambda t: False)

# How many TorchDispatchModes are active. Without it, those that trace or count products on the CPU
# see torch's instead of ours.
dispatch_modes: Any = _torch("torch._C", "_len_torch_dispatch_stack", lambda: 0)


def _forward_mode() -> bool:
    return forward_ad._current_level >= 0  # read through the module, because the value changes


forward_mode = _forward_mode if hasattr(forward_ad, "_current_level") else _always


def _any_requires_grad(*args: Any) -> bool:
    return any(isinstance(value, Tensor) and value.requires_grad for value in args)


any_requires_grad: Any = _torch("torch._C", "_any_requires_grad", _any_requires_grad)


_will_run: Any = _torch("torch._C", "_will_engine_execute_node", lambda node: True)


def will_run(node: Any) -> bool:
    """Whether the current backward runs a node of the graph; True if torch does not tell, as for a
    leaf that torch.autograd.grad was asked for."""
    try:
        return _will_run(node)
    except RuntimeError:
        return True


def version(t: Tensor) -> int | None:
    """How often ``t`` was written in place, or None if torch does not count."""
    return None if t.is_inference() else getattr(t, "_version", None)


def address(t: Tensor) -> int | None:
    """Where C++ has what a tensor of Python stands for, or None if torch does not tell."""
    return getattr(t, "_cdata", None)


# --------------------------------------------------------------------------------------- attention

# The op in which float32's scaled_dot_product_attention ends on CUDA, and that of its gradients.
# None if torch lacks them: attention is then torch's own.
efficient_attention: Any = getattr(torch.ops.aten, "_scaled_dot_product_efficient_attention", None)
efficient_attention_backward: Any = getattr(
    torch.ops.aten, "_scaled_dot_product_efficient_attention_backward", None
)


# ------------------------------------------------------------------------------------------ layers

# The tensor classes that torch traces with. Without them a traced nn.Linear is torch's linear.
FakeTensor: Any = _torch("torch._subclasses.fake_tensor", "FakeTensor", Tensor)
FunctionalTensor: Any = _torch("torch._subclasses.functional_tensor", "FunctionalTensor", Tensor)


# Whether a hook for all modules is registered. True if torch does not tell.
any_global_hook: Any = _torch("torch.nn.modules.module", "_has_any_global_hook", _always)


def hooked(module: torch.nn.Module) -> bool:
    """Whether a call may do more than its class's forward; True if torch does not tell."""
    own = module.__dict__
    return bool(
        "forward" in own
        or own.get("_forward_pre_hooks", True)
        or own.get("_forward_hooks", True)
        or own.get("_backward_pre_hooks", True)
        or own.get("_backward_hooks", True)
        or any_global_hook()
    )


def weights_in_a_row(layer: torch.nn.RNNBase) -> list[Tensor]:
    """What ``layer.all_weights`` has, without asking the module for each, which takes long."""
    names: list[str] | None = getattr(layer, "_flat_weights_names", None)
    if names is None:
        return [w for weights in layer.all_weights for w in weights]
    own: Any = getattr(layer, "_parameters", {})
    return [own[name] if name in own else getattr(layer, name) for name in names]


def parameters_by_direction(layer: torch.nn.RNNBase) -> list[list[str]]:
    """The names of the parameters of each layer and direction. Whoever changes a list calls
    ``parameters_changed``."""
    names: list[list[str]] = layer._all_weights
    return names


def parameters_changed(layer: torch.nn.RNNBase) -> None:
    """Tells a layer of torch that it has other parameters, or parameters of other names."""
    layer._flat_weights_names = [name for names in layer._all_weights for name in names]
    layer._init_flat_weights()


# ------------------------------------------------------------- autocast, precision, torch.compile

_Guard: Any = _torch("torch._C", "_ExcludeDispatchKeyGuard", None)
_Key: Any = _torch("torch._C", "DispatchKey", None)
_KeySet: Any = _torch("torch._C", "DispatchKeySet", None)


def without_autocast(device: str) -> Callable[[], AbstractContextManager[Any]]:
    """Contexts that disable autocast on ``device``, in a sixth of torch.autocast's time."""
    if None in (_Guard, _Key, _KeySet):
        return lambda: torch.autocast(device, enabled=False)
    keys = _KeySet(getattr(_Key, f"Autocast{device.upper()}"))
    return lambda: _Guard(keys)


def _fp32_precision(backend: str, op: str) -> str:
    of = torch.backends.cudnn.rnn if op == "rnn" else torch.backends.cuda.matmul
    return of.fp32_precision


# Takes a sixth of the property's time.
fp32_precision: Any = _torch("torch._C", "_get_fp32_precision_getter", _fp32_precision)


_multiplies_bfloat16: Any = _torch("torch.cpu", "_is_avx512_bf16_supported", lambda: False)


@functools.cache
def multiplies_bfloat16() -> bool:
    """Whether the processor has products of bfloat16 in vectors; False if torch does not tell."""
    return bool(_multiplies_bfloat16())


def constant_when_compiled(function: Callable[[], bool]) -> Callable[[], bool]:
    """Like torch.compiler.assume_constant_result, which would import the compiler."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def _no_table(op: str) -> str:
    return ""


# The kernels of an op, as text. Without it, we assume that no other package overrides the op.
dispatch_table: Any = _torch("torch._C", "_dispatch_dump", _no_table)


# Keeps the GPU busy for so many cycles. Without it, times of the GPU include some of the host's.
gpu_sleep: Any = _torch("torch.cuda", "_sleep", lambda cycles: None)


def inductor_tables() -> list[dict[Any, Any]]:
    """Inductor's tables of decompositions. It reads either of two; one is a copy made at its first
    use. Without them our ops are opaque to Inductor."""
    table = _torch("torch._inductor.decomposition", "decompositions", {})
    chosen = _torch("torch._inductor.decomposition", "select_decomp_table", dict)
    return [table, chosen()]


def declinable(op: str) -> bool:
    """Lets Inductor call an op whose decomposition returns NotImplemented, which would be an error
    otherwise. Returns whether this worked. Called during tracing: lowerings take long to import."""
    calls = _torch("torch._inductor.lowering", "FALLBACK_ALLOW_LIST", None)
    if calls is not None:
        calls.add(op)
    return calls is not None


def asked_for_each(op: Any) -> bool:
    """Makes DTensor ask the sharding rule of an op for each combination of its arguments. Otherwise
    it repeats the answer for other numbers and strings, integers apart. Returns whether it does."""
    from torch.distributed.tensor import DTensor  # takes time to import

    propagator = getattr(getattr(DTensor, "_op_dispatcher", None), "sharding_propagator", None)
    known = getattr(propagator, "op_to_schema_info", {}).get(op)
    if known is not None:
        known.static_argnum = 0  # the first argument that is part of the key
    return known is not None
