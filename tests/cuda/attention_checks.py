"""Checks of attention under the switch, which test_attention.py runs in a process of their own."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import my_ops

SHAPES = [  # batch, heads, queries, keys, dim
    (2, 8, 512, 512, 64),
    (2, 64, 300, 250, 64),
    (2, 64, 280, 330, 64),
    (2, 32, 333, 444, 32),
    (2, 64, 444, 333, 8),
    (2, 64, 333, 444, 20),
    (2, 32, 300, 170, 128),
    (2, 64, 280, 300, 96),
    (1, 1, 4096, 4096, 128),
    (3, 100, 100, 1000, 64),
]
ONE = (2, 32, 300, 300, 64)
LIMIT = 10 * 2.0**-24
CASES = ("plain", "causal", "bias", "row", "mask")
Options = dict[str, object]
OPS = torch.ops.aten._scaled_dot_product_efficient_attention


def problem(shape: tuple[int, ...], case: str = "plain") -> tuple[list[Tensor], Tensor, Options]:
    batch, heads, queries, keys, dim = shape
    torch.manual_seed(0)
    q, k, v, grad = (
        torch.randn(batch, heads, length, dim, device="cuda")
        for length in (queries, keys, keys, queries)
    )
    options: Options = {"is_causal": case == "causal"}
    if case == "bias":
        options["attn_mask"] = torch.randn(1, heads, queries, keys, device="cuda")
    elif case == "row":
        options["attn_mask"] = torch.randn(batch, 1, 1, keys, device="cuda")
    elif case == "mask":
        mask = torch.rand(batch, 1, queries, keys, device="cuda") < 0.7
        mask[..., 0] = True
        options["attn_mask"] = mask
    return [q, k, v], grad, options


def computed(
    inputs: list[Tensor], grad: Tensor, options: Options, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """The output, and the gradients of q, k, v and of a bias. In float64 it is torch's math."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
    options = dict(options)
    bias = options.get("attn_mask")
    if isinstance(bias, Tensor) and bias.is_floating_point():
        options["attn_mask"] = bias = bias.detach().to(dtype).requires_grad_()
        leaves.append(bias)
    out = F.scaled_dot_product_attention(*leaves[:3], **options)  # type: ignore[arg-type]
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(dtype))]


def switched(*arguments: object) -> list[Tensor]:
    """What ``computed`` gives with the switch on, which takes it."""
    before = taken()
    with my_ops.fast_fp32():
        result = computed(*arguments)  # type: ignore[arg-type]
    after = taken()
    for op in ("attention", "attention_backward"):
        assert after.get(op, 0) == before.get(op, 0) + 1
    return result


def taken() -> dict[str, int]:
    counts: dict[str, int] = {}
    for one in my_ops.fast_fp32.report().taken:
        counts[one.op] = counts.get(one.op, 0) + one.times
    return counts


def error(x: Tensor, exact: Tensor) -> float:
    return ((x.double() - exact).norm() / exact.norm()).item()


def mean_error(x: Tensor, exact: Tensor) -> float:
    """The geometric mean over heads, so that the largest elements of one do not decide."""
    if x.dim() != 4:
        return error(x, exact)
    size = exact.norm(dim=(2, 3)).clamp(min=1e-300)
    return ((x.double() - exact).norm(dim=(2, 3)) / size).clamp(min=1e-20).log().mean().exp().item()


def as_accurate(
    ours: list[Tensor], torchs: list[Tensor], exact: list[Tensor], times: float = 1.2
) -> None:
    """As torch's on the whole, or within ten roundings."""
    for i, (x, t, e) in enumerate(zip(ours, torchs, exact, strict=True)):
        assert x.shape == t.shape
        errors = mean_error(x, e), mean_error(t, e)
        assert errors[0] < max(times * errors[1], LIMIT), (i, errors)


