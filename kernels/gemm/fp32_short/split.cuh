// How fp32_short's operands become parts: b in a kernel of its own, rows of a in shared memory.
#pragma once

#include "common/numeric.cuh"
#include "gemm/fp32_short/shared.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"

namespace my_ops::cuda {
namespace {

// ---- b ----

struct ShortSplit {
  const float* b;
  int64_t k_stride, column_stride;
  int n, k, ld, padded_columns;
  uint16_t* parts;
  int32_t* columns;
};

constexpr int kSplitWarps = 8;

// A warp splits a column.
__global__ void __launch_bounds__(kSplitWarps * 32)
    fp32_short_split_kernel(const __grid_constant__ ShortSplit p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const int column = blockIdx.x * kSplitWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (column >= p.padded_columns) return;
  float x[kMaxBlocks][2];
  Range range;
  uint32_t nonzero = 0;
#pragma unroll
  for (int i = 0; i < kMaxBlocks; ++i) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int l = i * kK + lane * 2 + j;
      const bool inside = column < p.n && l < p.k;
      x[i][j] = inside ? p.b[l * p.k_stride + column * p.column_stride] : 0.0f;
      range.add(x[i][j]);
      nonzero += x[i][j] != 0.0f;
    }
  }
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) range.add(shuffled(range, lanes));
  const Line line(range, warp_sum(nonzero));
  const Pow2Pair factor = line.factor();
  if (lane == 0) p.columns[column] = line.word;
#pragma unroll
  for (int i = 0; i < kMaxBlocks; ++i) {
    if (i * kK >= p.ld) break;
    uint32_t part[2];
    Fp16Parts::split(x[i][0] * factor.first * factor.second, x[i][1] * factor.first * factor.second,
                     part);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int64_t row = int64_t{j} * p.padded_columns + column;
      *reinterpret_cast<uint32_t*>(p.parts + row * p.ld + i * kK + lane * 2) = part[j];
    }
  }
#endif
}

// ---- rows of a ----

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

// A thread's share of 64 of k of its warp's rows: vectors of four rows, from both boxes of a slot.
struct RowVectors {
  float4 x[4][2];

  static constexpr int kBoxBytes = kRows * 128;

  // Eight lanes share a row. Rows of adjacent lanes are four apart, so that neither reads nor
  // writes have bank conflicts.
  static __device__ __forceinline__ int vector() { return threadIdx.x % 8; }
  static __device__ __forceinline__ int first_row() {
    return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 8 * 4;
  }

  // k: how many of the slot's are there. The second box may not have been loaded.
  __device__ __forceinline__ void read(const unsigned char* slot, int k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = first_row() + i;
      const unsigned char* const from = slot + row * 128 + (vector() ^ row % 8) * 16;
      x[i][0] = *reinterpret_cast<const float4*>(from);
      x[i][1] = k > 32 ? *reinterpret_cast<const float4*>(from + kBoxBytes) : float4{};
    }
  }
  __device__ __forceinline__ void see(Range (&range)[4], uint32_t (&nonzero)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (const float4& v : x[i]) {
        const float each[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (float e : each) {
          range[i].add(e);
          nonzero[i] += e != 0.0f;
        }
      }
    }
  }
  // Writes the parts over the floats: the leading ones, then the others.
  __device__ __forceinline__ void write_parts(unsigned char* slot,
                                              const Pow2Pair (&factor)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = first_row() + i;
      const auto scaled = [&](float e) { return e * factor[i].first * factor[i].second; };
#pragma unroll
      for (int box = 0; box < 2; ++box) {
        const float4& v = x[i][box];
        uint32_t front[2], back[2];
        Fp16Parts::split(scaled(v.x), scaled(v.y), front);
        Fp16Parts::split(scaled(v.z), scaled(v.w), back);
        unsigned char* const to =
            slot + row * 128 + ((box * 4 + vector() / 2) ^ row % 8) * 16 + vector() % 2 * 8;
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          *reinterpret_cast<uint2*>(to + part * kBoxBytes) = make_uint2(front[part], back[part]);
        }
      }
    }
  }
};

// Replaces the rows of a warp, in slots from this one on, by their parts. Two blocks of k stay in
// registers, the others are read again.
__device__ __forceinline__ void split_rows_in_place(const Short& p, ShortSmem& smem, RingAt slot,
                                                    int32_t* lines) {
  constexpr int kHeld = 2;
  static_assert(kMinK > (kHeld - 1) * kK);
  const int k = static_cast<int>(p.args.k), k_blocks = p.division.k_blocks;
  const RingAt begin = slot;
  RowVectors held[kHeld];
  Range range[4];
  uint32_t nonzero[4] = {};
#pragma unroll
  for (int b = 0; b < kHeld; ++b, slot.advance()) {
    ptx::mbarrier_wait(&smem.slot_full[slot.at], slot.phase);
    held[b].read(smem.slot(slot.at), k - b * kK);
    held[b].see(range, nonzero);
  }
#pragma unroll 1
  for (int b = kHeld; b < k_blocks; ++b, slot.advance()) {
    ptx::mbarrier_wait(&smem.slot_full[slot.at], slot.phase);
    RowVectors rows;
    rows.read(smem.slot(slot.at), k - b * kK);
    rows.see(range, nonzero);
  }
  Pow2Pair factor[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int lanes = 4; lanes > 0; lanes /= 2) {
      range[i].add(shuffled(range[i], lanes));
      nonzero[i] += __shfl_xor_sync(~0u, nonzero[i], lanes);
    }
    const Line line(range[i], nonzero[i]);
    if (RowVectors::vector() == 0) lines[RowVectors::first_row() + i] = line.word;
    factor[i] = line.factor();
  }
  __syncwarp();  // all floats have been read
  slot = begin;
#pragma unroll
  for (int b = 0; b < kHeld; ++b, slot.advance()) held[b].write_parts(smem.slot(slot.at), factor);
#pragma unroll 1
  for (int b = kHeld; b < k_blocks; ++b, slot.advance()) {
    RowVectors rows;
    rows.read(smem.slot(slot.at), k - b * kK);
    __syncwarp();
    rows.write_parts(smem.slot(slot.at), factor);
  }
}

#endif

}  // namespace
}  // namespace my_ops::cuda
