// prelu on the GPU. Plan: one element a thread.
#include "prelu.h"

#include "common/numeric.cuh"

namespace my_ops::cuda {
namespace {

constexpr int kThreads = 512;

// Index: 32 bits where they suffice, for the division's sake.
template <typename Index, typename T>
__global__ void __launch_bounds__(kThreads)
    prelu_kernel(const T* x, const T* slope, T* out, int64_t n, Index channels, Index inner) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= n) return;
  const compute_t<T> value = load(x[i]);
  const Index channel = static_cast<Index>(i) / inner % channels;
  out[i] = store<T>(value > 0 ? value : value * load(slope[channel]));
}

}  // namespace
}  // namespace my_ops::cuda

template <typename T>
cudaError_t my_ops::cuda::prelu(const T* x, const T* slope, T* out, int64_t n, int64_t channels,
                                int64_t inner, cudaStream_t stream) {
  if (n == 0) return cudaSuccess;  // a launch of no blocks is an error
  const auto blocks = static_cast<unsigned>(ceil_div(n, kThreads));
  if (n <= 0x7fffffff) {
    prelu_kernel<<<blocks, kThreads, 0, stream>>>(x, slope, out, n, static_cast<uint32_t>(channels),
                                                  static_cast<uint32_t>(inner));
  } else {
    prelu_kernel<<<blocks, kThreads, 0, stream>>>(x, slope, out, n, channels, inner);
  }
  return cudaGetLastError();
}

#define MY_OPS_FLOATING(T)                                                                    \
  template cudaError_t my_ops::cuda::prelu(const T*, const T*, T*, int64_t, int64_t, int64_t, \
                                           cudaStream_t);

MY_OPS_FLOATING(float)
MY_OPS_FLOATING(double)
MY_OPS_FLOATING(__half)
MY_OPS_FLOATING(__nv_bfloat16)
