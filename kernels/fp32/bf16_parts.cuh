// Floats split into three bf16 parts, which hold all 24 bits, as fragments of mma.sync. A product
// of floats takes six products of parts; the other three are smaller than float's rounding.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "ptx/math.cuh"
#include "ptx/mma.cuh"

namespace my_ops::cuda {

constexpr int kParts = 3;
constexpr float kTiny = 0x1p-102f;  // the last part of a smaller float may be lost

// A lane's fragment holds four of an mma's 16 k per row. Which four is arbitrary as long as a and b
// agree. Here they are four consecutive ones, from this one on.
__device__ __forceinline__ int fragment_k(int lane) { return lane % 4 * 4; }

// The largest and smallest magnitudes among some elements.
struct Range {
  uint32_t largest = 0;            // the bits shifted by one: without the sign
  uint32_t smallest = 0xffffffff;  // the same minus one, so that zero becomes the largest

  __device__ __forceinline__ void add(float x) {
    const uint32_t twice = __float_as_uint(x) << 1;
    largest = max(largest, twice);
    smallest = min(smallest, twice - 1);
  }
  __device__ __forceinline__ void add(const Range& other) {
    largest = max(largest, other.largest);
    smallest = min(smallest, other.smallest);
  }
  __device__ __forceinline__ float max_magnitude() const { return __uint_as_float(largest >> 1); }
  // The smallest one that is not 0; a large value if there is none.
  __device__ __forceinline__ float min_magnitude() const {
    return __uint_as_float(min((smallest >> 1) + 1, 0x7f7fffffu));
  }
};

// That of the lane whose number differs in these bits.
__device__ __forceinline__ Range shuffled(const Range& range, int lanes) {
  return {__shfl_xor_sync(~0u, range.largest, lanes), __shfl_xor_sync(~0u, range.smallest, lanes)};
}

// bf16 parts and tensor cores are relied on for normal numbers only. Anything smaller counts as
// lost.
constexpr float kLost = 0x1p-125f;
constexpr float kTinyProduct = 0x1p-100f;  // smaller products may lose their last bits

// The error that subnormal numbers may cause in a sum of k products of parts. tiny_a: a's elements
// lose bits below it.
__device__ __forceinline__ float error_bound(const Range& a, const Range& b, int k,
                                             float tiny_a = kTiny) {
  float error = 0.0f;
  if (a.min_magnitude() < tiny_a) error += kLost * b.max_magnitude();
  if (b.min_magnitude() < kTiny) error += kLost * a.max_magnitude();
  if (a.min_magnitude() * b.min_magnitude() < kTinyProduct) error += kLost;
  return error * static_cast<float>(k);
}

// Whether a sum with such an error must be computed again: Inf, NaN, values that round to Inf in
// bf16, and sums that tiny numbers may have changed.
__device__ __forceinline__ bool is_suspect(float sum, float error) {
  constexpr float kErrorMargin = 0x1p25f;  // a sum must exceed its error by this factor
  return !(fabsf(sum) <= 0x1.fffffep127f && fabsf(sum) >= error * kErrorMargin);
}

// Two floats as pairs of parts, each part rounded.
struct Pair {
  uint32_t part[kParts];

  __device__ __forceinline__ Pair(float x, float y) {
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      part[i] = ptx::cvt_rn_bf16x2(x, y);
      x -= __uint_as_float(part[i] << 16);
      y -= __uint_as_float(part[i] & 0xffff0000u);
    }
  }
};

// A lane's fragment of a: four consecutive k of two rows, eight rows apart.
__device__ __forceinline__ void split_rows(const float (&top)[4], const float (&bottom)[4],
                                           uint4 (&parts)[kParts]) {
  const Pair x(top[0], top[1]), y(bottom[0], bottom[1]), z(top[2], top[3]), w(bottom[2], bottom[3]);
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    parts[i] = make_uint4(x.part[i], y.part[i], z.part[i], w.part[i]);
  }
}

// A lane's fragment of b: four consecutive k of one column.
__device__ __forceinline__ void split_column(const float (&v)[4], uint2 (&parts)[kParts]) {
  const Pair x(v[0], v[1]), y(v[2], v[3]);
#pragma unroll
  for (int i = 0; i < kParts; ++i) parts[i] = make_uint2(x.part[i], y.part[i]);
}

// The leading products of a 16 x 8 tile, over 8 of k each: the fewer products a tensor core adds at
// a time, the less it truncates.
__device__ __forceinline__ void multiply_leading(float (&first)[4], float (&second)[4],
                                                 const uint4& a, const uint2& b) {
  ptx::mma_m16n8k8_bf16(first, a.x, a.y, b.x);
  ptx::mma_m16n8k8_bf16(second, a.z, a.w, b.y);
}

// sum += all products except the leading ones, of which they are 2^-8, for adjacent tiles, smallest
// first. Tensor cores truncate sums instead of rounding them, so leading products must be added
// outside.
template <int kTiles>
__device__ __forceinline__ void add_other_products(float (&sum)[kTiles][4],
                                                   const uint4 (&a)[kParts],
                                                   const uint2 (&b)[kTiles][kParts]) {
#pragma unroll
  for (int order = 2; order > 0; --order) {
#pragma unroll
    for (int part = 0; part <= order; ++part) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        ptx::mma_m16n8k16_bf16(sum[t], a[part], b[t][order - part], sum[t]);
      }
    }
  }
}

}  // namespace my_ops::cuda
