"""Trains an agent with memory by PPO, over rollouts in which episodes end at any step.

    python examples/recurrent_ppo.py [--iterations N] [--output FILE] [--device cpu|cuda]

The task: an episode begins with one of four cues. After a wait of random length the agent is asked
which one it was, and its answer ends the episode. Without memory one answer in four is right. A
rollout has 32 steps of each of 64 environments, wherever their episodes begin and end: ``reset``
tells the layer where a new one begins. All steps of all environments go through the recurrent layer
in one call, forward and backward, and no rollout is cut into episodes.

The plot shows the share of right answers during training, and the episodes of the last rollout. The
exit status is 1 if that share stays below 0.9.
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

CUES, LONGEST_WAIT = 4, 6
ENVIRONMENTS, STEPS, HIDDEN = 64, 32, 64
EPOCHS, CLIP, DISCOUNT, TRACE = 4, 0.2, 0.95, 0.9  # TRACE: lambda of the advantages
BOUND = 0.9  # of the share of right answers


class Recall:
    """A batch of environments. An observation is the one-hot cue, at the first step, and a flag for
    the question."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.cue = torch.zeros(count, dtype=torch.int64, device=device)
        self.left = torch.zeros_like(self.cue)  # steps to the question
        self.first = torch.ones_like(self.cue, dtype=torch.bool)
        self._begin(self.first)

    def _begin(self, which: Tensor) -> None:
        cue = torch.randint_like(self.cue, CUES)
        wait = torch.randint_like(self.cue, 1, LONGEST_WAIT + 1)
        self.cue, self.left = torch.where(which, cue, self.cue), torch.where(which, wait, self.left)
        self.first = which

    def observe(self) -> Tensor:
        cue = F.one_hot(self.cue, CUES) * self.first.unsqueeze(1)
        return torch.cat([cue, (self.left == 0).unsqueeze(1)], 1).float()

    def step(self, action: Tensor) -> tuple[Tensor, Tensor]:
        """Returns whether each answered, which ends its episode, and its reward."""
        asked = self.left == 0
        reward = (asked & (action == self.cue)).float()
        self.left = self.left - 1
        self._begin(asked)
        return asked, reward


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.memory = my_ops.nn.LSTM(CUES + 1, HIDDEN)
        self.policy, self.value = my_ops.nn.Linear(HIDDEN, CUES), my_ops.nn.Linear(HIDDEN, 1)

    def forward(
        self, seen: Tensor, state: tuple[Tensor, Tensor], reset: Tensor
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """Maps (steps, environments, CUES + 1) to logits and values. ``reset``: episodes begin."""
        output, state = self.memory(seen, state, reset=reset)
        return self.policy(output), self.value(output).squeeze(-1), state


def advantages(rewards: Tensor, values: Tensor, ends: Tensor, last: Tensor) -> Tensor:
    """Generalized advantage estimation, within episodes."""
    result, carried = torch.empty_like(rewards), torch.zeros_like(last)
    for t in reversed(range(len(rewards))):
        goes_on = (~ends[t]).float()
        following = last if t + 1 == len(rewards) else values[t + 1]
        error = rewards[t] + DISCOUNT * following * goes_on - values[t]
        carried = result[t] = error + DISCOUNT * TRACE * goes_on * carried
    return result


def plot(shares: list[float], reset: Tensor, ends: Tensor, rewards: Tensor) -> Figure:
    """The tensors are those of a rollout: (steps, environments)."""
    title = "Recall of a cue: recurrent PPO, with resets inside the rollouts"
    figure, (curve, rollout) = plots.panels(title, 1, 1.4)
    curve.plot(shares, color=plots.OURS, label="right answers")
    curve.axhline(1 / CUES, color=plots.FAINT, linestyle="--", label="without memory")
    curve.set(title="Training", xlabel="iteration", ylabel="share of the answers", ylim=(0, 1.02))
    curve.legend(frameon=False, loc="lower right")
    few = 12
    for row, begins in enumerate(reset.T[:few].tolist()):
        rollout.hlines(row, -0.5, STEPS - 0.5, color=plots.FAINT, alpha=0.4)
        first = [step for step, begin in enumerate(begins) if begin]
        rollout.vlines([step - 0.5 for step in first], row - 0.35, row + 0.35, color=plots.THEIRS)
    for name, which, mark, color in (
        ("right", rewards > 0, "o", plots.THEIRS),
        ("wrong", ends & (rewards == 0), "X", plots.OURS),
    ):
        rows, steps = which.T[:few].nonzero().T.tolist()
        rollout.plot(steps, rows, mark, color=color, label=f"answer, {name}", linestyle="none")
    rollout.set(title=f"Last rollout, {few} of {ENVIRONMENTS} environments; |: reset")
    rollout.set(xlabel="step", ylabel="environment", yticks=[])
    rollout.legend(frameon=False, loc="upper left", bbox_to_anchor=(0, -0.12), ncols=2)
    rollout.grid(False)
    return figure


def main() -> int:
    parser = argparse.ArgumentParser(description="Recurrent PPO with resets inside the rollouts.")
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--output", type=plots.image, default="recurrent_ppo.png")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    torch.manual_seed(0)
    began, device = time.perf_counter(), torch.device(options.device)
    world, agent = Recall(ENVIRONMENTS, device), Agent().to(device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=5e-3)
    zeros = torch.zeros(1, ENVIRONMENTS, HIDDEN, device=device)
    state, shares = (zeros, zeros), []

    for iteration in range(options.iterations):
        start, rows = state, []
        with torch.no_grad():
            for _ in range(STEPS):
                seen, reset = world.observe(), world.first
                logits, value, state = agent(seen[None], state, reset[None])
                action = torch.distributions.Categorical(logits=logits[0]).sample()
                chance = F.log_softmax(logits[0], 1).gather(1, action[:, None]).squeeze(1)
                ended, reward = world.step(action)
                rows.append((seen, reset, action, chance, value[0], ended, reward))
            seen, reset, actions, chances, values, ends, rewards = map(
                torch.stack, zip(*rows, strict=True)
            )
            _, last, _ = agent(world.observe()[None], state, world.first[None])
        gains = advantages(rewards, values, ends, last[0])
        returns = gains + values
        gains = (gains - gains.mean()) / (gains.std() + 1e-6)
        for _ in range(EPOCHS):
            logits, values, _ = agent(seen, start, reset)
            log_chances = F.log_softmax(logits, 2)
            ratio = (log_chances.gather(2, actions.unsqueeze(2)).squeeze(2) - chances).exp()
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            entropy = -(log_chances.exp() * log_chances).sum(2).mean()
            loss = -torch.minimum(ratio * gains, clipped * gains).mean() - 0.01 * entropy
            loss = loss + 0.5 * F.mse_loss(values, returns)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
        shares.append((rewards.sum() / ends.sum()).item())
        if iteration % 10 == 0 or iteration + 1 == options.iterations:
            print(f"iteration {iteration:3}: {shares[-1]:.2f} of the answers are right")
    plots.save(plot(shares, reset, ends, rewards), options.output)
    print(f"{time.perf_counter() - began:.0f} s in all")
    if not shares[-1] >= BOUND:
        print(f"FAILED: {BOUND} of the answers are to be right at least", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
