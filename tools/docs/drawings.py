"""Draws the pictures of the guide that show no measurements, light and dark, into docs/images.

tests/package/test_docs.py fails if a file differs from what this writes.
"""

from __future__ import annotations

import re
from pathlib import Path

from svg import Drawing

ROOT = Path(__file__).resolve().parents[2]


def fused() -> Drawing:
    """a + b + 1: what memory traffic it takes."""
    drawing = Drawing(560, 190, "a + b + 1 in eager torch moves five arrays, custom_add three")
    for y, title, kernels in (
        (10, "eager torch: 5 arrays move", [("a, b", "a + b", "t"), ("t", "t + 1", "out")]),
        (105, "custom_add: 3 arrays move", [("a, b", "a + b + 1", "out")]),
    ):
        drawing.text(10, y + 10, title, anchor="start", bold=True)
        x = 10.0
        for reads, kernel, writes in kernels:
            drawing.box(x, y + 25, 50, 36, "grey", reads)
            drawing.arrow((x + 50, y + 43), (x + 75, y + 43))
            drawing.box(x + 75, y + 25, 105, 36, "blue", kernel)
            drawing.arrow((x + 180, y + 43), (x + 205, y + 43))
            drawing.box(x + 205, y + 25, 50, 36, "grey", writes)
            x += 280
    return drawing


def linear() -> Drawing:
    drawing = Drawing(640, 120, "linear: product, bias, activation and residual in one kernel")
    drawing.rect(150, 22, 385, 84, "none", "blue")
    drawing.text(342, 16, "one kernel", size=12, color="faint")
    drawing.box(10, 45, 100, 40, "grey", "x, weight")
    drawing.arrow((110, 65), (165, 65))
    names = ["x @ weight.T", "+ bias", "activation", "+ residual"]
    x = 165.0
    for number, (name, width) in enumerate(zip(names, (105, 65, 85, 80), strict=True)):
        drawing.box(x, 45, width, 40, "blue" if number == 0 else "green", name)
        x += width
        if number < len(names) - 1:
            drawing.arrow((x, 65), (x + 8, 65), head=False)
            x += 8
    drawing.arrow((x, 65), (575, 65))
    drawing.box(575, 45, 55, 40, "grey", "out")
    return drawing


def cell(title: str, gates: list[tuple[str, str]], carried: str | None, out: str) -> Drawing:
    """One step of one hidden unit, from the bottom up."""
    width = 92 * len(gates) - 8
    right = 105 + width
    drawing = Drawing(right + 115, 262 if carried else 202, title)
    drawing.box(105, 10, width, 36, "blue", out)
    drawing.arrow((right, 28), (right + 35, 28))
    drawing.box(right + 35, 10, 70, 36, "grey", "h(t)")
    y = 70
    if carried:
        drawing.box(10, y, 70, 36, "grey", "c(t-1)")
        drawing.arrow((80, y + 18), (105, y + 18))
        drawing.box(105, y, width, 36, "purple", carried)
        drawing.arrow((105 + width / 2, y), (105 + width / 2, 46))
        drawing.arrow((right, y + 18), (right + 35, y + 18))
        drawing.box(right + 35, y, 70, 36, "grey", "c(t)")
        y += 60
    for number, (name, function) in enumerate(gates):
        x = 105 + 92 * number
        drawing.box(x, y, 84, 42, "green" if function == "sigmoid" else "orange", name, function)
        drawing.arrow((x + 42, y), (x + 42, y - 24))
        drawing.arrow((x + 42, y + 66), (x + 42, y + 42))
    drawing.box(10, y + 66, 70, 36, "grey", "x, h(t-1)")
    drawing.arrow((80, y + 84), (105, y + 84))
    drawing.box(105, y + 66, width, 36, "grey", "products with the weights, biases")
    return drawing


