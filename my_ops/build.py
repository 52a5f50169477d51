"""For the ``setup.py`` of a package that has cells of its own: :class:`CellExtension` has them
compiled when the package is built, by :class:`BuildCells`. Needs setuptools."""

from __future__ import annotations

import importlib
import logging
import shutil
import sys
from collections.abc import Iterable
from itertools import product
from pathlib import Path

import torch
from setuptools import Extension
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

from my_ops._explain import GPUS
from my_ops.recurrent import _own_cpu, _own_kernels
from my_ops.recurrent._compiled import CannotCompile, built_folder
from my_ops.recurrent.own_cell import CellDefinition

__all__ = ["BuildCells", "CellExtension"]


class CellExtension(Extension):
    """The cells of :func:`my_ops.cell` at the top level of a module, compiled ahead of time::

        from my_ops.build import BuildCells, CellExtension

        setup(
            packages=["my_cells"],
            ext_modules=[CellExtension("my_cells.units", gpus=["h200"], hidden_sizes=[512])],
            cmdclass={"build_ext": BuildCells},
        )

    They are compiled for the CPU, for all sizes and dtypes, with one library for each level of
    x86-64; and for CUDA, where ``gpus`` names any, for layers of all combinations of the sizes and
    dtypes given. ``my_cells/units.compiled`` in the wheel has the code, and layers find it there
    in place of compiling it. It fits the release of my_ops that it was built with; with another
    one, and for other GPUs and sizes, cells are compiled at the first call as ever.

    Args:
        module: the name of a module of the package. The build imports it.
        gpus: the names of GPUs, as ``python -m my_ops explain --gpu`` takes them.
        hidden_sizes: of whole layers, with ``heads`` too.
        heads: any number of them may take kernels of its own, as with ``batch_sizes``.
        batch_sizes: any in their range may take a kernel of its own, so list them all:
            ``range(1, 65)``. Most of them share their kernels.
        dtypes: float32, float16 or bfloat16. They matter on CUDA alone.

    Raises:
        ValueError: a name or a dtype is not one of these, a size is below 1, sizes are missing, or
            ``heads`` do not divide ``hidden_sizes``.
    """

    def __init__(
        self,
        module: str,
        *,
        gpus: Iterable[str] = (),
        hidden_sizes: Iterable[int] = (),
        heads: Iterable[int] = (1,),
        batch_sizes: Iterable[int] = (1,),
        dtypes: Iterable[torch.dtype] = (torch.float32,),
    ) -> None:
        super().__init__(module, sources=[])
        self.gpus, self.dtypes = list(gpus), list(dtypes)
        self.hidden_sizes, self.batch_sizes = list(hidden_sizes), list(batch_sizes)
        self.heads = list(heads)
        _check("gpus", self.gpus, GPUS)
        _check("dtypes", self.dtypes, _own_kernels.TYPES)
        for name in ("hidden_sizes", "batch_sizes", "heads"):
            sizes = getattr(self, name)
            if any(size < 1 for size in sizes):
                raise ValueError(f"CellExtension: {name} must be at least 1, got {sizes}")
            if self.gpus and not sizes:
                raise ValueError(f"CellExtension: {name} must not be empty where gpus are given")
        if any(hidden % heads for hidden, heads in product(self.hidden_sizes, self.heads)):
            raise ValueError(
                f"CellExtension: heads must divide hidden_sizes = {self.hidden_sizes}, got "
                f"{self.heads}"
            )


def _check(name: str, given: Iterable[object], allowed: Iterable[object]) -> None:
    for value in given:
        if value not in allowed:
            names = ", ".join(map(str, allowed))
            raise ValueError(f"CellExtension: {name} must be of {names}, got {value!r}")


class BuildCells(build_ext):
    """setuptools' ``build_ext``, which also compiles each :class:`CellExtension`. A package that
    has torch's extensions too takes a class of both, ``class Build(BuildCells, BuildExtension)``.
    """

    extensions: list[Extension]

    def finalize_options(self) -> None:
        super().finalize_options()
        self.of_cells = [e for e in self.extensions if isinstance(e, CellExtension)]
        self.extensions = [e for e in self.extensions if not isinstance(e, CellExtension)]

    def run(self) -> None:
        super().run()
        for extension in self.of_cells:
            self._compile_cells(extension)

    def _compile_cells(self, extension: CellExtension) -> None:
        root = Path(self.get_finalized_command("build_py").get_package_dir("")).resolve()
        sys.path.insert(0, str(root))
        try:
            module = importlib.import_module(extension.name)
        finally:
            sys.path.remove(str(root))
        here = built_folder(extension.name)
        if here is None or not here.is_relative_to(root):
            raise CompileError(f"{extension.name}: must be a module in {root}, got {module}")
        cells = [c for c in vars(module).values() if isinstance(c, CellDefinition)]
        cells = [c for c in cells if c.__module__ == extension.name]
        if not cells:
            raise CompileError(f"{extension.name}: has no cell of my_ops.cell at its top level")
        folder = here if self.inplace else Path(self.build_lib, here.relative_to(root))
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for cell in cells:
            name = f"{extension.name}.{cell.name}"
            self.announce(f"compiling {name}", logging.INFO)
            try:
                header = cell.header()
                _own_cpu.build(header, folder)
                sizes = extension.hidden_sizes, extension.heads
                for gpu, dtype, hidden, heads in product(extension.gpus, extension.dtypes, *sizes):
                    name = f"{extension.name}.{cell.name}, {hidden} units of {dtype} on {gpu}"
                    self.announce(f"compiling {name}", logging.INFO)
                    layers = (dtype, hidden, heads, extension.batch_sizes)
                    _own_kernels.build(cell._cell, header, folder, GPUS[gpu], *layers)
            except (CannotCompile, ValueError) as error:
                raise CompileError(f"{name}: {error}") from None
