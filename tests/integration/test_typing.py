"""A user's program under mypy --strict: py.typed is there, and the public names have types."""

import importlib.util
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="needs mypy"),
]

PROGRAM = """
import torch
from typing_extensions import assert_type

import my_ops

x = torch.zeros(3, 4)
h, c = torch.zeros(3, 5), torch.zeros(3, 5)
pair = tuple[torch.Tensor, torch.Tensor]
three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
layer = my_ops.nn.LSTM(4, 5, num_layers=2, dropout=0.1, weight_dropout=0.1, zoneout=0.1)
cell = my_ops.nn.LSTMCell(4, 5)
w, v, bi, bh = cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh
steps, states = torch.zeros(6, 3, 4), torch.zeros(1, 3, 5)
lengths = torch.tensor([6, 2, 1])
reset = torch.zeros(6, 3, dtype=torch.bool)

# elementwise
assert_type(my_ops.add_one(x), torch.Tensor)
assert_type(my_ops.add_one(1), int)
assert_type(my_ops.custom_add(x, x), torch.Tensor)
assert_type(my_ops.d_sigmoid(x), torch.Tensor)
assert_type(my_ops.round_ste(x), torch.Tensor)
assert_type(my_ops.fill_index(3, 4, dtype=torch.int32, device="cpu"), torch.Tensor)

# products
assert_type(my_ops.gemm(x, x.T), torch.Tensor)
assert_type(my_ops.gemm(x, x.T, out=torch.zeros(3, 3), precision="high"), torch.Tensor)
packed = my_ops.prepack(x)
assert_type(packed, my_ops.PackedWeight)
assert_type(packed.weight, torch.Tensor)
assert_type(my_ops.linear(x, packed), torch.Tensor)
assert_type(my_ops.linear(x, x, h[:, 0], activation="relu", residual=None), torch.Tensor)

# recurrent functions
assert_type(my_ops.lstm(steps, h, c, w, v, bi, bh, lengths=lengths, reset=reset), three)
assert_type(my_ops.lstm_cell(x, w, v, bi, None, h, c), pair)
assert_type(my_ops.gru(steps, h, w, v), pair)
assert_type(my_ops.gru_cell(x, w, v, None, None, h), torch.Tensor)
assert_type(my_ops.lltm(steps, h, c, w, bi, zoneout=None), three)
assert_type(my_ops.lltm_cell(x, w, bi, h, c), pair)

# layers
data = torch.nn.utils.rnn.pack_sequence([steps[:, 0]])
packed_sequence = torch.nn.utils.rnn.PackedSequence
assert_type(layer(steps, (states, states), lengths, reset), tuple[torch.Tensor, pair])
assert_type(layer(steps, [states, states], lengths=[6, 2, 1]), tuple[torch.Tensor, pair])
assert_type(layer(data, (states, states)), tuple[packed_sequence, pair])
assert_type(my_ops.nn.GRU(4, 5)(steps, states, (6, 2, 1)), pair)
assert_type(my_ops.nn.GRU(4, 5)(data), tuple[packed_sequence, torch.Tensor])
assert_type(my_ops.nn.LLTM(4, 5)(steps, reset=reset), tuple[torch.Tensor, pair])
assert_type(cell(x, (h, c)), pair)
assert_type(my_ops.nn.GRUCell(4, 5)(x, h), torch.Tensor)
assert_type(my_ops.nn.LLTMCell(4, 5)(x), pair)
assert_type(my_ops.nn.Linear(4, 3).forward(x), torch.Tensor)
assert_type(my_ops.nn.LinearActivation(4, 3, activation="relu").forward(x), torch.Tensor)
assert_type(my_ops.nn.RoundSTE().forward(x), torch.Tensor)
recurrent: torch.nn.RNNBase = layer
linear: torch.nn.Linear = my_ops.nn.Linear(4, 3)

# convert
done = my_ops.convert(torch.nn.LSTM(4, 5), only=torch.nn.LSTM, skip=["a", torch.nn.GRU])
assert_type(done, my_ops.Conversion)
assert_type(done.converted, dict[str, str])
assert_type(done.undo(), None)
assert_type(my_ops.revert(layer), my_ops.Conversion)

# the switch
my_ops.fast_fp32()
with my_ops.fast_fp32(False):
    pass


@my_ops.fast_fp32()
def step(a: int, *, b: str = "") -> float:
    return a + len(b)


assert_type(step(1, b="2"), float)
report = my_ops.fast_fp32.report()
assert_type(report.on, bool)

# the specification, for C++ and the version
assert_type(my_ops.reference.gemm(x, x.T), torch.Tensor)
assert_type(my_ops.reference.lstm(steps, h, c, w, v, bi, bh), three)
assert_type(my_ops.get_include(), str)
assert_type(my_ops.cmake_prefix_path, str)
assert_type(my_ops.__version__, str)
"""

MISTAKES = """
import torch

import my_ops

x = torch.zeros(3, 4)
steps = torch.zeros(6, 3, 4)
packed = torch.nn.utils.rnn.pack_sequence([x])
lstm, gru = my_ops.nn.LSTM(4, 5), my_ops.nn.GRU(4, 5)
my_ops.gemm(x)
my_ops.add_one("1")
my_ops.linear(x, x, activation=1)
my_ops.linear(x, None)
my_ops.lstm(steps, x, x, x)
my_ops.fill_index(3, 4, dtype="float32")
my_ops.convert(lstm, only=1)
my_ops.convert(x)
my_ops.fast_fp32("on")
my_ops.nn.LSTM(4, 5, layers=2)
my_ops.nn.LinearActivation(4, 3)
lstm(steps, x)
lstm(steps, lengths="3")
lstm(packed, lengths=[3])
gru(steps, (x, x))
gru([1.0])
my_ops.nn.LSTMCell(4, 5)(x, x)
my_ops.nn.GRUCell(4, 5)(x, (x, x))
"""
WRONG = range(MISTAKES.split("\n").index("my_ops.gemm(x)") + 1, len(MISTAKES.split("\n")))


def test_strict(tmp_path):
    """One run for both, because mypy reads all of torch."""
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "mistakes.py").write_text(MISTAKES)
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", tmp_path / "cache"]
    lines = subprocess.run(
        [*command, "--no-error-summary", "program.py", "mistakes.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.splitlines()
    assert [line for line in lines if line.startswith("program.py")] == []
    assert {line.split(": error")[0] for line in lines if ": error" in line} == {
        f"mistakes.py:{line}" for line in WRONG
    }
