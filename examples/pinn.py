"""Solves Burgers' equation with a network (a PINN), in strict float32.

    python examples/pinn.py [--steps N] [--output FILE] [--device cpu|cuda]

``u_t + u u_x = nu u_xx`` for x in [-1, 1] and t in [0, 1]. It starts as ``-sin(pi x)``, which
steepens into a front. The network is trained on the equation alone: autograd takes the derivatives
of its output, by x twice, and the gradient of the loss goes through these. Second derivatives lose
what TF32 rounds away, so such programs keep to strict float32, which is slow on GPUs. One line
gives torch's products to the tensor cores at float32's accuracy: ``with my_ops.fast_fp32()``.

That line is for large products on CUDA. It does nothing on the CPU, and this network, which is
small enough for two cores, gains nothing on a GPU either. ``--width 512 --points 65536`` does;
``python -m my_ops explain gemm 65536 512 512`` says which kernel computes it.

The plot shows the solution beside the exact one, by the Cole-Hopf transformation, and the loss. The
exit status is 1 if the error stays above 0.02 of the solution, in the L2 norm.
"""

from __future__ import annotations

import argparse
import math
import sys
import time

import numpy as np
import plots
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from tqdm import tqdm

import my_ops

VISCOSITY = 0.1 / math.pi
LAYERS, LEARNING_RATE = 3, 1e-2
TIMES = (0.25, 0.5, 1.0)  # where the solution is compared
BOUND = 0.02  # of the error there, as a share of the solution, in the L2 norm


class Solution(nn.Module):
    """Maps (points, 2), x and t, to u. Its form satisfies the initial and boundary conditions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = [part for _ in range(LAYERS - 1) for part in (nn.Linear(width, width), nn.Tanh())]
        self.network = nn.Sequential(nn.Linear(2, width), nn.Tanh(), *inner, nn.Linear(width, 1))

    def forward(self, points: Tensor) -> Tensor:
        x, t = points[:, 0], points[:, 1]
        return -torch.sin(math.pi * x) + t * (1 - x * x) * self.network(points).squeeze(1)


def residual(model: Solution, points: Tensor) -> Tensor:
    """The residual of the equation at each point."""
    points = points.requires_grad_()
    u = model(points)
    (slopes,) = torch.autograd.grad(u.sum(), points, create_graph=True)
    u_x, u_t = slopes.unbind(1)
    (curved,) = torch.autograd.grad(u_x.sum(), points, create_graph=True)
    return u_t + u * u_x - VISCOSITY * curved[:, 0]


def exact(x: np.ndarray, t: float) -> np.ndarray:
    """The Cole-Hopf solution: a mean over Gaussian steps from x, by Gauss-Hermite quadrature."""
    nodes, weights = np.polynomial.hermite.hermgauss(100)
    y = x[:, None] - math.sqrt(4 * VISCOSITY * t) * nodes
    weights = weights * np.exp(-np.cos(math.pi * y) / (2 * math.pi * VISCOSITY))
    return -(weights * np.sin(math.pi * y)).sum(1) / weights.sum(1)


def plot(x: np.ndarray, found: np.ndarray, true: np.ndarray, losses: list[float]) -> Figure:
    title = "Burgers' equation by a network, trained in strict float32"
    figure, (solution, curve) = plots.panels(title, 1.4, 1)
    for t, line, ours, theirs in zip(TIMES, (":", "--", "-"), found, true, strict=True):
        solution.plot(x, theirs, color=plots.FAINT, linewidth=5, alpha=0.5)
        solution.plot(x, ours, line, color=plots.OURS, label=f"t = {t:g}")
    solution.set(title="Solution: the network, on the exact one in grey", xlabel="x", ylabel="u")
    solution.legend(frameon=False, loc="lower left")
    curve.semilogy(plots.means(losses), color=plots.OURS)
    curve.set(title="Loss: mean square of the residual", xlabel="training step, means of 10")
    return figure


def main() -> int:
    parser = argparse.ArgumentParser(description="Burgers' equation by a PINN in strict float32.")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--width", type=int, default=64, help="of the network")
    parser.add_argument("--points", type=int, default=512, help="drawn for each step")
    parser.add_argument("--output", type=plots.image, default="pinn.png")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    torch.manual_seed(0)
    began, device = time.perf_counter(), torch.device(options.device)
    model = Solution(options.width).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, total_steps=options.steps, pct_start=0.1
    )
    corner, extent = torch.tensor([-1.0, 0.0]), torch.tensor([2.0, 1.0])
    losses = []
    with my_ops.fast_fp32():
        for _ in tqdm(range(options.steps), desc="training", unit="step", mininterval=1.0):
            points = (corner + extent * torch.rand(options.points, 2)).to(device)
            loss = residual(model, points).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        print(my_ops.fast_fp32.report())

    x = torch.linspace(-1, 1, 401)
    places = [torch.stack([x, torch.full_like(x, t)], 1) for t in TIMES]
    with torch.no_grad():
        found = np.stack([model(points.to(device)).cpu().numpy() for points in places])
    true = np.stack([exact(x.double().numpy(), t) for t in TIMES])
    error = np.linalg.norm(found - true) / np.linalg.norm(true)
    plots.save(plot(x.numpy(), found, true, losses), options.output)
    print(f"The error is {error:.4f} of the solution. {time.perf_counter() - began:.0f} s in all")
    if not error <= BOUND:
        print(f"FAILED: the error is to be {BOUND} at most", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
