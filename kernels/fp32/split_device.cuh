// Device side of the split: the parts of a number, what a row holds, and the work for one row and
// one tile.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/numeric.cuh"
#include "fp32/split.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cp_async.cuh"

namespace my_ops::cuda {
namespace {

using namespace fp32_split;

constexpr int kWarps = kThreads / 32;

// Index of element (row, l) in the shared memory of split_columns. Threads that read eight adjacent
// elements of k start in different banks.
__host__ __device__ constexpr int column_index(int row, int l) {
  return l * kColumnRows + row + l / 8 * 4;
}

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

// ---- parts ----

struct Fp16Parts {
  static constexpr int kCount = 2, kShift = kFp16Shift;
  // Splits two consecutive k at a time; word i holds their part i.
  static __device__ void split(float x0, float x1, uint32_t (&word)[kCount]) {
    const __half2 high = __floats2half2_rn(x0, x1);
    constexpr float kUp = 1 << kFp16LowBits;
    const __half2 low =
        __floats2half2_rn((x0 - __low2float(high)) * kUp, (x1 - __high2float(high)) * kUp);
    word[0] = *reinterpret_cast<const uint32_t*>(&high);
    word[1] = *reinterpret_cast<const uint32_t*>(&low);
  }
};

struct Bf16Parts {
  static constexpr int kCount = 3, kShift = kBf16Shift;
  static __device__ void split(float x0, float x1, uint32_t (&word)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const __nv_bfloat162 part = __floats2bfloat162_rn(x0, x1);
      x0 -= __low2float(part);
      x1 -= __high2float(part);
      word[i] = *reinterpret_cast<const uint32_t*>(&part);
    }
  }
};

// ---- what a row holds ----

__device__ __forceinline__ uint32_t magnitude(float x) { return __float_as_uint(x) & 0x7FFFFFFF; }

// As bits, which compare like the magnitudes.
struct Extremes {
  uint32_t largest = 0, smallest = 0xFFFFFFFF;

  __device__ void add(float x) {
    largest = max(largest, magnitude(x));
    smallest = min(smallest, magnitude(x));
  }
  __device__ void add(const Extremes& other) {
    largest = max(largest, other.largest);
    smallest = min(smallest, other.smallest);
  }
};

struct RowStats {
  Extremes extremes;
  uint32_t nonzero = 0;

  __device__ void add(float x) {
    extremes.add(x);
    nonzero += magnitude(x) != 0;
  }
  __device__ void add(const RowStats& other) {
    extremes.add(other.extremes);
    nonzero += other.nonzero;
  }
};

__device__ __forceinline__ uint32_t warp_sum(uint32_t x) { return __reduce_add_sync(~0u, x); }

__device__ __forceinline__ Extremes warp_reduce(Extremes e) {
  return {__reduce_max_sync(~0u, e.largest), __reduce_min_sync(~0u, e.smallest)};
}

// floor(log2) of a positive float given by its bits, denormals included; kZeroExponent for 0.
__device__ __forceinline__ int exponent_of(uint32_t bits) {
  if (bits == 0) return kZeroExponent;
  return bits >> 23 ? static_cast<int>(bits >> 23) - 127 : -118 - __clz(bits);
}

// Bits of 2^e; 0 if that is below every float.
__device__ __forceinline__ uint32_t pow2_bits(int e) {
  if (e >= -126) return static_cast<uint32_t>(e + 127) << 23;
  return e >= -149 ? 1u << (e + 149) : 0;
}

struct RowScale {
  int exponent;
  uint32_t tiny_fp16, tiny_bf16;  // accuracy is lost for elements below these bits

