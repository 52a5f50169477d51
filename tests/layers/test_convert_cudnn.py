"""What is still cuDNN's, and on the CPU oneDNN's, of a model that my_ops.convert changed."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import my_ops
from my_ops.recurrent import _torch_layers, _torchs_calls

HALF, FLOAT = torch.float16, torch.float32


@pytest.mark.parametrize(
    "mode, dtype, hidden, steps, batch, directions, grad, faster",
    [
        ("LSTM", FLOAT, 256, 128, 8000, 1, False, False),
        ("LSTM", FLOAT, 256, 128, 8000, 1, True, True),
        ("LSTM", FLOAT, 256, 128, 511, 2, True, False),
        ("LSTM", FLOAT, 256, 128, 512, 2, True, True),
        ("GRU", FLOAT, 256, 128, 1 << 20, 1, True, False),
        ("GRU", FLOAT, 768, 16, 1023, 1, False, False),
        ("GRU", FLOAT, 768, 16, 1024, 1, False, True),
        ("LSTM", FLOAT, 1025, 1, 3, 1, False, False),
        ("LSTM", FLOAT, 1025, 1, 4, 1, False, True),
        ("GRU", FLOAT, 4096, 9, 15, 1, True, False),
        ("GRU", FLOAT, 4096, 9, 16, 1, True, True),
        ("GRU", FLOAT, 4096, 9, 1, 2, True, True),
        ("LSTM", FLOAT, 96, 128, 64, 1, False, True),
        ("LSTM", FLOAT, 96, 127, 64, 1, False, False),
        ("LSTM", FLOAT, 96, 64, 64, 2, False, True),
        ("LSTM", FLOAT, 96, 1, 64, 1, True, True),
        ("LSTM", FLOAT, 64, 128, 64, 1, True, False),
        ("GRU", FLOAT, 128, 128, 256, 1, False, False),
        ("GRU", FLOAT, 128, 128, 256, 2, False, True),
        ("GRU", FLOAT, 129, 128, 256, 2, False, False),
        ("LSTM", HALF, 1025, 9, 32, 2, True, True),
        ("LSTM", HALF, 1025, 9, 31, 2, True, False),
        ("LSTM", HALF, 1025, 9, 99, 1, True, False),
        ("LSTM", HALF, 1024, 9, 1024, 2, True, True),
        ("LSTM", HALF, 1024, 9, 1023, 2, True, False),
        ("LSTM", HALF, 1023, 9, 1024, 2, True, False),
        ("LSTM", HALF, 128, 9, 1024, 2, False, True),
        ("LSTM", HALF, 128, 9, 1023, 2, False, False),
        ("LSTM", HALF, 129, 9, 1024, 2, False, False),
        ("LSTM", HALF, 128, 9, 1024, 2, True, False),
        ("GRU", HALF, 128, 9, 1024, 2, False, False),
        ("LSTM", torch.bfloat16, 128, 9, 1024, 2, False, False),
        ("LSTM", torch.float64, 1025, 9, 99, 2, True, False),
    ],
)
def test_where_cudnn_is_faster(mode, dtype, hidden, steps, batch, directions, grad, faster):
    call = _torchs_calls.Call(mode, dtype, hidden, steps, batch, 1, directions, False, grad)
    assert _torchs_calls.faster_on_gpu(call, tf32=True) is faster
    assert _torchs_calls.faster_on_gpu(call, tf32=False) is (faster and dtype == HALF)


@pytest.mark.parametrize(
    "mode, grad, hidden, rows",
    [
        *[("LSTM", False, 129, 16384), ("LSTM", False, 256, 16384), ("LSTM", False, 257, 4096)],
        *[("LSTM", False, 384, 4096), ("LSTM", False, 385, 2048), ("LSTM", False, 512, 2048)],
        *[("LSTM", False, 513, 1024), ("LSTM", False, 640, 1024), ("LSTM", False, 641, 256)],
        *[("LSTM", False, 768, 256), ("LSTM", False, 769, 512), ("LSTM", False, 1024, 512)],
        *[("LSTM", True, 192, None), ("LSTM", True, 193, 1024), ("LSTM", True, 384, 1024)],
        *[("LSTM", True, 385, 512), ("LSTM", True, 512, 512), ("LSTM", True, 513, 256)],
        *[("LSTM", True, 1024, 256), ("LSTM", True, 1025, 16)],
        *[("GRU", False, 256, 16384), ("GRU", False, 257, 4096), ("GRU", False, 384, 4096)],
        *[("GRU", False, 385, 2048), ("GRU", False, 512, 2048), ("GRU", False, 513, 1024)],
        *[("GRU", False, 768, 1024), ("GRU", False, 769, 512), ("GRU", False, 1024, 512)],
        *[("GRU", True, 384, None), ("GRU", True, 385, 512), ("GRU", True, 640, 512)],
        *[("GRU", True, 641, 256), ("GRU", True, 1024, 256), ("GRU", True, 1025, 16)],
    ],
)
def test_from_how_many_rows_cudnn_is_faster(mode, grad, hidden, rows):
    """On both sides of each limit; of two directions, where a batch has twice as many rows."""

    def faster(batch, directions=1):
        call = _torchs_calls.Call(mode, FLOAT, hidden, 1, batch, 1, directions, False, grad)
        return _torchs_calls.faster_on_gpu(call, tf32=True)

    if rows is None:
        assert not faster(1 << 20)
        return
    assert faster(rows)
    assert not faster(rows - 1)
    assert faster(rows // 2, 2)
    assert faster(rows // 2 - 1, 2) == (hidden > 1024)


def test_where_cudnn_is_faster_in_later_layers():
    def faster(hidden=193, batch=1024, layers=2, directions=2, grad=True):
        call = _torchs_calls.Call("GRU", FLOAT, hidden, 64, batch, layers, directions, False, grad)
        return _torchs_calls.faster_on_gpu(call, tf32=True)

    assert faster()
    assert not faster(hidden=192)
    assert not faster(batch=1023)
    assert not faster(layers=1)
    assert not faster(directions=1)
    assert not faster(grad=False)


@pytest.mark.parametrize(
    "dtype, hidden, batch, several, grad, bound",
    [
        (FLOAT, 128, 4, (2, 1, False), False, True),
        (FLOAT, 128, 4, (1, 2, False), False, True),
        (FLOAT, 128, 4, (1, 1, True), False, True),
        (FLOAT, 128, 4, (1, 1, False), False, False),
        (FLOAT, 129, 4, (2, 1, False), False, False),
        (FLOAT, 128, 4, (2, 1, False), True, False),
        (FLOAT, 128, 5, (2, 1, False), True, True),
        (FLOAT, 128, 64, (2, 1, False), True, True),
        (FLOAT, 128, 65, (2, 1, False), True, False),
        (FLOAT, 128, 65, (2, 1, False), False, False),
        (FLOAT, 64, 65, (2, 1, False), False, True),
        (HALF, 128, 4, (2, 1, False), False, True),
        (torch.bfloat16, 128, 4, (2, 1, False), False, False),
        (torch.float64, 128, 4, (2, 1, False), False, False),
    ],
)
def test_where_the_host_bounds(dtype, hidden, batch, several, grad, bound):
    """``several``: layers, directions, whether packed."""
    call = _torchs_calls.Call("GRU", dtype, hidden, 64, batch, *several, grad)
    assert _torchs_calls.bound_by_host(call) is bound


BF16 = torch.bfloat16


@pytest.mark.parametrize(
    "mode, dtype, hidden, batch, packed, grad, faster",
    [
        ("LSTM", BF16, 64, 16, False, False, True),
        ("LSTM", BF16, 64, 15, False, False, False),
        ("LSTM", BF16, 64, 32, False, True, True),
        ("LSTM", BF16, 63, 32, False, True, False),
        ("LSTM", BF16, 256, 31, False, True, False),
        ("LSTM", BF16, 256, 31, False, False, True),
        ("LSTM", BF16, 256, 64, True, False, False),
        ("GRU", BF16, 256, 64, False, False, False),
        ("LSTM", HALF, 256, 64, False, False, False),
        ("LSTM", FLOAT, 256, 64, False, False, False),
    ],
)
def test_where_onednn_is_faster(mode, dtype, hidden, batch, packed, grad, faster, monkeypatch):
    call = _torchs_calls.Call(mode, dtype, hidden, 9, batch, 1, 1, packed, grad)
    monkeypatch.setattr(_torchs_calls, "multiplies_bfloat16", lambda: True)
    assert _torchs_calls.faster_on_cpu(call) is faster
    monkeypatch.setattr(_torchs_calls, "multiplies_bfloat16", lambda: False)
    assert not _torchs_calls.faster_on_cpu(call)


def test_calls_of_onednn(monkeypatch):
    monkeypatch.setattr(_torchs_calls, "multiplies_bfloat16", lambda: True)
    layer, theirs = nn.LSTM(3, 64, dtype=BF16), nn.LSTM(3, 64, dtype=BF16)
    theirs.load_state_dict(layer.state_dict())
    my_ops.convert(layer)
    x = torch.randn(4, 32, 3, dtype=BF16)

    def is_ours(call):
        with Ops() as ops:
            call()
        return any(name.startswith("my_ops::") for name in ops.names)

    assert not is_ours(lambda: layer(x))
    assert torch.equal(layer(x)[0], theirs(x)[0])
    assert is_ours(lambda: layer(x[:, :16]))  # in training; forward alone is torch's
    with torch.no_grad():
        assert not is_ours(lambda: layer(x[:, :16]))
        torch.backends.mkldnn.set_flags(_enabled=False)  # flags() also sets TF32, and warns
        try:
            assert is_ours(lambda: layer(x))
        finally:
            torch.backends.mkldnn.set_flags(_enabled=True)
    assert is_ours(lambda: layer(x, lengths=[4] * 32))
    assert is_ours(lambda: my_ops.nn.LSTM(3, 64, dtype=BF16)(x))


@pytest.fixture
def forced(monkeypatch):
    """Converted layers call torch's op. The list has an element for each call."""
    calls = []
    monkeypatch.setattr(
        _torch_layers,
        "parameters_for_torch",
        lambda layer, *_: calls.append(1) or layer._in_a_row(),
    )
    return calls


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("how", ["batch", "batch_first", "one", "packed", "unsorted"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_torchs_op_gives_what_torchs_layer_does(
    kind, how, with_state, training, bias, device, forced
):
    dropout = 0.4 if device == "cpu" else 0.0  # cuDNN draws from a state of its own
    options = {"bidirectional": True, "dropout": dropout, "bias": bias}
    layer = kind(3, 4, 2, batch_first=how == "batch_first", device=device, **options)
    layer.train(training)
    theirs = copy.deepcopy(layer)
    for each in (layer, theirs):
        each.flatten_parameters()
    my_ops.convert(layer)
    batch = () if how == "one" else (5,)
    x = torch.randn(5, 6, 3) if how == "batch_first" else torch.randn(6, *batch, 3)
    x = x.to(device)
    if how in ("packed", "unsorted"):
        lengths = torch.tensor([6, 4, 4, 2, 1] if how == "packed" else [2, 6, 1, 4, 4])
        x = nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=how == "packed")
    hx = None
    if with_state:
        hx = torch.randn(4, *batch, 4, device=device)
        hx = (hx, torch.randn_like(hx)) if kind is nn.LSTM else hx
    found = []
    for each in (layer, theirs):
        torch.manual_seed(1)
        output, last = each(x, hx)
        found.append((tuple(output), last))
    assert forced
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_torchs_op_gets_contiguous_states(kind, device, forced, monkeypatch):
    """cuDNN refuses others; which calls go there must not decide what a layer takes."""
    layer = kind(3, 4, 2, device=device)
    my_ops.convert(layer)
    name = layer.mode.lower()
    op = getattr(torch, name)

    def cudnn(*arguments):
        states = next(a for a in arguments[1:] if isinstance(a, (list, tuple)) or a.dim() == 3)
        assert all(s.is_contiguous() for s in torch.atleast_1d(states))
        return op(*arguments)

    state = torch.randn(2, 1, 8, device=device)[..., ::2].expand(2, 5, 4)
    hx = (state, state) if kind is nn.LSTM else state
    x = torch.randn(6, 5, 3, device=device)
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([6, 4, 4, 2, 1]))
    monkeypatch.setattr(torch, name, cudnn)
    for given in (x, packed):
        layer(given, hx)
    assert len(forced) == 2


