"""An operator in a dozen lines, compiled from strings: addone for an int and for a tensor."""

import torch
from torch.utils import cpp_extension

CPP = """
int64_t addone(int64_t x) { return x + 1; }

torch::Tensor addone_cuda(const torch::Tensor& x);

torch::Tensor addone_tensor(const torch::Tensor& x) {
  return x.is_cuda() ? addone_cuda(x) : x + 1;
}
"""

CPP_ONLY = """
torch::Tensor addone_cuda(const torch::Tensor& x) { TORCH_CHECK(false, "built without CUDA"); }
"""

CUDA = """
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>

__global__ void addone_kernel(const float* x, float* out, int64_t n) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < n) out[i] = x[i] + 1.0f;
}

torch::Tensor addone_cuda(const torch::Tensor& x) {
  TORCH_CHECK(x.scalar_type() == torch::kFloat, "addone: x must be float32");
  const c10::cuda::CUDAGuard guard(x.device());
  const torch::Tensor dense = x.contiguous(), out = torch::empty_like(dense);
  const int64_t n = dense.numel(), blocks = (n + 255) / 256;
  if (n == 0) return out;
  addone_kernel<<<blocks, 256, 0, c10::cuda::getCurrentCUDAStream()>>>(
      dense.data_ptr<float>(), out.data_ptr<float>(), n);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return out;
}
"""

with_cuda = torch.cuda.is_available() and cpp_extension.CUDA_HOME is not None
module = cpp_extension.load_inline(
    name="addone_inline",
    cpp_sources=CPP if with_cuda else CPP + CPP_ONLY,
    cuda_sources=CUDA if with_cuda else None,
    functions=["addone", "addone_tensor"],
)
print("int:", module.addone(41))
print("tensor:", module.addone_tensor(torch.tensor([1.0, 2.0])).tolist())
if with_cuda:
    print("CUDA:", module.addone_tensor(torch.tensor([1.0, 2.0], device="cuda")).tolist())
