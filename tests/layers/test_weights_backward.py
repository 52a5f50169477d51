"""recurrent_weights_backward: the gradients of a layer's input and parameters, in one launch on
CUDA, and which calls take it."""

import contextlib

import pytest
import torch
from samples import CELL, FLOATING
from torch.utils._python_dispatch import TorchDispatchMode

import my_ops
from my_ops import _costs
from my_ops.recurrent import _weights_backward

op = torch.ops.my_ops.recurrent_weights_backward
LAYERS = {"lltm": my_ops.nn.LLTM, "lstm": my_ops.nn.LSTM, "gru": my_ops.nn.GRU}

# steps, batch, inputs, hidden: parts of tiles, slices of k, products on CUDA, no rows, no steps, no
# columns
SIZES = [(4, 3, 5, 7), (1, 1, 1, 1), (5, 13, 33, 65), (4, 16, 40, 96), (3, 70, 32, 32)]
SIZES += [
    (4, 16, 300, 512),
    (9, 40, 24, 33),
    (3, 100, 64, 128),
    (0, 3, 4, 5),
    (3, 0, 4, 5),
    (3, 2, 4, 0),
    (3, 2, 0, 4),
]
NAMES = ["grad_input", "grad_weight_x", "grad_weight_h", "grad_bias_x", "grad_bias_h"]

# Of an element, relative to the sum of its products' sizes, in units of eps: at most four times the
# largest seen, which is 0.9 in 16 bits, where the result is rounded once.
LIMIT = {torch.float64: 4, torch.float32: 4, torch.float16: 1, torch.bfloat16: 1}


def arguments(cell, sizes, dtype, device, with_reset):
    steps, batch, inputs, hidden = sizes
    shapes = [(steps, batch, cell.terms * hidden), (steps, batch, inputs), (batch, hidden)]
    shapes += [(steps, batch, hidden), (cell.gates * hidden, inputs)]
    tensors = [torch.randn(shape, dtype=torch.float64).to(device, dtype) for shape in shapes]
    reset = (torch.rand(steps, batch) < 0.3).to(device) if with_reset else None
    return *tensors, reset


def exact(cell, grad, x, h0, output, weight, reset):
    """The gradients in float64."""
    grad, x, h0, output, weight = (t.double() for t in (grad, x, h0, output, weight))
    before = torch.cat([h0.unsqueeze(0), output])[:-1]
    if reset is not None:
        before = before.masked_fill(reset.unsqueeze(2), 0.0)
    of_x, of_h = cell.of_input(grad).flatten(0, 1), cell.of_h(grad).flatten(0, 1)
    grad_x = (of_x @ weight).view(x.shape)
    products = of_x.T @ x.flatten(0, 1), of_h.T @ before.flatten(0, 1)
    return grad_x, *products, of_x.sum(0), of_h.sum(0)


@pytest.mark.parametrize("with_reset", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", CELL)
@pytest.mark.parametrize("dtype", FLOATING)
def test_values(name, sizes, with_reset, dtype, device):
    cell = CELL[name]
    given = arguments(cell, sizes, dtype, device, with_reset)
    got = op(*given, cell.gates)
    wants = exact(cell, *given)
    sums = exact(cell, *(t if t is None or t.dtype == torch.bool else t.abs() for t in given))
    eps = torch.finfo(dtype).eps
    for what, result, want, size in zip(NAMES, got, wants, sums, strict=True):
        assert result.shape == want.shape, what
        assert result.is_contiguous(), what
        bound = LIMIT[dtype] * eps * size + torch.finfo(dtype).tiny
        assert bool(((result.double() - want).abs() <= bound).all()), what


def test_any_strides(device):
    cell, dtype = CELL["gru"], torch.float32
    grad, x, h0, output, weight, reset = arguments(cell, (5, 4, 6, 9), dtype, device, True)
    want = op(grad, x, h0, output, weight, reset, cell.gates)
    moved = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in (grad, x, output)]
    moved += [t.mT.contiguous().mT for t in (h0, weight, reset)]
    grad, x, output, h0, weight, reset = moved
    got = op(grad, x, h0, output, weight, reset, cell.gates)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_the_gradient_of_the_input_is_optional(device):
    cell = CELL["lstm"]
    given = arguments(cell, (5, 4, 6, 9), torch.float32, device, False)
    want = op(*given, cell.gates)
    got = op(*given[:4], None, None, cell.gates)
    assert got[0].shape == (0,)
    for result, exactly in zip(got[1:], want[1:], strict=True):
        assert torch.equal(result, exactly)


def test_what_a_reset_cleared_does_not_count(device):
    cell = CELL["gru"]
    grad, x, h0, output, weight, _ = arguments(cell, (3, 2, 4, 5), torch.float32, device, False)
    reset = torch.zeros(3, 2, dtype=torch.bool, device=device)
    reset[0, 0] = reset[2, 1] = True
    h0[0], output[1, 1] = float("nan"), float("inf")
    assert all(t.isfinite().all() for t in op(grad, x, h0, output, weight, reset, cell.gates))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("name", CELL)
def test_opcheck(name, dtype, device):
    given = arguments(CELL[name], (3, 2, 4, 5), dtype, device, True)
    torch.library.opcheck(op.default, (*given, CELL[name].gates))