@pytest.mark.parametrize(
    ("shape", "case"),
    # Causality hides most of many keys, and the plan leaves that to torch.
    [(s, c) for s in SHAPES for c in CASES if c != "causal" or s[3] < 2 * s[2]],
    ids=str,
)
def test_is_as_accurate_as_torchs(shape, case):
    inputs, grad, options = problem(shape, case)
    exact = computed(inputs, grad, options, torch.float64)
    torchs = computed(inputs, grad, options)
    ours, again = switched(inputs, grad, options), switched(inputs, grad, options)
    assert all(map(torch.equal, ours, again))
    assert ours[0].stride() == torchs[0].stride()
    as_accurate(ours, torchs, exact)


def spread_rows(x: Tensor, which: int) -> Tensor:
    return x * torch.exp(1.5 * torch.randn(*x.shape[:-1], 1, device="cuda"))


def one_hot(x: Tensor, which: int) -> Tensor:
    return torch.eye(x.shape[-1], device="cuda")[torch.arange(x.shape[-2]) % x.shape[-1]] * (
        torch.ones_like(x) * (8 if which < 2 else 1)
    )


DATA = {
    "large scores": lambda x, which: x * (5 if which < 2 else 1),
    "rows of other norms": spread_rows,
    "one hot": one_hot,
    "constant": lambda x, which: torch.full_like(x, 0.7) if which < 3 else x,
    "tiny": lambda x, which: x * 1e-12,
    "tiny q": lambda x, which: x * (1e-30 if which == 0 else 1e3),
    "huge": lambda x, which: x * (1e-12 if which == 0 else 1e12),
    "columns of v": lambda x, which: (
        x * torch.logspace(-12, 12, x.shape[-1], device="cuda") if which == 2 else x
    ),
}


# Larger errors than torch's: 2.2 times in the gradient of v, and of zeros in those of q and k.
TIMES = {"rows of other norms": 3.0, "constant": 2.0}


@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("dim", [64, 128])
def test_data_of_other_kinds(name, dim):
    inputs, grad, options = problem((2, 32, 300, 300, dim))
    *inputs, grad = (DATA[name](x, which) for which, x in enumerate((*inputs, grad)))
    exact = computed(inputs, grad, options, torch.float64)
    torchs, ours = computed(inputs, grad, options), switched(inputs, grad, options)
    as_accurate(ours, torchs, exact, TIMES.get(name, 1.2))
    if name == "columns of v":
        columns = [[x[0][..., i] for i in range(dim)] for x in (ours, torchs, exact)]
        as_accurate(*columns)


