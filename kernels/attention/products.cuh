// What the passes of attention_sm90.cu share. Each is one pass over the keys for the output or the
// gradient of q, or over the queries for those of k and v.
// Plan: a block owns 128 rows of the stationary operands. A producer thread brings blocks of the
// streamed ones by TMA; two consumer warpgroups own 64 rows each. Scores are sums of three products
// of fp16 parts, from shared memory; what follows from them is split in registers, and is the left
// operand of the next three products. The sums of each block are added in registers, scaled, so
// that the tensor cores never sum over more than a block. In forward, the groups take turns, so
// that the exponentials of one overlap the products of the other.
// Bound by tensor cores.
#pragma once

#include <cuda.h>
#include <cuda_fp16.h>

#include <cfloat>
#include <cstdint>

#include "attention/plan.h"
#include "attention/split.cuh"
#include "ptx/barrier.cuh"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/registers.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "ptx/wgmma_mma_async.cuh"

namespace my_ops::cuda::attention_sm90 {
namespace {

enum Mode { kForward, kGradQ, kGradK, kGradV, kGradKV };

struct MainArgs {
  CUtensorMap a[2];  // the stationary operands, in boxes of kRows rows
  CUtensorMap b[2];  // the streamed operands
  const float *a_inverse[2], *b_inverse[2];
  const float *lse2, *delta;
  Heads<float> out[2];
  float* lse;
  int lse_stride;
  const float* bias;  // added to the scaled scores; its strides may be 0
  int64_t bias_batch, bias_head, bias_row, bias_column;
  float* grad_bias;  // [heads][a_length][b_length] or null
  int heads, head_count, dim;
  int a_length, a_padded, b_length, b_padded;
  bool causal;
  float scale;
};

template <int kD_, Mode kMode_, bool kBias_>
struct Config {
  static constexpr bool kBias = kBias_;
  static constexpr int kD = kD_;
  static constexpr Mode kMode = kMode_;
  static constexpr bool kBoth = kMode == kGradKV;
  static constexpr int kN = kD == 64 && !kBoth ? 128 : 64;  // streamed rows
  static constexpr bool kBackward = kMode != kForward;
  static constexpr bool kTwo = kMode == kGradQ || kMode == kGradK || kBoth;      // dP too
  static constexpr bool kColumns = kMode == kGradK || kMode == kGradV || kBoth;  // queries are
  static constexpr int kABytes = 2 * kRows * kD * 2, kSlotBytes = 2 * kN * kD * 2;
  static constexpr int kA = kTwo ? 2 : 1;
  static constexpr int kSlots = kBoth ? 6 : kD == 64 ? 4 : kTwo ? 3 : 4;
  // What comes with the second of a block's tiles: lse2 and delta of each column, or in forward
  // what undoes the scale of each column of v.
  static constexpr int kTerms = kColumns ? kTwo ? 2 : 1 : 0;
  static constexpr int kFloats = kBackward ? kTerms * kN : kD;
};

template <typename C>
struct alignas(1024) Smem {
  unsigned char a[C::kA][C::kABytes];
  unsigned char slot[C::kSlots][C::kSlotBytes];
  alignas(16) float terms[C::kSlots][C::kFloats ? C::kFloats : 4];
  uint64_t a_full, full[C::kSlots], empty[C::kSlots];
};

struct Ring {
  int slot = 0;
  uint32_t phase = 0;
  template <int kSlots>
  __device__ __forceinline__ void step() {
    if (++slot == kSlots) slot = 0, phase ^= 1;
  }
};

// Which streamed blocks a block of stationary rows needs.
template <typename C>
__device__ __forceinline__ void block_range(const MainArgs& p, int row0, int& first, int& last) {
  first = 0;
  last = (p.b_length + C::kN - 1) / C::kN;
  if (p.causal) {
    if (C::kColumns) {
      first = row0 / C::kN;
    } else {
      last = min(last, (row0 + kRows + C::kN - 1) / C::kN);
    }
  }
}

template <typename C>
__device__ __forceinline__ void load_parts(unsigned char* to, const CUtensorMap* map,
                                           uint64_t* full, int row, int part_rows, int rows) {
#pragma unroll
  for (int part = 0; part < 2; ++part) {
#pragma unroll
    for (int d = 0; d < C::kD / 64; ++d) {
      ptx::tma_load_2d(to + (part * (C::kD / 64) + d) * rows * 128, map, full, d * 64,
                       row + part * part_rows);
    }
  }
}

template <typename C>
__device__ __forceinline__ void produce(const MainArgs& p, Smem<C>& smem, int row0, int head) {
  int first, last;
  block_range<C>(p, row0, first, last);
  ptx::mbarrier_arrive_expect_tx(&smem.a_full, C::kA * C::kABytes);
#pragma unroll
  for (int i = 0; i < C::kA; ++i) {
    load_parts<C>(smem.a[i], &p.a[i], &smem.a_full, head * p.a_padded + row0, p.heads * p.a_padded,
                  kRows);
  }
  Ring at;
  const auto load = [&](int which, int block, bool second) {
    uint64_t* full = &smem.full[at.slot];
    float* terms = smem.terms[at.slot];
    ptx::mbarrier_wait(&smem.empty[at.slot], at.phase ^ 1);
    ptx::mbarrier_arrive_expect_tx(full, C::kSlotBytes + (second ? C::kFloats * 4 : 0));
    const int64_t row = int64_t{head} * p.b_padded + block * C::kN;
    if (second && !C::kBackward) {
      ptx::bulk_load(terms, p.b_inverse[1] + row / kRows * C::kD, C::kD * 4, full);
    }
    if (second && C::kTerms > 0) ptx::bulk_load(terms, p.lse2 + row, C::kN * 4, full);
    if (second && C::kTerms > 1) ptx::bulk_load(terms + C::kN, p.delta + row, C::kN * 4, full);
    load_parts<C>(smem.slot[at.slot], &p.b[which], &smem.full[at.slot],
                  head * p.b_padded + block * C::kN, p.heads * p.b_padded, C::kN);
    at.step<C::kSlots>();
  };
  for (int block = first; block < last; ++block) {
    load(C::kTwo ? 1 : 0, block, false);
    load(C::kTwo ? 0 : 1, block, true);
  }
}

// A warp has read a slot.
__device__ __forceinline__ void release(uint64_t* empty) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(empty);
}

// Where a thread of a warpgroup is: its rows are `row` and the eighth after that, its columns
// `pair` and the next of each eight; the blocks of columns that its rows need.
struct Place {
  int row, pair, first_row, first, last;

