import os

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel

import my_ops
from my_ops.build import BuildCells, CellExtension


class Wheel(bdist_wheel):
    def get_tag(self):
        return "py3", "none", super().get_tag()[2]  # the code knows nothing of Python


setup(
    name="my_cells",
    version="0.1.0",
    package_dir={"": "src"},
    packages=["my_cells"],
    install_requires=[f"my_ops=={my_ops.__version__.split('+')[0]}"],  # whose engine is compiled
    ext_modules=[
        CellExtension(
            "my_cells.units",
            gpus=os.environ.get("MY_CELLS_GPUS", "").split(),  # such as h200 a100: default none
            hidden_sizes=[64, 512],
            batch_sizes=range(1, 65),
        )
    ],
    cmdclass={"bdist_wheel": Wheel, "build_ext": BuildCells},
)
