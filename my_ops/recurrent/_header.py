"""Prints a cell as C++: a header like those in kernels/recurrent/cells, for the kernels."""

from __future__ import annotations

import functools
import itertools
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from my_ops.recurrent._derived import Derived
from my_ops.recurrent._expressions import ARITHMETIC, COMPARISONS, MATH, Node, Value, order
from my_ops.recurrent._own_ops import OwnCell

_SIGNS = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
_SIGNS |= {"gt": ">", "ge": ">=", "lt": "<", "le": "<=", "eq": "==", "ne": "!="}
_HARD = "\0"  # a space where no line ends
# Names that no value may have: those of arguments, and words of C++.
_WORDS = """
z h_prev carried saved previous grad_h grad_carried grad_z T Math advance forward backward shut
alignas alignof and and_eq asm auto bitand bitor bool break case catch char char8_t char16_t
char32_t class co_await co_return co_yield compl concept const const_cast consteval constexpr
constinit continue decltype default delete do double dynamic_cast else enum explicit export extern
false float for friend goto if inline int long mutable namespace new noexcept not not_eq nullptr
operator or or_eq private protected public register reinterpret_cast requires return short signed
sizeof static static_assert static_cast struct switch template this thread_local throw true try
typedef typeid typename union unsigned using virtual void volatile wchar_t while xor xor_eq
"""
# As torch's with NaN, which comparisons do not choose.
_CHOICES: dict[str, Callable[..., str]] = {
    "abs": lambda a: f"{a} < T(0) ? -{a} : {a}",
    "relu": lambda a: f"{a} < T(0) ? T(0) : {a}",
    "maximum": lambda a, b: f"{a} > {b} || {a} != {a} ? {a} : {b}",
    "minimum": lambda a, b: f"{a} < {b} || {a} != {a} ? {a} : {b}",
    "where": lambda c, a, b: f"{c} ? {a} : {b}",
}


def with_header(derived: Derived, cell: OwnCell) -> OwnCell:
    """The cell with what the kernels need."""
    shares = shut_shares(derived, cell)
    given = functools.partial(header, derived, cell, shares)
    cell = replace(cell, shares=shares, header=given)
    if shares is None:
        return cell
    share = torch.tensor(shares, dtype=torch.float64, device="cpu")
    zero = share.new_zeros(())
    sums = cell.gates - cell.apart
    z = [*share[:sums].unbind(), *share.new_zeros(cell.apart).unbind(), *share[sums:].unbind()]
    z += [zero] * cell.vectors
    saved = cell.forward(tuple(z), zero, (zero,) * len(cell.carried))[2]
    return replace(cell, shut=tuple(float(value) for value in saved))


def header(derived: Derived, cell: OwnCell, shares: tuple[float, ...] | None) -> str:
    """``shares``: of ``shut_shares``. Raises ValueError if the kernels lack a function."""
    own = derived.own
    reads_previous = any(leaf in _leaves(derived) for leaf in derived.before)
    counts = {
        "kGates": cell.gates,
        "kApart": cell.apart,
        "kVectors": cell.vectors,
        "kCarried": len(cell.carried),
        "kSaved": cell.saved,
    }
    facts = {
        "kReadsH": cell.reads_h,
        "kReadsPrevious": reads_previous,
        "kBounded": is_bounded(derived.h, derived.leaves["h"]),
    }
    name = "".join(word.capitalize() for word in own.name.split("_"))
    shown = ", ".join(f"{key} = {value}" for key, value in counts.items())
    known = ", ".join(f"{key} = {str(value).lower()}" for key, value in facts.items())
    return "\n".join(
        [
            f"// {own.name}, printed by my_ops.cell from a Python function. Gates: "
            f"{', '.join(own.gates)}.",
            "#pragma once",
            "",
            "#include <limits>",
            "",
            '#include "recurrent/cells/cell.h"',
            "",
            "namespace my_ops {",
            "",
            f"struct {name}Cell {{",
            f"  static constexpr int {shown};",
            f"  static constexpr bool {known};",
            "",
            *_forward(derived),
            "",
            *_advance(derived),
            "",
            *_backward(derived, cell),
            *([] if shares is None else ["", *_shut(shares)]),
            "};",
            "",
            "}  // namespace my_ops",
            "",
        ]
    )


# ----------------------------------------------------------------------------------- statements


