"""Runs a command and says how far it is: progress.py LOG COMMAND...

Of a build it prints a line for each file that is compiled, of pip one for each large download. It
also prints what ptxas says of kernels whose matrix instructions it serialises, which are slow. The
output goes to the file LOG. If the command fails, its end is printed, from the first failure on.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

COMPILED = re.compile(r"\[(\d+/\d+)\] .* -c (?:.*/)?(\w+/\w+\.\w+) -o ")  # ninja's line
LARGE = re.compile(
    r"Downloading (?:\S*/)?([\w.]+)-\d\S* \((\d{2,}(?:\.\d)? MB|[\d.]+ GB)\)"
)  # pip's
SERIALISED = "Potential Performance Loss: wgmma"
LAST_LINES = 40


def main(log: str, *command: str) -> int:
    began = time.monotonic()
    lines: list[str] = []
    with (
        Path(log).open("w") as file,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as build,
    ):
        for line in build.stdout:
            lines.append(line)
            file.write(line)
            seconds = time.monotonic() - began
            if match := COMPILED.search(line):
                print(f"[{match[1]}] {match[2]}, {seconds:.0f} s", flush=True)
            elif match := LARGE.search(line):
                print(f"{match[1]}: {match[2]}, {seconds:.0f} s", flush=True)
            if SERIALISED in line:
                print(line, end="", flush=True)
    if build.returncode != 0:
        failed = next((i for i, line in enumerate(lines) if "FAILED: " in line), -LAST_LINES)
        sys.stderr.writelines(lines[failed:][:LAST_LINES])
        print(f"The whole output is in {log}", file=sys.stderr)
    return build.returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
