// What the kernels for many rows do in float: each value is two fp16 parts, and a product is three
// of wgmma. The parts hold 22 bits of a value v that a power of two scales to at most 2^14:
//   v = high + low * 2^-11
// The largest element gives the power of two of a row of W_h forward, of a column of a block's
// share backward. That of a row of h must be known before any of its steps, so it is that of max(1,
// |h0|), which bounds h if the cell is bounded, and that of 1 once h0 is forgotten. A row of the
// gates' gradients has one for each tile of units, which one block computes. Elements down to 2^-27
// of the largest keep 22 bits; below, an error is at most 2^-49 of it.
#pragma once

#include "recurrent/warpgroup/warpgroup.cuh"

namespace my_ops::cuda {

constexpr int kPartShift = 14, kPartLowBits = 11;

template <typename T>
constexpr int kParts = warpgroup_parts(sizeof(T));

__device__ __forceinline__ float pow2(int e) { return __int_as_float((e + 127) << 23); }

// e with |x| < 2^e for the largest |x|, such that pow2(kPartShift - e) is a normal number.
__device__ __forceinline__ int part_exponent(float largest) {
  return min(max((__float_as_int(largest) >> 23) - 126, kPartShift - 126), 128);
}

constexpr int kUnitExponent = 1;  // of a largest element of 1

// Backward, where each tile of units scales its part of a sum, sums have 2^-13 of their scale until
// the column's is applied: so large gradients do not overflow before small weights are. 2^13 is all
// that the scale of a column of the largest weights leaves.
constexpr int kGradPartShift = 13;

struct Parts {
  __half high, low;

  __device__ __forceinline__ explicit Parts(float scaled)
      : high(__float2half_rn(scaled)),
        low(__float2half_rn((scaled - __half2float(high)) * pow2(kPartLowBits))) {}
};

// Called by a warp: the largest of its lanes' values, none of them negative. NaN counts as nothing.
__device__ __forceinline__ float warp_largest(float v) {
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    v = fmaxf(v, __shfl_xor_sync(0xFFFFFFFF, v, lanes));
  }
  return v;
}

template <int Size>
struct PartVectors {
  Vector<__half, Size> high, low;

  __device__ __forceinline__ PartVectors(const float (&values)[Size], int exponent) {
#pragma unroll
    for (int e = 0; e < Size; ++e) {
      const Parts of(values[e] * pow2(kPartShift - exponent));
      high.at[e] = of.high;
      low.at[e] = of.low;
    }
  }
};

// What forward exchanges: h of two steps, that of step t in the matrices 2 * (t % 2) and the next
// of [4, batch, hidden], high parts and low parts.
struct PartsExchange {
  __half* parts;
  int32_t* exponents;  // of the rows

  // matrix: the size of one.
  __device__ __forceinline__ __half* at(int64_t step, int part, int64_t matrix) const {
    return parts + (2 * (step % 2) + part) * matrix;
  }
  // index: of the first value in its matrix.
  template <int Size>
  __device__ __forceinline__ void store(int64_t step, const float (&values)[Size], int exponent,
                                        int64_t index, int64_t matrix) const {
    const PartVectors<Size> of(values, exponent);
    store_vector(at(step, 0, matrix) + index, of.high);
    store_vector(at(step, 1, matrix) + index, of.low);
  }
};

// What backward exchanges: the gates' gradients of two steps, that of step t in matrix t % 2 of [2,
// batch, 2 * columns]. Columns are ordered by tile of units, gate and unit; of every kBackwardK,
// the high parts come first and then the low ones, so that a k-block has both. A row has a power of
// two for each tile.
struct GradPartsExchange {
  __half* parts;
  float* scales;  // [2, tiles, batch]: powers of two, times 2^-kGradPartShift
  int64_t columns;
  int tiles;
  int64_t batch;

  __device__ __forceinline__ float& scale(int64_t step, int64_t tile, int64_t row) const {
    return scales[(step % 2 * tiles + tile) * batch + row];
  }
  template <int Size>
  __device__ __forceinline__ void store(int64_t step, const float (&values)[Size], int exponent,
                                        int64_t row, int64_t column) const {
    const PartVectors<Size> of(values, exponent);
    __half* const to =
        parts + 2 * ((step % 2 * batch + row) * columns + column) - column % kBackwardK;
    store_vector(to, of.high);
    store_vector(to + kBackwardK, of.low);
  }
};

constexpr int kSplitThreads = 128;

// Splits h0 as the vector of step 0; a warp has a row.
template <typename T>
__global__ void __launch_bounds__(kSplitThreads)
    split_h0_kernel(const T* h0, PartsExchange to, int64_t batch, int64_t hidden) {
  const int64_t row = int64_t{blockIdx.x} * (kSplitThreads / 32) + threadIdx.x / 32;
  if (row >= batch) return;
  const int lane = threadIdx.x % 32;
  const T* const from = h0 + row * hidden;
  float largest = 1.0f;
  for (int64_t i = lane; i < hidden; i += 32) largest = fmaxf(largest, fabsf(from[i]));
  const int exponent = part_exponent(warp_largest(largest));
  if (lane == 0) to.exponents[row] = exponent;
  for (int64_t i = lane; i < hidden; i += 32) {
    const Parts parts(from[i] * pow2(kPartShift - exponent));
    to.at(0, 0, batch * hidden)[row * hidden + i] = parts.high;
    to.at(0, 1, batch * hidden)[row * hidden + i] = parts.low;
  }
}

