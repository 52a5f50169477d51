// Products by fp32 FMAs, in 64 x 64 tiles by 256 threads, for data that parts cannot hold.
// Plan: 16 of k at a time pass through shared memory, while registers hold the next loads. Segments
// of 16 products, and then of 256, are summed separately, for less rounding error than one chain;
// but a chain has less where only a few of its products are not zero.
// Bound by shared memory at about 15 TFLOP/s. Takes any strides, and gives Inf and NaN as float
// arithmetic does.
#pragma once

#include <cuda_runtime.h>

#include "common/numeric.cuh"
#include "gemm/epilogue.cuh"
#include "ptx/barrier.cuh"

namespace my_ops::cuda {
namespace {

constexpr int kFmaTile = 64, kFmaK = 16, kFmaThreads = 256;

__device__ __forceinline__ void fma_barrier() {
  constexpr int kBarrier = 3;  // lower numbers may be in use
  ptx::barrier_sync(kBarrier, kFmaThreads);
}

struct alignas(16) FmaSmem {  // read in vectors of four
  float a[kFmaK][kFmaTile + 4];
  float b[kFmaK][kFmaTile + 4];
};

// An operand of either type: that at half if x is null.
struct FmaOperand {
  const float* x;
  const void* half;
  bool is_bfloat16;

  __device__ __forceinline__ float at(int64_t i) const {
    if (x) return x[i];
    return is_bfloat16 ? load(static_cast<const __nv_bfloat16*>(half)[i])
                       : load(static_cast<const __half*>(half)[i]);
  }
};

__device__ __forceinline__ FmaOperand fma_a(const GemmArgs<float, float>& args) {
  return {args.a, args.half_operand, args.half_is_bfloat16};
}
__device__ __forceinline__ FmaOperand fma_b(const GemmArgs<float, float>& args) {
  return {args.b, args.half_operand, args.half_is_bfloat16};
}

// A thread's share of a 64 x 16 tile of an operand; lanes run along its contiguous index.
struct FmaLoader {
  FmaOperand operand;
  int64_t start;
  int64_t row_stride, k_stride, k;
  int first, rows;
  int thread;
  float held[4];

  __device__ int row(int i) const {
    const int t = thread + i * kFmaThreads;
    return k_stride == 1 ? t / kFmaK : t % kFmaTile;
  }
  __device__ int column(int i) const {
    const int t = thread + i * kFmaThreads;
    return k_stride == 1 ? t % kFmaK : t / kFmaTile;
  }
  __device__ void load(int64_t l0) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t r = first + row(i), l = l0 + column(i);
      held[i] = r < rows && l < k ? operand.at(start + r * row_stride + l * k_stride) : 0.0f;
    }
  }
  __device__ void store(float (&to)[kFmaK][kFmaTile + 4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[column(i)][row(i)] = held[i];
  }
};

enum class FmaSums { kSegments, kChain };  // the latter up to 256 of k

// The sums of a tile over k from `first` to `end`. a and b load 16 of k into registers, and store
// them in shared memory.
template <FmaSums sums = FmaSums::kSegments, typename A, typename B>
__device__ __forceinline__ void sum_tile_by_fma(FmaSmem& smem, int thread, int64_t first,
                                                int64_t end, A& a, B& b, float (&acc)[4][4]) {
  const int row0 = thread / 16 * 4, col0 = thread % 16 * 4;
  float middle[4][4] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) acc[i][j] = 0.0f;
  }
  a.load(first);
  b.load(first);
  for (int64_t l0 = first; l0 < end; l0 += kFmaK) {
    fma_barrier();  // smem has been read
    a.store(smem.a);
    b.store(smem.b);
    fma_barrier();  // smem has been written
    a.load(l0 + kFmaK);
    b.load(l0 + kFmaK);
    float own[4][4] = {};
    float (&segment)[4][4] = sums == FmaSums::kChain ? middle : own;
#pragma unroll
    for (int l = 0; l < kFmaK; ++l) {
      const float4 x = *reinterpret_cast<const float4*>(&smem.a[l][row0]);
      const float4 y = *reinterpret_cast<const float4*>(&smem.b[l][col0]);
      const float xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) segment[i][j] = fmaf(xs[i], ys[j], segment[i][j]);
      }
    }
    if constexpr (sums == FmaSums::kSegments) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) middle[i][j] += segment[i][j];
      }
    }
    if ((l0 - first) / kFmaK % 16 == 15 || l0 + kFmaK >= end) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          acc[i][j] += middle[i][j];
          middle[i][j] = 0.0f;
        }
      }
    }
  }
}

