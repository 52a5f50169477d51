"""Prints the table of operators by dtype, device, gradient and compiler, in Markdown.

Nothing in it is typed: devices, vmap and autocast are the kernels that are registered; dtypes,
gradients and compilation are found by calling the ops on the CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import my_ops

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import samples

DTYPES = samples.FLOATING + samples.INTEGERS + samples.NOT_REAL


def has_kernel(op: str, key: str) -> bool:
    """Of the op, or of its form with ``out``, which fill_index calls."""
    return any(
        torch._C._dispatch_has_kernel_for_dispatch_key(
            s.name + "." * bool(s.overload_name) + s.overload_name, key
        )
        for s in torch._C._jit_get_schemas_for_operator(f"my_ops::{op}")
        if s.overload_name in ("", "out")
    )


def yes(value: bool) -> str:
    return "yes" if value else "no"


def works(call: Callable[[], Any]) -> bool:
    try:
        call()
    except RuntimeError:
        return False
    return True


def short(dtypes: list[torch.dtype]) -> str:
    """Families by their name, the rest one by one."""
    parts = []
    for family, members in (("floating", samples.FLOATING), ("integer", samples.INTEGERS)):
        if set(members) <= set(dtypes):
            parts.append(family)
            dtypes = [d for d in dtypes if d not in members]
    return ", ".join([*parts, *(str(d).removeprefix("torch.") for d in dtypes)])


def derivatives(op: samples.Op) -> str:
    """How often in a row autograd differentiates the op: asked of it, in float64."""
    leaves = [t.requires_grad_() for t in op.tensors(3, torch.float64, "cpu")]
    results: list[Tensor] = list(op(*leaves))
    order = 0
    while order < 2 and any(r.requires_grad for r in results):
        total = torch.stack([(r * r).sum() for r in results if r.requires_grad]).sum()
        grads = torch.autograd.grad(total, leaves, create_graph=True, allow_unused=True)
        results = [g for g in grads if g is not None]
        order += 1
    return ("no", "once", "twice")[order]


def compiles(call: Callable[..., Any], tensors: tuple[Tensor, ...]) -> bool:
    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    got, want = (samples.as_tuple(f(*tensors)) for f in (compiled, call))
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def tensor_op(op: samples.Op) -> list[str]:
    def call(dtype: torch.dtype) -> Any:
        return op.overload(*op.arguments(*op.tensors(3, dtype, "cpu")))

    dtypes = [d for d in DTYPES if works(lambda d=d: call(d))]
    compiled = compiles(op.call, op.tensors(3, torch.float32, "cpu"))
    return [short(dtypes), derivatives(op), yes(compiled)]


def fill_index() -> list[str]:
    dtypes = [d for d in DTYPES if works(lambda d=d: my_ops.fill_index(2, 3, dtype=d))]
    return [short(dtypes), "no", yes(compiles(lambda: my_ops.fill_index(2, 3), ()))]


def main() -> str:
    found = {"fill_index": fill_index()}
    for op in samples.DIFFERENTIABLE:
        name = op.overload._schema.name.split("::")[1]
        if name not in found:
            found[name] = tensor_op(op)
    rows = [["op", "dtypes", "CPU", "CUDA", "gradient", "compile", "vmap", "autocast"]]
    rows.append(["---"] * len(rows[0]))
    for name in sorted(found):
        dtypes, gradient, compiled = found[name]
        kernels = [yes(has_kernel(name, key)) for key in ("CPU", "CUDA")]
        rules = [yes(has_kernel(name, key)) for key in ("FuncTorchBatched", "AutocastCUDA")]
        rows.append([f"`{name}`", dtypes, *kernels, gradient, compiled, *rules])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


if __name__ == "__main__":
    print(main())
