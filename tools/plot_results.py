"""Draws benchmarks/results/nvidia-h200.json for README.md and the guide, light and dark.

python tools/plot_results.py       into docs/images
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results/nvidia-h200.json"
IMAGES = ROOT / "docs/images"
THEMES = {
    "light": {"text": "#1f2328", "grid": "#d1d9e0", "bars": ["#0969da", "#9aa4af", "#d1d9e0"]},
    "dark": {"text": "#e6edf3", "grid": "#3d444d", "bars": ["#4493f8", "#848d97", "#3d444d"]},
}
NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}

Row = dict[str, Any]
Bars = tuple[list[str], dict[str, list[float]], str]  # labels, series, unit


def short(label: str) -> str:
    for long, brief in NAMES.items():
        label = label.replace(long, brief)
    return label


def elementwise(rows: list[Row], ceilings: Row) -> Bars:
    """Bytes that the op must move, over the time of each way, as a share of copy_'s rate."""
    names = ["add_one", "custom_add", "d_sigmoid", "round_ste"]
    picked = [r for n in names for r in rows if r["case"] == f"{n} float32 1 GiB"]
    moved = {r["case"]: r["my_ops us"] * r["share of ceiling"] for r in picked}
    series = {
        "my_ops": [r["share of ceiling"] for r in picked],
        "eager torch": [
            moved[r["case"]] / (r.get("eager us") or r["torch.round us"]) for r in picked
        ],
    }
    return [r["case"].split()[0] for r in picked], series, "share of copy bandwidth, fp32, 1 GiB"


def products(rows: list[Row], ceilings: Row) -> Bars:
    sizes = [2048, 4096, 8192]
    labels, ours, theirs = [], [], []
    for prefix, peer in (("gemm float32", "cuBLAS"), ("gemm float32 high", "cuBLAS TF32")):
        for n in sizes:
            row = next((r for r in rows if r["case"] == f"{prefix} {n}x{n}x{n}"), None)
            if row is None or f"{peer} us" not in row:
                continue
            labels.append(f"{'high, ' if 'high' in prefix else ''}{n}³")
            ours.append(row["TFLOP/s"])
            theirs.append(row["TFLOP/s"] * row["my_ops us"] / row[f"{peer} us"])
    return labels, {"my_ops": ours, "cuBLAS (TF32 for high)": theirs}, "TFLOP/s, fp32"


def lltm(rows: list[Row], ceilings: Row) -> Bars:
    peer = "cuDNN LSTM (4 gates, TF32) us"
    picked = [
        r
        for r in rows
        if r["case"].startswith("lltm ") and r["case"].endswith(" forward") and peer in r
    ]
    labels, ours, theirs = [], [], []
    for row in picked:
        dtype, steps, batch, hidden = row["case"].split()[1:5]
        if dtype == "float16":
            continue
        labels.append(f"{short(dtype)}, {batch} {hidden}")
        ours.append(row["my_ops us"] / int(steps[1:]))
        theirs.append(row[peer] / int(steps[1:]))
    return labels, {"my_ops LLTM": ours, "cuDNN LSTM (4 gates)": theirs}, "us a step, forward"


def draw(bars: Bars, theme: Row, path: Path) -> None:
    labels, series, unit = bars
    figure, axes = plt.subplots(figsize=(7.5, 0.55 + 0.42 * len(labels)))
    height = 0.8 / len(series)
    for number, ((name, values), color) in enumerate(
        zip(series.items(), theme["bars"], strict=False)
    ):
        places = [i + (number - (len(series) - 1) / 2) * height for i in range(len(labels))]
        drawn = axes.barh(places, values, height * 0.92, label=name, color=color)
        axes.bar_label(drawn, fmt="%.3g", padding=3, color=theme["text"], fontsize=8)
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlabel(unit, color=theme["text"])
    axes.tick_params(colors=theme["text"], length=0)
    axes.grid(axis="x", color=theme["grid"], linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    axes.margins(x=0.12)
    axes.legend(
        frameon=False,
        labelcolor=theme["text"],
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=len(series),
        fontsize=8,
    )
    figure.tight_layout()
    figure.savefig(path, transparent=True, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    results = json.loads(RESULTS.read_text())
    # Bytes that depend on the numbers only: no date, no random identifiers, text as text.
    plt.rcParams.update({"svg.hashsalt": "my_ops", "svg.fonttype": "none", "font.size": 9})
    IMAGES.mkdir(exist_ok=True)
    for name, section, chart in (
        ("elementwise", "elementwise", elementwise),
        ("products", "gemm", products),
        ("lltm", "lltm", lltm),
    ):
        bars = chart(results[section], results["ceilings"])
        for theme, colors in THEMES.items():
            draw(bars, colors, IMAGES / f"{name}-{theme}.svg")


if __name__ == "__main__":
    main()
