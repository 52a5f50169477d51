"""What follows from the function of a cell: its expressions, their gradients, and what is saved."""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from my_ops.recurrent._expressions import MATH, Node, Program, Value, gradients, smallest_cut
from my_ops.recurrent._own_ops import OwnCell
from my_ops.recurrent._trace import Trace, Unit
from my_ops.recurrent._weights import TwoMatrices

_TAKEN = ("input", "lengths", "reset", "zoneout", "output", "hx", "bias")
_MOST_GATES = 8


class Definition(Protocol):
    """The function and the names that it is given with."""

    name: str
    gates: tuple[str, ...]
    carried: tuple[str, ...]
    parameters: tuple[str, ...]
    function: Callable[..., Any]


class Derived:
    """The function as expressions, and the description of the cell."""

    def __init__(self, own: Definition) -> None:
        self.own = own
        self.trace = Trace(own.name, own.function.__code__)
        self._read_names()
        leaf = self.trace.graph.leaf
        self.leaves = {name: leaf(name) for name in [*self.terms, *own.carried, "h"]}
        given = {name: Unit(self.trace, self.leaves[name]) for name in self.given}
        self.h, *self.after = self._results(own.function(**given))
        self.z = [self.leaves[name] for name in self.terms]
        self.before = [self.leaves[name] for name in own.carried]
        read = frozenset[Node]()
        for value in (self.h, *self.after):
            read |= value.depends if isinstance(value, Node) else frozenset()
        for name in self.given:
            if self.leaves[name] not in read:
                raise self.error(f"{name} does not enter the results")
        self._differentiate()

    def error(self, rule: str) -> ValueError:
        return ValueError(f"my_ops.cell: {self.own.name}: {rule}")

    def _read_names(self) -> None:
        """``given``: the function's arguments; ``terms``: the names of z."""
        own = self.own
        names = [*own.gates, *own.carried, *own.parameters]
        for name in names:
            if not (name.isidentifier() and name.isascii()) or name == "h" or name in _TAKEN:
                raise self.error(f"the name {name!r} is taken, or not one")
            if names.count(name) > 1:
                raise self.error(f"{name} is named twice")
        for name in own.parameters:
            if hasattr(nn.RNNBase, name) or name in nn.RNNCellBase.__annotations__:
                raise self.error(f"the name {name!r} is taken by an attribute of modules")
        if not 1 <= len(own.gates) <= _MOST_GATES:
            raise self.error(f"gates must be 1 to {_MOST_GATES} names, got {len(own.gates)}")
        self.given: list[str] = []
        apart: list[str] = []
        known = {*names, "h"}
        shares = {f"{gate}_{share}": gate for gate in own.gates for share in "xh"}
        for name, parameter in inspect.signature(own.function).parameters.items():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise self.error(f"arguments must have names, got *{name}")
            if parameter.kind == parameter.POSITIONAL_ONLY:
                raise self.error(f"{name} must not be positional-only")
            if name in known:
                self.given.append(name)
            elif name in shares:
                self.given.append(name)
                apart.append(shares[name])
            elif parameter.default is parameter.empty:
                raise self.error(
                    f"{name} is neither a gate, a share of one (as n_x and n_h), a carried value, "
                    "h, a parameter, nor has it a default"
                )
        for gate in own.gates:
            ways = [gate in self.given, f"{gate}_x" in self.given, f"{gate}_h" in self.given]
            if ways not in ([True, False, False], [False, True, True]):
                raise self.error(
                    f"the function must take gate {gate} as {gate}, or as {gate}_x and {gate}_h"
                )
        for name in (*own.carried, *own.parameters):
            if name not in self.given:
                raise self.error(f"the function must take {name}")
        sums = [gate for gate in own.gates if gate not in apart]
        alone = [gate for gate in own.gates if gate in apart]
        if [*sums, *alone] != list(own.gates):
            raise self.error(f"gates whose shares are apart must come last: {' '.join(alone)}")
        self.apart = len(alone)
        products, inputs = [f"{g}_h" for g in alone], [f"{g}_x" for g in alone]
        self.terms = [*sums, *products, *inputs, *own.parameters]

    def _results(self, found: Any) -> list[Value]:
        results = list(found) if isinstance(found, (tuple, list)) else [found]
        want = ("h", *self.own.carried)
        if len(results) != len(want):
            raise self.error(
                f"the function must return {', '.join(want)}, got {len(results)} of "
                f"{len(want)} values"
            )
        values = [
            self.trace.value(r, f"the result {name}") for r, name in zip(results, want, strict=True)
        ]
        for value, name in zip(values, want, strict=True):
            if isinstance(value, Node) and value.is_condition:
                raise self.error(f"the result {name} must not be a comparison")
        return values

    def _differentiate(self) -> None:
        graph = self.trace.graph
        grads = [graph.leaf(f"grad_{name}") for name in ("h", *self.own.carried)]
        self.grad_after = grads
        pairs = list(zip((self.h, *self.after), grads, strict=True))
        h = self.leaves["h"]
        *self.grad_z, self.grad_h = gradients(graph, pairs, [*self.z, h])
        self.grad_before = gradients(graph, pairs, self.before)
        # The kernels have no cells whose backward reads no state at all.
        self.reads_h = "h" in self.given or not self.own.carried
        after = [a for a in self.after if isinstance(a, Node)]
        targets = [*self.grad_z, self.grad_h, *self.grad_before, *after]
        # What is carried must follow from the saved values by arithmetic, in the kernels too.
        kept = [node for node in _functions(after) if node not in after]
        saved = {*kept, *smallest_cut(targets, [*self.before, h, *after, *kept], self.z)}
        # Backward reads h too, but it is not at hand where what is carried is computed again.
        others = [a for a in after if a not in saved]
        saved.update(smallest_cut(others, [*self.before, *saved], [*self.z, h]))
        self.saved = sorted(saved, key=lambda n: n.number) or [self.z[0]]

    def cell(self) -> OwnCell:
        own, h, count = self.own, self.leaves["h"], len(self.own.carried)
        reads_h = self.reads_h
        run = Program([*self.z, h, *self.before], [self.h, *self.after, *self.saved])
        known = {node: None for node in (*self.saved, *self.before)}
        after = [a for a in self.after if isinstance(a, Node) and a not in known]
        after = list(dict.fromkeys(after))
        places = [self.after.index(a) for a in after]
        read = [h] if reads_h and h not in known else []
        back = Program(
            [*known, *after, *read, *self.grad_after],
            [*self.grad_z, self.grad_h, *self.grad_before],
        )
        first = [*self.saved, *self.before]
        where = [first.index(node) for node in known]
        advance = Program(list(known), self.after)
        terms = len(self.z)

        def forward(z: Any, h: Any, carried: Any) -> Any:
            new_h, *results = run(*z, h, *carried)
            return new_h, tuple(results[:count]), tuple(results[count:])

        def backward(
            saved: Any, previous: Any, carried: Any, h: Any, grad_h: Any, grad_carried: Any
        ) -> Any:
            given = [*saved, *previous]
            tensors = [given[k] for k in where] + [carried[k] for k in places] + [h] * len(read)
            grads = back(*tensors, grad_h, *grad_carried)
            return (
                tuple(grads[:terms]),
                grads[terms] if reads_h else None,
                tuple(grads[terms + 1 :]),
            )

        def advanced(saved: Any, previous: Any) -> Any:
            given = [*saved, *previous]
            return tuple(advance(*[given[k] for k in where]))

        described = OwnCell(
            f"cell_{re.sub('[^a-zA-Z0-9]', '_', own.name)}_{self._hash(run)}",
            gates=len(own.gates),
            saved=len(self.saved),
            shut=(0.0,) * len(self.saved),
            forward=forward,
            backward=backward,
            carried={name: name for name in own.carried},
            apart=self.apart,
            reads_h=reads_h,
            weights=TwoMatrices(vectors=own.parameters, blocks=True),
            advance=advanced,
        )
        for names in (
            described.arguments,
            described.step_arguments,
            described.backward_arguments,
            described.step_backward_arguments,
        ):
            for name in names:
                if names.count(name) > 1:
                    raise self.error(f"another name is needed: {name} is an argument of its ops")
        return described

    def _hash(self, run: Program) -> str:
        """Of what the cell computes, and of its names."""
        places = {node: k for k, node in enumerate(run.inputs)}
        own = self.own
        lines = [repr((own.name, own.gates, own.carried, own.parameters, self.terms))]
        for node in run.order:
            shown = (f"%{places[a]}" if isinstance(a, Node) else repr(a) for a in node.args)
            lines.append(f"{node.op} {' '.join(shown)}")
            places[node] = len(places)
        outputs = (f"%{places[v]}" if isinstance(v, Node) else repr(v) for v in run.outputs)
        lines.append(" ".join(outputs))
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]

    def check(self, described: OwnCell) -> None:
        """Raises ValueError unless the trace is the function, and its gradient is autograd's, on
        random values in float64."""
        generator = torch.Generator().manual_seed(0)
        options: Any = {"generator": generator, "dtype": torch.float64, "device": "cpu"}
        with torch.inference_mode(False), torch.enable_grad():
            tensors = {n: torch.randn(64, **options) for n in self.leaves}
            for name in self.own.carried:
                tensors[name][:32].abs_()  # those that must be positive
            tensors = {n: t.requires_grad_() for n, t in tensors.items()}
            found = self.own.function(**{name: tensors[name] for name in self.given})
            found = list(found) if isinstance(found, (tuple, list)) else [found]
            want = [torch.as_tensor(f, dtype=torch.float64).expand(64) for f in found]
            grads = [torch.randn(64, **options) for _ in want]
            inputs = [*self.z, *([self.leaves["h"]] if self.reads_h else []), *self.before]
            names = [str(leaf.args[0]) for leaf in inputs]
            of_results = [(w, g) for w, g in zip(want, grads, strict=True) if w.requires_grad]
            slopes = torch.autograd.grad(
                [w for w, _ in of_results],
                [tensors[n] for n in names],
                [g for _, g in of_results],
                allow_unused=True,
                materialize_grads=True,
            )
        with torch.no_grad():
            z = tuple(tensors[n].detach() for n in self.terms)
            before = tuple(tensors[n].detach() for n in self.own.carried)
            h = tensors["h"].detach()
            ours, after, saved = described.forward(z, h, before)
            advanced = described.advance(saved, before)
            read = h if self.reads_h else None
            of_z, of_h, of_before = described.backward(
                saved, before, after, read, grads[0], tuple(grads[1:])
            )
        both = [*zip((ours, *after), want, strict=True), *zip(advanced, want[1:], strict=True)]
        both += zip((*of_z, *([of_h] if self.reads_h else []), *of_before), slopes, strict=True)
        finite = torch.stack([w.detach().isfinite() for _, w in both]).all(0)
        if not finite.any():
            raise self.error("its results or gradients are not finite for any of 64 random values")
        for got, exact in both:
            if not torch.allclose(got[finite], exact.detach()[finite], 1e-8, 1e-10):
                raise self.error(
                    "its trace differs from the function in values or gradients: does the function "
                    "read what changes, or cut a gradient?"
                )


def _functions(values: list[Node]) -> list[Node]:
    """The functions of Math whose values enter the results through nothing but arithmetic and
    choices."""
    found, todo = set[Node](), list(values)
    seen = set(todo)
    while todo:
        node = todo.pop()
        if node.op in MATH:
            found.add(node)
            continue
        fresh = [n for n in node.nodes if n not in seen]
        seen.update(fresh)
        todo += fresh
    return sorted(found, key=lambda n: n.number)