def lstm() -> Drawing:
    gates = [("i", "sigmoid"), ("f", "sigmoid"), ("g", "tanh"), ("o", "sigmoid")]
    return cell("A step of LSTM", gates, "c(t) = f c(t-1) + i g", "h(t) = o tanh(c(t))")


def gru() -> Drawing:
    gates = [("r", "sigmoid"), ("u", "sigmoid"), ("n, with r", "tanh")]
    return cell("A step of GRU", gates, None, "h(t) = (1 - u) n + u h(t-1)")


def lltm() -> Drawing:
    gates = [("i", "sigmoid"), ("o", "sigmoid"), ("g", "ELU")]
    return cell("A step of LLTM", gates, "c(t) = c(t-1) + g i", "h(t) = tanh(c(t)) o")


def steps() -> Drawing:
    """Time runs to the right."""
    drawing = Drawing(620, 205, "Step by step, and all steps in one launch")
    drawing.text(10, 20, "step by step: a product and a cell's kernel a step", anchor="start")
    x = 10.0
    for step in range(1, 5):
        drawing.box(x, 30, 80, 36, "grey", "W_hh h")
        drawing.box(x + 88, 30, 44, 36, "green", f"cell {step}")
        x += 152
    drawing.text(10, 105, "in one launch: W_hh stays on chip, blocks exchange h", anchor="start")
    drawing.rect(10, 115, 400, 78, "none", "blue")
    drawing.text(210, 132, "weights in registers and shared memory", size=12, color="faint")
    x = 22.0
    for step in range(1, 5):
        drawing.box(x, 145, 66, 36, "green", f"step {step}")
        if step < 4:
            drawing.arrow((x + 66, 163), (x + 98, 163))
            drawing.text(x + 82, 157, "h", size=11)
        x += 98
    drawing.text(430, 168, "time goes to the right", anchor="start", size=12, color="faint")
    return drawing


def fp32_parts() -> Drawing:
    """A float's 24 bits, its two parts, and the products of parts."""
    drawing = Drawing(640, 420, "A float32 product made of three fp16 products")
    bit, left = 22, 96
    drawing.text(left - 12, 47, "float32", anchor="end", bold=True)
    for number in range(24):
        color = "blue" if number < 11 else "green" if number < 23 else "grey"
        drawing.rect(left + bit * number, 30, bit - 2, 26, color)
    drawing.text(left + 12 * bit, 20, "24 significant bits of an element", size=12, color="faint")
    drawing.arrow((left + 5.5 * bit, 58), (left + 5.5 * bit, 88))
    drawing.arrow((left + 17 * bit, 58), (left + 17 * bit, 88))
    drawing.box(left, 88, 11 * bit - 2, 34, "blue", "leading part, fp16")
    drawing.box(left + 11 * bit, 88, 12 * bit - 2, 34, "green", "low part, fp16")
    note = "both are scaled by the exponent of their row, so that fp16's range is enough"
    drawing.text(left, 142, note, size=12, anchor="start", color="faint")

    drawing.text(10, 180, "a b  =", anchor="start", bold=True)
    x = 70.0
    for first, second, name, kept in (
        ("blue", "blue", "leading x leading", True),
        ("blue", "green", "leading x low", True),
        ("green", "blue", "low x leading", True),
        ("green", "green", "low x low", False),
    ):
        drawing.rect(x, 162, 26, 26, first)
        drawing.text(x + 38, 180, "x")
        drawing.rect(x + 50, 162, 26, 26, second)
        drawing.text(x + 38, 208, name, size=12, color="text" if kept else "faint")
        if not kept:
            drawing.text(x + 38, 224, "left out: about 2^-22", size=12, color="faint")
        elif first == second:
            drawing.text(x + 38, 224, "promoted", size=12, color="faint")
        if kept:
            drawing.text(x + 100, 180, "+", bold=True)
        x += 140

    drawing.text(10, 262, "Sum over k of the leading products", anchor="start", bold=True)
    for number in range(4):
        x = 10 + 130 * number
        drawing.box(x, 280, 112, 36, "orange", "32 of k")
        drawing.arrow((x + 56, 316), (x + 56, 352))
    drawing.text(545, 296, "the tensor core", size=12, anchor="start", color="faint")
    drawing.text(545, 312, "truncates", size=12, anchor="start", color="faint")
    drawing.box(10, 352, 502, 36, "blue", "float registers: each addition rounds (promotion)")
    drawing.arrow((512, 370), (545, 370))
    drawing.box(545, 352, 60, 36, "grey", "out")
    return drawing