  __device__ explicit RowScale(uint32_t largest)
      : exponent(exponent_of(largest)),
        tiny_fp16(pow2_bits(exponent - kFp16Range)),
        tiny_bf16(pow2_bits(exponent - kBf16Range)) {}
};

__device__ __forceinline__ bool is_finite(uint32_t largest) { return largest < 0x7F800000; }

// A few stray elements are tolerated: in continuous data about one in 4e7 is that small, and its
// absolute error is 2^-50 of the row's maximum. In short sums none is tolerated.
__device__ __forceinline__ bool too_many(uint32_t tiny, uint32_t nonzero) {
  return nonzero <= 32 ? tiny >= 1 : tiny >= 2 && uint64_t{tiny} * 256 > nonzero;
}

// fp16 parts hold 23 bits, not 24. In sums of fewer products than this the error does not average
// out, so such rows count as full-range.
constexpr uint32_t kDenseRow = 96;

// This rule is about the last of 24 bits; a single part holds 11.
__device__ __forceinline__ uint32_t dense_row(int fp16_parts) {
  return fp16_parts > 1 ? kDenseRow : 0;
}

__device__ __forceinline__ SplitPath row_path(uint32_t tiny_fp16, uint32_t tiny_bf16,
                                              uint32_t nonzero, uint32_t dense) {
  if (nonzero == 0) return SplitPath::kFp16;
  if (too_many(tiny_bf16, nonzero)) return SplitPath::kBf16Checked;
  if (nonzero < dense || too_many(tiny_fp16, nonzero)) return SplitPath::kBf16;
  return SplitPath::kFp16;
}

// Whether elements must be counted at all. This is rare, so counting may be slow.
__device__ __forceinline__ bool needs_count(const Extremes& extremes, const RowScale& scale, int k,
                                            uint32_t dense) {
  return extremes.smallest < scale.tiny_fp16 || static_cast<uint32_t>(k) < dense;
}

struct Counts {
  uint32_t nonzero = 0, tiny_fp16 = 0, tiny_bf16 = 0;

  __device__ void add(float x, const RowScale& scale) {
    const uint32_t bits = magnitude(x);
    nonzero += bits != 0;
    tiny_fp16 += bits != 0 && bits < scale.tiny_fp16;
    tiny_bf16 += bits != 0 && bits < scale.tiny_bf16;
  }
};

// Calls f for the type of an operand's elements; without kMixed all are floats.
template <bool kMixed, typename F>
__device__ __forceinline__ auto with_elements(const SplitOperand& op, F f) {
  if constexpr (!kMixed) return f.template operator()<float>();
  switch (op.elements) {
    case Elements::kHalf:
      return f.template operator()<__half>();
    case Elements::kBFloat16:
      return f.template operator()<__nv_bfloat16>();
    default:
      return f.template operator()<float>();
  }
}

template <typename T>
__device__ __forceinline__ const T* row_pointer(const SplitOperand& op, int row) {
  const int z = op.batch == 1 ? 0 : row / op.rows;
  return static_cast<const T*>(op.x) + z * op.batch_stride +
         int64_t{row - z * op.rows} * op.row_stride;
}

// As the operand says; without a second part its arithmetic is left out.
template <typename T>
__device__ __forceinline__ int fp16_parts(const SplitOperand& op) {
  return sizeof(T) == 2 ? 1 : op.fp16_parts;
}

// Whether rows can be read in 16-byte vectors.
template <typename T>
__device__ __forceinline__ bool vectorizes(const SplitOperand& op) {
  constexpr int kVector = 16 / sizeof(T);
  return op.k_stride == 1 && op.row_stride % kVector == 0 && op.batch_stride % kVector == 0 &&
         reinterpret_cast<uintptr_t>(op.x) % 16 == 0;
}

// Block-wide; contains __syncthreads.
__device__ __forceinline__ void report(SplitPath path, uint8_t* status) {
  SplitPath worst = SplitPath::kFp16;
  if (__syncthreads_or(path != SplitPath::kFp16)) {
    const bool fma = __syncthreads_or(path == SplitPath::kFma);
    const bool checked = __syncthreads_or(path == SplitPath::kBf16Checked);
    worst = fma ? SplitPath::kFma : checked ? SplitPath::kBf16Checked : SplitPath::kBf16;
  }
  if (threadIdx.x == 0) *status = static_cast<uint8_t>(worst);
}

// ---- one pass: rows with contiguous k ----

// kRowThreads threads share a row: one to eight warps.
template <int kRowThreads>
struct RowSmem {
  Extremes extremes[kWarps];
  Counts counts[kWarps];
};

// A thread's row in its block: known to the compiler if there is only one.
template <int kRowThreads>
__device__ __forceinline__ uint32_t row_in_block() {
  return kRowThreads == kThreads ? 0 : threadIdx.x / kRowThreads;
}

template <int kRowThreads>
__device__ __forceinline__ void row_sync() {
  if constexpr (kRowThreads > 32) {
    ptx::barrier_sync(1 + row_in_block<kRowThreads>(), kRowThreads);
  }
}

template <int kRowThreads>
__device__ Extremes row_reduce(Extremes mine, RowSmem<kRowThreads>& smem) {
  mine = warp_reduce(mine);
  if constexpr (kRowThreads == 32) return mine;
  row_sync<kRowThreads>();  // the previous row's values have been read
  if (threadIdx.x % 32 == 0) smem.extremes[threadIdx.x / 32] = mine;
  row_sync<kRowThreads>();
  const int first = row_in_block<kRowThreads>() * (kRowThreads / 32);
#pragma unroll
  for (int i = 0; i < kRowThreads / 32; ++i) mine.add(smem.extremes[first + i]);
  return mine;
}

template <int kRowThreads>
__device__ Counts row_reduce(Counts mine, RowSmem<kRowThreads>& smem) {
  mine = {warp_sum(mine.nonzero), warp_sum(mine.tiny_fp16), warp_sum(mine.tiny_bf16)};
  if constexpr (kRowThreads == 32) return mine;
  row_sync<kRowThreads>();  // the previous row's values have been read
  if (threadIdx.x % 32 == 0) smem.counts[threadIdx.x / 32] = mine;
  row_sync<kRowThreads>();
  const int first = row_in_block<kRowThreads>() * (kRowThreads / 32);
  Counts sum;
#pragma unroll
  for (int i = 0; i < kRowThreads / 32; ++i) {
    sum.nonzero += smem.counts[first + i].nonzero;
    sum.tiny_fp16 += smem.counts[first + i].tiny_fp16;
    sum.tiny_bf16 += smem.counts[first + i].tiny_bf16;
  }
  return sum;
}

// Four elements as they are in memory: converting them would wait for their load.
template <typename T>
struct Four {
  uint2 pairs;  // an array of 16-bit elements would take a register each

