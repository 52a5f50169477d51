"""Training steps of whole models: with torch, with torch under the switch, with our Linear.

    python benchmarks/models.py [CASE ...] [--layers N] [--budget SECONDS] [--output results.json]

A step is forward, loss and backward. The model itself, the same model under ``my_ops.fast_fp32()``
and a copy whose Linear layers are ``my_ops.nn.Linear`` take turns, each in a process of its own, as
the switch leaves its kernels registered: in float32 without TF32 and after ``model.bfloat16()``,
eager and compiled. Times are medians in milliseconds, from the call to the end of the GPU's work.
Losses are those of some steps of SGD from the same weights. BERT, Llama and ViT come from
transformers, built from a configuration with random weights; without a GPU they are tiny. CASE is a
part of the cases' names, such as "bert", "bfloat16" or "vit float32 eager".
"""

from __future__ import annotations

import argparse
import copy
import gc
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from measure import Run, save, synchronize
from torch import Tensor, nn

import my_ops

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FULL = DEVICE == "cuda"
LOSSES = 5  # steps of SGD
MODES = ("torch", "switch", "converted")
Loss = Callable[[nn.Module], Tensor]
one_step: Run | None = None  # of the model that this process has prepared


def transformer(width: int, heads: int, inner: int, layers: int) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "num_attention_heads": heads,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
    }


def tokens(batch: int, length: int, vocabulary: int) -> Tensor:
    return torch.randint(vocabulary, (batch, length), device=DEVICE)


def bert(layers: int | None) -> tuple[nn.Module, Loss]:
    from transformers import BertConfig, BertForMaskedLM

    shape = transformer(768, 12, 3072, layers or 12) if FULL else transformer(16, 2, 32, 1)
    config = BertConfig(**shape, hidden_dropout_prob=0, attention_probs_dropout_prob=0)
    text = tokens(16, 512, config.vocab_size) if FULL else tokens(2, 8, config.vocab_size)
    return BertForMaskedLM(config), lambda model: model(input_ids=text, labels=text).loss


def llama(layers: int | None) -> tuple[nn.Module, Loss]:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = transformer(1024, 16, 2816, layers or 16) if FULL else transformer(16, 2, 32, 1)
    config = LlamaConfig(**shape, use_cache=False)
    text = tokens(4, 1024, config.vocab_size) if FULL else tokens(2, 8, config.vocab_size)
    return LlamaForCausalLM(config), lambda model: model(input_ids=text, labels=text).loss


def vit(layers: int | None) -> tuple[nn.Module, Loss]:
    from transformers import ViTConfig, ViTForImageClassification

    shape = transformer(768, 12, 3072, layers or 12) if FULL else transformer(16, 2, 32, 1)
    size = 224 if FULL else 32
    images = torch.randn(64 if FULL else 2, 3, size, size, device=DEVICE)
    labels = torch.randint(1000, (len(images),), device=DEVICE)
    model = ViTForImageClassification(ViTConfig(**shape, image_size=size, num_labels=1000))

    def loss(model: nn.Module) -> Tensor:
        logits = model(pixel_values=images.to(next(model.parameters()).dtype)).logits
        return nn.functional.cross_entropy(logits.float(), labels)

    return model, loss


def pinn(layers: int | None) -> tuple[nn.Module, Loss]:
    """Poisson's equation, solved by a network whose Laplacian comes from autograd."""
    width, points = (512, 65536) if FULL else (16, 32)
    inner = [part for _ in range(layers or 6) for part in (nn.Linear(width, width), nn.Tanh())]
    model = nn.Sequential(nn.Linear(3, width), nn.Tanh(), *inner, nn.Linear(width, 1))
    x = torch.rand(points, 3, device=DEVICE, requires_grad=True)

    def loss(model: nn.Module) -> Tensor:
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        curved = [
            torch.autograd.grad(slope[:, d].sum(), x, create_graph=True)[0][:, d] for d in range(3)
        ]
        return (sum(curved) - x.sin().sum(1)).square().mean()

    return model, loss


