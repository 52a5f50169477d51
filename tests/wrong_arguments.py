"""Right and wrong arguments of every op of torch.ops.my_ops, and the messages for wrong ones."""

from dataclasses import replace
from typing import Any

import torch
from samples import OF_TORCH
from wrong_recurrent import (
    BATCH,
    HIDDEN,
    INPUTS,
    MASKS,
    STATE,
    STEPS,
    WEIGHTS_BACKWARD,
    WRONG_WEIGHTS_BACKWARD,
    T,
    right_of_torch,
    wrong_of_torch,
)

from my_ops.ops._common import UNARY, UNARY_BACKWARD


def overload(op: str) -> Any:
    name, _, kind = op.partition(".")
    return getattr(getattr(torch.ops.my_ops, name), kind or "default")


WEIGHTS, BIAS = T((3 * HIDDEN, HIDDEN + INPUTS)), T((3 * HIDDEN,))
CELL = {"input": T((BATCH, INPUTS)), "weights": WEIGHTS, "bias": BIAS}
CELL |= {"old_h": STATE, "old_cell": STATE}
LAYER = {"input": T((STEPS, BATCH, INPUTS)), "h0": STATE, "c0": STATE}
LAYER |= {"weights": WEIGHTS, "bias": BIAS, **MASKS}
HEADS, SCORES = T((2, 3, 5, 4)), T((2, 1, 5, 7))
ATTENTION = {"query": HEADS, "key": T((2, 3, 7, 4)), "value": T((2, 3, 7, 6)), "bias": SCORES}
RIGHT: dict[str, dict[str, Any]] = {
    op: {argument.name: T((2, 3)) for argument in overload(op)._schema.arguments}
    for op in ("custom_add", *UNARY, *UNARY_BACKWARD)
}
RIGHT |= {
    "fill_index": {"height": 2, "width": 3},
    "fill_index.out": {"out": T((2, 3))},
    "gemm": {"a": T((2, 3)), "b": T((3, 4)), "precision": "high"},
    "gemm.out": {"a": T((2, 3)), "b": T((3, 4)), "out": T((2, 4)), "precision": "tf32"},
    "linear": {
        "x": T((2, 5, 3)),
        "weight": T((4, 3)),
        "bias": T((4,)),
        "activation": "gelu",
        "residual": T((2, 5, 4)),
        "precision": "highest",
        "packed": T((0,), torch.uint8),
    },
    "prepack": {"weight": T((4, 3))},
    "attention": ATTENTION,
    "attention_forward": ATTENTION,
    "attention_backward": {
        "grad": T((2, 3, 5, 6)),
        **ATTENTION,
        "out": T((2, 3, 5, 6)),
        "logsumexp": T((2, 3, 0)),
        "is_causal": False,
        "scale": None,
        "needs_bias": True,
    },
    "recurrent_weights_backward": WEIGHTS_BACKWARD,
    "lltm_cell": CELL,
    "lltm_cell_forward": CELL,
    "lltm_cell_backward": {
        "grad_h": STATE,
        "grad_cell": STATE,
        "gates": T((BATCH, 3 * HIDDEN)),
        "old_cell": STATE,
    },
    "lltm": LAYER,
    "lltm_forward": LAYER,
    "lltm_backward": {
        "grad_output": T((STEPS, BATCH, HIDDEN)),
        "grad_h_n": STATE,
        "grad_c_n": STATE,
        "gates": T((STEPS, BATCH, 3 * HIDDEN)),
        "cells": T((STEPS, BATCH, HIDDEN)),
        "c0": STATE,
        "weights": WEIGHTS,
        **MASKS,
    },
}
CARRYING = ["lltm", *(name for name, cell in OF_TORCH.items() if cell.carried)]
PLAIN = [name for name, cell in OF_TORCH.items() if not cell.carried]
for _cell in OF_TORCH.values():
    RIGHT |= right_of_torch(_cell)

