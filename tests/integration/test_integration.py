"""The ops with torch's other tools: counters, checkpointing, subclasses, workers, export."""

import copy
import io
import multiprocessing
import os
import pickle
import subprocess
import sys
import textwrap
import threading

import child_processes
import pytest
import torch
from samples import DIFFERENTIABLE, NO_INDUCTOR, leaves, named
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import my_ops

LAYERS = {
    "Linear": (lambda: my_ops.nn.LinearActivation(3, 4, activation="gelu"), (2, 3)),
    "LLTM": (lambda: my_ops.nn.LLTM(3, 4), (5, 2, 3)),
    "LLTMCell": (lambda: my_ops.nn.LLTMCell(3, 4), (2, 3)),
    "RoundSTE": (lambda: my_ops.nn.RoundSTE(), (2, 3)),
}


@pytest.fixture(params=LAYERS)
def layer(request, device):
    make, shape = LAYERS[request.param]
    return make().to(device), torch.randn(shape, device=device)


def first(result):
    return result if isinstance(result, torch.Tensor) else result[0]


# ------------------------------------------------------------------------- counters, profiler


def flops(function):
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


@pytest.mark.parametrize("gradient", [False, True])
def test_flops_of_products_are_those_of_torch(gradient, device):
    def draw(*shape):
        return torch.randn(shape, device=device)

    def count(function, *tensors):
        def run():
            out = function(*(leaves(tensors) if gradient else tensors))
            if gradient:
                out.sum().backward()

        return flops(run)

    for sizes in [((), ()), ((2,), (2,)), ((1,), (2,)), ((2,), (1,)), ((), (2,)), ((2,), ())]:
        a, b = draw(*sizes[0], 5, 4), draw(*sizes[1], 4, 3)
        assert count(my_ops.gemm, a, b) == count(torch.matmul, a, b) > 0
    for x in (draw(4), draw(5, 4), draw(2, 5, 4)):
        w = draw(3, 4)
        assert count(my_ops.linear, x, w) == count(torch.nn.functional.linear, x, w) > 0


def test_flops_of_attention(device):
    """As torch counts for its own, which computes the scores again in backward."""
    tensors = tuple(
        torch.randn(2, 3, n, size, device=device) for n, size in ((5, 4), (7, 4), (7, 6))
    )
    attention, product = torch.ops.my_ops.attention, 2 * 2 * 3 * 5 * 7
    assert flops(lambda: attention(*tensors)) == product * (4 + 6)
    whole = flops(lambda: attention(*leaves(tensors)).sum().backward())
    assert whole == product * (4 * 4 + 3 * 6)
    saved = torch.ops.my_ops.attention_forward(*tensors)
    backward = (torch.randn_like(saved[0]), *tensors, None, *saved, False, None, False)
    assert flops(lambda: torch.ops.my_ops.attention_backward(*backward)) == product * (
        3 * 4 + 2 * 6
    )


def test_flops_of_lltm(device):
    steps, batch, inputs, hidden = 5, 2, 3, 4
    layer = my_ops.nn.LLTM(inputs, hidden).to(device)
    input = torch.randn(steps, batch, inputs, device=device)
    forward = 2 * steps * batch * 3 * hidden * (hidden + inputs)
    with torch.no_grad():
        assert flops(lambda: layer(input)) == forward
    through_time = 2 * steps * batch * 3 * hidden * hidden
    assert flops(lambda: layer(input)[0].sum().backward()) == 2 * forward + through_time
    cell = my_ops.nn.LLTMCell(inputs, hidden).to(device)
    assert flops(lambda: cell(input[0])) == forward // steps


@pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")  # from torch 2.10
@pytest.mark.parametrize(**named(DIFFERENTIABLE))
def test_profiler_names(op, device):
    """Products of plain tensors on the CPU are torch's own."""
    own = {op.overload._schema.name}
    if device == "cpu" and op.name in ("gemm", "linear-None", "linear-without-bias"):
        own = {"aten::mm", "aten::addmm"}
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True
    ) as profile:
        op(*op.tensors(2, torch.float32, device))
    assert own & {event.key for event in profile.key_averages()}


# ------------------------------------------------------------------------ threads, processes


@pytest.mark.parametrize(**named(DIFFERENTIABLE))
def test_threads(op, device):
    """Eight threads at once; on a GPU each has its own stream."""
    tensors = op.tensors(33, torch.float32, device)

    def run():
        own = leaves(tensors)
        results = op(*own)
        ones = [torch.ones_like(r) for r in results]
        return (*results, *torch.autograd.grad(results, own, ones))

    want, failures = run(), []
    if device == "cuda":
        torch.cuda.synchronize()

    def work():
        with torch.cuda.stream(torch.cuda.Stream() if device == "cuda" else None):
            for _ in range(10):
                for ours, exact in zip(run(), want, strict=True):
                    if not torch.equal(ours, exact):
                        failures.append(op.name)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.slow