  template <typename C>
  static __device__ __forceinline__ Place of(const MainArgs& p, int row0, int group) {
    const int thread = threadIdx.x % 128;
    Place at;
    at.row = row0 + group * 64 + thread / 32 * 16 + thread % 32 / 4, at.pair = thread % 4 * 2;
    block_range<C>(p, row0, at.first, at.last);
    at.first_row = row0 + group * 64;
    return at;
  }
};

// Waits for the next slot, and returns it.
template <typename C>
__device__ __forceinline__ int next_slot(Smem<C>& smem, Ring& at) {
  const int slot = at.slot;
  ptx::mbarrier_wait(&smem.full[at.slot], at.phase);
  at.step<C::kSlots>();
  return slot;
}

// The largest of a row, of which each of four threads has one.
__device__ __forceinline__ float row_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

// Splits row i of a thread's two, scaled.
template <int kCount>
__device__ __forceinline__ void split_row(int i, const float (&s)[kCount], float scale,
                                          uint32_t (&high)[kCount / 2],
                                          uint32_t (&low)[kCount / 2]) {
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
    split_pair(s[4 * j + 2 * i] * scale, s[4 * j + 2 * i + 1] * scale, high[2 * j + i],
               low[2 * j + i]);
  }
}

// The product of what undoes two scales: finite, so that zeros stay zeros.
__device__ __forceinline__ float unscale(float a, float b) { return fminf(a * b, FLT_MAX); }

// The same for scores, whose masked ones are -inf: above 0.
__device__ __forceinline__ float unscale_scores(float a, float b, float scale) {
  return fminf(fmaxf(a * b * scale, FLT_MIN), FLT_MAX);
}

// Whether causality masks a block of columns for all rows of a warpgroup, the first of which is
// row. The weights are zeros then; without the block's sums, NaN in it stays out of these rows.
template <typename C>
__device__ __forceinline__ bool hidden(const MainArgs& p, int row, int column0) {
  return p.causal && (C::kColumns ? column0 + C::kN <= row : column0 >= row + 64);
}

