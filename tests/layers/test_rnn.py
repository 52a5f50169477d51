"""nn.RNN and RNNCell: which calls run in the cells' kernels, and which are torch's op.
test_torch_layers.py compares both with torch's layers."""

import itertools

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils._python_dispatch import TorchDispatchMode

import my_ops
from my_ops._costs import RNN_CPU
from my_ops.recurrent import _own_cpu, rnn

F32, BF16 = torch.float32, torch.bfloat16
INPUTS, HIDDEN, STEPS, BATCH = 5, 16, 24, 3  # enough for a gain


class Ops(TorchDispatchMode):
    """The names of the ops of my_ops that are called."""

    def __init__(self):
        super().__init__()
        self.called = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "my_ops":
            self.called.add(func.__name__.partition(".")[0])
        return func(*args, **(kwargs or {}))


def ours(layer, *args, **kwargs):
    """Whether a call runs an op of ours. A gradient is recorded."""
    with Ops() as ops:
        layer(*args, **kwargs)
    return bool(ops.called & {"rnn_tanh_forward", "rnn_relu_forward", "rnn_tanh", "rnn_relu"})


@pytest.mark.parametrize("name", rnn.CELLS)
def test_gradients_of_the_cells(name):
    """The check of a definition, which these do without."""
    made = rnn.CELLS[name]
    made._derived.check(made._cell)
    assert made._cell.name == name


@pytest.mark.parametrize(
    "dtype, steps, batch, hidden, packed, gains",
    [
        (F32, 24, 1, 4, False, True),
        (F32, 23, 1, 4, False, False),
        (F32, 24, 1, 3, False, False),
        (torch.float64, 24, 1, 4, False, True),
        (torch.float16, 24, 256, 1024, False, True),
        (F32, 16, 16, 64, False, True),
        (F32, 16, 15, 64, False, False),
        (F32, 12, 256, 64, False, True),
        (F32, 11, 256, 64, False, False),
        (F32, 23, 256, 64, True, False),
        (F32, 24, 256, 64, True, True),
        (BF16, 24, 4, 512, False, True),
        (BF16, 24, 5, 512, False, False),
        (BF16, 24, 1, 513, False, False),
        (F32, 24, 5, 1024, False, True),
    ],
)
def test_what_gains_from_the_kernels(dtype, steps, batch, hidden, packed, gains):
    assert rnn._gains(dtype, steps, batch, hidden, packed) is gains


