// Launch interface of prelu. No torch here: raw pointers, sizes, a stream.
//
// x and out are (batch, channels, inner), contiguous, n elements; slope has one for each channel.
// out may be x.
#pragma once

#include <cstdint>

#ifdef MY_OPS_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace my_ops {
namespace cpu {

// Elements [begin, end). T: float, double, Half, BFloat16 (numeric_cpu.h).
template <typename T>
void prelu(const T* x, const T* slope, T* out, int64_t channels, int64_t inner, int64_t begin,
           int64_t end);

}  // namespace cpu

#ifdef MY_OPS_WITH_CUDA
namespace cuda {

// T: float, double, __half, __nv_bfloat16.
template <typename T>
cudaError_t prelu(const T* x, const T* slope, T* out, int64_t n, int64_t channels, int64_t inner,
                  cudaStream_t stream);

}  // namespace cuda
#endif

}  // namespace my_ops
