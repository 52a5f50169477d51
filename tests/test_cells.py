"""The formulas of kernels/recurrent/cells, run by the engine for the CPU: against torch's cells and
autograd, in float64. Of LSTM and GRU there are no ops yet."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from my_ops import reference

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.skipif(
    not shutil.which("c++") or not (ROOT / "kernels").exists(),
    reason="needs a C++ compiler and the source tree",
)


class LLTMCell(torch.nn.Module):
    """LLTM with the parameters of torch's cells."""

    def __init__(self, inputs, hidden, dtype):
        super().__init__()
        for name, *sizes in (("weight_ih", 3 * hidden, inputs), ("weight_hh", 3 * hidden, hidden)):
            self.register_parameter(name, torch.nn.Parameter(torch.randn(sizes, dtype=dtype)))
        for name in ("bias_ih", "bias_hh"):
            self.register_parameter(name, torch.nn.Parameter(torch.randn(3 * hidden, dtype=dtype)))

    def forward(self, x, state):
        weights = torch.cat([self.weight_hh, self.weight_ih], 1)
        return reference.lltm_cell(x, weights, self.bias_ih + self.bias_hh, *state)


CELLS = {"lltm": LLTMCell, "lstm": torch.nn.LSTMCell, "gru": torch.nn.GRUCell}
TERMS = {"lltm": 3, "lstm": 4, "gru": 4}  # of a unit: the last of GRU is its candidate's input


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    program = tmp_path_factory.mktemp("cells") / "cells"
    sources = [Path(__file__).with_name("cells.cpp"), ROOT / "kernels/recurrent/product_cpu.cpp"]
    folders = (f"-I{ROOT}/{name}" for name in ("kernels", "include"))
    command = ["c++", "-O1", "-std=c++20", *folders, *map(str, sources), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return program


def run(program, name, sizes, arrays):
    """What cells.cpp computes: output, c_n, the gradients of the terms, of h0 and of c0."""
    numbers = torch.tensor([list(CELLS).index(name), *sizes])
    data = [numbers, *(a.detach().contiguous() for a in arrays)]
    done = subprocess.run(
        [program],
        input=b"".join(a.numpy().tobytes() for a in data),
        capture_output=True,
        check=True,
    )
    steps, batch, _, hidden = sizes
    carried = 0 if name == "gru" else batch * hidden
    counts = [steps * batch * hidden, carried, steps * batch * TERMS[name] * hidden]
    counts += [batch * hidden, carried]
    got = torch.frombuffer(bytearray(done.stdout), dtype=torch.float64)
    return got.split(counts)


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (3, 2, 5, 7), (5, 19, 3, 16)], ids=str)
@pytest.mark.parametrize("name", CELLS)
def test_cell(name, sizes, program):
    steps, batch, inputs, hidden = sizes
    cell = CELLS[name](inputs, hidden, dtype=torch.float64)
    draw = lambda *s: torch.randn(*s, dtype=torch.float64)  # noqa: E731
    x, h0 = draw(steps, batch, inputs).requires_grad_(), draw(batch, hidden).requires_grad_()
    c0 = draw(batch, hidden).requires_grad_()
    with torch.no_grad():  # far into saturation, too
        for parameter in cell.parameters():
            parameter.mul_(1 + 4 * torch.rand(()))

    h, c, outputs = h0, c0, []
    for step in x:
        if name == "gru":
            h = cell(step, h)
        else:
            h, c = cell(step, (h, c))
        outputs.append(h)
    output = torch.stack(outputs)
    grad_output, grad_h_n, grad_c_n = draw(*output.shape), draw(batch, hidden), draw(batch, hidden)
    loss = (output * grad_output).sum() + (h * grad_h_n).sum()
    if name != "gru":
        loss = loss + (c * grad_c_n).sum()
    names = ["weight_ih", "weight_hh", "bias_ih", "bias_hh"]
    leaves = {"x": x, "h0": h0, "c0": c0, **{n: getattr(cell, n) for n in names}}
    grads = torch.autograd.grad(loss, leaves.values(), allow_unused=True)
    want = dict(zip(leaves, grads, strict=True))

    bias = cell.bias_ih + cell.bias_hh
    if name == "gru":
        bias[2 * hidden :] = cell.bias_hh[2 * hidden :]
        bias = torch.cat([bias, cell.bias_ih[2 * hidden :]])
    empty = torch.empty(0, dtype=torch.float64)
    carried = (empty, empty) if name == "gru" else (c0, grad_c_n)
    arrays = [x, cell.weight_ih, cell.weight_hh, bias, h0, carried[0]]
    arrays += [grad_output, grad_h_n, carried[1]]
    got_output, c_n, terms, grad_h0, grad_c0 = run(program, name, sizes, arrays)

    # As the bindings do: products of the terms' gradients over all steps at once.
    terms = terms.view(steps * batch, -1)
    gates_h = terms[:, : cell.weight_hh.shape[0]]
    gates_x = torch.cat([terms[:, : 2 * hidden], terms[:, 3 * hidden :]], 1)
    gates_x = gates_x if name == "gru" else gates_h
    h_before = torch.cat([h0[None], output[:-1]]).view(steps * batch, hidden).detach()
    got = {
        "x": (gates_x @ cell.weight_ih.detach()).view_as(x),
        "h0": grad_h0.view_as(h0),
        "c0": grad_c0.view_as(c0) if name != "gru" else None,
        "weight_ih": gates_x.T @ x.detach().view(steps * batch, inputs),
        "weight_hh": gates_h.T @ h_before,
        "bias_ih": gates_x.sum(0),
        "bias_hh": gates_h.sum(0),
    }
    got["output"], want["output"] = got_output.view_as(output), output.detach()
    if name != "gru":
        got["c_n"], want["c_n"] = c_n.view_as(c), c.detach()
    for key, value in want.items():
        if value is None:
            assert got[key] is None
            continue
        scale = max(1.0, value.abs().max().item())
        assert (got[key] - value).abs().max() <= 1e-13 * scale, key
