"""What the fake kernels say of every op of torch.ops.my_ops is what the kernels do.

Wrong arguments: kernels, fake and meta tensors, a recorded gradient and torch.export refuse them in
the same words. Others: shapes, strides and dtypes of the results are the same.
"""

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import FLOATING, arithmetic
from strided import build, check_metadata, layouts, metadata
from torch._subclasses.fake_tensor import FakeTensorMode

import my_ops

STEPS, BATCH, INPUTS, HIDDEN = 5, 2, 3, 4


class T(NamedTuple):
    """A tensor to be made on the device of the test, or on another."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    elsewhere: bool = False
    strides: tuple[int, ...] | None = None

    def make(self, here: str, elsewhere: str) -> torch.Tensor:
        device = elsewhere if self.elsewhere else here
        if self.strides is not None:
            return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)
        return torch.zeros(self.shape, dtype=self.dtype, device=device)


STATE = T((BATCH, HIDDEN))
GATES = T((BATCH, 3 * HIDDEN))
WEIGHTS, BIAS = T((3 * HIDDEN, HIDDEN + INPUTS)), T((3 * HIDDEN,))
LENGTHS = T((BATCH,), torch.int64)
CELL = {"input": T((BATCH, INPUTS)), "weights": WEIGHTS, "bias": BIAS}
CELL |= {"old_h": STATE, "old_cell": STATE}
LAYER = {"input": T((STEPS, BATCH, INPUTS)), "h0": STATE, "c0": STATE}
LAYER |= {"weights": WEIGHTS, "bias": BIAS, "lengths": LENGTHS}
PRODUCT = {"a": T((2, 3)), "b": T((3, 4))}

RIGHT: dict[str, dict[str, Any]] = {
    "add_one": {"x": T((2, 3))},
    "custom_add": {"a": T((2, 3)), "b": T((2, 3))},
    "d_sigmoid": {"z": T((2, 3))},
    "d_sigmoid_backward": {"grad": T((2, 3)), "z": T((2, 3))},
    "round_ste": {"x": T((2, 3))},
    "fill_index": {"height": 2, "width": 3},
    "fill_index.out": {"out": T((2, 3))},
    "gemm": {**PRODUCT, "precision": "high"},
    "gemm.out": {**PRODUCT, "out": T((2, 4)), "precision": "tf32"},
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
    "lltm_cell": CELL,
    "lltm_cell_forward": CELL,
    "lltm_cell_backward": {"grad_h": STATE, "grad_cell": STATE, "gates": GATES, "old_cell": STATE},
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
        "lengths": LENGTHS,
    },
}

# Of each op, the tensor that the others are compared with, and the first of these.
PAIRS = {
    "custom_add": ("a", "b"),
    "d_sigmoid_backward": ("z", "grad"),
    "gemm": ("a", "b"),
    "gemm.out": ("a", "b"),
    "linear": ("x", "weight"),
    "lltm_cell": ("input", "weights"),
    "lltm_cell_forward": ("input", "weights"),
    "lltm_cell_backward": ("gates", "old_cell"),
    "lltm": ("input", "weights"),
    "lltm_forward": ("input", "weights"),
    "lltm_backward": ("gates", "cells"),
}
OTHER_PAIRS = {  # and the tensors that are compared with another
    ("lltm_cell_backward", "grad_h"): "old_cell",
    ("lltm_cell_backward", "grad_cell"): "old_cell",
    ("lltm_backward", "grad_h_n"): "c0",
    ("lltm_backward", "grad_c_n"): "c0",
}
OWN_DTYPE = {"lengths", "packed", "cells"}
NEEDED = {"linear": {"x", "weight"}, "lltm_backward": {"gates", "cells", "c0", "weights"}}
NEEDED |= {"lltm_cell_backward": {"gates", "old_cell"}}


def said(op: str) -> str:
    """The name of an op in its messages: that of the public function."""
    return op.removesuffix(".out").removesuffix("_forward")


def wrong_devices_dtypes_and_none():
    for op, right in RIGHT.items():
        tensors = {name: t for name, t in right.items() if isinstance(t, T)}
        anchor, first = PAIRS.get(op, (None, None))
        for name, t in tensors.items():
            like = OTHER_PAIRS.get((op, name), anchor)
            if anchor is not None:
                rule = "must be on the device of"
                message = f"{name} {rule} {like}, got {{elsewhere}} and {{here}}"
                if name == anchor:
                    message = f"{first} {rule} {anchor}, got {{here}} and {{elsewhere}}"
                yield op, {name: t._replace(elsewhere=True)}, message
            if anchor not in (None, name) and name not in OWN_DTYPE and op != "custom_add":
                message = f"{name} must have the dtype of {like}, got float64 and float32"
                yield op, {name: t._replace(dtype=torch.float64)}, message
            if anchor is not None and name != "lengths" and name in NEEDED.get(op, tensors):
                yield op, {name: None}, f"{name} must be a tensor, got None"


def wrong_elsewise():
    yield (
        "add_one",
        {"x": T((2,), torch.bool)},
        ("x must have a real floating or integer dtype, got bool"),
    )
    for dtype in (torch.bool, torch.complex64, torch.float8_e5m2):
        shown = str(dtype).removeprefix("torch.")
        for name in ("a", "b"):
            yield (
                "custom_add",
                {name: T((2, 3), dtype)},
                (f"{name} must have a real floating or integer dtype, got {shown}"),
            )
    yield (
        "custom_add",
        {"a": T((3,), torch.uint16), "b": T((3,), torch.int8)},
        ("b must have a dtype that torch promotes with that of a, got int8 and uint16"),
    )
    for shape in ((2, 4), (3, 3), (4,), (2, 1, 3, 3)):
        yield (
            "custom_add",
            {"b": T(shape)},
            (f"b must broadcast with a (equal sizes, or 1), got (2, 3) and {shape}"),
        )
    for op, name in (
        ("d_sigmoid", "z"),
        ("round_ste", "x"),
        ("d_sigmoid_backward", "z"),
        ("gemm", "a"),
        ("gemm.out", "a"),
        ("linear", "x"),
        ("prepack", "weight"),
        ("lltm_cell", "input"),
        ("lltm_cell_forward", "input"),
        ("lltm_cell_backward", "gates"),
        ("lltm", "input"),
        ("lltm_forward", "input"),
        ("lltm_backward", "gates"),
    ):
        for dtype, shown in ((torch.int32, "int32"), (torch.complex128, "complex128")):
            yield (
                op,
                {name: RIGHT[op][name]._replace(dtype=dtype)},
                (f"{name} must be of dtype float64, float32, float16 or bfloat16, got {shown}"),
            )
    for shape in ((3,), (2, 3, 1), ()):
        yield (
            "d_sigmoid_backward",
            {"grad": T(shape)},
            (f"grad must have the shape of z, got {shape} and (2, 3)"),
        )

    for name in ("height", "width"):
        yield "fill_index", {name: -1}, f"{name} must not be negative, got -1"
    yield (
        "fill_index",
        {"dtype": torch.int16},
        ("dtype must be floating, int32 or int64, got int16"),
    )
    yield (
        "fill_index",
        {"height": 1 << 31, "width": 2, "dtype": torch.int32},
        ("height + width - 2 must fit int32, got height 2147483648 and width 2"),
    )
    yield "fill_index.out", {"out": T((2,))}, "out must be (height, width), got (2,)"
    yield (
        "fill_index.out",
        {"out": T((2, 3), torch.bool)},
        ("dtype must be floating, int32 or int64, got bool"),
    )
    yield (
        "fill_index.out",
        {"out": T((1, (1 << 31) + 1), torch.int32, strides=(0, 0))},
        ("height + width - 2 must fit int32, got height 1 and width 2147483649"),
    )
    yield (
        "fill_index.out",
        {"out": T((2, 3), strides=(0, 1))},
        ("out must not hold two elements at one address, got strides (0, 1) for shape (2, 3)"),
    )

    for op in ("gemm", "gemm.out"):
        for shape in ((), (3,), (1, 1, 2, 3)):
            yield op, {"a": T(shape)}, f"a must be (m, k) or (batch, m, k), got {shape}"
        for shape in ((), (3,), (1, 1, 3, 4)):
            yield op, {"b": T(shape)}, f"b must be (k, n) or (batch, k, n), got {shape}"
        for shape in ((4, 3), (1, 4), (2, 2, 4)):
            yield (
                op,
                {"b": T(shape)},
                (f"b must have k = 3 rows, the columns of a, got (2, 3) and {shape}"),
            )
        yield (
            op,
            {"a": T((2, 2, 3)), "b": T((3, 3, 4))},
            ("the batch of b must be that of a, or either 1, got (2, 2, 3) and (3, 3, 4)"),
        )
        for precision in ("medium", ""):
            yield (
                op,
                {"precision": precision},
                (f"precision must be highest, high or tf32, got '{precision}'"),
            )
    for shape in ((4, 2), (1, 2, 4), (8,), ()):
        yield "gemm.out", {"out": T(shape)}, f"out must be of shape (2, 4), got {shape}"
    yield (
        "gemm.out",
        {"out": T((2, 4), strides=(3, 1))},
        ("out must not hold two elements at one address, got strides (3, 1) for shape (2, 4)"),
    )

    yield "linear", {"x": T(())}, "x must have at least one dimension, got ()"
    for shape in ((3,), (1, 4, 3)):
        yield (
            "linear",
            {"weight": T(shape)},
            (f"weight must be (out_features, in_features), got {shape}"),
        )
    for shape in ((4, 5), (4, 1)):
        yield (
            "linear",
            {"weight": T(shape)},
            (
                "weight must have in_features = 3, the last dimension of x, "
                f"got (2, 5, 3) and {shape}"
            ),
        )
    for shape in ((7,), (1,), (), (1, 4)):
        yield "linear", {"bias": T(shape)}, f"bias must be (out_features,) = (4,), got {shape}"
    for shape in ((4,), (2, 5, 1), (10, 4)):
        yield (
            "linear",
            {"residual": T(shape)},
            (f"residual must be of the shape of the output = (2, 5, 4), got {shape}"),
        )
    for activation in ("bogus", "", "ReLU"):
        yield (
            "linear",
            {"activation": activation},
            (
                "activation must be none, relu, gelu, gelu_tanh, silu or sigmoid, "
                f"got '{activation}'"
            ),
        )
    yield "linear", {"precision": "bogus"}, ("precision must be highest, high or tf32, got 'bogus'")
    for packed, shown in (
        (T((3,)), "(3,) of float32"),
        (T((1, 0), torch.uint8), "(1, 0) of uint8"),
    ):
        yield (
            "linear",
            {"packed": packed},
            (f"packed must be what prepack made of weight, got {shown}"),
        )
    yield "prepack", {"weight": T((3,))}, "weight must be (out_features, in_features), got (3,)"

    for op in ("lltm_cell", "lltm_cell_forward", "lltm", "lltm_forward"):
        h, c = ("old_h", "old_cell") if "cell" in op else ("h0", "c0")
        rule, right = ("(batch, input_size)", (2, 3))
        if h == "h0":
            rule, right = ("(steps, batch, input_size)", (5, 2, 3))
        for shape in (right[1:], (1, *right)):
            yield op, {"input": T(shape)}, f"input must be {rule}, got {shape}"
        for shape in ((4,), (1, 2, 4)):
            yield op, {h: T(shape)}, f"{h} must be (batch, hidden_size), got {shape}"
        yield op, {h: T((3, 4))}, f"{h} must be (batch, hidden_size) = (2, 4), got (3, 4)"
        for shape in ((2, 5), (4,)):
            yield op, {c: T(shape)}, f"{c} must be (batch, hidden_size) = (2, 4), got {shape}"
        for shape in ((7, 12), (12, 8), (12,)):
            yield (
                op,
                {"weights": T(shape)},
                (
                    "weights must be (3 * hidden_size, hidden_size + input_size) = (12, 7), "
                    f"got {shape}"
                ),
            )
        for shape in ((13,), (), (1,), (2, 12), (12, 1), (1, 1, 12)):
            yield (
                op,
                {"bias": T(shape)},
                (f"bias must be (3 * hidden_size,) or (1, 3 * hidden_size) = (12,), got {shape}"),
            )
    for op in ("lltm", "lltm_forward", "lltm_backward"):
        for dtype, shown in ((torch.int32, "int32"), (torch.float32, "float32")):
            yield op, {"lengths": T((2,), dtype)}, f"lengths must be of dtype int64, got {shown}"
        for shape in ((3,), (), (2, 1)):
            yield (
                op,
                {"lengths": T(shape, torch.int64)},
                (f"lengths must be (batch,) = (2,), got {shape}"),
            )

    yield (
        "lltm_cell_backward",
        {"old_cell": T((4,))},
        ("old_cell must be (batch, hidden_size), got (4,)"),
    )
    for shape in ((2, 4), (1, 12), (2, 12, 1)):
        yield (
            "lltm_cell_backward",
            {"gates": T(shape)},
            (f"gates must be (batch, 3 * hidden_size) = (2, 12), got {shape}"),
        )
    for name in ("grad_h", "grad_cell"):
        for shape in ((4,), (2, 5)):
            yield (
                "lltm_cell_backward",
                {name: T(shape)},
                (f"{name} must have the shape of old_cell, got {shape} and (2, 4)"),
            )
    for shape in ((2, 4), (5, 2, 4, 1)):
        yield (
            "lltm_backward",
            {"cells": T(shape)},
            (f"cells must be (steps, batch, hidden_size), got {shape}"),
        )
    yield (
        "lltm_backward",
        {"cells": T((5, 2, 4), torch.float64)},
        ("cells must be float32, or float64 where gates are, got float64"),
    )
    for shape in ((5, 2, 4), (4, 2, 12)):
        yield (
            "lltm_backward",
            {"gates": T(shape)},
            (f"gates must be (steps, batch, 3 * hidden_size) = (5, 2, 12), got {shape}"),
        )
    yield (
        "lltm_backward",
        {"c0": T((4, 2))},
        ("c0 must be (batch, hidden_size) = (2, 4), got (4, 2)"),
    )
    for shape in ((12,), (11, 7), (12, 3)):
        yield (
            "lltm_backward",
            {"weights": T(shape)},
            (
                "weights must be (3 * hidden_size, hidden_size + input_size) with hidden_size = 4, "
                f"got {shape}"
            ),
        )
    yield (
        "lltm_backward",
        {"grad_output": T((2, 4))},
        ("grad_output must have the shape of cells, got (2, 4) and (5, 2, 4)"),
    )
    for name in ("grad_h_n", "grad_c_n"):
        yield (
            "lltm_backward",
            {name: T((1, 4))},
            (f"{name} must have the shape of c0, got (1, 4) and (2, 4)"),
        )


def overload(op):
    name, _, kind = op.partition(".")
    return getattr(getattr(torch.ops.my_ops, name), kind or "default")


def made(op, change, here, elsewhere):
    arguments = RIGHT[op] | change
    if op == "fill_index":
        arguments = arguments | {"device": torch.device(here)}
    return {
        name: value.make(here, elsewhere) if isinstance(value, T) else value
        for name, value in arguments.items()
    }


def other(device):
    return "cpu" if device == "cuda" else "meta"


def run_real(op, change, device):
    overload(op)(**made(op, change, device, other(device)))


def run_recorded(op, change, device):
    arguments = made(op, change, device, other(device))
    for value in arguments.values():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            value.requires_grad_()
    overload(op)(**arguments)


def run_fake(op, change, device):
    with FakeTensorMode():
        overload(op)(**made(op, change, device, other(device)))


def run_meta(op, change, device):
    overload(op)(**made(op, change, "meta", device))


def run_exported(op, change, device):
    arguments = made(op, change, device, other(device))
    tensors = {name: v for name, v in arguments.items() if isinstance(v, torch.Tensor)}
    others = {name: v for name, v in arguments.items() if name not in tensors}

    class Call(torch.nn.Module):
        def forward(self, **tensors):
            return overload(op)(**tensors, **others)

    torch.export.export(Call(), (), tensors)


RUNS = [run_real, run_recorded, run_fake, run_meta, run_exported]
CASES = [
    pytest.param(run, op, change, message, id=f"{run.__name__}-{op}-{'-'.join(change)}-{i}")
    for i, (op, change, message) in enumerate([*wrong_devices_dtypes_and_none(), *wrong_elsewise()])
    for run in RUNS
    if run is not run_recorded or not op.endswith(".out")  # which is refused for the gradient
]


@pytest.mark.parametrize("run, op, change, message", CASES)
def test_refused(run, op, change, message, device):
    here = str(torch.zeros(0, device=device).device)
    here, elsewhere = ("meta", here) if run is run_meta else (here, other(device))
    message = f"{said(op)}: {message.format(here=here, elsewhere=elsewhere)}"
    with pytest.raises(RuntimeError) as caught:
        run(op, change, device)
    if run is run_exported:  # which adds where
        assert message in str(caught.value)
    else:
        assert str(caught.value) == message


KINDS = {
    "sparse": lambda t: t.to_sparse(),
    "sparse-csr": lambda t: t.reshape(t.numel(), 1).to_sparse_csr(),
    "quantized": lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8),
    "nested": lambda t: torch.nested.nested_tensor([t, t]),
    "jagged": lambda t: torch.nested.nested_tensor([t, t], layout=torch.jagged),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:.*nested", "ignore:.*quantize")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", [op for op in RIGHT if op != "fill_index"])
def test_other_kinds_of_tensors_have_no_kernel(op, kind, device):
    right = made(op, {}, device, device)
    for name, value in right.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            with pytest.raises(NotImplementedError, match=op.split(".")[0]):
                overload(op)(**(right | {name: KINDS[kind](value)}))


@pytest.mark.parametrize("op", [op for op in RIGHT if op not in ("fill_index", "prepack")])
@settings(max_examples=30)
@given(data=st.data())
def test_metadata_in_any_layout(op, device, data):
    dtype = data.draw(st.sampled_from(FLOATING))
    arguments = made(op, {}, device, device)
    names = [name for name, value in arguments.items() if isinstance(value, torch.Tensor)]
    tensors = []
    for name in names:
        like = arguments[name]
        own = arithmetic(dtype) if name == "cells" else dtype
        layout = data.draw(layouts(like.shape, repeats=name != "out"))
        own = own if like.is_floating_point() else like.dtype
        tensors.append(build(like.shape, layout, own, device))

    def call(*values):
        result = overload(op)(**(arguments | dict(zip(names, values, strict=True))))
        return () if result is None else result

    results = check_metadata(call, tensors)
    metas = [
        torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in tensors
    ]
    assert metadata(call(*metas)) == metadata(results)


@pytest.mark.parametrize("dtype", FLOATING)
def test_opcheck_prepack(dtype, device):
    torch.library.opcheck(torch.ops.my_ops.prepack, (torch.ones(4, 3, dtype=dtype, device=device),))
    meta = torch.empty(4, 3, dtype=dtype, device="meta")
    assert metadata(torch.ops.my_ops.prepack(meta)) == [((0,), (1,), torch.uint8)]


def operands(n, device):
    """Of layouts for which the result's is not C's."""
    square, image = torch.randn(n, n, device=device), torch.randn(2, 3, n, n, device=device)
    channels_last = image.to(memory_format=torch.channels_last)
    return {
        "transposed-first": (square.t(), square),
        "transposed-second": (square, square.t()),
        "transposed-both": (square.t(), square.t()),
        "channels-last": (channels_last, channels_last),
        "channels-last-and-not": (channels_last, image),
        "permuted-and-row": (image.permute(2, 0, 3, 1), image[0, :, 0, 0]),
        "expanded-and-permuted": (square[0].expand(3, n, n), image[0].permute(0, 2, 1)),
        "mixed-dtypes": (square.t(), square.t().to(torch.int64)),
        "stepped": (image[..., ::2].mT, image[..., ::2].mT),
    }


def test_compiled_in_many_layouts(device):
    """Compiled code relies on the strides of the fake kernels."""

    def model(pairs):
        sums = [my_ops.custom_add(a, b) for a, b in pairs.values()]
        slopes = [torch.ops.my_ops.d_sigmoid_backward(a, b.to(a)) for a, b in pairs.values()
                  if a.shape == b.shape]  # fmt: skip
        return [s * 2 for s in (*sums, *slopes)]

    compiled = torch.compile(model, fullgraph=True)
    for n in (7, 9, 11):  # of sizes that stay, then of any
        pairs = operands(n, device)
        for got, want in zip(compiled(pairs), model(pairs), strict=True):
            assert torch.equal(got, want)
            assert got.stride() == want.stride()


@pytest.mark.parametrize("name", operands(3, "cpu"))
def test_opcheck_in_many_layouts(name, device):
    torch.library.opcheck(torch.ops.my_ops.custom_add, operands(3, device)[name])


class SizesOfData(torch.nn.Module):
    def forward(self, x, chosen, weight):
        rows = x[chosen]
        count = chosen.sum().item()
        torch._check(count >= 0)
        stack = x.new_ones(3, count, 4)
        return (
            my_ops.custom_add(rows, rows),
            my_ops.custom_add(rows, weight[0]),
            my_ops.custom_add(rows.t(), rows.t()),
            my_ops.custom_add(stack.transpose(0, 1), weight[0]),
            my_ops.d_sigmoid(stack.transpose(0, 2)),
            my_ops.gemm(rows, weight),
            my_ops.gemm(stack, weight.expand(3, 4, 4)),
            my_ops.linear(rows, weight, activation="gelu"),
            my_ops.fill_index(count, 3, device=x.device),
        )


def test_sizes_that_depend_on_data(device):
    x, weight = torch.randn(6, 4, device=device), torch.randn(4, 4, device=device)
    choices = [x[:, 0] > 0, x[:, 0] > 99, torch.arange(6, device=device) == 2]
    program = torch.export.export(SizesOfData(), (x, choices[0], weight)).module()
    for chosen in choices:
        want = SizesOfData()(x, chosen, weight)
        for got, exact in zip(program(x, chosen, weight), want, strict=True):
            assert torch.equal(got, exact)
