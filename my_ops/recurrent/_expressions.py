"""Expressions of one unit's values: they are differentiated, and evaluated on tensors.

Nodes of a :class:`Graph` are unique: equal expressions are one node. A node's arguments are nodes
and numbers.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class Node:
    """``op`` of ``args``; a leaf is a value that is given, whose only argument is its name."""

    __slots__ = ("args", "depends", "number", "op")

    def __init__(self, op: str, args: tuple[Any, ...], number: int) -> None:
        self.op, self.args, self.number = op, args, number
        # The leaves that it depends on.
        self.depends: frozenset[Node] = frozenset([self]) if op == "leaf" else frozenset()
        for node in self.nodes:
            self.depends |= node.depends

    @property
    def nodes(self) -> list[Node]:
        return [a for a in self.args if isinstance(a, Node)]

    @property
    def is_condition(self) -> bool:
        return self.op in COMPARISONS


Value = Node | float

COMPARISONS: dict[str, Callable[..., Any]] = {
    "gt": operator.gt,
    "ge": operator.ge,
    "lt": operator.lt,
    "le": operator.le,
    "eq": operator.eq,
    "ne": operator.ne,
}
ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "neg": operator.neg,
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": torch.abs,
    "cos": torch.cos,
    "elu": F.elu,
    "elu_slope": lambda y: torch.where(y > 0, 1.0, y + 1),  # of ELU's value
    "exp": torch.exp,
    "expm1": torch.expm1,
    "log": torch.log,
    "log1p": torch.log1p,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "pow": torch.pow,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "sin": torch.sin,
    "softplus": F.softplus,
    "sqrt": torch.sqrt,
    "tanh": torch.tanh,
}
# Functions of the kernels' Math; of CUDA's, those that _own_kernels.py names.
MATH = ("sigmoid", "tanh", "elu", "elu_slope", "exp", "expm1", "log", "log1p", "softplus", "sqrt")
OPS: dict[str, Any] = {
    **COMPARISONS,
    **ARITHMETIC,
    **FUNCTIONS,
    "where": torch.where,
    "full": torch.full_like,
}


class Graph:
    def __init__(self) -> None:
        self._known: dict[Any, Node] = {}

    def leaf(self, name: str) -> Node:
        return self._node("leaf", name)

    def _node(self, op: str, *args: Any) -> Node:
        # By type too, because 0.0 == -0.0 and nodes compare by identity.
        key = (op, *(a if isinstance(a, Node) else repr(a) for a in args))
        if key not in self._known:
            self._known[key] = Node(op, args, len(self._known))
        return self._known[key]

    def make(self, op: str, *args: Value) -> Value:
        """The node, or what it is the same as."""
        if op in ARITHMETIC:
            if not any(isinstance(a, Node) for a in args):
                return float(ARITHMETIC[op](*args))
            simple = self._simplified(op, *args)
            if simple is not None:
                return simple
        elif op == "where":
            condition, *branches = args
            if branches[0] is branches[1]:
                return branches[0]
            if not any(isinstance(a, Node) for a in branches):  # torch would choose the type
                assert isinstance(condition, Node)
                args = (condition, self._node("full", condition.nodes[0], branches[0]), branches[1])
        elif op in ("maximum", "minimum"):  # which take no numbers in torch
            like = next(a for a in args if isinstance(a, Node))
            args = tuple(a if isinstance(a, Node) else self._node("full", like, a) for a in args)
        return self._node(op, *args)

    def _simplified(self, op: str, a: Value, b: Value = 0.0) -> Value | None:
        if op == "neg":
            return a.args[0] if isinstance(a, Node) and a.op == "neg" else None
        if op in ("add", "sub") and b == 0.0:
            return a
        if op == "add" and a == 0.0:
            return b
        if op == "sub" and a == 0.0:
            return self.make("neg", b)
        if op == "add" and isinstance(b, Node) and b.op == "neg":
            return self.make("sub", a, b.args[0])
        if op == "add" and isinstance(a, Node) and a.op == "neg":
            return self.make("sub", b, a.args[0])
        if op in ("mul", "div") and b == 1.0:
            return a
        if op == "mul" and a == 1.0:
            return b
        return None


# --------------------------------------------------------------------------------- derivatives


def gradients(graph: Graph, outputs: Sequence[tuple[Value, Value]], leaves: Iterable[Node]) -> Any:
    """The gradients of leaves, from pairs of an output and its gradient."""
    make, found = graph.make, dict[Node, Value]()

    def add(node: Any, grad: Value) -> None:
        if isinstance(node, Node) and not node.is_condition:
            found[node] = make("add", found[node], grad) if node in found else grad

    for output, grad in outputs:
        add(output, grad)
    for node in sorted(_below(found), key=lambda n: -n.number):
        if node in found and node.op != "leaf":
            for argument, grad in zip(node.args, _slopes(make, node, found[node]), strict=True):
                if isinstance(argument, Node) and not argument.is_condition:
                    add(argument, grad)
    return [found.get(leaf, 0.0) for leaf in leaves]


def _below(nodes: Iterable[Any]) -> set[Node]:
    """The nodes and all that they depend on."""
    seen: set[Node] = set()
    todo = [n for n in nodes if isinstance(n, Node)]
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo += node.nodes
    return seen


def _slopes(make: Callable[..., Value], node: Node, grad: Value) -> list[Any]:
    """The gradient of each argument of a node, whose value they may use."""
    op, a = node.op, node.args[0]
    b = node.args[1] if len(node.args) > 1 else 0.0
    if op in ("maximum", "minimum"):
        half, larger = make("mul", 0.5, grad), (a, b) if op == "maximum" else (b, a)

        def share(x: Value, y: Value) -> Value:
            above = make("where", make("gt", x, y), grad, 0.0)
            return make("where", make("eq", a, b), half, above)

        return [share(*larger), share(*larger[::-1])]
    if op == "where":
        return [0.0, make("where", a, grad, 0.0), make("where", a, 0.0, grad)]
    if op == "add":
        return [grad, grad]
    if op == "sub":
        return [grad, make("neg", grad)]
    if op == "mul":
        return [make("mul", grad, b), make("mul", grad, a)]
    if op == "div":
        of_a = make("div", grad, b)
        return [of_a, make("neg", make("mul", of_a, node))]
    if op == "full":
        return [0.0, 0.0]
    if op == "pow":
        slope = make("mul", b, make("pow", a, b - 1.0))
        return [make("mul", grad, slope), 0.0]
    if op == "neg":
        return [make("neg", grad)]
    if op == "relu":
        return [make("where", make("gt", node, 0.0), grad, 0.0)]
    if op == "abs":
        below = make("where", make("lt", a, 0.0), make("neg", grad), 0.0)
        return [make("where", make("gt", a, 0.0), grad, below)]
    if op in ("log", "log1p", "sqrt"):
        of = {
            "log": lambda: a,
            "log1p": lambda: make("add", 1.0, a),
            "sqrt": lambda: make("mul", 2.0, node),
        }
        return [make("div", grad, of[op]())]
    slopes: dict[str, Callable[[], Value]] = {
        "exp": lambda: node,
        "expm1": lambda: make("add", node, 1.0),
        "sigmoid": lambda: make("mul", node, make("sub", 1.0, node)),
        "tanh": lambda: make("sub", 1.0, make("mul", node, node)),
        # The sigmoid of a, from the value: sLSTM need not save both.
        "softplus": lambda: make("neg", make("expm1", make("neg", node))),
        "elu": lambda: make("elu_slope", node),
        "sin": lambda: make("cos", a),
        "cos": lambda: make("neg", make("sin", a)),
    }
    return [make("mul", grad, slopes[op]())]


def smallest_cut(
    targets: Iterable[Value], given: Iterable[Node], sources: Iterable[Node]
) -> list[Node]:
    """The fewest values from which the targets can be computed without the sources, as late as
    possible. The ``given`` are known, unless they are targets themselves; comparisons and what
    depends on other leaves are not chosen."""
    known, wanted, from_leaves = set(given), list(targets), set(sources)
    ends = {t for t in wanted if isinstance(t, Node)}
    # A maximum flow from the sources to the ends, of one unit through each node that may be chosen.
    into: dict[Node, list[Node]] = {}
    todo, seen = list(ends), set(ends)
    while todo:
        node = todo.pop()
        into[node] = [n for n in node.nodes if n not in known and n.depends & from_leaves]
        fresh = [n for n in into[node] if n not in seen]
        seen.update(fresh)
        todo += fresh
    out_of: dict[Node, list[Node]] = {node: [] for node in into}
    for node, arguments in into.items():
        for argument in arguments:
            out_of[argument].append(node)

    def may_be_chosen(node: Node) -> bool:
        new = node not in known or node in from_leaves
        return not node.is_condition and new and node.depends <= chosen_from

    chosen_from = from_leaves | {leaf for node in known for leaf in node.depends}
    residual: dict[Any, dict[Any, float]] = {}

    def edge(a: Any, b: Any, capacity: float) -> None:
        residual.setdefault(a, {})[b] = residual.get(a, {}).get(b, 0.0) + capacity
        residual.setdefault(b, {}).setdefault(a, 0.0)

    for node in into:
        edge((node, "in"), (node, "out"), 1.0 if may_be_chosen(node) else math.inf)
        if node in from_leaves:
            edge("source", (node, "in"), math.inf)
        if node in ends:
            edge((node, "out"), "end", math.inf)
        for user in out_of[node]:
            edge((node, "out"), (user, "in"), math.inf)

    def path() -> list[Any] | None:
        before: dict[Any, Any] = {"source": None}
        queue = ["source"]
        for place in queue:
            for following, capacity in residual.get(place, {}).items():
                if capacity > 0 and following not in before:
                    before[following] = place
                    queue.append(following)
        if "end" not in before:
            return None
        found = ["end"]
        while before[found[-1]] is not None:
            found.append(before[found[-1]])
        return found[::-1]

    while (found := path()) is not None:
        for a, b in pairwise(found):
            residual[a][b] -= 1.0
            residual[b][a] += 1.0
    reaches = {"end"}
    queue: list[Any] = ["end"]
    for place in queue:
        for before in residual.get(place, {}):
            if before not in reaches and residual[before].get(place, 0.0) > 0:
                reaches.add(before)
                queue.append(before)
    cut = [n for n in into if (n, "out") in reaches and (n, "in") not in reaches]
    return sorted(cut, key=lambda n: n.number)


# ----------------------------------------------------------------------------------- evaluation


class Program:
    """Computes values from those of ``inputs``, on tensors."""

    def __init__(self, inputs: Sequence[Node], outputs: Sequence[Value]) -> None:
        self.inputs, self.outputs = list(inputs), list(outputs)
        self.order = order(self.inputs, self.outputs)  # the nodes to compute
        places = {node: k for k, node in enumerate(self.inputs)}
        self._constants: list[float] = []

        def place(value: Value) -> int:
            if isinstance(value, Node):
                return places[value]
            self._constants.append(value)
            return -len(self._constants)  # from the end of a list of their own

        self._steps: list[tuple[Callable[..., Any], tuple[int, ...]]] = []
        for node in self.order:
            self._steps.append((OPS[node.op], tuple(place(a) for a in node.args)))
            places[node] = len(places)
        self._results = [place(output) for output in self.outputs]

    def __call__(self, *tensors: Tensor) -> list[Any]:
        values: list[Any] = list(tensors)
        constants = self._constants

        def at(place: int) -> Any:
            return values[place] if place >= 0 else constants[-1 - place]

        for function, places in self._steps:
            values.append(function(*[at(k) for k in places]))
        results = [at(k) for k in self._results]
        return [torch.full_like(tensors[0], r) if isinstance(r, float) else r for r in results]


def order(inputs: Sequence[Node], outputs: Sequence[Value]) -> list[Node]:
    """The nodes between them, arguments first."""
    known, found = set(inputs), list[Node]()

    def visit(node: Node) -> None:
        if node not in known:
            known.add(node)
            assert node.op != "leaf", f"{node.args[0]} is not given"
            for argument in node.nodes:
                visit(argument)
            found.append(node)

    for output in outputs:
        if isinstance(output, Node):
            visit(output)
    return found
