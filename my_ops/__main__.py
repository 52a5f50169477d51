"""``python -m my_ops``: what is installed here, whether it fits this machine, and what to do.

``--json`` prints the same for programs and bug reports. ``install-hint`` prints the ``pip install``
line for this machine, or fails and says why none would help. These work even if torch is missing or
the module does not load. ``explain gemm M N K`` says which kernel computes a product on a GPU, and
why. ``tune`` measures this machine's GPU, for those choices. ``run SCRIPT ARGS`` and ``run -m
MODULE ARGS`` run an unchanged program with :class:`my_ops.fast_fp32` on.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from my_ops import _explain, _install_hint

PACKAGE = Path(__file__).resolve().parent
_RUN_USAGE = "python -m my_ops run [-i] [-m MODULE | SCRIPT] [ARGUMENTS ...]"
COMPUTE_CAPABILITY = (75, 76)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR


def covers(architectures: list[str], capability: tuple[int, int]) -> bool:
    """Whether code for these architectures ("9.0a", "10.0+PTX") runs on a GPU of a capability."""
    for arch in architectures:
        match = re.fullmatch(r"(\d+)\.(\d+)([af]?)(\+PTX)?", arch)
        if match is None:
            continue
        code = int(match[1]), int(match[2])
        if code == capability:
            return True
        if match[3]:  # machine code for one chip or family
            continue
        if code[0] == capability[0] and code[1] <= capability[1]:
            return True
        if match[4] and code <= capability:
            return True
    return False


def driver() -> dict[str, Any] | None:
    """The CUDA version that the driver supports, and its GPUs; None without a driver."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(number))
    found: dict[str, Any] = {
        "cuda": f"{number.value // 1000}.{number.value % 1000 // 10}",
        "gpus": [],
    }
    if cuda.cuInit(0) != 0:
        return found
    count = ctypes.c_int()
    cuda.cuDeviceGetCount(ctypes.byref(count))
    for index in range(count.value):
        device, name, value = ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_int()
        cuda.cuDeviceGet(ctypes.byref(device), index)
        cuda.cuDeviceGetName(name, len(name), device)
        capability = []
        for attribute in COMPUTE_CAPABILITY:
            cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
            capability.append(value.value)
        found["gpus"].append(
            {"name": name.value.decode(errors="replace"), "capability": capability}
        )
    return found


def torch_found() -> dict[str, Any]:
    try:
        import torch
    except Exception as error:  # a broken torch raises more than ImportError
        return {"error": f"{type(error).__name__}: {error}"}
    return {"version": torch.__version__, "cuda": torch.version.cuda}


def load_error() -> str | None:
    """The error of `import my_ops`, run in its own process so that a crash is reported too."""
    done = subprocess.run(
        [sys.executable, "-c", "import my_ops"],
        capture_output=True,
        text=True,
        check=False,
        cwd=PACKAGE.parent,
    )
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"the process ended with status {done.returncode}"


def fits(build: dict[str, Any] | None, here: dict[str, Any] | None) -> bool:
    """Whether this build runs with the driver and on every GPU."""
    if build is None or not (here and here["gpus"]):
        return build is not None
    needed = int((build["nvcc"] or "99").split(".")[0])
    return int(here["cuda"].split(".")[0]) >= needed and all(g["covered"] for g in here["gpus"])


def problems(report: dict[str, Any]) -> list[dict[str, str]]:
    found = []

    def add(problem: str, fix: str) -> None:
        found.append({"problem": problem, "fix": fix})

    build, torch, here = report["build"], report["torch"], report["driver"]
    hint = report["install_hint"] or report["no_install_hint"]
    if platform.system() != "Linux":
        add(hint, "use a Linux machine or container")
        return found
    if "error" in torch:
        add(f"torch cannot be imported: {torch['error']}", "pip install 'torch>=2.10'")
    if build is None:
        if (PACKAGE.parent / "kernels").is_dir():
            add(
                "this is the source folder, not an installed package: nothing is compiled here",
                f"run Python in another folder; if my_ops is not installed there: {hint}",
            )
        else:
            add("the package is not whole: it has no record of its build", hint)
    elif report["load_error"] and "error" not in torch:
        add(f"import my_ops fails: {report['load_error']}", hint)
    if not (build and here and here["gpus"]):
        return found
    if build["nvcc"] is None:
        add("this build runs on the CPU only, and the machine has a GPU", hint)
        return found
    needed = int(build["nvcc"].split(".")[0])
    if int(here["cuda"].split(".")[0]) < needed:
        add(
            f"the driver supports CUDA {here['cuda']}, and this build needs CUDA {needed}",
            f"update the NVIDIA driver, or {hint}" if report["install_hint"] else hint,
        )
    for gpu in here["gpus"]:
        if not gpu["covered"]:
            add(
                f"{gpu['name']} has compute capability {'.'.join(map(str, gpu['capability']))}, "
                f"and this build has code for {', '.join(build['architectures'])}",
                hint,
            )
    if torch.get("cuda") is None and "error" not in torch:
        add(
            "torch is a CPU build, so its tensors cannot be on the GPU",
            "pip install --force-reinstall torch, from an index of CUDA builds",
        )
    return found


