"""Trains a character-level language model with my_ops, beside the same model in plain PyTorch.

    python examples/char_lm.py [--steps N] [--output FILE] [--device cpu|cuda]

The text is Python's own language reference, which every Python ships (``pydoc_data.topics``). The
model: embedding, LLTM, a linear layer with sigmoid, round (each character is predicted from 256
bits alone), a linear layer to the logits. Both models start from the same parameters and see the
same batches. They take turns step by step, so that whatever else the machine does slows both.

Shown: both losses, the speed of each and the ratio, a text that the trained model writes, and the
largest difference of every operator from its reference. Losses and speeds also go into a plot.
The exit status is 1 if an operator is off its reference or the two models' losses disagree.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn
from tqdm import tqdm

import my_ops

EMBEDDING, HIDDEN, BITS = 64, 128, 256
BATCH, LENGTH = 32, 64
LEARNING_RATE = 4e-3
WARM_UP = 10  # first steps, left out of the timing
TIME_LIMIT = 140  # seconds after which training stops early, on a machine that is slow or busy

# One bit that rounds the other way sends the two runs on different paths that are equally good: the
# first steps agree to the rounding of float32, the ends only as two good runs do.
FIRST_STEPS, FIRST_BOUND = 10, 1e-3  # relative difference of the loss, at any step
LAST_STEPS, LAST_BOUND = 100, 0.03  # relative difference of the mean loss

# Error bounds of the operators, relative to the largest value of the reference, or to 1 below that.
BOUNDS = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 3e-2}

State = tuple[Tensor, Tensor] | None  # h and cell, None for zeros


# ---------------------------------------------------------------------------------- the two models


class CharLM(nn.Module):
    """The model in my_ops: (steps, batch) characters to (steps, batch, vocabulary) logits."""

    def __init__(self, vocabulary: int, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, EMBEDDING)
        self.lltm = my_ops.nn.LLTM(EMBEDDING, hidden)
        self.encode = my_ops.nn.LinearActivation(hidden, BITS, activation="sigmoid")
        self.round = my_ops.nn.RoundSTE()
        self.decode = my_ops.nn.Linear(BITS, vocabulary)

    def forward(self, text: Tensor, state: State = None) -> tuple[Tensor, State]:
        output, state = self.lltm(self.embedding(text), state)
        return self.decode(self.round(self.encode(output))), state


class PlainLLTM(nn.Module):
    """LLTM as one writes it in PyTorch: a loop over the steps, each a few tensor operations."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.empty(3 * hidden_size, hidden_size + input_size))
        self.bias = nn.Parameter(torch.empty(3 * hidden_size))

    def forward(self, input: Tensor) -> Tensor:
        h = cell = input.new_zeros(input.size(1), self.weights.size(0) // 3)
        outputs = []
        for x in input:
            gates = F.linear(torch.cat([h, x], dim=1), self.weights, self.bias)
            i, o, g = gates.chunk(3, dim=1)
            cell = cell + F.elu(g) * torch.sigmoid(i)
            h = torch.tanh(cell) * torch.sigmoid(o)
            outputs.append(h)
        return torch.stack(outputs)


class PlainCharLM(nn.Module):
    """The same model in plain PyTorch, with the same parameters in the same order."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, EMBEDDING)
        self.lltm = PlainLLTM(EMBEDDING, HIDDEN)
        self.encode = nn.Linear(HIDDEN, BITS)
        self.decode = nn.Linear(BITS, vocabulary)

    def forward(self, text: Tensor) -> tuple[Tensor, None]:
        bits = torch.sigmoid(self.encode(self.lltm(self.embedding(text))))
        bits = bits + ((bits >= 0.5).to(bits.dtype) - bits).detach()  # straight through
        return self.decode(bits), None


# ---------------------------------------------------------------------------------------- training


class Trainer:
    """A model with its optimizer; ``step`` trains on one batch and keeps the loss and the time."""

    def __init__(self, model: nn.Module, steps: int) -> None:
        self.model = model
        self.optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.1
        )
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self, text: Tensor) -> None:
        start = time.perf_counter()
        logits, _ = self.model(text[:-1])
        loss = F.cross_entropy(logits.flatten(0, 1), text[1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.losses.append(loss.item())  # waits for the device
        self.seconds.append(time.perf_counter() - start)

    def tokens_per_second(self) -> float:
        return BATCH * LENGTH / statistics.median(self.seconds[WARM_UP:] or self.seconds)

    def last_loss(self) -> float:
        return statistics.fmean(self.losses[-LAST_STEPS:])


def train(ours: Trainer, plain: Trainer, text: Tensor, steps: int) -> None:
    """Trains both on the same random windows of the text; who goes first alternates."""
    window = torch.arange(LENGTH + 1, device=text.device)[:, None]
    generator = torch.Generator().manual_seed(0)
    progress = tqdm(range(steps), desc="training both", unit="step", mininterval=1.0)
    for step in progress:
        starts = torch.randint(len(text) - LENGTH, (BATCH,), generator=generator)
        batch = text[window + starts.to(text.device)]
        for trainer in (ours, plain) if step % 2 else (plain, ours):
            trainer.step(batch)
        if step % 20 == 0:
            progress.set_postfix(my_ops=f"{ours.losses[-1]:.3f}", plain=f"{plain.losses[-1]:.3f}")
        if sum(ours.seconds) + sum(plain.seconds) > TIME_LIMIT:
            progress.close()
            print(f"Stopped after {step + 1} of {steps} steps and {TIME_LIMIT} s")
            break


@torch.no_grad()
def write(model: CharLM, prompt: str, characters: Sequence[str], device: torch.device) -> str:
    """Lets the model continue the prompt, a character at a time."""
    generator = torch.Generator().manual_seed(1)
    codes = [characters.index(character) for character in prompt]
    logits, state = model(torch.tensor(codes, device=device)[:, None])
    for _ in range(320):
        chances = torch.softmax(logits[-1, 0].cpu() / 0.7, dim=0)
        codes.append(int(torch.multinomial(chances, 1, generator=generator)))
        logits, state = model(torch.tensor([[codes[-1]]], device=device), state)
    return "".join(characters[code] for code in codes)


# ---------------------------------------------------------------- every operator and its reference


def calls(dtype: torch.dtype, device: torch.device) -> list[tuple[str, list[Tensor], dict]]:
    """One call of each operator: name, inputs in float64, options."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    weights, bias = random(3 * HIDDEN, HIDDEN + 32) / HIDDEN**0.5, random(3 * HIDDEN)
    h, cell = random(BATCH, HIDDEN), random(BATCH, HIDDEN)
    return [
        ("add_one", [random(1000)], {}),
        ("custom_add", [random(33, 1, 17), random(65, 17)], {}),
        ("d_sigmoid", [4 * random(1000)], {}),
        ("round_ste", [random(1000)], {}),
        ("fill_index", [], dict(height=48, width=64, dtype=dtype, device=device)),
        ("gemm", [random(96, 128), random(128, 80)], {}),
        ("linear", [random(96, 128), random(80, 128), random(80)], dict(activation="gelu")),
        ("lltm_cell", [random(BATCH, 32), weights, bias, h, cell], {}),
        ("lltm", [random(20, BATCH, 32), h, cell, weights, bias], {}),
    ]


def outputs_and_gradients(op: Callable, inputs: list[Tensor], options: dict) -> list[list[Tensor]]:
    inputs = [x.detach().requires_grad_() for x in inputs]
    result = op(*inputs, **options)
    outputs = [result] if isinstance(result, Tensor) else list(result)
    # The gradients of the outputs: -2 to 2, exact in every dtype.
    slopes = [(torch.arange(y.numel()) % 5 - 2).to(y).reshape(y.shape) for y in outputs]
    return [outputs, list(torch.autograd.grad(outputs, inputs, slopes)) if inputs else []]


def compare(device: torch.device) -> bool:
    """Prints the largest error of every operator; whether all are within their bounds."""
    print("\nLargest error beside the reference in float64, relative to its largest value or to 1:")
    print("outputs | gradients")
    print(f"{'':<12}" + "".join(f"{str(dtype)[6:]:^22}" for dtype in BOUNDS))
    rows: dict[str, str] = {}
    for dtype, bound in BOUNDS.items():
        for name, inputs, options in calls(dtype, device):
            given = [x.to(device, dtype) for x in inputs]
            got = outputs_and_gradients(getattr(my_ops, name), given, options)
            given = [x.double() for x in given]
            expected = outputs_and_gradients(getattr(my_ops.reference, name), given, options)
            cells = []
            for ours, theirs in zip(got, expected, strict=True):
                errors = [
                    ((a - b).abs().max() / b.abs().max().clamp(min=1)).item()
                    for a, b in zip(ours, theirs, strict=True)
                ]
                fits = all(error <= bound for error in errors)  # NaN does not
                cells.append((f"{max(errors):.1e}" if errors else "none") + "!" * (not fits))
            rows[name] = rows.get(name, f"{name:<12}") + f"{' | '.join(cells):^22}"
    bounds = "".join(f"{f'{bound:.1e} | {bound:.1e}':^22}" for bound in BOUNDS.values())
    print(*rows.values(), f"{'at most':<12}{bounds}", sep="\n")
    return "!" not in "".join(rows.values())


# ------------------------------------------------------------------------------------------ report


def plot(ours: Trainer, plain: Trainer, where: str, path: str) -> None:
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    figure.suptitle(f"Character language model with LLTM, on {where}", fontweight="bold")
    curves, bars = figure.subplots(1, 2, width_ratios=(2.4, 1))
    models = (("my_ops", ours, "#d1495b", "-"), ("plain PyTorch", plain, "#30638e", "--"))
    for name, trainer, color, line in models:
        label = f"{name}, {trainer.last_loss():.3f} at the end"
        losses = torch.tensor(trainer.losses)
        means = losses.unfold(0, min(10, len(losses)), 1).mean(1)
        curves.plot(means, color=color, linestyle=line, linewidth=1.3, label=label)
        rate = trainer.tokens_per_second() / 1000
        bars.bar_label(bars.bar(name, rate, color=color, width=0.6), fmt="%.1f", padding=3)
    curves.set(title="Loss: same start, same batches", xlabel="training step")
    curves.set(ylabel="nats per character, mean of 10 steps")
    curves.legend(frameon=False)
    ratio = ours.tokens_per_second() / plain.tokens_per_second()
    bars.set(title=f"Training speed: my_ops at {ratio:.2f}x", ylabel="thousand tokens per second")
    bars.margins(y=0.12)
    for axes in (curves, bars):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
        axes.set_axisbelow(True)
    figure.savefig(path, dpi=150)


def losses_agree(ours: Trainer, plain: Trainer) -> bool:
    """Prints how far the losses of the two are apart; whether that is within the bounds."""
    pairs = zip(ours.losses[:FIRST_STEPS], plain.losses, strict=False)
    first = max(abs(a / b - 1) for a, b in pairs)
    last = abs(ours.last_loss() / plain.last_loss() - 1)
    print("\nRelative difference between the losses of the two:")
    print(f"{first:.1e} at most in the first {FIRST_STEPS} steps (bound {FIRST_BOUND:.0e}),")
    print(f"{last:.1e} in the mean of the last {LAST_STEPS} steps (bound {LAST_BOUND:.0e}).")
    return first <= FIRST_BOUND and last <= LAST_BOUND


def main() -> int:
    parser = argparse.ArgumentParser(description="Character-level language model with my_ops.")
    parser.add_argument("--steps", type=int, default=1200, help="training steps of each model")
    parser.add_argument("--output", default="demo.png", help="where the plot goes")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    if options.steps < 2:
        parser.error(f"--steps must be at least 2, got {options.steps}")
    if not Path(options.output).absolute().parent.is_dir():
        parser.error(f"--output must lie in a folder that exists, got {options.output}")

    began = time.perf_counter()
    device = torch.device(options.device)
    cpu = f"CPU ({torch.get_num_threads()} thread(s))"
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu
    corpus = "".join(topics.values())
    characters = sorted(set(corpus))
    code = {character: index for index, character in enumerate(characters)}
    text = torch.tensor([code[character] for character in corpus], device=device)
    torch.manual_seed(0)
    model = CharLM(len(characters)).to(device)
    twin = PlainCharLM(len(characters)).to(device)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        theirs.data.copy_(ours.data)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"my_ops {my_ops.__version__}, torch {torch.__version__}, {where}")
    print(f"{len(corpus):,} characters of text, {len(characters)} different", end="; ")
    print(f"{parameters:,} parameters; {BATCH} x {LENGTH} characters a step")

    ours, plain = Trainer(model, options.steps), Trainer(twin, options.steps)
    train(ours, plain, text, options.steps)
    print(f"\n{'':<15}{'first loss':>12}{'last loss':>12}{'tokens/s':>12}")
    for name, trainer in (("my_ops", ours), ("plain PyTorch", plain)):
        losses = f"{trainer.losses[0]:>12.4f}{trainer.last_loss():>12.4f}"
        print(f"{name:<15}{losses}{trainer.tokens_per_second():>12,.0f}")
    ratio = ours.tokens_per_second() / plain.tokens_per_second()
    print(f"my_ops trains at {ratio:.2f}x the speed of plain PyTorch (median over the steps)")
    print(f"\nThe trained model writes:\n{write(model, 'The ', characters, device)}")
    operators_good = compare(device)
    losses_good = losses_agree(ours, plain)
    plot(ours, plain, where, options.output)
    print(f"Plot in {Path(options.output).resolve()}. {time.perf_counter() - began:.0f} s in all.")
    if not operators_good:
        print("FAILED: an operator is off its reference, see ! in the table", file=sys.stderr)
    if not losses_good:
        print("FAILED: the losses of the two models disagree", file=sys.stderr)
    return 0 if operators_good and losses_good else 1


if __name__ == "__main__":
    sys.exit(main())
