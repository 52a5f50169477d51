"""``python -m my_ops run``: runs a program much as Python would, with :class:`my_ops.fast_fp32` on.

``runpy`` runs it, so ``sys.argv[0]`` is absolute, and functions of ``atexit``, and threads that
outlive the main one, no longer find the program as ``__main__``.
"""

from __future__ import annotations

import code
import contextlib
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import my_ops

_OURS = {
    __file__,
    runpy.run_path.__code__.co_filename,
    str(Path(__file__).with_name("__main__.py")),
}
_SPAWNING = ("multiprocessing.popen_spawn_posix", "multiprocessing.popen_forkserver")
_SPAWNED = """\
Processes that multiprocessing spawned began with the switch off: call my_ops.fast_fp32() in them.
"""


class _Program(ModuleType):
    """The program's module under the name that processes it spawns know it by. multiprocessing set
    that name at its import, when the main module was still ours."""

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.modules["__main__"], name)


class _Stderr:
    """The file that number 2 is at first. The program may close it, or give the number to another
    file, which the report must not be written to."""

    def __init__(self) -> None:
        self._number: int | None = None
        with contextlib.suppress(OSError):  # it was closed before
            self._number = os.dup(2)
            self._file = os.fstat(self._number)
            os.register_at_fork(after_in_child=self.close)

    def close(self) -> None:
        if self._number is not None:
            with contextlib.suppress(OSError):
                os.close(self._number)
        self._number = None

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError, AttributeError):  # the program closed its own
            sys.stderr.flush()
        if self._number is None:
            return
        with contextlib.suppress(OSError):  # the program closed every number, or nobody reads
            if os.path.samestat(os.fstat(self._number), self._file):
                os.write(self._number, text.encode())


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename in _OURS:
        trace = trace.tb_next
    return trace


def _show_error(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """As Python shows it for the program alone: without the frames above it."""
    trace = _without_ours(trace)
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


def _run(arguments: list[str]) -> dict[str, Any]:
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        return runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    sys.argv = arguments
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = str(Path(arguments[0]).resolve().parent)
    program = arguments[0]
    if os.path.isfile(program):  # a relative __file__ would be wrong after os.chdir
        program = os.path.abspath(program)
    return runpy.run_path(program, run_name="__main__")


def _run_and_ask(arguments: list[str]) -> None:
    """Python's -i: a prompt with the names of the program, however it ended."""
    try:
        names = _run(arguments)
    except BaseException as error:
        trace = _without_ours(error.__traceback__)
        if trace is None:  # it did not start
            raise
        if not isinstance(error, SystemExit):
            sys.excepthook(type(error), error, error.__traceback__)
        names = trace.tb_frame.f_globals
    code.interact(banner="", exitmsg="", local=names)


def run_program(arguments: list[str]) -> None:
    """Runs ``[-i] SCRIPT ARGS`` or ``[-i] -m MODULE ARGS``, then prints the switch's report to
    stderr. With ``-i`` there is a prompt between the two.

    Raises:
        SystemExit: 2, if there is no such program; stderr says why.
    """
    stderr = _Stderr()
    run: Callable[[list[str]], Any] = _run
    if arguments[0] == "-i":
        arguments, run = arguments[1:], _run_and_ask
    my_ops.fast_fp32()
    sys.modules["__mp_main__"] = _Program("__mp_main__")
    sys.excepthook = _show_error
    found = True
    try:
        run(arguments)
    except (ImportError, OSError) as error:
        found = _without_ours(error.__traceback__) is not None
        if found:
            raise
        program = arguments[arguments[0] == "-m"] or "''"
        why = error.strerror if isinstance(error, OSError) else error
        stderr.write(f"run: cannot run {program}: {why}\n")
        raise SystemExit(2) from None
    finally:
        if found:
            spawned = any(name in sys.modules for name in _SPAWNING)
            stderr.write(f"{my_ops.fast_fp32.report()}\n{_SPAWNED if spawned else ''}")
