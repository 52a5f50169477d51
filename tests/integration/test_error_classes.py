"""The same mistake raises the same class of error in an op, its function, its cell and its layer.

TypeError: an argument of another type of Python. ValueError: a number, a str or a list of Python
that is not allowed. RuntimeError, as torch's ops: tensors whose dtype, device or shape do not fit.
The message names the op, the argument, the rule and the value.
"""

import re

import pytest
import torch

import my_ops

STEPS, BATCH, INPUTS, HIDDEN = 5, 2, 3, 4
KINDS = "LSTM", "GRU", "LLTM"

LAYER = {
    "input": torch.ones(STEPS, BATCH, INPUTS),
    "h": torch.ones(1, BATCH, HIDDEN),
    "lengths": None,
    "reset": None,
}


def of_ops(kind, given):
    """The arguments in the order of the function of all steps."""
    layer = getattr(my_ops.nn, kind)(INPUTS, HIDDEN)
    weights = list(getattr(layer, "cells", [layer])[0].parameters())
    h = given["h"][0] if isinstance(given["h"], torch.Tensor) else given["h"]
    c = [] if kind == "GRU" else [torch.ones(BATCH, HIDDEN)]
    return [given["input"], h, *c, *weights], {key: given[key] for key in ("lengths", "reset")}


def call_op(kind, given):
    tensors, of_rows = of_ops(kind, given)
    getattr(torch.ops.my_ops, kind.lower())(*tensors, **of_rows)


def call_function(kind, given):
    tensors, of_rows = of_ops(kind, given)
    getattr(my_ops, kind.lower())(*tensors, **of_rows)


def call_layer(kind, given):
    hx = given["h"] if kind == "GRU" else (given["h"], torch.ones(1, BATCH, HIDDEN))
    getattr(my_ops.nn, kind)(INPUTS, HIDDEN)(given["input"], hx, given["lengths"], given["reset"])


def call_cell(kind, given):
    """With the first step."""
    first = [t[0] if isinstance(t, torch.Tensor) else t for t in (given["input"], given["h"])]
    hx = first[1] if kind == "GRU" else (first[1], torch.ones(BATCH, HIDDEN))
    getattr(my_ops.nn, f"{kind}Cell")(INPUTS, HIDDEN)(first[0], hx)


def call_cell_function(kind, given):
    cell = getattr(my_ops.nn, f"{kind}Cell")(INPUTS, HIDDEN)
    first = [t[0] if isinstance(t, torch.Tensor) else t for t in (given["input"], given["h"])]
    c = [] if kind == "GRU" else [torch.ones(BATCH, HIDDEN)]
    getattr(my_ops, f"{kind.lower()}_cell")(first[0], *cell.parameters(), first[1], *c)


ONE_STEP = call_cell, call_cell_function
PYTHON = call_function, call_layer
ALL = call_op, *PYTHON
WRONG_LAYER = [  # the argument, the wrong value, the error and where
    ("input", torch.ones(STEPS, BATCH, INPUTS, 1)[None], RuntimeError, ALL + ONE_STEP),
    ("input", torch.ones(STEPS, BATCH, INPUTS + 1), RuntimeError, ALL + ONE_STEP),
    ("input", LAYER["input"].double(), RuntimeError, ALL + ONE_STEP),
    ("input", LAYER["input"].int(), RuntimeError, ALL + ONE_STEP),
    ("input", LAYER["input"].to("meta"), RuntimeError, ALL + ONE_STEP),
    ("input", [1.0], TypeError, PYTHON + ONE_STEP),
    ("input", None, TypeError, PYTHON + ONE_STEP),
    ("h", torch.ones(1, BATCH, HIDDEN + 1), RuntimeError, ALL + ONE_STEP),
    ("h", torch.ones(1, BATCH + 1, HIDDEN), RuntimeError, ALL + ONE_STEP),
    ("h", LAYER["h"].double(), RuntimeError, ALL + ONE_STEP),
    ("h", "h", TypeError, PYTHON + ONE_STEP),
    ("lengths", torch.ones(BATCH + 1, dtype=torch.int64), RuntimeError, ALL),
    ("lengths", torch.ones(BATCH, 1, dtype=torch.int64), RuntimeError, ALL),
    ("lengths", torch.ones(BATCH, dtype=torch.int32), RuntimeError, ALL),
    ("lengths", "21", TypeError, PYTHON),
    ("lengths", [5, 6], ValueError, (call_layer,)),  # functions take no list
    ("lengths", [5, 6], TypeError, (call_function,)),
    ("lengths", [5, 1.5], TypeError, PYTHON),
    ("reset", torch.ones(STEPS, BATCH + 1, dtype=torch.bool), RuntimeError, ALL),
    ("reset", torch.ones(STEPS, dtype=torch.bool), RuntimeError, ALL),
    ("reset", torch.ones(STEPS, BATCH), RuntimeError, ALL),
    ("reset", True, TypeError, PYTHON),
]
CALLS = [(way, name, wrong, error) for name, wrong, error, ways in WRONG_LAYER for way in ways]


def said(value):
    if isinstance(value, torch.Tensor):
        value = f"{str(value.dtype).removeprefix('torch.')} {value.device} {tuple(value.shape)}"
    return str(value)


