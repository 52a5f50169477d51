"""A CUDA graph with one node, which is conditional, by the driver's functions: torch has none."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

ASSIGN_DEFAULT, RELAXED, IF, CONDITIONAL = 1, 2, 0, 13  # of cuda.h


class NodeParams(ctypes.Structure):
    """CUgraphNodeParams of a conditional node."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("reserved", ctypes.c_int * 3),
        ("handle", ctypes.c_ulonglong),
        ("condition_type", ctypes.c_int),
        ("size", ctypes.c_uint),
        ("bodies", ctypes.POINTER(ctypes.c_void_p)),
        ("context", ctypes.c_void_p),
        ("rest", ctypes.c_longlong * 26),
    )


def driver(name: str, *args: object) -> None:
    status = getattr(ctypes.CDLL("libcuda.so.1"), name)(*args)
    if status != 0:
        raise RuntimeError(f"{name}: CUDA error {status}")


@contextmanager
def conditional_graph(condition: bool) -> Iterator[Callable[[], None]]:
    """Captures what the block does as the body of the node. Yields the replay, for after the block;
    intermediate tensors of the capture may then share memory with tensors made since."""
    pointer = ctypes.c_void_p
    graph, body, executable, node, context = (pointer() for _ in range(5))
    handle = ctypes.c_ulonglong()
    driver("cuCtxGetCurrent", ctypes.byref(context))
    driver("cuGraphCreate", ctypes.byref(graph), 0)
    driver(
        "cuGraphConditionalHandleCreate",
        ctypes.byref(handle),
        graph,
        context,
        int(condition),
        ASSIGN_DEFAULT,
    )
    params = NodeParams(
        type=CONDITIONAL, handle=handle.value, condition_type=IF, size=1, context=context
    )
    none = (None, None, ctypes.c_size_t(0))  # that it depends on
    driver("cuGraphAddNode_v2", ctypes.byref(node), graph, *none, ctypes.byref(params))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    on = pointer(stream.cuda_stream)

    def replay() -> None:
        torch.cuda.synchronize()
        driver("cuGraphLaunch", executable, on)
        torch.cuda.synchronize()

    with torch.cuda.stream(stream):
        driver("cuStreamBeginCaptureToGraph", on, pointer(params.bodies[0]), *none, RELAXED)
        try:
            yield replay
        except BaseException:
            with suppress(RuntimeError):  # of the capture that failed
                driver("cuStreamEndCapture", on, ctypes.byref(body))
            raise
        driver("cuStreamEndCapture", on, ctypes.byref(body))
    driver("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, ctypes.c_ulonglong(0))
