// What the parts of fp32_short's kernels share: their arguments, shared memory, and what a row of a
// or a column of b holds.
#pragma once

#include <cuda.h>

#include "fp32/bf16_parts.cuh"
#include "fp32/split_device.cuh"
#include "gemm/fp32_fma.cuh"
#include "gemm/fp32_short/plan.h"

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

}  // namespace
}  // namespace my_ops::cuda
