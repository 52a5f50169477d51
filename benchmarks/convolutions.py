"""Convolutions in float32: cuDNN, strict and with TF32, and under the switch.

    python benchmarks/convolutions.py [CASE ...] [--budget SECONDS] [--output results.json]

A case's name has the images, channels, outputs, points and, if they are not 1, the kernel and the
stride; then the order of the channels in memory. Depthwise ones have a group for each channel, and
no outputs in the name. Padding is half the kernel, without a stride as long as that; of transposed
ones half of what the kernel is longer than the stride; of depthwise ones with an even kernel what
makes them causal. Times are median GPU microseconds of forward, and of all passes with the
gradients of input and weight, with cuDNN's fastest algorithms (``benchmark=True``); of depthwise
ones also of each gradient alone, and beside them the floor of forward: its bytes at 4.8 TB/s, or
its FMAs at 33 a picosecond. Errors are the largest of forward and of the gradients, relative to the
largest exact value. Needs an NVIDIA GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import Run, gpu_times, save, show
from torch import Tensor

import my_ops

# Images, channels, outputs (0: depthwise), space, kernel along each dimension, stride.
Case = tuple[int, int, int, tuple[int, ...], int, int]
POINTS: list[tuple[int, int, int, tuple[int, ...], int]] = [
    (64, 64, 64, (56, 56), 1),  # ResNet-50's
    (64, 64, 256, (56, 56), 1),
    (64, 256, 64, (56, 56), 1),
    (64, 256, 128, (56, 56), 1),
    (64, 256, 512, (56, 56), 2),
    (64, 128, 512, (28, 28), 1),
    (64, 512, 128, (28, 28), 1),
    (64, 512, 1024, (28, 28), 2),
    (64, 256, 1024, (14, 14), 1),
    (64, 1024, 256, (14, 14), 1),
    (64, 512, 2048, (7, 7), 1),
    (64, 2048, 512, (7, 7), 1),
    (16, 512, 1024, (600,), 1),  # Conformer's
    (16, 512, 512, (600,), 1),
    (2, 384, 768, (1500,), 1),  # HDemucs's
    (16, 128, 128, (128, 128), 1),  # a Fourier neural operator's
    (4, 64, 64, (64, 64, 64), 1),
]
WINDOWS: list[Case] = [
    (64, 64, 64, (56, 56), 3, 1),  # ResNet-50's
    (64, 128, 128, (56, 56), 3, 2),
    (64, 128, 128, (28, 28), 3, 1),
    (64, 256, 256, (28, 28), 3, 2),
    (64, 256, 256, (14, 14), 3, 1),
    (64, 512, 512, (14, 14), 3, 2),
    (64, 512, 512, (7, 7), 3, 1),
    (32, 128, 128, (128, 128), 3, 1),
    (8, 512, 512, (64, 64), 3, 1),
    (8, 64, 64, (256, 256), 3, 1),  # a U-Net's
    (8, 256, 128, (128, 128), 3, 1),
    (16, 32, 32, (128, 128), 3, 1),
    (16, 512, 512, (4096,), 7, 1),
    (8, 256, 512, (3000,), 3, 1),
    (64, 96, 192, (56, 56), 2, 2),  # ConvNeXt's
    (64, 384, 768, (14, 14), 2, 2),
    (16, 256, 512, (56, 56), 4, 4),  # patches
    (8, 512, 512, (3199,), 10, 5),  # wav2vec 2.0's
    (8, 512, 512, (1599,), 3, 2),
    (8, 512, 512, (799,), 2, 2),
]
TRANSPOSED: list[Case] = [
    (16, 256, 128, (64, 64), 4, 2),  # a decoder's
    (16, 512, 256, (32, 32), 2, 2),  # a U-Net's
    (16, 512, 256, (500,), 16, 8),  # a vocoder's
]
DEPTHWISE: list[Case] = [
    (64, 96, 0, (56, 56), 7, 1),  # ConvNeXt's
    (64, 192, 0, (28, 28), 7, 1),
    (64, 384, 0, (14, 14), 7, 1),
    (64, 768, 0, (7, 7), 7, 1),
    (64, 144, 0, (56, 56), 3, 1),  # MobileNet's
    (64, 384, 0, (14, 14), 3, 1),
    (64, 96, 0, (112, 112), 3, 2),
    (64, 240, 0, (28, 28), 5, 1),  # EfficientNet's
    (64, 144, 0, (56, 56), 5, 2),
    (32, 144, 0, (800,), 31, 1),  # Conformer's
    (8, 1536, 0, (2048,), 4, 1),  # Mamba's
]
CASES: dict[str, list[Case]] = {
    "convolutions of single points": [(*case[:4], 1, case[4]) for case in POINTS],
    "convolutions of windows": WINDOWS,
    "transposed convolutions": TRANSPOSED,
    "depthwise convolutions": DEPTHWISE,
}
LAST = {2: torch.channels_last, 3: torch.channels_last_3d}
Layer = Callable[[Tensor, Tensor], Tensor]


def named(case: Case, last: bool) -> str:
    batch, channels, outputs, space, kernel, stride = case
    to = f" to {outputs}" if outputs else ""
    text = f"{batch}, {channels}{to}, {'x'.join(map(str, space))}"
    text += f", {'x'.join([str(kernel)] * len(space))}" if kernel > 1 else ""
    return f"{text}{f', stride {stride}' if stride > 1 else ''}{', channels last' if last else ''}"


def layer_of(case: Case, transposed: bool) -> Layer:
    (_, channels, outputs, space, kernel, stride), functional = case, torch.nn.functional
    name = f"conv{'_transpose' if transposed else ''}{len(space)}d"
    padding = (kernel - stride if transposed else kernel if kernel != stride else 0) // 2
    if not outputs and kernel % 2 == 0:
        padding = kernel - 1
    groups = 1 if outputs else channels
    return partial(getattr(functional, name), stride=stride, padding=padding, groups=groups)


def operands(case: Case, transposed: bool, last: bool) -> list[Tensor]:
    """The input and the weight."""
    batch, channels, outputs, space, kernel, _ = case
    both = (channels, outputs) if transposed else (outputs, channels)
    both = both if outputs else (channels, 1)
    shapes = [(batch, channels, *space), (*both, *[kernel] * len(space))]
    tensors = [torch.randn(shape, device="cuda") for shape in shapes]
    if last:
        tensors = [t.contiguous(memory_format=LAST[len(space)]) for t in tensors]
    return [t.requires_grad_() for t in tensors]


def results(layer: Layer, inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    y = layer(*inputs)
    return [y, *torch.autograd.grad(y, inputs, grad)]


def ways(run: Run) -> dict[str, Run]:
    def allowing(tf32: bool, on: bool) -> Run:
        def run_so() -> Any:
            flags = torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=tf32)
            with flags, my_ops.fast_fp32(on):
                return run()

        return run_so

    return {
        "strict": allowing(False, False),
        "tf32": allowing(True, False),
        "switch": allowing(False, True),
    }


def errors(layer: Layer, inputs: list[Tensor], grad: Tensor) -> dict[str, float]:
    exact = results(layer, [t.detach().double().requires_grad_() for t in inputs], grad.double())
    worst: dict[str, float] = {}
    for way, run in ways(lambda: results(layer, inputs, grad)).items():
        pairs = zip(run(), exact, strict=True)
        each = [float((ours - value).abs().max() / value.abs().max()) for ours, value in pairs]
        worst[f"{way} error"] = float(f"{max(each):.1e}")
    return worst


def passes_of(case: Case, layer: Layer, inputs: list[Tensor], grad: Tensor) -> dict[str, Run]:
    passes: dict[str, Run] = {
        "forward": torch.no_grad()(lambda: layer(*inputs)),
        "all": lambda: results(layer, inputs, grad),
    }
    if not case[2]:
        gradient = partial(torch.autograd.grad, layer(*inputs), retain_graph=True)
        passes |= {
            name: partial(gradient, [tensor], grad_outputs=grad)
            for name, tensor in zip(("input", "weight"), inputs, strict=True)
        }
    return passes


def floor(inputs: list[Tensor], grad: Tensor) -> float:
    """Microseconds that an H200 needs for forward or the gradient of the input, if depthwise."""
    x, weight = inputs
    taps = weight.numel() / weight.size(0)
    return max(4 * (x.numel() + grad.numel()) / 4.8e6, taps * grad.numel() / 33e6)


def row(case: Case, transposed: bool, last: bool, budget: float) -> dict[str, Any]:
    layer, inputs = layer_of(case, transposed), operands(case, transposed, last)
    with torch.no_grad():
        grad = torch.randn_like(layer(*inputs))
    result: dict[str, Any] = {"case": named(case, last)}
    for passes, run in passes_of(case, layer, inputs, grad).items():
        times = gpu_times(ways(run), budget=budget)
        result |= {f"{passes} {way} us": round(time, 1) for way, time in times.items()}
        result[f"{passes} x strict"] = round(times["strict"] / times["switch"], 3)
    if not case[2]:
        result["floor us"] = round(floor(inputs, grad), 1)
    return result | errors(layer, inputs, grad)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("case", nargs="*", default=[""], help="part of 'section: case'")
    parser.add_argument("--budget", type=float, default=0.5, help="seconds of timing a measurement")
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    arguments = parser.parse_args()
    sections: dict[str, list[dict[str, Any]]] = {}
    for section, cases in CASES.items():
        for case in cases:
            for last in (False, True) if len(case[3]) > 1 else (False,):
                if any(part in f"{section}: {named(case, last)}" for part in arguments.case):
                    rows = sections.setdefault(section, [])
                    rows.append(row(case, cases is TRANSPOSED, last, arguments.budget))
                    show(rows[-1])
                    if arguments.output:
                        save(arguments.output, sections)


if __name__ == "__main__":
    main()