@pytest.mark.parametrize("case", ["plain", "causal", "bias"])
@pytest.mark.parametrize("which", [(0, 1, 2, 3), (0,), (1,), (2,), (3,)], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
def test_zeros_and_subnormals(which, case, dim):
    """A length that is no multiple of a block's."""
    for factor in (0.0, 1e-40):
        inputs, grad, options = problem((2, 32, 300, 300, dim), case)
        *inputs, grad = (x * factor if i in which else x for i, x in enumerate((*inputs, grad)))
        torchs, ours = computed(inputs, grad, options), switched(inputs, grad, options)
        for x, t in zip(ours, torchs, strict=True):
            scale = t.abs().max().item()
            torch.testing.assert_close(x, t, rtol=1e-5, atol=max(1e-5 * scale, 1e-37))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("case", ["plain", "causal"])
@pytest.mark.parametrize("dim", [64, 128])
def test_nan_and_inf_reach_what_they_reach_in_torch(dim, case, which, value):
    """And of the rows before it, in causal attention, no more than torch's."""
    for at in (100, 200):
        inputs, grad, options = problem((2, 32, 300, 300, dim), case)
        (*inputs, grad)[which][0, 0, at, 3] = value
        torchs, ours = computed(inputs, grad, options), switched(inputs, grad, options)
        reached = [(~x.isfinite()).any(-1) for x in (ours[0], torchs[0])]
        assert not (reached[0] & ~reached[1]).any()
        for x, t in zip(ours, torchs, strict=True):
            assert x[1:].isfinite().all()
            assert x[0, 1:].isfinite().all()
            assert bool(x[0, 0].isfinite().all()) == bool(t[0, 0].isfinite().all())
        if case == "causal" and which in (1, 2):
            assert ours[0][0, 0, : at // 64 * 64].isfinite().all()


@pytest.mark.parametrize("case", ["plain", "causal", "bias"])
@pytest.mark.parametrize("first", [False, True])
def test_the_switch_may_flip_between_forward_and_backward(case, first):
    inputs, grad, options = problem(ONE, case)
    exact = computed(inputs, grad, options, torch.float64)
    leaves = [x.requires_grad_() for x in inputs]
    with my_ops.fast_fp32(first):
        out = F.scaled_dot_product_attention(*leaves, **options)
    with my_ops.fast_fp32(not first):
        grads = torch.autograd.grad(out, leaves, grad)
    for x, e in zip((out, *grads), exact, strict=False):
        assert error(x, e) < 1.5e-6


def test_results_have_torchs_layout():
    (q, k, v), _, _ = problem((2, 64, 300, 250, 64))
    torchs = OPS(q, k, v, None, True)
    with my_ops.fast_fp32():
        ours = OPS(q, k, v, None, True)
        without = OPS(q, k, v, None, False)
    for x, y in zip(ours, torchs, strict=True):
        assert (x.shape, x.stride(), x.dtype, x.device) == (y.shape, y.stride(), y.dtype, y.device)
    torch.testing.assert_close(ours[1][..., :300], torchs[1][..., :300], rtol=1e-6, atol=1e-6)
    assert without[1].shape == OPS(q, k, v, None, False)[1].shape


@pytest.mark.parametrize("floating", [False, True])
def test_rows_without_keys_are_zeros(floating):
    (q, k, v), grad, _ = problem((2, 64, 300, 250, 64))
    mask = torch.ones(300, 250, dtype=torch.bool, device="cuda")
    mask[5] = False
    if floating:
        mask = torch.zeros(300, 250, device="cuda").masked_fill(~mask, -math.inf)
    options = {"attn_mask": mask}
    torchs = computed([q, k, v], grad, options)
    out, *grads = switched([q, k, v], grad, options)
    assert out[:, :, 5].eq(0).all()
    assert torchs[0][:, :, 5].eq(0).all()
    assert all(g.isfinite().all() for g in grads)
    for x, t in zip(grads, torchs[1:], strict=True):
        torch.testing.assert_close(x, t, rtol=1e-5, atol=1e-5 * t.abs().max().item())


def test_scale():
    for scale in (0.3, 1e-3, 2.0):
        inputs, grad, _ = problem(ONE)
        options = {"scale": scale}
        exact = computed(inputs, grad, options, torch.float64)
        as_accurate(switched(inputs, grad, options), computed(inputs, grad, options), exact)


LEFT = {
    "of attention with dropout": ((2, 32, 300, 300, 64), {"dropout_p": 0.5}),
    "of attention with other head sizes": ((2, 32, 300, 300, 256), {}),
    "or no positive scale": ((2, 32, 300, 300, 64), {"scale": -1.0}),
    "that torch computes as fast": ((2, 64, 60, 60, 64), {}),
}


@pytest.mark.parametrize("why", LEFT)
def test_what_stays_torchs_is_named(why):
    shape, options = LEFT[why]
    inputs, grad, _ = problem(shape)
    counts = taken()
    torch.manual_seed(3)
    torchs = computed(inputs, grad, options)
    left = dict(my_ops.fast_fp32.report().left)
    torch.manual_seed(3)
    with my_ops.fast_fp32():
        ours = computed(inputs, grad, options)
    assert all(map(torch.equal, ours, torchs))
    assert taken() == counts
    after = my_ops.fast_fp32.report().left
    more = {reason: n - left.get(reason, 0) for reason, n in after.items()}
    assert [n for reason, n in more.items() if why in reason] == [2]
    assert sum(more.values()) == 2


def test_small_and_16_bit_calls_are_not_counted():
    before, left = taken(), my_ops.fast_fp32.report().left
    with my_ops.fast_fp32():
        for dtype, shape in (("float32", (1, 2, 16, 64)), ("float16", (2, 32, 512, 64))):
            q = torch.randn(shape, device="cuda", dtype=getattr(torch, dtype), requires_grad=True)
            with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
                F.scaled_dot_product_attention(q, q, q).sum().backward()
    assert taken() == before
    assert my_ops.fast_fp32.report().left == left


def test_any_strides():
    """Where torch takes its memory-efficient kernel; for others it computes products."""
    inputs, grad, options = problem((2, 64, 300, 250, 64))
    exact = computed(inputs, grad, options, torch.float64)
    by_rows = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    wide = [torch.stack((x, x), -1)[..., 0] for x in inputs]
    odd = [F.pad(x, (1, 0))[..., 1:] for x in inputs]
    with my_ops.fast_fp32():
        for these in (by_rows, wide, odd):
            for x, e in zip(computed(these, grad, options), exact, strict=True):
                assert error(x, e) < 1.5e-6
        for these in (by_rows, odd):
            assert error(OPS(*these, None, True)[0], exact[0]) < 1e-6


def test_packed_projections():
    packed = torch.randn(2, 300, 3, 32, 64, device="cuda", requires_grad=True)
    q, k, v = (x.transpose(1, 2) for x in packed.unbind(2))
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    before = taken()
    with my_ops.fast_fp32():
        ours = F.scaled_dot_product_attention(q, k, v)
    assert taken()["attention"] == before.get("attention", 0) + 1
    assert error(ours, exact) < 1e-6
    (want,) = torch.autograd.grad(exact.sum(), packed, retain_graph=True)
    (got,) = torch.autograd.grad(ours.sum(), packed)
    assert error(got, want.double()) < 2e-6


def test_tf32_does_not_matter():
    inputs, grad, options = problem(ONE)
    exact = computed(inputs, grad, options, torch.float64)
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        ours = switched(inputs, grad, options)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    assert error(ours[0], exact[0]) < 1e-6


def test_in_a_graph():
    inputs, grad, options = problem(ONE, "causal")
    leaves = [x.requires_grad_() for x in inputs]
    want = switched(inputs, grad, options)
    stream = torch.cuda.Stream()
    with my_ops.fast_fp32(), torch.cuda.stream(stream):

        def step() -> tuple[Tensor, ...]:
            out = F.scaled_dot_product_attention(*leaves, **options)
            return (out, *torch.autograd.grad(out, leaves, grad))

        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            got = step()
        for x in got:
            x.detach().fill_(7)
        graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, got, want))


