// Reads W_h, which need not be aligned.
#pragma once

#include "common/numeric.cuh"

namespace my_ops::cuda {

// 16 bytes of weights that are `step` apart. The first `count` exist; the others are zero.
template <typename T>
__device__ __forceinline__ uint4 gather(const T* p, int64_t step, int64_t count) {
  uint32_t word[4] = {};
#pragma unroll
  for (int e = 0; e < static_cast<int>(16 / sizeof(T)); ++e) {
    const uint32_t v = e < count ? bits(p[e * step]) : 0;
    word[e * sizeof(T) / 4] |= v << (e * sizeof(T) % 4 * 8);
  }
  return {word[0], word[1], word[2], word[3]};
}

// Where kernels would contain it up to 64 times.
template <typename T>
__device__ __noinline__ uint4 gather_call(const T* p, int64_t step, int64_t count) {
  return gather(p, step, count);
}

// 16 bytes of a row of W_h from `unit` on; elements beyond `units` are zero.
template <typename T>
__device__ __forceinline__ uint4 load_units(const T* row, int64_t unit, int64_t units,
                                            bool aligned) {
  if (aligned && unit + static_cast<int>(16 / sizeof(T)) <= units) {
    return __ldg(reinterpret_cast<const uint4*>(row + unit));
  }
  return gather_call(row + unit, 1, units - unit);
}

// 16 bytes of column `unit` of the head's rows of W_h: consecutive rows of one gate; zeros beyond
// its units.
template <typename T, typename Head>
__device__ __forceinline__ uint4 load_column(const T* w_h, int64_t w_row, int64_t gate, int64_t k,
                                             int64_t unit, const Head& head, int64_t hidden) {
  return gather_call(w_h + (gate * hidden + head.first_of_head + k) * w_row + unit, w_row,
                     unit < head.head_units(hidden) ? head.head_units(hidden) - k : 0);
}

// Where a unit's weights are: that of gate g and element k of the vector is
// first[g * gate_step + k * k_step], for k < count. The others are zero.
template <typename T>
struct UnitWeights {
  const T* first;
  int64_t gate_step, k_step;
  int count;

  // Unit `unit` of the head as a row of W_h, [gates, hidden, units], for forward; as a column for
  // backward.
  template <typename Head>
  __device__ __forceinline__ static UnitWeights row(const T* w_h, int64_t w_row, int64_t unit,
                                                    const Head& head, int64_t hidden) {
    return {w_h + (head.first_of_head + unit) * w_row, hidden * w_row, 1,
            unit < head.head_units(hidden) ? static_cast<int>(head.head_units(hidden)) : 0};
  }
  template <typename Head>
  __device__ __forceinline__ static UnitWeights column(const T* w_h, int64_t w_row, int64_t unit,
                                                       const Head& head, int64_t hidden) {
    return {w_h + head.first_of_head * w_row + unit, hidden * w_row, w_row,
            unit < head.head_units(hidden) ? static_cast<int>(head.head_units(hidden)) : 0};
  }

  // For all gates, elements start, start + 1, ... of the vector, by fours that are kStride apart,
  // as float. Pointers advance, because the products of an index would be most of the kernel's
  // code.
  template <int kStride, int Gates, int Fours>
  __device__ __forceinline__ void load(int start, float4 (*to)[Fours]) const {
#pragma unroll
    for (int gate = 0; gate < Gates; ++gate) {
      const T* four = first + gate * gate_step + start * k_step;
#pragma unroll
      for (int i = 0; i < Fours; ++i) {
        const T* p = four;
        float v[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          v[e] = i * kStride + e < count - start ? my_ops::cuda::load(*p) : 0.0f;
          p += k_step;
        }
        to[gate][i] = {v[0], v[1], v[2], v[3]};
        four += kStride * k_step;
      }
    }
  }
};

}  // namespace my_ops::cuda