def test_what_torchs_layers_do_not_take_is_ours(device, forced):
    layer = nn.LSTM(3, 4, device=device)
    my_ops.convert(layer)
    x = torch.randn(6, 5, 3, device=device)
    layer(x, lengths=torch.full((5,), 6, device=device))
    layer(x, reset=torch.zeros(6, 5, dtype=torch.bool, device=device))
    for option in ("zoneout", "weight_dropout"):
        setattr(layer, option, 0.5)
        layer(x)
        setattr(layer, option, 0.0)
    assert not forced
    layer(x)
    assert forced


class Ops(TorchDispatchMode):
    """Records the names of the ops that run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.names.add(op.name())
        return op(*args, **(kwargs or {}))


def runs_cudnn(call):
    with Ops() as ops:
        call()
    ours = any(name.startswith("my_ops::") for name in ops.names)
    theirs = "aten::_cudnn_rnn" in ops.names
    assert ours != theirs
    return theirs


def converted(kind, *sizes, **options):
    layer = kind(*sizes, device="cuda", **options)
    my_ops.convert(layer)
    return layer


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_cudnn_gives_what_it_gave(kind, packed, cuda, monkeypatch):
    """With gradients, and without a copy of the weights, of which torch warns."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    layer = kind(24, 1032, num_layers=2, bidirectional=True)
    my_ops.convert(layer)
    layer.to(cuda)
    theirs = kind(24, 1032, num_layers=2, bidirectional=True, device=cuda)
    theirs.load_state_dict(layer.state_dict())
    x = torch.randn(3, 8, 24, device=cuda)
    if packed:
        x = nn.utils.rnn.pack_padded_sequence(
            x, torch.tensor([3, 1, 2, 3, 3, 1, 2, 2]), enforce_sorted=False
        )
    assert runs_cudnn(lambda: layer(x))
    found = []
    for each in (layer, theirs):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            output, last = each(x)
        data = output.data if packed else output
        data.square().sum().backward()
        states = last if kind is nn.LSTM else (last,)
        found.append([data, *states, *(p.grad for p in each.parameters())])
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_other_calls_of_a_converted_layer_are_ours(cuda, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    x = torch.randn(2, 16, 24, device=cuda)
    layer = converted(nn.LSTM, 24, 1032)
    assert runs_cudnn(lambda: layer(x))
    small = torch.randn(2, 3, 24, device=cuda)
    assert not runs_cudnn(lambda: layer(small))
    fresh = my_ops.nn.LSTM(24, 1032, device=cuda)
    assert not runs_cudnn(lambda: fresh(x))
    lengths = torch.full((16,), 2, device=cuda)
    assert not runs_cudnn(lambda: layer(x, lengths=lengths))
    reset = torch.zeros(2, 16, dtype=torch.bool, device=cuda)
    assert not runs_cudnn(lambda: layer(x, reset=reset))
    with torch.autocast(cuda):
        assert not runs_cudnn(lambda: layer(x))
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        assert not runs_cudnn(lambda: layer(x))
    with torch.backends.cudnn.flags(enabled=False):
        assert not runs_cudnn(lambda: layer(x))
    torch.backends.cuda.matmul.allow_tf32 = True
    assert not runs_cudnn(lambda: layer(x))
    torch.backends.cuda.matmul.allow_tf32 = False
    assert not runs_cudnn(lambda: layer.eval()(x))  # cuDNN has no backward there
    with torch.no_grad():
        assert runs_cudnn(lambda: layer(x))
    layer.train().zoneout = 0.1
    assert not runs_cudnn(lambda: layer(x))
    layer.zoneout = 0.0
    assert runs_cudnn(lambda: layer(x))
    with pytest.raises(RuntimeError, match="lstm: h0 must have the dtype of input"):
        layer(x, (torch.zeros(1, 16, 1032, device=cuda).double(),) * 2)
    empty = layer(x[:0])[0]
    assert empty.shape == (0, 16, 1032)
    packed = nn.utils.rnn.pack_padded_sequence(x[..., :3], torch.full((16,), 2))
    with pytest.raises(RuntimeError, match=r"LSTM: input must be .* 24\), got \(2, 16, 3\)"):
        layer(packed)
    layer.eval().requires_grad_(False)
    own = {name: p.clone().requires_grad_() for name, p in layer.named_parameters()}
    assert not runs_cudnn(lambda: torch.func.functional_call(layer, own, (x,)))


@pytest.mark.parametrize("packed", [False, True])
def test_short_layers_that_the_host_bounds(packed, cuda, captures):
    """A graph costs no time of the host."""
    layer = converted(nn.GRU, 8, 16, bidirectional=not packed)
    x = torch.randn(4, 3, 8, device=cuda)
    if packed:
        x = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([4, 2, 1]))
    assert not runs_cudnn(lambda: layer(x))
    with torch.no_grad():
        assert runs_cudnn(lambda: layer(x))
        assert not runs_cudnn(lambda: layer.double()(x.to(torch.float64)))
        if not packed:
            layer.float()
            want, graph = layer(x)[0], torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                assert not runs_cudnn(lambda: layer(x))
                got = layer(x)[0]
            graph.replay()
            torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)  # in TF32


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Converting a tensor to a Python:torch.jit.TracerWarning")
def test_torchs_tools_on_a_layer_that_calls_cudnn(cuda, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    layer = converted(nn.GRU, 8, 1032)
    x = torch.randn(2, 16, 8, device=cuda)
    want = my_ops.nn.GRU(8, 1032, device=cuda)
    want.load_state_dict(layer.state_dict())
    want, close = want(x)[0], {"rtol": 1e-5, "atol": 1e-5}
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x)[0], want, **close)
    exported = torch.export.export(layer, (x,)).module()
    torch.testing.assert_close(exported(x)[0], want, **close)
    torch.testing.assert_close(torch.jit.script(layer)(x)[0], want, **close)
    torch.testing.assert_close(torch.jit.trace(layer, (x,), check_trace=False)(x)[0], want, **close)
    pair = torch.stack([x, x])
    found = torch.vmap(lambda one: layer(one)[0])(pair)
    torch.testing.assert_close(found, torch.stack([want, want]), **close)
    _, tangent = torch.func.jvp(lambda one: layer(one)[0].sum(), (x,), (torch.ones_like(x),))
    assert tangent.isfinite()
    copied = copy.deepcopy(layer)
    copied.flatten_parameters()
    assert runs_cudnn(lambda: copied(x))
    loaded = pickle.loads(pickle.dumps(layer))
    loaded.flatten_parameters()
    assert runs_cudnn(lambda: loaded(x))
