// Reads W_h, which need not be aligned.
#pragma once

#include "common/numeric.cuh"

namespace my_ops::cuda {

// 16 bytes of weights that are `step` apart. The first `count` exist; the others are zero. Not
// inlined: a slab calls it up to 64 times, which would be half of the code to compile.
template <typename T>
__device__ __noinline__ uint4 gather(const T* p, int64_t step, int64_t count) {
  uint32_t word[4] = {};
#pragma unroll
  for (int e = 0; e < static_cast<int>(16 / sizeof(T)); ++e) {
    const uint32_t v = e < count ? bits(p[e * step]) : 0;
    word[e * sizeof(T) / 4] |= v << (e * sizeof(T) % 4 * 8);
  }
  return {word[0], word[1], word[2], word[3]};
}

// 16 bytes of a row of W_h from `unit` on; elements beyond `hidden` are zero.
template <typename T>
__device__ __forceinline__ uint4 load_units(const T* row, int64_t unit, int64_t hidden,
                                            bool aligned) {
  if (aligned && unit + static_cast<int>(16 / sizeof(T)) <= hidden) {
    return __ldg(reinterpret_cast<const uint4*>(row + unit));
  }
  return gather(row + unit, 1, hidden - unit);
}

// 16 bytes of column `unit` of W_h: consecutive rows of one gate; zeros beyond `hidden`.
template <typename T>
__device__ __forceinline__ uint4 load_column(const T* w_h, int64_t w_row, int64_t gate, int64_t k,
                                             int64_t unit, int64_t hidden) {
  return gather(w_h + (gate * hidden + k) * w_row + unit, w_row, unit < hidden ? hidden - k : 0);
}

}  // namespace my_ops::cuda
