"""The persistent CUDA kernels of cells that are defined at run time: planned and launched by the
compiled module, which has the engine, and compiled at the first call that needs them."""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from my_ops.ops._common import ops
from my_ops.recurrent import _carried, _compiled, _nvrtc
from my_ops.recurrent._compiled import (
    CannotCompile,
    body_of,
    lacking,
    say,
    say_refused,
    shown,
    struct_of,
)
from my_ops.recurrent._formulas import Rows
from my_ops.recurrent._weights import heads_of

_PACKAGE = Path(__file__).resolve().parents[1]
_SOURCE = _PACKAGE / "_recurrent.cuh"  # which the build makes of kernels/recurrent/nvrtc.cuh
TYPES = {
    torch.float32: b"float",
    torch.float16: b"__half",
    torch.bfloat16: b"__nv_bfloat16",
}
_PLAN_BYTES = 256  # kPlanBytes of csrc/own_kernels_cuda.cpp
# Under the lock of _compiled.
_loaded: dict[tuple[str, bytes], tuple[int, ctypes.c_void_p]] = {}  # by source and kernel
_refused = set[tuple[str, bool]]()  # cells that cannot be compiled, and whether for several heads


class _Asked(ctypes.Structure):
    """AskedKernel of csrc/own_kernels_cuda.cpp."""

    _fields_ = [
        *((name, ctypes.c_char_p) for name in ("cell", "type")),
        *((name, ctypes.c_int) for name in ("gates", "terms", "state", "width", "backward")),
        *((name, ctypes.c_int64) for name in ("steps", "batch", "hidden")),
        ("heads", ctypes.c_int),
        ("device", ctypes.POINTER(ctypes.c_int)),
    ]


class _Planned(NamedTuple):
    plan: Any
    workspace: int  # bytes
    name: bytes


def _pointers(*names: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_void_p) for name in names]


_SIZES = [(name, ctypes.c_int64) for name in ("steps", "batch", "hidden")]


class _Sequence(ctypes.Structure):
    """RecurrentSequence of include/recurrent.h."""

    _fields_ = [
        *_pointers("gates_x", "bias_x", "bias_h", "vectors", "w_h"),
        ("w_row", ctypes.c_int64),
        *_pointers("h0", "carried0", "reset", "zoneout", "output", "h_n", "carried_n", "saved"),
        *_pointers("carried"),
        *_SIZES,
    ]


class _SequenceBackward(ctypes.Structure):
    """RecurrentSequenceBackward of include/recurrent.h."""

    _fields_ = [
        *_pointers("grad_output", "grad_h_n", "grad_carried_n", "saved", "carried", "output"),
        *_pointers("h0", "carried0", "w_h"),
        ("w_row", ctypes.c_int64),
        *_pointers("reset", "zoneout", "grad_kept", "grad_terms", "grad_h0", "grad_carried0"),
        *_SIZES,
    ]


class _Kernel(NamedTuple):
    plan: Any
    workspace: int  # bytes
    handle: ctypes.c_void_p


@functools.cache
def _module() -> Any:
    """None without the kernels' source, as in builds for the CPU."""
    if not _SOURCE.exists():
        return None
    module = ctypes.CDLL(str(_PACKAGE / "_C.so"))
    module.my_ops_plan_own_kernel.restype = ctypes.c_int64
    module.my_ops_error_string.restype = ctypes.c_char_p
    return module


@functools.cache
def _engine() -> str:
    return _SOURCE.read_text()


def source_of(header: str) -> str:
    """What NVRTC compiles for a cell, with what ``cell.header()`` prints."""
    return _engine() + body_of(header)


def _error(module: Any, status: int) -> str:
    return f"{module.my_ops_error_string(status).decode()} ({status})"


@functools.lru_cache(4096)
def kernel_of(
    cell: Any,
    dtype: torch.dtype,
    device: int,
    backward: bool,
    steps: int,
    batch: int,
    hidden: int,
    heads: int,
) -> _Kernel | None:
    """The kernel that runs all steps and heads of a layer on the current device, or None if they do
    not run in one launch. It is compiled and loaded at the first call."""
    module = _module()
    if module is None or dtype not in TYPES:
        return None
    key = cell.name, heads > 1
    with _compiled.lock:
        if key in _refused:
            return None
        try:
            header = cell.header()
        except ValueError:  # the kernels lack a function
            _refused.add(key)
            return None
        planned = _plan(module, cell, header, dtype, backward, (steps, batch, hidden, heads))
        if planned is None:
            return None
        try:
            handle = _load(module, source_of(header), planned, cell, backward)
        except CannotCompile as error:
            _refused.add(key)
            how = "its heads one after the other" if heads > 1 else "step by step"
            say_refused(cell, how, error)
            return None
        return _Kernel(planned.plan, planned.workspace, handle)