@pytest.mark.parametrize("steps", [STEPS, RNN_CPU.fewer_steps - 1])
@pytest.mark.parametrize("nonlinearity", ["tanh", "relu"])
def test_calls_on_the_cpu(nonlinearity, steps):
    """By the kernels if they gain, else bit for bit torch's."""
    theirs = torch.nn.RNN(INPUTS, HIDDEN, 2, nonlinearity, bidirectional=True)
    layer = my_ops.nn.RNN(INPUTS, HIDDEN, 2, nonlinearity, bidirectional=True)
    layer.load_state_dict(theirs.state_dict())
    x = torch.randn(steps, BATCH, INPUTS)
    packed = pack_padded_sequence(x, [steps, 5, 2])
    gains = steps == STEPS
    assert ours(layer, x) is ours(layer, packed) is gains
    with torch.no_grad():
        assert ours(layer, x) is gains
        assert not ours(layer, packed)
        assert torch.equal(layer(packed)[0].data, theirs(packed)[0].data)
    for given in (x, x[:, 0]):
        for got, want in zip(layer(given), theirs(given), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
            assert gains or torch.equal(got, want)


def test_what_torch_lacks_is_ours(device):
    x = torch.randn(2, BATCH, INPUTS, device=device)
    layer = my_ops.nn.RNN(INPUTS, HIDDEN, device=device)
    reset = torch.zeros(2, BATCH, dtype=torch.bool, device=device)
    assert not ours(layer, x)
    for given in ({"lengths": [2, 0, 1]}, {"reset": reset}):
        assert ours(layer, x, **given)
    for option in ({"zoneout": 0.5}, {"weight_dropout": 0.5}, {"heads": 2}):
        assert ours(my_ops.nn.RNN(INPUTS, HIDDEN, device=device, **option), x)
    with torch.autocast("cpu", BF16):  # so that every size has the same dtype
        assert ours(layer, x) is (device == "cpu")
    nothing = layer(x[:0])
    assert nothing[0].shape == (0, BATCH, HIDDEN) and not nothing[1].any()


@pytest.mark.parametrize(
    ("dtype", "steps", "hidden", "gains"),
    [
        (F32, 64, 512, True),
        (F32, 63, 512, False),
        (F32, 64, 511, False),
        (BF16, 32, 8, True),
        (torch.float16, 256, 512, True),
        (torch.float16, 255, 512, False),
        (torch.float16, 256, 511, False),
        (BF16, 31, 8, False),
    ],
)
def test_what_gains_on_cuda(dtype, steps, hidden, gains):
    assert rnn._enough_on_cuda(dtype, steps, hidden) is gains


# bfloat16 in cuDNN warns that the weights do not lie in a row: torch does not put them so.
@pytest.mark.filterwarnings("ignore:RNN module weights")
@pytest.mark.parametrize(("dtype", "hidden"), [(BF16, 64), (F32, 512)])
def test_calls_on_cuda(dtype, hidden, device):
    if device != "cuda":
        pytest.skip("the CPU's are above")
    options = {"bidirectional": True, "device": device, "dtype": dtype}
    theirs = torch.nn.RNN(INPUTS, hidden, 2, **options)
    layer = my_ops.nn.RNN(INPUTS, hidden, 2, **options)
    layer.load_state_dict(theirs.state_dict())
    x = torch.randn(64, BATCH, INPUTS, device=device, dtype=dtype)
    assert ours(layer, x)
    limit = 0.02 if dtype == BF16 else 1e-5
    with torch.backends.cudnn.flags(allow_tf32=False):
        torch.testing.assert_close(layer(x), theirs(x), rtol=0, atol=limit)
    for given in (x[:31], pack_padded_sequence(x, [64, 5, 2])):
        assert not ours(layer, given)
    assert torch.equal(layer(x[:31])[0], theirs(x[:31])[0])
    with torch.autocast("cuda", BF16):
        assert ours(layer, x[:32])


@pytest.mark.filterwarnings("ignore:RNN module weights")
def test_on_cuda_without_a_kernel(device):
    """In float64, and where W_h does not fit on chip."""
    if device != "cuda":
        pytest.skip("the CPU's are above")
    for dtype, hidden in ((torch.float64, 64), (BF16, 2304)):
        layer = my_ops.nn.RNN(INPUTS, hidden, device=device, dtype=dtype)
        x = torch.randn(64, BATCH, INPUTS, device=device, dtype=dtype)
        assert not ours(layer, x)
        with torch.autocast("cuda", BF16):  # which leaves float64
            assert not ours(layer, x)


def test_without_a_compiler(monkeypatch, tmp_path, capfd):
    """Calls are torch's, in which nothing is lost, and what torch lacks runs step by step."""
    monkeypatch.setenv("MY_OPS_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "/nothing/there")
    monkeypatch.setattr(_own_cpu, "_numbers", {})
    monkeypatch.setattr(_own_cpu, "_refused", set())
    _own_cpu._compiler.cache_clear()
    theirs, layer = torch.nn.RNN(INPUTS, HIDDEN), my_ops.nn.RNN(INPUTS, HIDDEN)
    layer.load_state_dict(theirs.state_dict())
    x = torch.randn(STEPS, BATCH, INPUTS)
    try:
        for _ in range(2):
            assert torch.equal(layer(x)[0], theirs(x)[0])
        with torch.autocast("cpu", BF16):
            assert torch.equal(layer(x)[0], theirs(x)[0])
        output, _ = layer(x, lengths=[3, 0, STEPS])
        torch.testing.assert_close(output[:, 2], theirs(x[:, 2])[0])
    finally:
        _own_cpu._compiler.cache_clear()
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("my_ops: nn.RNN runs without a kernel of its own: the C++ compiler")


def test_small_calls_compile_nothing(monkeypatch, tmp_path, capfd):
    monkeypatch.setenv("MY_OPS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(_own_cpu, "_numbers", {})
    layer = torch.nn.RNN(INPUTS, HIDDEN)
    my_ops.convert(layer)
    layer(torch.randn(1, BATCH, INPUTS))
    assert not (tmp_path / "cache").exists() and capfd.readouterr().err == ""
    layer(torch.randn(STEPS, BATCH, INPUTS))
    assert capfd.readouterr().err.startswith("my_ops: compiling nn.RNN for this CPU")


@pytest.mark.parametrize("dtype", [torch.float64, F32, torch.float16, BF16])
@pytest.mark.parametrize("nonlinearity", ["tanh", "relu"])
def test_a_step(nonlinearity, dtype, device):
    more = {"nonlinearity": nonlinearity, "device": device, "dtype": dtype}
    cell, like = my_ops.nn.RNNCell(INPUTS, 4, **more), torch.nn.RNNCell(INPUTS, 4, **more)
    like.load_state_dict(cell.state_dict())
    x = torch.randn(BATCH, INPUTS, device=device, dtype=dtype)
    for module in (cell, torch.jit.script(cell)):
        assert torch.equal(module(x, module(x)), like(x, like(x)))
        assert torch.equal(module(x[0]), like(x[0]))


def test_wrong_nonlinearity():
    for kind, wrong in itertools.product(("RNN", "RNNCell"), ("elu", None)):
        said = f"^{kind}: nonlinearity must be 'tanh' or 'relu', got {wrong!r}"
        with pytest.raises(ValueError, match=said):
            getattr(my_ops.nn, kind)(INPUTS, HIDDEN, nonlinearity=wrong)
    cell = my_ops.nn.RNNCell(INPUTS, HIDDEN)
    with pytest.raises(ValueError, match="RNNCell: nonlinearity must be 'tanh' or 'relu'"):
        cell.nonlinearity = "elu"