def test_compiled():
    inputs, grad, options = problem(ONE, "bias")
    leaves = [x.requires_grad_() for x in inputs]
    want = switched(inputs, grad, options)[:4]

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, **options)

    before = taken()
    with my_ops.fast_fp32():
        out = torch.compile(step, fullgraph=True, backend="aot_eager")(*leaves)
        got = (out, *torch.autograd.grad(out, leaves, grad))
    assert taken()["attention_backward"] == before["attention_backward"] + 1
    for x, w in zip(got, want, strict=True):
        torch.testing.assert_close(x, w, rtol=0, atol=0)


def test_mapped():
    inputs, _, _ = problem(ONE)
    want = F.scaled_dot_product_attention(*inputs)
    with my_ops.fast_fp32():
        got = torch.vmap(F.scaled_dot_product_attention)(*inputs)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_modules_of_torch():
    layer = torch.nn.MultiheadAttention(512, 8, batch_first=True, device="cuda")
    x = torch.randn(8, 512, 512, device="cuda")
    want = layer.double()(x.double(), x.double(), x.double(), need_weights=False)[0]
    layer.float()
    before = taken()
    with my_ops.fast_fp32():
        got = layer(x, x, x, need_weights=False)[0]
        got.sum().backward()
    assert taken()["attention"] == before["attention"] + 1
    assert error(got, want) < 2e-6


def test_without_memory_it_is_torchs():
    inputs, _, options = problem((4, 16, 4096, 4096, 64))
    want = F.scaled_dot_product_attention(*inputs, **options)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    # Enough for the output and torch's log-sum-exp, too little for the parts.
    torch.cuda.set_per_process_memory_fraction(
        (torch.cuda.memory_reserved() + 1.5 * want.nbytes) / total
    )
    try:
        with my_ops.fast_fp32():
            got = F.scaled_dot_product_attention(*inputs, **options)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert torch.equal(got, want)
    assert any("where ours failed" in why for why in my_ops.fast_fp32.report().left)