// s = a b^T by three products of parts: a is the warpgroup's 64 rows, b all kN rows of a slot.
template <typename C>
__device__ __forceinline__ void scores(float (&s)[C::kN / 2], const unsigned char* a,
                                       const unsigned char* b, int group) {
  constexpr int kBoxes = C::kD / 64, kABox = kRows * 128 / 16, kBBox = C::kN * 128 / 16;
  const uint32_t a0 = ptx::wgmma_address(a) + group * (64 * 128 / 16), b0 = ptx::wgmma_address(b);
  bool add = false;
#pragma unroll
  for (int product = 0; product < 3; ++product) {
    const uint32_t pa = a0 + (product == 0 ? kBoxes * kABox : 0);
    const uint32_t pb = b0 + (product == 1 ? kBoxes * kBBox : 0);
#pragma unroll
    for (int k = 0; k < C::kD / 16; ++k) {
      ptx::Wgmma<__half, C::kN>::run(s, ptx::wgmma_descriptor(pa + k / 4 * kABox + k % 4 * 2),
                                     ptx::wgmma_descriptor(pb + k / 4 * kBBox + k % 4 * 2), add);
      add = true;
    }
  }
}

// out = x b by three products of parts: x [64, kN] in registers, b the rows of a slot. Of rows from
// `end` on, x is 0; where a block has more than 64 rows, these are not read, as they may be NaN.
template <typename C>
__device__ __forceinline__ void weighted(float (&out)[C::kD / 2], const uint32_t (&high)[C::kN / 4],
                                         const uint32_t (&low)[C::kN / 4], const unsigned char* b,
                                         int end) {
  constexpr int kBoxes = C::kD / 64, kBBox = C::kN * 128 / 16;
  const uint32_t b0 = ptx::wgmma_address(b);
  const int half = C::kN > 64 && end <= 64 ? 64 / 16 : 0;
  bool add = false;
#pragma unroll
  for (int product = 0; product < 3; ++product) {
    const uint32_t pb = b0 + (product == 1 ? kBoxes * kBBox : 0);
#pragma unroll
    for (int k = 0; k < C::kN / 16; ++k) {
      const uint32_t at = pb + 128 * (k < 64 / 16 ? k : k - half);
      ptx::WgmmaRegisters<__half, C::kD, true>::run(out, (product == 0 ? low : high) + 4 * k,
                                                    ptx::wgmma_descriptor_rows<C::kN>(at), add);
      add = true;
    }
  }
}

template <int kWhich, typename C>
__device__ __forceinline__ void store(const MainArgs& p, const float (&o)[C::kD / 2], int row,
                                      int head, const float (&factor)[2]) {
  const int column = threadIdx.x % 4 * 2;
  const Heads<float>& out = p.out[kWhich];
  float* base = out.x + head / p.head_count * out.batch + head % p.head_count * out.head;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (row + 8 * i >= p.a_length) continue;
    float* to = base + (row + 8 * i) * out.row + column;
#pragma unroll
    for (int j = 0; j < C::kD / 8; ++j) {
      if (8 * j + column >= p.dim) continue;
      *reinterpret_cast<float2*>(to + 8 * j) = {o[4 * j + 2 * i] * factor[i],
                                                o[4 * j + 2 * i + 1] * factor[i]};
    }
  }
}

// s = s f + bias, in units of log 2. Rows and columns beyond the lengths get any of the values.
template <typename C>
__device__ __forceinline__ void add_bias(const MainArgs& p, float (&s)[C::kN / 2], float f,
                                         int head, int row, int column) {
  const float* bias =
      p.bias + head / p.head_count * p.bias_batch + head % p.head_count * p.bias_head;
  const int64_t along_row = C::kColumns ? p.bias_column : p.bias_row;
  const int64_t along_column = C::kColumns ? p.bias_row : p.bias_column;
  const float* at[2] = {bias + min(row, p.a_length - 1) * along_row,
                        bias + min(row + 8, p.a_length - 1) * along_row};
#pragma unroll
  for (int x = 0; x < C::kN / 2; ++x) {
    const int c = min(column + x / 4 * 8 + x % 2, p.b_length - 1);
    s[x] = fmaf(s[x], f, __ldg(at[x / 2 % 2] + c * along_column) * kLog2eFloat);
  }
}

}  // namespace
}  // namespace my_ops::cuda::attention_sm90
