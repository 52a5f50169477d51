"""Trains a recurrent cell of one's own on the adding problem.

    python tools/new_op --cell leaky
    MY_OPS_WITH_CUDA=0 pip install --no-build-isolation -e .
    python examples/own_cell.py [--steps N] [--output FILE] [--device cpu|cuda]

The first two commands, of the guide's page on cells, write the cell ``leaky`` and build it; leave
``MY_OPS_WITH_CUDA=0`` out where there is a GPU. Its layer is then used like ``torch.nn.LSTM``.

The adding problem: each step has a number from 0 to 1 and a mark. Two steps of a sequence are
marked, and the answer is the sum of their numbers. Without memory the best answer is always 1, with
a mean square error of 1/6.

The plot shows the loss, and the network's answer at each step of one sequence. The exit status is 1
if the error in sequences it was not trained on stays above 0.02.
"""

from __future__ import annotations

import argparse
import sys
import time

import plots
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn
from tqdm import tqdm

import my_ops

STEPS, BATCH, HIDDEN = 50, 64, 64
LEARNING_RATE = 1e-2
BOUND = 0.02  # of the mean square error


class Adder(nn.Module):
    """Maps (steps, batch, 2) to an answer at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = my_ops.nn.Leaky(2, HIDDEN)
        self.answer = my_ops.nn.Linear(HIDDEN, 1)

    def forward(self, input: Tensor) -> Tensor:
        output, _ = self.memory(input)
        return self.answer(output).squeeze(2)


def sequences(device: torch.device) -> tuple[Tensor, Tensor]:
    """Numbers with their marks, one in each half of a sequence, and the sums to answer."""
    numbers, marks = torch.rand(STEPS, BATCH), torch.zeros(STEPS, BATCH)
    half = STEPS // 2
    for begin in (0, half):
        marks[torch.randint(begin, begin + half, (BATCH,)), torch.arange(BATCH)] = 1
    return torch.stack([numbers, marks], 2).to(device), (numbers * marks).sum(0).to(device)


def plot(losses: list[float], input: Tensor, answers: Tensor) -> Figure:
    """``input`` and ``answers`` are of one sequence."""
    figure, (curve, example) = plots.panels("A cell of one's own on the adding problem", 1, 1.4)
    curve.semilogy(plots.means(losses), color=plots.OURS, label="Leaky")
    curve.axhline(1 / 6, color=plots.FAINT, linestyle="--", label="without memory")
    curve.set(title="Loss: mean square error", xlabel="training step, means of 10")
    curve.legend(frameon=False)
    numbers, marks = input.T.tolist()
    colors = [plots.THEIRS if mark else plots.FAINT for mark in marks]
    example.bar(range(STEPS), numbers, color=colors, alpha=0.8)
    marked = [step for step, mark in enumerate(marks) if mark]
    truth = (input[:, 0] * input[:, 1]).cumsum(0)
    example.step(range(STEPS), truth, plots.THEIRS, where="post", label="sum of the marked numbers")
    example.plot(answers, color=plots.OURS, label="answer, if asked at this step")
    example.set(title=f"A sequence, marked at steps {marked[0]} and {marked[1]}", xlabel="step")
    example.set(ylim=(0, 2))
    example.legend(frameon=False)
    return figure


def main() -> int:
    parser = argparse.ArgumentParser(description="A recurrent cell of one's own.")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--output", type=plots.image, default="own_cell.png")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    if not hasattr(my_ops.nn, "Leaky"):
        parser.error("my_ops has no cell leaky: write and build it first, as this file's top says")
    torch.manual_seed(0)
    began, device = time.perf_counter(), torch.device(options.device)
    model = Adder().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, total_steps=options.steps, pct_start=0.1
    )
    losses = []
    for _ in tqdm(range(options.steps), desc="training", unit="step", mininterval=1.0):
        input, sums = sequences(device)
        loss = F.mse_loss(model(input)[-1], sums)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    with torch.no_grad():
        input, sums = sequences(device)
        answers = model(input)
        error = F.mse_loss(answers[-1], sums).item()
    plots.save(plot(losses, input[:, 0].cpu(), answers[:, 0].cpu()), options.output)
    print(f"The mean square error is {error:.4f}. {time.perf_counter() - began:.0f} s in all")
    if not error <= BOUND:
        print(f"FAILED: it is to be {BOUND} at most", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
