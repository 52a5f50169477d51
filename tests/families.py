"""Small calls that together launch kernels of every family, for compute-sanitizer and the profiler:

python tests/families.py --part 1/4         every fourth of them, from the second on
python tests/families.py --only "gemm f"    those whose name holds this
python tests/families.py --without "TMA"    all but those
python tests/families.py --kernels FILE     also writes the names of the kernels that they launch

A call's name is printed before it starts. All that it computes is copied to the CPU, where a value
that no kernel wrote would be noticed; but not what TMA stores, which initcheck does not see.
"""

import argparse
import contextlib
import functools
from pathlib import Path

import torch
from samples import CELL, recurrent_inputs
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import my_ops

RECURRENT = [  # dtype, and steps, batch, inputs, hidden, for all cells
    *[("float32", (3, 3, 5, 97)), ("bfloat16", (2, 60, 5, 65)), ("float16", (2, 4, 5, 145))],
    *[("bfloat16", (3, 5, 5, 30)), ("float32", (2, 3, 5, 7))],  # warps
    *[("float32", (3, 133, 5, 33)), ("float32", (2, 265, 5, 90)), ("float16", (3, 3, 5, 51))],
    *[("bfloat16", (3, 140, 5, 34)), ("float32", (2, 530, 5, 34))],  # blocks
    *[("float32", (3, 3, 5, 300)), ("bfloat16", (2, 60, 5, 300))],  # grids
    *[("float64", (2, 3, 5, 7)), ("float32", (2, 2, 5, 1100))],  # a product per step
    *[("bfloat16", (2, 1040, 5, 136)), ("bfloat16", (1, 1040, 5, 136))],  # warpgroups
    *[
        ("float32", (3, 300, 5, 136)),
        ("float32", (2, 2100, 5, 136)),
        ("float32", (1, 2100, 5, 136)),
    ],
]
# m, k, n
SMALL = [("float32", 33, 5, 7), ("float32", 33, 40, 50), ("float64", 9, 30, 11)]
SMALL += [("bfloat16", 33, 67, 9)]
TENSOR_CORES = [(260, 300, 270, {}), (100, 2048, 104, {}), (64, 2300, 520, {"a": "transposed"})]
TENSOR_CORES += [(100, 2048, 104, {"a": "bfloat16"}), (260, 300, 270, {"a": "wide"})]
TENSOR_CORES += [(260, 300, 270, {"out": "strided"})]  # on the tensor cores of 8.0
TENSOR_CORES += [(64, 2300, 520, {"a": "transposed", "b": "transposed"})]
FEW_ROWS = [(5, 2563, 1000), (64, 8192, 64)]
NARROW = [(16384, 1032, 61), (4008, 8200, 60), (60, 8200, 4008)]  # in whole, and in slices of k
# Many rows and a short k: chunks of 64 and 128 columns, some parts of b streamed, and outputs that
# are computed again.
SHORT = [(33700, 160, 181), (16800, 132, 510), (16801, 252, 256), (50001, 128, 128)]
HALF = [(300, 67, 1001, "NN"), (300, 72, 1001, "NT"), (300, 67, 1001, "TT")]

LINEAR = [(300, 80, 304, "float32", True), (260, 300, 270, "float32", True)]
LINEAR += [(33, 40, 50, "float32", True), (260, 64, 136, "bfloat16", True)]
FEW_OUTPUTS = (24, 2000, 1000)  # cuBLAS's sums, and an epilogue
LINEAR += [(2800, 1024, 3072, "bfloat16", False), (*FEW_OUTPUTS, "bfloat16", False)]
# batch, heads, queries, keys, size, and what is added to the scores
ATTENTION = [(2, 32, 300, 330, 64, "nothing"), (2, 32, 301, 333, 48, "a bias")]
ATTENTION += [(2, 16, 520, 520, 128, "a causal mask")]
# batch, channels, outputs, space, kernel, dilation, and the data's range
WINDOWS = [(8, 256, 250, (40, 41), (3, 3), 2, ""), (4, 256, 60, (2001,), (5,), 1, "")]
WINDOWS += [(4, 256, 250, (2001,), (5,), 1, range_) for range_ in ("wide", "infinite")]
# batch, channels, space, kernel, stride
DEPTHWISE = [(16, 150, (57, 58), 3, 1), (16, 150, (58, 57), 5, 2), (16, 150, (33, 34), 7, 1)]
DEPTHWISE += [(16, 150, (5001,), 31, 1), (16, 150, (9003,), 7, 2)]
BY_TMA, READS_TMA = "stored by TMA", "reads what TMA stored for cuBLAS"


