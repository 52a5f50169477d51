"""Shared by the plots of these programs: one style, with machine and versions under the title."""

from __future__ import annotations

import argparse
import io
import platform
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

import my_ops

OURS, THEIRS, FAINT = "#d1495b", "#30638e", "#8d99ae"
VERSIONS = f"my_ops {my_ops.__version__}, torch {torch.__version__}"


def machine(device: torch.device) -> str:
    """The name of the GPU or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    described = Path("/proc/cpuinfo").read_text()
    name = re.search(r"^model name\s*: (.*)", described, re.MULTILINE)  # absent on aarch64
    threads = torch.get_num_threads()
    return f"{name[1] if name else platform.machine()}, {threads} thread{'s' * (threads > 1)}"


def image(path: str) -> Path:
    """Parses the argument that says where the figure goes; returns the full path."""
    found = Path(path).resolve()
    if not found.parent.is_dir():
        raise argparse.ArgumentTypeError(f"must lie in a folder that exists, got {path}")
    if found.suffix != ".png":
        raise argparse.ArgumentTypeError(f"must end in .png, got {path}")
    return found


def panels(title: str, *widths: float, made_with: str = VERSIONS) -> tuple[Figure, list[Axes]]:
    """A figure with panels side by side, of these relative widths."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    figure.suptitle(f"{title}\n", fontweight="bold")
    figure.text(0.5, 0.915, made_with, ha="center", va="center", size="small", color="#59636e")
    axes = list(figure.subplots(1, len(widths), width_ratios=widths, squeeze=False)[0])
    for panel in axes:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", alpha=0.25)
        panel.set_axisbelow(True)
        panel.title.set_size("medium")
    return figure, axes


def means(values: Sequence[float], count: int = 10) -> Tensor:
    """Moving averages over ``count`` values, which make a smoother curve."""
    return torch.tensor(values).unfold(0, min(count, len(values)), 1).mean(1)


def save(figure: Figure, path: Path) -> None:
    """Saves with 128 colours, which look the same and take a third of the space."""
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=150)
    Image.open(drawn).convert("RGB").quantize(128).save(path, optimize=True)
    print(f"Plot in {path}")
