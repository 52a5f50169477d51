"""Trains a recognizer on sequences of different lengths, padded to one batch, with the CTC loss.

    python examples/speech_ctc.py [--steps N] [--output FILE] [--device cpu|cuda]

The speech is synthetic: a sound is a fixed vector, held for a random number of frames, with noise.
A bidirectional LSTM of two layers reads the frames; ``lengths``, a tensor on the device, says where
each utterance ends. Nothing is sorted, packed or copied to the host, and the padding does not
matter: here it is NaN.

The plot shows the loss, the share of wrong sounds in utterances it was not trained on, and what it
recognizes in one of these, frame by frame. The exit status is 1 if that share stays above 0.1.
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

import my_ops

SOUNDS, FEATURES, HIDDEN = 12, 24, 96
BATCH, LONGEST, MOST_FRAMES = 32, 8, 5  # of an utterance in sounds, of a sound in frames
BLANK = 0
BOUND = 0.1  # of the share of sounds that are wrong


class Recognizer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = my_ops.nn.LSTM(FEATURES, HIDDEN, num_layers=2, bidirectional=True)
        self.sounds = my_ops.nn.Linear(2 * HIDDEN, SOUNDS + 1)

    def forward(self, frames: Tensor, lengths: Tensor) -> Tensor:
        """Maps (steps, batch, features) to log-probabilities."""
        output, _ = self.layers(frames, lengths=lengths)
        return F.log_softmax(self.sounds(output), 2)


def utterances(voice: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draws utterances: frames, their number in each, sounds, and theirs."""
    device = voice.device
    count = torch.randint(2, LONGEST + 1, (BATCH,), device=device)
    differences = torch.randint(1, SOUNDS, (BATCH, LONGEST), device=device)
    said = differences.cumsum(1) % SOUNDS + 1  # never the same twice in a row
    held = torch.randint(2, MOST_FRAMES + 1, (BATCH, LONGEST), device=device)
    ends = held.cumsum(1)
    lengths = ends.gather(1, count[:, None] - 1).squeeze(1)
    step = torch.arange(LONGEST * MOST_FRAMES, device=device)
    place = (step[:, None, None] >= ends).sum(2).clamp(max=LONGEST - 1)  # (steps, batch)
    frames = voice[said.gather(1, place.T).T]
    frames = frames + 0.5 * torch.randn_like(frames)
    beyond = step[:, None] >= lengths
    return frames.masked_fill(beyond.unsqueeze(2), float("nan")), lengths, said, count


def distance(a: list[int], b: list[int]) -> int:
    """The Levenshtein distance."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return row[-1]


def heard_in(best: list[int]) -> list[int]:
    """The sounds, from the likeliest symbol of each frame: no blanks, no repetitions."""
    return [x for i, x in enumerate(best) if x != BLANK and (i == 0 or x != best[i - 1])]


@torch.no_grad()
def error_rate(model: Recognizer, voice: Tensor) -> float:
    frames, lengths, said, count = utterances(voice)
    best = model(frames, lengths).argmax(2).T.tolist()
    wrong = 0
    for row, length, truth, n in zip(
        best, lengths.tolist(), said.tolist(), count.tolist(), strict=True
    ):
        wrong += distance(heard_in(row[:length]), truth[:n])
    return wrong / int(count.sum())


@torch.no_grad()
def plot(model: Recognizer, voice: Tensor, losses: list[float], errors: dict[int, float]) -> Figure:
    title = "Utterances of different lengths in one batch: bidirectional LSTM, CTC"
    figure, (curve, heard) = plots.panels(title, 1, 1.4)
    curve.plot(plots.means(losses), color=plots.OURS, label="loss, nats per sound")
    curve.plot(errors.keys(), errors.values(), "o--", color=plots.THEIRS, label="share wrong")
    curve.set(title="Training", xlabel="training step", ylim=(0, None))
    curve.legend(frameon=False)
    frames, lengths, said, count = utterances(voice)
    row = int(lengths.median(0).indices)
    end, truth = int(lengths[row]), said[row, : count[row]].tolist()
    chances = model(frames, lengths)[:, row].exp().T.cpu()
    guess = heard_in(chances[:, :end].argmax(0).tolist())
    heard.imshow(chances[:, :end], aspect="auto", cmap="Reds", origin="lower", vmin=0, vmax=1)
    heard.axvspan(end - 0.5, len(frames) - 0.5, color=plots.FAINT, alpha=0.4, linewidth=0)
    heard.text((end + len(frames)) / 2 - 0.5, SOUNDS / 2, "padding: NaN", ha="center")
    words = [" ".join(map(str, sounds)) for sounds in (truth, guess)]
    heard.set(title=f"Probability of each sound\nSaid {words[0]}; heard {words[1]}", xlabel="frame")
    heard.set(ylabel="sound, 0 for none", yticks=range(SOUNDS + 1), xlim=(-0.5, len(frames) - 0.5))
    heard.grid(False)
    return figure


def main() -> int:
    parser = argparse.ArgumentParser(description="CTC over ragged batches.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--output", type=plots.image, default="speech_ctc.png")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    torch.manual_seed(0)
    began, device = time.perf_counter(), torch.device(options.device)
    voice = torch.randn(SOUNDS + 1, FEATURES, device=device)
    model = Recognizer().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses, errors = [], {}
    for step in range(options.steps):
        frames, lengths, said, count = utterances(voice)
        loss = F.ctc_loss(model(frames, lengths), said, lengths, count, blank=BLANK)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        losses.append(loss.item())
        if step % 20 == 0:
            errors[step] = error_rate(model, voice)
            print(f"step {step:3}: loss {losses[-1]:.3f}, wrong {errors[step]:.2f}")
    wrong = errors[options.steps] = error_rate(model, voice)
    plots.save(plot(model, voice, losses, errors), options.output)
    print(f"{wrong:.3f} of the sounds are wrong. {time.perf_counter() - began:.0f} s in all")
    if not wrong <= BOUND:
        print(f"FAILED: {BOUND} of the sounds may be wrong at most", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