@pytest.mark.parametrize(
    "way, name, wrong, error",
    CALLS,
    ids=[f"{way.__name__}-{name}-{said(wrong)}" for way, name, wrong, _ in CALLS],
)
@pytest.mark.parametrize("kind", KINDS)
def test_recurrent(kind, way, name, wrong, error):
    with pytest.raises(Exception) as raised:
        way(kind, {**LAYER, name: wrong})
    assert type(raised.value) is error
    who = f"({kind}|{kind.lower()})(_?[Cc]ell)?"
    assert re.match(rf"{who}: \w+ must (be|have) .*, got .*", str(raised.value))


X, W, B = torch.ones(2, 3), torch.ones(4, 3), torch.ones(4)


def layer(x, **options):
    made = my_ops.nn.Linear(3, 4) if not options else my_ops.nn.LinearActivation(3, 4, **options)
    return made(x)


def linear(x, **options):
    return my_ops.linear(x, W, B, **options)


PRODUCTS = [  # a call, the error, and whether torch's own layer refuses the argument in its words
    (lambda: my_ops.gemm([1.0], W.T), TypeError, False),
    (lambda: my_ops.linear([1.0], W), TypeError, False),
    (lambda: layer([1.0]), TypeError, True),
    (lambda: my_ops.prepack([1.0]), TypeError, False),
    (lambda: my_ops.gemm(X, W), RuntimeError, False),
    (lambda: torch.ops.my_ops.gemm(X, W), RuntimeError, False),
    (lambda: linear(torch.ones(2, 4)), RuntimeError, False),
    (lambda: torch.ops.my_ops.linear(torch.ones(2, 4), W), RuntimeError, False),
    (lambda: layer(torch.ones(2, 4)), RuntimeError, False),
    (lambda: layer(torch.ones(2, 4), activation="relu"), RuntimeError, False),
    (lambda: my_ops.linear(X, W, torch.ones(5)), RuntimeError, False),
    (lambda: my_ops.linear(X, W[0]), RuntimeError, False),
    (lambda: my_ops.linear(X, W[None]), RuntimeError, False),
    (lambda: my_ops.gemm(X[0], W.T), RuntimeError, False),
    (lambda: my_ops.gemm(X, W[0]), RuntimeError, False),
    (lambda: my_ops.gemm(X.to_sparse(), W.T), NotImplementedError, False),
    (lambda: my_ops.gemm(X, W.T.to_sparse()), NotImplementedError, False),
    (lambda: my_ops.linear(X.to_sparse(), W), NotImplementedError, False),
    (lambda: my_ops.linear(X, W.to_sparse()), NotImplementedError, False),
    (lambda: my_ops.gemm(X, W.T.double()), RuntimeError, False),
    (lambda: linear(X.double()), RuntimeError, False),
    (lambda: layer(X.double()), RuntimeError, False),
    (lambda: layer(X.double(), activation="relu"), RuntimeError, False),
    (lambda: my_ops.gemm(X, W.T.to("meta")), RuntimeError, False),
    (lambda: linear(X.to("meta")), RuntimeError, False),
    (lambda: layer(X.to("meta")), RuntimeError, False),
    (lambda: my_ops.gemm(X, W.T, out=torch.ones(2, 5)), RuntimeError, False),
    (lambda: my_ops.gemm(X, W.T, out=1), TypeError, False),
    (lambda: my_ops.gemm(X, W.T, precision="low"), ValueError, False),
    (lambda: linear(X, precision="low"), ValueError, False),
    (lambda: linear(X, precision=1), TypeError, False),
    (lambda: linear(X, activation="tanh"), ValueError, False),
    (lambda: layer(X, activation="tanh"), ValueError, False),
    (lambda: linear(X, activation=1), TypeError, False),
    (lambda: layer(X, activation=1), TypeError, False),
    (lambda: linear(X, residual=1), TypeError, False),
    (lambda: my_ops.fill_index(-1, 2), ValueError, False),
    (lambda: my_ops.fill_index(1, 2.0), TypeError, False),
    (lambda: my_ops.fill_index(1, 2, dtype=torch.bool), ValueError, False),
    (lambda: my_ops.fill_index(1 << 31, 2, dtype=torch.int32), ValueError, False),
]


@pytest.mark.parametrize("number", range(len(PRODUCTS)))
def test_products_and_sizes(number):
    call, error, torchs = PRODUCTS[number]
    with pytest.raises(Exception) as raised:
        call()
    assert type(raised.value) is error
    form = r"linear\(\): .* must be .*, not .*" if torchs else r"\w+: .* must .*, got .*"
    assert re.match(form, str(raised.value))


def layer_of(kind, **options):
    return lambda: getattr(my_ops.nn, kind)(3, **{"hidden_size": 4, **options})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options, error",
    [
        ({"hidden_size": 0}, ValueError),
        ({"hidden_size": "4"}, TypeError),
        ({"num_layers": 0}, ValueError),
        ({"zoneout": 2.0}, ValueError),
        ({"weight_dropout": "0.5"}, ValueError),  # as dropout, in torch's layers
        ({"num_layers": 2, "dropout": "0.5"}, ValueError),
    ],
)
def test_options(kind, options, error):
    with pytest.raises(Exception) as raised:
        layer_of(kind, **options)()
    assert type(raised.value) is error