class _Body:
    """The statements of a function, of which values are known by name."""

    def __init__(self, derived: Derived) -> None:
        self._derived, self._names = derived, dict[Node, str]()
        self._slopes: dict[Node, str] = {}
        self.lines: list[str] = []
        self._taken = {*_WORDS.split()}

    def know(self, node: Value, name: str, text: str) -> None:
        """A value that is given. It is read only if it is used."""
        if isinstance(node, Node) and node not in self._names:
            self._names[node] = self._unique(name)
            self.lines.append(f"const T {self._names[node]} = {text};")

    def call(self, node: Node, name: str) -> None:
        """A value that is given under a name."""
        self._names[node] = name

    def write(self, line: str) -> None:
        self.lines.append(line)

    def compute(self, values: Sequence[Value]) -> list[str]:
        """The expressions of values, after the statements that they need."""
        nodes = order(list(self._names), values)
        uses = Counter(id(a) for node in nodes for a in node.nodes)
        uses.update(id(v) for v in values if isinstance(v, Node))
        for node in nodes:
            if node.op in _CHOICES and node.op != "where":
                uses.update(id(a) for a in node.nodes)  # they are read twice
        for node in nodes:
            if node.op == "tanh":
                slope = self._slope_of(node, nodes)
                if slope is not None and slope not in self._slopes:
                    name = self._unique(_base(node))
                    self.write(
                        f"const auto {name} = Math::tanh_with_slope({self.text(node.args[0])});"
                    )
                    self._names[node] = f"{name}.value"
                    self._slopes[slope] = f"{name}.slope"
                    continue
            if node in self._slopes:
                continue
            needed = node.op in _CHOICES or node.op in MATH
            if (uses[id(node)] > 1 or needed) and not node.is_condition and node.op != "full":
                name, text = self._unique(_base(node)), self.text(node)
                self.write(f"const T {name} = {text};")
                self._names[node] = name
        return [self.text(v) for v in values]

    def _slope_of(self, node: Node, nodes: Sequence[Node]) -> Node | None:
        """1 - tanh**2, if it is among the nodes."""
        for other in nodes:
            if other.op == "sub" and other.args[0] == 1.0:
                square = other.args[1]
                if isinstance(square, Node) and square.op == "mul" and square.args == (node, node):
                    return other
        return None

    def _unique(self, base: str) -> str:
        name = base
        for k in itertools.count(2):
            if name not in self._taken:
                break
            name = f"{base}_{k}"
        self._taken.add(name)
        return name

    def text(self, value: Value, inner: bool = False) -> str:
        """``inner``: as an operand."""
        if not isinstance(value, Node):
            return _number(value)
        if value in self._names:
            return self._names[value]
        if value in self._slopes:
            return self._slopes[value]
        if value.op == "full":
            return _number(value.args[1])
        if value.op == "neg":
            return f"-{self.text(value.args[0], True)}"
        if value.op in _SIGNS:
            sign, (a, b) = _SIGNS[value.op], value.args
            left = self.text(a, not (sign in "+-" or (_is_product(a) and sign == "*")))
            right = self.text(b, not (_is_product(b) and sign in "+-"))
            text = f"{left} {sign} {right}"
        elif value.op in _CHOICES:
            text = _CHOICES[value.op](*(self.text(a, True) for a in value.args))
        elif value.op in MATH:
            return f"Math::{value.op}({self.text(value.args[0])})"
        else:
            known = ", ".join(op for op in MATH if op != "elu_slope")
            raise self._derived.error(
                f"no header: the kernels have no {value.op}, only arithmetic, comparisons, {known}"
            )
        return f"({text})" if inner else text


def _base(node: Node) -> str:
    """What a value's name begins with."""
    argument = node.args[0]
    if node.op == "leaf":
        return str(argument)
    of_leaf = isinstance(argument, Node) and argument.op == "leaf"
    return f"{node.op}_{argument.args[0]}" if of_leaf and node.op not in ARITHMETIC else node.op


def _is_product(value: Value) -> bool:
    return isinstance(value, Node) and value.op == "mul"


def _number(value: float) -> str:
    return f"T({int(value) if value == int(value) else repr(value)})"


# ------------------------------------------------------------------------------------- functions


