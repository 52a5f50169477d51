"""Writes measurements and test results from benchmarks/results into README.md and the guide.

python tools/docs/measured.py            rewrite the text between <!-- NAME --> and <!-- end -->,
                                    and the time after <!-- now SECTION: CASE -->
python tools/docs/measured.py --check    fail if that would change anything
"""

import argparse
import itertools
import re
import statistics
import sys
from pathlib import Path
from typing import Any

from measured_gains import SLOWER, Gains
from measured_layers import SHORT, Layers
from measured_reliability import Reliability
from tables import environment, figure, loader, table

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    "attention",
    "index",
    "fast_fp32",
    "is_it_for_me",
    "lstm_gru",
    "making_it_fast",
    "performance",
    "reliability",
    "compatibility",
    "convolutions",
    "products",
    "notes/gemm",
    "notes/gemm_half",
    "notes/recurrent",
]
FILES = [ROOT / "README.md", *(ROOT / f"docs/{page}.md" for page in PAGES)]
RESULTS = ROOT / "benchmarks/results"


class Results(Reliability, Layers, Gains):
    """Has one method for each NAME."""

    def __init__(self, folder: Path) -> None:
        Reliability.__init__(self, folder)
        Layers.__init__(self, folder)
        Gains.__init__(self, folder)

        load = loader(folder)
        self.sections = load("nvidia-h200")
        self.several = load("nvidia-h200-x4")  # on several GPUs
        self.switch = load("nvidia-h200-fast_fp32")
        self.whole = load("nvidia-h200-models")
        self.steps = load("nvidia-h200-programs")
        self.attention = load("attention")
        self.points = load("nvidia-h200-convolutions")
        self.windows = load("nvidia-h200-convolution_windows")
        self.depthwise = load("nvidia-h200-depthwise")
        self.routed = load("nvidia-h200-routers")
        self.host = load("cpu")
        self.host_layers = load("cpu-layers")
        self.runs = load("compatibility")
        self.by_compiler = {
            compiler: [load(f"cuda12/{path.stem}") for path in folder.glob(f"cuda12/{compiler}*")]
            for compiler in ("cuda12.9", "cuda13.0")
        }

    def case(self, section: str, name: str) -> dict[str, Any]:
        return next(row for row in self.sections[section] if row["case"] == name)

    def elementwise(self) -> str:
        rows = []
        for case, label in (
            ("custom_add float32 1 GiB", "`custom_add` fp32"),
            ("d_sigmoid float32 1 GiB", "`d_sigmoid` fp32"),
            ("add_one float32 1 GiB", "`add_one` fp32"),
            ("round_ste float32 1 GiB", "`round_ste` fp32"),
            ("custom_add bfloat16 1 GiB", "`custom_add` bf16"),
            ("add_one int8 1 GiB", "`add_one` int8"),
            ("custom_add float32 16384^2 + (16384,)", "`custom_add` fp32, 16384² + 16384"),
            ("fill_index float32 16384^2", "`fill_index` fp32, 16384²"),
        ):
            row = self.case("elementwise", case)
            times = [row.get(f"{who} us") for who in ("my_ops", "eager", "compile")]
            rows.append(
                [label, *(figure(t and t / 1e3) for t in times), f"{row['share of ceiling']:.2f}"]
            )
        return table(["op", "my_ops, ms", "eager torch", "torch.compile", "share"], rows)

    def products(self) -> str:
        rows = []
        for case, label, peer in (
            ("gemm float32 640x640x640", "fp32, 640³", "cuBLAS"),
            ("gemm float32 1024x1024x1024", "fp32, 1024³", "cuBLAS"),
            ("gemm float32 1000x1001x1003", "fp32, 1000 x 1001 x 1003", "cuBLAS"),
            ("gemm float32 2048x2048x2048", "fp32, 2048³", "cuBLAS"),
            ("gemm float32 4096x4096x4096", "fp32, 4096³", "cuBLAS"),
            ("gemm float32 4097x4097x4097", "fp32, 4097³", "cuBLAS"),
            ("gemm float32 8192x8192x8192", "fp32, 8192³", "cuBLAS"),
            ("gemm float32 1x4096x4096", "fp32, 1 x 4096 x 4096", "cuBLAS"),
            ("gemm float32 16x4096x4096", "fp32, 16 x 4096 x 4096", "cuBLAS"),
            ("gemm float32 64x4096x4096", "fp32, 64 x 4096 x 4096", "cuBLAS"),
            ("gemm float32 64x64x65536", "fp32, 64 x 64 x 65536", "cuBLAS"),
            ("linear + relu float32 8192x4096x4096", "`linear` + relu, fp32", "eager"),
            ("linear + gelu_tanh float32 8192x4096x4096", "+ gelu (tanh), fp32", "eager"),
            ("linear + gelu float32 8192x4096x4096", "+ gelu, fp32", "eager"),
            ("linear + silu float32 8192x4096x4096", "+ silu, fp32", "eager"),
            ("linear + silu + residual float32 8192x4096x4096", "+ silu + residual, fp32", "eager"),
            (
                "linear float32 8192x4096x4096 forward + backward",
                "`linear` forward + backward, fp32",
                "eager",
            ),
            (
                "linear float32 prepacked 4096x4096x4096",
                "`linear`, prepacked, fp32, 4096³",
                "cuBLAS",
            ),
            ("gemm float32 full range 4096x4096x4096", "fp32, full range, 4096³", "cuBLAS"),
            ("gemm float32 full range 8192x8192x8192", "fp32, full range, 8192³", "cuBLAS"),
            ("gemm float32 high 2048x2048x2048", '"high", 2048³', "cuBLAS TF32"),
            ("gemm float32 high 4096x4096x4096", '"high", 4096³', "cuBLAS TF32"),
            ("gemm float32 high 8192x8192x8192", '"high", 8192³', "cuBLAS TF32"),
            ("gemm bfloat16 4096x4096x4096", "bf16, 4096³", "cuBLAS"),
            ("gemm bfloat16 8192x8192x8192", "bf16, 8192³", "cuBLAS"),
            ("gemm float16 4096x4096x4096", "fp16, 4096³", "cuBLAS"),
            ("gemm float16 8192x8192x8192", "fp16, 8192³", "cuBLAS"),
            ("gemm bfloat16 1x4096x4096", "bf16, 1 x 4096 x 4096", "cuBLAS"),
            ("gemm bfloat16 16x4096x4096", "bf16, 16 x 4096 x 4096", "cuBLAS"),
            ("gemm bfloat16 64x4096x4096", "bf16, 64 x 4096 x 4096", "cuBLAS"),
            ("gemm bfloat16 1000x1001x1003", "bf16, 1000 x 1001 x 1003", "cuBLAS"),
            ("gemm bfloat16 4097x4097x4097", "bf16, 4097³", "cuBLAS"),
            ("linear bfloat16 8192x50257x768", "`linear`, bf16, 8192 x 768 by 50257", "eager"),
            ("linear + gelu_tanh bfloat16 8192x4096x4096", "`linear` + gelu (tanh), bf16", "eager"),
            ("linear + gelu_tanh bfloat16 8192x4096x4096", "the same", "cuBLASLt"),
            ("linear + relu bfloat16 8192x4096x4096", "+ relu, bf16", "eager"),
            ("linear + gelu bfloat16 8192x4096x4096", "+ gelu, bf16", "eager"),
            ("linear + silu bfloat16 8192x4096x4096", "+ silu, bf16", "eager"),
            (
                "linear + silu + residual bfloat16 8192x4096x4096",
                "+ silu + residual, bf16",
                "eager",
            ),
            ("linear + silu bfloat16 256x1024x1024", "+ silu, bf16, 256 x 1024²", "eager"),
        ):
            row = self.case("gemm", case)
            ours, theirs = row["my_ops us"], row[f"{peer} us"]
            ratio, rate = f"{theirs / ours:.2f}", f"{row['TFLOP/s']:.0f}"
            rows.append([label, figure(ours), f"{figure(theirs)} {peer}", ratio, rate])
        return table(["product", "my_ops, us", "the other", "ratio", "TFLOP/s"], rows)

    def layouts(self) -> str:
        rows = []
        for dtype in ("float32", "bfloat16", "float16"):
            for size in (4096, 8192):
                name = f"gemm {dtype} {size}x{size}x{size}"
                cells = []
                for layout in ("", " NT", " TN", " TT"):
                    row = self.case("gemm", name + layout)
                    cells.append(f"{figure(row['my_ops us'])} ({row['x cuBLAS']:.2f})")
                rows.append([f"{SHORT[dtype]}, {size}³", *cells])
        return table(["us (ratio to cuBLAS)", "NN", "NT", "TN", "TT"], rows)

    def sweep(self) -> str:
        rows = []
        for dtype in ("float32", "bfloat16"):
            ratios = [
                row["x cuBLAS"] for row in self.sections["sweep"] if row["case"].startswith(dtype)
            ]
            level = sum(ratio >= 0.97 for ratio in ratios)
            spread = min(ratios), statistics.median(ratios), max(ratios)
            rows.append([SHORT[dtype], str(len(ratios)), str(level), *(f"{r:.2f}" for r in spread)])
        head = ["type", "shapes", "ratio at least 0.97", "lowest ratio", "median", "highest"]
        return table(head, rows)

    def sweep_below(self) -> str:
        rows = []
        for row in self.sections["sweep"]:
            if row["x cuBLAS"] < 0.97:
                dtype, shape = row["case"].split()
                times = [figure(row[f"{who} us"]) for who in ("my_ops", "cuBLAS")]
                rows.append([SHORT[dtype], shape.replace("x", " x "), *times])
        return table(["type", "m x n x k", "my_ops, us", "cuBLAS"], rows)

    def lltm(self) -> str:
        rows = []
        for steps, batch, hidden in (
            (512, 16, 512),
            (512, 64, 1024),
            (512, 256, 1024),
            (1024, 1, 256),
            (128, 32, 128),
        ):
            for dtype in ("bfloat16", "float16", "float32"):
                case = f"lltm {dtype} T{steps} B{batch} H{hidden} forward"
                row, both = self.case("lltm", case), self.case("lltm", f"{case} + backward")
                lstm = figure(row["cuDNN LSTM (4 gates, TF32) us"] / 1e3)
                if dtype == "float32":
                    lstm += f", strict {figure(row['cuDNN LSTM (4 gates, no TF32) us'] / 1e3)}"
                rows.append(
                    [
                        f"{steps}, {batch}, {hidden}",
                        SHORT[dtype],
                        figure(row["my_ops us"] / 1e3),
                        f"{row['my_ops us'] / steps:.2f}",
                        lstm,
                        figure(both["my_ops us"] / 1e3),
                        figure(both["cuDNN LSTM (4 gates, TF32) us"] / 1e3),
                    ]
                )
        head = ["steps, batch, H", "type", "LLTM, ms", "a step, us", "cuDNN LSTM, ms"]
        return table([*head, "LLTM + backward", "cuDNN + backward"], rows)

    def overhead(self) -> str:
        rows = []
        for device in ("cuda", "cpu"):
            times = self.sections[f"overhead {device}, us per call"]
            free, recorded = times["no gradient"], times["gradient recorded"]
            for label, ours, theirs in (
                ("no gradient", free["my_ops.round_ste"], free["torch.round"]),
                (
                    "`torch.inference_mode`",
                    free["my_ops.round_ste inference_mode"],
                    free["torch.round inference_mode"],
                ),
                ("gradient recorded", recorded["my_ops.d_sigmoid"], recorded["torch.sigmoid"]),
            ):
                rows.append([f"{device.upper()}, {label}", f"{ours:.1f}", f"{theirs:.1f}"])
        return table(["8 elements, us", "my_ops", "native op"], rows)

    def scaling(self) -> str:
        rows = []
        for way in dict.fromkeys(row["way"] for row in self.several["distributed"]):
            for model in ("my_ops", "torch.nn", "torch.nn, no TF32"):
                line = [
                    row
                    for row in self.several["distributed"]
                    if (row["way"], row["model"]) == (way, model)
                ]
                if line:
                    rates = [figure(row["tokens/s"] / 1e6) for row in line]
                    rows.append([way, model, *rates, f"{line[-1]['efficiency']:.2f}"])
        gpus = dict.fromkeys(row["gpus"] for row in self.several["distributed"])
        return table(["split by", "layers", *(f"{n} GPU" for n in gpus), "efficiency"], rows)

    def fast_fp32(self) -> str:
        rows = [
            [row["case"], figure(row["never us"]), figure(row["on us"])]
            for row in self.switch["products and a training step"]
        ]
        return table(["fp32, us", "torch", "with the switch"], rows)

    def fast_fp32_complex(self) -> str:
        rows = [
            [
                row["case"],
                *(figure(row[f"{state} us"]) for state in ("never", "on")),
                f"{row['never us'] / row['on us']:.2f}",
            ]
            for row in self.switch["complex products"]
        ]
        return table(["complex64, us", "torch", "with the switch", "x torch"], rows)

    def models(self) -> str:
        rows = []
        for row in self.whole["training step"]:
            model, kind, way = row["case"].split()
            times = [figure(row[f"{who} ms"]) for who in ("torch", "switch", "converted")]
            gains = [f"{row['torch ms'] / row[f'{who} ms']:.2f}" for who in ("switch", "converted")]
            commit = row.get("commit", self.whole["environment"]["commit"])[:7]
            rows.append([model, SHORT[kind], way, *times, *gains, commit])
        head = ["model", "type", "mode", "torch, ms", "switch", "`my_ops.nn.Linear`"]
        return table([*head, "x switch", "x Linear", "commit"], rows)

    def routers(self) -> str:
        ways = "cuBLAS", "float32", "bfloat16"
        rows = [
            [row["case"], *(figure(row[f"{way} us"]) if f"{way} us" in row else "" for way in ways)]
            for row in self.routed["products"]
        ]
        return table(["us", "cuBLAS, fp32", "my_ops, fp32 tokens", "my_ops, bf16 tokens"], rows)

    def router_steps(self) -> str:
        rows = [
            [
                row["case"],
                figure(row["torch us"]),
                figure(row["my_ops us"]),
                f"{row['x torch']:.2f}",
            ]
            for row in self.routed["training step"]
        ]
        return table(["us", "torch, tokens cast to fp32", "my_ops", "x torch"], rows)

    def routers_environment(self) -> str:
        return environment(self.routed)

    def convolution_points(self) -> str:
        return self.of_convolutions(self.points["convolutions of single points"])

    def convolution_windows(self) -> str:
        return self.of_convolutions(self.windows["convolutions of windows"])

    def transposed_convolutions(self) -> str:
        return self.of_convolutions(self.windows["transposed convolutions"])

    def depthwise_convolutions(self) -> str:
        found = self.depthwise["depthwise convolutions"]
        return self.of_convolutions(found, "torch")

    def of_convolutions(
        self, found: list[dict[str, Any]], peer: str = "cuDNN", a: str = "forward", b: str = "all"
    ) -> str:
        """Each cell has the times of passes a and b."""
        ways = "strict", "tf32", "switch"
        rows = [
            [
                row["case"],
                *(f"{row[f'{a} {way} us']:.0f} / {row[f'{b} {way} us']:.0f}" for way in ways),
                f"{row[f'{a} x strict']:.2f} / {row[f'{b} x strict']:.2f}",
            ]
            for row in found
        ]
        return table(["us", f"{peer}, strict", "TF32", "under the switch", "x strict"], rows)

    def convolution_points_environment(self) -> str:
        return environment(self.points)

    def convolution_windows_environment(self) -> str:
        return environment(self.windows)

    def depthwise_convolutions_environment(self) -> str:
        return environment(self.depthwise)

    def programs(self) -> str:
        ways = "torch", "switch", "both", "tf32"
        rows = [
            [
                row["case"].removesuffix(" eager"),
                *(figure(row[f"{way} ms"]) for way in ways),
                *(f"{row[f'x {way}']:.2f}" for way in ways[1:]),
                f"{row['spread']:.2f}",
                *(f"{row[f'{way} gradients apart']:.0e}" for way in ("both", "tf32")),
            ]
            for row in self.steps["training step"]
        ]
        head = ["ms", "strict", "switch", "convert too", "TF32", "x switch", "x both", "x TF32"]
        return table([*head, "spread", "gradients apart, both", "gradients apart, TF32"], rows)

    def programs_gpu(self) -> str:
        kinds: dict[str, None] = {}
        for row in self.steps["training step"]:
            kinds |= dict.fromkeys([*row["torch gpu ms"], *row["both gpu ms"]])
        rows = []
        for row in self.steps["training step"]:
            strict, ours = row["torch gpu ms"], row["both gpu ms"]
            pairs = [(sum(strict.values()), sum(ours.values()))]
            pairs += [(strict.get(kind, 0), ours.get(kind, 0)) for kind in kinds]
            cells = [f"{a:.1f} / {b:.1f}" if a or b else "" for a, b in pairs]
            rows.append([row["case"].removesuffix(" eager"), *cells])
        return table(["GPU, ms, strict / converted", "all", *kinds], rows)

    def programs_environment(self) -> str:
        return environment(self.steps)

    def models_environment(self) -> str:
        return environment(self.whole)

    def fast_fp32_host(self) -> str:
        rows = [
            [row["case"], *(f"{row[f'{state} us']:.1f}" for state in ("never", "on", "off again"))]
            for row in self.switch["host time of small products"]
        ]
        return table(["product, us a call", "never on", "on", "off again"], rows)

    def cpu(self) -> str:
        sections = [self.host[f"cpu, {threads} thread(s)"] for threads in (1, 2)]
        rows = []
        for one, two in zip(*sections, strict=True):
            pair = [f"{row['my_ops us'] / 1e3:.3f} ({row['x eager']:.2f})" for row in (one, two)]
            peers = [f"{row['x LSTM']:.2f}" if "x LSTM" in row else "" for row in (one, two)]
            rows.append([one["case"], *pair, " / ".join(filter(None, peers))])
        head = ["case", "one thread, ms (ratio to eager)", "two threads", "ratio to `nn.LSTM`"]
        return table(head, rows)

    def cpu_layers(self) -> str:
        sections = [self.host_layers[f"cpu-layers, {threads} thread(s)"] for threads in (1, 2)]
        rows: dict[str, list[str]] = {}
        for pair in zip(*sections, strict=True):
            layer = pair[0]["case"].partition(" forward")[0]
            rows.setdefault(layer, [layer]).extend(
                f"{row['my_ops us'] / 1e3:.3f} ({row['torch us'] / row['my_ops us']:.2f})"
                for row in pair
            )
        one_two = "one thread, ms (speed over torch's)", "two threads"
        passes = "forward", "forward + backward"
        return table(
            ["layer", *(f"{p}, {n}" for p in passes for n in one_two)], list(rows.values())
        )

    def cuda12(self) -> str:
        """Rows in which the file by CUDA 12.9 is more than 3 % slower, in the mean of all runs."""

        def means(compiler: str, who: str) -> dict[str, float]:
            times: dict[str, list[float]] = {}
            for run in self.by_compiler[compiler]:
                sections = (rows for rows in run.values() if isinstance(rows, list))
                for row in itertools.chain(*sections):
                    if who in row:
                        times.setdefault(row["case"], []).append(row[who])
            return {case: statistics.mean(several) for case, several in times.items()}

        def compared(who: str) -> dict[str, tuple[float, float, float]]:
            old, new = means("cuda13.0", who), means("cuda12.9", who)
            return {case: (old[case], new[case], new[case] / old[case]) for case in old}

        ours, cublas = compared("my_ops us"), compared("cuBLAS us")
        slower = sorted(((r, case) for case, (_, _, r) in ours.items() if r > 1.03), reverse=True)
        rows = []
        for _, case in slower:
            cells = [case]
            for times in (ours[case], cublas.get(case)):
                cells += [*map(figure, times[:2]), f"{times[2]:.3f}"] if times else [""] * 3
            rows.append(cells)
        median = statistics.median(r for _, _, r in ours.values())
        head = ["case", "by 13.0, us", "by 12.9", "ratio", "cuBLAS beside 13.0", "12.9", "ratio"]
        return (
            f"The median ratio of {len(ours)} rows is {median:.3f}; "
            f"{len(slower)} are more than 3 % slower:\n\n{table(head, rows)}"
        )

    def compatibility(self) -> str:
        rows = []
        for run in self.runs:
            count = f"{run['passed']:,} passed" if "passed" in run else "passed"
            assert not run.get("failed"), run
            tests = f"{run['tests']}: {count}"
            cells = [run["torch"], run["cuda"] or "none", run["python"], run["processor"]]
            rows.append([*cells, tests, run["commit"]])
        head = ["torch", "its CUDA", "Python", "processor", "tests on the CPU", "commit"]
        return table(head, rows)

    def compatibility_short(self) -> str:
        groups: dict[tuple[str, str, str], list[str]] = {}
        for run in self.runs:
            alike = run["python"], run["processor"], run["tests"]
            groups.setdefault(alike, []).append(run["torch"])
        pythons: dict[tuple[str, str, str], list[str]] = {}
        for (python, processor, tests), versions in groups.items():
            pythons.setdefault((", ".join(versions), processor, tests), []).append(python)
        rows = [[key[0], ", ".join(found), *key[1:]] for key, found in pythons.items()]
        return table(["torch", "Python", "processor", "tests passed"], rows)

    def environment(self) -> str:
        return environment(self.sections)

    def scaling_environment(self) -> str:
        return environment(self.several)

    def fast_fp32_environment(self) -> str:
        return environment(self.switch)

    def cpu_environment(self) -> str:
        return environment(self.host)

    def cpu_layers_environment(self) -> str:
        return environment(self.host_layers)

    def attention_speed(self) -> str:
        head = ["batch, heads, length, size", "forward", "torch", "", "backward", "torch", ""]
        rows = [
            [
                row["case"],
                *(figure(row[f"{name} ms"]) for name in ("my_ops", "torch")),
                f"**{row['x torch']:.1f}**",
                *(figure(row[f"backward, {name} ms"]) for name in ("my_ops", "torch")),
                f"**{row['backward, x torch']:.1f}**",
            ]
            for row in self.attention["speed"]
        ]
        return table(head, rows)

    def attention_errors(self) -> str:
        names = ("out", "dq", "dk", "dv", "dbias")
        head = ["batch, heads, length, size", *(f"{name}, torch's" for name in names)]
        rows = [
            [
                row["case"],
                *(
                    f"{row[name]:.1e}, {row[f'{name}, torch']:.1e}" if name in row else ""
                    for name in names
                ),
            ]
            for row in self.attention["errors"] + self.attention["errors of large scores"]
        ]
        return table(head, rows)

    def products_headline(self) -> str:
        row = self.case("gemm", "gemm float32 4096x4096x4096")
        ratios = [r["x cuBLAS"] for r in self.sections["sweep"] if r["case"].startswith("float32")]
        gpu, median = self.sections["environment"]["gpu"], statistics.median(ratios)
        slower = sum(ratio < SLOWER for ratio in ratios)
        return (
            f"**fp32 products with fp32's accuracy, {row['x cuBLAS']:.1f} times as fast as "
            f"cuBLAS's** on an {gpu} (m = n = k = 4096). The median over {len(ratios)} random "
            f"shapes, most of them small, is {median:.1f} times; {slower} are slower."
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    results = Results(RESULTS)

    def fill(match: re.Match[str]) -> str:
        return f"<!-- {match[1]} -->\n{getattr(results, match[1])()}\n<!-- end -->"

    def now(match: re.Match[str]) -> str:
        """Products are in us, layers in ms."""
        section, case = match.groups()
        time = results.case(section, case)["my_ops us"]
        return f"<!-- now {section}: {case} -->{figure(time / (1e3 if section == 'lltm' else 1))}"

    stale = False
    for path in FILES:
        before = path.read_text()
        after = re.sub(r"<!-- (\w+) -->\n.*?<!-- end -->", fill, before, flags=re.DOTALL)
        after = re.sub(r"<!-- now (\w+): (.*?) -->[\d.]*", now, after)
        if check and after != before:
            print(f"{path.name} differs from the results; run tools/docs/measured.py")
            stale = True
        elif after != before:
            path.write_text(after)
    return int(stale)


if __name__ == "__main__":
    sys.exit(main())
