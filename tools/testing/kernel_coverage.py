"""Which of the CUDA kernels compiled into a module the tests launch.

    python tools/testing/kernel_coverage.py my_ops/_C.so build/kernels* --architecture sm_90a

The files after the module hold the names that tests/record_kernels.py recorded on a GPU of that
architecture. Prints the share of each kernel template, and every kernel that was never launched.
Needs cuobjdump (pip install nvidia-cuda-cuobjdump) and c++filt.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import measure


def cuobjdump() -> str:
    if found := shutil.which("cuobjdump"):
        return found
    for folder in sys.path:
        for path in Path(folder).glob("nvidia/*/bin/cuobjdump"):
            return str(path)
    raise SystemExit("kernel_coverage: pip install nvidia-cuda-cuobjdump")


def plain(names: str) -> set[str]:
    """As written in C++. Demangled names, which the profiler gives, stay as they are."""
    done = subprocess.run(["c++filt"], input=names, capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines())


def compiled(module: Path, architecture: str) -> set[str]:
    """The kernels of a module. cuobjdump's lines differ from release to release: FUNC LOCAL DEFAULT
    ENTRY NAME, or STT_FUNC STB_LOCAL STO_ENTRY NAME."""
    command = [cuobjdump(), "-symbols", "-arch", architecture, str(module)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [line.split() for line in done.stdout.splitlines()]
    kinds = [(line, {field.rpartition("_")[2] for field in line[:-1]}) for line in lines if line]
    return plain("\n".join(line[-1] for line, kind in kinds if kind >= {"FUNC", "ENTRY"}))


def template(kernel: str) -> str:
    """Its name alone: grid_forward_kernel."""
    name = re.sub(r"^void |\(anonymous namespace\)::", "", kernel)
    return re.split(r"[<(]", name)[0].rsplit("::", 1)[-1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("module", type=Path)
    parser.add_argument("names", type=Path, nargs="+")
    parser.add_argument("--architecture", default="sm_90a")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    kernels = compiled(arguments.module, arguments.architecture)
    if not kernels:
        raise SystemExit(f"{arguments.module} has no kernels for {arguments.architecture}")
    launched = kernels & plain("\n".join(path.read_text() for path in arguments.names))
    missing = sorted(kernels - launched)
    all_of, of = Counter(map(template, kernels)), Counter(map(template, launched))
    for name, count in sorted(all_of.items()):
        print(f"{of[name]:>5} of {count:<5} {name}")
    print(f"{len(launched)} of {len(kernels)}: {len(launched) / len(kernels):.1%}. Never launched:")
    print("\n".join(missing))
    if arguments.output:
        rows = [{"kernel": n, "compiled": c, "launched": of[n]} for n, c in sorted(all_of.items())]
        found = {"architecture": arguments.architecture, "compiled": len(kernels)}
        found |= {"launched": len(launched), "kernels": rows, "never launched": missing}
        measure.save(arguments.output, found)


if __name__ == "__main__":
    main()
