"""What only a GPU has: streams, graphs, refused launches, several devices."""

import ctypes
import functools
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from conditional_graph import conditional_graph
from samples import (
    DIFFERENTIABLE,
    FLOATING,
    as_tuple,
    named,
    recurrent_inputs,
)

import my_ops

SLEEP_CYCLES = 20_000_000  # about 10 ms, longer than all launches of a test together
TRAINING_LIMIT = 2.0**-16  # for float32 parameters after a few steps in another order

TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def fill_index_like(x):
    """fill_index as a function of a tensor, for the lists below."""
    return my_ops.fill_index(x.shape[0], 5, device=x.device)


def calls():
    """Every op as (name, function, tensor arguments on the CPU)."""
    found = [(op.name, op, op.tensors(65, torch.float32, "cpu")) for op in DIFFERENTIABLE]
    out = functools.partial(gemm_into, op=my_ops.gemm)
    found.append(("gemm-out", out, (torch.randn(65, 4), torch.randn(4, 3))))
    found.append(("fill_index", fill_index_like, (torch.randn(65),)))
    return found


def gemm_into(a, b, op):
    return op(a, b, out=a.new_full((a.shape[0], b.shape[1]), float("nan")))


CALLS = {"argnames": "name", "argvalues": [name for name, _, _ in calls()]}


@pytest.fixture
def call(name):
    return next((function, tensors) for key, function, tensors in calls() if key == name)


def assert_equal(got, want):
    for ours, exact in zip(as_tuple(got), as_tuple(want), strict=True):
        assert torch.equal(ours, exact)


@pytest.mark.parametrize(**CALLS)
def test_side_stream(name, call, cuda):
    """Inputs arrive late, on a stream that is not the default one."""
    function, tensors = call
    late = [t.to(cuda) for t in tensors]
    want = tuple(r.clone() for r in as_tuple(function(*late)))
    inputs = [torch.full_like(t, float("nan")) for t in late]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)
        for place, source in zip(inputs, late, strict=True):
            place.copy_(source)
        got = as_tuple(function(*inputs))
    stream.synchronize()
    assert_equal(got, want)


@pytest.mark.parametrize(**named(DIFFERENTIABLE))
def test_side_stream_backward(op, cuda):
    late = op.tensors(65, torch.float32, cuda)
    leaf = [t.clone().requires_grad_() for t in late]
    results = op(*leaf)
    want = torch.autograd.grad(results, leaf, [torch.ones_like(r) for r in results])
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        inputs = [torch.full_like(t, float("nan")) for t in late]
        torch.cuda._sleep(SLEEP_CYCLES)
        for place, source in zip(inputs, late, strict=True):
            place.copy_(source)
        leaf = [t.requires_grad_() for t in inputs]
        results = op(*leaf)
        got = torch.autograd.grad(results, leaf, [torch.ones_like(r) for r in results])
    stream.synchronize()
    assert_equal(tuple(got), tuple(want))


def test_two_layers_on_two_streams(cuda):
    """Each layer wants the whole GPU. They take turns, and neither waits for ever."""
    layer = my_ops.nn.LLTM(64, 512, device="cuda")
    x = torch.randn(50, 16, 64, device="cuda")
    with torch.no_grad():
        want, _ = layer(x)
        streams = [torch.cuda.Stream() for _ in range(2)]
        torch.cuda.synchronize()
        results = []
        for turn in range(20):
            with torch.cuda.stream(streams[turn % 2]):
                results.append(layer(x)[0])
        torch.cuda.synchronize()
    assert all(torch.equal(result, want) for result in results)


def test_two_threads_with_different_batches(cuda):
    """One kernel, whose launches need different amounts of shared memory."""
    layer = my_ops.nn.GRU(8, 512, device=cuda)
    inputs = [torch.randn(1, batch, 8, device=cuda) for batch in (48, 200)]

    def run(x, times=1000):
        with torch.no_grad():  # which is the thread's own
            return [layer(x)[0] for _ in range(times)]

    want = [run(x, 1)[0] for x in inputs]
    with ThreadPoolExecutor(2) as threads:
        got = list(threads.map(run, inputs))
    for results, exact in zip(got, want, strict=True):
        assert all(torch.equal(result, exact) for result in results)