# For each op, the tensor that the others are compared with, and the first of the others.
PAIRS = {
    "custom_add": ("a", "b"),
    **{op: tuple(RIGHT[op])[::-1] for op in UNARY_BACKWARD},
    "gemm": ("a", "b"),
    "gemm.out": ("a", "b"),
    "linear": ("x", "weight"),
    "attention": ("query", "key"),
    "attention_forward": ("query", "key"),
    "attention_backward": ("query", "key"),
    "recurrent_weights_backward": ("grad_gates", "input"),
    "lltm_cell": ("input", "weights"),
    "lltm_cell_forward": ("input", "weights"),
    "lltm_cell_backward": ("gates", "old_cell"),
    "lltm": ("input", "weights"),
    "lltm_forward": ("input", "weights"),
    "lltm_backward": ("gates", "cells"),
    **{
        f"{cell}{steps}{suffix}": ("input", "weight_ih")
        for cell in OF_TORCH
        for steps in ("", "_cell")
        for suffix in ("", "_forward")
    },
    **{
        f"{name}_cell_backward": ("gates", "old_cell" if cell.carried else "old_h")
        for name, cell in OF_TORCH.items()
    },
    **{
        f"{name}_backward": ("gates", "cells" if cell.carried else "output")
        for name, cell in OF_TORCH.items()
    },
}
OTHER_PAIRS = {  # and the tensors that are compared with another one
    **{
        (f"{cell}{steps}_backward", f"grad_{state}"): like
        for cell in CARRYING
        for steps, state, like in (
            ("_cell", "h", "old_cell"),
            ("_cell", "cell", "old_cell"),
            ("", "h_n", "c0"),
            ("", "c_n", "c0"),
        )
    },
    **{(f"{cell}_cell_backward", "grad_h"): "old_h" for cell in PLAIN},
    **{(f"{cell}_backward", "grad_h_n"): "h0" for cell in PLAIN},
}
# Their dtype is that of the result, or makes it.
OPERANDS = {("gemm", "b"), ("gemm.out", "b"), ("linear", "weight")}
OF_THE_RESULT = {("gemm.out", "out"), ("linear", "bias"), ("linear", "residual")}
OWN_DTYPE = {("custom_add", "b"), ("linear", "packed"), ("recurrent_weights_backward", "reset")}
OWN_DTYPE |= {(f"{cell}_backward", "cells") for cell in CARRYING}
OWN_DTYPE |= {
    (f"{cell}{suffix}", mask)
    for cell in ("lltm", *OF_TORCH)
    for suffix in ("", "_forward", "_backward")
    for mask in MASKS
}

CELLS, LAYERS = "lltm_cell lltm_cell_forward", "lltm lltm_forward"
ALL_CELLS = " ".join([CELLS, *(f"{cell}_cell {cell}_cell_forward" for cell in OF_TORCH)])
ALL_LAYERS = " ".join([LAYERS, *(f"{cell} {cell}_forward" for cell in OF_TORCH)])
LAYERS_BACKWARD = " ".join(f"{cell}_backward" for cell in ("lltm", *OF_TORCH))
FLOATING = "must be of dtype float64, float32, float16 or bfloat16, got {got}"
REAL = "must have a real floating or integer dtype, got {got}"
ONE_ADDRESS = "out must not hold two elements at one address, got strides {got}"
INT32 = "height + width - 2 must fit int32, got height"
ATTENTIONS = "attention attention_forward attention_backward"
NOT_FLOATING = [torch.int32, torch.complex128]
NOT_REAL = [torch.bool, torch.complex64, torch.float8_e5m2]

