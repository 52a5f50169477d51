"""Runs compute-sanitizer's four tools over calls that reach every family of CUDA kernels.

    python tools/testing/sanitize.py --output benchmarks/results/sanitizer-nvidia-h200.json

The calls are those of tests/families.py, shared by several processes for each tool. A first run,
without a tool, records which kernels they launch. memcheck, racecheck and synccheck watch the
kernels of my_ops alone: racecheck does not see how cuBLAS's wait for TMA, and crashes in some of
them. initcheck has to see who else writes. Needs compute-sanitizer, a GPU and the repository.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))

PROGRAM = ROOT / "tests/families.py"
PARTS = {"racecheck": 10, "initcheck": 2, "memcheck": 2, "synccheck": 2}  # processes of a tool
# Calls that a tool cannot judge. initcheck does not see what cuBLAS stores by TMA. racecheck stops
# with an internal error in that kernel of cuBLAS; and the kernel that all steps of backward share
# never ends with it, though with one step it does.
BY_CUBLAS = "reads what TMA stored for cuBLAS"
WITHOUT = {
    "initcheck": [BY_CUBLAS],
    "racecheck": [
        BY_CUBLAS,
        "bfloat16 (2, 1040, 5, 136), backward",
        "float32 (2, 2100, 5, 136), backward",
    ],
}
OURS = ["--kernel-name", "kernel_substring=my_ops"]
PREFIX = "========="
NOT_REPORTS = ("COMPUTE-SANITIZER", "ERROR SUMMARY", "RACECHECK SUMMARY", "LEAK SUMMARY")


def families() -> list[str]:
    """The names of the kernel templates in the sources."""
    sources = [*ROOT.glob("kernels/**/*.cu"), *ROOT.glob("kernels/**/*.cuh")]
    text = "\n".join(path.read_text() for path in sources)
    return sorted(set(re.findall(r"__global__[^;{]*?\b(\w+_kernel)\(", text)))


def not_reached(names: list[str]) -> list[str]:
    text = "\n".join(names)
    return [f for f in families() if not re.search(rf"(?<![a-z_]){f}(?![a-z_])", text)]


def reports(log: str) -> list[dict[str, str]]:
    """What a tool reported: during which call, and the text. Lines of a report are indented; that
    of a call is the program's own."""
    found: list[dict[str, str]] = []
    call, open_ = "", False
    for line in log.splitlines():
        if line.startswith("call: "):
            call = line.removeprefix("call: ")
        if not line.startswith(PREFIX):
            continue
        text = line.removeprefix(PREFIX)[1:]
        if not text.strip():
            open_ = False
        elif text.startswith(" ") and open_:
            found[-1]["report"] += "\n" + text.strip()
        elif not text.startswith((" ", *NOT_REPORTS)):
            found.append({"call": call, "report": text})
            open_ = True
    return found


def in_my_ops(report: dict[str, str]) -> bool:
    """In one of its kernels, or in a result that was not written."""
    return "my_ops::" in report["report"] or report["report"].startswith("Host API")


def summary(tool: str, logs: list[str], seconds: float) -> dict[str, Any]:
    found = [report for log in logs for report in reports(log)]
    ours = [report for report in found if in_my_ops(report)]
    ended = [re.search(r"^calls: (\d+)$", log, re.MULTILINE) for log in logs]
    calls = [re.findall(r"^call: (.*)$", log, re.MULTILINE) for log in logs]
    return {
        "tool": tool,
        "calls": sum(len(began) - (not end) for began, end in zip(calls, ended, strict=True)),
        "ended in": [
            began[-1] if began else "" for began, end in zip(calls, ended, strict=True) if not end
        ],
        "reports in my_ops": len(ours),
        "reports elsewhere": len(found) - len(ours),
        "seconds": round(seconds, 1),
        "reports": [*ours, *(r for r in found if r not in ours)][:20],
    }


def run(command: list[str], timeout: float) -> str:
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the program too
            process.wait()
        log.seek(0)
        return log.read()


def sanitize(tools: list[str], sanitizer: str, timeout: float) -> list[tuple[str, str, float]]:
    """The tool, the log and the seconds of every process; all run side by side."""
    jobs = [(tool, part) for tool in PARTS if tool in tools for part in range(PARTS[tool])]

    def one(number: int) -> tuple[str, str, float]:
        tool, part = jobs[number]
        watched = [] if tool == "initcheck" else OURS
        command = [sanitizer, "--tool", tool, *watched, "--show-backtrace", "no"]
        command += ["--port", str(49152 + 20 * number)]  # each takes up to ten
        begin = time.monotonic()
        arguments = [sys.executable, str(PROGRAM), "--part", f"{part}/{PARTS[tool]}"]
        arguments += ["--without", *WITHOUT.get(tool, [])]
        log = run([*command, *arguments], timeout)
        took = time.monotonic() - begin
        print(f"{tool} {part}: {took:.0f} s", flush=True)
        return tool, log, took

    with ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(one, range(len(jobs))))


def watched(tool: str, calls: list[str]) -> int:
    """How many of the calls a tool can judge."""
    return sum(not any(part in call for part in WITHOUT.get(tool, [])) for call in calls)


def launched(folder: Path) -> tuple[list[str], list[str]]:
    """The names of the calls, and of the kernels that they launch."""
    names = folder / "kernels"
    log = subprocess.run(
        [sys.executable, str(PROGRAM), "--kernels", str(names)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    return re.findall(r"^call: (.*)$", log, re.MULTILINE), names.read_text().splitlines()


def main() -> int:
    import measure

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tools", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--sanitizer", default="compute-sanitizer")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for a process")
    parser.add_argument("--logs", type=Path, help="a folder for what the tools print")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    version = subprocess.run(
        [options.sanitizer, "--version"], check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    with tempfile.TemporaryDirectory() as folder:
        calls, names = launched(Path(folder))
    missing = not_reached(names)
    print(f"{len(calls)} calls; families not reached: {', '.join(missing) or 'none'}", flush=True)
    done = sanitize(options.tools, options.sanitizer, options.timeout)
    rows = []
    for tool in options.tools:
        logs = [log for of, log, _ in done if of == tool]
        rows.append(summary(tool, logs, max(took for of, _, took in done if of == tool)))
        print(rows[-1])
        if options.logs:
            options.logs.mkdir(parents=True, exist_ok=True)
            (options.logs / f"{tool}.log").write_text("\n".join(logs))
    if options.output:
        found = {"families": len(families()), "not reached": missing, "calls": len(calls)}
        release = re.search(r"Version (\S+)", version)
        found |= {"compute-sanitizer": release[1] if release else version, "tools": rows}
        measure.save(options.output, found)
    clean = all(
        row["calls"] == watched(row["tool"], calls) and not row["reports in my_ops"] for row in rows
    )
    return int(not clean)


if __name__ == "__main__":
    sys.exit(main())
