"""Cells other than LLTM through my_ops.recurrent, for test_recurrent.py, in a process of its own.

LSTM carries c and reads it from before the step in backward; GRU carries nothing, reads h, and
needs the product with h apart in one gate. Their ops are made here, of the formulas.
"""

import sys

import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.flop_counter import FlopCounterMode

from my_ops.recurrent import _formulas
from my_ops.recurrent._cell import Cell, one_or_all
from my_ops.recurrent._ops import define

STEPS, BATCH, INPUTS, HIDDEN = 3, 2, 3, 2


def lstm_forward(z, h, carried):
    i, f, g, o = torch.sigmoid(z[0]), torch.sigmoid(z[1]), torch.tanh(z[2]), torch.sigmoid(z[3])
    c = f * carried[0] + i * g
    return o * torch.tanh(c), (c,), (i, f, g, o)


def lstm_backward(saved, previous, carried, h, grad_h, grad_carried):
    i, f, g, o = saved
    squashed = torch.tanh(carried[0])
    grad_c = grad_carried[0] + grad_h * o * (1 - squashed * squashed)
    grad_z = (
        grad_c * g * i * (1 - i),
        grad_c * previous[0] * f * (1 - f),
        grad_c * i * (1 - g * g),
        grad_h * squashed * o * (1 - o),
    )
    return grad_z, None, (grad_c * f,)


def gru_forward(z, h, carried):
    r, u, product = torch.sigmoid(z[0]), torch.sigmoid(z[1]), z[2]
    n = torch.tanh(z[3] + r * product)
    return n + u * (h - n), (), (r, u, n, product)


def gru_backward(saved, previous, carried, h, grad_h, grad_carried):
    r, u, n, product = saved
    grad_n = grad_h * (1 - u) * (1 - n * n)
    grad_z = (grad_n * product * r * (1 - r), grad_h * (h - n) * u * (1 - u), grad_n * r, grad_n)
    return grad_z, grad_h * u, ()


CELLS = {
    "lstm": Cell("lstm", 4, 4, lstm_forward, lstm_backward, carried={"c": "cell"}),
    "gru": Cell("gru", 3, 4, gru_forward, gru_backward, apart=1, reads_h=True),
}


def schema(name, arguments, results, optional=()):
    given = ", ".join(f"Tensor{'?' * (a in optional)} {a}" for a in arguments if a != "lengths")
    lengths = ", Tensor? lengths=None" if "lengths" in arguments else ""
    returned = "Tensor" if results == 1 else f"({', '.join(['Tensor'] * results)})"
    return f"{name}({given}{lengths}) -> {returned}"


def register(library, cell):
    """The ops of a cell by its formulas, for the CPU."""
    name, states, carried = cell.name, len(cell.states), len(cell.carried)
    weights, recurrent = len(cell.weights.names), cell.weights.recurrent

    def step_forward(input, *others):
        given = input[None], others[weights:], others[:weights], None
        _, *results = _formulas.forward(cell, *given)
        return *results[:states], results[states][0]

    def forward(input, *others, lengths=None):
        others, lengths = others[: states + weights], (*others, lengths)[states + weights]
        runs = None if lengths is None else _formulas.running_steps(input, lengths)
        results = _formulas.forward(cell, input, others[:states], others[states:], runs)
        return tuple(t.clone() for t in results)

    def step_backward(*tensors):
        grads, gates, read = tensors[:states], tensors[states], tensors[states + 1 :]
        h = read[0] if cell.reads_h else None
        old = read[1:] if cell.reads_h else read
        saved = gates.chunk(cell.saved, 1)
        new = [saved[1] * old[0] + saved[0] * saved[2]] if carried else []  # LSTM's
        grads = [torch.zeros_like(read[0]) if g is None else g for g in grads]
        grad_z, *direct = cell.backward(saved, old, new, h, grads[0], grads[1:])
        grads = [direct[0], *direct[1]] if cell.reads_h else direct[1]
        return torch.cat(grad_z, 1), *grads

    def backward(*tensors):
        lengths = tensors[-1] if len(tensors) == len(cell.backward_arguments) else None
        given = dict(zip(cell.backward_arguments, tensors, strict=False))
        sequences, first = ["output", *(f"{w}s" for w in cell.carried.values())], cell.states
        if not cell.reads_h:
            given |= {"output": None, "h0": None}
        runs = None if lengths is None else _formulas.running_steps(given["gates"], lengths)
        results = _formulas.backward(
            cell,
            tensors[: 1 + states],
            given["gates"],
            [given[s] for s in sequences],
            [given[s] for s in first],
            cell.weights.of_h(HIDDEN, given[recurrent]),
            runs,
        )
        return tuple(t.clone() for t in results)

    def first(count, function):
        return lambda *tensors: one_or_all(function(*tensors)[:count])

    grads = [a for a in cell.backward_arguments if a.startswith("grad")]
    grads += [a for a in cell.step_backward_arguments if a.startswith("grad")]
    read = len(cell.step_backward_arguments) - states - 1
    for suffix, results, kernel, arguments in (
        ("_cell", states, first(states, step_forward), cell.step_arguments),
        ("_cell_forward", states + 1, step_forward, cell.step_arguments),
        ("_cell_backward", 1 + read, step_backward, cell.step_backward_arguments),
        ("", 1 + states, first(1 + states, forward), cell.arguments),
        ("_forward", 2 + states + carried, forward, cell.arguments),
        ("_backward", 1 + states, backward, cell.backward_arguments),
    ):
        library.define(schema(name + suffix, arguments, results, grads))
        library.impl(name + suffix, kernel, "CPU")


