"""Every op compared with its peers, in the same run on the same data.

    python benchmarks/bench.py [FAMILY ...] [--output results.json]

Times are medians of alternating runs. Shares are relative to a ceiling measured in this run: a
copy_ or fill_ of 1 GiB, or a cuBLAS product at 8192 cubed. Only ``cpu``, ``cpu-layers`` and
``overhead`` run without a GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from cpu_cases import cpu, cpu_layers
from measure import (
    Case,
    calls_in,
    ceilings,
    gpu_times,
    name_of,
    no_grad,
    row,
    save,
    show,
    wall_times,
    with_tf32,
    without_tf32,
)

import my_ops
from my_ops import reference

GIB = 1 << 30


def elementwise() -> Iterator[Case]:
    compiled = {
        name: torch.compile(getattr(reference, name)) for name in ("custom_add", "d_sigmoid")
    }
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int8):
        floating = dtype.is_floating_point
        n = GIB // dtype.itemsize
        x = torch.randn(n, device="cuda").to(dtype) if floating else None
        if x is None:
            x = torch.randint(-128, 127, (n,), dtype=dtype, device="cuda")
        y = x.flip(0)
        kind = name_of(dtype)
        copy = "copy GB/s"
        yield Case(
            f"add_one {kind} 1 GiB",
            lambda x=x: my_ops.add_one(x),
            {"eager": lambda x=x: x + 1},
            bytes=2 * GIB,
            ceiling=copy,
        )
        peers = {"eager": lambda x=x, y=y: x + y + 1}
        if dtype == torch.float32:
            peers["compile"] = lambda x=x, y=y: compiled["custom_add"](x, y)
        yield Case(
            f"custom_add {kind} 1 GiB",
            lambda x=x, y=y: my_ops.custom_add(x, y),
            peers,
            bytes=3 * GIB,
            ceiling=copy,
        )
        if not floating:
            continue
        peers = {"eager": lambda x=x: torch.sigmoid(x) * (1 - torch.sigmoid(x))}
        if dtype == torch.float32:
            peers["compile"] = lambda x=x: compiled["d_sigmoid"](x)
        yield Case(
            f"d_sigmoid {kind} 1 GiB",
            lambda x=x: my_ops.d_sigmoid(x),
            peers,
            bytes=2 * GIB,
            ceiling=copy,
        )
        yield Case(
            f"d_sigmoid_backward {kind} 1 GiB",
            lambda x=x, y=y: torch.ops.my_ops.d_sigmoid_backward(y, x),
            bytes=3 * GIB,
            ceiling=copy,
        )
        yield Case(
            f"round_ste {kind} 1 GiB",
            lambda x=x: my_ops.round_ste(x),
            {"torch.round": lambda x=x: torch.round(x)},
            bytes=2 * GIB,
            ceiling=copy,
        )
    bias = torch.randn(16384, device="cuda")
    matrix = torch.randn(16384, 16384, device="cuda")
    yield Case(
        "custom_add float32 16384^2 + (16384,)",
        lambda: my_ops.custom_add(matrix, bias),
        {"eager": lambda: matrix + bias + 1},
        bytes=2 * GIB,
        ceiling="copy GB/s",
    )
    shape = (16384, 16384)
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        options = {"dtype": dtype, "device": "cuda"}
        yield Case(
            f"fill_index {name_of(dtype)} 16384^2",
            lambda options=options: my_ops.fill_index(*shape, **options),
            {"eager": lambda options=options: reference.fill_index(*shape, **options)},
            bytes=shape[0] * shape[1] * dtype.itemsize,
            ceiling="fill GB/s",
        )


GEMM_SIZES = [
    *((size, size, size) for size in (64, 128, 256, 640, 1024, 2048, 4096, 8192)),
    (1000, 1001, 1003),
    (4097, 4097, 4097),
    *((m, 4096, 4096) for m in (1, 16, 64)),
    (64, 64, 65536),
]


def product_of(name: str, a: torch.Tensor, b: torch.Tensor, ceiling: str = "") -> Case:
    (m, k), n = a.shape, b.shape[1]
    out = torch.empty(m, n, device="cuda", dtype=a.dtype)
    return Case(
        name,
        lambda: my_ops.gemm(a, b, out=out),
        {"cuBLAS": lambda: torch.mm(a, b, out=out)},
        flops=2 * m * n * k,
        ceiling=ceiling,
    )


def gemm() -> Iterator[Case]:
    for dtype, (m, n, k) in product((torch.float32, torch.bfloat16, torch.float16), GEMM_SIZES):
        a = torch.randn(m, k, device="cuda", dtype=dtype)
        b = torch.randn(k, n, device="cuda", dtype=dtype)
        name = name_of(dtype)
        yield product_of(f"gemm {name} {m}x{n}x{k}", a, b, f"{name} TFLOP/s")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for size, layout in product((4096, 8192), ("NT", "TN", "TT")):
            a, b = (torch.randn(size, size, device="cuda", dtype=dtype) for _ in range(2))
            a, b = (t.mT if letter == "T" else t for t, letter in zip((a, b), layout, strict=True))
            name = name_of(dtype)
            case = f"gemm {name} {size}x{size}x{size} {layout}"
            yield product_of(case, a, b, f"{name} TFLOP/s")
    x, w = (torch.randn(4096, 4096, device="cuda") for _ in range(2))
    packed = my_ops.prepack(w)
    yield Case(
        "linear float32 prepacked 4096x4096x4096",
        lambda: my_ops.linear(x, packed),
        {"cuBLAS": lambda: F.linear(x, w)},
        flops=2 * 4096**3,
        ceiling="float32 TFLOP/s",
    )
    for size in (4096, 8192):
        a, b = (torch.randn(size, size, device="cuda") for _ in range(2))
        a = torch.ldexp(a, torch.randint(-30, 31, (size, size), device="cuda"))
        out = torch.empty_like(a)
        yield Case(
            f"gemm float32 full range {size}x{size}x{size}",
            lambda a=a, b=b, out=out: my_ops.gemm(a, b, out=out),
            {"cuBLAS": lambda a=a, b=b, out=out: torch.mm(a, b, out=out)},
            flops=2 * size**3,
            ceiling="float32 TFLOP/s",
        )
    for size in (640, 1024, 2048, 4096, 8192):
        a, b = (torch.randn(size, size, device="cuda") for _ in range(2))
        out = torch.empty_like(a)
        yield Case(
            f"gemm float32 high {size}x{size}x{size}",
            lambda a=a, b=b, out=out: my_ops.gemm(a, b, out=out, precision="high"),
            {"cuBLAS TF32": with_tf32(lambda a=a, b=b, out=out: torch.mm(a, b, out=out))},
            flops=2 * size**3,
        )
    for m, n, k in ((512, 512, 512), (64, 4096, 4096), (1, 4096, 4096), (8192, 8192, 90)):
        a, b = torch.randn(m, k, device="cuda"), torch.randn(k, n, device="cuda")
        out = torch.empty(m, n, device="cuda")
        yield Case(
            f"gemm float32 highest beside TF32 {m}x{n}x{k}",
            with_tf32(lambda a=a, b=b, out=out: my_ops.gemm(a, b, out=out, precision="highest")),
            {"cuBLAS": lambda a=a, b=b, out=out: torch.mm(a, b, out=out)},
            flops=2 * m * n * k,
            ceiling="float32 TFLOP/s",
        )
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(8192, 4096, device="cuda", dtype=dtype)
        w = torch.randn(4096, 4096, device="cuda", dtype=dtype) / 64
        b = torch.randn(4096, device="cuda", dtype=dtype)
        yield Case(
            f"linear + gelu_tanh {name_of(dtype)} 8192x4096x4096",
            lambda x=x, w=w, b=b: my_ops.linear(x, w, b, activation="gelu_tanh"),
            {
                "eager": lambda x=x, w=w, b=b: F.gelu(F.linear(x, w, b), approximate="tanh"),
                "cuBLASLt": lambda x=x, w=w, b=b: torch.ops.aten._addmm_activation(
                    b, x, w.t(), use_gelu=True
                ),
            },
            flops=2 * 8192 * 4096 * 4096,
            ceiling=f"{name_of(dtype)} TFLOP/s",
        )
        for activation in ("relu", "silu", "gelu"):
            yield Case(
                f"linear + {activation} {name_of(dtype)} 8192x4096x4096",
                lambda x=x, w=w, b=b, name=activation: my_ops.linear(x, w, b, activation=name),
                {
                    "eager": lambda x=x, w=w, b=b, name=activation: getattr(F, name)(
                        F.linear(x, w, b)
                    )
                },
                flops=2 * 8192 * 4096 * 4096,
                ceiling=f"{name_of(dtype)} TFLOP/s",
            )
        r = torch.randn(8192, 4096, device="cuda", dtype=dtype)
        yield Case(
            f"linear + silu + residual {name_of(dtype)} 8192x4096x4096",
            lambda x=x, w=w, b=b, r=r: my_ops.linear(x, w, b, activation="silu", residual=r),
            {"eager": lambda x=x, w=w, b=b, r=r: F.silu(F.linear(x, w, b)) + r},
            flops=2 * 8192 * 4096 * 4096,
            ceiling=f"{name_of(dtype)} TFLOP/s",
        )
        if dtype == torch.bfloat16:
            small = [x[:256, :1024].contiguous(), w[:1024, :1024].contiguous(), b[:1024]]
            yield Case(
                "linear + silu bfloat16 256x1024x1024",
                lambda small=small: my_ops.linear(*small, activation="silu"),
                {"eager": lambda small=small: F.silu(F.linear(*small))},
                flops=2 * 256 * 1024 * 1024,
                ceiling=f"{name_of(dtype)} TFLOP/s",
            )
            vocabulary = torch.randn(50257, 768, device="cuda", dtype=dtype)  # GPT-2's
            hidden = x[:, :768].contiguous()
            yield Case(
                "linear bfloat16 8192x50257x768",
                lambda x=hidden, w=vocabulary: my_ops.linear(x, w),
                {"eager": lambda x=hidden, w=vocabulary: F.linear(x, w)},
                flops=2 * 8192 * 50257 * 768,
                ceiling=f"{name_of(dtype)} TFLOP/s",
            )
        leaves = [t.clone().requires_grad_() for t in (x, w, b)]
        yield Case(
            f"linear {name_of(dtype)} 8192x4096x4096 forward + backward",
            lambda leaves=leaves, r=r: torch.autograd.grad(my_ops.linear(*leaves), leaves, r),
            {"eager": lambda leaves=leaves, r=r: torch.autograd.grad(F.linear(*leaves), leaves, r)},
            flops=6 * 8192 * 4096 * 4096,
            ceiling=f"{name_of(dtype)} TFLOP/s",
        )


def sweep_sizes() -> list[list[int]]:
    """m, n and k from 1 to 8192, spread evenly on a logarithmic scale, with any aspect ratio."""
    generator = torch.Generator().manual_seed(0)
    return torch.rand(200, 3, generator=generator).mul(13).exp2().round().int().tolist()


def sweep() -> Iterator[Case]:
    for dtype, (m, n, k) in product((torch.float32, torch.bfloat16), sweep_sizes()):
        a = torch.randn(m, k, device="cuda", dtype=dtype)
        b = torch.randn(k, n, device="cuda", dtype=dtype)
        yield product_of(f"{name_of(dtype)} {m}x{n}x{k}", a, b)


def lltm_weights(inputs: int, hidden: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    bound = hidden**-0.5
    weights = torch.empty(3 * hidden, hidden + inputs, device="cuda").uniform_(-bound, bound)
    bias = torch.empty(3 * hidden, device="cuda").uniform_(-bound, bound)
    return weights.to(dtype), bias.to(dtype)


LLTM_SIZES = [  # steps, batch, inputs and hidden
    (512, 16, 512),
    (512, 64, 1024),
    (512, 256, 1024),
    (1024, 1, 256),
    (128, 32, 128),
]


def lltm() -> Iterator[Case]:
    for steps, batch, size in LLTM_SIZES:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x = torch.randn(steps, batch, size, device="cuda", dtype=dtype)
            h = torch.zeros(batch, size, device="cuda", dtype=dtype)
            weights, bias = lltm_weights(size, size, dtype)
            lstm = torch.nn.LSTM(size, size, device="cuda", dtype=dtype)
            lstm.flatten_parameters()

            peers = {"cuDNN LSTM (4 gates, TF32)": no_grad(lambda lstm=lstm, x=x: lstm(x))}
            if dtype == torch.float32:
                peers["cuDNN LSTM (4 gates, no TF32)"] = without_tf32(
                    peers["cuDNN LSTM (4 gates, TF32)"]
                )
                peers["eager loop"] = no_grad(
                    lambda x=x, h=h, w=weights, b=bias: reference.lltm(x, h, h, w, b)
                )
            yield Case(
                f"lltm {name_of(dtype)} T{steps} B{batch} H{size} forward",
                no_grad(lambda x=x, h=h, w=weights, b=bias: my_ops.lltm(x, h, h, w, b)),
                peers,
                flops=12 * steps * batch * size * size,
            )
            x_ = x.clone().requires_grad_()
            weights_, bias_ = weights.clone().requires_grad_(), bias.clone().requires_grad_()

            def train(x: Any = x_, h: Any = h, w: Any = weights_, b: Any = bias_) -> None:
                my_ops.lltm(x, h, h, w, b)[0].backward(x.detach())

            def train_lstm(lstm: Any = lstm, x: Any = x_) -> None:
                lstm(x)[0].backward(x.detach())

            yield Case(
                f"lltm {name_of(dtype)} T{steps} B{batch} H{size} forward + backward",
                train,
                {"cuDNN LSTM (4 gates, TF32)": train_lstm},
                flops=36 * steps * batch * size * size,
            )
    for steps, batch, size in ((512, 16, 512), (512, 64, 1024)):
        x = torch.randn(steps, batch, size, device="cuda", dtype=torch.bfloat16)
        h = torch.zeros(batch, size, device="cuda", dtype=torch.bfloat16)
        weights, bias = lltm_weights(size, size, torch.bfloat16)
        lengths = torch.randint(1, steps + 1, (batch,), device="cuda")
        yield Case(
            f"lltm bfloat16 T{steps} B{batch} H{size} ragged, forward",
            no_grad(
                lambda x=x, h=h, w=weights, b=bias, n=lengths: my_ops.lltm(x, h, h, w, b, lengths=n)
            ),
            {"dense": no_grad(lambda x=x, h=h, w=weights, b=bias: my_ops.lltm(x, h, h, w, b))},
        )
    for batch, inputs, hidden in ((16, 32, 128), (64, 1024, 1024)):
        x = torch.randn(batch, inputs, device="cuda")
        h = torch.randn(batch, hidden, device="cuda")
        weights, bias = lltm_weights(inputs, hidden, torch.float32)
        yield Case(
            f"lltm_cell float32 B{batch} I{inputs} H{hidden} forward",
            lambda x=x, h=h, w=weights, b=bias: my_ops.lltm_cell(x, w, b, h, h),
            {"eager": lambda x=x, h=h, w=weights, b=bias: reference.lltm_cell(x, w, b, h, h)},
        )


def overhead(device: str) -> dict[str, dict[str, float]]:
    """Host microseconds per call on 8 elements."""
    x = torch.randn(8, device=device)
    leaf = torch.randn(8, device=device, requires_grad=True)
    forward = {
        "my_ops.round_ste": lambda: my_ops.round_ste(x),
        "torch.ops.my_ops.round_ste": lambda: torch.ops.my_ops.round_ste(x),
        "torch.round": lambda: torch.round(x),
    }
    recorded = {
        "my_ops.d_sigmoid": lambda: my_ops.d_sigmoid(leaf),
        "torch.sigmoid": lambda: torch.sigmoid(leaf),
    }
    ones = torch.ones(8, device=device)
    trained = {
        "my_ops.d_sigmoid": lambda: my_ops.d_sigmoid(leaf).backward(ones),
        "torch.sigmoid": lambda: torch.sigmoid(leaf).backward(ones),
    }

    def inference() -> dict[str, float]:
        with torch.inference_mode():
            return wall_times({f"{k} inference_mode": v for k, v in forward.items()})

    return {
        "no gradient": {**wall_times(forward), **inference()},
        "gradient recorded": wall_times(recorded),
        "forward and backward": wall_times(trained, calls=500),
    }


def main() -> None:
    families = {"elementwise": elementwise, "gemm": gemm, "sweep": sweep, "lltm": lltm}
    on_cpu = {"cpu": cpu, "cpu-layers": cpu_layers}
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("family", nargs="*", choices=[*families, *on_cpu, "overhead"])
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    arguments = parser.parse_args()
    chosen = arguments.family or [*families, "overhead"]

    sections: dict[str, Any] = {}
    if torch.cuda.is_available():
        limits = ceilings()
        sections["ceilings"] = {key: round(value, 1) for key, value in limits.items()}
        print(sections["ceilings"])
        for family in families:
            if family not in chosen:
                continue
            sections[family] = []
            for case in families[family]():
                times = gpu_times({"my_ops": case.ours, **case.others})
                sections[family].append(row(case, times, limits))
                show(sections[family][-1])
    for name, threads in product(on_cpu, (1, 2)):
        if name not in chosen:
            continue
        torch.set_num_threads(threads)
        sections[f"{name}, {threads} thread(s)"] = table = []
        for case in on_cpu[name]():
            calls = calls_in(case.ours, seconds=0.02)
            times = wall_times({"my_ops": case.ours, **case.others}, calls)
            table.append(row(case, times, {}))
            show(table[-1])
    if "overhead" in chosen:
        for device in ["cpu", "cuda"][: 1 + torch.cuda.is_available()]:
            sections[f"overhead {device}, us per call"] = table = overhead(device)
            for setting, times in table.items():
                for name, time_us in times.items():
                    table[setting][name] = round(time_us, 2)
                    print(f"{device} {setting:24} {name:44} {time_us:6.2f} us")
    if arguments.output:
        save(arguments.output, sections)


if __name__ == "__main__":
    main()
