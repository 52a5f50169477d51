"""The fake kernels of torch.ops.my_ops agree with the real ones, for every op.

Kernels, fake and meta tensors, a recorded gradient and torch.export refuse wrong arguments with the
same words. For right ones, shapes, strides and dtypes of the results are the same.
"""

from uuid import uuid4

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import FLOATING, NO_INDUCTOR, OTHER_OPERAND
from strided import build, check_metadata, layouts, metadata
from torch._subclasses.fake_tensor import FakeTensorMode
from wrong_arguments import PAIRS, RIGHT, WRONG, T, overload

import my_ops
from my_ops import _inductor
from my_ops._private import inductor_tables
from my_ops.ops._common import UNARY, UNARY_BACKWARD


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


def map_over(op, arguments, names):
    """Calls an op under vmap, over a new dimension of these tensors."""

    def call(*tensors):
        return overload(op)(**(arguments | dict(zip(names, tensors, strict=True))))

    torch.vmap(call)(*(torch.stack([arguments[name]] * 2) for name in names))


def run_mapped(op, change, device):
    arguments = made(op, change, device, other(device))
    map_over(op, arguments, [n for n, v in arguments.items() if isinstance(v, torch.Tensor)])


def run_partly_mapped(op, change, device):
    arguments = made(op, change, device, other(device))
    map_over(op, arguments, [n for n, v in arguments.items() if isinstance(v, torch.Tensor)][:1])


def run_exported(op, change, device):
    arguments = made(op, change, device, other(device))
    tensors = {name: v for name, v in arguments.items() if isinstance(v, torch.Tensor)}
    others = {name: v for name, v in arguments.items() if name not in tensors}

    class Call(torch.nn.Module):
        def forward(self, **tensors):
            return overload(op)(**tensors, **others)

    torch.export.export(Call(), (), tensors)


def test_no_op_is_missing():
    names = {
        name.split("::")[1]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("my_ops::")
    }
    # Ops that take lists of tensors have tests of their own: tests/layers/test_plain.py.
    of_lists = {"recurrent_layers", "recurrent_layers_backward", "recurrent_step_backward"}
    # Of cells that a test has defined (tests/layers/test_own_cell.py), nn.RNN's (test_rnn.py) and
    # those of LSTM and GRU with heads (test_own_cell_kernels.py), with what these call, and of the
    # switch, once on (tests/integration/test_fast_fp32.py).
    others = ("cell_", "rnn_", "block_", "own_cell", "fast_fp32")
    later = {name for name in names if name.startswith(others)}
    assert names - of_lists - later - {"add_one.int"} == set(RIGHT)


RUNS = [run_real, run_recorded, run_fake, run_meta, run_mapped, run_partly_mapped, run_exported]
NOT_MAPPED = {"fill_index", "fill_index.out", "gemm.out", "prepack"}
NOT_MAPPED |= {*UNARY, *UNARY_BACKWARD}  # their messages have the shapes with that dimension
REFUSED: dict[tuple[str, str], list] = {}  # by op and the names of the arguments that are wrong
for op, change, message in WRONG:
    REFUSED.setdefault((op, "-".join(change)), []).append((change, message))


def not_refused(run, op, change, message, device):
    """What went wrong, or None: nothing."""
    here = str(torch.zeros(0, device=device).device)
    here, elsewhere = ("meta", here) if run is run_meta else (here, other(device))
    message = message.format(here=here, elsewhere=elsewhere)
    try:
        run(op, change, device)
    except Exception as error:
        said = str(error) if isinstance(error, RuntimeError) else repr(error)
    else:
        said = "no error"
    if said == message or (run is run_exported and message in said):  # which adds where
        return None
    return f"{run.__name__} of {change}:\n  {said}\nin place of\n  {message}"


@pytest.mark.parametrize("op, names", REFUSED)
def test_refused(op, names, device):
    """All wrong values of these arguments, however the op is called."""
    runs = [
        run
        for run in RUNS
        if run is not run_recorded or not op.endswith(".out")  # recording refuses these
        if op not in NOT_MAPPED or run not in (run_mapped, run_partly_mapped)
    ]
    found = [
        not_refused(run, op, change, message, device)
        for change, message in REFUSED[op, names]
        for run in runs
    ]
    assert not any(found), "\n".join(filter(None, found))


KINDS = {
    "sparse": lambda t: t.to_sparse(),
    "sparse-csr": lambda t: t.reshape(t.numel(), 1).to_sparse_csr(),
    "quantized": lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8),
    "nested": lambda t: torch.nested.nested_tensor([t, t]),
    "jagged": lambda t: torch.nested.nested_tensor([t, t], layout=torch.jagged),
}


