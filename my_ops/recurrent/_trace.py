"""Traces the function of a cell: what it gets instead of tensors, and what it may call."""

from __future__ import annotations

import inspect
import linecache
from collections.abc import Callable, Sequence
from numbers import Real
from types import CodeType
from typing import Any

from torch import Tensor

from my_ops.recurrent._expressions import ARITHMETIC, COMPARISONS, FUNCTIONS, Graph, Node, Value


class Trace:
    """One trace of a function, with the name that its errors begin with."""

    def __init__(self, name: str, code: CodeType) -> None:
        self.name, self.graph, self._file = name, Graph(), code.co_filename

    def error(self, rule: str, kind: type[Exception] = ValueError) -> Exception:
        """An error that names the line of the function's file that runs."""
        frame: Any = inspect.currentframe()
        while frame is not None and frame.f_code.co_filename != self._file:
            frame = frame.f_back
        where = ""
        if frame is not None:
            source = linecache.getline(self._file, frame.f_lineno).strip()
            where = f"\n  {self._file}, line {frame.f_lineno}" + (f": {source}" if source else "")
        return kind(f"my_ops.cell: {self.name}: {rule}{where}")

    def value(self, given: Any, what: str) -> Value:
        """The node or number of an argument."""
        if isinstance(given, Unit) and given.trace is self:
            return given.node
        if isinstance(given, Tensor):
            if given.numel() != 1 or given.requires_grad:
                raise self.error(
                    f"{what} must be of one unit or a number, got a tensor of shape "
                    f"{tuple(given.shape)}: values that are learned are named in parameters"
                )
            return float(given)
        if isinstance(given, Real) and not isinstance(given, bool):
            return float(given)
        raise self.error(f"{what} must be of one unit or a number, got {given!r}", TypeError)

    def call(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Unit:
        function = KNOWN.get(name)
        if function is None:
            known = ", ".join(sorted(k for k in KNOWN if k not in _ALSO))
            raise self.error(
                f"{name} is not known here: a cell computes the values of one unit, elementwise, "
                f"with the operators of Python and {known}"
            )

        def make(op: str, *values: Any) -> Value:
            checked = [self.value(v, name) if not isinstance(v, Node) else v for v in values]
            for k, v in enumerate(checked):
                if isinstance(v, Node) and v.is_condition != (op == "where" and k == 0):
                    what = "a comparison is only an argument of torch.where"
                    if not v.is_condition:
                        what = "the first argument of torch.where must be a comparison"
                    raise self.error(what)
            return self.graph.make(op, *checked)

        values = [a.node if isinstance(a, Unit) else a for a in args]
        named = {k: a.node if isinstance(a, Unit) else a for k, a in kwargs.items()}
        try:
            result = function(make, *values, **named)
        except TypeError as error:
            if "argument" not in str(error) or str(error).startswith("my_ops.cell"):
                raise
            raise self.error(f"{name} does not take these arguments: {error}", TypeError) from None
        return Unit(self, result)


# ------------------------------------------------------------------------- what a unit may call

Make = Callable[..., Any]


def _primitive(op: str) -> Callable[..., Any]:
    def function(make: Make, *args: Any) -> Any:
        count = 2 if op in COMPARISONS or op in ("mul", "div", "maximum", "minimum") else 1
        if len(args) != count:
            raise TypeError(f"{count} arguments, got {len(args)}")
        return make(op, *args)

    return function


def _add(make: Make, a: Any, b: Any, *, alpha: float = 1.0) -> Any:
    return make("add", a, make("mul", b, alpha) if alpha != 1 else b)


def _sub(make: Make, a: Any, b: Any, *, alpha: float = 1.0) -> Any:
    return make("sub", a, make("mul", b, alpha) if alpha != 1 else b)


def _pow(make: Make, a: Any, exponent: Any) -> Any:
    if isinstance(exponent, Node) or not isinstance(a, Node):
        raise TypeError("the exponent must be a number, as argument of a value of the unit")
    if exponent == 0.5:
        return make("sqrt", a)
    if exponent in (1, 2, 3, 4):
        result = a
        for _ in range(int(exponent) - 1):
            result = make("mul", result, a)
        return result
    return make("pow", a, float(exponent))


def _clamp(make: Make, x: Any, min: Any = None, max: Any = None) -> Any:
    if max is not None:
        x = make("where", make("gt", x, max), max, x)
    return x if min is None else make("where", make("lt", x, min), min, x)


def _elu(make: Make, x: Any, alpha: float = 1.0, inplace: bool = False) -> Any:
    if alpha == 1:
        return make("elu", x)
    below = make("mul", alpha, make("expm1", _clamp(make, x, max=0.0)))
    return make("where", make("gt", x, 0.0), x, below)


def _softplus(make: Make, x: Any, beta: float = 1.0, threshold: float = 20.0) -> Any:
    if beta == 1:
        return make("softplus", x)
    return make("div", make("softplus", make("mul", beta, x)), beta)


def _sigmoid(make: Make, x: Any) -> Any:
    return make("sigmoid", x)


def _lerp(make: Make, start: Any, end: Any, weight: Any) -> Any:
    return make("add", start, make("mul", weight, make("sub", end, start)))


def _logaddexp(make: Make, a: Any, b: Any) -> Any:
    apart = make("neg", make("abs", make("sub", a, b)))
    return make("add", make("maximum", a, b), make("log1p", make("exp", apart)))


KNOWN: dict[str, Callable[..., Any]] = {
    **{op: _primitive(op) for op in (*COMPARISONS, *ARITHMETIC, *FUNCTIONS)},
    "add": _add,
    "addcmul": lambda make, a, b, c, *, value=1.0: make(
        "add", a, make("mul", make("mul", b, c), value)
    ),
    "clamp": _clamp,
    "elu": _elu,
    "hardtanh": lambda make, x, min_val=-1.0, max_val=1.0, inplace=False: _clamp(
        make, x, min_val, max_val
    ),
    "leaky_relu": lambda make, x, negative_slope=0.01, inplace=False: make(
        "where", make("gt", x, 0.0), x, make("mul", negative_slope, x)
    ),
    "lerp": _lerp,
    "logaddexp": _logaddexp,
    "logsigmoid": lambda make, x: make("neg", make("softplus", make("neg", x))),
    "pow": _pow,
    "reciprocal": lambda make, x: make("div", 1.0, x),
    "relu": lambda make, x, inplace=False: make("relu", x),
    "rsqrt": lambda make, x: make("div", 1.0, make("sqrt", x)),
    "silu": lambda make, x, inplace=False: make("mul", x, _sigmoid(make, x)),
    "softplus": _softplus,
    "softsign": lambda make, x: make("div", x, make("add", 1.0, make("abs", x))),
    "square": lambda make, x: make("mul", x, x),
    "sub": _sub,
    "where": lambda make, condition, a, b: make("where", condition, a, b),
}
del KNOWN["elu_slope"]
_ALSO = {
    "absolute": "abs",
    "clip": "clamp",
    "divide": "div",
    "expit": "sigmoid",
    "log_sigmoid": "logsigmoid",
    "max": "maximum",
    "min": "minimum",
    "multiply": "mul",
    "negative": "neg",
    "rsub": "rsub",
    "rtruediv": "rdiv",
    "subtract": "sub",
    "true_divide": "div",
    "truediv": "div",
}
KNOWN["rsub"] = lambda make, a, b, *, alpha=1.0: _sub(make, b, a, alpha=alpha)
KNOWN["rdiv"] = lambda make, a, b: make("div", b, a)
KNOWN.update({also: KNOWN[name] for also, name in _ALSO.items()})
_ALSO["rdiv"] = "rdiv"


class Unit:
    """A value of one unit while its function is traced."""

    def __init__(self, trace: Trace, node: Value) -> None:
        self.trace, self.node = trace, node

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Unit:
        everything = [*args, *(kwargs or {}).values()]
        trace = next(a.trace for a in everything if isinstance(a, Unit))
        name = getattr(func, "__name__", str(func)).strip("_")
        return trace.call(name, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in KNOWN:
            raise self.trace.error(f"a value of one unit has no {name}", AttributeError)
        return lambda *args, **kwargs: self.trace.call(name, (self, *args), kwargs)

    def __bool__(self) -> bool:
        raise self.trace.error(
            "a condition must not choose what runs, because the units differ: use torch.where",
            TypeError,
        )

    def __float__(self, *_: Any) -> float:
        raise self.trace.error(
            "a value of one unit is no number of Python: use the functions of torch", TypeError
        )

    __int__ = __index__ = __len__ = __iter__ = __getitem__ = __float__  # type: ignore[assignment]

    def __pos__(self) -> Unit:
        return self

    __hash__ = None  # type: ignore[assignment]


def _operator(name: str, swapped: bool = False) -> Callable[..., Any]:
    def method(self: Unit, *others: Any) -> Unit:
        return self.trace.call(name, (*others, self) if swapped else (self, *others), {})

    return method


for _name in ("add", "sub", "mul", "truediv", "pow"):
    setattr(Unit, f"__{_name}__", _operator(_name))
    setattr(Unit, f"__r{_name}__", _operator(_name, swapped=True))
for _name in (*COMPARISONS, "neg", "abs"):
    setattr(Unit, f"__{_name}__", _operator(_name))
