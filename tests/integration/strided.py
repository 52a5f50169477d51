"""Memory layouts for Hypothesis to draw, and the comparison of real and fake metadata."""

import torch
from hypothesis import strategies as st
from samples import as_tuple
from torch._subclasses.fake_tensor import FakeTensorMode

ODD = st.sampled_from([None, None, 0, 1, 7])  # strides of a dimension of size 1


@st.composite
def layouts(draw, shape, repeats=True):
    """How to build a tensor of ``shape``: memory order, steps, offsets, repeated dimensions, and
    strides of dimensions of size 1. Dense orders, including channels-last, are as frequent as
    others."""
    dims = len(shape)
    each = lambda values: draw(st.lists(values, min_size=dims, max_size=dims))  # noqa: E731
    kinds = ["contiguous", "channels last", "permuted", "strided", *["expanded"] * repeats]
    kind = draw(st.sampled_from(kinds))
    order = list(range(dims))
    if kind == "channels last" and dims > 2:
        order = [0, *range(2, dims), 1]
    elif kind != "contiguous":
        order = draw(st.permutations(order))
    steps = each(st.integers(1, 3)) if kind == "strided" else [1] * dims
    offsets = each(st.integers(0, 2)) if kind == "strided" else [0] * dims
    repeated = each(st.booleans()) if kind == "expanded" else [False] * dims
    odd = each(ODD) if draw(st.booleans()) else [None] * dims
    return order, steps, offsets, repeated, odd


def build(shape, layout, dtype, device):
    order, steps, offsets, repeated, odd = layout
    sizes = [1 if many else size for size, many in zip(shape, repeated, strict=True)]
    memory = [sizes[d] * steps[d] + offsets[d] for d in order]
    values = torch.randint(-9, 9, memory).to(torch.float64) / 4
    base = values.to(dtype).to(device).permute([order.index(d) for d in range(len(shape))])
    window = [
        slice(offset, offset + size * step, step)
        for offset, size, step in zip(offsets, sizes, steps, strict=True)
    ]
    view = base[tuple(window)].expand(shape)
    strides = [
        stride if other is None or size != 1 else other
        for stride, size, other in zip(view.stride(), shape, odd, strict=True)
    ]
    return view.as_strided(shape, strides)


def metadata(results):
    return [(t.shape, t.stride(), t.dtype) for t in as_tuple(results)]


def check_metadata(function, tensors):
    """The fake kernel returns the real one's shape, strides, dtype and device."""
    results = as_tuple(function(*tensors))
    with FakeTensorMode() as mode:
        fakes = as_tuple(function(*(mode.from_tensor(t) for t in tensors)))
    assert metadata(fakes) == metadata(results)
    assert [t.device for t in fakes] == [t.device for t in results]
    return results