def installed_version() -> str | None:
    try:
        return version("my_ops")
    except PackageNotFoundError:
        return None


def environment() -> dict[str, Any]:
    path = PACKAGE / "_build.json"
    build = json.loads(path.read_text()) if path.exists() else None
    here = driver()
    for gpu in here["gpus"] if here else []:
        capability = gpu["capability"][0], gpu["capability"][1]
        gpu["covered"] = covers(build["architectures"] if build else [], capability)
    report: dict[str, Any] = {
        "my_ops": installed_version(),
        "path": str(PACKAGE),
        "build": build,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch_found(),
        "driver": here,
        "load_error": load_error(),
        "install_hint": None,
        "no_install_hint": None,
    }
    try:
        report["install_hint"] = _install_hint.install_hint(
            build, here, fits(build, here), _install_hint.origin(PACKAGE)
        )
    except _install_hint.NoBuildError as why:
        report["no_install_hint"] = str(why)
    report["problems"] = problems(report)
    return report


def show(report: dict[str, Any]) -> None:
    build, torch, here = report["build"], report["torch"], report["driver"]
    print(f"my_ops    {report['my_ops'] or 'not installed'} in {report['path']}")
    if build:
        cuda = f"nvcc {build['nvcc']}" if build["nvcc"] else "CPU only"
        print(f"build     {cuda}, against torch {build['torch_built_against']}", end="")
        print(f" for torch >= {build['torch_minimum']}, commit {build['commit'] or 'unknown'}")
        if build["architectures"]:
            print(f"code for  {', '.join(build['architectures'])}")
    print(f"python    {report['python']} on {report['platform']}")
    print(f"torch     {torch.get('version', 'missing')}, CUDA {torch.get('cuda') or 'none'}")
    print(f"driver    {'CUDA ' + here['cuda'] if here else 'none'}")
    for gpu in here["gpus"] if here else []:
        capability = ".".join(map(str, gpu["capability"]))
        state = "covered" if gpu["covered"] else "not covered"
        print(f"GPU       {gpu['name']}, compute capability {capability}: {state}")
    for finding in report["problems"]:
        print(f"\nproblem   {finding['problem']}\nfix       {finding['fix']}")
    if not report["problems"]:
        print("\nnothing wrong found")


def main() -> int:
    """Returns 1 if something is wrong."""
    text = "Print what is installed here, whether it fits this machine, and what to do."
    parser = argparse.ArgumentParser(prog="python -m my_ops", description=text)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--version", action="version", version=f"my_ops {installed_version()}")
    commands = parser.add_subparsers(dest="command")
    text = "Print the pip install line for this machine, or say why none would help."
    commands.add_parser("install-hint", help=text, description=text)
    text = "Say which kernel computes a product on a GPU, and why."
    _explain.add_arguments(commands.add_parser("explain", help=text, description=text))
    text = "Measure this GPU's products, for the choice of kernels from now on."
    tune = commands.add_parser("tune", help=text, description=text)
    add = tune.add_argument
    add("--device", type=int, default=0, help="torch's number of the GPU, default: %(default)s")
    add("--seconds", type=float, default=120, help="to measure for, default: %(default)s")
    add("--json", action="store_true", help="print what was found and written as JSON")
    text = "Run a program with my_ops.fast_fp32 on, and print its report to stderr."
    run = commands.add_parser("run", help=text, description=text, usage=_RUN_USAGE)
    if sys.argv[1:2] == ["run"]:  # the arguments after it belong to the program
        if sys.argv[2:] in ([], ["-i"], ["-m"], ["-i", "-m"], ["-h"], ["--help"]):
            run.print_help()
            return 0 if sys.argv[2:] in (["-h"], ["--help"]) else 2
        from my_ops._run import run_program  # imported here, as it needs torch

        run_program(sys.argv[2:])
        return 0
    arguments = parser.parse_args()
    if arguments.command == "explain":
        print(_explain.explain(arguments), end="")
        return 0
    if arguments.command == "tune":
        from my_ops._tune import tune as tuned  # imported here, as it needs torch

        print(tuned(arguments), end="")
        return 0
    report = environment()
    if arguments.command == "install-hint":
        if report["install_hint"] is None:
            print(report["no_install_hint"], file=sys.stderr)
            return 1
        print(report["install_hint"])
        return 0
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        show(report)
    return 1 if report["problems"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
