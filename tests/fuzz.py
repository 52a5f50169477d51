"""Random calls of every op and layer, each compared with its specification in float64.

    python tests/fuzz.py --seconds 60
    python tests/fuzz.py --seconds 3600 --seed 7 --device cuda --processes 8 \
        --output benchmarks/results/fuzz-nvidia-h200.json

If a result is wrong, it prints the lines of Python that repeat it, and ends with an error. Bounds
are those of fuzzing/judge.py and precision.py. A product beyond its bound is wrong if torch's own,
on the same device, is nearer to the exact result by more than a tenth, whether or not it records a
gradient. All products beyond their bounds are counted.
Each process on a GPU may take its share of the memory; cases that need more are counted apart.
Several processes work side by side on a GPU only under CUDA's Multi-Process Service, which
"nvidia-cuda-mps-control -d" starts.
"""

import argparse
import ctypes
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import measure
import torch
from fuzzing.run import draw, examine, lines, run

TOGETHER = 64  # errors are read for this many cases at a time: reading one waits for the GPU
FOR_TENSORS = 0.8  # of a GPU's memory; the rest is for libraries and for what each process loads
SHOWN = 5  # wrong cases that are printed and repeated
BEYOND = "products beyond their bound, torch's no nearer"
M_PERTURB = -6  # in glibc's malloc.h: the byte to fill with, inverted


class Fuzz:
    """The cases of one device so far."""

    def __init__(self, device, seed):
        self.device = device
        self.choose = random.Random(f"{device} {seed}")
        self.calls = Counter()  # by op and kind
        self.beyond = []  # beyond the bound, but nearer than torch's
        self.wrong = []
        self.without_memory = 0

    def some(self):
        """Draws ``TOGETHER`` cases, and checks them."""
        torch.manual_seed(self.choose.randrange(1 << 31))
        judged = []
        for _ in range(TOGETHER):
            case = draw(self.choose, self.device)
            refused = allocations_refused()
            try:
                found = run(case)
            except Exception as error:
                # Before torch 2.13, an op that fails inside torch cannot say why.
                if isinstance(error, torch.OutOfMemoryError) or allocations_refused() > refused:
                    self.without_memory += 1
                    continue
                self.report(case)
                if "CUDA error" in str(error):  # from this case or an earlier one; it is final
                    print("The cases before it:", *(lines(c) for c, _ in judged), sep="\n\n")
                    raise
                continue
            self.calls.update((case.op, kind) for kind, _ in found)
            judged.append((case, found))
        shares = torch.stack([share.to(self.device) for _, found in judged for _, share in found])
        rest = iter((shares.cpu() <= 1).tolist())
        for case, found in judged:
            if not all([next(rest) for _ in found]):
                self.report(case)

    def report(self, case):
        refused = allocations_refused()
        try:
            verdict = examine(case)
        except torch.OutOfMemoryError:
            self.without_memory += 1
            return
        if allocations_refused() > refused:
            self.without_memory += 1
            return
        found = {"op": case.op, "device": self.device, "verdict": str(verdict), "case": repr(case)}
        if not verdict.wrong:
            self.beyond.append(found)
            return
        self.wrong.append(found)
        if len(self.wrong) > SHOWN:
            return
        found["repeats"] = repeats(case)
        said = "It repeats:" if found["repeats"] else "It does not repeat alone:"
        print(f"\n{case.op} on {self.device}, {verdict}\n{said}\n\n{lines(case)}", flush=True)

    def record(self):
        by_op = {}
        for (op, kind), count in sorted(self.calls.items()):
            by_op.setdefault(op, {})[kind] = count
        return {
            "device": self.device,
            "calls": sum(self.calls.values()),
            "calls by op": by_op,
            "out of memory": self.without_memory,
            BEYOND: self.beyond,
            "wrong": self.wrong,
        }


def allocations_refused():
    """How often PyTorch has found too little memory on the GPU."""
    return torch.cuda.memory_stats().get("num_ooms", 0) if torch.cuda.is_initialized() else 0


def repeats(case):
    """Whether the printed lines, run in their own process, find the case wrong."""
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        script.write(lines(case))
        script.flush()
        done = subprocess.run([sys.executable, script.name], capture_output=True, check=False)
    return done.returncode == 1


def fuzz(seed, seconds, devices, processes):
    """What one of the processes finds in that many seconds, by device."""
    if "cuda" in devices:
        torch.cuda.set_per_process_memory_fraction(FOR_TENSORS / processes)
    # As in conftest.py: elements that no kernel wrote are NaN.
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    ctypes.CDLL(None).mallopt(M_PERTURB, 0x100)
    fuzzed = [Fuzz(device, seed) for device in devices]
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for each in fuzzed:
            each.some()
    return [each.record() for each in fuzzed]


def together(records):
    """One record of those that several processes return for a device."""
    total = dict(records[0])
    for kind, first in total.items():
        if isinstance(first, int):
            total[kind] = sum(record[kind] for record in records)
        elif isinstance(first, list):
            total[kind] = [found for record in records for found in record[kind]]
    total["calls by op"] = {
        op: dict(sum((Counter(r["calls by op"].get(op, {})) for r in records), Counter()))
        for op in sorted(set().union(*(r["calls by op"] for r in records)))
    }
    return total


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument(
        "--seed", type=int, help="of what is drawn; another one each time if left out"
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="both if left out, where there is CUDA"
    )
    parser.add_argument(
        "--processes", type=int, default=1, help="at a time, each with the next seed"
    )
    parser.add_argument("--output", type=Path, help="a JSON file for the counts")
    options = parser.parse_args()
    seed = random.randrange(1 << 31) if options.seed is None else options.seed
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    if options.device:
        devices = [options.device]
    seeds = range(seed, seed + options.processes)
    with ProcessPoolExecutor(len(seeds), mp_context=get_context("spawn")) as pool:
        same = (repeat(value) for value in (options.seconds, devices, options.processes))
        runs = list(pool.map(fuzz, seeds, *same))
    sections = [together(records) for records in zip(*runs, strict=True)]
    for found in sections:
        wrong, beyond = len(found["wrong"]), len(found[BEYOND])
        seeds_said = f"seed {seed}" if len(seeds) == 1 else f"seeds {seed} to {seeds[-1]}"
        print(f"{found['device']}, {seeds_said}: {found['calls']} calls, {wrong} wrong")
        print(f"  and {beyond} products beyond their bound where torch's are no nearer")
    if options.output:
        how = {"seed": seed, "processes": len(seeds), "seconds": options.seconds}
        measure.save(options.output, {**how, "devices": sections})
    raise SystemExit(any(found["wrong"] for found in sections))


if __name__ == "__main__":
    main()