// The product of 64 rows of the ring's k-blocks, high and low part of each, with the block's
// weights, which are arranged alike. Run by a warpgroup. The products of high parts are summed from
// zero in each k-block, as wgmma truncates its sums.
template <int kColumns>
__device__ __forceinline__ void multiply_parts(TileRing& ring, const unsigned char* weights,
                                               int k_blocks, float (&sum)[kColumns / 2]) {
  using Product = ptx::Wgmma<__half, kColumns>;
  float of_block[kColumns / 2], mixed[kColumns / 2];
  const uint32_t weights_at = ptx::wgmma_address(weights);
  const auto release = [&](int stage) {
    if (threadIdx.x % 128 == 0) ptx::mbarrier_arrive(&ring.empty[stage]);
  };
  const auto arrived = [&] {
    ptx::mbarrier_wait(&ring.full[ring.stage], ring.phase);
    ptx::wgmma_fence();
    return ptx::wgmma_address(ring.at_stage());
  };
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) sum[i] = 0.0f;
  int previous = -1;
  for (int k_block = 0; k_block < k_blocks; ++k_block) {
    const uint32_t high = weights_at + 2 * k_block * (kColumns * 8), low = high + kColumns * 8;
    uint32_t a = arrived();
#pragma unroll
    for (int k = 0; k < kWarpgroupK; k += 16) {
      Product::run(of_block, ptx::wgmma_descriptor(a + k / 8), ptx::wgmma_descriptor(high + k / 8),
                   k != 0);
      Product::run(mixed, ptx::wgmma_descriptor(a + k / 8), ptx::wgmma_descriptor(low + k / 8),
                   k_block != 0 || k != 0);
    }
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<1>();  // the low part of the previous k-block has been read
    if (previous >= 0) release(previous);
    previous = ring.stage;
    ring.advance();

    a = arrived();
#pragma unroll
    for (int k = 0; k < kWarpgroupK; k += 16) {
      Product::run(mixed, ptx::wgmma_descriptor(a + k / 8), ptx::wgmma_descriptor(high + k / 8),
                   true);
    }
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<1>();
    ptx::wgmma_fence_operand(of_block);
    release(previous);
    previous = ring.stage;
    ring.advance();
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) sum[i] += of_block[i];
  }
  ptx::wgmma_wait_group<0>();
  ptx::wgmma_fence_operand(mixed);
  release(previous);
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) sum[i] = fmaf(mixed[i], pow2(-kPartLowBits), sum[i]);
}

// The same for gates' gradients, in k-blocks of the high and the low parts of kBackwardK of k,
// whose sums are scaled on their own. scale_of(tile, half) is the scale of the thread's row `half`
// of two in a tile of units, which has kTileK of k; first_k is the block's first.
template <int kColumns, int kTileK, typename Scale>
__device__ __forceinline__ void multiply_scaled_parts(TileRing& ring, const unsigned char* weights,
                                                      int first_k, int k_blocks, Scale scale_of,
                                                      float (&sum)[kColumns / 2]) {
  using Product = ptx::Wgmma<__half, kColumns>;
  const uint32_t weights_at = ptx::wgmma_address(weights);
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) sum[i] = 0.0f;
  int tile = first_k / kTileK, left = kTileK - first_k % kTileK;  // of the tile's k
  float scale[2], next[2];                                        // of it and of the next tile
  for (int k_block = 0; k_block < k_blocks; ++k_block) {
    ptx::mbarrier_wait(&ring.full[ring.stage], ring.phase);
    if (k_block == 0) {  // the scales are there when their gradients are
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        scale[half] = scale_of(tile, half);
        next[half] = scale_of(tile + 1, half);
      }
    }
    const uint32_t a = ptx::wgmma_address(ring.at_stage()), a_low = a + kBackwardK / 8;
    const uint32_t high = weights_at + k_block / 2 * (2 * kColumns * 8) +
                          k_block % 2 * (kBackwardK / 8),
                   low = high + kColumns * 8;
    float products[kColumns / 2], mixed[kColumns / 2];
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kBackwardK; k += 16) {
      const auto of = [k](uint32_t at) { return ptx::wgmma_descriptor(at + k / 8); };
      Product::run(products, of(a), of(high), k != 0);
      Product::run(mixed, of(a), of(low), k != 0);
      Product::run(mixed, of(a_low), of(high), true);
    }
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_fence_operand(products);
    ptx::wgmma_fence_operand(mixed);
    if (threadIdx.x % 128 == 0) ptx::mbarrier_arrive(&ring.empty[ring.stage]);
    ring.advance();
#pragma unroll
    for (int j = 0; j < kColumns / 2; ++j) {
      sum[j] = fmaf(fmaf(mixed[j], pow2(-kPartLowBits), products[j]), scale[j / 2 % 2], sum[j]);
    }
    left -= kBackwardK;
    if (left == 0) {
      left = kTileK;
      ++tile;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        scale[half] = next[half];
        next[half] = scale_of(tile + 1, half);
      }
    }
  }
}

}  // namespace my_ops::cuda
