"""What is compiled where the wheel is installed, for cells of a program's own, each as one file."""

import re
from pathlib import Path

# By their name in the package. NVRTC gets the first, and its own headers; the machine's C++
# compiler gets the second.
CUDA, CPU = "_recurrent.cuh", "_recurrent.hpp"
_FILES = {CUDA: "recurrent/nvrtc.cuh", CPU: "recurrent/cpu/own.h"}


def text(root: Path, name: str) -> str:
    """The file of that name in kernels/ with all that it includes, each file once and where it is
    first included, without comments and, for NVRTC, without headers of C++ and CUDA."""
    seen = set()
    dropped = r"^#(pragma once|include <.*)\n" if name == CUDA else r"^#pragma once\n"

    def inlined(name: str) -> str:
        if name in seen:
            return ""
        seen.add(name)
        path = next(p for p in (root / "kernels" / name, root / "include" / name) if p.exists())
        code = re.sub(dropped, "", path.read_text(), flags=re.M)
        return re.sub(r'^#include "(.*)"\n', lambda match: inlined(match[1]), code, flags=re.M)

    whole = re.sub(r"^ *//.*\n", "", inlined(_FILES[name]), flags=re.M)
    return re.sub(r"\n{2,}", "\n", whole)
