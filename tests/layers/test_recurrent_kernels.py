"""What the backends compute for a recurrent cell, at sizes for every kernel, compared with the
reference in float64. The gradients of the weights are computed here from those of the terms."""

import platform

import pytest
import torch
from samples import CELL, FLOATING, SIXTEEN_BIT, VARIANT_SIZES

import my_ops
from my_ops import reference

ops = torch.ops.my_ops
NAN, INF = float("nan"), float("inf")

# Largest error relative to max(1, the largest result), in units of eps: at most four times the
# largest seen, which are 19.5 and 22.7 (lltm over 20 steps), and 1.3 in 16 bits.
LIMIT = {torch.float64: 80, torch.float32: 80, torch.float16: 5, torch.bfloat16: 5}

# steps, batch, inputs, hidden
SIZES = [(5, 3, 4, 7), (9, 19, 33, 64), (1, 2, 3, 5), (7, 33, 20, 300), (12, 1, 16, 256)]
# On the CPU too few steps to pack weights that fit the cache, unless for many rows.
SIZES += [(2, 17, 30, 200), (1, 70, 30, 130)]
CUDA_SIZES = [  # warps, blocks, clusters, grids of one and two tiles, and a product per step
    *[(7, 90, 12, 30), (7, 140, 12, 64), (5, 300, 16, 70)],
    *[(9, 1100, 8, 28), (5, 600, 16, 34), (4, 70, 9, 126)],
    *[(20, 16, 64, 512), (6, 64, 64, 1024), (8, 4, 40, 129), (6, 20, 32, 700), (5, 300, 16, 256)],
    *[(40, 2, 24, 133), (6, 256, 64, 512), (20, 5, 8, 520), (9, 8, 16, 1100), (9, 1, 16, 2048)],
    (3, 300, 16, 640),  # a float32 product per step, with packed weights
]
# With warpgroups: part of a tile, one step, a second wave; forward blocks of 32 units,
# backward clusters of four and, at the end, of eight.
MANY_ROWS = [(5, 700, 24, 200), (3, 300, 33, 1024), (1, 130, 8, 1000), (3, 2500, 16, 256)]
MANY_ROWS += [(12, 256, 8, 512), (3, 1100, 16, 256), (5, 100, 16, 1024), (9, 300, 8, 264)]


