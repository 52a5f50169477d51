"""``python -m my_ops run``: runs a program as Python would, with :class:`my_ops.fast_fp32` on."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import my_ops


def run_program(arguments: list[str]) -> None:
    """Runs ``SCRIPT ARGS`` or ``-m MODULE ARGS``, then prints the switch's report to stderr."""
    my_ops.fast_fp32()
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            if not getattr(sys.flags, "safe_path", False):
                sys.path[0] = str(Path(arguments[0]).resolve().parent)
            runpy.run_path(arguments[0], run_name="__main__")
    finally:
        print(my_ops.fast_fp32.report(), file=sys.stderr)
