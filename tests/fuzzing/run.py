"""Runs a case, finds out whether it is wrong, and writes the Python that repeats it."""

from __future__ import annotations

import math
import random
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import my_ops
from fuzzing import attention, convolutions, elementwise, layers, products, recurrent
from fuzzing.case import Case, Excess, Tensors, bits, make, unchanged
from fuzzing.tensors import T
from my_ops import reference

FAMILIES = (elementwise, products, attention, convolutions, recurrent, layers)
OPS = {op.name: op for family in FAMILIES for op in family.OPS}
NAMES, WEIGHTS = list(OPS), [op.weight for op in OPS.values()]
BITS = {"cpu": 20.0, "cuda": 32.0}  # the most multiplications of a call; mostly far fewer
WRONG_ARGUMENT = 0.1  # share of all calls
ANOTHER_ORDER = 1.1  # how much more than torch's is not worse: sums in another order
WATCHED = 4  # one in so many calls is checked to leave its arguments unchanged
OF_THE_HARNESS = ("tf32", "packed")  # these are not arguments


def draw(choose: random.Random, device: str) -> Case:
    op = OPS[choose.choices(NAMES, WEIGHTS)[0]]
    arguments, differentiable = op.draw(choose, BITS[device])
    seed = choose.randrange(1 << 31)
    if op.spoil and choose.random() < WRONG_ARGUMENT:
        arguments, error = op.spoil(choose, arguments)
        return Case(op.name, device, arguments, seed, wrong=error)
    return Case(op.name, device, arguments, seed, differentiable and choose.random() < 0.4)


def run(case: Case, module: Any = my_ops) -> list[Excess]:
    """Makes every call of the case; returns the worst errors as shares of what is allowed."""
    tensors, memories = make(case)
    watched = bool(case.wrong) or case.seed % WATCHED == 0
    before = [bits(memory).clone() for memory in memories] if watched else []
    found = [wrong_call(case, tensors)] if case.wrong else []
    found = found or list(OPS[case.op].judge(case, tensors, module))
    if watched and memories:
        if "out" in tensors and not case.wrong:  # nothing outside it may change
            out = tensors["out"]
            place = out.shape, out.stride(), out.storage_offset()
            before[-1].view(out.dtype).as_strided(*place).copy_(out)
        found.append(("arguments as they were", unchanged(before, memories)))
    return found


def wrong_call(case: Case, tensors: Tensors) -> Excess:
    """0 if the call raises what it must, with the op's name."""
    given = {name: t for name, t in tensors.items() if name not in OF_THE_HARNESS}
    if case.op == "d_sigmoid":
        given = {"z": given["x"]}
    if case.op == "fill_index":
        given["device"] = case.device
    if case.seed % 2 and "out" not in given:
        floats = [n for n, t in given.items() if isinstance(t, Tensor) and t.is_floating_point()]
        given |= {name: given[name].detach().requires_grad_() for name in floats}
    try:
        if tensors.get("packed"):
            given["weight"] = my_ops.prepack(given["weight"])
        getattr(my_ops, case.op)(**given)
    except Exception as error:
        named = any(f"{op}: " in str(error) for op in (case.op, "prepack"))
        right = type(error).__name__ == case.wrong and named
        if not right:
            print(f"raised {type(error).__name__}: {error}", flush=True)
    else:
        print("raised nothing", flush=True)
        right = False
    return "wrong argument", torch.tensor(0.0 if right else math.inf, dtype=torch.float64)


@dataclass(frozen=True)
class Verdict:
    """The worst call of a case: its share of what is allowed, and torch's if that matters."""

    kind: str
    ours: float
    torchs: float | None = None
    error: str = ""

    @property
    def beyond(self) -> bool:
        return not self.ours <= 1

    @property
    def wrong(self) -> bool:
        return self.beyond and (self.torchs is None or not self.ours <= ANOTHER_ORDER * self.torchs)

    def __str__(self) -> str:
        beside = "" if self.torchs is None else f", torch's {self.torchs:.3g}"
        return f"{self.kind}: {self.ours:.3g} of what is allowed{beside}{self.error}"


def examine(case: Case) -> Verdict:
    """Runs the case alone, and torch's own op if that decides."""
    try:
        found = [(kind, share.item()) for kind, share in run(case)]
    except torch.OutOfMemoryError:
        raise
    except Exception:
        return Verdict("exception", math.inf, error=f"\n{traceback.format_exc()}")
    at = max(range(len(found)), key=lambda k: math.inf if math.isnan(found[k][1]) else found[k][1])
    kind, ours = found[at]
    verdict = Verdict(kind, ours)
    if not verdict.beyond or not OPS[case.op].peer or kind not in ("result", "out=", "gradient"):
        return verdict
    peers = [case]
    if kind == "result" and case.gradient:  # torch.matmul multiplies batches in another way then
        peers.append(replace(case, gradient=False))
    return replace(verdict, torchs=max(run(peer, reference)[at][1].item() for peer in peers))


def repeat(case: Case) -> None:
    """The printed lines call this. It ends with an error if the case is wrong."""
    verdict = examine(case)
    print(verdict)
    if verdict.wrong:
        raise SystemExit(1)


def lines(case: Case) -> str:
    """The Python that repeats the case."""
    used = (
        "Case, T, repeat"
        if any(isinstance(v, T) for v in case.arguments.values())
        else "Case, repeat"
    )
    return (
        f"import sys\n\nimport torch\n\nsys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        f"from fuzzing.run import {used}\n\nrepeat({case!r})\n"
    )
