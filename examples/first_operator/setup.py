import torch
from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from torch.utils import cpp_extension

with_cuda = torch.cuda.is_available() and cpp_extension.CUDA_HOME is not None
Extension = cpp_extension.CUDAExtension if with_cuda else cpp_extension.CppExtension


class Wheel(bdist_wheel):
    def get_tag(self):
        return "py3", "none", super().get_tag()[2]  # the library knows nothing of Python


setup(
    name="first_operator",
    version="0.1.0",
    package_dir={"": "src"},
    packages=["first_operator"],
    install_requires=["torch>=2.10"],
    ext_modules=[
        Extension(
            "first_operator._C",
            ["square.cpp", *["square_cuda.cu"] * with_cuda],
            define_macros=[
                ("TORCH_TARGET_VERSION", "0x020a000000000000"),  # torch's stable ABI, from 2.10 on
                *[("USE_CUDA", None)] * with_cuda,
            ],
            extra_compile_args={"cxx": ["-O3", "-std=c++20"], "nvcc": ["-O3", "-std=c++20"]},
            py_limited_api=True,  # else torch links its Python library
        )
    ],
    cmdclass={
        "bdist_wheel": Wheel,
        "build_ext": cpp_extension.BuildExtension.with_options(no_python_abi_suffix=True),
    },
)