class Problem:
    """For a cell with torch's four parameters; lltm has no bias in the product with h."""

    def __init__(self, name, sizes, mode, dtype, device):
        steps, batch, inputs, hidden = sizes
        self.cell, self.hidden, self.of_lltm = CELL[name], hidden, name == "lltm"

        def drawn(*shape):
            return torch.randn(shape, dtype=torch.float64).to(dtype).to(device)

        def weight(*shape):
            return ((torch.rand(shape, dtype=torch.float64) * 2 - 1) / hidden**0.5).to(
                device, dtype
            )

        gates = self.cell.gates * hidden
        self.x, self.h, self.c = drawn(steps, batch, inputs), drawn(batch, hidden), None
        if self.cell.carried:
            self.c = drawn(batch, hidden)
        self.w_x, self.w_h = weight(gates, inputs), weight(gates, hidden)
        self.b_x = None if mode == "no bias" and name != "lltm" else weight(gates)
        self.b_h = None if mode == "no bias" or name == "lltm" else weight(gates)
        self.lengths = self.reset = self.zoneout = None
        if mode.startswith("ragged"):
            self.lengths = torch.randint(-1, steps + 2, (batch,)).to(device)
        if mode.endswith(("reset", "zoneout")):
            self.reset = (torch.rand(steps, batch) < 0.3).to(device)
        if mode.endswith("zoneout"):
            shares = torch.tensor([0.0, 1.0, 0.3])[torch.randint(3, (steps, batch, hidden))]
            self.zoneout = shares.to(device, dtype)
        self.grads = [drawn(steps, batch, hidden), drawn(batch, hidden)]
        self.grads += [] if self.c is None else [drawn(batch, hidden)]

    def states(self):
        return [self.h] if self.c is None else [self.h, self.c]

    def parameters(self):
        if self.of_lltm:
            return [torch.cat([self.w_h, self.w_x], 1), self.b_x]
        return [self.w_x, self.w_h, self.b_x, self.b_h]

    def of_rows(self):
        return self.lengths, self.reset, self.zoneout

    def inference(self):
        arguments = (self.x, *self.states(), *self.parameters(), *self.of_rows())
        return getattr(ops, self.cell.name)(*arguments)

    def ours(self):
        """The results and the gradients, by name."""
        parameters = self.parameters()
        arguments = (self.x, *self.states(), *parameters, *self.of_rows())
        forward, backward = (
            getattr(ops, f"{self.cell.name}{s}") for s in ("_forward", "_backward")
        )
        results = forward(*arguments)
        ends = 1 + len(self.states())
        torch.testing.assert_close(self.inference(), results[:ends], rtol=2e-2, atol=2e-2)
        output, gates = results[0], results[ends]
        recurrent = parameters[0] if self.of_lltm else self.w_h
        read = (output, self.h) if self.c is None else (results[-1], self.c)
        terms, *grad_states = backward(*self.grads, gates, *read, recurrent, *self.of_rows())
        before = torch.cat([self.h[None], output])[:-1]
        if self.reset is not None:
            before = before.masked_fill(self.reset.unsqueeze(2), 0.0)
        terms = terms.double().flatten(0, 1)
        of_x, of_h = self.cell.of_input(terms), self.cell.of_h(terms)
        return {
            **dict(zip(("output", "h_n", "c_n"), results[:ends], strict=False)),
            **dict(zip(("grad_h0", "grad_c0"), grad_states, strict=False)),
            "grad_x": (of_x @ self.w_x.double()).view_as(self.x),
            "grad_w_h": of_h.T @ before.double().flatten(0, 1),
            "grad_bias": of_x.sum(0),
        }

    def exact(self):
        """The same from the reference, in float64; lltm has no bias in the product with h."""
        x, h, c, w_x, w_h, b_x, b_h, *grads = (
            None if t is None else t.double().clone().requires_grad_()
            for t in (self.x, self.h, self.c, self.w_x, self.w_h, self.b_x, self.b_h, *self.grads)
        )
        parameters = [torch.cat([w_h, w_x], 1), b_x] if self.of_lltm else [w_x, w_h, b_x, b_h]
        states = [h] if c is None else [h, c]
        arguments = (x, *states, *parameters, *self.of_rows())
        results = getattr(reference, self.cell.name)(*arguments)
        inputs = {"grad_h0": h, "grad_c0": c, "grad_x": x, "grad_w_h": w_h, "grad_bias": b_x}
        asked = {name: t for name, t in inputs.items() if t is not None}
        found = torch.autograd.grad(results, asked.values(), grads)
        named = dict(zip(("output", "h_n", "c_n"), results, strict=False))
        return named | dict(zip(asked, found, strict=True))


MODES = ["plain", "no bias", "ragged", "reset", "ragged and reset", "ragged and zoneout"]
ALL = "ragged and zoneout"  # with reset


def check(name, sizes, mode, dtype, device):
    problem = Problem(name, sizes, mode, dtype, device)
    got = problem.ours()
    for key, want in problem.exact().items():
        scale = max(1.0, want.abs().max().item()) * torch.finfo(dtype).eps
        assert (got[key].double() - want).abs().max().item() <= LIMIT[dtype] * scale, key


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", CELL)
def test_values_and_gradients(name, sizes, dtype, mode, device):
    check(name, sizes, mode, dtype, device)


