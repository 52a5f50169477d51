"""The tables of "Is this for me?", for measured.py: gains over all cases, slow ones counted."""

import statistics
from pathlib import Path
from typing import Any

from tables import figure, loader, table

SLOWER = 0.97  # a lower ratio counts as slower


class Gains:
    """Has one method for each NAME of that page."""

    def __init__(self, folder: Path) -> None:
        load = loader(folder)
        self.gains_h200, self.gains_h100 = load("nvidia-h200"), load("nvidia-h100")
        self.gains_attention = load("attention")["sweep"]
        self.gains_points = load("nvidia-h200-convolutions")["convolutions of single points"]
        windows = load("nvidia-h200-convolution_windows")
        self.gains_windows = [
            *windows["convolutions of windows"],
            *windows["transposed convolutions"],
        ]
        self.gains_depthwise = load("nvidia-h200-depthwise")["depthwise convolutions"]
        self.gains_layers = load("nvidia-h200-recurrent")["sweep"]
        self.gains_cpu = load("cpu-sweep")
        self.gains_steps = load("nvidia-h200-programs")

    def gains(self) -> str:
        def sweep(results: dict[str, Any], dtype: str) -> list[float]:
            return [r["x cuBLAS"] for r in results["sweep"] if r["case"].startswith(dtype)]

        def layers(dtype: str, ratio: str = "x cuDNN") -> list[float]:
            named = [(r["case"].split(), r) for r in self.gains_layers]
            return [r[ratio] for (name, kind, *_), r in named if name != "LLTM" and kind == dtype]

        on_cpu = [
            r["x torch"]
            for section, rows in self.gains_cpu.items()
            if section.startswith("layers")
            for r in rows
            if not r["case"].startswith("LLTM")
        ]
        rows = []
        for what, peer, ratios in (
            ("fp32 products, H200", "cuBLAS, strict", sweep(self.gains_h200, "float32")),
            ("fp32 products, H100", "cuBLAS, strict", sweep(self.gains_h100, "float32")),
            ("bf16 products, H200", "cuBLAS", sweep(self.gains_h200, "bfloat16")),
            ("fp32 attention, H200", "torch", [r["x torch"] for r in self.gains_attention]),
            (
                "its gradients, H200",
                "torch",
                [r["backward, x torch"] for r in self.gains_attention],
            ),
            (
                "fp32 1x1 convolutions with gradients, H200",
                "cuDNN, strict",
                [r["all x strict"] for r in self.gains_points],
            ),
            (
                "the same of windows, transposed ones too",
                "cuDNN, strict",
                [r["all x strict"] for r in self.gains_windows],
            ),
            (
                "gradients of weights of depthwise ones",
                "torch, strict",
                [r["weight x strict"] for r in self.gains_depthwise],
            ),
            ("LSTM, GRU in bf16, H200", "cuDNN", layers("bfloat16")),
            ("LSTM, GRU in fp16, H200", "cuDNN", layers("float16")),
            ("LSTM, GRU in fp32, H200", "cuDNN with TF32", layers("float32")),
            ("the same", "cuDNN, strict", layers("float32", "x cuDNN strict")),
            ("LSTM, GRU on a CPU with AVX-512", "torch", on_cpu),
        ):
            slower = sum(ratio < SLOWER for ratio in ratios)
            spread = min(ratios), statistics.median(ratios), max(ratios)
            cells = [f"{ratio:.2f}" for ratio in spread]
            rows.append([what, peer, str(len(ratios)), str(slower), *cells])
        return table(["what", "beside", "cases", "slower", "lowest", "median", "highest"], rows)

    def gains_programs(self) -> str:
        steps, speeds = self.gains_steps["training step"], self.gains_steps["speeds"]
        ways = "switch", "both", "tf32"
        rows = [
            [
                row["case"].removesuffix(" eager"),
                figure(row["torch ms"]),
                *(f"{row[f'x {way}']:.2f}" for way in ways),
            ]
            for row in steps
        ]
        means = [f"{speeds[way]['geometric mean']:.2f}" for way in ways]
        slowest = [f"{speeds[way]['slowest']:.2f}" for way in ways]
        better = speeds["the better of switch and both"]["geometric mean"]
        head = ["fp32 training step", "torch, ms", "x switch", "x switch and convert", "x TF32"]
        return (
            f"The geometric mean of {len(steps)} is {means[0]} under the switch (slowest "
            f"{slowest[0]}), {means[1]} with `convert` too (slowest {slowest[1]}), {better:.2f} by "
            f"the better of the two, and {means[2]} with TF32 (slowest {slowest[2]}).\n\n"
            f"{table(head, rows)}"
        )

    def programs_headline(self) -> str:
        steps, speeds = self.gains_steps["training step"], self.gains_steps["speeds"]
        switch, both, tf32 = (speeds[way] for way in ("switch", "both", "tf32"))
        return (
            f"**{len(steps)} programs of others train {both['geometric mean']:.2f} times as fast "
            f"in strict fp32** on an NVIDIA H200 with the first two lines, in geometric mean, and "
            f"{tf32['geometric mean']:.2f} with TF32, which rounds; {switch['geometric mean']:.2f} "
            f"with the first alone. The slowest have {both['slowest']:.2f}, {tf32['slowest']:.2f} "
            f"and {switch['slowest']:.2f}."
        )
