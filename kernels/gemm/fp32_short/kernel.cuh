// The kernels of fp32_short_sm90.cu.
// Plan: persistent blocks. One producer thread fills a ring of slots by TMA with rows of a as they
// are in memory, another fills stages with the parts of b, which stay if they fit. Each of two
// consumer warpgroups takes 64 rows at a time: it reads them whole into registers, scales each row
// by its own exponent, and writes the two fp16 parts back in place, from where it multiplies them
// with one chunk of columns after another. Outputs leave by TMA through a warp's own buffers. While
// one warpgroup splits or finishes, the other multiplies. Leading products are promoted every 16 of
// k.
// Bound by memory, 4 bytes per element of a and of the output, or by tensor cores at 3 * 2*m*n*k.
#pragma once

#include <cuda.h>

#include "common/numeric.cuh"
#include "fp32/bf16_parts.cuh"
#include "fp32/promotion.cuh"
#include "fp32/split_device.cuh"
#include "gemm/epilogue.cuh"
#include "gemm/fp32_fma.cuh"
#include "gemm/fp32_short/plan.h"
#include "ptx/barrier.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/registers.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "ptx/wgmma_mma_async.cuh"

namespace my_ops::cuda {
namespace {

using namespace fp32_short;

using Args = GemmArgs<float, float>;

struct Short {
  CUtensorMap a, parts, out;
  Args args;
  const int32_t* columns;  // a Line of each column of b
  Division division;
  int padded_columns;
  int tiles;     // of kM rows
  bool tma_out;  // rows of the output are aligned
};

constexpr int kConsumers = 2, kShortThreads = (kConsumers + 1) * 128;

// ---- shared memory ----

// Where a warp holds 16 rows of 32 outputs, with the 128-byte swizzle.
struct alignas(1024) OutputBox {
  static constexpr int kBoxRows = 16, kBoxColumns = 32;
  unsigned char bytes[kBoxRows * 128];

  // Four consecutive columns of a row.
  __device__ __forceinline__ unsigned char* at(int row, int vector) {
    return bytes + row * 128 + (vector ^ row % 8) * 16;
  }
};

struct alignas(1024) ShortSmem {
  static constexpr int kRedoWords = 32;
  OutputBox boxes[kConsumers * 4][2];  // of each warp
  unsigned char ring[kRingBytes];      // slots, then stages
  uint64_t slot_full[kMaxSlots], slot_empty[kMaxSlots];
  uint64_t stage_full[kMaxStages], stage_empty[kMaxStages];
  int32_t rows[kConsumers][kRows];  // Line
  uint32_t redo[kRedoWords];        // a bit per tile; with more tiles, bits are shared

  __device__ __forceinline__ unsigned char* slot(int i) { return ring + i * kSlotBytes; }
  __device__ __forceinline__ unsigned char* stage(const Division& d, int i) {
    return ring + d.slots * kSlotBytes + i * (d.columns * kK * 4);
  }
};
static_assert(sizeof(ShortSmem) <= kNeeds.shared_bytes);
static_assert(sizeof(FmaSmem) <= kRingBytes);

// A place in a ring of so many.
struct RingAt {
  int count, at = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void advance() {
    if (++at == count) at = 0, phase ^= 1;
  }
};

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

// ---- what a row of a or a column of b holds ----

// How far its outputs can be relied on.
enum Trust {
  kExact,      // parts hold 23 bits of each element
  kBounded,    // of elements far below the largest they hold less: small outputs are recomputed
  kRecompute,  // Inf, NaN, or so few nonzeros that the error of parts does not average out
};

// With fewer nonzeros, the 24th bit that parts lack shows beside a sum of floats.
constexpr uint32_t kFewNonzeros = 24;

// A bound of the error that parts of such small elements cause in a sum of scaled products, per
// element of k: each part of one operand is off by up to 2^-36, twice if both are so small, and the
// other operand's elements are below 2^15. A sum must exceed it by 2^25.
constexpr float kTinyError = 0x1p-19f, kTinyMargin = 0x1p25f;

// In one word: trust, and above it the exponent by which the line is scaled.
struct Line {
  int32_t word;