@pytest.mark.parametrize("mode", ["plain", ALL])
@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("hidden", [1, 2, 3, 6, 9, 14, 15, 17, 31, 35, 72, 129])
@pytest.mark.parametrize("name", CELL)
def test_units_that_fill_no_vector_on_the_cpu(name, hidden, dtype, mode):
    """Those beyond whole vectors are gathered from up to 16 rows at a time; here of 16 and of 5."""
    check(name, (3, 37, 5, hidden), mode, dtype, "cpu")


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("batch", [2, 94])
@pytest.mark.parametrize("name", ["LSTM", "GRU", "LLTM"])
def test_no_steps(name, batch, dtype, reset, device):
    """The states come back, and so do their gradients."""
    layer = getattr(my_ops.nn, name)(8, 3, device=device, dtype=dtype)
    states = [torch.randn(1, batch, 3, device=device, dtype=dtype) for _ in range(2)]
    states = [s.requires_grad_() for s in states[: 1 if name == "GRU" else 2]]
    given = {"reset": torch.zeros(0, batch, dtype=torch.bool, device=device)} if reset else {}
    hx = states[0] if name == "GRU" else tuple(states)
    output, last = layer(torch.randn(0, batch, 8, device=device, dtype=dtype), hx, **given)
    assert output.shape == (0, batch, 3)
    last = [last] if name == "GRU" else last
    grads = [torch.randn_like(s) for s in states]
    for got, want in zip(torch.autograd.grad(last, states, grads), grads, strict=True):
        assert torch.equal(got, want)
    for got, want in zip(last, states, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
@pytest.mark.parametrize("scale", [1, 2**-20])  # values that float16 has below its normal numbers
@pytest.mark.parametrize("sizes", [(1, 18, 3, 5), (5, 35, 4, 17), (1, 2, 9, 130)], ids=str)
@pytest.mark.parametrize("name", CELL)
def test_16_bits_are_float32_rounded_on_the_cpu(name, sizes, scale, dtype, mode):
    """The same bits: from inputs to results and from saved values to gradients nothing is rounded
    in between."""
    p = Problem(name, sizes, mode, dtype, "cpu")
    parameters, of_rows, count = p.parameters(), p.of_rows(), len(p.states())
    x, *states = (t * scale for t in (p.x, *p.states()))
    grads = [grad * scale for grad in p.grads]

    def check_op(suffix, *arguments):
        op = getattr(ops, f"{name}{suffix}")
        wide = [t.float() if t is not None and t.dtype == dtype else t for t in arguments]
        results = op(*arguments)
        for ours, want in zip(results, op(*wide), strict=True):
            assert torch.equal(ours.view(torch.int16), want.to(dtype).view(torch.int16))
        return results

    output, *rest = check_op("_forward", x, *states, *parameters, *of_rows)
    gates, read = rest[count], (output, states[0]) if p.c is None else (rest[-1], states[1])
    recurrent = parameters[0] if p.of_lltm else p.w_h
    check_op("_backward", *grads, gates, *read, recurrent, *of_rows)
    check_op("_cell_forward", x[0], *parameters, *states)
    check_op("_cell_backward", *grads[1:], gates[0], states[-1])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("sizes", CUDA_SIZES, ids=str)
@pytest.mark.parametrize("name", CELL)
def test_every_kernel(name, sizes, dtype, mode, cuda):
    check(name, sizes, mode, dtype, cuda)


@pytest.mark.parametrize("dtype", [torch.float32, *SIXTEEN_BIT])
@pytest.mark.parametrize("sizes", VARIANT_SIZES, ids=str)
@pytest.mark.parametrize("name", CELL)
def test_every_variant(name, sizes, dtype, cuda):
    check(name, (3, sizes[0], 5, sizes[1]), ALL, dtype, cuda)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, *SIXTEEN_BIT])
@pytest.mark.parametrize("sizes", MANY_ROWS, ids=str)
@pytest.mark.parametrize("name", CELL)
def test_many_rows(name, sizes, dtype, mode, cuda):
    check(name, sizes, mode, dtype, cuda)


@pytest.mark.parametrize("sizes", [(4, 700, 5, 512), (3, 256, 5, 1024)], ids=str)
@pytest.mark.parametrize("name", CELL)
def test_inference_of_many_rows(name, sizes, cuda):
    problem = Problem(name, sizes, "ragged and reset", torch.bfloat16, cuda)
    exact = [problem.exact()[key] for key in ("output", "h_n", "c_n")[: 1 + len(problem.states())]]
    for got, want in zip(problem.inference(), exact, strict=True):
        scale = max(1.0, want.abs().max().item()) * torch.finfo(got.dtype).eps
        assert (got.double() - want).abs().max().item() <= LIMIT[got.dtype] * scale


@pytest.mark.parametrize("sizes", [(1, 300, 5, 512), (1, 130, 5, 1024)], ids=str)
@pytest.mark.parametrize("name", [name for name, cell in CELL.items() if cell.carried])
def test_powers_of_two_change_nothing(name, sizes, cuda):
    """Of a row of h0, beyond what fp16 holds, and of W_h."""
    problem = Problem(name, sizes, "plain", torch.float32, cuda)
    want = problem.inference()
    problem.h[7] *= 2.0**40
    large = problem.inference()
    for got, all_of in zip(large, want, strict=True):
        assert got.isfinite().all()
        got.select(-2, 7).copy_(all_of.select(-2, 7))
        assert torch.equal(got, all_of)
    problem.h[7] *= 2.0**-40
    problem.h *= 2.0**40
    problem.w_h *= 2.0**-40
    assert all(map(torch.equal, problem.inference(), want))


