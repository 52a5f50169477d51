// Floats as three bf16 parts each, all 24 bits of them, as fragments of mma.sync: a product of
// floats is six products of parts, those beyond being below float's rounding.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "ptx/math.cuh"
#include "ptx/mma.cuh"

namespace my_ops::cuda {

constexpr int kParts = 3;
constexpr float kTiny = 0x1p-102f;  // of a smaller float, the last part may be lost

// mma's fragments have four slots of k a lane; they may stand for any, so long as a and b agree.
// Here lane l holds the four from this one of a chunk of 16 on.
__device__ __forceinline__ int chunk_k(int lane) { return lane % 4 * 4; }

// The extreme magnitudes among some elements.
struct Range {
  uint32_t largest = 0;            // twice the bits: the sign is gone
  uint32_t smallest = 0xffffffff;  // twice the bits, less one: zero comes out on top

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
  // The least one that is not 0; where there is none, a large one.
  __device__ __forceinline__ float min_magnitude() const {
    return __uint_as_float(min((smallest >> 1) + 1, 0x7f7fffffu));
  }
};

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

// A lane's share of a: four of k of two rows, eight apart.
__device__ __forceinline__ void split_rows(const float (&top)[4], const float (&bottom)[4],
                                           uint4 (&parts)[kParts]) {
  const Pair x(top[0], top[1]), y(bottom[0], bottom[1]), z(top[2], top[3]), w(bottom[2], bottom[3]);
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    parts[i] = make_uint4(x.part[i], y.part[i], z.part[i], w.part[i]);
  }
}

// And of b: four of k of one column.
__device__ __forceinline__ void split_column(const float (&v)[4], uint2 (&parts)[kParts]) {
  const Pair x(v[0], v[1]), y(v[2], v[3]);
#pragma unroll
  for (int i = 0; i < kParts; ++i) parts[i] = make_uint2(x.part[i], y.part[i]);
}

// The leading products of a tile of 16 x 8, over either half of a chunk of k: the fewer products a
// tensor core adds at a time, the less it cuts off.
__device__ __forceinline__ void multiply_leading(float (&first)[4], float (&second)[4],
                                                 const uint4& a, const uint2& b) {
  ptx::mma_m16n8k8_bf16(first, a.x, a.y, b.x);
  ptx::mma_m16n8k8_bf16(second, a.z, a.w, b.y);
}

// sum += the products but the leading one, 2^-8 of it, for neighbouring tiles, the smallest first.
// Tensor cores do not round sums but cut them: the leading products are to be added outside.
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
