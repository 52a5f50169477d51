import torch
from setuptools import setup
from torch.utils import cpp_extension

with_cuda = torch.cuda.is_available() and cpp_extension.CUDA_HOME is not None
Extension = cpp_extension.CUDAExtension if with_cuda else cpp_extension.CppExtension
setup(
    name="first_operator",
    version="0.1.0",
    packages=["first_operator"],
    install_requires=["torch>=2.10"],
    ext_modules=[
        Extension(
            "first_operator._C",
            ["module.cpp", "square.cpp", *["square_cuda.cu"] * with_cuda],
            define_macros=[
                ("TORCH_TARGET_VERSION", "0x020a000000000000"),  # torch's stable ABI, from 2.10 on
                ("Py_LIMITED_API", "0x030A0000"),  # Python's, from 3.10 on
                *[("USE_CUDA", None)] * with_cuda,
            ],
            extra_compile_args={"cxx": ["-O3", "-std=c++20"], "nvcc": ["-O3", "-std=c++20"]},
            py_limited_api=True,
        )
    ],
    cmdclass={"build_ext": cpp_extension.BuildExtension},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
