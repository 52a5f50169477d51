"""Prints two Markdown tables: what every op takes, and which features of torch it works with.

Nothing in them is written by hand: kernels are read from the registrations, and everything else is
found by calling the ops on every device of this machine. A check that fails is printed as an
exception.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

import my_ops
import my_ops.distributed

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import samples
from tables import table

DTYPES = samples.FLOATING + samples.INTEGERS + samples.NOT_REAL
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
WITH_CUDA = torch._C._dispatch_has_kernel_for_dispatch_key("my_ops::gemm", "CUDA")


def has_kernel(op: str, key: str) -> bool:
    """Whether the op has a kernel, or its form with ``out``, which fill_index calls."""
    return any(
        torch._C._dispatch_has_kernel_for_dispatch_key(
            s.name + "." * bool(s.overload_name) + s.overload_name, key
        )
        for s in torch._C._jit_get_schemas_for_operator(f"my_ops::{op}")
        if s.overload_name in ("", "out")
    )


def name_of(op: samples.Op) -> str:
    return op.overload.name().split("::")[1]


def works(call: Callable[[], Any]) -> bool:
    try:
        call()
    except (RuntimeError, ValueError):
        return False
    return True


def short(dtypes: list[torch.dtype]) -> str:
    """Families by their names, other dtypes one by one."""
    parts = []
    for family, members in (("floating", samples.FLOATING), ("integer", samples.INTEGERS)):
        if set(members) <= set(dtypes):
            parts.append(family)
            dtypes = [d for d in dtypes if d not in members]
    return ", ".join([*parts, *(str(d).removeprefix("torch.") for d in dtypes)])


def derivatives(op: samples.Op, device: str) -> int:
    """How many times in a row, up to two, autograd differentiates the op; tried in float64."""
    leaves = [t.requires_grad_() for t in op.tensors(3, torch.float64, device)]
    results: list[Tensor] = list(op(*leaves))
    order = 0
    while order < 2 and any(r.requires_grad for r in results):
        total = torch.stack([(r * r).sum() for r in results if r.requires_grad]).sum()
        grads = torch.autograd.grad(total, leaves, create_graph=True, allow_unused=True)
        results = [g for g in grads if g is not None]
        order += 1
    return order


# ------------------------------------------------------------------- checks: op, device -> holds


def close(got: Any, want: Any) -> bool:
    pairs = zip(samples.as_tuple(got), samples.as_tuple(want), strict=True)
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in pairs)


def inputs(op: samples.Op, device: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    return op.tensors(3, dtype, device)


def options(op: samples.Op, device: str) -> dict[str, Any]:
    return {} if inputs(op, device) else {"device": torch.device(device)}


def opcheck(op: samples.Op, device: str) -> bool:
    arguments = op.arguments(*samples.leaves(inputs(op, device)))
    found = torch.library.opcheck(op.overload, arguments, options(op, device))
    return set(found.values()) == {"SUCCESS"}


def compiles(op: samples.Op, device: str) -> bool:
    """Forward and backward, in one graph."""
    torch.compiler.reset()
    tensors = samples.leaves(inputs(op, device))

    def run(function: Callable[..., Any]) -> tuple[Tensor, ...]:
        results = samples.as_tuple(function(*tensors))
        if not tensors:
            return results
        return (*results, *torch.autograd.grad([r.sum() for r in results], tensors))

    return close(run(torch.compile(op.call, fullgraph=True, backend="aot_eager")), run(op.call))


class _Module(torch.nn.Module):
    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, *tensors: Tensor) -> Any:
        return self.call(*tensors)


def exports(op: samples.Op, device: str) -> bool:
    tensors = inputs(op, device)
    program = torch.export.export(_Module(op.call), tensors)
    targets = {getattr(node.target, "name", str)() for node in program.graph.nodes}
    return op.overload.name() in targets and close(program.module()(*tensors), op.call(*tensors))


def scripts(op: samples.Op, device: str) -> bool:
    tensors = inputs(op, device)
    names = [f"t{i}" for i in range(len(tensors))]
    given = iter(names)
    arguments = [
        next(given) if isinstance(a, Tensor) else repr(a) for a in op.arguments(*tensors)
    ] + [f"{key}='{value}'" for key, value in options(op, device).items()]
    call = f"torch.ops.my_ops.{name_of(op)}({', '.join(arguments)})"
    unit = torch.jit.CompilationUnit(f"def f({', '.join(names)}):\n  return {call}\n")
    return close(unit.f(*tensors), op.call(*tensors))


def maps(op: samples.Op, device: str) -> bool:
    """With a rule: torch warns if it loops."""
    batches = [inputs(op, device) for _ in range(4)]
    stacked = [torch.stack(ts) for ts in zip(*batches, strict=True)]
    each = zip(*(op(*tensors) for tensors in batches), strict=True)
    return close(torch.vmap(op)(*stacked), tuple(torch.stack(rs) for rs in each))


def pushes(op: samples.Op, device: str) -> bool:
    """<grads, J tangents> equals <J^T grads, tangents>."""
    tensors = inputs(op, device, torch.float64)
    tangents = tuple(torch.randn_like(t) for t in tensors)
    results, pushed = torch.func.jvp(op, tensors, tangents)
    grads = tuple(torch.randn_like(r) for r in results)
    _, pull = torch.func.vjp(op, *tensors)
    forward = sum((g * p).sum() for g, p in zip(grads, pushed, strict=True))
    backward = sum((g * t).sum() for g, t in zip(pull(grads), tangents, strict=True))
    return bool(forward != 0) and close(forward, backward)


def autocasts(op: samples.Op, device: str) -> bool:
    """Products run in autocast's dtype, elementwise ops in that of their arguments."""
    tensors = samples.leaves(inputs(op, device))
    with torch.autocast(device, torch.bfloat16):
        results = op(*tensors)
    rule = has_kernel(name_of(op), f"Autocast{device.upper()}")
    torch.autograd.grad([r.float().sum() for r in results], tensors)
    return {r.dtype for r in results} == {torch.bfloat16 if rule else torch.float32}