# Ops, an argument, wrong shapes, dtypes or values for it, and the message without the op's name.
WRONG_ARGUMENT: list[tuple[str, str, list[Any], str]] = [
    ("add_one", "x", NOT_REAL, f"x {REAL}"),
    *[("custom_add", name, NOT_REAL, f"{name} {REAL}") for name in "ab"],
    *[(op, *RIGHT[op], NOT_FLOATING, f"{{name}} {FLOATING}") for op in UNARY if op != "add_one"],
    *[(op, list(RIGHT[op])[1], NOT_FLOATING, f"{{name}} {FLOATING}") for op in UNARY_BACKWARD],
    ("gemm gemm.out", "a", NOT_FLOATING, f"a {FLOATING}"),
    ("linear", "x", NOT_FLOATING, f"x {FLOATING}"),
    (ATTENTIONS, "query", NOT_FLOATING, f"query {FLOATING}"),
    (
        ATTENTIONS,
        "query",
        [(3, 5, 4), (1, 2, 3, 5, 4)],
        "query must be (batch, heads, queries, size), got {got}",
    ),
    (
        ATTENTIONS,
        "key",
        [(3, 7, 4), (1, 3, 7, 4), (2, 1, 7, 4), (2, 3, 7, 5)],
        "key must be (batch, heads, keys, size) = (2, 3, 7, 4), got {got}",
    ),
    (
        ATTENTIONS,
        "value",
        [(3, 7, 6), (1, 3, 7, 6), (2, 1, 7, 6), (2, 3, 6, 6)],
        "value must be (batch, heads, keys, size) = (2, 3, 7, 6), got {got}",
    ),
    *[
        (
            "attention_backward",
            name,
            [(3, 5, 6), (1, 3, 5, 6), (2, 3, 4, 6), (2, 3, 5, 4)],
            f"{name} must be (batch, heads, queries, size) = (2, 3, 5, 6), got {{got}}",
        )
        for name in ("grad", "out")
    ],
    (
        ATTENTIONS,
        "bias",
        [(5, 7), (2, 2, 5, 7), (3, 1, 5, 7), (2, 1, 4, 7), (2, 1, 5, 6)],
        "bias must broadcast to (batch, heads, queries, keys) = (2, 3, 5, 7), got {got}",
    ),
    (ATTENTIONS, "is_causal", [True], "is_causal must be False with a bias"),
    ("attention_backward", "bias", [None], "needs_bias must be False without a bias"),
    ("prepack", "weight", NOT_FLOATING, f"weight {FLOATING}"),
    (f"{ALL_CELLS} {ALL_LAYERS}", "input", NOT_FLOATING, f"input {FLOATING}"),
    *[
        (f"{cell}_cell_backward {cell}_backward", "gates", NOT_FLOATING, f"gates {FLOATING}")
        for cell in ("lltm", *OF_TORCH)
    ],
    (
        "custom_add",
        "b",
        [(2, 4), (3, 3), (4,), (2, 1, 3, 3)],
        "b must broadcast with a (equal sizes, or 1), got (2, 3) and {got}",
    ),
    *[
        (
            op,
            grad,
            [(3,), (2, 3, 1), ()],
            f"{grad} must have the shape of {x}, got {{got}} and (2, 3)",
        )
        for op in UNARY_BACKWARD
        for grad, x in [RIGHT[op]]
    ],
    ("fill_index", "height", [-1], "height must not be negative, got {got}"),
    ("fill_index", "width", [-1], "width must not be negative, got {got}"),
    ("fill_index", "dtype", [torch.int16], "dtype must be floating, int32 or int64, got {got}"),
    ("fill_index.out", "out", [torch.bool], "dtype must be floating, int32 or int64, got {got}"),
    ("fill_index.out", "out", [(2,), (1, 2, 3)], "out must be (height, width), got {got}"),
    (
        "fill_index.out",
        "out",
        [T((1, (1 << 31) + 1), torch.int32, strides=(0, 0))],
        f"{INT32} 1 and width 2147483649",
    ),
    ("fill_index.out", "out", [T((2, 3), strides=(0, 1))], f"{ONE_ADDRESS} for shape (2, 3)"),
    (
        "gemm gemm.out",
        "a",
        [(), (3,), (1, 1, 2, 3)],
        "a must be (m, k) or (batch, m, k), got {got}",
    ),
    (
        "gemm gemm.out",
        "b",
        [(), (3,), (1, 1, 3, 4)],
        "b must be (k, n) or (batch, k, n), got {got}",
    ),
    (
        "gemm gemm.out",
        "b",
        [(4, 3), (1, 4), (2, 2, 4)],
        "b must have k = 3 rows, the columns of a, got (2, 3) and {got}",
    ),
    (
        "gemm gemm.out linear",
        "precision",
        ["medium", ""],
        "precision must be highest, high or tf32, got '{got}'",
    ),
    ("gemm.out", "out", [(4, 2), (1, 2, 4), (8,), ()], "out must be of shape (2, 4), got {got}"),
    ("gemm.out", "out", [T((2, 4), strides=(3, 1))], f"{ONE_ADDRESS} for shape (2, 4)"),
    ("linear", "x", [()], "x must have at least one dimension, got {got}"),
    (
        "linear",
        "weight",
        [(3,), (1, 4, 3)],
        "weight must be (out_features, in_features), got {got}",
    ),
    (
        "linear",
        "weight",
        [(4, 5), (4, 1)],
        "weight must have in_features = 3, the last dimension of x, got (2, 5, 3) and {got}",
    ),
    ("linear", "bias", [(7,), (1,), (), (1, 4)], "bias must be (out_features,) = (4,), got {got}"),
    (
        "linear",
        "residual",
        [(4,), (2, 5, 1), (10, 4)],
        "residual must be of the shape of the output = (2, 5, 4), got {got}",
    ),
    (
        "linear",
        "activation",
        ["bogus", "", "ReLU"],
        "activation must be none, relu, gelu, gelu_tanh, silu or sigmoid, got '{got}'",
    ),
    (
        "linear",
        "packed",
        [(1, 0)],
        "packed must be what prepack made of weight, got {got} of uint8",
    ),
    (
        "linear",
        "packed",
        [torch.float32],
        "packed must be what prepack made of weight, got (0,) of {got}",
    ),
    ("prepack", "weight", [(3,)], "weight must be (out_features, in_features), got {got}"),
    (ALL_CELLS, "input", [(3,), (1, 2, 3)], "input must be (batch, input_size), got {got}"),
    (
        ALL_LAYERS,
        "input",
        [(2, 3), (1, 5, 2, 3)],
        "input must be (steps, batch, input_size), got {got}",
    ),
    *[
        (ops, h, [(4,), (1, 2, 4)], f"{h} must be (batch, hidden_size), got {{got}}")
        for ops, h in ((ALL_CELLS, "old_h"), (ALL_LAYERS, "h0"))
    ],
    *[
        (ops, name, [(3, 4)], f"{name} must be (batch, hidden_size) = (2, 4), got {{got}}")
        for ops, name in (
            (ALL_CELLS, "old_h"),
            (" ".join(f"{cell}_cell {cell}_cell_forward" for cell in CARRYING), "old_cell"),
            (ALL_LAYERS, "h0"),
            (f"{LAYERS} lstm lstm_forward", "c0"),
        )
    ],
    # The parameters agree with each other, so they are right.
    *[
        (ops, name, [(2, 5), (2, 3)], f"{name} must be (batch, hidden_size) = (2, 4), got {{got}}")
        for ops, name in (
            (ALL_CELLS, "old_h"),
            (" ".join(f"{cell}_cell {cell}_cell_forward" for cell in CARRYING), "old_cell"),
            (ALL_LAYERS, "h0"),
            (" ".join(f"{cell} {cell}_forward" for cell in CARRYING), "c0"),
        )
    ],
    (ALL_CELLS, "input", [(2, 4)], "input must be (batch, input_size) = (2, 3), got {got}"),
    (
        ALL_LAYERS,
        "input",
        [(5, 2, 2)],
        "input must be (steps, batch, input_size) = (5, 2, 3), got {got}",
    ),
    (
        "lltm lltm_forward lltm_backward",
        "c0",
        [(2, 5), (4,)],
        "c0 must be (batch, hidden_size) = (2, 4), got {got}",
    ),
    (
        f"{CELLS} {LAYERS}",
        "weights",
        [(7, 12), (12, 3), (12,)],
        "weights must be (3 * hidden_size, hidden_size + input_size) = (12, 7), got {got}",
    ),
    (
        f"{CELLS} {LAYERS}",
        "bias",
        [(13,), (), (1,), (2, 12), (12, 1), (1, 1, 12)],
        "bias must be (3 * hidden_size,) or (1, 3 * hidden_size) = (12,), got {got}",
    ),
    ("recurrent_weights_backward", "grad_gates", NOT_FLOATING, f"grad_gates {FLOATING}"),
    *WRONG_WEIGHTS_BACKWARD,
    *[
        (ops, name, [torch.int32, torch.float32], f"{name} must be of dtype {dtype}, got {{got}}")
        for ops, name, dtype in (
            (f"{ALL_LAYERS} {LAYERS_BACKWARD}", "lengths", "int64"),
            (f"{ALL_LAYERS} {LAYERS_BACKWARD} recurrent_weights_backward", "reset", "bool"),
        )
    ],
    (
        f"{ALL_LAYERS} {LAYERS_BACKWARD}",
        "lengths",
        [(3,), (), (2, 1)],
        "lengths must be (batch,) = (2,), got {got}",
    ),
    (
        f"{ALL_LAYERS} {LAYERS_BACKWARD} recurrent_weights_backward",
        "reset",
        [(2, 5), (5,), (), (5, 2, 1), (4, 2)],
        "reset must be (steps, batch) = (5, 2), got {got}",
    ),
    (
        f"{ALL_LAYERS} {LAYERS_BACKWARD}",
        "zoneout",
        [(5, 2), (2, 5, 4), (5, 2, 1), (4, 2, 4), ()],
        "zoneout must be (steps, batch, hidden_size) = (5, 2, 4), got {got}",
    ),
    *[wrong for cell in OF_TORCH.values() for wrong in wrong_of_torch(cell)],
    ("lltm_cell_backward", "old_cell", [(4,)], "old_cell must be (batch, hidden_size), got {got}"),
    (
        "lltm_cell_backward",
        "gates",
        [(2, 4), (1, 12), (2, 12, 1)],
        "gates must be (batch, 3 * hidden_size) = (2, 12), got {got}",
    ),
    *[
        (
            "lltm_cell_backward",
            name,
            [(4,), (2, 5)],
            f"{name} must have the shape of old_cell, got {{got}} and (2, 4)",
        )
        for name in ("grad_h", "grad_cell")
    ],
    (
        "lltm_backward",
        "cells",
        [(2, 4), (5, 2, 4, 1)],
        "cells must be (steps, batch, hidden_size), got {got}",
    ),
    (
        "lltm_backward lstm_backward",
        "cells",
        [torch.float64, torch.float16],
        "cells must have the dtype of gates, got {got} and float32",
    ),
    (
        "lltm_backward",
        "gates",
        [(5, 2, 4), (4, 2, 12)],
        "gates must be (steps, batch, 3 * hidden_size) = (5, 2, 12), got {got}",
    ),
    (
        "lltm_backward",
        "weights",
        [(12,), (11, 7), (12, 3)],
        "weights must be (3 * hidden_size, hidden_size + input_size) with hidden_size = 4, "
        "got {got}",
    ),
    (
        "lltm_backward",
        "grad_output",
        [(2, 4)],
        "grad_output must have the shape of cells, got {got} and (5, 2, 4)",
    ),
    *[
        (
            "lltm_backward",
            name,
            [(1, 4)],
            f"{name} must have the shape of c0, got {{got}} and (2, 4)",
        )
        for name in ("grad_h_n", "grad_c_n")
    ],
]