@pytest.mark.skipif(
    "libtsan" not in os.environ.get("LD_PRELOAD", ""), reason="of make tsan: that it sees a race"
)
def test_two_threads_with_one_result_are_seen():
    script = """
        import threading
        import torch, my_ops

        out = torch.empty(2000, 2000)
        work = lambda: torch.ops.my_ops.fill_index.out(out=out)
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, "TSAN_OPTIONS": os.environ["TSAN_OPTIONS"] + ":halt_on_error=1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "ThreadSanitizer: data race" in done.stderr
    assert "my_ops/_C.so" in done.stderr
    assert done.returncode != 0


@pytest.mark.slow
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_data_loader_workers(run_python, start):
    """In a separate process: one whose autograd has started threads for a GPU cannot be forked."""
    script = """
        import child_processes, torch
        loader = torch.utils.data.DataLoader(
            child_processes.Squares(), batch_size=4, num_workers=2, multiprocessing_context=START
        )
        got = torch.cat(list(loader))
        assert torch.equal(got, torch.arange(8.0).add(1)[:, None, None].expand(8, 3, 3))
    """
    run_python(script.replace("START", repr(start)))


@pytest.mark.slow
def test_import_after_fork(run_python):
    script = """
        import os, torch
        if os.fork() == 0:
            import my_ops
            os._exit(0 if my_ops.add_one(torch.zeros(2)).tolist() == [1, 1] else 1)
        _, status = os.wait()
        assert status == 0, status
    """
    run_python(script)


@pytest.mark.slow
def test_spawned_process():
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=child_processes.imported_in_a_child, args=(queue,))
    child.start()
    assert queue.get(timeout=60) == [1, 1]
    child.join()


@pytest.mark.skipif(
    not hasattr(sys, "_is_gil_enabled") or sys._is_gil_enabled(), reason="needs Python without GIL"
)
def test_import_leaves_the_gil_off(run_python):
    run_python("import sys, my_ops; assert not sys._is_gil_enabled()")


# ----------------------------------------------------------------------- layers as objects


def test_checkpointed_layer(layer):
    module, x = layer
    found = []
    for run in (module, lambda x: checkpoint(module, x, use_reentrant=False)):
        module.zero_grad()
        x = x.detach().requires_grad_()
        first(run(x)).sum().backward()
        found.append([x.grad, *(p.grad.clone() for p in module.parameters())])
    for plain, again in zip(*found, strict=True):
        assert torch.equal(plain, again)


def test_selective_checkpoint_sees_the_op(device):
    seen = set()

    def policy(context, op, *args, **kwargs):
        seen.add(op)
        return torch.utils.checkpoint.CheckpointPolicy.PREFER_RECOMPUTE

    x = torch.randn(2, 2, device=device, requires_grad=True)
    contexts = lambda: torch.utils.checkpoint.create_selective_checkpoint_contexts(policy)  # noqa: E731
    checkpoint(my_ops.gemm, x, x, use_reentrant=False, context_fn=contexts).sum().backward()
    assert torch.ops.my_ops.gemm.default in seen
    assert x.grad is not None


def test_copies_and_files(layer, tmp_path):
    module, x = layer
    want = first(module(x))
    copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
    torch.save(module.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    fresh = copy.deepcopy(module)
    for parameter in fresh.parameters():
        torch.nn.init.zeros_(parameter)
    fresh.load_state_dict(state)
    torch.save(module, tmp_path / "module.pt")
    copies += [fresh, torch.load(tmp_path / "module.pt", weights_only=False)]
    for again in copies:
        assert torch.equal(first(again(x)), want)


def test_linear_exchanges_its_state_with_torch(device):
    ours, theirs = my_ops.nn.Linear(3, 4).to(device), torch.nn.Linear(3, 4).to(device)
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 3, device=device)
    torch.testing.assert_close(ours(x), theirs(x), rtol=2.0**-22, atol=2.0**-22)


class Tagged(torch.Tensor):
    """A plain subclass: results keep its type."""


@pytest.mark.parametrize(**named(DIFFERENTIABLE))
def test_subclasses(op, device):
    tensors = op.tensors(2, torch.float64, device)
    want = op(*tensors)
    for ours, exact in zip(op(*(t.as_subclass(Tagged) for t in tensors)), want, strict=True):
        assert type(ours) is Tagged
        assert torch.equal(ours.as_subclass(torch.Tensor), exact)
    pairs = leaves(tuple(TwoTensor(t.clone(), t.clone()) for t in tensors))
    results = op(*pairs)
    grads = torch.autograd.grad(sum(r.sum() for r in results), pairs)
    plain = leaves(tensors)
    wanted = torch.autograd.grad(sum(r.sum() for r in op(*plain)), plain)
    for pair, exact in zip((*results, *grads), (*want, *wanted), strict=True):
        assert type(pair) is TwoTensor
        # With a gradient, linear is more than one kernel.
        torch.testing.assert_close(pair.b, exact, rtol=2.0**-50, atol=2.0**-50)


def test_saved_tensor_hooks_see_what_is_saved(device):
    x = torch.randn(2, 2, device=device, requires_grad=True)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        my_ops.d_sigmoid(x).sum().backward()
    assert any(t is x or torch.equal(t, x) for t in packed)


def test_linear_with_relu_saves_its_output_alone(device):
    x, weight = torch.randn(5, 3, device=device), torch.randn(4, 3, device=device)
    x.requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = my_ops.linear(x, weight, activation="relu")
    assert {t.data_ptr() for t in saved} == {t.data_ptr() for t in (x, weight, y)}


# ---------------------------------------------------------------------------------- export


def batch_first_shape(layer):
    return 1 if isinstance(layer, my_ops.nn.LLTM) else 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch's own reader
def test_export_at_another_batch_size(layer):
    module, x = layer
    batch = batch_first_shape(module)
    dynamic = {batch: torch.export.Dim("batch", min=2, max=99)}
    program = torch.export.export(module, (x,), dynamic_shapes=(dynamic,))
    names = {str(node.target) for node in program.graph.nodes}
    assert any(name.startswith("my_ops.") for name in names)
    saved = io.BytesIO()
    torch.export.save(program, saved)
    saved.seek(0)
    loaded = torch.export.load(saved).module()
    other = torch.cat([x, x, x], batch)
    assert torch.equal(first(loaded(other)), first(module(other)))


@pytest.mark.slow
def test_inductor_package(run_python, tmp_path, device):
    """Compiled ahead of time, loaded from its file and run with another length and batch size, in a
    separate process, as in a program that serves a model."""
    script = """
        import sys, torch, my_ops

        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.embed = my_ops.nn.LinearActivation(3, 4, activation="silu")
                self.layers = torch.nn.ModuleList(
                    getattr(my_ops.nn, name)(4, 4) for name in ("LLTM", "LSTM", "GRU", "RNN")
                )

            def forward(self, x, lengths, reset):
                y = self.embed(x)
                for layer in self.layers:
                    y = layer(y, lengths=lengths, reset=reset)[0]
                return my_ops.round_ste(my_ops.custom_add(y, my_ops.d_sigmoid(y))) + y

        device, path = sys.argv[1:]
        def inputs(steps, batch):
            lengths = torch.randint(0, steps + 1, (batch,), device=device)
            reset = torch.rand(steps, batch, device=device) < 0.3
            return torch.randn(steps, batch, 3, device=device), lengths, reset

        model = Model().to(device).eval()
        t, b = (torch.export.Dim(name, min=2, max=99) for name in "tb")
        shapes = ({0: t, 1: b}, {0: b}, {0: t, 1: b})
        with torch.no_grad():
            program = torch.export.export(model, inputs(5, 2), dynamic_shapes=shapes)
            path = torch._inductor.aoti_compile_and_package(program, package_path=path)
            loaded = torch._inductor.aoti_load_package(path)
            for arguments in (inputs(5, 2), inputs(9, 7)):
                got = loaded(*arguments)
                got = got[0] if isinstance(got, (list, tuple)) else got
                torch.testing.assert_close(got, model(*arguments), rtol=2.0**-21, atol=2.0**-21)
        print("as eager")
    """
    assert run_python(script, device, tmp_path / "model.pt2").endswith("as eager\n")


@pytest.mark.slow
@pytest.mark.skipif(**NO_INDUCTOR)
def test_gradients_of_another_version_do_not_come_from_the_compile_cache(run_python, tmp_path):
    """A later version must not use gradients that an earlier one left in the caches."""
    script = """
        import torch, torch.compiler
        import my_ops, my_ops.ops.elementwise as elementwise
        from my_ops import _autograd, _library
        version = "{version}"
        if version != my_ops.__version__:
            torch.compiler.config.cache_key_tag = ""
            _library.tag_compile_cache(version)
        class Changed(elementwise._RoundSTE):
            @staticmethod
            def backward(ctx, grad):
                grad = my_ops.add_one(grad)
                return my_ops.add_one(grad) if {later} else grad
        op = torch.ops.my_ops.round_ste.default
        _autograd.library = torch.library.Library("my_ops", "IMPL")
        import warnings; warnings.simplefilter("ignore")
        _autograd.library.impl = lambda *a: torch.library.Library.impl(
            _autograd.library, *a, allow_override=True)
        _autograd.register_gradient(op, Changed)
        x = torch.ones(3, requires_grad=True)
        torch.compile(op, fullgraph=True)(x).backward(torch.ones(3))
        print(x.grad[0].item())
    """
    environment = {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
    }
    source = textwrap.dedent(script)
    got = [
        float(run_python(source.format(later=later, version=version), **environment))
        for later, version in ((False, "1"), (True, "1"), (True, "2"))
    ]
    assert got == [2, 2, 3]  # the second shows that the cache is in use
