"""The bounds of the other files catch what they are for: a computation that rounds an intermediate
result to 16 bits, and a 16-bit one that rounds twice. No kernel of the package is used."""

import pytest
import torch
from precision import CELL_SIZES, SEQUENCE_SIZES, check_precision
from samples import ACTIVATIONS, SIXTEEN_BIT, gemm_excess, lltm_inputs, ulps, values
from test_elementwise import D_SIGMOID_GRAD_ULP, D_SIGMOID_ULP, ulp_limit
from test_gemm import linear_excess, normal
from test_lltm import rounded_once

from my_ops import reference


@pytest.fixture(params=SIXTEEN_BIT)
def rounded(request):
    return lambda t: t.to(request.param).to(t.dtype)


def test_gemm(rounded):
    a, b = normal((65, 127), torch.float32, "cpu"), normal((127, 129), torch.float32, "cpu")
    assert gemm_excess(a @ b, a, b) <= 1
    for got in (rounded(a) @ b, a @ rounded(b), rounded(a[:, :9] @ b[:9]) + a[:, 9:] @ b[9:]):
        assert gemm_excess(got, a, b) > 1


@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
def test_gemm_of_16_bits_summed_in_two_parts(dtype):
    a, b = normal((65, 127), dtype, "cpu"), normal((127, 129), dtype, "cpu")
    left, right = (a[:, k].float() @ b[k].float() for k in (slice(64), slice(64, None)))
    assert gemm_excess((left + right).to(dtype), a, b) <= 1
    assert gemm_excess(left.to(dtype) + right.to(dtype), a, b) > 1


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_linear(activation, rounded):
    shapes = (31, 64), (33, 64), (33,), (31, 33)
    x, weight, bias, residual = (normal(shape, torch.float32, "cpu") for shape in shapes)

    def linear(round_sum, round_active):
        y = reference.activate(round_sum(x @ weight.T + bias), activation)
        return round_active(y) + residual

    def excess(got):
        return linear_excess(got, x, weight, bias, activation, residual)

    assert excess(linear(torch.clone, torch.clone)) <= 1
    assert excess(linear(rounded, torch.clone)) > 1
    assert excess(linear(torch.clone, rounded)) > 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_d_sigmoid(dtype, rounded):
    z = values(dtype, 4097)
    s, z64 = torch.sigmoid(z), z.double()
    want = reference.d_sigmoid(z64)
    slope = want * -torch.tanh(z64 / 2)
    limit, slope_limit = (ulp_limit(n, dtype) for n in (D_SIGMOID_ULP, D_SIGMOID_GRAD_ULP))
    assert ulps(want.to(dtype), want) <= limit
    assert ulps((rounded(s) * torch.sigmoid(-z)), want) > limit
    assert ulps((rounded(s) * torch.sigmoid(-z) * -torch.tanh(z / 2)), slope) > slope_limit


@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
def test_d_sigmoid_of_16_bits(dtype):
    z = values(dtype, 4097)
    s, want = torch.sigmoid(z.double()), reference.d_sigmoid(z.double())
    assert ulps(want.to(dtype), want) <= ulp_limit(D_SIGMOID_ULP, dtype)
    assert ulps(s.to(dtype) * (1 - s).to(dtype), want) > ulp_limit(D_SIGMOID_ULP, dtype)


def same(t):
    return t


def lltm(round_h, round_c):
    def function(input, h, c, weights, bias):
        outputs = []
        for step in input:
            h, c = reference.lltm_cell(step, weights, bias, h, c)
            h, c = round_h(h), round_c(c)
            outputs.append(h)
        return torch.stack(outputs), h, c

    return function


@pytest.mark.parametrize("sizes", [s for s in SEQUENCE_SIZES if min(s) > 1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_lltm(dtype, sizes, rounded):
    tensors = lltm_inputs(*sizes, dtype, "cpu")
    check_precision(lltm(same, same), reference.lltm, tensors)
    for rounding in ((rounded, same), (same, rounded)):
        with pytest.raises(AssertionError):
            check_precision(lltm(*rounding), reference.lltm, tensors)


@pytest.mark.parametrize("sizes", [s for s in CELL_SIZES if min(s) > 1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_lltm_cell(dtype, sizes, rounded):
    def cell(input, weights, bias, h, c):
        return reference.lltm_cell(rounded(input), weights, bias, h, c)

    tensors = lltm_inputs(None, *sizes, dtype, "cpu")
    with pytest.raises(AssertionError):
        check_precision(cell, reference.lltm_cell, tensors)


@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
def test_lltm_of_16_bits(dtype):
    tensors = lltm_inputs(17, 31, 33, 9, dtype, "cpu")
    want = reference.lltm(*(t.double() for t in tensors))

    def rounded(t):
        return t.to(dtype).float()

    def run(*rounding):
        return [t.to(dtype) for t in lltm(*rounding)(*(t.float() for t in tensors))]

    assert rounded_once(run(same, same), want)
    assert not rounded_once(run(rounded, same), want)
    assert not rounded_once(run(same, rounded), want)
