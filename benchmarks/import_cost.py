"""What `import my_ops` adds to `import torch`: python benchmarks/import_cost.py

Processor time in ms: the median of fifteen processes that have imported torch.
"""

import statistics
import subprocess
import sys

PROGRAM = """
import time
import torch
start = time.process_time()
{statement}
print((time.process_time() - start) * 1e3)
"""


def cost(statement: str) -> float:
    command = [sys.executable, "-c", PROGRAM.format(statement=statement)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    cost("import my_ops")  # this fills the file cache
    times = [cost("import my_ops") for _ in range(15)]
    print(f"import my_ops after import torch: {statistics.median(times):.1f} ms")


if __name__ == "__main__":
    main()
