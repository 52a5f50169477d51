"""Builds the ported operator and tries it; on a GPU, beside the old kernel."""

import ctypes
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils import cpp_extension

here = Path(__file__).resolve().parent
root = here.parents[1]
with_cuda = torch.cuda.is_available() and cpp_extension.CUDA_HOME is not None
sources = ["csrc/prelu.cpp", "kernels/prelu_cpu.cpp"]
flags = ["-O3", "-std=c++20", "-DTORCH_TARGET_VERSION=0x020a000000000000"]
if with_cuda:
    sources += ["csrc/prelu_cuda.cpp", "kernels/prelu.cu", "before.cu"]
    flags += ["-DMY_OPS_WITH_CUDA", "-DUSE_CUDA"]

library = cpp_extension.load(
    name="porting",
    sources=[str(here / source) for source in sources],
    extra_include_paths=[
        str(folder) for folder in (here / "include", root / "csrc", root / "kernels")
    ],
    extra_cflags=flags,
    extra_cuda_cflags=[*flags[:2], "-DMY_OPS_WITH_CUDA"],
    with_cuda=with_cuda,
    is_python_module=False,
)


def try_on(device):
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        for shape in ((2, 3, 5, 7), (4, 3), (0, 3, 5), (2, 0, 5), (9, 1000, 33)):
            x, slope = torch.randn(shape).to(device, dtype), torch.randn(shape[1]).to(device, dtype)
            for view in (x, x.mT.contiguous().mT, x[::2]):
                got, want = torch.ops.porting.prelu(view, slope), F.prelu(view, slope)
                assert torch.equal(got, want), (device, dtype, shape)
    print(f"{device}: as torch's own")
    for x, slope in ((torch.ones(2, 3), torch.ones(2)), (torch.ones(2, 3).int(), torch.ones(3))):
        try:
            torch.ops.porting.prelu(x.to(device), slope.to(device))
        except RuntimeError as error:
            print(f"{device}: {error}")


try_on("cpu")
if with_cuda:
    try_on("cuda")
    old = ctypes.CDLL(library).prelu_forward_gpu
    old.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int] * 3
    x, slope = torch.randn(8, 64, 56 * 56, device="cuda"), torch.randn(64, device="cuda")
    out = torch.empty_like(x)
    old(x.data_ptr(), slope.data_ptr(), out.data_ptr(), *x.shape)
    assert torch.equal(torch.ops.porting.prelu(x, slope), out)
    print("cuda: as before the port")
