"""Faults around a call on CUDA: missing memory, a GPU that others use, captures and processes that
end early."""

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent

# ------------------------------------------------------------------------------------------ memory

EVERY_ALLOCATION = """
    import ctypes
    import failing_allocations, my_ops, samples, torch

    path = {library!r}
    memory = ctypes.CDLL(path)
    allocator = torch.cuda.memory.CUDAPluggableAllocator(path, "allocate", "release")
    torch.cuda.memory.change_current_allocator(allocator)

    def drawn(*shapes, dtype=torch.float32):
        return [torch.randn(s, device="cuda").to(dtype).requires_grad_() for s in shapes]

    def product(a, b):
        return (my_ops.gemm(a, b),)

    def layer(x, w):
        return (my_ops.linear(x, w, activation="silu"),)

    def recurrent(op, gates, steps, batch, hidden, dtype):
        shapes = (steps, batch, 8), (batch, hidden), (gates * hidden, 8), (gates * hidden, hidden)
        x, h, w_x, w_h = drawn(*shapes, dtype=dtype)
        states = [h] if op is my_ops.gru else [h, h.detach().clone().requires_grad_()]
        return [x, *states, w_x, w_h]

    half = torch.bfloat16
    cases = [
        (op.name, op, samples.leaves(op.tensors(5, dtype, "cuda")))
        for op in samples.DIFFERENTIABLE
        for dtype in (torch.float32, half)
    ]
    cases += [
        ("fp32_sm90", product, drawn((512, 2048), (2048, 768))),
        ("fp32_narrow", product, drawn((8192, 1024), (1024, 64))),
        ("fp32_short", product, drawn((50176, 128), (128, 128))),
        ("fp32_skinny", product, drawn((16, 4096), (4096, 512))),
        ("half_sm90", product, drawn((700, 643), (643, 777), dtype=half)),
        ("linear, 16 bits", layer, drawn((600, 320), (512, 320), dtype=half)),
        ("linear, 16 bits, few outputs", layer, drawn((64, 4096), (72, 4096), dtype=half)),
        *(
            (f"{{op.__name__}} B{{batch}} H{{hidden}} {{dtype}}",
             op, recurrent(op, gates, 3, batch, hidden, dtype))
            for op, gates in ((my_ops.lstm, 4), (my_ops.gru, 3))
            for batch, hidden in ((3, 64), (20, 512), (300, 512))
            for dtype in (torch.float32, half)
        ),
    ]
    cases += failing_allocations.without_gradients("cuda")
    print(failing_allocations.every_allocation(memory, cases))
"""


def test_every_allocation_fails_once(cuda, run_python, tmp_path):
    """Forward and backward: the error says what happened, nothing changes, and the next call
    works."""
    if not shutil.which("c++"):
        pytest.skip("needs a C++ compiler")
    library = tmp_path / "failing.so"
    source = HERE / "failing_memory_cuda.cpp"
    subprocess.run(["c++", "-O1", "-shared", "-fPIC", source, "-o", library, "-ldl"], check=True)
    assert int(run_python(EVERY_ALLOCATION.format(library=str(library)))) > 300


# ------------------------------------------------------------------------------------ a shared GPU

BUSY = """
    import torch
    def work(seconds):
        import time
        a = torch.randn(4096, 4096, device="cuda")
        b = torch.empty_like(a)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for _ in range(8):
                torch.mm(a, a, out=b)
            torch.cuda.synchronize()
"""

LAUNCHES = """
    import torch, my_ops

    def rounds(count, between):
        # clusters, grids and warpgroups; each kernel holds many SMs or all of them at once
        layers = []
        for kind in (my_ops.nn.LSTM, my_ops.nn.GRU, my_ops.nn.LLTM):
            for batch, hidden, dtype in (
                (3, 128, torch.float32), (16, 512, torch.float32), (16, 512, torch.bfloat16),
                (300, 512, torch.bfloat16), (300, 512, torch.float32),
            ):
                layer = kind(8, hidden, device="cuda", dtype=dtype)
                x = torch.randn(6, batch, 8, device="cuda", dtype=dtype).requires_grad_()
                layers.append((layer, x))

        def train(layer, x):
            y, _ = layer(x)
            return y.detach(), torch.autograd.grad(y, x, y.detach())[0]

        want = [train(*pair) for pair in layers]
        differing = torch.zeros((), dtype=torch.int64, device="cuda")
        for i in range(-(-count // (2 * len(layers)))):
            between(i)
            for pair, expected in zip(layers, want):
                for a, b in zip(train(*pair), expected):
                    differing += (a != b).any()
        assert differing.item() == 0, differing
"""


