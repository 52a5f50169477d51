// Plain float arithmetic, 64 x 64 tiles by 256 threads, for what the split cannot represent.
// Plan: 16 of k at a time through shared memory, the next loads in registers meanwhile. Sums of 16
// products, then of 256, are formed on their own: less rounding error than one chain.
// Bound by shared memory at about 15 TFLOP/s; any strides, and Inf and NaN as float gives them.
#pragma once

#include <cuda_runtime.h>

#include "gemm/epilogue.cuh"
#include "ptx/barrier.cuh"

namespace my_ops::cuda {
namespace {

constexpr int kExactTile = 64, kExactK = 16, kExactThreads = 256;

__device__ __forceinline__ void exact_barrier() {
  constexpr int kBarrier = 3;  // those before may be in use
  ptx::barrier_sync(kBarrier, kExactThreads);
}

struct alignas(16) ExactSmem {  // read in vectors of four
  float a[kExactK][kExactTile + 4];
  float b[kExactK][kExactTile + 4];
};

// A thread's share of a 64 x 16 piece of an operand; lanes run along its contiguous index.
struct ExactLoader {
  const float* x;
  int64_t row_stride, k_stride, k;
  int first, rows;
  int thread;
  float held[4];

  __device__ int row(int i) const {
    const int t = thread + i * kExactThreads;
    return k_stride == 1 ? t / kExactK : t % kExactTile;
  }
  __device__ int column(int i) const {
    const int t = thread + i * kExactThreads;
    return k_stride == 1 ? t % kExactK : t / kExactTile;
  }
  __device__ void load(int64_t l0) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t r = first + row(i), l = l0 + column(i);
      held[i] = r < rows && l < k ? x[r * row_stride + l * k_stride] : 0.0f;
    }
  }
  __device__ void store(float (&to)[kExactK][kExactTile + 4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[column(i)][row(i)] = held[i];
  }
};

// Matrix z from row m0 and column n0 on, to a tile's end or column n_end.
__device__ void multiply_tile_exactly(const GemmArgs<float, float>& args, ExactSmem& smem,
                                      int thread, int64_t z, int m0, int n0, int n_end) {
  const int m = static_cast<int>(args.m);
  const int n = min(static_cast<int>(args.n), n_end);
  const int row0 = thread / 16 * 4, col0 = thread % 16 * 4;
  ExactLoader a{args.a + z * args.a_batch, args.a_row, args.a_col, args.k, m0, m, thread};
  ExactLoader b{args.b + z * args.b_batch, args.b_col, args.b_row, args.k, n0, n, thread};
  float acc[4][4] = {}, middle[4][4] = {};
  a.load(0);
  b.load(0);
  for (int64_t l0 = 0; l0 < args.k; l0 += kExactK) {
    exact_barrier();  // smem has been read
    a.store(smem.a);
    b.store(smem.b);
    exact_barrier();  // smem has been written
    a.load(l0 + kExactK);
    b.load(l0 + kExactK);
    float piece[4][4] = {};
#pragma unroll
    for (int l = 0; l < kExactK; ++l) {
      const float4 x = *reinterpret_cast<const float4*>(&smem.a[l][row0]);
      const float4 y = *reinterpret_cast<const float4*>(&smem.b[l][col0]);
      const float xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) piece[i][j] = fmaf(xs[i], ys[j], piece[i][j]);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) middle[i][j] += piece[i][j];
    }
    if (l0 / kExactK % 16 == 15 || l0 + kExactK >= args.k) {
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
  with_activation(args.activation, [&]<Activation kActivation>() {
#pragma unroll 1  // else the activations are a third of what there is to compile
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int row = m0 + row0 + i, col = n0 + col0 + j;
        if (row >= m || col >= n) continue;
        const float x = i < 2 ? i == 0 ? acc[0][j] : acc[1][j] : i == 2 ? acc[2][j] : acc[3][j];
        args.out[z * args.out_batch + row * args.out_row + col] =
            finish_element(Activate<kActivation>{}, x, column_terms(args.bias, col),
                           [&] { return residual_at(args, z, row, col); });
      }
    }
  });
}

// An output in plain arithmetic if it is wanted, else x; whole warps come here, and work together.
__device__ __forceinline__ float formed_exactly(const GemmArgs<float, float>& args, int64_t z,
                                                int row, int col, bool wanted, float x) {
  constexpr unsigned kWarp = 0xFFFFFFFF;
  constexpr int64_t kPiece = 1024;  // of k, whose sum is formed on its own
  const int lane = static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x) % 32;
  for (unsigned rest = __ballot_sync(kWarp, wanted); rest; rest &= rest - 1) {
    const int of = __ffs(rest) - 1;
    const float* const a = args.a + __shfl_sync(kWarp, z, of) * args.a_batch +
                           __shfl_sync(kWarp, row, of) * args.a_row;
    const float* const b = args.b + __shfl_sync(kWarp, z, of) * args.b_batch +
                           __shfl_sync(kWarp, col, of) * args.b_col;
    float sum = 0.0f;
    for (int64_t l0 = 0; l0 < args.k; l0 += kPiece) {
      float of_piece = 0.0f;
      for (int64_t l = l0 + lane; l < min(l0 + kPiece, args.k); l += 32) {
        of_piece = fmaf(a[l * args.a_col], b[l * args.b_row], of_piece);
      }
      sum += of_piece;
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(kWarp, sum, step);
    if (lane == of) x = sum;
  }
  return x;
}

template <int kThreads>
__device__ void multiply_exactly(const GemmArgs<float, float>& args, ExactSmem& smem) {
  static_assert(kThreads >= kExactThreads);
  if (threadIdx.x >= kExactThreads) return;
  const int tiles_m = static_cast<int>((args.m + kExactTile - 1) / kExactTile);
  const int tiles_n = static_cast<int>((args.n + kExactTile - 1) / kExactTile);
  for (int64_t t = blockIdx.x; t < args.batch * tiles_m * tiles_n; t += gridDim.x) {
    const int m0 = static_cast<int>(t / tiles_n % tiles_m) * kExactTile;
    const int n0 = static_cast<int>(t % tiles_n) * kExactTile;
    multiply_tile_exactly(args, smem, threadIdx.x, t / tiles_n / tiles_m, m0, n0, n0 + kExactTile);
  }
}

}  // namespace
}  // namespace my_ops::cuda
