"""Memory: none is leaked, and if there is not enough the error is torch's own."""

import contextlib
import ctypes
import gc
import importlib
import os
import time

import pytest
import torch
from samples import DIFFERENTIABLE, named

import my_ops
from my_ops._errors import raise_out_of_memory


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.parametrize("gradient", [False, True])
def test_memory_stays_flat(gradient, device):
    """20,000 calls of the family, including errors. In torch < 2.14 gelu leaks 48 bytes per
    call."""
    newer = torch.__version__ >= torch.torch_version.TorchVersion("2.14")
    activation = "gelu" if newer else "silu"
    x = torch.randn(4, 4, device=device, requires_grad=gradient)
    wrong = torch.randn(3, 5, device=device)

    def calls(count):
        for i in range(count // 3):
            my_ops.round_ste(x)
            my_ops.linear(x, x, activation=activation)
            if i % 10 == 0:
                with pytest.raises(RuntimeError):
                    my_ops.gemm(x, wrong)
            y = my_ops.gemm(x, x)
            if gradient:
                torch.autograd.grad(y, x, x.detach())

    def allocated():
        if device == "cpu":
            return 0
        readings = []
        for _ in range(10):  # autograd's thread may hold its last tensors a little longer
            time.sleep(0.1)
            readings.append(torch.cuda.memory_allocated())
        return min(readings)

    calls(2000)
    allocated_before = allocated()
    before = resident()
    calls(20_000)
    assert resident() - before < 2 << 20
    assert allocated() == allocated_before


HUGE = 1 << 23  # a row of a matrix that fits, a side of one that does not


def long(device, *shape, size=HUGE):
    """Ones of ``shape``, where None means ``size``; a single element in memory."""
    return torch.ones(1, device=device).expand([size if s is None else s for s in shape])


def lltm_of(steps, device):
    state = torch.ones(1, 1, device=device).expand(steps, 64)
    weights, bias = torch.ones(192, 65, device=device), torch.ones(192, device=device)
    return my_ops.lltm(long(device, None, None, 1, size=steps), state, state, weights, bias)


IMPOSSIBLE = {
    "add_one": lambda d: my_ops.add_one(long(d, None, None)),
    "custom_add": lambda d: my_ops.custom_add(long(d, 1, None), long(d, None, 1)),
    "custom_add-mixed": lambda d: my_ops.custom_add(long(d, None, None).mT, long(d, None).double()),
    "fill_index": lambda d: my_ops.fill_index(HUGE, HUGE, device=d),
    "gemm": lambda d: my_ops.gemm(long(d, None, 1), long(d, 1, None)),
    "gemm-gradient": lambda d: my_ops.gemm(long(d, None, 1).requires_grad_(), long(d, 1, None)),
    "gemm-dispatcher": lambda d: torch.ops.my_ops.gemm(long(d, None, 1), long(d, 1, None)),
    "linear": lambda d: my_ops.linear(long(d, None, 1), long(d, None, 1), activation="gelu"),
    "lltm": lambda d: lltm_of(1 << 20, d),
}


@pytest.mark.parametrize(
    "name, inference",
    # Without Python in between, the class of the error is lost.
    [(n, i) for n in IMPOSSIBLE for i in (False, True) if not (i and n == "gemm-dispatcher")],
)
def test_out_of_memory(name, inference, device):
    """The error is torch's own, with its class and its numbers."""
    with pytest.raises(RuntimeError) as native:
        torch.empty(HUGE, HUGE, device=device)
    figures = "CUDA out of memory. Tried to allocate" if device == "cuda" else "can't allocate mem"
    assert figures in str(native.value)
    with (
        torch.inference_mode(inference),
        pytest.raises(type(native.value), match=figures) as caught,
    ):
        IMPOSSIBLE[name](device)
    assert type(caught.value) is type(native.value)
    assert torch.equal(my_ops.fill_index(2, 2, device=device).cpu(), my_ops.fill_index(2, 2))


@pytest.mark.parametrize(
    "error, found",
    [
        (RuntimeError("my_ops: aten::mm failed: CUDA out of memory. Tried to allocate"), True),
        (RuntimeError("gemm: CUDA launch failed: out of memory (cudaErrorMemoryAllocation)"), True),
        (RuntimeError("my_ops: empty failed (8 bytes on cpu)"), False),  # memory is free again
        # On a device that says nothing; meta stands for one whose memory is free again.
        (RuntimeError("my_ops: empty failed (8 bytes on meta)"), True),
        (RuntimeError("my_ops: aten::to failed (8 bytes on meta)"), True),
        (RuntimeError("gemm: b must have k = 4 rows"), False),
        (torch.OutOfMemoryError("CUDA out of memory"), False),  # has the class already
    ],
)
def test_errors_that_are_out_of_memory(error, found):
    with pytest.raises(torch.OutOfMemoryError) if found else contextlib.nullcontext():
        raise_out_of_memory(error)


def test_an_op_that_fails_without_a_reason():
    """It may have failed for another one than memory."""
    with pytest.raises(RuntimeError, match="no reason: most often, out of memory") as caught:
        raise_out_of_memory(RuntimeError("my_ops: aten::mm failed (8 bytes on meta)"))
    assert caught.type is RuntimeError


@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError])
@pytest.mark.parametrize("name", ["gemm.product", "linear.linear_product"])
def test_out_of_memory_in_torchs_own_product(name, error, monkeypatch):
    """It is not taken for arguments that torch refuses, which the op then computes."""
    of, _, function = name.partition(".")
    module = importlib.import_module(f"my_ops.ops.{of}")

    def fails(*_):
        raise error("CUDA out of memory, on purpose")

    monkeypatch.setattr(module, "is_half_product", lambda *_: True)
    monkeypatch.setattr(torch, "mm", fails)
    monkeypatch.setattr(torch.nn.functional, "linear", fails)
    x = torch.ones(8, 8, dtype=torch.bfloat16)
    with pytest.raises(torch.OutOfMemoryError, match="on purpose"):
        getattr(module, function)(x, x)


class Mallinfo(ctypes.Structure):
    """The struct in glibc's <malloc.h>."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    ]


def bytes_in_use():
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Mallinfo
    gc.collect()
    return mallinfo().uordblks


@pytest.mark.parametrize(**named(DIFFERENTIABLE))
def test_no_byte_is_lost(op):
    """On the host, every call frees what it allocates."""
    if "gelu" in op.name and torch.__version__ < torch.torch_version.TorchVersion("2.14"):
        pytest.skip("torch loses the name of the kind of gelu")
    tensors = op.tensors(3, torch.float32, "cpu")
    for _ in range(200):
        op(*tensors)
    before = bytes_in_use()
    for _ in range(1000):
        op(*tensors)
    assert bytes_in_use() - before < 8 * 1000
