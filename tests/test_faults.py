"""Faults around a call: missing memory, a fork, an interrupt, the end of Python."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def run(script, **environment):
    """Runs a script in its own process, which may use the helpers of the tests."""
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# ------------------------------------------------------------------------------------------ memory

EVERY_ALLOCATION = """
    import ctypes, itertools, os
    import samples, torch

    memory = ctypes.CDLL(os.environ["LD_PRELOAD"])

    def attempt(op, tensors, n=0):
        memory.fail_at(n)
        results = op(*tensors)
        inputs = [t for t in tensors if t.requires_grad]
        grads = torch.autograd.grad(results, inputs, results, allow_unused=True)
        return [*results, *grads]

    def same(got, want):
        return all(a is b or torch.equal(a, b) for a, b in zip(got, want, strict=True))

    total = 0
    for op in samples.DIFFERENTIABLE:
        for dtype in (torch.float32, torch.bfloat16):
            tensors = samples.leaves(op.tensors(5, dtype, "cpu"))
            before = [t.detach().clone() for t in tensors]
            want = attempt(op, tensors)
            for n in itertools.count(1):
                try:
                    got = attempt(op, tensors, n)
                except RuntimeError as error:
                    assert memory.failures() == 1, (op.name, n)
                    assert "can't allocate memory" in str(error), (op.name, n, str(error))
                    total += 1
                else:
                    assert memory.failures() == 0, (op.name, n, "went on without its memory")
                    memory.fail_at(0)
                    assert n > 1 and same(got, want)
                    break
                memory.fail_at(0)
                assert same([t.detach() for t in tensors], before), (op.name, n)
                assert same(attempt(op, tensors), want), (op.name, n, "the next call")
    print(total, "failures")
"""


@pytest.fixture(scope="module")
def failing_memory(tmp_path_factory):
    if not shutil.which("c++"):
        pytest.skip("needs a C++ compiler")
    library = tmp_path_factory.mktemp("memory") / "failing.so"
    source = HERE / "failing_memory.cpp"
    subprocess.run(["c++", "-O1", "-shared", "-fPIC", source, "-o", library, "-ldl"], check=True)
    return str(library)


def test_every_allocation_of_every_op_fails_once(failing_memory):
    """Forward and backward: the error is torch's, nothing changes, and the next call works."""
    count, _ = run(EVERY_ALLOCATION, LD_PRELOAD=failing_memory, OMP_NUM_THREADS="1").split()
    assert int(count) > 500


# --------------------------------------------------------------------------------------- processes


def test_a_data_loader_forks_workers_after_use():
    run("""
        import child_processes, my_ops, torch
        torch.set_num_threads(4)
        x = torch.randn(1000, 1000)
        for call in (my_ops.d_sigmoid, lambda x: my_ops.gemm(x, x), my_ops.nn.LSTM(1000, 8)):
            call(x)  # in all threads
        squares = child_processes.Squares()
        loader = torch.utils.data.DataLoader(
            squares, batch_size=4, num_workers=2, multiprocessing_context="fork"
        )
        assert torch.equal(torch.cat(list(loader)), torch.stack([squares[i] for i in range(8)]))
    """)


def test_a_process_forked_after_use_takes_one_thread():
    """As with torch's own ops: a fork does not copy their threads."""
    run("""
        import os, signal
        import my_ops, torch
        torch.set_num_threads(4)
        x = torch.randn(1000, 1000, requires_grad=True)
        want = my_ops.d_sigmoid(x)
        if os.fork() == 0:
            signal.alarm(100)
            torch.set_num_threads(1)
            y = my_ops.d_sigmoid(x)
            y.sum().backward()
            os._exit(0 if torch.equal(y, want) and x.grad is not None else 1)
        _, status = os.wait()
        assert status == 0, status
        assert torch.equal(my_ops.d_sigmoid(x), want)
    """)


def test_python_ends_during_a_call():
    """Python waits for the thread. (Before 3.14 a daemon thread makes it abort, also in torch's
    ops.)"""
    printed = run("""
        import threading, time
        import my_ops, torch

        x = torch.randn(3000, 8, 64)
        layer = my_ops.nn.LSTM(64, 128).requires_grad_(False)
        started = time.perf_counter()
        layer(x[:300])
        short = time.perf_counter() - started

        def work():
            layer(x)
            print("ended")

        threading.Thread(target=work).start()
        time.sleep(short)
    """)
    assert printed == "ended\n"


def test_an_interrupt_waits_for_the_call():
    """Ctrl-C during a call on the CPU: the op ends, then Python raises, and everything works
    afterwards."""
    printed = run(f"""
        import os, signal, threading, time
        import my_ops, torch

        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job may ignore it
        x = torch.randn(3000, 8, 64)
        h, c = torch.zeros(2, 8, 128).unbind()
        weights = [torch.randn(512, 64) / 8, torch.randn(512, 128) / 8]
        start = time.perf_counter()
        want = my_ops.lstm(x, h, c, *weights)
        long = time.perf_counter() - start
        main = threading.main_thread().ident
        threading.Timer(long / 4, signal.pthread_kill, (main, signal.{signal.SIGINT.name})).start()
        got, ended = None, False
        try:
            got = my_ops.lstm(x, h, c, *weights)
            while True:
                time.sleep(0.001)
        except KeyboardInterrupt:
            print("interrupted")
        again = my_ops.lstm(x, h, c, *weights)
        assert all(torch.equal(a, b) for a, b in zip(again, want))
    """)
    assert printed == "interrupted\n"