def _function(template: str, signature: str, parameters: Sequence[str], body: _Body) -> list[str]:
    """``parameters``: TYPE NAME. The names of those that the body does not read are comments, and
    statements that name what is not read go."""
    lines = body.lines[:]
    while True:
        read = [
            line
            for k, line in enumerate(lines)
            if not line.startswith("const T ") or _reads(lines[k + 1 :], line.split()[2])
        ]
        if read == lines:
            break
        lines = read
    shown = []
    for parameter in parameters:
        kind, name = parameter.rsplit(" ", 1)
        shown.append(parameter if _reads(lines, name) else f"{kind} /*{name}*/")
    whole = f"{signature.replace(' ', _HARD)}({', '.join(p.replace(' ', _HARD) for p in shown)})"
    indent = " " * len(f"{signature}(")
    first = textwrap.wrap(f"{whole}{_HARD}{{", 98, subsequent_indent=indent)
    first = [f"  {line.replace(_HARD, ' ')}" for line in first]
    if not lines:
        return [f"  {template}", *first[:-1], f"{first[-1]}}}"]
    wrapped = [textwrap.wrap(line, 96, subsequent_indent="    ") for line in lines]
    statements = [f"    {part}" for parts in wrapped for part in parts]
    return [f"  {template}", *first, *statements, "  }"]


def _reads(lines: Sequence[str], name: str) -> bool:
    words = "".join(c if c.isalnum() or c == "_" else " " for line in lines for c in line + " ")
    return name in words.split()


def _forward(derived: Derived) -> list[str]:
    body = _Body(derived)
    for k, leaf in enumerate(derived.z):
        body.know(leaf, str(leaf.args[0]), f"z[{k}]")
    body.know(derived.leaves["h"], "h", "h_prev")
    for k, leaf in enumerate(derived.before):
        body.know(leaf, f"old_{leaf.args[0]}", f"carried[{k}]")
    for k, text in enumerate(body.compute(derived.saved)):
        body.write(f"saved[{k}] = {text};")
    if derived.before:
        body.write("advance(saved, carried);")
    for k, (name, node) in enumerate(zip(derived.own.carried, derived.after, strict=True)):
        body.know(node, name, f"carried[{k}]")
    (h,) = body.compute([derived.h])
    body.write(f"return {h};")
    parameters = ["const T* z", "T h_prev", "T* carried", "T* saved"]
    template = "template <typename Math, typename T>"
    return _function(template, "MY_OPS_CELL static T forward", parameters, body)


def _advance(derived: Derived) -> list[str]:
    body = _Body(derived)
    _know_saved(body, derived)
    for k, leaf in enumerate(derived.before):
        body.know(leaf, f"old_{leaf.args[0]}", f"carried[{k}]")
    for k, text in enumerate(body.compute(derived.after)):
        body.write(f"carried[{k}] = {text};")
    parameters = ["const T* saved", "T* carried"]
    return _function("template <typename T>", "MY_OPS_CELL static void advance", parameters, body)


def _know_saved(body: _Body, derived: Derived) -> None:
    for k, node in enumerate(derived.saved):
        body.know(node, _base(node), f"saved[{k}]")


def _backward(derived: Derived, cell: OwnCell) -> list[str]:
    body, own = _Body(derived), derived.own
    _know_saved(body, derived)
    for k, leaf in enumerate(derived.before):
        body.know(leaf, f"old_{leaf.args[0]}", f"previous[{k}]")
    for k, (name, node) in enumerate(zip(own.carried, derived.after, strict=True)):
        body.know(node, name, f"carried[{k}]")
    body.know(derived.leaves["h"], "h", "h_prev")
    of_h, *of_carried = derived.grad_after
    body.call(of_h, "grad_h")
    for k, (name, leaf) in enumerate(zip(own.carried, of_carried, strict=True)):
        body.know(leaf, f"grad_{name}", f"grad_carried[{k}]")
    results = body.compute([*derived.grad_z, *derived.grad_before, derived.grad_h])
    for k, text in enumerate(results[: len(derived.grad_z)]):
        body.write(f"grad_z[{k}] = {text};")
    for k, text in enumerate(results[len(derived.grad_z) : -1]):
        body.write(f"grad_carried[{k}] = {text};")
    body.write(f"return {results[-1]};")
    parameters = ["const T* saved", "const T* previous", "const T* carried", "T h_prev", "T grad_h"]
    parameters += ["T* grad_carried", "T* grad_z"]
    template = "template <typename Math, typename T>"
    return _function(template, "MY_OPS_CELL static T backward", parameters, body)


def _leaves(derived: Derived) -> set[Node]:
    """What backward reads of the saved values and the leaves."""
    known = [*derived.saved, *(a for a in derived.after if isinstance(a, Node))]
    known += [*derived.before, derived.leaves["h"], *derived.grad_after]
    values = [*derived.grad_z, *derived.grad_before, derived.grad_h]
    read = {v for v in values if isinstance(v, Node)}
    for node in order(known, values):
        read.update(node.nodes)
    return read


# ----------------------------------------------------------------------------------------- facts