  __device__ __forceinline__ Line(const Range& range, uint32_t nonzero) {
    const uint32_t largest = range.largest >> 1;
    if (nonzero == 0) {
      word = kExact;
    } else if (!is_finite(largest)) {
      word = kRecompute;
    } else {
      const int e = exponent_of(largest);
      const bool tiny = range.min_magnitude() < __uint_as_float(pow2_bits(e - kFp16Range));
      word = e * 4 + (nonzero < kFewNonzeros ? kRecompute : tiny ? kBounded : kExact);
    }
  }
  __device__ __forceinline__ explicit Line(int32_t word) : word(word) {}

  __device__ __forceinline__ int exponent() const { return word >> 2; }
  __device__ __forceinline__ int trust() const { return word & 3; }
  __device__ __forceinline__ Pow2Pair factor() const { return pow2_pair(kFp16Shift - exponent()); }
};

#endif

// ---- the parts of b ----

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

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

// ---- producers ----

__device__ __forceinline__ void load_rows(const Short& p, ShortSmem& smem) {
  constexpr int kBox = 32, kBoxBytes = kRows * 128;
  const int k = static_cast<int>(p.args.k);
  RingAt slot{p.division.slots};
  for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
    for (int consumer = 0; consumer < kConsumers; ++consumer) {
      const int row = tile * kM + consumer * kRows;
      for (int l = 0; l < k; l += kK, slot.advance()) {
        uint64_t* const full = &smem.slot_full[slot.at];
        unsigned char* const to = smem.slot(slot.at);
        const bool both = l + kBox < k;
        ptx::mbarrier_wait(&smem.slot_empty[slot.at], slot.phase ^ 1);
        ptx::mbarrier_arrive_expect_tx(full, both ? kSlotBytes : kBoxBytes);
        ptx::tma_load_2d(to, &p.a, full, l, row);
        if (both) ptx::tma_load_2d(to + kBoxBytes, &p.a, full, l + kBox, row);
      }
    }
  }
}

__device__ __forceinline__ void load_parts(const Short& p, ShortSmem& smem) {
  const Division& d = p.division;
  const int part_bytes = d.columns * kK * 2;
  RingAt stage{d.stages};
  for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
    for (int chunk = 0; chunk < d.chunks; ++chunk) {
      for (int k_block = 0; k_block < d.k_blocks; ++k_block, stage.advance()) {
        uint64_t* const full = &smem.stage_full[stage.at];
        unsigned char* const to = smem.stage(d, stage.at);
        ptx::mbarrier_wait(&smem.stage_empty[stage.at], stage.phase ^ 1);
        ptx::mbarrier_arrive_expect_tx(full, 2 * part_bytes);
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          ptx::tma_load_2d(to + part * part_bytes, &p.parts, full, k_block * kK,
                           part * p.padded_columns + chunk * d.columns);
        }
      }
    }
    if (d.resident) break;
  }
}

// ---- consumers ----

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

// Which of a thread's scaled sums are suspect.
template <int kCount>
__device__ __forceinline__ Suspects<kCount> find_suspects(const Line (&row)[2], const int2* columns,
                                                          int64_t k, const float (&sum)[kCount]) {
  const float limit = kTinyError * kTinyMargin * static_cast<float>(k);
  Suspects<kCount> suspects;
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
    const int2 pair = columns[4 * j];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int trust = max(Line(e % 2 ? pair.y : pair.x).trust(), row[e / 2].trust());
      const bool small = fabsf(sum[4 * j + e]) < limit;
      suspects.add(4 * j + e, trust == kRecompute || (trust == kBounded && small));
    }
  }
  return suspects;
}

