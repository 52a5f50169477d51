"""Draws benchmarks/results for README.md and the guide, light and dark.

python tools/docs/plot_results.py       into docs/images
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results"
IMAGES = ROOT / "docs/images"
THEMES = {
    "light": {"text": "#1f2328", "grid": "#d1d9e0", "bars": ["#0969da", "#9aa4af", "#d1d9e0"]},
    "dark": {"text": "#e6edf3", "grid": "#3d444d", "bars": ["#4493f8", "#848d97", "#3d444d"]},
}
NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}

Row = dict[str, Any]


class Chart(NamedTuple):
    title: str
    labels: list[str]
    series: dict[str, list[float]]
    unit: str
    values: str = "{:.3g}"  # written beside a bar


def load(name: str) -> Row:
    return json.loads((RESULTS / f"{name}.json").read_text())


def elementwise(results: Row) -> Chart:
    """The bytes that the op must move divided by each time, as a share of copy_'s rate."""
    names = ["add_one", "custom_add", "d_sigmoid", "round_ste"]
    rows = {r["case"]: r for r in results["elementwise"]}
    picked = [rows[f"{name} float32 1 GiB"] for name in names]
    ours = [r["share of ceiling"] for r in picked]
    eager = [
        r["share of ceiling"] * r["my_ops us"] / (r.get("eager us") or r["torch.round us"])
        for r in picked
    ]
    title = "Elementwise ops, fp32, 1 GiB (higher is better)"
    unit = "share of copy_'s bandwidth"
    return Chart(title, names, {"my_ops": ours, "eager torch": eager}, unit, "{:.2f}")


def products(results: Row) -> Chart:
    rows = {r["case"]: r for r in results["gemm"]}
    sizes = (1024, 2048, 4096, 8192)
    ours = [rows[f"gemm float32 {n}x{n}x{n}"]["x cuBLAS"] for n in sizes]
    title = "fp32 matrix products (higher is better)"
    series = {"my_ops": ours, "cuBLAS": [1.0] * len(ours)}
    return Chart(title, [f"{n}³" for n in sizes], series, "speed, cuBLAS = 1", "{:.2f}")


def lstm(results: Row) -> Chart:
    rows = {r["case"]: r for r in results["table"]}
    labels, ours = [], []
    for steps, batch, hidden in ((512, 16, 512), (512, 64, 1024), (512, 256, 1024)):
        for dtype in ("float16", "float32"):
            row = rows[f"LSTM {dtype} T{steps} B{batch} H{hidden} forward + backward"]
            labels.append(f"{steps} x {batch} x {hidden}, {NAMES[dtype]}")
            ours.append(row["x cuDNN"])
    title = "LSTM layers, forward + backward (higher is better)"
    series = {"my_ops": ours, "cuDNN (fp32: with TF32, as torch calls it)": [1.0] * len(ours)}
    return Chart(title, labels, series, "speed, cuDNN = 1; steps x batch x units", "{:.2f}")


def lltm(results: Row) -> Chart:
    peer = "cuDNN LSTM (4 gates, TF32) us"
    labels, ours, theirs = [], [], []
    for row in results["lltm"]:
        if not row["case"].endswith(" forward") or peer not in row or " float16" in row["case"]:
            continue
        dtype, steps, batch, hidden = (part.lstrip("TBH") for part in row["case"].split()[1:5])
        labels.append(f"{steps} x {batch} x {hidden}, {NAMES[dtype]}")
        ours.append(row["my_ops us"] / int(steps))
        theirs.append(row[peer] / int(steps))
    title = "LLTM layers beside an LSTM, forward (lower is better)"
    series = {"my_ops LLTM (3 gates)": ours, "cuDNN LSTM (4 gates; fp32: TF32)": theirs}
    return Chart(title, labels, series, "us a step; steps x batch x units")


def programs(results: Row) -> Chart:
    rows = sorted(results["training step"], key=lambda r: -r["x both"])
    labels = [r["case"].removesuffix(" eager") for r in rows]
    ways = {"my_ops: the switch and convert": "both", "TF32 everywhere": "tf32"}
    series = {name: [r[f"x {way}"] for r in rows] for name, way in ways.items()}
    title = f"Training steps of {len(rows)} programs, fp32 (higher is better)"
    return Chart(title, labels, series, "speed, strict float32 = 1", "{:.2f}")


def draw(chart: Chart, gpu: str, theme: Row, path: Path) -> None:
    _, labels, series, unit, shown = chart
    # As narrow as labels allow, so that the text is readable on a telephone.
    figure, axes = plt.subplots(figsize=(4.8, 1.5 + 0.36 * len(labels)), layout="constrained")
    figure.suptitle(f"{chart.title}\n{gpu}", color=theme["text"], fontsize=10)
    height = 0.8 / len(series)
    for number, ((name, values), color) in enumerate(
        zip(series.items(), theme["bars"], strict=False)
    ):
        places = [i + (number - (len(series) - 1) / 2) * height for i in range(len(labels))]
        drawn = axes.barh(places, values, height * 0.92, label=name, color=color)
        axes.bar_label(drawn, fmt=shown, padding=3, color=theme["text"])
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlabel(unit, color=theme["text"])
    axes.tick_params(colors=theme["text"], length=0)
    axes.grid(axis="x", color=theme["grid"], linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    axes.margins(x=0.14, y=0.02)
    figure.legend(frameon=False, labelcolor=theme["text"], loc="outside lower center")
    figure.savefig(path, transparent=True, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    # The file's bytes depend only on the numbers: no date, no random identifiers, text as text.
    plt.rcParams.update({"svg.hashsalt": "my_ops", "svg.fonttype": "none", "font.size": 9})
    IMAGES.mkdir(exist_ok=True)
    for chart, file in (
        (elementwise, "nvidia-h200"),
        (products, "nvidia-h200"),
        (lstm, "nvidia-h200-recurrent"),
        (lltm, "nvidia-h200"),
        (programs, "nvidia-h200-programs"),
    ):
        results = load(file)
        for theme, colors in THEMES.items():
            path = IMAGES / f"{chart.__name__}-{theme}.svg"
            draw(chart(results), results["environment"]["gpu"], colors, path)


if __name__ == "__main__":
    main()