@pytest.mark.parametrize("sizes", [(4, 300, 5, 512), (4, 130, 5, 1024)], ids=str)
@pytest.mark.parametrize("name", [name for name, cell in CELL.items() if cell.carried])
def test_accuracy_after_a_large_h0(name, sizes, cuda):
    """Its product saturates the gates of the first step; later states are as small as ever."""
    problem = Problem(name, sizes, "plain", torch.float32, cuda)
    problem.h[7, 0] = 2.0**40
    got, want = problem.inference()[0][1:], problem.exact()["output"][1:]
    limit = LIMIT[torch.float32] * torch.finfo(torch.float32).eps
    assert (got.double() - want).abs().max().item() <= limit * want.abs().max().item()


@pytest.mark.parametrize("power", [108, 60, -60])
@pytest.mark.parametrize("sizes", [(4, 300, 5, 512), (3, 130, 5, 1024)], ids=str)
@pytest.mark.parametrize("name", CELL)
def test_gradients_scale_with_their_row(name, sizes, power, cuda):
    """By powers of two, beyond what fp16 holds; and the other rows' do not change."""
    problem = Problem(name, sizes, "plain", torch.float32, cuda)
    of_rows = ("grad_x", "grad_h0", "grad_c0")
    want = {key: value for key, value in problem.ours().items() if key in of_rows}
    for value in (*problem.grads, *want.values()):
        value.select(-2, 7).mul_(2.0**power)
    got = problem.ours()
    assert all(torch.equal(got[key], value) for key, value in want.items())


@pytest.mark.parametrize("sizes", [(6, 300, 5, 512), (6, 130, 5, 1024)], ids=str)
@pytest.mark.parametrize("name", CELL)
def test_small_states_of_many_rows(name, sizes, cuda):
    """Where they are relative to the largest state that float32 rounds as it rounds others."""
    problem = Problem(name, sizes, "plain", torch.float32, cuda)
    for t in (problem.x, problem.h, problem.b_x, problem.b_h, problem.c):
        if t is not None:
            t *= 2.0**-20
    for got, want in zip(problem.inference(), problem.exact().values(), strict=False):
        scale = want.abs().max().item() * torch.finfo(torch.float32).eps
        assert (got.double() - want).abs().max().item() <= LIMIT[torch.float32] * scale


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize(
    "sizes", [*SIZES, (6, 20, 32, 700), (6, 256, 64, 512), (3, 300, 33, 1024)], ids=str
)
@pytest.mark.parametrize("name", CELL)
@pytest.mark.parametrize("mode, value", [("reset", NAN), ("reset", INF), (ALL, INF)])
def test_what_is_reset_reaches_nothing(mode, value, name, sizes, dtype, device):
    problem = Problem(name, sizes, mode, dtype, device)
    problem.reset[0, 0] = True
    if problem.lengths is not None:
        problem.lengths[0] = sizes[0]
    want = problem.ours()
    problem.h[0] = value
    if problem.c is not None:
        problem.c[0] = INF
    got = problem.ours()
    # The rounding of a float32 product per step depends on the values of all rows.
    for key, value in want.items():
        if dtype == torch.float32 and sizes in MANY_ROWS:
            scale = max(1.0, value.abs().max().item()) * torch.finfo(dtype).eps
            assert (got[key] - value).abs().max().item() <= LIMIT[dtype] * scale, key
        else:
            assert torch.equal(got[key], value), key


@pytest.mark.parametrize("hidden", [64, 600])
@pytest.mark.parametrize("name", [name for name, cell in CELL.items() if cell.carried])
def test_gradients_below_the_normal_numbers_are_flushed(name, hidden):
    """On x86, where arithmetic with them is slow. The caller's own arithmetic stays as it was."""
    problem = Problem(name, (2, 3, 4, hidden), "plain", torch.float32, "cpu")
    problem.c += torch.linspace(20, 150, hidden)  # tanh's slope falls from 1 to less than can be
    problem.grads[2].zero_()
    grad, tiny = problem.ours()["grad_c0"].abs(), torch.finfo(torch.float32).tiny
    assert ((grad > 0) & (grad < tiny)).any() != (platform.machine() == "x86_64")
    assert torch.tensor(tiny) / 2 > 0


@pytest.mark.parametrize(
    "sizes",
    [
        *[(64, 3, 16, 30), (64, 270, 16, 90), (64, 3, 16, 256), (64, 20, 16, 512)],
        *[(32, 96, 16, 1024), (16, 256, 16, 1024)],
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CELL)
def test_repeats_bit_for_bit(name, dtype, sizes, cuda):
    problem = Problem(name, sizes, "reset", dtype, cuda)
    want = problem.ours()
    for _ in range(20):
        got = problem.ours()
        assert all(torch.equal(got[key], value) for key, value in want.items())
