"""The tables of recurrent layers, for measured.py."""

import itertools
import json
import statistics
from pathlib import Path
from typing import Any

from tables import environment, figure, table

SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
WAYS = ("forward", "forward + backward")
LAYER_TARGETS = (  # ms of LSTM, GRU and LLTM
    ("T512 B16 H512", "bfloat16 float16", ("0.65 / 1.9", "0.60 / 1.8", "0.50 / 1.4")),
    ("T512 B16 H512", "float32", ("1.35 / 4.4", "1.25 / 4.0", "1.1 / 3.6")),
    ("T1024 B16 H768", "bfloat16 float16", ("1.7 / 5.0", "1.5 / 4.6", "1.3 / 3.8")),
    ("T512 B64 H1024", "bfloat16 float16", ("2.0 / 5.6", "1.6 / 4.8", "1.3 / 4.2")),
    ("T512 B64 H1024", "float32", ("6.5 / 22", "5.5 / 18", "5.0 / 16")),
    ("T512 B256 H1024", "bfloat16", ("5.0 / 13", "4.5 / 12", "4.5 / 12")),
    ("T512 B256 H1024", "float32", ("16 / 42", "13 / 36", "12 / 34")),
    ("T128 B8000 H256", "float32", ("12 / 36", "10 / 32", "9 / 28")),
    ("T1024 B1 H256", "bfloat16 float16 float32", ("0.75 / 1.8", "0.75 / 1.8", "0.60 / 1.6")),
    ("T128 B32 H128", "bfloat16 float16 float32", ("0.12 / 0.6", "0.12 / 0.6", "0.10 / 0.5")),
    ("T16 B128 H512", "bfloat16 float16 float32", ("0.10 / 0.6", "0.10 / 0.6", "0.10 / 0.5")),
)


def parts(row: dict[str, Any]) -> tuple[str, str, tuple[int, ...], str]:
    """Layer, type, (steps, batch, hidden) and way of a case."""
    name, dtype, *size, way = f"{row['case']} ".split(" ", 5)
    return name, SHORT[dtype], tuple(int(part[1:]) for part in size), way.strip()


def joined(size: tuple[int, ...]) -> str:
    return ", ".join(map(str, size))