def is_bounded(h: Value, previous: Node) -> bool:
    """Whether |h| <= max(1, |previous|) follows from the ranges of sigmoid and tanh."""

    def within(value: Value, low: float) -> bool:
        """From low to 1."""
        if not isinstance(value, Node):
            return low <= value <= 1
        if value.op == "sigmoid":
            return True
        if value.op == "tanh":
            return low < 0
        if value.op == "neg":
            return low < 0 and within(value.args[0], -1.0)
        if value.op == "mul":
            return all(within(a, low) for a in value.args)
        if value.op == "sub" and value.args[0] == 1.0:
            return within(value.args[1], 0.0)
        return value.op == "where" and all(within(a, low) for a in value.args[1:])

    def is_one_minus(a: Value, b: Value) -> bool:
        return isinstance(a, Node) and a.op == "sub" and a.args[0] == 1.0 and a.args[1] is b

    def bounded(value: Value) -> bool:
        if value is previous or within(value, -1.0):
            return True
        if not isinstance(value, Node):
            return False
        if value.op == "mul":
            return any(within(a, -1.0) and bounded(b) for a, b in (value.args, value.args[::-1]))
        if value.op != "add":
            return False
        for a, b in (value.args, value.args[::-1]):
            if not isinstance(b, Node) or b.op != "mul":
                continue
            for share, rest in (b.args, b.args[::-1]):
                if not within(share, 0.0):
                    continue
                # a + share * (x - a)
                if isinstance(rest, Node) and rest.op == "sub" and rest.args[1] is a:
                    return bounded(a) and bounded(rest.args[0])
                # share * rest + (1 - share) * other
                if isinstance(a, Node) and a.op == "mul":
                    for one, other in (a.args, a.args[::-1]):
                        if is_one_minus(one, share) or is_one_minus(share, one):
                            return bounded(rest) and bounded(other)
        return False

    return bounded(h)


def shut_shares(derived: Derived, cell: OwnCell) -> tuple[float, ...] | None:
    """The input's share of each gate in a row that has ended: whatever the products with h, it
    leaves what is carried and its gradient as they are, gives the terms no gradient if h has none,
    and a finite h. Found by trying 0 and both infinities."""
    infinity, samples = float("inf"), 32
    choices = list(itertools.product((0.0, -infinity, infinity), repeat=cell.gates))
    generator = torch.Generator().manual_seed(1)

    def drawn(scale: float) -> Any:
        options: Any = {"generator": generator, "dtype": torch.float64, "device": "cpu"}
        return (scale * torch.randn(1, samples, **options)).expand(len(choices), samples)

    shares = torch.tensor(choices, dtype=torch.float64, device="cpu")
    products = [drawn(3.0) for _ in range(cell.gates)]
    each = [share.unsqueeze(1).expand(len(choices), samples) for share in shares.unbind(1)]
    sums = cell.gates - cell.apart
    z = [p + s for p, s in zip(products[:sums], each[:sums], strict=True)]
    z += [*products[sums:], *each[sums:], *(drawn(1.0) for _ in range(cell.vectors))]
    h, before = drawn(1.0), tuple(drawn(10.0) for _ in cell.carried)
    grads, zero = tuple(drawn(1.0) for _ in cell.carried), torch.zeros_like(h)
    with torch.no_grad():
        new_h, after, saved = cell.forward(tuple(z), h, before)
        read = h if cell.reads_h else None
        found = cell.backward(saved, before, after, read, zero, grads)
        fits = new_h.isfinite()
        for was, now in [*zip(before, after, strict=True), *zip(grads, found[2], strict=True)]:
            fits = fits & (was == now)
        for grad in (*found[0], *([found[1]] if cell.reads_h else [])):
            fits = fits & (grad == 0)
    rows = fits.all(1).nonzero()
    return choices[int(rows[0])] if rows.numel() else None


def _shut(shares: Sequence[float]) -> list[str]:
    infinity = float("inf")
    lines = ["  template <typename T>"]
    if infinity not in (*shares, *(-s for s in shares)):
        return [*lines, "  MY_OPS_CELL static T shut(int /*gate*/) {", "    return T(0);", "  }"]
    lines += ["  MY_OPS_CELL static T shut(int gate) {"]
    lines += ["    constexpr T kInfinity = std::numeric_limits<T>::infinity();"]
    for value, text in ((infinity, "kInfinity"), (-infinity, "-kInfinity")):
        of = " || ".join(f"gate == {k}" for k, share in enumerate(shares) if share == value)
        if of:
            lines.append(f"    if ({of}) return {text};")
    return [*lines, "    return T(0);", "  }"]


assert set(_SIGNS) == {*ARITHMETIC, *COMPARISONS} - {"neg"}
