"""``python -m my_ops run``: runs a program much as Python would, with :class:`my_ops.fast_fp32` on.

``runpy`` runs it, so ``sys.argv[0]`` is absolute, and functions of ``atexit``, and threads that
outlive the main one, no longer find the program as ``__main__``.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
from pathlib import Path
from traceback import walk_tb
from types import ModuleType
from typing import Any

import my_ops


class _Program(ModuleType):
    """The program's module under the name that processes it spawns know it by. multiprocessing set
    that name at its import, when the main module was still ours."""

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.modules["__main__"], name)


def run_program(arguments: list[str]) -> None:
    """Runs ``SCRIPT ARGS`` or ``-m MODULE ARGS``, then prints the switch's report to stderr.

    Raises:
        SystemExit: there is no such program. Its text says why.
    """
    my_ops.fast_fp32()
    sys.modules["__mp_main__"] = _Program("__mp_main__")
    found = True
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            if not getattr(sys.flags, "safe_path", False):
                sys.path[0] = str(Path(arguments[0]).resolve().parent)
            program = arguments[0]
            if os.path.isfile(program):  # a relative __file__ would be wrong after os.chdir
                program = os.path.abspath(program)
            runpy.run_path(program, run_name="__main__")
    except (ImportError, OSError) as error:
        found = not _is_runpys(error)
        if found:
            raise
        program = arguments[arguments[0] == "-m"] or "''"
        why = error.strerror if isinstance(error, OSError) else error
        raise SystemExit(f"run: cannot run {program}: {why}") from None
    finally:
        stderr = getattr(sys, "stderr", None)
        if found and stderr is not None:
            with contextlib.suppress(OSError, ValueError):  # the program closed it
                print(my_ops.fast_fp32.report(), file=stderr, flush=True)


def _is_runpys(error: BaseException) -> bool:
    """Whether runpy raised it, before the program ran."""
    frames = [frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__)]
    return set(frames[1:]) == {runpy.run_path.__code__.co_filename}
