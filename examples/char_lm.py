"""Trains a character-level language model with my_ops, beside the same model without it.

    python examples/char_lm.py [--steps N] [--output FILE] [--device cpu|cuda]

The text is Python's own language reference, which every Python ships (``pydoc_data.topics``). The
model: embedding, LLTM, a linear layer with sigmoid, round (each character is predicted from 256
bits alone), a linear layer to the logits. torch has no LLTM layer, so without my_ops it is a loop
over the time steps in Python. Both models start from the same parameters and see the same batches.
They take turns step by step, so that anything else on the machine slows both.

LSTM and GRU, which torch has, are timed beside torch.nn's, alone.

It prints both losses, both speeds and their ratio, the times of these layers, a text that the
trained model writes, and the largest difference of every operator from its reference. A plot shows
the losses and the speeds, under the name of the machine. The exit status is 1 if an operator
differs from its reference, the losses of the two models disagree, or the model knows no more than
how often each character occurs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pydoc_data.topics import topics

import plots
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import my_ops

EMBEDDING, HIDDEN, BITS = 64, 128, 256
BATCH, LENGTH = 32, 64
LEARNING_RATE = 4e-3
WARM_UP = 10  # first steps, left out of the timing
LAYER_STEPS, LAYER_TIME = 60, 10  # of a layer alone: at most, and seconds after warming up
TIME_LIMIT = 140  # seconds after which training stops early, on a machine that is slow or busy

# A single bit rounded the other way sends the two runs down different, equally good paths. Their
# first steps agree up to float32's rounding; their ends only as closely as any two good runs.
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
    """The same model without my_ops, with the same parameters in the same order."""

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
    """A model and its optimizer; ``step`` trains on one batch and records the loss and the time."""

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

    def last_steps(self) -> int:
        """How many steps count as the end: at most a quarter, because a run may stop early."""
        return max(1, min(LAST_STEPS, len(self.losses) // 4))

    def last_loss(self) -> float:
        return statistics.fmean(self.losses[-self.last_steps() :])


def train(ours: Trainer, plain: Trainer, text: Tensor, steps: int) -> None:
    """Trains both on the same random windows of the text; they take turns in going first."""
    window = torch.arange(LENGTH + 1, device=text.device)[:, None]
    generator = torch.Generator().manual_seed(0)
    progress = tqdm(range(steps), desc="training both", unit="step", mininterval=1.0)
    for step in progress:
        starts = torch.randint(len(text) - LENGTH, (BATCH,), generator=generator)
        batch = text[window + starts.to(text.device)]
        for trainer in (ours, plain) if step % 2 else (plain, ours):
            trainer.step(batch)
        if step % 20 == 0:
            progress.set_postfix(my_ops=f"{ours.losses[-1]:.3f}", loop=f"{plain.losses[-1]:.3f}")
        if sum(ours.seconds) + sum(plain.seconds) > TIME_LIMIT:
            progress.close()
            print(f"Stopped after {step + 1} of {steps} steps and {TIME_LIMIT} s")
            break


def time_layers(device: torch.device) -> None:
    """Prints the times of layers that torch has too: a forward and a backward pass, by turns."""
    x = torch.randn(LENGTH, BATCH, EMBEDDING, device=device)
    print(
        f"\nForward and backward of one layer, {LENGTH} steps x {BATCH} sequences x {HIDDEN} units:"
    )
    print(f"{'ms':<15}{'my_ops.nn':>12}{'torch.nn':>12}{'ratio':>10}")
    for name in ("LSTM", "GRU"):
        ours, theirs = (
            getattr(module, name)(EMBEDDING, HIDDEN).to(device) for module in (my_ops.nn, nn)
        )
        seconds: dict[nn.Module, list[float]] = {ours: [], theirs: []}
        for step in range(WARM_UP + LAYER_STEPS):
            for layer in (ours, theirs) if step % 2 else (theirs, ours):
                layer.zero_grad()
                start = time.perf_counter()
                layer(x)[0].sum().backward()
                layer.weight_hh_l0.grad[0, 0].item()  # waits for the device
                seconds[layer].append(time.perf_counter() - start)
            if sum(sum(s[WARM_UP:]) for s in seconds.values()) > LAYER_TIME:
                break
        mine, other = (1e3 * statistics.median(s[WARM_UP:]) for s in seconds.values())
        print(f"{name:<15}{mine:>12.2f}{other:>12.2f}{f'{other / mine:.2f}x':>10}")
    if device.type == "cuda" and torch.backends.cudnn.allow_tf32:
        print(
            "torch.nn's are cuDNN's, with TF32, as torch calls it; my_ops.nn's have full float32."
        )


@torch.no_grad()
def write(model: CharLM, prompt: str, characters: Sequence[str], device: torch.device) -> str:
    """Lets the model continue the prompt, a character at a time."""
    generator = torch.Generator().manual_seed(1)
    codes = [characters.index(character) for character in prompt]
    logits, state = model(torch.tensor(codes, device=device)[:, None])
    for _ in range(200):
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

    def weights_and_biases(gates: int) -> list[Tensor]:
        rows = gates * HIDDEN
        return [random(rows, n) / HIDDEN**0.5 for n in (32, HIDDEN)] + [random(rows), random(rows)]

    weights, bias = random(3 * HIDDEN, HIDDEN + 32) / HIDDEN**0.5, random(3 * HIDDEN)
    x, steps = random(BATCH, 32), random(20, BATCH, 32)
    h, cell = random(BATCH, HIDDEN), random(BATCH, HIDDEN)
    return [
        ("add_one", [random(1000)], {}),
        ("custom_add", [random(33, 1, 17), random(65, 17)], {}),
        ("d_sigmoid", [4 * random(1000)], {}),
        ("round_ste", [random(1000)], {}),
        ("fill_index", [], dict(height=48, width=64, dtype=dtype, device=device)),
        ("gemm", [random(96, 128), random(128, 80)], {}),
        ("linear", [random(96, 128), random(80, 128), random(80)], dict(activation="gelu")),
        ("attention", [random(2, 4, n, 32) for n in (48, 64, 64)], {}),
        ("lltm_cell", [x, weights, bias, h, cell], {}),
        ("lltm", [steps, h, cell, weights, bias], {}),
        ("lstm_cell", [x, *weights_and_biases(4), h, cell], {}),
        ("lstm", [steps, h, cell, *weights_and_biases(4)], {}),
        ("gru_cell", [x, *weights_and_biases(3), h], {}),
        ("gru", [steps, h, *weights_and_biases(3)], {}),
    ]


def outputs_and_gradients(op: Callable, inputs: list[Tensor], options: dict) -> list[Tensor]:
    inputs = [x.detach().requires_grad_() for x in inputs]
    result = op(*inputs, **options)
    outputs = [result] if isinstance(result, Tensor) else list(result)
    # The gradients of the outputs: -2 to 2, exact in every dtype.
    slopes = [(torch.arange(y.numel()) % 5 - 2).to(y).reshape(y.shape) for y in outputs]
    return outputs + (list(torch.autograd.grad(outputs, inputs, slopes)) if inputs else [])


def compare(device: torch.device) -> bool:
    """Prints the largest error of every operator; whether all are within their bounds."""
    shares: dict[str, list[float]] = {}
    for dtype, bound in BOUNDS.items():
        for name, inputs, options in calls(dtype, device):
            given = [x.to(device, dtype) for x in inputs]
            got = outputs_and_gradients(getattr(my_ops, name), given, options)
            given = [x.double() for x in given]
            expected = outputs_and_gradients(getattr(my_ops.reference, name), given, options)
            errors = torch.stack(
                [
                    (a - b).abs().max().double() / b.abs().max().clamp(min=1)
                    for a, b in zip(got, expected, strict=True)
                ]
            )
            shares.setdefault(name, []).append(errors.max().item() / bound)  # NaN stays NaN
    print("\nLargest error of outputs and gradients beside the reference in float64, as a share of")
    print("the bound:" + " " * 5 + "".join(f"{f'{d}'[6:]:>10}" for d in BOUNDS))
    for name, row in shares.items():
        fits = "ok" if all(share <= 1 for share in row) else "OFF"
        print(f"{name:<15}" + "".join(f"{share:>10.1%}" for share in row) + f"   {fits}")
    print(f"{'the bound':<15}" + "".join(f"{bound:>10.0e}" for bound in BOUNDS.values()))
    return all(share <= 1 for row in shares.values() for share in row)


# ------------------------------------------------------------------------------------------ report


def plot(ours: Trainer, plain: Trainer, device: torch.device, speeds: bool) -> plots.Figure:
    title = "Character language model with LLTM"
    made_with = f"{plots.machine(device)}; {plots.VERSIONS}" if speeds else plots.VERSIONS
    widths = (2.4, 1) if speeds else (1,)
    figure, (curves, *bars) = plots.panels(title, *widths, made_with=made_with)
    models = (("my_ops", ours, plots.OURS, "-"), ("loop in Python", plain, plots.THEIRS, "--"))
    for name, trainer, color, line in models:
        label = f"{name}: {trainer.last_loss():.3f}, mean of the last {trainer.last_steps()}"
        curves.plot(plots.means(trainer.losses), color=color, linestyle=line, label=label)
        for panel in bars:
            rate = trainer.tokens_per_second() / 1000
            drawn = panel.bar(name, rate, color=color, width=0.6)
            panel.bar_label(drawn, fmt="%.1f", padding=3)
    curves.set(title="Loss: same start, same batches", xlabel="training step")
    curves.set(ylabel="nats per character, mean of 10 steps")
    curves.legend(frameon=False)
    for panel in bars:
        ratio = ours.tokens_per_second() / plain.tokens_per_second()
        panel.set(title=f"Speed: my_ops at {ratio:.2f}x")
        panel.set(ylabel="thousand characters per second")
        panel.margins(y=0.12)
    return figure


def losses_agree(ours: Trainer, plain: Trainer) -> bool:
    """Prints how far the losses of the two are apart; whether that is within the bounds."""
    pairs = zip(ours.losses[:FIRST_STEPS], plain.losses, strict=False)
    first = max(abs(a / b - 1) for a, b in pairs) / FIRST_BOUND
    last = abs(ours.last_loss() / plain.last_loss() - 1) / LAST_BOUND
    agree = first <= 1 and last <= 1
    print(f"Difference of the losses, as a share of its bound: {first:.1%} in the first")
    print(f"{FIRST_STEPS} steps, {last:.1%} in the mean of the last {ours.last_steps()}", end="   ")
    print("ok" if agree else "OFF")
    return agree


def main() -> int:
    parser = argparse.ArgumentParser(description="Character-level language model with my_ops.")
    parser.add_argument("--steps", type=int, default=1200, help="training steps of each model")
    parser.add_argument("--output", type=plots.image, default="demo.png")
    parser.add_argument("--without-speeds", action="store_true", help="of the machine, in the plot")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    if options.steps < 2:
        parser.error(f"--steps must be at least 2, got {options.steps}")

    began = time.perf_counter()
    device = torch.device(options.device)
    corpus = "".join(topics.values())
    characters = sorted(set(corpus))
    code = {character: index for index, character in enumerate(characters)}
    text = torch.tensor([code[character] for character in corpus], device=device)
    torch.manual_seed(0)
    model = CharLM(len(characters)).to(device)
    twin = PlainCharLM(len(characters)).to(device)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        theirs.data.copy_(ours.data)
    print(f"{plots.VERSIONS}; {plots.machine(device)}")

    ours, plain = Trainer(model, options.steps), Trainer(twin, options.steps)
    train(ours, plain, text, options.steps)
    last = f"last {ours.last_steps()}"
    print(f"\n{'mean loss':<15}{'first step':>12}{last:>12}{'characters/s':>15}")
    for name, trainer in (("my_ops", ours), ("loop in Python", plain)):
        losses = f"{trainer.losses[0]:>12.4f}{trainer.last_loss():>12.4f}"
        print(f"{name:<15}{losses}{trainer.tokens_per_second():>15,.0f}")
    ratio = ours.tokens_per_second() / plain.tokens_per_second()
    print(f"my_ops trains {ratio:.2f} times as fast (median over the steps) as the same model in")
    print("plain PyTorch, where LLTM is a loop over the time steps in Python.")
    time_layers(device)
    losses_good = losses_agree(ours, plain)
    print(f"\nThe trained model writes:\n{write(model, 'The ', characters, device)}")
    operators_good = compare(device)
    chances = text.bincount() / len(text)
    guess = -(chances * chances.log()).sum().item()  # the loss of who knows nothing else
    print()
    figure = plot(ours, plain, device, not options.without_speeds)
    plots.save(figure, options.output)
    print(f"{time.perf_counter() - began:.0f} s in all")
    failures = []
    if not operators_good:
        failures.append("an operator is off its reference, see OFF in the table")
    if not losses_good:
        failures.append("the losses of the two models disagree")
    if not ours.last_loss() < guess:
        failures.append(f"the last loss is to be below {guess:.2f}, that of the characters' counts")
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