MODELS = {"bert": bert, "llama": llama, "vit": vit, "pinn": pinn}


def cases() -> Iterator[tuple[str, str, str]]:
    for name in MODELS:
        for kind in ("float32", "bfloat16"):
            for way in ("eager", "compiled"):
                # Second derivatives: torch.compile does not support them, and 16 bits lose them.
                if name != "pinn" or (kind, way) == ("float32", "eager"):
                    yield name, kind, way


def losses(model: nn.Module, loss: Loss) -> list[float]:
    """The losses of a few training steps. The model is restored afterwards."""
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    values = []
    for _ in range(LOSSES):
        optimizer.zero_grad()
        value = loss(model)
        value.backward()
        optimizer.step()
        values.append(value.item())
    model.load_state_dict(before)
    return values


def apart(values: list[float], reference: list[float]) -> float:
    pairs = zip(values, reference, strict=True)
    return max(abs(value - exact) / abs(exact) for value, exact in pairs)


# ------------------------------------------------------------------------ in the process of a mode


def prepare(mode: str, name: str, kind: str, way: str, layers: int | None) -> list[float]:
    """Makes the model whose steps ``step_time`` times. Returns its losses."""
    global one_step
    one_step = None
    gc.collect()
    torch.cuda.empty_cache()
    torch.compiler.reset()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    model, loss = MODELS[name](layers)
    model = model.to(DEVICE, getattr(torch, kind))
    if mode == "switch":
        my_ops.fast_fp32()
    if mode == "converted":
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = my_ops.nn.Linear
    if way == "compiled":
        model.compile()

    def run() -> None:
        model.zero_grad()
        loss(model).backward()

    one_step = run
    return losses(model, loss)


def step_time() -> float:
    assert one_step is not None
    one_step()  # what the other processes' turns left cold
    synchronize()
    start = time.perf_counter()
    one_step()
    synchronize()
    return (time.perf_counter() - start) * 1e3


# ---------------------------------------------------------------------------- in the main process


def row(
    processes: dict[str, ProcessPoolExecutor], case: tuple[str, str, str, int | None], budget: float
) -> dict[str, Any]:
    made = {mode: process.submit(prepare, mode, *case) for mode, process in processes.items()}
    values = {mode: future.result() for mode, future in made.items()}
    found: dict[str, list[float]] = {mode: [] for mode in processes}
    begin = time.monotonic()
    order = list(processes)
    while time.monotonic() - begin < budget or len(found["torch"]) < 5:
        for mode in order:
            found[mode].append(processes[mode].submit(step_time).result())
        order.append(order.pop(0))  # a step is faster or slower by what ran before it
    ms = {mode: statistics.median(times) for mode, times in found.items()}
    result: dict[str, Any] = {"case": " ".join(case[:3]), "torch ms": round(ms["torch"], 3)}
    for mode in MODES[1:]:
        result[f"{mode} ms"] = round(ms[mode], 3)
        result[f"x {mode}"] = round(ms["torch"] / ms[mode], 3)
        result[f"{mode} losses apart"] = float(f"{apart(values[mode], values['torch']):.1e}")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("case", nargs="*", default=[""])
    parser.add_argument("--layers", type=int, help="of each model; its own where left out")
    parser.add_argument("--budget", type=float, default=5, help="seconds of timing a case")
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    arguments = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    processes = {mode: ProcessPoolExecutor(1, mp_context=spawn) for mode in MODES}
    rows = []
    for name, kind, way in cases():
        if not any(part in f"{name} {kind} {way}" for part in arguments.case):
            continue
        rows.append(row(processes, (name, kind, way, arguments.layers), arguments.budget))
        shown = "  ".join(f"{key} {value}" for key, value in rows[-1].items() if key != "case")
        print(f"{rows[-1]['case']:24}", shown, flush=True)
        if arguments.output:
            depth = arguments.layers or "each model's own"
            save(arguments.output, {"layers": depth, "training step": rows})


if __name__ == "__main__":
    main()