// Undoes the scaling, exactly.
template <int kCount>
__device__ __forceinline__ void unscale(const Line (&row)[2], const int2* columns,
                                        float (&sum)[kCount]) {
  const int of_row[2] = {row[0].exponent() - 2 * kFp16Shift, row[1].exponent() - 2 * kFp16Shift};
  int lowest = INT_MAX, highest = INT_MIN;
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
    const int2 pair = columns[4 * j];
    lowest = min(lowest, min(pair.x, pair.y));
    highest = max(highest, max(pair.x, pair.y));
  }
  lowest = (lowest >> 2) + min(of_row[0], of_row[1]);
  highest = (highest >> 2) + max(of_row[0], of_row[1]);
  const bool normal = __all_sync(~0u, lowest >= -126 && highest <= 127);
  const int bits[2] = {__float_as_int(1.0f) + (of_row[0] << 23),
                       __float_as_int(1.0f) + (of_row[1] << 23)};
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
    const int2 pair = columns[4 * j];
    const int e[2] = {Line(pair.x).exponent(), Line(pair.y).exponent()};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& x = sum[4 * j + i];
      if (normal) {
        x *= __int_as_float(bits[i / 2] + (e[i % 2] << 23));
      } else {
        const Pow2Pair factor = pow2_pair(of_row[i / 2] + e[i % 2]);
        x = x * factor.first * factor.second;
      }
    }
  }
}

// Stores a warp's outputs of a chunk, 32 columns at a time.
template <int kCount>
__device__ __forceinline__ void store_chunk(const Short& p, OutputBox (&boxes)[2], int& turn,
                                            int row0, int col0, const float (&sum)[kCount]) {
  const Args& args = p.args;
  const int lane = threadIdx.x % 32, row = lane / 4, t = lane % 4;
  const int m = static_cast<int>(args.m), n = static_cast<int>(args.n);
  const bool odd = row % 2 != 0;
#pragma unroll
  for (int c = 0; c < kCount / 16; ++c) {
    const int col = col0 + c * OutputBox::kBoxColumns;
    if (col >= n) break;
    OutputBox& box = boxes[turn];
    turn ^= 1;
    if (p.tma_out && lane == 0) ptx::tma_store_wait_group_read<1>();
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        // Odd rows store their pairs in another order, so that banks do not conflict.
        const float* const x = sum + 16 * c + 4 * j + 2 * i;
        const float2 front{x[0], x[1]}, back{x[8], x[9]};
        const auto at = [&](int pair) {
          return reinterpret_cast<float2*>(box.at(row + 8 * i, 2 * pair + t / 2) + t % 2 * 8);
        };
        *at(odd ? j + 2 : j) = odd ? back : front;
        *at(odd ? j : j + 2) = odd ? front : back;
      }
    }
    if (p.tma_out) {
      ptx::fence_proxy_async();
      __syncwarp();
      if (lane == 0) {
        ptx::tma_store_3d(&p.out, box.bytes, col, row0, 0);
        ptx::tma_store_commit_group();
      }
      continue;
    }
    __syncwarp();
    if (col + lane >= n) continue;
    float* to = args.out + row0 * args.out_row + col + lane;
#pragma unroll 4
    for (int r = 0; r < min(OutputBox::kBoxRows, m - row0); ++r, to += args.out_row) {
      *to = *reinterpret_cast<const float*>(box.at(r, lane / 4) + lane % 4 * 4);
    }
  }
}