// Multiplies matrix z from row m0 and column n0 on, up to a tile's end or column n_end.
template <FmaSums sums = FmaSums::kSegments>
__device__ void multiply_tile_by_fma(const GemmArgs<float, float>& args, FmaSmem& smem, int thread,
                                     int64_t z, int m0, int n0, int n_end) {
  const int m = static_cast<int>(args.m);
  const int n = min(static_cast<int>(args.n), n_end);
  const int row0 = thread / 16 * 4, col0 = thread % 16 * 4;
  FmaLoader a{fma_a(args), z * args.a_batch, args.a_row, args.a_col, args.k, m0, m, thread};
  FmaLoader b{fma_b(args), z * args.b_batch, args.b_col, args.b_row, args.k, n0, n, thread};
  float acc[4][4];
  sum_tile_by_fma<sums>(smem, thread, 0, args.k, a, b, acc);
#pragma unroll 1  // unrolled, the activations would be a fifth of the code to compile
  for (int e = 0; e < 16; ++e) {
    const int row = m0 + row0 + e / 4, col = n0 + col0 + e % 4;
    if (row >= m || col >= n) continue;
    float x = 0.0f;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (i == e) x = acc[i / 4][i % 4];
    }
    args.out[z * args.out_batch + row * args.out_row + col] =
        finish_element(RuntimeActivate{args.activation}, x, column_terms(args.bias, col),
                       [&] { return residual_at(args, z, row, col); });
  }
}

// The output recomputed by fp32 FMAs if `wanted`, otherwise x. Must be called by whole warps, which
// work together.
__device__ __forceinline__ float recomputed(const GemmArgs<float, float>& args, int64_t z, int row,
                                            int col, bool wanted, float x) {
  constexpr unsigned kWarp = 0xFFFFFFFF;
  constexpr int64_t kSegment = 1024;  // of k, summed separately
  const int lane = static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x) % 32;
  for (unsigned rest = __ballot_sync(kWarp, wanted); rest; rest &= rest - 1) {
    const int of = __ffs(rest) - 1;
    const int64_t a =
        __shfl_sync(kWarp, z, of) * args.a_batch + __shfl_sync(kWarp, row, of) * args.a_row;
    const int64_t b =
        __shfl_sync(kWarp, z, of) * args.b_batch + __shfl_sync(kWarp, col, of) * args.b_col;
    float sum = 0.0f;
    for (int64_t l0 = 0; l0 < args.k; l0 += kSegment) {
      float segment_sum = 0.0f;
      for (int64_t l = l0 + lane; l < min(l0 + kSegment, args.k); l += 32) {
        segment_sum = fmaf(fma_a(args).at(a + l * args.a_col), fma_b(args).at(b + l * args.b_row),
                           segment_sum);
      }
      sum += segment_sum;
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(kWarp, sum, step);
    if (lane == of) x = sum;
  }
  return x;
}

// Which of a thread's sums, in the accumulators of a warpgroup, are to be recomputed.
template <int kCount>
struct Suspects {
  uint32_t words[(kCount + 31) / 32] = {};

  __device__ __forceinline__ void add(int i, bool suspect) {
    words[i / 32] |= uint32_t{suspect} << i % 32;
  }
  __device__ __forceinline__ bool has(int i) const { return words[i / 32] >> i % 32 & 1; }
  __device__ __forceinline__ int count() const {
    int count = 0;
#pragma unroll
    for (uint32_t word : words) count += __popc(word);
    return count;
  }
};

// For sums in memory, where they can be indexed.
template <int kCount>
__device__ __noinline__ void recompute_copy(const GemmArgs<float, float>& args, int row0, int col0,
                                            bool transposed, const Suspects<kCount>& suspects,
                                            float (&sum)[kCount]) {
#pragma unroll 1
  for (int e = 0; e < kCount; ++e) {
    const int x = row0 + e / 2 % 2 * 8, y = col0 + e / 4 * 8 + e % 2;
    const int row = transposed ? y : x, col = transposed ? x : y;
    const bool wanted = row < args.m && col < args.n && suspects.has(e);
    sum[e] = recomputed(args, 0, row, col, wanted, sum[e]);
  }
}

// Recomputes the suspect outputs of a warp. row0, col0: of the thread's first sum, in the output or
// its transpose.
template <int kCount>
__device__ __forceinline__ void recompute(const GemmArgs<float, float>& args, int row0, int col0,
                                          bool transposed, const Suspects<kCount>& suspects,
                                          float (&sum)[kCount]) {
  if (!__any_sync(~0u, suspects.count() != 0)) return;
  float copy[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) copy[i] = sum[i];
  recompute_copy(args, row0, col0, transposed, suspects, copy);
#pragma unroll
  for (int i = 0; i < kCount; ++i) sum[i] = copy[i];
}

template <int kThreads>
__device__ void multiply_by_fma(const GemmArgs<float, float>& args, FmaSmem& smem) {
  static_assert(kThreads >= kFmaThreads);
  if (threadIdx.x >= kFmaThreads) return;
  const int tiles_m = static_cast<int>((args.m + kFmaTile - 1) / kFmaTile);
  const int tiles_n = static_cast<int>((args.n + kFmaTile - 1) / kFmaTile);
  for (int64_t t = blockIdx.x; t < args.batch * tiles_m * tiles_n; t += gridDim.x) {
    const int m0 = static_cast<int>(t / tiles_n % tiles_m) * kFmaTile;
    const int n0 = static_cast<int>(t % tiles_n) * kFmaTile;
    multiply_tile_by_fma(args, smem, threadIdx.x, t / tiles_n / tiles_m, m0, n0, n0 + kFmaTile);
  }
}

}  // namespace
}  // namespace my_ops::cuda
