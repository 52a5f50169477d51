"""Time of a call on eight numbers, by every way there is; a table in Markdown."""

import statistics
import timeit

import torch
from d_sigmoid import DSigmoid, module

import my_ops

CALLS, ROUNDS = 20_000, 15


@torch.jit.script
def scripted(z: torch.Tensor) -> torch.Tensor:
    return torch.ops.my_ops.d_sigmoid(z)


z = torch.randn(8)
leaf = z.clone().requires_grad_()
op = torch.ops.my_ops.d_sigmoid
ways = {
    "pybind11 `module.forward(z)`": lambda: module.forward(z),
    "`my_ops.d_sigmoid(z)`": lambda: my_ops.d_sigmoid(z),
    "`torch.ops.my_ops.d_sigmoid(z)`": lambda: op(z),
    "TorchScript": lambda: scripted(z),
    "native `torch.sigmoid(z)`": lambda: torch.sigmoid(z),
    "pybind11 in an `autograd.Function`, gradient recorded": lambda: DSigmoid.apply(leaf),
    "`my_ops.d_sigmoid(z)`, gradient recorded": lambda: my_ops.d_sigmoid(leaf),
    "native `torch.sigmoid(z)`, gradient recorded": lambda: torch.sigmoid(leaf),
}
times = {name: [] for name in ways}
for _ in range(ROUNDS):  # alternating, so that a slow moment of the machine hits all of them
    for name, call in ways.items():
        times[name].append(timeit.timeit(call, number=CALLS) / CALLS)
print("| call | us |\n|---|---|")
for name, measured in times.items():
    print(f"| {name} | {statistics.median(measured) * 1e6:.2f} |")
