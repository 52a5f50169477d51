"""The float product of compute capability 8.0, for tests on later GPUs, where few plans take it.
Its sources are compiled here."""

import ctypes
import functools
import os
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

ROOT = Path(__file__).resolve().parents[1]
BINDING = """
#include "gemm/fp32_sm80/fp32_sm80.h"
#include "gemm/fp32_sm80/plan.h"

extern "C" int multiply(const float* a, const float* b, float* out, const int64_t* sizes,
                        const int64_t* strides, int shared_bytes, void* stream) {
  using namespace my_ops;
  cuda::GemmArgs<float, float> args{};
  args.a = a, args.b = b, args.out = out;
  args.batch = 1, args.m = sizes[0], args.k = sizes[1], args.n = sizes[2];
  args.a_row = strides[0], args.a_col = strides[1];
  args.b_row = strides[2], args.b_col = strides[3];
  args.out_row = args.n, args.out_col = 1;
  cuda::GemmPlan plan{.kernel = cuda::GemmKernel::kFp32Sm80};
  const cuda::DeviceFacts device{
      .major = 8, .sm_count = 108, .shared_bytes = shared_bytes, .code = 80};
  plan.tile = cuda::fp32_sm80::stages(device);
  if (plan.tile == 0) return cudaErrorInvalidValue;
  return cuda::gemm_fp32_sm80(args, plan, static_cast<cudaStream_t>(stream));
}
"""


@functools.cache
def _library():
    if cpp_extension.CUDA_HOME is None or not (ROOT / "kernels").is_dir():
        pytest.skip("needs nvcc and the source tree")
    build = Path(cpp_extension.get_default_build_root(), f"my_ops_fp32_sm80_{os.getuid()}")
    build.mkdir(parents=True, exist_ok=True)
    unit = build / "fp32_sm80_test.cu"
    text = f'#include "{ROOT}/kernels/gemm/fp32_sm80/fp32_sm80.cu"\n{BINDING}'
    if not unit.exists() or unit.read_text() != text:
        unit.write_text(text)
    path = cpp_extension.load(
        name="my_ops_fp32_sm80",
        sources=[str(unit)],
        extra_include_paths=[str(ROOT / "include"), str(ROOT / "kernels")],
        extra_cuda_cflags=["-O3", "-std=c++20", "-DMY_OPS_WITH_CUDA"],
        is_python_module=False,
        with_cuda=True,
        build_directory=str(build),
    )
    return ctypes.CDLL(path)


def gemm_fp32_sm80(a, b, shared_bytes=163 * 1024):
    """a @ b of float matrices, as on a device with this much shared memory per block."""
    (m, k), n = a.shape, b.shape[1]
    out = torch.empty(m, n, device=a.device)
    if out.numel() == 0:
        return out
    sizes = (ctypes.c_int64 * 3)(m, k, n)
    strides = (ctypes.c_int64 * 4)(*a.stride(), *b.stride())
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (a, b, out)]
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    status = _library().multiply(*pointers, sizes, strides, shared_bytes, stream)
    assert status == 0, f"cudaError_t {status}"
    return out