class Layers:
    """Has one method for each NAME of the layers, all from one file of results."""

    def __init__(self, folder: Path) -> None:
        text = (folder / "nvidia-h200-recurrent.json").read_text()
        self.layers: dict[str, Any] = json.loads(text)

    def recurrent(self) -> str:
        cases = {row["case"]: row for row in self.layers["table"]}
        rows = []
        for steps, batch, hidden in (
            (512, 16, 512),
            (1024, 16, 768),
            (512, 64, 1024),
            (512, 256, 1024),
            (128, 8000, 256),
            (1024, 1, 256),
        ):
            for dtype in ("bfloat16", "float32"):
                cells = [f"{steps}, {batch}, {hidden}", SHORT[dtype]]
                for name in ("LSTM", "GRU"):
                    size = f"{name} {dtype} T{steps} B{batch} H{hidden}"
                    pair = [cases[f"{size} {way}"] for way in WAYS]
                    kinds = ["my_ops", "cuDNN"]
                    kinds += ["cuDNN strict"] if dtype == "float32" else []
                    times = [" / ".join(figure(r[f"{k} us"] / 1e3) for r in pair) for k in kinds]
                    cells += [times[0], ", strict ".join(times[1:])]
                rows.append(cells)
        head = ["steps, batch, H", "type", "LSTM, ms", "cuDNN's", "GRU, ms", "cuDNN's"]
        return table(head, rows)

    def layer_targets(self) -> str:
        """Times and targets of the three layers in ms, forward / forward + backward."""
        cases = {row["case"]: row["my_ops us"] / 1e3 for row in self.layers["table"]}
        rows = []
        for size, dtypes, targets in LAYER_TARGETS:
            label = ", ".join(part[1:] for part in size.split())
            for dtype in dtypes.split():
                cells = [label, SHORT[dtype]]
                for name, target in zip(("LSTM", "GRU", "LLTM"), targets, strict=True):
                    ways = [cases[f"{name} {dtype} {size} {way}"] for way in WAYS]
                    shown = " / ".join(
                        f"**{figure(time)}**" if time > float(limit) else figure(time)
                        for time, limit in zip(ways, target.split(" / "), strict=True)
                    )
                    cells += [shown, target]
                rows.append(cells)
        head = ["steps, batch, H", "type"]
        for name in ("LSTM", "GRU", "LLTM"):
            head += [name, "target"]
        return table(head, rows)

    def slower_layers(self) -> str:
        """How many cases have less than 0.97 of cuDNN's speed, and the lowest, by the units and
        rows of a layer."""
        kinds = ("bf16", "fp16", "fp32", "fp32, TF32")
        ratios: dict[tuple[int, ...], dict[tuple[str, str], list[float]]] = {}
        for row in [*self.layers["table"], *self.layers["sweep"]]:
            _, dtype, (_, batch, hidden), way = parts(row)
            found = ratios.setdefault((hidden, batch), {(k, w): [] for k in kinds for w in WAYS})
            found[dtype, way].append(row.get("x cuDNN strict", row["x cuDNN"]))
            if dtype == "fp32":
                found["fp32, TF32", way].append(row["x cuDNN"])
        rows = []
        below, cases = dict.fromkeys(kinds, 0), dict.fromkeys(kinds, 0)
        for size, found in sorted(ratios.items()):
            cells = []
            for kind in kinds:
                ways = [found[kind, way] for way in WAYS]
                slower = [sum(ratio < 0.97 for ratio in way) for way in ways]
                below[kind] += sum(slower)
                cases[kind] += sum(map(len, ways))
                counts = f"{slower[0]} / {slower[1]} of {len(ways[0])}"
                cells.append(f"{counts}: {min(itertools.chain(*ways)):.2f}" if any(slower) else "")
            if any(cells):
                rows.append([*map(str, size), *cells])
        counted = [f"{below[kind]} of {cases[kind]} in {kind}" for kind in kinds[:3]]
        head = ["H", "batch", *kinds[:3], "fp32, cuDNN with TF32"]
        return (
            f"Below 0.97 are {', '.join(counted)}. Compared with cuDNN's TF32, "
            f"{below['fp32, TF32']} fp32 cases are:\n\n{table(head, rows)}"
        )

    def layer_memory(self) -> str:
        """MiB held between forward and backward, ours / cuDNN's."""
        shares: dict[str, list[float]] = {}
        rows: dict[tuple[int, ...], list[str]] = {}
        for row in self.layers["memory"]:
            name, dtype, size, _ = parts(row)
            both = row["my_ops MiB"], row["cuDNN MiB"]
            shares.setdefault(name, []).append(both[0] / both[1])
            if name != "LLTM" and dtype != "fp16":
                cell = f"{' / '.join(map(figure, both))} ({both[0] / both[1]:.2f})"
                rows.setdefault(size, [joined(size)]).append(cell)
        held = [f"{name} {min(of):.2f} to {max(of):.2f}" for name, of in shares.items()]
        head = ["steps, batch, H", "LSTM, bf16", "GRU, bf16", "LSTM, fp32", "GRU, fp32"]
        told = f"Ours divided by cuDNN's, fp16 included: {', '.join(held)}."
        return f"{told}\n\n{table(head, list(rows.values()))}"

    def layer_resets(self) -> str:
        """What resets add to the time in percent, forward / forward + backward."""
        costs: dict[str, list[float]] = {way: [] for way in WAYS}
        sizes: dict[tuple[str, ...], list[float]] = {}
        for row in self.layers["reset"]:
            _, dtype, size, way = parts(row)
            cost = 100 * (row["my_ops us"] / row["no reset us"] - 1)
            costs[way].append(cost)
            sizes.setdefault((joined(size), dtype), []).append(cost)
        rows = []
        for key, found in sizes.items():
            if max(found) > 5:
                pairs = zip(found[::2], found[1::2], strict=True)
                rows.append([*key, *(f"{one:.1f} / {both:.1f}" for one, both in pairs)])
        every = list(itertools.chain(*costs.values()))
        above = sum(cost > 5 for cost in every)
        forward, both = (statistics.median(costs[way]) for way in WAYS)
        head = ["steps, batch, H", "type", "LSTM, %", "GRU, %", "LLTM, %"]
        return (
            f"The median is {forward:.1f} % forward and {both:.1f} % forward + backward. "
            f"{above} of {len(every)} cases {'is' if above == 1 else 'are'} above 5 %:\n\n"
            + table(head, rows)
        )

    def layer_host(self) -> str:
        """Training steps on the host's clock in ms, ours / cuDNN's."""
        shares = []
        rows: dict[tuple[str, ...], list[str]] = {}
        for row in self.layers["host"]:
            _, dtype, size, _ = parts(row)
            both = row["my_ops us"], row["cuDNN us"]
            shares.append(both[0] / both[1])
            cell = f"{' / '.join(figure(time / 1e3) for time in both)} ({shares[-1]:.2f})"
            rows.setdefault((joined(size), dtype), [joined(size), dtype]).append(cell)
        head = ["steps, batch, H", "type", "LSTM, ms", "GRU, ms", "LLTM, ms"]
        return (
            f"The {len(shares)} cases take {min(shares):.2f} to {max(shares):.2f} of cuDNN's time, "
            f"{statistics.median(shares):.2f} in the median; "
            f"{sum(share <= 0.4 for share in shares) or 'none'} of them at most 0.4:\n\n"
            + table(head, list(rows.values()))
        )

    def recurrent_environment(self) -> str:
        return environment(self.layers)

    def recurrent_headline(self) -> str:
        rows = [row for row in self.layers["table"] if not row["case"].startswith("LLTM")]
        ratios = [row["x cuDNN"] for row in rows]
        gpu = self.layers["environment"]["gpu"]
        return (
            f"**LSTM and GRU layers, {statistics.median(ratios):.1f} times as fast as cuDNN's** on "
            f"an {gpu}, in the median of {len(ratios)} cases; {sum(r < 1 for r in ratios)} are "
            "slower. In fp32 cuDNN uses TF32, which my_ops does not."
        )