// Finishes a warp's sums of a chunk. row0: the warp's first row.
template <int kCount>
__device__ __forceinline__ void finish_chunk(const Short& p, ShortSmem& smem, int tile, int row0,
                                             int chunk_column, const Line (&row)[2], int& box,
                                             float (&sum)[kCount]) {
  constexpr uint32_t kMaxRecomputed = 64;  // by a warp; more are left to the tile's other pass
  const Args& args = p.args;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 4;
  const int own_row = row0 + lane / 4, own_col = chunk_column + lane % 4 * 2;
  const int m = static_cast<int>(args.m), n = static_cast<int>(args.n);
  const int2* const columns = reinterpret_cast<const int2*>(p.columns + own_col);
  int trust = max(row[0].trust(), row[1].trust());
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) trust |= (columns[4 * j].x | columns[4 * j].y) & 3;
  Suspects<kCount> suspects;
  const bool any = __any_sync(~0u, trust != kExact);
  if (any) suspects = find_suspects(row, columns, args.k, sum);
  unscale(row, columns, sum);
  if (any) {
    if (warp_sum(suspects.count()) > kMaxRecomputed) {
      const int turn = tile / gridDim.x % (32 * ShortSmem::kRedoWords);
      if (lane == 0) atomicOr(&smem.redo[turn / 32], 1u << turn % 32);
    } else {
      recompute(args, own_row, own_col, false, suspects, sum);
    }
  }
  if (args.bias) {
    const float* const bias = args.bias + own_col;
    const int left = n - own_col;
    apply_column_terms(sum, [&](int c) { return ColumnTerms<float>{c < left ? bias[c] : 0.0f}; });
  }
  activate<Activate>(args.activation, sum);
  if (args.residual) {
#pragma unroll
    for (int x = 0; x < kCount; ++x) {
      sum[x] += residual_at(args, 0, min(own_row + x / 2 % 2 * 8, m - 1),
                            min(own_col + x / 4 * 8 + x % 2, n - 1));
    }
  }
  if (row0 < m) store_chunk(p, smem.boxes[warp], box, row0, chunk_column, sum);
}

// The sums of a warpgroup's rows and a chunk. last: of the tile's chunks, so that slots are free.
template <int kColumns>
__device__ __forceinline__ void sum_chunk(const Short& p, ShortSmem& smem, RingAt slot,
                                          RingAt& stage, bool last, float (&sum)[kColumns / 2]) {
  using Mma = ptx::Wgmma<__half, kColumns>;
  constexpr int kCount = kColumns / 2, kPartA = kRows * 128, kPartB = kColumns * 128;
  constexpr int kSteps = kK / 16;  // of a block
  const int steps = static_cast<int>((p.args.k + 15) / 16);
  const bool signals = threadIdx.x % 128 == 0;
  float lead[kCount], cross[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) sum[i] = 0.0f;
  int read_slot = 0, read_stage = 0;  // those of the block before
  uint32_t a = 0, b = 0;
  const auto release = [&] {
    if (!signals) return;
    if (last) ptx::mbarrier_arrive(&smem.slot_empty[read_slot]);
    if (!p.division.resident) ptx::mbarrier_arrive(&smem.stage_empty[read_stage]);
  };
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const int in_block = step % kSteps;
    if (in_block == 0) {
      ptx::mbarrier_wait(&smem.stage_full[stage.at], p.division.resident ? 0 : stage.phase);
      a = ptx::wgmma_address(smem.slot(slot.at));
      b = ptx::wgmma_address(smem.stage(p.division, stage.at));
    }
    const auto part_a = [&](int part) {
      return ptx::wgmma_descriptor(a + part * (kPartA / 16) + in_block * 2);
    };
    const auto part_b = [&](int part) {
      return ptx::wgmma_descriptor(b + part * (kPartB / 16) + in_block * 2);
    };
    ptx::wgmma_fence();
    Mma::run(lead, part_a(0), part_b(0), false);
    ptx::wgmma_commit_group();
    Mma::run(cross, part_a(0), part_b(1), step != 0);
    Mma::run(cross, part_a(1), part_b(0), true);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<1>();  // lead is complete, cross may still run
    ptx::wgmma_fence_operand(lead);
    if (in_block == 0) {
      if (step != 0) release();
      read_slot = slot.at, read_stage = stage.at;
      slot.advance();
      stage.advance();
    }
    promote(sum, lead);
  }
  ptx::wgmma_wait_group<0>();
  ptx::wgmma_fence_operand(cross);
  release();
  add_cross<kFp16LowBits>(sum, cross);
}