def shards(op: samples.Op, device: str) -> bool:
    """A sharding rule, on a mesh of one device."""

    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh, tensors = init_device_mesh(device, (1,)), inputs(op, device)
        results = op(*(distribute_tensor(t, mesh, [Shard(0)]) for t in tensors))
        whole = [r.full_tensor() for r in results if isinstance(r, DTensor)]
        return close(tuple(whole), op(*tensors))
    finally:
        dist.destroy_process_group()


CHECKS: dict[str, Callable[[samples.Op, str], bool]] = {
    "opcheck": opcheck,
    "compile": compiles,
    "export": exports,
    "TorchScript": scripts,
    "vmap": maps,
    "jvp": pushes,
    "double backward": lambda op, device: derivatives(op, device) == 2,
    "autocast": autocasts,
    "DTensor": shards,
}
OF_TENSORS = ["vmap", "jvp", "double backward", "autocast", "DTensor"]  # need a tensor argument


def fill_index(device: str) -> samples.Op:
    return samples.Op(
        "fill_index",
        lambda: my_ops.fill_index(2, 3, device=device),
        lambda: None,
        torch.ops.my_ops.fill_index.default,
        lambda *_: (),
        lambda: (2, 3),
    )


def one_of_each(device: str) -> dict[str, samples.Op]:
    """The first sample of each op."""
    found = {"fill_index": fill_index(device)}
    for op in samples.DIFFERENTIABLE:
        found.setdefault(name_of(op), op)
    return dict(sorted(found.items()))


def holds(feature: str, op: samples.Op, device: str) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message=".*performance drop")
        try:
            return CHECKS[feature](op, device)
        except Exception:
            print(f"{feature} of {op.name} on {device}:", file=sys.stderr)
            traceback.print_exc()
            return False


def features() -> tuple[list[str], list[list[str]]]:
    """The head, and one row per op: the devices on which each check passes."""
    found: dict[str, list[list[str]]] = {}
    for device in DEVICES:
        for name, op in one_of_each(device).items():
            row = found.setdefault(name, [[] for _ in CHECKS])
            for cell, feature in zip(row, CHECKS, strict=True):
                if not inputs(op, device) and feature in OF_TENSORS:
                    cell[:] = ["no argument"]
                elif holds(feature, op, device):
                    cell.append(device.upper())

    def said(devices: list[str]) -> str:
        return "yes" if devices == ["CPU"] == [d.upper() for d in DEVICES] else ", ".join(devices)

    rows = [[f"`{n}`", *(said(c) or "no" for c in row)] for n, row in found.items()]
    return ["op", *CHECKS], rows


def arguments() -> tuple[list[str], list[list[str]]]:
    keys = ("CPU", "CUDA") if WITH_CUDA else ()
    head, rows = ["op", "dtypes", *(f"{key} kernel" for key in keys), "gradient"], []
    for name, op in one_of_each("cpu").items():

        def call(dtype: torch.dtype, op: samples.Op = op) -> Any:
            if not op.tensors(3, dtype, "cpu"):
                return my_ops.fill_index(2, 3, dtype=dtype)
            return op.overload(*op.arguments(*op.tensors(3, dtype, "cpu")))

        dtypes = [d for d in DTYPES if works(lambda d=d, call=call: call(d))]
        kernels = ["yes" if has_kernel(name, key) else "no" for key in keys]
        gradient = ("no", "once", "twice")[derivatives(op, "cpu")]
        rows.append([f"`{name}`", short(dtypes), *kernels, gradient])
    return head, rows


def main() -> str:
    devices = "the CPU"
    if "cuda" in DEVICES:
        devices += f" and CUDA ({torch.cuda.get_device_name()})"
    here = "" if WITH_CUDA else "Builds with CUDA have a CPU and a CUDA kernel of each.\n\n"
    return (
        f"{table(*arguments())}\n\n{here}"
        f"Works with, checked on {devices}, torch {torch.__version__}:\n\n"
        f"{table(*features())}"
    )


if __name__ == "__main__":
    print(main())