def dtype_of_call(x: Tensor) -> torch.dtype:
    """That of the op which a call with ``x`` on CUDA runs: autocast leaves float64."""
    if x.dtype != torch.float64 and torch.is_autocast_enabled("cuda"):
        return torch.get_autocast_dtype("cuda")
    return x.dtype


def in_one_launch(
    cell: Any, x: Tensor, trains: bool, steps: int, batch: int, hidden: int, heads: int
) -> bool:
    """Whether all steps and heads of a call with ``x`` do; if it ``trains``, backward's too."""
    asked = cell, dtype_of_call(x), x.device.index
    with torch.cuda.device(x.device):
        return all(
            kernel_of(*asked, backward, steps, batch, hidden, heads) is not None
            for backward in ((False, True) if trains else (False,))
        )


def _plan(
    module: Any,
    cell: Any,
    header: str,
    dtype: torch.dtype,
    backward: bool,
    sizes: tuple[int, int, int, int],
    gpu: Sequence[int] | None = None,
) -> _Planned | None:
    """For the current device, or the one of these numbers; None if it runs step by step. ``sizes``:
    steps, batch, hidden and heads."""
    state = len(cell.carried) + cell.reads_h
    facts = (cell.gates, cell.terms, state, dtype.itemsize, backward, *sizes)
    device = None if gpu is None else (ctypes.c_int * len(gpu))(*gpu)
    asked = _Asked(struct_of(header).encode(), TYPES[dtype], *facts, device)
    plan = ctypes.create_string_buffer(_PLAN_BYTES)
    name = ctypes.create_string_buffer(512)
    workspace = module.my_ops_plan_own_kernel(ctypes.byref(asked), plan, name, len(name))
    return None if workspace < 0 else _Planned(plan, workspace, name.value)


def _load(
    module: Any, source: str, planned: _Planned, cell: Any, backward: bool
) -> ctypes.c_void_p:
    """From the cell's package, from the cache, or compiled."""
    capability = torch.cuda.get_device_capability()
    key = f"{capability}{source}", planned.name
    if key not in _loaded:
        kernel, what = planned.name.decode(), f"{shown(cell)}{' backward' if backward else ''}"
        built = _nvrtc.built_code(cell, source, kernel)
        loaded = _load_code(module, planned.plan, built) if built else None
        if loaded and loaded[0] != 0:  # the driver is older than the release of CUDA
            say(f"{what} is compiled again: {cell.built}: {_error(module, loaded[0])}")
        if not loaded or loaded[0] != 0:
            code = _nvrtc.machine_code(source, kernel, f"{what}{lacking(cell)}")
            loaded = _load_code(module, planned.plan, code)
        _loaded[key] = loaded
    status, handle = _loaded[key]
    if status != 0:
        raise CannotCompile(f"its kernel does not load: {_error(module, status)}")
    return handle


def _load_code(module: Any, plan: Any, code: tuple[bytes, bytes]) -> tuple[int, ctypes.c_void_p]:
    handle = ctypes.c_void_p()
    return module.my_ops_load_own_kernel(*code, plan, ctypes.byref(handle)), handle


