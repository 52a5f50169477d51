"""Faults around a call: missing memory, a fork, an interrupt, the end of Python."""

import shutil
import signal
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent

# ------------------------------------------------------------------------------------------ memory

EVERY_ALLOCATION = """
    import ctypes, os
    import failing_allocations, samples, torch

    cases = [
        (op.name, op, samples.leaves(op.tensors(5, dtype, "cpu")))
        for op in samples.DIFFERENTIABLE
        for dtype in (torch.float32, torch.bfloat16)
    ]
    cases += failing_allocations.without_gradients("cpu")
    memory = ctypes.CDLL(os.environ["LD_PRELOAD"])
    print(failing_allocations.every_allocation(memory, cases))
"""


@pytest.fixture(scope="module")
def failing_memory(tmp_path_factory):
    if not shutil.which("c++"):
        pytest.skip("needs a C++ compiler")
    library = tmp_path_factory.mktemp("memory") / "failing.so"
    source = HERE / "failing_memory.cpp"
    subprocess.run(["c++", "-O1", "-shared", "-fPIC", source, "-o", library, "-ldl"], check=True)
    return str(library)


def test_every_allocation_of_every_op_fails_once(failing_memory, run_python):
    """Forward and backward: the error is torch's, nothing changes, and the next call works."""
    alone = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    assert int(run_python(EVERY_ALLOCATION, LD_PRELOAD=failing_memory, **alone)) > 500


# --------------------------------------------------------------------------------------- processes


def test_a_data_loader_forks_workers_after_use(run_python):
    run_python("""
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


def test_a_process_forked_after_use_takes_one_thread(run_python):
    """As with torch's own ops: a fork does not copy their threads."""
    run_python("""
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


def test_python_ends_during_a_call(run_python):
    """Python waits for the thread. (Before 3.14 a daemon thread makes it abort, also in torch's
    ops.)"""
    printed = run_python("""
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


def test_an_interrupt_waits_for_the_call(run_python):
    """Ctrl-C during a call on the CPU: the op ends, then Python raises, and everything works
    afterwards."""
    printed = run_python(f"""
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