def cases(device):
    def drawn(*shape, dtype="float32"):
        return torch.randn(shape).to(device, getattr(torch, dtype))

    def tensor_cores(m, k, n, how):
        a, b, out = drawn(m, k), drawn(k, n), drawn(m, n)
        if how.get("b") == "transposed":
            b = drawn(n, k).mT
        if how.get("a") == "transposed":
            a = drawn(k, m).mT
        elif how.get("a") == "bfloat16":
            a = a.bfloat16()
        elif how.get("a") == "wide":  # more powers of two than fp16 has
            a *= torch.exp2(torch.randint(-60, 60, (m, 1))).to(device)
        elif how.get("out") == "strided":
            out = drawn(m, 2 * n)[:, ::2]
        my_ops.gemm(a, b, out=out, precision="highest")
        return out

    def epilogue(m, k, n, dtype, residual, **how):
        x, w, bias, r = (drawn(*s, dtype=dtype) for s in ((m, k), (n, k), (n,), (m, n)))
        how["residual"] = r if residual else None
        return my_ops.linear(x, w, bias, activation="silu", **how)

    def half(m, k, n, layout):
        a = drawn(k, m, dtype="bfloat16").mT if layout[0] == "T" else drawn(m, k, dtype="bfloat16")
        b = drawn(n, k, dtype="bfloat16").mT if layout[1] == "T" else drawn(k, n, dtype="bfloat16")
        return my_ops.gemm(a, b)

    def product(m, k, n, dtype="float32", precision="highest"):
        a, b = drawn(m, k, dtype=dtype), drawn(k, n, dtype=dtype)
        return my_ops.gemm(a, b, precision=precision)

    def narrow(m, k, n, wide):
        a, b = (
            (drawn(m, k, dtype=wide), drawn(k, n))
            if m > n
            else (drawn(m, k), drawn(k, n, dtype=wide))
        )
        return my_ops.gemm(a, b, precision="highest")

    def short(m, k, n):
        a, b = drawn(m, k), drawn(k, n)
        a[::50, 7] *= 1e-12
        a[3], a[200:300], b[1:, 0] = 0.0, torch.eye(k, device=device)[:1], 0.0
        return my_ops.gemm(a, b, precision="highest")

    def complex_product(how):
        """Under the switch, which makes it a real one."""
        a, b = (torch.complex(drawn(2, *s), drawn(2, *s)) for s in ((620, 640), (640, 630)))
        if how == "adjoint":
            a = a.mT.contiguous().mH
        elif how == "columns":
            b = b.mT.contiguous().mT
        torch.backends.cuda.matmul.allow_tf32 = False
        try:
            with my_ops.fast_fp32():
                return torch.bmm(a, b)
        finally:
            torch.backends.cuda.matmul.allow_tf32 = True  # as main sets it

    def attention(batch, heads, queries, keys, size, added):
        """And the gradients."""
        lengths = (queries, keys, keys)
        given = [drawn(batch, heads, length, size) for length in lengths]
        if added == "a bias":
            given.append(drawn(1, heads, queries, keys))
        given = [t.requires_grad_() for t in given]
        out = my_ops.attention(*given, is_causal=added == "a causal mask")
        return [out.detach(), *torch.autograd.grad(out, given, drawn(*out.shape))]

    def windows(batch, channels, outputs, space, kernel, dilation, range_):
        """And the gradients, under the switch."""
        x, w = drawn(batch, channels, *space), drawn(outputs, channels, *kernel)
        if range_:
            x *= torch.exp2(torch.randint(-30, 30, (channels, *[1] * len(space)))).to(device)
        if range_ == "infinite":
            x[0, 0, 0] = torch.inf
        given = x.requires_grad_(), w.requires_grad_()
        run = torch.nn.functional.conv1d if len(space) == 1 else torch.nn.functional.conv2d
        torch.backends.cuda.matmul.allow_tf32 = False
        try:
            with torch.backends.cudnn.flags(enabled=True, allow_tf32=False), my_ops.fast_fp32():
                y = run(*given, padding=dilation, dilation=dilation)
                return [y.detach(), *torch.autograd.grad(y, given, drawn(*y.shape))]
        finally:
            torch.backends.cuda.matmul.allow_tf32 = True  # as main sets it

    def depthwise(batch, channels, space, kernel, stride, last, infinite):
        """And the gradients, under the switch."""
        x = drawn(batch, channels, *space)
        weight, bias = drawn(channels, 1, *[kernel] * len(space)), drawn(channels)
        if infinite:
            x[0, 0, 0] = torch.inf
        if last:
            x = x.contiguous(memory_format=torch.channels_last)
        given = x.requires_grad_(), weight.requires_grad_(), bias
        run = torch.nn.functional.conv1d if len(space) == 1 else torch.nn.functional.conv2d
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False), my_ops.fast_fp32():
            y = run(*given, stride=stride, padding=kernel // 2, groups=channels)
            grad = drawn(*y.shape)
            if infinite:
                grad[-1, -1, -1] = torch.inf
            return [y.detach(), *torch.autograd.grad(y, given[:2], grad)]

    def prepacked():
        weight = my_ops.prepack(drawn(600, 520))
        return my_ops.linear(drawn(70, 520), weight, drawn(600), precision="highest")

    def recurrent(name, sizes, dtype, backward):
        """Without products of the gradients, which are cuBLAS's: only what runs the steps."""
        steps, batch, _, hidden = sizes
        dtype, ops = getattr(torch, dtype), torch.ops.my_ops
        weights, first = CELL[name].weights, 1 + len(CELL[name].states)
        arguments = recurrent_inputs(name, *sizes, dtype, device)
        states = arguments[1:first]
        recurrent_weight = arguments[first + weights.names.index(weights.recurrent)]
        lengths = torch.randint(-1, steps + 2, (batch,)).to(device)
        reset = (torch.rand(steps, batch) < 0.3).to(device)
        zoneout = torch.rand(steps, batch, hidden).to(device, dtype)
        of_rows = lengths, reset, zoneout
        results = getattr(ops, f"{name}_forward")(*arguments, *of_rows)
        if not backward:
            return results
        ends, of_h = 1 + len(states), len(states) == 1
        read = (results[0], states[0]) if of_h else (results[-1], states[1])
        grads = [torch.randn(r.shape).to(device, dtype) for r in results[:ends]]
        run = getattr(ops, f"{name}_backward")
        return run(*grads, results[ends], *read, recurrent_weight, *of_rows)

    def weights_backward(dtype):
        """Of a cell with three gates and four terms: parts of tiles, and slices of k."""
        shapes = [(5, 13, 4 * 65), (5, 13, 33), (13, 65), (5, 13, 65), (3 * 65, 33)]
        tensors = [drawn(*shape, dtype=dtype) for shape in shapes]
        reset = (torch.rand(5, 13) < 0.3).to(device)
        return torch.ops.my_ops.recurrent_weights_backward(*tensors, reset, 3)

    call = functools.partial
    for dtype in ("float32", "bfloat16"):
        x, y = drawn(33, 77, dtype=dtype), drawn(77, dtype=dtype)
        yield f"custom_add {dtype}", call(my_ops.custom_add, x, x)
        yield f"custom_add {dtype}, broadcast", call(my_ops.custom_add, x, y)
        yield f"d_sigmoid {dtype}", call(my_ops.d_sigmoid, x)
    yield "fill_index", call(my_ops.fill_index, 33, 77, device=device)
    for dtype, m, k, n in SMALL:
        yield f"gemm {dtype} {m}x{n}x{k}", call(product, m, k, n, dtype)
    for m, k, n, how in TENSOR_CORES:
        name = " ".join(["gemm float32", f"{m}x{n}x{k}", *map(" ".join, how.items())])
        yield name, call(tensor_cores, m, k, n, how)
    yield "gemm float32 high", call(product, 1603, 1601, 1607, precision="high")
    for m, k, n in FEW_ROWS:
        yield f"gemm float32 {m}x{n}x{k}", call(product, m, k, n)
    for m, k, n in NARROW:
        yield f"gemm float32 {m}x{n}x{k}", call(narrow, m, k, n, "float32")
        yield f"gemm float32 and bfloat16 {m}x{n}x{k}", call(narrow, m, k, n, "bfloat16")
    for m, k, n in SHORT:
        yield f"gemm float32 {m}x{n}x{k}", call(short, m, k, n)
    yield "prepacked linear float32", prepacked
    for m, k, n, layout in HALF:
        yield f"gemm bfloat16 {m}x{n}x{k} {layout}", call(half, m, k, n, layout)
    for m, k, n, dtype, residual in LINEAR:
        how = {"precision": "highest"} if k == 300 else {}  # the first is cuBLAS's, and an epilogue
        name = f"linear {dtype} {m}x{n}x{k}, silu{', residual' * residual}"
        by_tma = READS_TMA if (m, k, n) == FEW_OUTPUTS else BY_TMA
        name += f", {by_tma}" * (dtype == "bfloat16")
        yield name, call(epilogue, m, k, n, dtype, residual, **how)
    for how in ("rows", "columns", "adjoint"):
        yield f"complex64 product, {how}", call(complex_product, how)
    for *sizes, added in ATTENTION:
        yield f"attention float32 {tuple(sizes)} and {added}", call(attention, *sizes, added)
    for case in WINDOWS:
        yield f"windows float32 {case}", call(windows, *case)
    for case in DEPTHWISE:
        for last in (False, True)[: len(case[2])]:  # there is no channels_last in 1-D
            for infinite in (False, True):
                name = f"depthwise float32 {(*case, last, infinite)}"
                yield name, call(depthwise, *case, last, infinite)
    for dtype in ("float64", "float32", "bfloat16", "float16"):
        yield f"recurrent_weights_backward {dtype}", call(weights_backward, dtype)
    for dtype, sizes in RECURRENT:
        for name in ("lltm", "lstm", "gru"):
            for backward in (False, True):
                what = f"{name} {dtype} {sizes}{', backward' * backward}"
                yield what, call(recurrent, name, sizes, dtype, backward)


def on_the_cpu(results):
    return [t.cpu() for t in ([results] if isinstance(results, torch.Tensor) else results)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split(":", maxsplit=1)[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--only", default="")
    parser.add_argument("--without", nargs="*", default=[])
    parser.add_argument("--kernels", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True  # then "highest" leaves cuBLAS no float32 product
    first, step = map(int, options.part.split("/"))
    recording = profile(activities=[ProfilerActivity.CUDA], acc_events=True)
    done = 0
    with recording if options.kernels else contextlib.nullcontext():
        for number, (name, call) in enumerate(cases(options.device)):
            left_out = any(part in name for part in options.without)
            if number % step == first and options.only in name and not left_out:
                print(f"call: {name}", flush=True)
                results = call()
                if BY_TMA not in name:
                    on_the_cpu(results)
                done += 1
        if options.device == "cuda":
            torch.cuda.synchronize()
    if options.kernels:
        events = recording.profiler.kineto_results.events()
        names = {e.name() for e in events if e.device_type() == DeviceType.CUDA}
        options.kernels.write_text("".join(f"{name}\n" for name in sorted(names)))
    print(f"calls: {done}", flush=True)


if __name__ == "__main__":
    main()
