"""The engine's kernels as one file, for NVRTC, which compiles them where the wheel is installed."""

import re
from pathlib import Path


def text(root: Path) -> str:
    """kernels/recurrent/nvrtc.cuh with all that it includes, each file once and where it is first
    included, without headers of C++ and CUDA and without comments."""
    seen = set()

    def inlined(name: str) -> str:
        if name in seen:
            return ""
        seen.add(name)
        path = next(p for p in (root / "kernels" / name, root / "include" / name) if p.exists())
        code = re.sub(r"^#(pragma once|include <.*)\n", "", path.read_text(), flags=re.M)
        return re.sub(r'^#include "(.*)"\n', lambda match: inlined(match[1]), code, flags=re.M)

    whole = re.sub(r"^ *//.*\n", "", inlined("recurrent/nvrtc.cuh"), flags=re.M)
    return re.sub(r"\n{2,}", "\n", whole)