@pytest.mark.parametrize("name", CELL)
def test_vmap(name, device):
    cell = CELL[name]
    ones = [arguments(cell, (3, 2, 4, 5), torch.float64, device, True) for _ in range(3)]
    stacked = [torch.stack(t, 1) for t in zip(*ones, strict=True)]
    got = torch.vmap(lambda *t: op(*t, cell.gates), in_dims=1)(*stacked)
    wants = zip(*(op(*one, cell.gates) for one in ones), strict=True)
    for result, want in zip(got, wants, strict=True):
        torch.testing.assert_close(result, torch.stack(want))
    shared = torch.vmap(lambda grad: op(grad, *ones[0][1:4], None, None, cell.gates))
    got = shared(torch.stack([one[0] for one in ones]))
    assert got[0].shape == (3, 0)
    for k, one in enumerate(ones):
        want = op(one[0], *ones[0][1:4], None, None, cell.gates)
        for result, exactly in zip(got[1:], want[1:], strict=True):
            torch.testing.assert_close(result[k], exactly)


# ------------------------------------------------------------------------------- in layers


def gradients(name, sizes, dtype, device, how):
    """Of a call of a layer, with these keywords of the layer and of the call."""
    steps, batch, inputs, hidden = sizes
    torch.manual_seed(0)
    options = {k: v for k, v in how.items() if k != "with_reset"}
    layer = LAYERS[name](inputs, hidden, device=device, dtype=dtype, **options)
    x = torch.randn(steps, batch, inputs, device=device, dtype=dtype, requires_grad=True)
    reset = torch.rand(steps, batch, device=device) < 0.3 if how.get("with_reset") else None
    if how.get("batch_first"):
        x, reset = x.transpose(0, 1), None if reset is None else reset.transpose(0, 1)
    output, last = layer(x, None, None, reset)
    ends = last if isinstance(last, tuple) else (last,)
    loss = output.float().square().sum() + sum(end.float().sum() for end in ends)
    return torch.autograd.grad(loss, [x, *layer.parameters()])


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize(
    "how", [{}, {"with_reset": True}, {"batch_first": True}, {"bias": False}, {"num_layers": 2}]
)
@pytest.mark.parametrize("sizes", [(4, 5, 24, 40), (6, 50, 24, 40)])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_get_the_same_gradients(name, sizes, how, dtype, device, monkeypatch):
    got = gradients(name, sizes, dtype, device, how)
    monkeypatch.setattr(_weights_backward, "takes", lambda *_: False)
    for result, want in zip(got, gradients(name, sizes, dtype, device, how), strict=True):
        assert result.stride() == want.stride()
        bound = 8 * torch.finfo(dtype).eps * want.abs().max().item()
        torch.testing.assert_close(result, want, rtol=0, atol=bound)


class Watched(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Elsewhere(torch.Tensor):
    """A parameter whose values another tensor holds."""

    @staticmethod
    def __new__(cls, values):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, device=values.device)

    def __init__(self, values):
        self.values = values

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        if op is torch.ops.aten.detach.default:
            return cls(args[0].values)
        plain = [t.values if isinstance(t, cls) else t for t in args]
        return op(*plain, **(kwargs or {}))


def never(x):
    return torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)


def test_which_calls_take_it(device, monkeypatch):
    taken, own = [], _weights_backward.gradients
    monkeypatch.setattr(_weights_backward, "gradients", lambda *a: taken.append(1) or own(*a))
    layer = my_ops.nn.GRU(3, 5, device=device)
    layer._plain = lambda input, states: None  # a plain call is one op of its own

    def takes(rows, context=contextlib.nullcontext, create_graph=False, **more):
        taken.clear()
        x = torch.randn(4, rows // 4, 3, device=device)
        output = layer(x, **{name: make(x) for name, make in more.items()})[0]
        with context():
            torch.autograd.grad(output.sum(), layer.weight_ih_l0, create_graph=create_graph)
        return bool(taken)

    few, on_gpu = _costs.WEIGHTS_BACKWARD.rows, device == "cuda"
    assert takes(few)
    assert takes(few + 4) == on_gpu
    assert takes(few, reset=never)
    assert not takes(few + 4, reset=never)
    assert not takes(4, lengths=lambda x: torch.ones(1, dtype=torch.int64, device=x.device))
    assert not takes(4, create_graph=True)
    assert not takes(4, context=Watched)
    limited = _costs.WEIGHTS_BACKWARD._replace(work={device: 4 * 20 * (2 * 3 + 5)})
    monkeypatch.setattr(_weights_backward, "WEIGHTS_BACKWARD", limited)
    assert takes(4)
    assert takes(8) == on_gpu
    layer.bias_ih_l0.requires_grad_(False)
    assert takes(4)
    assert not takes(8)
    values = layer.weight_ih_l0.detach()
    layer.weight_ih_l0 = torch.nn.Parameter(Elsewhere(values))
    assert not takes(4)
    layer.weight_ih_l0 = torch.nn.Parameter(values)
    layer.requires_grad_(False)
    x = torch.randn(4, 1, 3, device=device, requires_grad=True)
    taken.clear()
    layer(x)[0].sum().backward()
    assert not taken  # a product is enough
