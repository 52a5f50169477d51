"""Trains the character model of char_lm.py on several processes, one per GPU, or on CPUs.

    torchrun --nproc-per-node 2 examples/train_distributed.py --parallel ddp|fsdp|tp

ddp    every process holds the model and a share of the batch (DistributedDataParallel)
fsdp   the parameters are split as well (fully_shard); --bf16 computes in bfloat16
tp     the two linear layers are split (parallelize_module); every process reads the whole batch and
       runs the embedding and LLTM on a share of it

With ``--checkpoint FOLDER`` the state is saved every ``--save-every`` steps, and training resumes
from the newest checkpoint. The batch of a step depends on its number alone, so an interrupted run
ends with the losses of an uninterrupted one. With torchrun's ``--max-restarts 3``, a process that
dies costs only the steps since the last checkpoint.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
import torch.nn.functional as F
from char_lm import BATCH, LEARNING_RATE, LENGTH, CharLM
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import my_ops.distributed  # noqa: F401  the rules by which tensor parallelism splits the ops

WARM_UP = 10  # first steps, left out of the timing


def parallel(model: nn.Module, mesh: DeviceMesh, way: str, bf16: bool = False) -> nn.Module:
    if way == "ddp":
        return DistributedDataParallel(model)
    if way == "tp":
        # my_ops has sharding rules for LLTM, so each process runs its share of the batch.
        # torch.nn.LSTM has none: each process runs all of it.
        shared = hasattr(model, "lltm")
        layout = Shard(1) if shared else Replicate()
        first = "encode.linear" if shared else "encode"
        plan = {first: ColwiseParallel(input_layouts=layout), "decode": RowwiseParallel()}
        parallelize_module(model, mesh, plan)
        if shared:
            distribute_module(model, mesh)  # the other parameters: whole, on every process
            share = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=layout)
            parallelize_module(model, mesh, share)
        return model
    # All parameters in one group: in a model this small, overlapping several groups would save less
    # time than they cost the host.
    policy = MixedPrecisionPolicy(*((torch.bfloat16, torch.float32) if bf16 else ()))
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def adam(model: nn.Module) -> torch.optim.Adam:
    # Two groups, because the fused step does not mix DTensors and plain parameters.
    plain = [p for p in model.parameters() if not isinstance(p, DTensor)]
    split = [p for p in model.parameters() if isinstance(p, DTensor)]
    groups = [{"params": group} for group in (plain, split) if group]
    return torch.optim.Adam(groups, lr=LEARNING_RATE, fused=True)


def windows(text: Tensor, step: int, options: argparse.Namespace) -> Tensor:
    """The batch of this step, (LENGTH + 1, batch), or this process's share of it."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - LENGTH, (options.batch,), generator=generator)
    if options.parallel != "tp":
        starts = starts.chunk(dist.get_world_size())[dist.get_rank()]
    return text[torch.arange(LENGTH + 1, device=text.device)[:, None] + starts.to(text.device)]


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> Tensor:
    logits, _ = model(batch[:-1])
    loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    parameters, moments = get_state_dict(model, optimizer)
    state = {"model": parameters, "optimizer": moments}
    checkpoint.save(state, checkpoint_id=folder / f"step-{step}")


def resume(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Loads the newest complete checkpoint; returns the number of steps it has seen."""
    # The file .metadata is written last; a folder without it is incomplete.
    steps = [int(path.parent.name.split("-")[1]) for path in folder.glob("step-*/.metadata")]
    if not steps:
        return 0
    parameters, moments = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": parameters, "optimizer": moments}
    checkpoint.load(state, checkpoint_id=folder / f"step-{max(steps)}")
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return max(steps)


def train(options: argparse.Namespace, device: torch.device, mesh: DeviceMesh) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    corpus = "".join(topics.values())
    characters = sorted(set(corpus))
    code = {character: index for index, character in enumerate(characters)}
    text = torch.tensor([code[character] for character in corpus], device=device)
    torch.manual_seed(0)
    model = parallel(CharLM(len(characters)).to(device), mesh, options.parallel, options.bf16)
    optimizer = adam(model)
    first = resume(options.checkpoint, model, optimizer) if options.checkpoint else 0

    began = time.perf_counter()
    for step in range(first, options.steps):
        if step == first + WARM_UP:
            if device.type == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter()
        loss = train_step(model, optimizer, windows(text, step, options))
        if (step + 1) % options.print_every == 0 or step + 1 == options.steps:
            dist.all_reduce(loss)
            if rank == 0:
                print(f"step {step + 1} loss {loss.item() / world_size:.6f}", flush=True)
        if options.checkpoint and (step + 1) % options.save_every == 0:
            save(options.checkpoint, step + 1, model, optimizer)
    if device.type == "cuda":
        torch.cuda.synchronize()
    timed = options.steps - first - WARM_UP
    if rank == 0 and timed > 0:
        rate = timed * options.batch * LENGTH / (time.perf_counter() - began)
        print(f"{options.parallel}, {world_size} processes: {rate:,.0f} characters/s")


def main() -> None:
    parser = argparse.ArgumentParser(description="The character model on several processes.")
    parser.add_argument("--parallel", choices=("ddp", "fsdp", "tp"), default="ddp")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=BATCH, help="of all processes together")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16 (fsdp)")
    parser.add_argument("--checkpoint", type=Path, help="folder to save to and to resume from")
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--print-every", type=int, default=20)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    if options.bf16 and options.parallel != "fsdp":
        parser.error("--bf16 goes with --parallel fsdp")
    if "RANK" not in os.environ:
        parser.error("start it with torchrun --nproc-per-node N")

    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    # torchrun's store outlives a restart and still has the addresses of the processes that died, so
    # every start uses keys of its own.
    store, rank, world_size = next(dist.rendezvous("env://"))
    store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    dist.init_process_group(
        backend, timeout=timedelta(minutes=2), store=store, rank=rank, world_size=world_size
    )
    if options.parallel != "tp" and options.batch % world_size:
        parser.error(f"--batch must be a multiple of {world_size} processes")

    # train() frees the model before the group is destroyed: DistributedDataParallel would wait for
    # gloo's threads, which may need the interpreter lock that it holds.
    train(options, device, init_device_mesh(device.type, (world_size,)))
    dist.barrier()  # what the others still wait for
    dist.destroy_process_group()
    # The caches of DTensor keep gloo's threads alive. One that asks for the interpreter lock while
    # Python ends aborts the process, so Python's own end is left out.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