def warm_up(function):
    """Runs once on a side stream, as graph capture requires."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)


@pytest.mark.parametrize(**CALLS)
def test_graph_capture_and_replay(name, call, cuda, captures):
    function, tensors = call
    inputs = [t.to(cuda) for t in tensors]
    warm_up(lambda: function(*inputs))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = as_tuple(function(*inputs))
    for _ in range(3):
        for place in inputs:
            place.normal_()
        graph.replay()
        assert_equal(captured, function(*inputs))


@pytest.mark.parametrize("name", ["LLTM", "LSTM", "GRU"])
def test_graph_of_a_training_step(name, cuda, captures):
    """The captured step trains like the eager one, from the same weights on the same batches."""
    start = getattr(my_ops.nn, name)(5, 8, device=cuda).state_dict()
    shapes = (6, 4, 5), (6, 4, 8)
    batches = [[torch.randn(s, device=cuda) for s in shapes] for _ in range(3)]

    def build():
        layer = getattr(my_ops.nn, name)(5, 8, device=cuda)
        layer.load_state_dict(start)
        return layer, torch.optim.SGD(layer.parameters(), lr=0.1)

    def step(layer, optimizer, input, target):
        optimizer.zero_grad(set_to_none=False)
        torch.nn.functional.mse_loss(layer(input)[0], target).backward()
        optimizer.step()

    layer, optimizer = build()
    input, target = (t.clone() for t in batches[0])
    warm_up(lambda: step(layer, optimizer, input, target))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(layer, optimizer, input, target)
    layer.load_state_dict(start)
    eager, eager_optimizer = build()
    for batch in batches:
        for place, source in zip((input, target), batch, strict=True):
            place.copy_(source)
        graph.replay()
        step(eager, eager_optimizer, *batch)
    for ours, exact in zip(layer.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours, exact, rtol=TRAINING_LIMIT, atol=TRAINING_LIMIT)
    for key, parameter in layer.named_parameters():
        assert not torch.equal(parameter, start[key]), key


@pytest.mark.parametrize("hidden", [8, 256, 512])  # warps, clusters and grids
@pytest.mark.parametrize("name", ["LLTM", "LSTM", "GRU"])
def test_conditional_node_of_a_graph(name, hidden, cuda, captures):
    layer = getattr(my_ops.nn, name)(5, hidden, device=cuda)
    x = torch.randn(6, 3, 5, device=cuda)

    def run():
        # Leaves of this call: autograd would wait for the stream on which others were first used.
        leaves = {key: p.detach().requires_grad_() for key, p in layer.named_parameters()}
        output, _ = torch.func.functional_call(layer, leaves, (x,))
        return output, *torch.autograd.grad(output.sum(), list(leaves.values()))

    warm_up(run)
    for condition in (True, False):
        with conditional_graph(condition) as replay:
            captured = [t.detach() for t in run()]
        for place in captured:
            place.zero_()
        for _ in range(2):
            x.normal_()
            replay()
            got = [t.clone() for t in captured]
            want = run() if condition else tuple(torch.zeros_like(t) for t in got)
            assert_equal(tuple(got), want)


@pytest.mark.parametrize("name", ["LLTM", "LSTM", "GRU"])
def test_draws_in_a_graph(name, cuda, captures):
    """Each replay of a captured training step draws anew, the same after the same seed."""
    options = {"dropout": 0.3, "zoneout": 0.3, "weight_dropout": 0.3, "num_layers": 2}
    layer = getattr(my_ops.nn, name)(5, 8, **options, device=cuda)
    x = torch.randn(6, 4, 5, device=cuda)

    def run():
        leaves = {key: p.detach().requires_grad_() for key, p in layer.named_parameters()}
        output, _ = torch.func.functional_call(layer, leaves, (x,))
        return output, *torch.autograd.grad(output.square().sum(), list(leaves.values()))

    warm_up(run)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()

    def replay():
        graph.replay()
        return [t.detach().clone() for t in captured]

    torch.manual_seed(3)
    first, second = replay(), replay()
    torch.manual_seed(3)
    again = replay()
    torch.manual_seed(3)
    eager = run()
    for one, other, same, exact in zip(first, second, again, eager, strict=True):
        assert not torch.equal(one, other)
        assert torch.equal(one, same)
        torch.testing.assert_close(one, exact, rtol=TRAINING_LIMIT, atol=TRAINING_LIMIT)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
@pytest.mark.parametrize("name", ["LLTM", "LSTM", "GRU"])
def test_make_graphed_callables(name, cuda, captures):
    layer, plain = (getattr(my_ops.nn, name)(5, 8, device=cuda) for _ in range(2))
    plain.load_state_dict(layer.state_dict())
    graphed = torch.cuda.make_graphed_callables(layer, (torch.randn(6, 4, 5, device=cuda),))
    input = torch.randn(6, 4, 5, device=cuda)
    for model in (graphed, plain):
        model(input)[0].square().sum().backward()
    for ours, exact in zip(layer.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, exact.grad, rtol=TRAINING_LIMIT, atol=TRAINING_LIMIT)


@pytest.fixture
def synchronisation_raises():
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize(**CALLS)
def test_no_synchronisation(name, call, cuda, synchronisation_raises):
    function, tensors = call
    inputs = [t.to(cuda) for t in tensors]
    want = as_tuple(function(*inputs))
    synchronisation_raises()
    got = as_tuple(function(*inputs))
    torch.cuda.set_sync_debug_mode("default")
    assert_equal(got, want)


@pytest.mark.parametrize(**CALLS)
def test_memory_is_given_back(name, call, cuda):
    function, tensors = call
    inputs = [t.to(cuda) for t in tensors]
    function(*inputs)
    before = torch.cuda.memory_allocated()
    for _ in range(50):
        function(*inputs)
    assert torch.cuda.memory_allocated() == before


@contextmanager
def refusing_stream():
    """A stream that refuses all work, because a capture on it has been invalidated."""
    driver, stream = ctypes.CDLL("libcuda.so.1"), torch.cuda.Stream()
    handle, relaxed = ctypes.c_void_p(stream.cuda_stream), 2
    torch.utils.deterministic.fill_uninitialized_memory = False  # filling is work too
    torch.cuda.synchronize()  # this is refused while a stream captures
    assert driver.cuStreamBeginCapture_v2(handle, relaxed) == 0
    assert driver.cuStreamSynchronize(handle) != 0  # this invalidates the capture
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        driver.cuStreamEndCapture(handle, ctypes.byref(ctypes.c_void_p()))


REFUSED = {  # on Hopper: what each way of launching runs, with the operands' dtype and shapes
    "map": (my_ops.custom_add, torch.float32, (65, 64), (65, 64)),
    "small": (my_ops.gemm, torch.float32, (65, 4), (4, 3)),
    "split": (my_ops.gemm, torch.float32, (640, 640), (640, 640)),
    "overlapped": (my_ops.gemm, torch.float32, (16, 4096), (4096, 1024)),
    "clusters": (
        functools.partial(my_ops.linear, activation="relu"),
        torch.bfloat16,
        (600, 320),
        (512, 320),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_launch_is_reported_once(name, cuda):
    function, dtype, *shapes = REFUSED[name]
    inputs = [torch.randn(shape, device=cuda).to(dtype) for shape in shapes]
    with refusing_stream(), pytest.raises(RuntimeError, match="CUDA"):
        function(*inputs)
    for _, op, tensors in calls():
        op(*(t.to(cuda) for t in tensors))
    x = torch.randn(65, device=cuda)
    assert torch.equal(my_ops.add_one(x), x + 1)


LAYERS = {  # steps, batch, inputs, hidden, dtype; on Hopper
    "warps": (3, 3, 8, 30, torch.float32),
    "blocks": (3, 70, 8, 64, torch.float16),
    "clusters": (3, 3, 8, 64, torch.float32),
    "grid": (3, 20, 8, 512, torch.float32),
    "warpgroups": (2, 1040, 8, 136, torch.bfloat16),
    "steps": (2, 3, 8, 64, torch.float64),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_refused_launch_of_a_layer(name, cuda):
    """Of backward, which starts with the kernel that runs all steps."""
    *sizes, dtype = LAYERS[name]
    x, h, c, w_x, w_h, b_x, b_h = recurrent_inputs("lstm", *sizes, dtype, cuda)
    ops = torch.ops.my_ops
    output, h_n, c_n, gates, cells = ops.lstm_forward(x, h, c, w_x, w_h, b_x, b_h, None, None, None)
    read = output, h_n, c_n, gates, cells, c, w_h, None, None, None
    want = ops.lstm_backward(*read)
    # float64 starts with a copy of torch's, of which torch 2.11 says only which op failed.
    with refusing_stream(), pytest.raises(RuntimeError, match=r"CUDA|aten::copy_"):
        ops.lstm_backward(*read)
    assert_equal(ops.lstm_backward(*read), want)


@TWO_GPUS
@pytest.mark.parametrize(**CALLS)
def test_current_device_is_another(name, call, cuda):
    function, tensors = call
    want = as_tuple(function(*(t.to("cuda:0") for t in tensors)))
    with torch.cuda.device(0):
        got = as_tuple(function(*(t.to("cuda:1") for t in tensors)))
        assert torch.cuda.current_device() == 0
    assert all(r.device == torch.device("cuda:1") for r in got)
    assert_equal(tuple(r.cpu() for r in got), tuple(r.cpu() for r in want))


@TWO_GPUS
@pytest.mark.parametrize(**named(DIFFERENTIABLE))
def test_backward_with_another_current_device(op, cuda):
    found = []
    for device in ("cuda:0", "cuda:1"):
        torch.manual_seed(1)
        leaf = [t.requires_grad_() for t in op.tensors(9, torch.float32, device)]
        results = op(*leaf)
        grads = torch.autograd.grad(results, leaf, [torch.ones_like(r) for r in results])
        assert torch.cuda.current_device() == 0
        found.append(tuple(grad.cpu() for grad in grads))
    assert_equal(*found)


@TWO_GPUS
def test_two_gpus_are_not_mixed(cuda, rejects):
    a, b = torch.ones(2, 2, device="cuda:0"), torch.ones(2, 2, device="cuda:1")
    for op in (my_ops.custom_add, my_ops.gemm):
        with rejects(RuntimeError, "b must be on the device of a, got cuda:1 and cuda:0", a, b):
            op(a, b)


@pytest.mark.parametrize("dtype", FLOATING)
def test_cpu_and_cuda_agree_on_gradients(dtype, cuda):
    """The formulas of both backends are compared over all ops, in one place."""
    for op in DIFFERENTIABLE:
        if dtype not in op.dtypes:
            continue
        found = []
        tensors = op.tensors(33, dtype, "cpu")
        for device in ("cpu", cuda):
            leaf = [t.to(device).requires_grad_() for t in tensors]
            results = op(*leaf)
            grads = torch.autograd.grad(results, leaf, [torch.ones_like(r) for r in results])
            found.append([t.detach().cpu() for t in (*results, *grads)])
        for ours, exact in zip(*found, strict=True):
            limit = 8 * torch.finfo(ours.dtype).eps * max(1.0, exact.abs().max().item())
            torch.testing.assert_close(ours, exact, rtol=0, atol=limit)
