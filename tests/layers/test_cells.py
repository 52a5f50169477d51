"""Descriptions of cells in Python: what a wrong one raises, and that they describe the kernels."""

import dataclasses
import re

import pytest
import torch
from samples import CELL, recurrent_inputs
from torch.testing import assert_close

import my_ops
from my_ops.recurrent import _formulas

F64 = torch.float64
LENGTHS = [2, 6, 0]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"shut": (0.0, 1.0, 0.0)}, "shut must have 4 values, one for each saved value, got 3"),
        ({"saved": 3, "shut": (0.0,) * 3}, "forward must return 3 saved values, got 4"),
        ({"saved": 5, "shut": (0.0,) * 5}, "forward must return 5 saved values, got 4"),
        (
            {"forward": lambda z, h, carried: (h, (), z)},
            "forward must return 1 carried values, got 0",
        ),
        (
            {"backward": lambda saved, *_: (saved[:2], None, saved[:1])},
            "backward must return 4 gradients of pre-activations, got 2",
        ),
        (
            {"backward": lambda saved, *_: (saved, None, ())},
            "backward must return 1 gradients of carried values, got 0",
        ),
        (
            {"backward": lambda saved, *_: (saved, saved[0], saved[:1])},
            "backward must return None as the gradient of h, got a tensor",
        ),
        (
            {"reads_h": True},
            "backward must return a tensor as the gradient of h, got None",
        ),
    ],
)
def test_wrong_description(changes, message):
    with pytest.raises(ValueError, match=f"^lstm: {message}$"):
        dataclasses.replace(CELL["lstm"], **changes)


@pytest.mark.parametrize("name", CELL)
def test_shut_lets_no_gradient_through(name):
    """What is carried stays, whatever it was, and so does its gradient."""
    cell = CELL[name]
    saved = tuple(torch.tensor([value] * 3, dtype=F64) for value in cell.shut)
    carried = tuple(torch.tensor([-1e3, 0.3, 20.0], dtype=F64) for _ in cell.carried)
    grads = tuple(torch.tensor([0.7, -1.0, 1e6], dtype=F64) for _ in cell.carried)
    zero = torch.zeros(3, dtype=F64)
    h = torch.tensor([0.5, -1.0, 2.0], dtype=F64) if cell.reads_h else None
    grad_z, grad_h, grad_carried = cell.backward(saved, carried, carried, h, zero, grads)
    assert not any(grad.any() for grad in grad_z)
    assert grad_h is None or not grad_h.any()
    assert all(map(torch.equal, grad_carried, grads))


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("name", CELL)
def test_formulas_are_the_kernels(name, ragged, device):
    """Forward with the values that it saves, and backward."""
    cell, tensors = CELL[name], recurrent_inputs(name, 6, 3, 4, 5, F64, device)
    count = len(cell.states)
    states, parameters = tensors[1 : 1 + count], tensors[1 + count :]
    lengths = torch.tensor(LENGTHS, device=device) if ragged else None
    rows = _formulas.Rows.of(tensors[0], lengths, None, None)
    got = getattr(torch.ops.my_ops, f"{name}_forward")(*tensors, lengths)
    want = _formulas.forward(cell, tensors[0], states, parameters, rows)
    runs = torch.ones(6, 3, 1, dtype=torch.bool) if rows.runs is None else rows.runs
    for place, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        if place > count:  # of every step: those of rows that have ended are nobody's
            assert ours.shape == theirs.shape
            ours, theirs = (torch.where(runs.to(device), t, 0.0) for t in (ours, theirs))
        assert_close(ours, theirs)

    grads = [torch.randn_like(result) for result in got[: 1 + count]]
    sequences = [got[0]] if cell.reads_h else []
    sequences += got[2 + count :]
    read = states if cell.reads_h else states[1:]
    recurrent = parameters[cell.weights.names.index(cell.weights.recurrent)]
    backward = getattr(torch.ops.my_ops, f"{name}_backward")
    ours = backward(*grads, got[1 + count], *sequences, *read, recurrent, lengths)
    theirs = _formulas.gradient(cell, grads, tensors[0], states, parameters, rows)[: 1 + count]
    assert_close(ours, theirs)


@pytest.mark.parametrize("name", CELL)
def test_documented_sizes(name):
    for function in (getattr(my_ops, name), getattr(my_ops, f"{name}_cell")):
        rows = set(re.findall(r"(\d+) \* hidden_size", function.__doc__))
        assert rows == {str(CELL[name].gates)}