  Four() = default;
  __device__ __forceinline__ explicit Four(const T (&x)[4])
      : pairs{bits(x[0]) | bits(x[1]) << 16, bits(x[2]) | bits(x[3]) << 16} {}
  __device__ __forceinline__ operator float4() const {
    const float2 front = unpack<T>(pairs.x), back = unpack<T>(pairs.y);
    return {front.x, front.y, back.x, back.y};
  }
};

template <>
struct Four<float> : float4 {
  Four() = default;
  __device__ __forceinline__ explicit Four(const float (&x)[4]) : float4{x[0], x[1], x[2], x[3]} {}
};

// Elements l .. l+3 of a row, zeros past its end.
template <typename T>
__device__ __forceinline__ Four<T> load4(const T* row, int64_t stride, int l, int k,
                                         bool vectorized) {
  if (vectorized && l + 4 <= k) return *reinterpret_cast<const Four<T>*>(row + l);
  T v[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = l + i < k ? row[(l + i) * stride] : store<T>(0.0f);
  return Four<T>(v);
}

// F is called with each of the four.
template <typename F>
__device__ __forceinline__ void each(const float4& v, F f) {
  f(v.x), f(v.y), f(v.z), f(v.w);
}

template <int kRowThreads, int kVectors, typename T>
__device__ __forceinline__ void load_row(const SplitOperand& op, int row, int base, bool vectorized,
                                         Four<T> (&v)[kVectors]) {
  const T* x = row_pointer<T>(op, row);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int l = base + (i * kRowThreads + threadIdx.x % kRowThreads) * 4;
    v[i] = l < op.k ? load4(x, op.k_stride, l, op.k, vectorized) : Four<T>{};
  }
}

// parts: Split::fp16_parts.
template <int kRowThreads, int kVectors, typename T>
__device__ __forceinline__ SplitPath split_rows(const SplitOperand& op, int block, int blocks,
                                                int parts, RowSmem<kRowThreads>& smem) {
  constexpr int kStep = kRowThreads * 4, kHold = kVectors * kStep,
                kRowsPerBlock = kThreads / kRowThreads;
  const int lane = threadIdx.x % kRowThreads * 4;
  const int rows = op.batch * op.rows, step = blocks * kRowsPerBlock;
  const int64_t part_stride = int64_t{rows} * op.ld;
  const bool vectorized = vectorizes<T>(op);
  SplitPath path = SplitPath::kFp16;

  const bool held = op.k <= kHold;
  const int first = block * kRowsPerBlock + row_in_block<kRowThreads>();
  Four<T> next[kVectors];
  if (held && first < rows) load_row<kRowThreads>(op, first, 0, vectorized, next);
  for (int row = first; row < rows; row += step) {
    Four<T> v[kVectors];
    Extremes extremes;
    for (int base = 0; base < op.k; base += kHold) {
      if (held) {
#pragma unroll
        for (int i = 0; i < kVectors; ++i) v[i] = next[i];
        if (row + step < rows) load_row<kRowThreads>(op, row + step, 0, vectorized, next);
      } else {
        load_row<kRowThreads>(op, row, base, vectorized, v);
      }
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        if (base + i * kStep + lane < op.k) each(v[i], [&](float e) { extremes.add(e); });
      }
    }
    extremes = row_reduce<kRowThreads>(extremes, smem);
    const RowScale scale(extremes.largest);
    const Pow2Pair factor = pow2_pair(Fp16Parts::kShift - scale.exponent);
    const uint32_t dense = dense_row(parts);
    const bool count = needs_count(extremes, scale, op.k, dense);
    Counts counts;
    uint16_t* out = op.parts + int64_t{row} * op.ld;
    for (int base = 0; base < op.k; base += kHold) {
      if (!held) load_row<kRowThreads>(op, row, base, vectorized, v);  // read again, from the cache
      if (count) {
#pragma unroll
        for (int i = 0; i < kVectors; ++i) each(v[i], [&](float e) { counts.add(e, scale); });
      }
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const int l = base + i * kStep + lane;
        if (l >= op.ld) continue;
        const auto scaled = [&](float e) { return e * factor.first * factor.second; };
        uint32_t front[2], back[2];
        const float4 e = v[i];
        Fp16Parts::split(scaled(e.x), scaled(e.y), front);
        Fp16Parts::split(scaled(e.z), scaled(e.w), back);
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          if (part >= fp16_parts<T>(op)) break;
          *reinterpret_cast<uint2*>(out + part * part_stride + l) = {front[part], back[part]};
        }
      }
    }
    if (lane == 0) op.exponent[row] = scale.exponent;
    SplitPath found = is_finite(extremes.largest) ? SplitPath::kFp16 : SplitPath::kFma;
    if (count && found == SplitPath::kFp16) {
      counts = row_reduce<kRowThreads>(counts, smem);
      found = row_path(counts.tiny_fp16, counts.tiny_bf16, counts.nonzero, dense);
    }
    if (found > path) path = found;
  }
  return path;
}

