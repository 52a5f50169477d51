"""Sharding rules of the ops for ``torch.distributed.tensor``. Import this module to register them.

After the import every op takes ``DTensor`` arguments, and ``parallelize_module`` takes
:class:`my_ops.nn.Linear`. These dimensions may be sharded:

- elementwise ops: any dimension;
- gemm and linear: rows (and a batch), columns, or the summed dimension. For the last, the result is
  ``Partial``, and linear must have no activation, which would need the whole sum;
- attention: the batch and the heads;
- lltm, lstm and gru, their cells, and layers and steps of :func:`my_ops.cell`: the batch;
- ``torch.flip``, which bidirectional layers call: the dimensions that it does not flip. (torch has
  this rule itself from 2.13 on.)

Arguments with another layout are redistributed first, as for torch's own ops. Backward of linear
and of the recurrent ops takes rows that are sharded along any dimension. If they are sharded
unevenly, it gathers them for the gradient of the weight. DDP, ``fully_shard`` and
``torch.distributed.checkpoint`` do not need this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from my_ops._private import asked_for_each
from my_ops.ops._common import UNARY, UNARY_BACKWARD, ops
from my_ops.recurrent._cell import CELLS, OWN_CELLS, Cell

__all__: list[str] = []

Layout = tuple[list[Any], list[Any]]  # of results and arguments; None for what is not a tensor


def _for_given(layouts: list[Layout], args: tuple[Any, ...]) -> list[Layout]:
    """The layouts, with None for arguments that are not tensors."""
    tensors = [hasattr(a, "ndim") for a in args]
    return [
        (results, [place if tensor else None for place, tensor in zip(places, tensors)])  # noqa: B905
        for results, places in layouts
    ]


@register_sharding([getattr(ops, name).default for name in UNARY])
def _unary(x: Any) -> list[Layout]:
    layouts: list[Layout] = [([Shard(d)], [Shard(d)]) for d in range(x.ndim)]
    return _for_given([*layouts, ([Replicate()], [Replicate()])], (x,))


@register_sharding(ops.custom_add.default)
def _custom_add(a: Any, b: Any) -> list[Layout]:
    ndim = max(a.ndim, b.ndim)
    shape = torch.broadcast_shapes(a.shape, b.shape)

    def place(t: Any, d: int) -> Any:
        own = d - (ndim - t.ndim)
        return Shard(own) if own >= 0 and t.shape[own] == shape[d] else Replicate()

    layouts: list[Layout] = [([Shard(d)], [place(a, d), place(b, d)]) for d in range(ndim)]
    return _for_given([*layouts, ([Replicate()], [Replicate()] * 2)], (a, b))


@register_sharding([getattr(ops, name).default for name in UNARY_BACKWARD])
def _unary_backward(grad: Any, x: Any) -> list[Layout]:
    layouts: list[Layout] = [([Shard(d)], [Shard(d), Shard(d)]) for d in range(x.ndim)]
    layouts += [([Partial()], [Partial(), Replicate()]), ([Replicate()], [Replicate()] * 2)]
    return _for_given(layouts, (grad, x))


@register_sharding(ops.gemm.default)
def _gemm(a: Any, b: Any, precision: str | None = None) -> list[Layout]:
    ndim, whole = max(a.ndim, b.ndim), Replicate()
    layouts: list[Layout] = [
        ([Shard(ndim - 2)], [Shard(a.ndim - 2), whole]),
        ([Shard(ndim - 1)], [whole, Shard(b.ndim - 1)]),
        ([Partial()], [Shard(a.ndim - 1), Shard(b.ndim - 2)]),
        ([Partial()], [Partial(), whole]),
        ([Partial()], [whole, Partial()]),
        ([whole], [whole, whole]),
    ]
    batched = [t.ndim == 3 and t.shape[0] > 1 for t in (a, b)]
    if any(batched):
        layouts.append(([Shard(0)], [Shard(0) if many else whole for many in batched]))
    return _for_given(layouts, (a, b))


@register_sharding(ops.linear.default)
def _linear(
    x: Any,
    weight: Any,
    bias: Any = None,
    activation: str = "none",
    residual: Any = None,
    precision: str | None = None,
) -> list[Layout]:
    last, whole = x.ndim - 1, Replicate()
    layouts: list[Layout] = [
        ([Shard(d)], [Shard(d), whole, whole, None, Shard(d)]) for d in range(last)
    ]
    layouts.append(([Shard(last)], [whole, Shard(0), Shard(0), None, Shard(last)]))
    layouts.append(([whole], [whole] * 5))
    if activation == "none" and _knows_activation:
        layouts.append(([Partial()], [Shard(last), Shard(1), Partial(), None, Partial()]))
    return _for_given(layouts, (x, weight, bias, activation, residual))


_knows_activation = asked_for_each(ops.linear.default)


def _register_heads(name: str, results: int, bias: int) -> None:
    """Of the batch and the heads, the first dimensions, the argument ``bias`` may have one only."""

    @register_sharding(getattr(ops, name).default)
    def _(*args: Any) -> list[Layout]:
        def place(at: int, d: int) -> Any:
            one = at == bias and args[at] is not None and args[at].shape[d] == 1
            return Replicate() if one else Shard(d)

        places = range(len(args))
        layouts: list[Layout] = [
            ([Shard(d)] * results, [place(at, d) for at in places]) for d in (0, 1)
        ]
        layouts.append(([Replicate()] * results, [Replicate()] * len(args)))
        return _for_given(layouts, args)


_register_heads("attention", 1, bias=3)
_register_heads("attention_forward", 2, bias=3)
_register_heads("attention_backward", 4, bias=4)
asked_for_each(ops.attention_backward.default)  # whether the gradient of bias is needed


def _register_batch(name: str, results: list[Any], arguments: list[Any]) -> None:
    @register_sharding(getattr(ops, name).default)
    def _(*args: Any) -> list[Layout]:
        whole: Layout = [Replicate()] * len(results), [Replicate()] * len(arguments)
        return _for_given([(results, arguments), whole], args)


def register_recurrent(cell: Cell) -> None:
    """``(batch, .)`` is sharded at 0, ``(steps, batch, .)`` at 1; the parameters are whole."""
    row, steps = Shard(0), Shard(1)
    parameters, states = [Replicate()] * len(cell.weights.names), [row] * len(cell.states)
    sequences = [steps] * len(cell.sequences)
    arguments = [row, *parameters, *states]
    _register_batch(f"{cell.name}_cell", states, arguments)
    _register_batch(f"{cell.name}_cell_forward", [*states, row], arguments)
    grads = [row] * (len(cell.step_backward_arguments) - len(states))
    _register_batch(f"{cell.name}_cell_backward", grads, [row] * len(cell.step_backward_arguments))
    arguments = [steps, *states, *parameters, row, steps, steps]
    _register_batch(cell.name, [steps, *states], arguments)
    saved = [steps] * (1 + len(cell.carried))
    _register_batch(f"{cell.name}_forward", [steps, *states, *saved], arguments)
    read = [row] * len(cell.sequences)
    _register_batch(
        f"{cell.name}_backward",
        [steps, *states],
        [steps, *states, steps, *sequences, *read, Replicate(), row, steps, steps],
    )


for _cell in (*CELLS, *OWN_CELLS):
    register_recurrent(_cell)


def _flip(x: Any, dims: Sequence[int]) -> list[Layout]:
    kept = set(range(x.ndim)) - {d % x.ndim for d in dims}
    return [([place], [place, None]) for place in (*map(Shard, kept), Replicate())]


if torch.__version__ < "2.13":
    register_sharding(torch.ops.aten.flip.default)(_flip)
