// square(x) = x * x on the GPU.
#include <cuda_runtime_api.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/shim_utils.h>

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

constexpr int kThreads = 256;

__global__ void square_kernel(const float* x, float* out, int64_t n) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < n) out[i] = x[i] * x[i];
}

Tensor square(const Tensor& x) {
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Float, "square: x must be of dtype float32");
  // The GPU of x, which need not be the current one, and the stream that torch works on there.
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream));

  const Tensor dense = torch::stable::contiguous(x);
  const Tensor out = torch::stable::empty_like(dense);
  const int64_t n = dense.numel();
  if (n == 0) return out;  // a launch of no blocks is an error
  const auto blocks = static_cast<unsigned>((n + kThreads - 1) / kThreads);
  square_kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      static_cast<const float*>(dense.const_data_ptr()),
      static_cast<float*>(out.mutable_data_ptr()), n);
  const cudaError_t error = cudaGetLastError();
  STD_TORCH_CHECK(error == cudaSuccess, "square: ", cudaGetErrorString(error));
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(first_operator, CUDA, m) { m.impl("square", TORCH_BOX(&square)); }