// ---- one pass: strided rows, short enough in k for shared memory ----

__device__ __forceinline__ RowStats shuffle_xor(const RowStats& stats, int lanes) {
  return {{__shfl_xor_sync(~0u, stats.extremes.largest, lanes),
           __shfl_xor_sync(~0u, stats.extremes.smallest, lanes)},
          __shfl_xor_sync(~0u, stats.nonzero, lanes)};
}

// Copies everything that a block needs to shared memory, with all loads in flight at once. Elements
// past the operand's end are zeros.
__device__ __forceinline__ void load_columns(const SplitOperand& op, int z, int row0, float* held) {
  const float* x = static_cast<const float*>(op.x) + z * op.batch_stride + row0;
  const bool vectorized = row0 + kColumnRows <= op.rows && op.k_stride % 4 == 0 &&
                          reinterpret_cast<uintptr_t>(x) % 16 == 0;
  if (vectorized) {
    constexpr int kVectors = kColumnRows / 4;
    for (int v = threadIdx.x; v < op.k * kVectors; v += kThreads) {
      const int r = v % kVectors * 4, l = v / kVectors;
      ptx::cp_async<16>(held + column_index(r, l), x + l * op.k_stride + r);
    }
  } else {
    for (int v = threadIdx.x; v < op.k * kColumnRows; v += kThreads) {
      const int r = v % kColumnRows, l = v / kColumnRows;
      const bool inside = row0 + r < op.rows;
      ptx::cp_async<4>(held + column_index(r, l), x + l * op.k_stride + (inside ? r : 0),
                       inside ? 4 : 0);
    }
  }
  for (int v = op.k * kColumnRows + threadIdx.x; v < op.ld * kColumnRows; v += kThreads) {
    held[column_index(v % kColumnRows, v / kColumnRows)] = 0.0f;
  }
  ptx::cp_async_wait_all();
}

