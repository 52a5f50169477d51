"""Attention under the switch, against float64 and torch's own."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import my_ops

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)

SHAPES = [  # batch, heads, queries, keys, dim
    (2, 8, 512, 512, 64),
    (2, 32, 300, 170, 64),
    (2, 32, 170, 300, 64),
    (2, 32, 333, 444, 32),
    (2, 64, 444, 333, 8),
    (2, 32, 300, 170, 128),
    (2, 32, 170, 300, 96),
    (1, 1, 4096, 4096, 128),
]
CASES = ("plain", "causal", "bias", "row", "mask")


def problem(shape: tuple[int, ...], case: str) -> tuple[list[Tensor], Tensor, dict[str, object]]:
    batch, heads, queries, keys, dim = shape
    torch.manual_seed(0)
    q, k, v, grad = (
        torch.randn(batch, heads, length, dim, device="cuda")
        for length in (queries, keys, keys, queries)
    )
    options: dict[str, object] = {"is_causal": case == "causal"}
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
    inputs: list[Tensor], grad: Tensor, options: dict[str, object], dtype: torch.dtype
) -> list[Tensor]:
    """The output, and the gradients of q, k, v and of a bias."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
    options = dict(options)
    bias = options.get("attn_mask")
    if isinstance(bias, Tensor) and bias.is_floating_point():
        options["attn_mask"] = bias = bias.detach().to(dtype).requires_grad_()
        leaves.append(bias)
    out = F.scaled_dot_product_attention(*leaves[:3], **options)  # type: ignore[arg-type]
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(dtype))]


def taken() -> dict[str, int]:
    counts: dict[str, int] = {}
    for one in my_ops.fast_fp32.report().taken:
        counts[one.op] = counts.get(one.op, 0) + one.times
    return counts


def error(x: Tensor, exact: Tensor) -> float:
    return ((x.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_is_as_accurate_as_torchs(shape, case):
    inputs, grad, options = problem(shape, case)
    exact = computed(inputs, grad, options, torch.float64)
    torchs = computed(inputs, grad, options, torch.float32)
    before = taken()
    with my_ops.fast_fp32():
        ours = computed(inputs, grad, options, torch.float32)
        again = computed(inputs, grad, options, torch.float32)
    after = taken()
    for op in ("attention", "attention_backward"):
        assert after.get(op, 0) == before.get(op, 0) + 2
    assert ours[0].stride() == torchs[0].stride()
    for x, y, t, e in zip(ours, again, torchs, exact, strict=True):
        assert torch.equal(x, y)
        assert x.shape == t.shape
        assert error(x, e) < 1.2 * error(t, e)


@pytest.mark.parametrize("case", ["plain", "causal", "bias"])
@pytest.mark.parametrize("first", [False, True])
def test_the_switch_may_flip_between_forward_and_backward(case, first):
    inputs, grad, options = problem((2, 32, 300, 170, 64), case)
    exact = computed(inputs, grad, options, torch.float64)
    leaves = [x.requires_grad_() for x in inputs]
    with my_ops.fast_fp32(first):
        out = F.scaled_dot_product_attention(*leaves, **options)
    with my_ops.fast_fp32(not first):
        grads = torch.autograd.grad(out, leaves, grad)
    for x, e in zip((out, *grads), exact, strict=False):
        assert error(x, e) < 1.5e-6


def test_log_sum_exp_has_torchs_layout():
    (q, k, v), _, _ = problem((2, 32, 300, 170, 64), "plain")
    op = torch.ops.aten._scaled_dot_product_efficient_attention
    torchs = op(q, k, v, None, True)
    with my_ops.fast_fp32():
        ours = op(q, k, v, None, True)
        without = op(q, k, v, None, False)
    for x, y in zip(ours, torchs, strict=True):
        assert (x.shape, x.stride(), x.dtype, x.device) == (y.shape, y.stride(), y.dtype, y.device)
    torch.testing.assert_close(ours[1][..., :300], torchs[1][..., :300], rtol=1e-6, atol=1e-6)
    assert without[1].shape == (2, 32, 0)


def test_rows_without_keys_are_zeros():
    (q, k, v), grad, _ = problem((2, 32, 300, 170, 64), "plain")
    mask = torch.ones(300, 170, dtype=torch.bool, device="cuda")
    mask[5] = False
    with my_ops.fast_fp32():
        out, *grads = computed([q, k, v], grad, {"attn_mask": mask}, torch.float32)
    assert out[:, :, 5].eq(0).all()
    assert all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize("which", range(3))
def test_nan_reaches_what_it_reaches_in_torch(which):
    inputs, grad, options = problem((2, 32, 300, 300, 64), "causal")
    inputs[which][0, 0, 200, 3] = math.nan
    torchs = computed(inputs, grad, options, torch.float32)
    with my_ops.fast_fp32():
        ours = computed(inputs, grad, options, torch.float32)
    assert torch.equal(ours[0].isnan(), torchs[0].isnan())


def test_small_and_other_calls_stay_torchs():
    before = taken()
    with my_ops.fast_fp32():
        for inputs in (
            [torch.randn(1, 1, 16, 64, device="cuda") for _ in range(3)],
            [torch.randn(2, 8, 512, 256, device="cuda") for _ in range(3)],
            [torch.randn(2, 8, 512, 64, device="cuda", dtype=torch.float16) for _ in range(3)],
        ):
            F.scaled_dot_product_attention(*inputs)
        q = torch.randn(2, 8, 512, 64, device="cuda")
        F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
    assert taken() == before


def test_any_strides():
    inputs, grad, options = problem((2, 32, 300, 170, 64), "plain")
    exact = computed(inputs, grad, options, torch.float64)
    by_rows = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    wide = [torch.stack((x, x), -1)[..., 0] for x in inputs]
    odd = [F.pad(x, (1, 0))[..., 1:] for x in inputs]
    with my_ops.fast_fp32():
        for these in (by_rows, wide, odd):
            ours = computed(these, grad, options, torch.float32)
            for x, e in zip(ours, exact, strict=True):
                assert error(x, e) < 1e-6
