"""Writes what the C++ program loads: a model of my_ops layers in TorchScript and by AOTInductor,
and an input with Python's result."""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import my_ops


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lltm = my_ops.nn.LLTM(8, 16)
        self.head = my_ops.nn.LinearActivation(16, 4, activation="gelu")

    def forward(self, x: Tensor) -> Tensor:
        output, _ = self.lltm(x)
        return self.head(output)


class Expected(nn.Module):
    """Tensors that torch::jit::load reads."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        super().__init__()
        self.register_buffer("x", x)
        self.register_buffer("y", y)


folder = Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
torch.manual_seed(0)
model = Model().eval()
x = torch.randn(5, 2, 8)
with torch.no_grad():
    torch.jit.script(model).save(str(folder / "model.pt"))
    program = torch.export.export(model, (x,))
    torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "model.pt2"))
    torch.jit.script(Expected(x, model(x))).save(str(folder / "expected.pt"))