__device__ SplitPath split_columns(const SplitOperand& op, int block, float* held, int parts) {
  __shared__ RowStats scratch[kWarps][kColumnRows];
  __shared__ uint32_t tiny[2][kColumnRows];
  const int row_blocks = (op.rows + kColumnRows - 1) / kColumnRows;
  const int z = block / row_blocks, row0 = block % row_blocks * kColumnRows;
  if (threadIdx.x < 2 * kColumnRows) tiny[threadIdx.x / kColumnRows][threadIdx.x % kColumnRows] = 0;
  load_columns(op, z, row0, held);
  __syncthreads();

  const int r = threadIdx.x % kColumnRows;
  RowStats stats;
#pragma unroll 4
  for (int l = threadIdx.x / kColumnRows; l < op.k; l += kThreads / kColumnRows) {
    stats.add(held[column_index(r, l)]);
  }
  for (int lanes = kColumnRows; lanes < 32; lanes *= 2) stats.add(shuffle_xor(stats, lanes));
  if (threadIdx.x % 32 < kColumnRows) scratch[threadIdx.x / 32][r] = stats;
  __syncthreads();

  // Eight threads take 64 consecutive k of one row.
  const int row = threadIdx.x / 8 % kColumnRows;
  stats = RowStats{};
#pragma unroll
  for (int i = 0; i < kWarps; ++i) stats.add(scratch[i][row]);
  const RowScale scale(stats.extremes.largest);
  const Pow2Pair factor = pow2_pair(Fp16Parts::kShift - scale.exponent);
  const bool inside = row0 + row < op.rows;
  const uint32_t dense = dense_row(parts);
  const bool count = inside && needs_count(stats.extremes, scale, op.k, dense);
  const int64_t rows = int64_t{op.batch} * op.rows, index = int64_t{z} * op.rows + row0 + row;
  Counts counts;
  for (int l = threadIdx.x % 8 * 8 + threadIdx.x / 64 * 64; l < op.ld; l += kThreads / 64 * 64) {
    uint32_t word[4][Fp16Parts::kCount];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float e0 = held[column_index(row, l + 2 * i)];
      const float e1 = held[column_index(row, l + 2 * i + 1)];
      if (count) counts.add(e0, scale), counts.add(e1, scale);
      Fp16Parts::split(e0 * factor.first * factor.second, e1 * factor.first * factor.second,
                       word[i]);
    }
    if (!inside) continue;
#pragma unroll
    for (int part = 0; part < Fp16Parts::kCount; ++part) {
      if (part >= parts) break;
      *reinterpret_cast<uint4*>(op.parts + (part * rows + index) * op.ld + l) = {
          word[0][part], word[1][part], word[2][part], word[3][part]};
    }
  }
  if (inside && threadIdx.x < 64 && threadIdx.x % 8 == 0) op.exponent[index] = scale.exponent;
  if (counts.tiny_fp16 != 0) atomicAdd(&tiny[0][row], counts.tiny_fp16);
  if (counts.tiny_bf16 != 0) atomicAdd(&tiny[1][row], counts.tiny_bf16);
  __syncthreads();
  if (!is_finite(stats.extremes.largest)) return SplitPath::kFma;
  return count ? row_path(tiny[0][row], tiny[1][row], stats.nonzero, dense) : SplitPath::kFp16;
}

#endif

}  // namespace
}  // namespace my_ops::cuda