def as_tuple(result):
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def draw(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def by_torch(cell, input, *tensors):
    """NAME by torch's own layer."""
    states, (weights, bias) = tensors[: len(cell.states)], tensors[len(cell.states) :]
    kind = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}[cell.name]
    sums, zeros = (cell.gates - cell.apart) * HIDDEN, bias.new_zeros(cell.gates * HIDDEN)
    parameters = {
        "weight_ih_l0": weights[:, HIDDEN:],
        "weight_hh_l0": weights[:, :HIDDEN],
        "bias_ih_l0": torch.cat([bias[:sums], bias[cell.gates * HIDDEN :]]) if cell.apart else bias,
        "bias_hh_l0": torch.cat([zeros[:sums], bias[sums : cell.gates * HIDDEN]]),
    }
    hx = tuple(s[None] for s in states)
    hx = hx if len(hx) > 1 else hx[0]
    layer = kind(INPUTS, HIDDEN, dtype=torch.float64)
    output, last = torch.func.functional_call(layer, parameters, (input, hx))
    return output, *(s[0] for s in as_tuple(last))


def check(cell, step, layer):
    rows = cell.gates * HIDDEN
    parameters = draw(rows, HIDDEN + INPUTS), draw(cell.terms * HIDDEN)
    states = [draw(BATCH, HIDDEN) for _ in cell.states]
    input, lengths = draw(STEPS, BATCH, INPUTS), torch.tensor([1, 3])
    arguments = (input, *states, *parameters)
    op = getattr(torch.ops.my_ops, cell.name)

    want = by_torch(cell, *arguments)
    for ours, exact in zip(layer(*arguments, None), want, strict=True):
        torch.testing.assert_close(ours, exact)
    got = torch.autograd.grad(sum(r.sin().sum() for r in layer(*arguments, None)), arguments)
    exact = torch.autograd.grad(sum(r.sin().sum() for r in want), arguments)
    for ours, theirs in zip(got, exact, strict=True):
        torch.testing.assert_close(ours, theirs)

    one = (input[0].detach().requires_grad_(), *parameters, *states)
    for call, tensors in (
        (step, one),
        (lambda *ts: layer(*ts, None), arguments),
        (lambda *ts: layer(*ts, lengths), arguments),
    ):
        assert gradcheck(call, tensors, check_forward_ad=True)
        assert gradgradcheck(call, tensors)
    torch.library.opcheck(getattr(torch.ops.my_ops, f"{cell.name}_cell").default, one)
    torch.library.opcheck(op.default, (*arguments, lengths))

    for shared in (0, len(parameters)):  # of the parameters, or none
        plain = (one[0], *one[1:])
        for call, tensors, own in (
            (step, plain, [i not in range(1, 1 + shared) for i in range(len(plain))]),
            (
                lambda *ts: layer(*ts, lengths),
                arguments,
                [i < len(arguments) - shared for i in range(len(arguments))],
            ),
        ):
            stacked = [torch.stack([t, -t]) if o else t for t, o in zip(tensors, own, strict=True)]
            dims = tuple(0 if o else None for o in own)

            def pulled(*ts, call=call):
                results, pull = torch.func.vjp(lambda *inner: as_tuple(call(*inner)), *ts)
                return *results, *pull(tuple(torch.cos(r) for r in results))

            got = torch.vmap(pulled, dims)(*(t.detach() for t in stacked))
            with torch.no_grad():  # by the kernels of backward
                again = torch.vmap(pulled, dims)(*(t.detach() for t in stacked))
            for k in range(2):
                exact = pulled(*(t[k] if o else t for t, o in zip(stacked, own, strict=True)))
                for results in (got, again):
                    for ours, theirs in zip(results, exact, strict=True):
                        torch.testing.assert_close(ours[k], theirs)

    with FlopCounterMode(display=False) as counter:
        layer(*arguments, None)[0].sum().backward()
    forward = 2 * STEPS * BATCH * rows * (HIDDEN + INPUTS)
    assert counter.get_total_flops() == 3 * forward  # backward: through time, input, weights
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(*(t.float() for t in arguments), None)[0].dtype == torch.bfloat16
    for wrong in range(1, len(arguments)):
        bad = [t[:1] if i == wrong else t for i, t in enumerate(arguments)]
        try:
            op.default(*(t.to("meta") for t in bad))
        except RuntimeError as error:
            assert str(error).startswith(f"{cell.name}: ") and " must be " in str(error)
        else:
            raise AssertionError(wrong)


def main(name):
    torch.manual_seed(7)
    cell, library = CELLS[name], torch.library.Library("my_ops", "FRAGMENT")
    register(library, cell)
    check(cell, *define(cell))
    import my_ops.distributed  # noqa: F401  gives every cell its rules of sharding

    print("fits")


if __name__ == "__main__":
    main(sys.argv[1])
