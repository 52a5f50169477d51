// Sums of products of parts. Tensor cores truncate their sums, so those of the leading parts are
// short, and promoted: added to float registers, with rounding. The other products are small, and
// have one accumulator for all of k.
#pragma once

#include <cuda_runtime.h>

namespace my_ops::cuda {

template <int kCount>
__device__ __forceinline__ void promote(float (&sum)[kCount], const float (&lead)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) sum[i] += lead[i];
}

// Adds what is pending to a compensated sum, and carries what the addition loses into the next.
template <int kCount>
__device__ __forceinline__ void compensate(float (&sum)[kCount], float (&pending)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float before = sum[i];
    sum[i] += pending[i];
    pending[i] -= sum[i] - before;  // what the sum lost
  }
}

// Adds the sums of the other products, whose low parts are scaled by 2^kLowBits.
template <int kLowBits, int kCount>
__device__ __forceinline__ void add_cross(float (&sum)[kCount], const float (&cross)[kCount]) {
  constexpr float kLowScale = 1.0f / (1 << kLowBits);
#pragma unroll
  for (int i = 0; i < kCount; ++i) sum[i] = fmaf(cross[i], kLowScale, sum[i]);
}

template <int kLowBits, int kCount>
__device__ __forceinline__ void add_cross(float (&sum)[kCount], const float (&cross)[kCount],
                                          const float (&pending)[kCount]) {
  constexpr float kLowScale = 1.0f / (1 << kLowBits);
#pragma unroll
  for (int i = 0; i < kCount; ++i) sum[i] += fmaf(cross[i], kLowScale, pending[i]);
}

}  // namespace my_ops::cuda