def place(path: str, pattern: str) -> str:
    """The file, in which one line matches."""
    lines = (ROOT / path).read_text().splitlines()
    hits = sum(bool(re.search(pattern, line)) for line in lines)
    if hits != 1:
        raise ValueError(f"{path}: {hits} lines match {pattern!r}, the drawing needs one")
    return path


def call() -> Drawing:
    """One call of an elementwise op of one argument, by the names in the code."""
    op, functor = "d_sigmoid", "DSigmoid"
    python, binding = "my_ops/ops/elementwise.py", "csrc/elementwise"
    cpu, cuda = "kernels/elementwise/elementwise_cpu.cpp", "kernels/elementwise/elementwise.cu"
    nodes = {
        "public": (f"my_ops.{op}", "public function", place(python, rf"^def {op}\(")),
        "gradient": (
            f"_{op}",
            "gradient, on the Autograd key",
            place(python, rf"^_{op} = register_gradient"),
        ),
        "schema": (f"my_ops::{op}", "schema", place("csrc/bindings.cpp", rf'm\.def\("{op}\(')),
        "cpu": (op, "binding: check, allocate", place(f"{binding}_cpu.cpp", rf"^Tensor {op}\(")),
        "cuda": (
            op,
            "binding: check, allocate, device, stream",
            place(f"{binding}_cuda.cpp", rf"^Tensor {op}\("),
        ),
        "cpu_launcher": (f"cpu::{op}", "launcher", place(cpu, rf"void {op}\(")),
        "cuda_launcher": (f"cuda::{op}", "launcher", place(cuda, rf"^\S+ my_ops::cuda::{op}\(")),
        "cpu_kernel": (
            functor,
            "what map does to an element",
            place(cpu, rf"^struct {functor} {{"),
        ),
        "cuda_kernel": (
            functor,
            "what map_kernel does to an element",
            place(cuda, rf"^struct {functor} {{"),
        ),
    }
    drawing = Drawing(720, 502, f"How a call of my_ops.{op} travels")
    places = {
        **{"public": (210, 0), "gradient": (210, 85), "schema": (210, 170)},
        **{"cpu": (0, 270), "cpu_launcher": (0, 355), "cpu_kernel": (0, 440)},
        **{"cuda": (420, 270), "cuda_launcher": (420, 355), "cuda_kernel": (420, 440)},
    }
    for key, (name, what, at) in nodes.items():
        x, y = places[key]
        drawing.rect(x, y, 300, 60, "grey", "line")
        for row, (words, look) in enumerate(
            ((name, {"bold": True}), (what, {"size": 12}), (at, {"size": 11, "color": "faint"}))
        ):
            drawing.text(x + 150, y + 17 + 18 * row, words, **look)
    for x, y in ((360, 60), (360, 145), (150, 330), (150, 415), (570, 330), (570, 415)):
        drawing.arrow((x, y), (x, y + 25))
    for side, label in ((150, "CPU"), (570, "CUDA")):
        drawing.arrow((360, 230), (360, 250), (side, 250), (side, 270))
        drawing.text((side + 360) / 2, 245, label, size=12)
    return drawing


def files() -> dict[Path, str]:
    """The content of each file."""
    found: dict[Path, str] = {}
    for draw in (fused, linear, lstm, gru, lltm, steps, fp32_parts, call):
        found |= draw().files(f"drawing_{draw.__name__}")
    return found


if __name__ == "__main__":
    for path, content in files().items():
        path.write_text(content)