// Computes the block's tiles in which many outputs are suspect by fp32 FMAs. Both warpgroups take
// part.
__device__ __forceinline__ void redo_tiles(const Short& p, ShortSmem& smem) {
  const int thread = threadIdx.x - 128;
  if (p.tma_out) ptx::tma_store_wait_group<0>();
  FmaSmem& fma_smem = reinterpret_cast<FmaSmem&>(smem.ring);
  fma_barrier();  // all outputs are stored, and the ring is free
  for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
    const int turn = tile / gridDim.x % (32 * ShortSmem::kRedoWords);
    if (!(smem.redo[turn / 32] >> turn % 32 & 1)) continue;
    for (int row = tile * kM; row < min((tile + 1) * kM, static_cast<int>(p.args.m));
         row += kFmaTile) {
      for (int column = 0; column < p.args.n; column += kFmaTile) {
        multiply_tile_by_fma<FmaSums::kChain>(p.args, fma_smem, thread, 0, row, column,
                                              column + kFmaTile);
      }
    }
  }
}

template <int kColumns>
__device__ __forceinline__ void consume(const Short& p, ShortSmem& smem) {
  const Division& d = p.division;
  const int consumer = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1;
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x % 128 / 32 * 16;
  int32_t* const lines = smem.rows[consumer];
  RingAt slot{d.slots}, stage{d.stages};
  const auto skip = [&] {
    for (int i = 0; i < d.k_blocks; ++i) slot.advance();
  };
  if (consumer == 1) skip();
  int box = 0;  // the next of the warp's two
  for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
    split_rows_in_place(p, smem, slot, lines);
    ptx::fence_proxy_async();
    ptx::bar_sync(1 + consumer, 128);  // the parts of all rows are there
    const Line row[2] = {Line(lines[warp_row + lane / 4]), Line(lines[warp_row + lane / 4 + 8])};
    for (int chunk = 0; chunk < d.chunks; ++chunk) {
      float sum[kColumns / 2];
      sum_chunk<kColumns>(p, smem, slot, stage, chunk == d.chunks - 1, sum);
      finish_chunk(p, smem, tile, tile * kM + consumer * kRows + warp_row, chunk * kColumns, row,
                   box, sum);
    }
    skip();
    skip();
  }
  redo_tiles(p, smem);
}

#endif

template <int kColumns>
__global__ void __launch_bounds__(kShortThreads, 1)
    fp32_short_kernel(const __grid_constant__ Short p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char raw_smem[];
  ShortSmem& smem = *reinterpret_cast<ShortSmem*>(raw_smem);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kMaxSlots; ++i) {
      ptx::mbarrier_init(&smem.slot_full[i], 1);
      ptx::mbarrier_init(&smem.slot_empty[i], 1);  // of one warpgroup's rows
    }
    for (int i = 0; i < kMaxStages; ++i) {
      ptx::mbarrier_init(&smem.stage_full[i], 1);
      ptx::mbarrier_init(&smem.stage_empty[i], kConsumers);
    }
    ptx::fence_mbarrier_init();
    ptx::prefetch_tensormap(&p.a);
    ptx::prefetch_tensormap(&p.parts);
    if (p.tma_out) ptx::prefetch_tensormap(&p.out);
  }
  if (threadIdx.x < ShortSmem::kRedoWords) smem.redo[threadIdx.x] = 0;
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  __syncthreads();
  if (threadIdx.x < 128) {
    ptx::setmaxnreg_dec<40>();
    if (threadIdx.x == 0) load_rows(p, smem);
    if (threadIdx.x == 32) load_parts(p, smem);
    __syncwarp();
  } else {
    ptx::setmaxnreg_inc<232>();
    consume<kColumns>(p, smem);
  }
#endif
}

}  // namespace
}  // namespace my_ops::cuda