@pytest.mark.parametrize("asked", ["cpu", "meta", "cuda:0"])
@pytest.mark.parametrize("default", ["cpu", "meta"])
def test_the_device_of_fill_index(default, asked):
    with FakeTensorMode(), torch.device(default):
        assert my_ops.fill_index(2, 3, device=asked).device == torch.device(asked)


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:.*nested", "ignore:.*quantize")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", [op for op in RIGHT if op != "fill_index"])
def test_other_kinds_of_tensors_have_no_kernel(op, kind, device):
    right = made(op, {}, device, device)
    for name, value in right.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            with pytest.raises(NotImplementedError, match=op.split(".")[0]):
                overload(op)(**(right | {name: KINDS[kind](value)}))


PRODUCTS = "gemm", "gemm.out", "linear"


@pytest.mark.slow
@pytest.mark.parametrize("op", [op for op in RIGHT if op not in ("fill_index", "prepack")])
@settings(max_examples=30)
@given(data=st.data())
def test_metadata_in_any_layout(op, device, data):
    dtype = data.draw(st.sampled_from(FLOATING))
    dtypes: dict[str, torch.dtype] = {}
    if op in PRODUCTS and dtype in OTHER_OPERAND and data.draw(st.booleans()):
        dtypes = dict.fromkeys(RIGHT[op], torch.float32) | dict(
            zip(PAIRS[op], (dtype, OTHER_OPERAND[dtype]), strict=True)
        )
    arguments = made(op, {}, device, device)
    names = [name for name, value in arguments.items() if isinstance(value, torch.Tensor)]
    tensors = []
    for name in names:
        like = arguments[name]
        layout = data.draw(layouts(like.shape, repeats=name != "out"))
        own = dtypes.get(name, dtype) if like.is_floating_point() else like.dtype
        tensors.append(build(like.shape, layout, own, device))

    def call(*values):
        result = overload(op)(**(arguments | dict(zip(names, values, strict=True))))
        return () if result is None else result

    results = check_metadata(call, tensors)
    metas = [
        torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in tensors
    ]
    assert metadata(call(*metas)) == metadata(results)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FLOATING)
def test_opcheck_prepack(dtype, device):
    torch.library.opcheck(torch.ops.my_ops.prepack, (torch.ones(4, 3, dtype=dtype, device=device),))
    meta = torch.empty(4, 3, dtype=dtype, device="meta")
    assert metadata(torch.ops.my_ops.prepack(meta)) == [((0,), (1,), torch.uint8)]


def operands(n, device):
    """Operands with layouts for which the result is not row-major."""
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


@pytest.mark.slow
@pytest.mark.skipif(**NO_INDUCTOR)
@pytest.mark.parametrize("opaque", [True, False])
def test_compiled_in_many_layouts(opaque, device, monkeypatch):
    """Compiled code relies on the strides of the fake kernels. Or it has ATen's operations instead
    of the op, which round differently."""
    _inductor.register_decompositions()
    if opaque:
        for table in inductor_tables():
            for op in ("custom_add", "d_sigmoid_backward"):
                monkeypatch.delitem(table, overload(op))
    limit = 0 if opaque else 2.0**-18  # four times the kernel's own error

    def model(pairs):
        sums = [my_ops.custom_add(a, b) for a, b in pairs.values()]
        slopes = [torch.ops.my_ops.d_sigmoid_backward(a, b.to(a)) for a, b in pairs.values()
                  if a.shape == b.shape]  # fmt: skip
        return [s * 2 for s in (*sums, *slopes)]

    compiled = torch.compile(model, fullgraph=True)
    with torch.compiler.config.patch(cache_key_tag=uuid4().hex):  # compiled again
        for n in (7, 9, 11):  # fixed sizes, then any size
            pairs = operands(n, device)
            for got, want in zip(compiled(pairs), model(pairs), strict=True):
                torch.testing.assert_close(got, want, rtol=limit, atol=0)
                assert got.stride() == want.stride()


@pytest.mark.slow
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


@pytest.mark.slow
def test_sizes_that_depend_on_data(device):
    x, weight = torch.randn(6, 4, device=device), torch.randn(4, 4, device=device)
    choices = [x[:, 0] > 0, x[:, 0] > 99, torch.arange(6, device=device) == 2]
    program = torch.export.export(SizesOfData(), (x, choices[0], weight)).module()
    for chosen in choices:
        want = SizesOfData()(x, chosen, weight)
        for got, exact in zip(program(x, chosen, weight), want, strict=True):
            assert torch.equal(got, exact)