OR_MIXED = "or one must be float32 and the other float16 or bfloat16"
LINEAR_PAIR = ("linear", *PAIRS["linear"])


def said(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def in_dtype(op: str, name: str, dtype: torch.dtype) -> Any:
    return replace(RIGHT[op][name], dtype=dtype)


WRONG_TOGETHER: list[tuple[str, dict[str, Any], str]] = [
    (
        "custom_add",
        {"a": T((3,), torch.uint16), "b": T((3,), torch.int8)},
        "b must have a dtype that torch promotes with that of a, got int8 and uint16",
    ),
    *[  # a bias that disagrees with the weights: the states say what fits
        (
            op,
            {"bias": T((15,)), h: T((2, 5)), c: T((2, 5))},
            "weights must be (3 * hidden_size, hidden_size + input_size) = (15, 8), got (12, 7)",
        )
        for op, h, c in (("lltm_cell", "old_h", "old_cell"), ("lltm", "h0", "c0"))
    ],
    (
        "fill_index",
        {"height": 1 << 31, "width": 2, "dtype": torch.int32},
        f"{INT32} 2147483648 and width 2",
    ),
    *[
        (
            op,
            {"a": T((2, 2, 3)), "b": T((3, 3, 4))},
            "the batch of b must equal that of a, or one must be 1, got (2, 2, 3) and (3, 3, 4)",
        )
        for op in ("gemm", "gemm.out")
    ],
    *[
        (
            op,
            {first: in_dtype(op, first, dtype), second: in_dtype(op, second, other)},
            f"{second} must have the dtype of {first}, {OR_MIXED}, got {said(other)} and "
            f"{said(dtype)}",
        )
        for op, first, second in (("gemm", "a", "b"), ("gemm.out", "a", "b"), LINEAR_PAIR)
        for dtype, other in (
            (torch.float16, torch.bfloat16),
            (torch.bfloat16, torch.float16),
            (torch.float64, torch.bfloat16),
            (torch.float16, torch.float64),
        )
    ],
    *[
        (
            op,
            {operand: in_dtype(op, operand, torch.bfloat16), name: in_dtype(op, name, dtype)},
            f"{name} must have the dtype of the result, got {said(dtype)} and float32",
        )
        for op, name in sorted(OF_THE_RESULT)
        for operand in PAIRS[op]
        for dtype in (torch.bfloat16, torch.float16, torch.float64)
    ],
]


def _wrong_argument():
    for ops, name, values, message in WRONG_ARGUMENT:
        for op in ops.split():
            for value in values:
                right, got = RIGHT[op].get(name), value
                if isinstance(value, torch.dtype):
                    got = said(value)
                    value = replace(right, dtype=value) if isinstance(right, T) else value
                elif isinstance(value, tuple):
                    value = T(value, right.dtype)
                elif isinstance(value, T):
                    got = value.strides
                yield op, {name: value}, message.format(name=name, got=got)


def _wrong_beside_the_others():
    """Each tensor on another device, with another dtype, or None."""
    for op, (anchor, first) in PAIRS.items():
        needed = {a.name for a in overload(op)._schema.arguments if str(a.type) == "Tensor"}
        for name, t in RIGHT[op].items():
            if not isinstance(t, T):
                continue
            like = OTHER_PAIRS.get((op, name), anchor)
            places = f"{name} must be on the device of {like}, got {{elsewhere}} and {{here}}"
            if name == anchor:
                places = f"{first} must be on the device of {like}, got {{here}} and {{elsewhere}}"
            yield op, {name: replace(t, elsewhere=True)}, places
            if name != anchor and (op, name) not in OWN_DTYPE:
                rule = f"the dtype of {'the result' if (op, name) in OF_THE_RESULT else like}"
                if (op, name) in OPERANDS:
                    rule += f", {OR_MIXED}"
                message = f"{name} must have {rule}, got float64 and float32"
                yield op, {name: replace(t, dtype=torch.float64)}, message
            if name in needed:
                yield op, {name: None}, f"{name} must be a tensor, got None"


def _said(op: str) -> str:
    """The name of an op in its messages, which is that of the public function."""
    return op.removesuffix(".out").removesuffix("_forward")


# An op, its wrong arguments, and the message, with {here} and {elsewhere} for devices.
WRONG = [
    (op, change, f"{_said(op)}: {message}")
    for op, change, message in (*_wrong_argument(), *_wrong_beside_the_others(), *WRONG_TOGETHER)
]