def build(
    cell: Any,
    header: str,
    folder: Path,
    gpu: Sequence[int],
    dtype: torch.dtype,
    hidden_size: int,
    heads: int,
    batch_sizes: Sequence[int],
) -> None:
    """Compiles the kernels of a cell for layers of these sizes on a GPU of these numbers, those of
    AskedDevice in csrc/explain.h, into a folder of a package: those that run all heads at once, or
    else one.

    Raises:
        CannotCompile: there are no such kernels, or NVRTC is missing or refuses.
    """
    module = _module()
    if module is None:
        raise CannotCompile("this my_ops is built for the CPU")
    kernels = set[str]()
    for batch, backward in itertools.product(batch_sizes, (False, True)):
        given = module, cell, header, dtype, backward
        planned = _plan(*given, (1, batch, hidden_size, heads), gpu)
        planned = planned or _plan(*given, (1, batch, hidden_size // heads, 1), gpu)
        kernels |= {planned.name.decode()} if planned else set()
    if not kernels:
        raise CannotCompile("it runs step by step")
    for kernel in sorted(kernels):
        _nvrtc.build(source_of(header), kernel, _nvrtc.architecture_of(*gpu[:2]), folder)


# -------------------------------------------------------------------------------------- launches


def _dense(t: Any) -> Any:
    """Contiguous and aligned as the kernels need it, or None."""
    if t is None:
        return None
    t = t.contiguous()
    return t if t.data_ptr() % 16 == 0 else t.clone()


def _row_major(weights: Tensor) -> Tensor:
    return weights if weights.stride(1) == 1 else weights.contiguous()


def _launch(kernel: _Kernel, op: str, backward: bool, like: Tensor, fields: dict[str, Any]) -> None:
    """Fields that are tensors become pointers. The memory of temporary ones is reused in the order
    of the stream."""
    structure = _SequenceBackward if backward else _Sequence
    given = {n: v.data_ptr() if isinstance(v, Tensor) else v for n, v in fields.items()}
    arguments = structure(**{n: v for n, v in given.items() if v is not None})
    workspace = like.new_empty(kernel.workspace, dtype=torch.uint8)
    stream = ctypes.c_void_p(torch.cuda.current_stream(like.device).cuda_stream)
    pointer, module = ctypes.c_void_p(workspace.data_ptr()), _module()
    status = module.my_ops_launch_own_kernel(
        kernel.handle, kernel.plan, int(backward), ctypes.byref(arguments), pointer, stream
    )
    if status != 0:
        raise RuntimeError(f"{op}: CUDA launch failed: {_error(module, status)}")


def forward(
    cell: Any,
    input: Tensor,
    states: Sequence[Tensor],
    parameters: Sequence[Any],
    of_rows: Sequence[Any],
    saves: bool,
) -> tuple[Tensor, ...] | None:
    """The results of NAME_forward, without the saved values if ``saves`` is false; or None if all
    steps and heads do not run in one launch."""
    if not _keeps_ended_rows(cell, of_rows):
        return None
    (steps, batch, _), hidden = input.shape, states[0].shape[-1]
    with torch.cuda.device(input.device):
        sizes, heads = (steps, batch, hidden), cell.weights.heads(hidden, *parameters)
        kernel = kernel_of(cell, input.dtype, input.device.index, False, *sizes, heads)
        if kernel is None:
            return None
        rows, vectors = Rows.of(input, *of_rows), cell.weights.vectors_of(*parameters)
        (w_x, bias_x), (w_h, bias_h) = cell.weights.linears(cell, hidden, *parameters)
        gates_x = _share(input, w_x).view(steps, batch, cell.gates, hidden)
        if rows.runs is not None:
            shut = gates_x.new_tensor(cell.shares).unsqueeze(1)
            gates_x = torch.where(rows.runs.unsqueeze(-1), gates_x, shut)
        w_h, h0 = _row_major(w_h), _dense(states[0])
        count = len(cell.carried)
        of_state = {"output": input.new_empty(sizes), "h_n": torch.empty_like(h0)}
        carried_n = input.new_empty(batch, count * hidden) if count else None
        saved = input.new_empty(steps, batch, cell.saved * hidden) if saves else None
        carried = input.new_empty(steps, batch, count * hidden) if saves and count else None
        given = {
            "gates_x": gates_x,
            "bias_x": None if bias_x is None else bias_x.contiguous(),
            "bias_h": None if bias_h is None else bias_h.contiguous(),
            "vectors": torch.cat(vectors) if vectors else None,
            "w_h": w_h,
            "w_row": w_h.stride(0),
            "h0": h0,
            "carried0": _dense(_carried.together(states[1:])),
            "reset": _dense(None if rows.reset is None else rows.reset.squeeze(-1)),
            "zoneout": _dense(rows.zoneout),
            "carried_n": carried_n,
            "saved": saved,
            "carried": carried,
            "steps": steps,
            "batch": batch,
            "hidden": hidden,
        }
        _launch(kernel, cell.name, False, input, {**given, **of_state})
        output, h_n = of_state["output"], of_state["h_n"]
        if rows.runs is not None:
            count_of_steps, last = _ends(rows.runs, hidden)
            h_n = torch.where(count_of_steps > 0, output.gather(0, last).squeeze(0), h0)
            output = torch.where(rows.runs, output, 0.0)
        results = (output, h_n, *_carried.apart(cell, carried_n))
        return (*results, saved, *_carried.apart(cell, carried)) if saved is not None else results


def backward(
    cell: Any,
    grads: Sequence[Tensor | None],
    saved: Tensor,
    read: Sequence[Tensor],
    w_h: Tensor,
    of_rows: Sequence[Any],
) -> tuple[Tensor, ...] | None:
    """The results of NAME_backward, likewise. ``read`` are the sequences and then the states that
    the cell reads."""
    if not _keeps_ended_rows(cell, of_rows):
        return None
    steps, batch, hidden = *saved.shape[:2], saved.shape[2] // cell.saved
    with torch.cuda.device(saved.device):
        sizes, heads = (steps, batch, hidden), heads_of(hidden, w_h)
        kernel = kernel_of(cell, saved.dtype, saved.device.index, True, *sizes, heads)
        if kernel is None:
            return None
        rows = Rows.of(saved, *of_rows)
        output, h0, carried, carried0 = _carried.of_forward(cell, read)
        grad_output, grad_h_n, *of_kinds = grads
        given_h_n = grad_h_n
        if rows.runs is not None:
            count_of_steps, last = _ends(rows.runs, hidden)
            zeros = saved.new_zeros(sizes)
            grad_output = zeros if grad_output is None else grad_output.where(rows.runs, zeros)
            if grad_h_n is not None:
                of_last = torch.where(count_of_steps > 0, grad_h_n, 0.0).unsqueeze(0)
                grad_output, grad_h_n = grad_output.scatter_add(0, last, of_last), None
        w_h, count = _row_major(w_h), len(cell.carried)
        grad_terms = saved.new_empty(steps, batch, cell.terms * hidden)
        grad_h0 = saved.new_empty(batch, hidden)
        grad_carried0 = saved.new_empty(batch, count * hidden) if count else None
        kept = None
        if rows.zoneout is not None:
            kept = saved.new_empty(batch, hidden, dtype=torch.float32)
        given = {
            "grad_output": _dense(grad_output),
            "grad_h_n": _dense(grad_h_n),
            "grad_carried_n": _dense(_carried.gradients(of_kinds)),
            "saved": _dense(saved),
            "carried": _dense(carried),
            "output": _dense(output),
            "h0": _dense(h0),
            "carried0": _dense(carried0),
            "w_h": w_h,
            "w_row": w_h.stride(0),
            "reset": _dense(None if rows.reset is None else rows.reset.squeeze(-1)),
            "zoneout": _dense(rows.zoneout),
            "grad_kept": kept,
            "grad_terms": grad_terms,
            "grad_h0": grad_h0,
            "grad_carried0": grad_carried0,
            "steps": steps,
            "batch": batch,
            "hidden": hidden,
        }
        _launch(kernel, f"{cell.name}_backward", True, saved, given)
        if rows.runs is not None:
            unmoved = torch.zeros_like(grad_h0) if given_h_n is None else given_h_n
            grad_h0 = torch.where(count_of_steps > 0, grad_h0, unmoved)
        return (grad_terms, grad_h0, *_carried.apart(cell, grad_carried0))


def _keeps_ended_rows(cell: Any, of_rows: Sequence[Any]) -> bool:
    """Rows that have ended still take steps, which must leave what they carry as it is."""
    lengths, *_ = of_rows
    return lengths is None or cell.shares is not None


def _share(input: Tensor, weight: Tensor) -> Tensor:
    """The input's share of the pre-activations, in float."""
    if input.dtype == torch.float32:
        return ops.linear(input, weight, None)
    return torch.mm(input.flatten(0, 1), weight.mT, out_dtype=torch.float32)


def _ends(runs: Tensor, hidden: int) -> tuple[Tensor, Tensor]:
    """How many steps each row has, (batch, 1), and the index of the last, (1, batch, hidden)."""
    count = runs.sum(0)
    return count, (count - 1).clamp(min=0).unsqueeze(0).expand(-1, -1, hidden)