def test_persistent_kernels_wait_for_kernels_on_another_stream(cuda, run_python):
    """1,000 launches, while products fill the GPU: none hangs, and the results are the same."""
    run_python(
        LAUNCHES
        + """
    other = torch.cuda.Stream()
    a = torch.randn(4096, 4096, device="cuda")
    b = torch.empty_like(a)
    def between(i):
        with torch.cuda.stream(other):
            for _ in range(4):
                torch.mm(a, a, out=b)
    rounds(1000, between)
    """
    )


BESIDE = """
    import os, subprocess, sys, threading
    if sys.argv[-1] == "other":
        ended = threading.Event()
        threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
        beside()
        print("ready", flush=True)
        while not ended.is_set():
            beside()
        torch.cuda.synchronize()
        os._exit(0)  # Python's own end aborts if autograd's thread still waits for the lock
    else:
        script = sys.orig_argv[sys.orig_argv.index("-c") + 1]
        other = subprocess.Popen(
            [sys.executable, "-c", script, "other"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        assert other.stdout.readline() == "ready\\n"
        rounds(1000, lambda i: None)
        assert other.poll() is None
        other.stdin.close()
        assert other.wait(100) == 0
"""


@pytest.mark.parametrize("beside", ["work(0.2)", "rounds(200, lambda i: None)"])
def test_persistent_kernels_beside_another_program(beside, cuda, run_python):
    """The same beside another process, which fills the GPU with products or with the same
    kernels."""
    run_python(f"{BUSY}{LAUNCHES}\n    beside = lambda: {beside}\n{BESIDE}")


# ----------------------------------------------------------------------------- what ends too early


def test_a_capture_that_is_given_up(cuda, run_python):
    """By an exception of the program, and by a synchronisation, which CUDA does not allow there."""
    run_python("""
        import my_ops, torch
        layers = [my_ops.nn.LSTM(8, 128), my_ops.nn.GRU(8, 512), my_ops.nn.LLTM(8, 600)]
        layers = [layer.cuda().requires_grad_(False) for layer in layers]
        x = torch.randn(4, 20, 8, device="cuda")
        a = torch.randn(640, 640, device="cuda")

        def call():
            return [*(layer(x)[0] for layer in layers), my_ops.gemm(a, a), my_ops.d_sigmoid(a)]

        def same(got, want):
            return all(torch.equal(g, w) for g, w in zip(got, want, strict=True))

        want = call()
        for wrong in (lambda y: 1 / 0, lambda y: y.sum().item()):
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph):
                    wrong(call()[0])
            except (ZeroDivisionError, RuntimeError) as error:
                print(type(error).__name__)
            del graph
            assert same(call(), want)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                got = call()
            graph.replay()
            assert same(got, want)
    """)


def test_an_interrupt_between_launches(cuda, run_python):
    run_python("""
        import os, signal, threading
        import my_ops, torch
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job may ignore it
        layer = my_ops.nn.LSTM(8, 512, device="cuda")
        x = torch.randn(64, 16, 8, device="cuda", requires_grad=True)

        def train():
            y, _ = layer(x)
            return y.detach(), *torch.autograd.grad(y.sum(), [x, *layer.parameters()])

        want = train()
        for _ in range(20):
            threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT)).start()
            try:
                while True:
                    train()
            except KeyboardInterrupt:
                pass
            assert all(torch.equal(a, b) for a, b in zip(train(), want))
    """)


def test_python_ends_before_the_gpu(cuda, run_python):
    run_python("""
        import my_ops, torch
        layer = my_ops.nn.LSTM(64, 512, device="cuda")
        x = torch.randn(2000, 4, 64, device="cuda")
        for _ in range(20):
            y, _ = layer(x)
            y.sum().backward()
    """)


def test_a_process_forked_after_use(cuda, run_python):
    """It may use the CPU; for CUDA torch says what it says for its own ops."""
    run_python("""
        import os
        import my_ops, torch
        x = torch.randn(300, 300, device="cuda")
        on_cpu = x.cpu()
        torch.set_num_threads(1)
        want, want_on_cpu = my_ops.gemm(x, x), my_ops.gemm(on_cpu, on_cpu)
        if os.fork() == 0:
            code = 1
            try:
                assert torch.equal(my_ops.gemm(on_cpu, on_cpu), want_on_cpu)
                my_ops.add_one(torch.zeros(2, device="cuda"))
            except RuntimeError as error:
                code = 0 if "forked subprocess" in str(error) else 2
            finally:
                os._exit(code)
        _, status = os.wait()
        assert status == 0, status
        assert torch.equal(my_ops.gemm(x, x), want)
    """)
