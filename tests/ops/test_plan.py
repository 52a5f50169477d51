"""Which kernel runs what on which GPU, and whether that GPU can run it. The planning code itself is
tested with made-up devices, on any machine."""

import math
import re
import shutil
import subprocess
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from samples import TILE_SIZES, VARIANT_SIZES

ROOT = Path(__file__).resolve().parents[2]
KIB, MIB = 1024, 1024**2
UNASKED = 48 * KIB  # shared memory that a block has by default

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not shutil.which("c++") or not (ROOT / "kernels").exists(),
        reason="needs a C++ compiler and the source tree",
    ),
]


class Device(NamedTuple):
    major: int
    minor: int
    processors: int
    shared_bytes: int  # per block: technical specifications in the CUDA programming guide
    l2_bytes: int
    code: int  # the architecture in the wheel that the device runs
    hopper_code: int = 0

    @property
    def max_cluster(self):
        return 8 if self.major >= 9 else 1


DEVICES = {
    "T4": Device(7, 5, 40, 64 * KIB, 4 * MIB, 75),
    "A100": Device(8, 0, 108, 163 * KIB, 40 * MIB, 80),
    "A10": Device(8, 6, 72, 99 * KIB, 6 * MIB, 86),
    "L4": Device(8, 9, 58, 99 * KIB, 48 * MIB, 86),
    "H200": Device(9, 0, 132, 227 * KIB, 60 * MIB, 90, 1),
    "H200-slice": Device(9, 0, 16, 227 * KIB, 8 * MIB, 90, 1),  # the smallest slice by MIG
    "H200-plain": Device(9, 0, 132, 227 * KIB, 60 * MIB, 90, 0),  # a build for 9.0, not 9.0a
    "B200": Device(10, 0, 148, 227 * KIB, 126 * MIB, 100),
    "RTX5090": Device(12, 0, 170, 99 * KIB, 96 * MIB, 120),
    "A10-old-code": Device(8, 6, 72, 99 * KIB, 6 * MIB, 75),  # a build for 7.5, with PTX
}
EACH_DEVICE = pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
GEMM = {  # the kernels of products that can run on a device
    "T4": "small library",
    "A100": "fp32_sm80 small library",
    "A10": "fp32_sm80 small library",
    "L4": "fp32_sm80 small library",
    "H200": "fp32_skinny fp32_narrow fp32_short fp32_sm90 fp32_sm80 half_sm90 small library",
    "H200-slice": "fp32_skinny fp32_narrow fp32_short fp32_sm90 fp32_sm80 half_sm90 small library",
    "H200-plain": "fp32_skinny fp32_sm80 small library",
    "B200": "fp32_sm80 small library",
    "RTX5090": "fp32_sm80 small library",
    "A10-old-code": "small library",
}
LAYERS = {
    "T4": "warp steps",
    "A100": "warp block grid steps",
    "A10": "warp block grid steps",
    "L4": "warp block grid steps",
    "H200": "warp block cluster grid warpgroup steps",
    "H200-slice": "warp block cluster grid warpgroup steps",
    "H200-plain": "warp block cluster grid steps",
    "B200": "warp block cluster grid steps",
    "RTX5090": "warp block cluster grid steps",
    "A10-old-code": "warp steps",
}


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """Returns a function from a list of questions to a list of answers: see plan.cpp."""
    program = tmp_path_factory.mktemp("plan") / "plan"
    source = Path(__file__).with_name("plan.cpp")
    folders = (f"-I{ROOT}/{name}" for name in ("kernels", "include"))
    command = ["c++", "-std=c++20", *folders, str(source), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

    def ask(questions):
        lines = [
            " ".join(str(int(x)) if isinstance(x, bool) else str(x) for x in q) for q in questions
        ]
        done = subprocess.run(
            [program], input="\n".join(lines), capture_output=True, text=True, check=True
        )
        answers = [line.split() for line in done.stdout.splitlines()]
        assert len(answers) == len(questions)
        return [(first, *(int(x) for x in rest)) for first, *rest in answers]

    return ask


def flags(count):
    return torch.randint(2, (count,)).tolist()


def size(largest_power):
    """Sizes around powers of two; small ones are as frequent as large ones."""
    power = torch.rand(()).item() * largest_power
    return max(1, int(2**power) + int(torch.randint(-1, 2, ())))


def products(count):
    for _ in range(count):
        width, out_width = [(8, 8), (4, 4), (4, 4), (2, 2), (2, 4)][torch.randint(5, ())]
        batch = size(6) if torch.rand(()) < 0.3 else 1
        vectors = 8 if torch.rand(()) < 0.5 else 1
        m, n, k = (size(13) * vectors for _ in range(3))
        yield (width, out_width, batch, m, n, k, *flags(7), 0)


def layers(count):
    for _ in range(count):
        yield (*flags(1), [4, 2][torch.randint(2, ())], size(10), size(12), 0)


def assert_fits(device, needs, what):
    code, shared_bytes, cluster, resident = needs
    assert code <= device.code, what
    assert shared_bytes <= max(device.shared_bytes, UNASKED), what
    assert cluster <= device.max_cluster, what
    assert resident <= device.processors, what


@EACH_DEVICE
def test_a_product_fits_the_device(device, plan):
    questions = [("gemm", *device, *product) for product in products(4000)]
    answers = plan(questions)
    for question, (kernel, *needs) in zip(questions, answers, strict=True):
        assert_fits(device, needs, question)
        assert device.hopper_code or kernel not in (
            "fp32_narrow",
            "fp32_short",
            "fp32_sm90",
            "half_sm90",
        )
        high, tf32 = question[-3:-1]
        if question[7] == 4 and tf32 and not high and device.major >= 8:
            assert kernel != "library", question  # it would round to TF32
    name = next(name for name, known in DEVICES.items() if known is device)
    assert {kernel for kernel, *_ in answers} == set(GEMM[name].split())


@pytest.mark.parametrize("width", [4, 2])
def test_a_product_on_one_processor(width, plan):
    """Which has no room for a cluster."""
    device = DEVICES["H200"]._replace(processors=1)
    product = (width, width, 1, 1001, 1001, 1001, *[0] * 8)
    ((kernel, *_),) = plan([("gemm", *device, *product)])
    assert kernel == "library"


MIXED_CHOSEN = [  # device, m, n, k, transposed a and b, which has 16 bits -> kernel
    ("H200", 16384, 64, 4096, 0, 1, "a", "fp32_narrow"),  # a router: forward, then grad weight
    ("H200", 64, 4096, 16384, 1, 0, "b", "fp32_narrow"),
    ("H200", 16384, 64, 4096, 0, 1, "b", "converted"),  # the narrow one must be float32
    ("H200", 1, 64, 4096, 0, 1, "a", "converted"),
    ("H200", 4096, 2048, 2048, 0, 1, "a", "fp32_sm90"),
    ("H200", 4096, 4096, 4096, 0, 1, "b", "fp32_sm90"),
    ("H200", 16384, 4096, 64, 0, 0, "b", "converted"),  # k is too short for the parts
    ("H200", 16, 4096, 4096, 0, 1, "b", "converted"),  # few rows have a kernel for floats
    ("H200", 100, 100, 100, 0, 1, "a", "converted"),
    ("H200", 1, 64, 4096, 0, 1, "a", "converted"),  # a single row
    ("H200-plain", 4096, 4096, 4096, 0, 1, "a", "converted"),
    ("A100", 4096, 4096, 4096, 0, 1, "a", "converted"),
    ("B200", 4096, 4096, 4096, 0, 1, "b", "converted"),
]


@pytest.mark.parametrize(("device", "m", "n", "k", "a", "b", "half", "kernel"), MIXED_CHOSEN)
def test_a_product_with_a_16_bit_operand(device, m, n, k, a, b, half, kernel, plan):
    variant = " ab".index(half)
    question = ("gemm", *DEVICES[device], 4, 4, 1, m, n, k, a, b, *[0] * 5, variant)
    assert plan([question])[0][0] == kernel


COMPLEX = [  # device, batch, m, n, k, transposed a and b -> whether it becomes a real product
    ("H200", 1, 4096, 4096, 4096, 0, 0, 1),
    ("H200", 1, 1024, 1024, 1024, 1, 0, 1),
    ("H200", 8, 1024, 512, 512, 0, 1, 1),
    ("H200", 1, 16384, 64, 4096, 0, 1, 1),
    ("H200", 1, 600, 600, 600, 0, 0, 1),
    ("H200", 1, 512, 512, 512, 0, 0, 0),
    ("H200", 1, 256, 8192, 8192, 0, 1, 1),
    ("H200", 1, 200, 8192, 8192, 0, 1, 0),
    ("H200", 1, 16, 4096, 4096, 0, 1, 0),  # few rows: b would be moved five times
    ("H200", 4096, 32, 32, 32, 0, 0, 0),
    ("H200-plain", 1, 4096, 4096, 4096, 0, 0, 0),
    ("A100", 1, 4096, 4096, 4096, 0, 0, 1),
    ("A100", 1, 512, 512, 512, 0, 0, 0),
]


@pytest.mark.parametrize(("device", "batch", "m", "n", "k", "a", "b", "want"), COMPLEX)
def test_a_complex_product(device, batch, m, n, k, a, b, want, plan):
    assert plan([("complex", *DEVICES[device], batch, m, n, k, a, b)]) == [(str(want),)]


def test_complex_products_cost_more_than_real_ones(plan):
    """Those of their size that become real ones."""
    sizes = [torch.randint(32, 2000, (3,)).tolist() for _ in range(500)]
    device = DEVICES["H200"]
    real = [("gemm", *device, 4, 4, 1, m, 2 * n, 2 * k, *[0] * 8) for m, n, k in sizes]
    complex_ = [("complex", *device, 1, m, n, k, 0, 0) for m, n, k in sizes]
    copied = [("complex", *device, 1, m, n, k, 1, 0) for m, n, k in sizes]
    ours = [kernel.startswith("fp32") for kernel, *_ in plan(real)]
    gains, gains_copied = ([answer == ("1",) for answer in plan(q)] for q in (complex_, copied))
    assert sum(ours) > sum(gains) > sum(gains_copied) > 0
    assert all(a >= b >= c for a, b, c in zip(ours, gains, gains_copied, strict=True))


@pytest.mark.parametrize("cell", ["lltm", "lstm", "gru"])
@EACH_DEVICE
def test_a_layer_fits_the_device(device, cell, plan):
    questions = [(cell, *device, *layer) for layer in layers(2000)]
    answers = plan(questions)
    for question, (kernel, *needs) in zip(questions, answers, strict=True):
        assert_fits(device, needs, question)
        assert device.hopper_code or kernel != "warpgroup"
    name = next(name for name, known in DEVICES.items() if known is device)
    assert {kernel for kernel, *_ in answers} == set(LAYERS[name].split())


LAYERS_CHOSEN = [  # device, cell, backward, width, batch, hidden -> kernel
    ("H200", "lstm", 0, 2, 39, 1024, "grid"),
    ("H200", "lstm", 0, 2, 40, 1024, "warpgroup"),
    ("H200", "gru", 0, 2, 64, 1024, "grid"),
    ("H200", "gru", 0, 2, 65, 1024, "warpgroup"),
    ("H200", "gru", 0, 2, 256, 1024, "warpgroup"),
    ("H200", "lltm", 0, 2, 512, 1024, "warpgroup"),
    ("H200", "lstm", 0, 2, 1024, 1024, "warpgroup"),
    ("H200", "lstm", 0, 2, 1025, 1024, "steps"),  # a fifth wave
    ("H200", "lstm", 0, 2, 79, 512, "grid"),
    ("H200", "lstm", 0, 2, 80, 512, "warpgroup"),
    ("H200", "gru", 0, 2, 128, 512, "grid"),
    ("H200", "gru", 0, 2, 129, 512, "warpgroup"),
    ("H200", "lstm", 0, 2, 8000, 256, "warpgroup"),
    ("H200", "lstm", 0, 2, 1 << 20, 64, "block"),
    ("H200", "gru", 0, 2, 1, 64, "block"),
    ("H200", "lstm", 0, 2, 132, 64, "warp"),
    ("H200", "lstm", 0, 2, 133, 64, "block"),
    ("H200", "lstm", 0, 2, 66, 66, "cluster"),
    ("H200", "lstm", 0, 2, 67, 66, "block"),
    ("H200", "lstm", 0, 2, 2112, 128, "block"),
    ("H200", "lstm", 0, 2, 2113, 128, "warpgroup"),
    ("H200", "lstm", 0, 2, 2113, 126, "block"),  # rows are not whole 16-byte vectors
    ("H200", "lstm", 1, 2, 1 << 20, 128, "block"),
    ("H200", "lstm", 0, 2, 1 << 20, 95, "warp"),  # not a whole number of pairs
    ("H200", "lstm", 0, 2, 1 << 20, 127, "steps"),
    ("H200", "lstm", 0, 4, 1056, 32, "warp"),
    ("H200", "lstm", 0, 4, 1057, 32, "block"),
    ("H200", "gru", 1, 2, 528, 32, "warp"),
    ("H200", "gru", 1, 2, 529, 32, "block"),
    ("H200", "gru", 1, 2, 1 << 20, 31, "warp"),  # not a whole number of pairs
    ("H200", "gru", 1, 2, 1 << 31, 31, "steps"),  # more rows than a launch has blocks
    ("T4", "lstm", 0, 2, 1 << 20, 32, "warp"),
    ("A100", "lstm", 0, 4, 864, 32, "warp"),
    ("A100", "lstm", 0, 4, 865, 32, "block"),
    ("H200", "lstm", 0, 4, 528, 64, "warp"),
    ("H200", "lstm", 0, 4, 529, 64, "block"),
    ("H200", "lstm", 1, 4, 82, 96, "cluster"),  # of two rows
    ("H200", "lstm", 1, 4, 83, 96, "warp"),
    ("H200", "gru", 0, 4, 1 << 20, 66, "warp"),
    ("H200", "lstm", 0, 4, 249, 98, "grid"),
    ("A100", "lstm", 0, 4, 1, 64, "warp"),
    ("A100", "lstm", 0, 4, 433, 64, "block"),
    ("A100", "lstm", 0, 2, 1, 128, "block"),
    ("H200", "lstm", 0, 2, 8000, 252, "steps"),  # rows are not whole 16-byte vectors
    ("H200", "lstm", 0, 4, 8000, 252, "steps"),
    ("H200", "lstm", 0, 4, 1 << 20, 256, "warpgroup"),
    ("H200", "lstm", 0, 4, 128, 256, "grid"),
    ("H200", "lstm", 0, 4, 129, 256, "warpgroup"),
    ("H200", "gru", 0, 4, 32, 768, "grid"),
    ("H200", "gru", 0, 4, 33, 768, "warpgroup"),
    ("H200", "lltm", 0, 4, 33, 1024, "warpgroup"),
    ("H200", "lstm", 0, 4, 1024, 1024, "warpgroup"),
    ("H200", "lstm", 0, 4, 1025, 1024, "steps"),  # a ninth wave
    ("H200", "lstm", 0, 4, 2112, 88, "warp"),
    ("H200", "lstm", 0, 4, 2113, 88, "warpgroup"),
    ("H200", "lstm", 0, 4, 8000, 64, "block"),
    ("H200", "lstm", 1, 4, 8000, 256, "steps"),
    ("H200", "unbounded", 0, 4, 1024, 512, "steps"),
    ("H200", "unbounded", 0, 2, 1024, 512, "warpgroup"),
    ("H200-plain", "lstm", 0, 4, 8000, 256, "steps"),
    ("H200", "lstm", 1, 2, 8000, 256, "steps"),
    ("H200", "lstm", 1, 2, 39, 1024, "grid"),
    ("H200", "lstm", 1, 2, 40, 1024, "warpgroup"),
    ("H200", "gru", 1, 2, 512, 1024, "warpgroup"),
    ("H200", "gru", 1, 2, 513, 1024, "steps"),  # a third wave
    ("H200", "gru", 1, 2, 79, 512, "grid"),
    ("H200", "gru", 1, 2, 80, 512, "warpgroup"),
    ("H200", "gru", 1, 2, 32, 1536, "warpgroup"),
    ("H200", "lstm", 1, 2, 128, 1536, "steps"),  # W_h does not fit
    ("H200", "lltm", 1, 2, 256, 1020, "steps"),  # rows are not whole 16-byte vectors
    ("H200", "lltm", 1, 4, 32, 1024, "grid"),
    ("H200", "lltm", 1, 4, 33, 1024, "warpgroup"),
    ("H200", "lltm", 1, 4, 640, 1024, "warpgroup"),
    ("H200", "lltm", 1, 4, 641, 1024, "steps"),  # a sixth wave
    ("H200", "lltm", 1, 4, 96, 512, "grid"),
    ("H200", "gru", 1, 4, 97, 512, "warpgroup"),
    ("H200", "lstm", 1, 4, 768, 512, "warpgroup"),
    ("H200", "lstm", 1, 4, 769, 512, "steps"),  # a third wave
    ("H200", "gru", 1, 4, 1152, 512, "warpgroup"),
    ("H200", "gru", 1, 4, 1153, 512, "steps"),  # a fourth wave
    ("H200", "lstm", 1, 4, 4480, 256, "warpgroup"),
    ("H200", "lstm", 1, 4, 4481, 256, "steps"),  # a sixth wave
    ("H200", "lstm", 1, 4, 320, 256, "grid"),
    ("H200", "lstm", 1, 4, 321, 256, "warpgroup"),
    ("H200", "gru", 1, 4, 1280, 128, "grid"),
    ("H200", "gru", 1, 4, 1281, 128, "warpgroup"),
    ("H200", "unbounded", 1, 4, 384, 1024, "warpgroup"),
    ("H200", "gru", 1, 4, 4000, 96, "warp"),
    ("H200-plain", "lstm", 1, 2, 256, 1024, "steps"),
    ("H200", "gru", 0, 2, 256, 1032, "steps"),
    ("H200-slice", "lstm", 0, 2, 128, 256, "warpgroup"),
    ("H200-slice", "lstm", 0, 2, 128, 320, "steps"),  # W_h does not fit
    ("H200-plain", "lstm", 0, 2, 8000, 256, "steps"),
    ("B200", "lstm", 0, 2, 8000, 256, "steps"),
]


@pytest.mark.parametrize("name, cell, backward, width, batch, hidden, want", LAYERS_CHOSEN)
def test_choice_of_a_layer(name, cell, backward, width, batch, hidden, want, plan):
    ((kernel, *_),) = plan([(cell, *DEVICES[name], backward, width, batch, hidden, 0)])
    assert kernel == want


def test_sizes_for_every_variant(plan):
    """samples.VARIANT_SIZES reach each variant of a layer's kernels that an H200 ever runs."""

    def reached(sizes):
        questions = [
            (cell, *DEVICES["H200"], backward, width, batch, hidden, 1)
            for cell, backward, width in product(("lltm", "lstm", "gru"), (0, 1), (4, 2))
            for batch, hidden in sizes
        ]
        answers = plan(questions)
        of = [(q[0], *q[-5:-3], *a) for q, a in zip(questions, answers, strict=True)]
        return {variant for variant in of if variant[3] in ("warp", "block", "cluster", "grid")}

    some = [(size(10), size(11)) for _ in range(2000)] + [(size(10), size(8)) for _ in range(2000)]
    assert reached(VARIANT_SIZES) >= reached(some)


def test_sizes_for_every_tile(plan):
    """samples.TILE_SIZES reach every 16-bit tile, with every layout, that an H200 ever runs."""

    def reached(sizes):
        questions = [
            ("gemm", *DEVICES["H200"], 2, 2, 1, m, n, k, *layouts, 0, followed, 0, 0, 0, 1)
            for m, k, n, followed in sizes
            for layouts in product((0, 1), repeat=2)
        ]
        return {answer for answer in plan(questions) if answer[0] == "half_sm90"}

    some = [(size(13), size(13), size(13), *flags(1)) for _ in range(2000)]
    ours = reached([(*sizes, activation is not None) for *sizes, activation in TILE_SIZES])
    assert len(ours) == 20
    assert ours >= reached(some)


FLOAT = (4, 4, 1, 4096, 4096, 4096, 0, 0)
PRODUCTS = [  # device, product from its width to b's layout, out's layout, high, TF32 -> answer
    ("A100", FLOAT, 0, 0, 1, ("fp32_sm80", 80, 128 * KIB, 1, 1)),
    ("A10", FLOAT, 0, 0, 1, ("fp32_sm80", 80, 96 * KIB, 1, 1)),
    ("L4", FLOAT, 0, 0, 1, ("fp32_sm80", 80, 96 * KIB, 1, 1)),
    ("RTX5090", FLOAT, 0, 0, 1, ("fp32_sm80", 80, 96 * KIB, 1, 1)),
    ("B200", FLOAT, 0, 0, 1, ("fp32_sm80", 80, 128 * KIB, 1, 1)),
    ("H200", FLOAT, 0, 0, 1, ("fp32_sm90", 90, 211 * KIB, 2, 2)),
    ("H200", FLOAT, 1, 0, 1, ("fp32_sm80", 80, 128 * KIB, 1, 1)),
    ("A10", FLOAT, 0, 0, 0, ("library", 0, 0, 1, 1)),
    ("A10", FLOAT, 0, 1, 1, ("library", 0, 0, 1, 1)),
    ("T4", FLOAT, 0, 0, 1, ("library", 0, 0, 1, 1)),
    ("A10-old-code", FLOAT, 0, 0, 1, ("small", 0, 0, 1, 1)),
    # gemm_small counts k in 32 bits.
    ("A10-old-code", (4, 4, 1, 1, 1, 1 << 31, 0, 0), 0, 0, 1, ("library", 0, 0, 1, 1)),
    ("A10", (4, 4, 1, 1, 1, 1 << 31, 0, 0), 0, 0, 1, ("fp32_sm80", 80, 96 * KIB, 1, 1)),
]


@pytest.mark.parametrize("name, product, out_layout, high, tf32, want", PRODUCTS)
def test_choice_of_a_product(name, product, out_layout, high, tf32, want, plan):
    question = ("gemm", *DEVICES[name], *product, out_layout, 0, high, tf32, 0, 0)
    assert plan([question]) == [want]


@pytest.mark.parametrize(
    "shared_bytes, want", [(95, "small"), (96, "fp32_sm80"), (127, "fp32_sm80")]
)
def test_shared_memory_at_the_edge(shared_bytes, want, plan):
    device = DEVICES["A10"]._replace(shared_bytes=shared_bytes * KIB)
    ((kernel, _, needed, *_),) = plan([("gemm", *device, *FLOAT, 0, 0, 0, 1, 0, 0)])
    assert kernel == want
    assert needed <= shared_bytes * KIB


@pytest.mark.parametrize(
    "name, n, k, want",
    [
        ("H200", 640, 640, 1),
        ("H200", 580, 580, 1),
        ("H200", 4096, 2048, 1),
        ("H200", 320, 320, 0),
        ("H200", 0, 64, 0),
        ("H200-plain", 4096, 4096, 0),
        ("A100", 4096, 4096, 0),
    ],
)
def test_weights_worth_packing(name, n, k, want, plan):
    assert plan([("packs", *DEVICES[name], n, k)]) == [(str(want),)]


@pytest.mark.parametrize(
    ("model", "other", "same"), [(5, 5, 1), (5, 6, 0), (0, 5, 1), (-7, -7, 1), (-7, 7, 0)]
)
def test_costs_are_of_a_model(model, other, same, plan):
    """GPUs of the same numbers may differ; 0 is of no known model, as in explain."""
    for device in DEVICES.values():
        assert plan([("given", *device, model, other)]) == [(str(same),)]


def dimension(size, kernel, stride, padding, dilation):
    """Of a convolution: input, output, kernel, stride, padding and dilation."""
    room = size + 2 * padding - dilation * (kernel - 1) - 1
    return (size, room // stride + 1, kernel, stride, padding, dilation) if room >= 0 else None


def drawn(largest):
    while True:
        sizes = (
            int(torch.randint(*bounds, ())) for bounds in zip((1, 1, 1, 0, 1), largest, strict=True)
        )
        if found := dimension(*sizes):
            return found


def reads(dimension):
    """Points of the input, outputs that read them, and with which tap."""
    size, outputs, kernel, stride, padding, dilation = dimension
    for output, tap in product(range(outputs), range(kernel)):
        point = output * stride - padding + tap * dilation
        if 0 <= point < size:
            yield point, output, tap


def assert_windows_as_defined(plan, high, wide, grads_input):
    sums = {i: [] for i in range(high[0] * wide[0] if grads_input else high[1] * wide[1])}
    for (y, p, r), (x, q, s) in product(reads(high), reads(wide)):
        point, output, tap = y * wide[0] + x, p * wide[1] + q, r * wide[2] + s
        if grads_input:  # by the weight turned around
            sums[point].append((output, high[2] * wide[2] - 1 - tap))
        else:
            sums[output].append((point, tap))
    ((_, *answer),) = plan([("windows", *DEVICES["H200"], grads_input, *high, *wide)])
    for first, last, offset in (answer[:3], answer[3:6]):  # what TMA's instructions can hold
        assert -128 <= first < 128
        assert -128 <= last < 128
        assert 0 <= offset < 256
    found, rest = {}, iter(answer[6:])
    for result in rest:
        pairs = [(next(rest), next(rest)) for _ in range(next(rest))]
        if result >= 0:
            assert result not in found
            found[result] = sorted(pair for pair in pairs if pair[0] >= 0)
    assert found == {i: sorted(pairs) for i, pairs in sums.items()}


@pytest.mark.parametrize("grads_input", [False, True])
@pytest.mark.parametrize(
    ("high", "wide"),
    [
        ((56, 3, 2, 1, 1), (56, 3, 2, 1, 1)),
        ((12, 4, 4, 0, 1), (12, 4, 4, 0, 1)),  # patches
        ((11, 2, 2, 0, 1), (9, 2, 2, 0, 1)),  # and points that no window reads
        ((1, 1, 1, 0, 1), (400, 10, 5, 0, 1)),
        ((13, 2, 5, 0, 1), (14, 1, 3, 0, 1)),  # classes without taps
        ((15, 3, 4, 2, 2), (17, 4, 6, 3, 4)),  # taps in every other class
        ((2, 3, 7, 4, 2), (3, 5, 8, 9, 1)),  # fewer points than classes
    ],
)
def test_windows_of_convolutions(high, wide, grads_input, plan):
    assert_windows_as_defined(plan, dimension(*high), dimension(*wide), grads_input)


@pytest.mark.slow
@pytest.mark.parametrize("grads_input", [False, True])
def test_windows_of_random_convolutions(grads_input, plan):
    for _ in range(100):
        both = [drawn((16, 6, 9, 5, 5)) for _ in range(2)]
        assert_windows_as_defined(plan, *both, grads_input)
    for stride in range(1, 9):  # up to the longest reach and padding that the kernels support
        for _ in range(10):
            long = drawn((300, 130 - stride, 2, 128, 2))
            room = (128 - stride) // max(1, long[2] - 1)
            dilation = int(torch.randint(1, max(1, room) + 1, ()))
            if wide := dimension(long[0], long[2], stride, long[4], dilation):
                assert_windows_as_defined(plan, dimension(3, 2, 2, 1, 1), wide, grads_input)


FORWARD, GRAD_INPUT, GRAD_WEIGHT = range(3)  # passes


def convolution(name, grad_of, images, channels, outputs, size, *kernel, last=False):
    """A question about a square image: kernel, stride, padding and dilation."""
    both = dimension(size, *kernel) * 2
    return ("convolution", *DEVICES[name], grad_of, images, channels, outputs, last, *both)


CONVOLUTIONS = [  # device, pass, images, channels, outputs, size, kernel, stride, padding, dilation
    ("H200", FORWARD, 64, 256, 256, 14, 3, 1, 1, 1, "ours"),
    ("H200", GRAD_INPUT, 64, 256, 256, 14, 3, 1, 1, 1, "ours"),
    ("H200", GRAD_WEIGHT, 64, 256, 256, 14, 3, 1, 1, 1, "as_fast"),
    ("H200", GRAD_WEIGHT, 64, 64, 64, 56, 3, 1, 1, 1, "ours"),
    ("H200", GRAD_INPUT, 16, 256, 256, 64, 9, 9, 0, 1, "as_fast"),  # a stride beyond TMA's
    ("H200", GRAD_WEIGHT, 64, 20, 96, 112, 11, 2, 5, 1, "memory"),  # 20 channels count as 64
    ("H200", GRAD_WEIGHT, 64, 64, 96, 112, 11, 2, 5, 1, "ours"),
    ("H200", FORWARD, 1, 16, 16, 14, 3, 1, 1, 1, "as_fast"),
    ("H200", FORWARD, 64, 64, 256, 56, 1, 1, 0, 1, "ours"),  # points: cuDNN is slow at few channels
    ("H200", FORWARD, 64, 256, 64, 56, 1, 1, 0, 1, "as_fast"),
    ("H200", GRAD_INPUT, 64, 256, 64, 56, 1, 1, 0, 1, "ours"),
    ("H200", GRAD_INPUT, 64, 64, 256, 56, 1, 1, 0, 1, "as_fast"),
    ("H200", GRAD_WEIGHT, 64, 64, 64, 56, 1, 1, 0, 1, "ours"),
    ("H200", GRAD_WEIGHT, 64, 256, 64, 56, 1, 1, 0, 1, "ours"),
    ("H200", FORWARD, 64, 64, 64, 56, 1, 1, 0, 1, "as_fast"),
    ("H200", GRAD_WEIGHT, 64, 16, 16, 56, 1, 1, 0, 1, "as_fast"),
    ("H200-slice", FORWARD, 64, 256, 256, 14, 3, 1, 1, 1, "as_fast"),
    ("H200-plain", FORWARD, 64, 256, 256, 14, 3, 1, 1, 1, "as_fast"),
    ("A100", FORWARD, 64, 256, 256, 14, 3, 1, 1, 1, "as_fast"),
    ("B200", FORWARD, 64, 256, 256, 14, 3, 1, 1, 1, "as_fast"),
]


@pytest.mark.parametrize(
    ("device", "grad_of", "images", "channels", "outputs", "size", "kernel", "stride", "padding",
     "dilation", "want"), CONVOLUTIONS,
)  # fmt: skip
def test_choice_of_a_convolution(
    device, grad_of, images, channels, outputs, size, kernel, stride, padding, dilation, want, plan
):
    sizes = (images, channels, outputs, size, kernel, stride, padding, dilation)
    ((choice, *_),) = plan([convolution(device, grad_of, *sizes)])
    assert choice == want


def test_a_convolution_takes_no_more_memory_than_three_times_its_tensors(plan):
    questions, tensors = [], []
    while len(questions) < 4000:
        images, channels, outputs = size(12), size(11), size(11)
        side, kernel, stride = size(9), *(int(x) for x in torch.randint(1, 9, (2,)))
        if not (both := dimension(side, kernel, stride, kernel // 2, 1)):
            continue
        grad_of = int(torch.randint(3, ()))
        questions.append(
            convolution(
                "H200", grad_of, images, channels, outputs, side, *both[2:], last=flags(1)[0]
            )
        )
        planes = images * channels * side**2 + images * outputs * both[1] ** 2
        tensors.append(4 * (planes + channels * outputs * kernel**2))
    ours = 0
    for (choice, slices, bytes_), tensor, question in zip(
        plan(questions), tensors, questions, strict=True
    ):
        assert slices >= 1
        assert slices == 1 or question[8] == GRAD_WEIGHT
        if choice != "as_fast":
            assert (choice == "ours") == (bytes_ <= 3 * tensor), question
        ours += choice == "ours"
    assert ours > 100


LAST, PLANES, ROWS = range(3)  # layouts of depthwise convolutions
# 9.0 with an H200's SMs, whose depthwise convolutions nobody has timed.
DEPTHWISE_DEVICES = DEVICES | {"H100": DEVICES["H200"]._replace(l2_bytes=50 * MIB)}


class Depthwise(NamedTuple):
    """The answer to a question about one that a kernel fits."""

    choice: str
    layout: int
    size: int
    stride: int
    slices: int
    items: int
    workers: int
    terms: int
    workspace: int
    ours_ns: int
    torch_ns: int


def depthwise(device, images, channels, last, *both):
    """A question: ``both`` are dimensions, of which a single one is the width."""
    row = dimension(1, 1, both[-1][3], 0, 1)
    high, wide = both if len(both) == 2 else (row, *both)
    return ("depthwise", *device, images, channels, last, *high, *wide)


def padded(kernel):
    return kernel // 2 if kernel % 2 else kernel - 1


DEPTHWISE = [  # device, images, channels, sizes, kernel, stride, last; tile, slices on an H200
    # ConvNeXt's
    ("H200 H100 A100 L4 B200", 64, 96, (56, 56), 7, 1, 1, (LAST, 7, 1, 132)),
    ("H200 H100 A100 L4 B200", 64, 96, (56, 56), 7, 1, 0, (PLANES, 7, 1, 11)),
    ("H200 H100 A100 L4 B200", 64, 768, (7, 7), 7, 1, 1, (LAST, 7, 1, 16)),
    ("H200 H100 A100 L4 B200", 64, 768, (7, 7), 7, 1, 0, (PLANES, 7, 1, 1)),
    # MobileNet's: cuDNN is good with the channels last
    ("", 64, 144, (56, 56), 3, 1, 1, (LAST, 3, 1, 79)),
    ("H200 H100 A100 L4 B200", 64, 144, (56, 56), 3, 1, 0, (PLANES, 3, 1, 14)),
    ("H200", 64, 384, (14, 14), 3, 1, 1, (LAST, 3, 1, 33)),
    ("H200", 64, 96, (112, 112), 3, 2, 1, (LAST, 3, 2, 132)),
    ("H200", 64, 96, (112, 112), 3, 2, 0, (PLANES, 3, 2, 11)),
    # EfficientNet's
    ("H200", 64, 240, (28, 28), 5, 1, 1, (LAST, 5, 1, 66)),
    ("H200 H100 A100 L4 B200", 64, 240, (28, 28), 5, 1, 0, (PLANES, 5, 1, 3)),
    ("H200", 64, 144, (56, 56), 5, 2, 1, (LAST, 5, 2, 105)),
    ("H200 H100 A100 L4 B200", 64, 144, (56, 56), 5, 2, 0, (PLANES, 5, 2, 3)),
    # Conformer's, Mamba's
    ("H200 H100 A100 L4 B200", 32, 144, (800,), 31, 1, 0, (ROWS, 31, 1, 3)),
    ("H200", 8, 1536, (2048,), 4, 1, 0, (ROWS, 7, 1, 1)),
    # few points; a kernel of 6 x 6, which counts as 7 x 7
    ("", 2, 16, (7, 7), 7, 1, 0, (PLANES, 7, 1, 1)),
    ("H200", 64, 96, (50, 50), 6, 1, 1, (LAST, 7, 1, 132)),
]


@pytest.mark.parametrize(
    ("takers", "images", "channels", "sizes", "kernel", "stride", "last", "tile"), DEPTHWISE
)
def test_choice_of_a_depthwise_gradient(
    takers, images, channels, sizes, kernel, stride, last, tile, plan
):
    both = [dimension(size, kernel, stride, padded(kernel), 1) for size in sizes]
    names = ("H200", "H100", "A100", "L4", "B200")
    devices = [DEPTHWISE_DEVICES[name] for name in names]
    answers = [
        Depthwise(*answer)
        for answer in plan([depthwise(device, images, channels, last, *both) for device in devices])
    ]
    assert answers[0][1:5] == tile
    taken = [name for name, a in zip(names, answers, strict=True) if a.choice == "ours"]
    assert taken == takers.split()


@pytest.mark.parametrize(
    ("channels", "last", "both"),
    [
        (64, 0, [(56, 8, 1, 3, 1)] * 2),  # larger kernels
        (64, 1, [(56, 3, 1, 1, 1), (56, 9, 1, 4, 1)]),
        (64, 0, [(4000, 32, 1, 0, 1)]),
        (64, 0, [(56, 7, 3, 3, 1)] * 2),  # strides
        (64, 0, [(56, 7, 1, 3, 1), (56, 7, 2, 3, 1)]),
        (64, 0, [(560, 7, 1, 128, 1)] * 2),  # padding
        (1 << 16, 0, [(56, 7, 1, 3, 1)] * 2),  # channels
    ],
)
def test_depthwise_gradients_that_no_kernel_fits(channels, last, both, plan):
    sizes = [dimension(*one) for one in both]
    assert plan([depthwise(DEVICES["H200"], 64, channels, last, *sizes)]) == [("as_fast",)]


def test_slices_and_sums_of_random_depthwise_gradients(plan):
    """No slice is without work, no thread sums more than 2048 terms unless one item has more, the
    workspace holds all slices, and nothing is taken that by its costs is slower, or on a GPU that
    nobody timed less than twice as fast."""
    questions, facts = [], []
    while len(questions) < 4000:
        name, device = list(DEPTHWISE_DEVICES.items())[len(questions) % len(DEPTHWISE_DEVICES)]
        rank = int(torch.randint(1, 3, ()))
        kernel = int(torch.randint(1, 8 if rank == 2 else 32, ()))
        stride = int(torch.randint(1, 3, ()))
        last = rank == 2 and flags(1)[0]
        images, channels = size(12), size(11)
        both = [dimension(size(10), kernel, stride, padded(kernel), 1) for _ in range(rank)]
        if images * max(1, *(one[0] for one in both if one)) ** rank > 1 << 28 or None in both:
            continue
        questions.append(depthwise(device, images, channels, last, *both))
        facts.append((name, channels, kernel**rank))
    taken = {True: 0, False: 0}
    for answer, question, (name, channels, taps) in zip(
        plan(questions), questions, facts, strict=True
    ):
        found = Depthwise(*answer)
        timed = name.startswith("H200") and name != "H200-slice"
        assert 1 <= found.slices <= min(math.ceil(found.items / found.workers), 65535), question
        of_slice = math.ceil(found.items / found.slices)
        of_sum = math.ceil(of_slice / found.workers) * found.terms
        assert of_sum <= max(2048, found.terms), question
        assert found.workspace == found.slices * taps * channels * 4
        margin = 1.1 if timed else 2
        assert found.layout == ROWS or found.size**2 >= taps
        gains = margin * found.ours_ns / found.torch_ns
        assert (found.choice == "ours") == (gains < 1) or abs(gains - 1) < 1e-3, question
        taken[timed] += found.choice == "ours"
    assert min(taken.values()) > 100


class Filter(NamedTuple):
    """The same for one of the two other passes."""

    choice: str
    layout: int
    size: int
    up: int
    down: int
    height: int
    width: int
    groups: int
    tiles: int
    strips: int
    rows: int
    images: int
    items: int
    slices: int
    ours_ns: int
    torch_ns: int


FORWARD, GRAD_INPUT = range(2)
# Device, pass, images, channels, size, kernel, stride, dilation, last; tile.
FILTERS = [
    ("H200 H100 A100 L4 B200", FORWARD, 64, 96, (56, 56), 7, 1, 1, 0, (PLANES, 7, 1, 1)),
    ("H200 H100 A100 L4 B200", GRAD_INPUT, 64, 768, (7, 7), 7, 1, 1, 0, (PLANES, 7, 1, 1)),
    ("H200 H100 A100 L4 B200", GRAD_INPUT, 64, 96, (112, 112), 3, 2, 1, 0, (PLANES, 3, 2, 1)),
    ("", FORWARD, 64, 96, (112, 112), 3, 2, 1, 1, (LAST, 3, 1, 2)),
    # As fast in torch at any size, with the channels last.
    ("", FORWARD, 64, 144, (56, 56), 3, 1, 1, 1, (LAST, 3, 1, 1)),
    ("", GRAD_INPUT, 256, 288, (112, 112), 3, 1, 1, 1, (LAST, 3, 1, 1)),
    ("H200 H100 A100 L4 B200", FORWARD, 32, 144, (800,), 31, 1, 1, 0, (ROWS, 31, 1, 1)),
    ("", FORWARD, 2, 16, (7, 7), 7, 1, 1, 0, (PLANES, 7, 1, 1)),
]


def filtered(device, pass_, images, channels, last, *both):
    _, *rest = depthwise(device, images, channels, last, *both)
    return ("filter", *rest[: len(device)], pass_, *rest[len(device) :])


@pytest.mark.parametrize(
    (
        "takers",
        "pass_",
        "images",
        "channels",
        "sizes",
        "kernel",
        "stride",
        "dilation",
        "last",
        "tile",
    ),
    FILTERS,
)
def test_choice_of_a_depthwise_filter(
    takers, pass_, images, channels, sizes, kernel, stride, dilation, last, tile, plan
):
    both = [dimension(size, kernel, stride, padded(kernel), dilation) for size in sizes]
    names = ("H200", "H100", "A100", "L4", "B200")
    devices = [DEPTHWISE_DEVICES[name] for name in names]
    answers = [
        Filter(*answer)
        for answer in plan(
            [filtered(device, pass_, images, channels, last, *both) for device in devices]
        )
    ]
    assert answers[0][1:5] == tile
    taken = [name for name, a in zip(names, answers, strict=True) if a.choice == "ours"]
    assert taken == takers.split()


def test_depthwise_filters_that_no_kernel_fits(plan):
    for one in ((56, 8, 1, 3, 1), (56, 7, 3, 3, 1), (56, 3, 2, 0, 2)):
        question = filtered(DEVICES["H200"], FORWARD, 64, 64, 0, *[dimension(*one)] * 2)
        assert plan([question]) == [("as_fast",)]


def test_splits_of_random_depthwise_filters(plan):
    """Items cover all images, rows and columns; no slice is without work; nothing is taken that by
    its costs gains too little."""
    questions, facts = [], []
    while len(questions) < 4000:
        name, device = list(DEPTHWISE_DEVICES.items())[len(questions) % len(DEPTHWISE_DEVICES)]
        rank = int(torch.randint(1, 3, ()))
        kernel = int(torch.randint(1, 8 if rank == 2 else 32, ()))
        stride = int(torch.randint(1, 3, ()))
        dilation = 1 if stride > 1 else int(torch.randint(1, 4, ()))
        last = rank == 2 and flags(1)[0]
        images, channels = size(12), size(11)
        both = [dimension(size(10), kernel, stride, padded(kernel), dilation) for _ in range(rank)]
        if None in both or images * math.prod(one[0] for one in both) > 1 << 28:
            continue
        pass_ = len(questions) // len(DEPTHWISE_DEVICES) % 2
        questions.append(filtered(device, pass_, images, channels, last, *both))
        facts.append((name, images, rank, 1 if kernel == 1 else dilation))
    taken = {True: 0, False: 0}
    for answer, question, (name, images, rank, dilation) in zip(
        plan(questions), questions, facts, strict=True
    ):
        found = Filter(*answer)
        images = 1 if found.layout == ROWS else images
        columns = 4 * found.groups * found.tiles
        assert found.width <= columns < found.width + 4 * max(found.tiles, 2), question
        assert found.rows * (found.strips - 1) < found.height <= found.rows * found.strips, question
        of_images = math.ceil(images / found.images) * dilation**rank
        assert found.items == of_images * found.strips * found.tiles, question
        assert 1 <= found.slices <= min(math.ceil(found.items / 4), 65535), question
        timed = name.startswith("H200") and name != "H200-slice"
        gains = (1.1 if timed else 2) * found.ours_ns / found.torch_ns
        assert (found.choice == "ours") == (gains < 1) or abs(gains - 1) < 1e-3, question
        taken[timed] += found.choice == "ours"
    assert min(taken.values()) > 100


PLANNED = {  # kernels that request shared memory at launch; others have up to 48 KiB, static
    "gemm_small_kernel": "at most 32 KiB",
    "fp32_skinny_kernel": "fp32_skinny::kNeeds",
    "fp32_sm80_kernel": "fp32_sm80::needs",
    "fp32_narrow_kernel": "fp32_narrow::kNeeds",
    "fp32_short_kernel": "fp32_short::kNeeds",
    "convolution_kernel": "fp32_sm90::kNeeds",
    "depthwise_filter_kernel": "at most 48 KiB, checked when it is compiled",
    "depthwise_rows_kernel": "at most 48 KiB, checked when it is compiled",
    "fp32_product_kernel": "fp32_sm90::kNeeds",
    "split_first_kernel": "less than fp32_sm90::kNeeds",
    "half_product_kernel": "half_sm90::kNeeds",
    "attention_kernel": "at most 227 KiB, checked when it is compiled",
    "grid_forward_kernel": "grid_shared_bytes",
    "grid_backward_kernel": "grid_shared_bytes",
    "warpgroup_forward_kernel": "WarpgroupPlan::shared_bytes",
    "warpgroup_backward_kernel": "WarpgroupBackwardPlan::shared_bytes",
    "cluster_forward_kernel": "ClusterPlan::spread_bytes",
    "cluster_backward_kernel": "ClusterPlan::spread_bytes",
}


def test_no_kernel_is_forgotten():
    """All kernels with dynamic shared memory, or that run layers in clusters, are in the list."""
    found = set()
    for path in (ROOT / "kernels").rglob("*.cu*"):
        for kernel in path.read_text().split("__global__")[1:]:
            name = re.search(r"(\w+_kernel)\(", kernel)[1]
            if "extern __shared__" in kernel or "cluster_nctarank()" in kernel:
                found.add(name)
    assert found == set(PLANNED)
