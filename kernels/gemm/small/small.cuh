// GEMM of small problems on CUDA cores: every type, size and stride, with the fused epilogue.
// Plan: with a short k one thread computes one output. Otherwise a thread sums 2 x 2 outputs over a
// few elements of k, a fixed stride apart; they are so few that it reads them in a round or two of
// loads. The threads that share outputs add their sums in shared memory, in a fixed order. Bound by
// the latency of memory, including that of fetching the kernel's own instructions.
#pragma once

#include <algorithm>
#include <bit>
#include <climits>

#include "common/launch.cuh"
#include "gemm/epilogue.cuh"
#include "gemm/small/plan.h"
#include "ptx/memory.cuh"

namespace my_ops::cuda {
namespace {

constexpr int kShortBits = 8, kShortColumnBits = 5;  // threads of a block, and those along n first

template <int kDepth, typename T, typename Out>
__global__ void __launch_bounds__(1 << kShortBits)
    gemm_short_kernel(const __grid_constant__ GemmArgs<T, Out> args) {
  using C = compute_t<T>;
  const unsigned z = blockIdx.x;
  const unsigned column = blockIdx.y * blockDim.x + threadIdx.x;
  const unsigned row = blockIdx.z * blockDim.y + threadIdx.y;
  if (row >= args.m || column >= args.n) return;
  const ColumnTerms<C> terms = column_terms(args.bias, column);
  const C residual = residual_at(args, z, row, column);
  const T* a = args.a + z * args.a_batch + row * args.a_row;
  const T* b = args.b + z * args.b_batch + column * args.b_col;
  T x[kDepth], y[kDepth];
#pragma unroll
  for (int l = 0; l < kDepth; ++l) {
    x[l] = l < args.k ? *a : store<T>(C(0));
    y[l] = l < args.k ? *b : store<T>(C(0));
    a += args.a_col;
    b += args.b_row;
  }
  C sum = C(0);
#pragma unroll
  for (int l = 0; l < kDepth; ++l) sum += load(x[l]) * load(y[l]);
  args.out[z * args.out_batch + row * args.out_row + column * args.out_col] = store<Out>(
      finish_element(RuntimeActivate{args.activation}, sum, terms, [&] { return residual; }));
}

template <typename T>
struct SmallTile {
  static constexpr int kSide = 2, kSideBits = 1;                   // outputs of a thread
  static constexpr int kDepth = std::max<int>(4, 16 / sizeof(T));  // of k, in flight per thread
  static constexpr int kPartialBytes = kSide * kSide * sizeof(compute_t<T>);  // a thread's sums
  static constexpr int kMaxBits = 10;                                         // threads of a block
  static_assert(kPartialBytes << kMaxBits <= 48 * 1024, "every device gives as much unasked");
};

// How a block's threads share its work; each dimension gets a power of two.
struct SmallPlan {
  int m_bits, n_bits, k_bits;
  bool k_fast;  // adjacent threads are adjacent along k, otherwise along n
  int swizzle;  // moves the sums of adjacent outputs to different banks
};

template <typename T, typename Out>
__global__ void __launch_bounds__(1 << SmallTile<T>::kMaxBits)
    gemm_small_kernel(const __grid_constant__ GemmArgs<T, Out> args, const SmallPlan plan) {
  using C = compute_t<T>;
  using Tile = SmallTile<T>;
  extern __shared__ double smem[];
  C* const partial = reinterpret_cast<C*>(smem);  // [output][thread along k]

  const unsigned m = args.m, n = args.n, k = args.k, z = blockIdx.x, thread = threadIdx.x;
  const unsigned k_threads = 1u << plan.k_bits, n_threads = 1u << plan.n_bits;
  const unsigned k_thread = thread >> (plan.k_fast ? 0 : plan.n_bits) & (k_threads - 1);
  const unsigned n_thread = thread >> (plan.k_fast ? plan.k_bits : 0) & (n_threads - 1);
  const unsigned m_thread = thread >> (plan.k_bits + plan.n_bits);
  const int column_bits = plan.n_bits + Tile::kSideBits;  // outputs of the block
  const unsigned outputs = 1u << (plan.m_bits + Tile::kSideBits + column_bits);
  const unsigned m0 = blockIdx.z << (plan.m_bits + Tile::kSideBits);
  const unsigned n0 = blockIdx.y << column_bits;

  // Up to a warp's lanes sum one output; the first of them finishes it.
  const int lane_bits = min(max(plan.k_bits - 2 * Tile::kSideBits, 0), 5);
  const unsigned lane = thread & ((1u << lane_bits) - 1);
  const unsigned first_output = thread >> lane_bits, output_step = blockDim.x >> lane_bits;
  const auto row_of = [&](unsigned output) { return m0 + (output >> column_bits); };
  const auto column_of = [&](unsigned output) { return n0 + (output & ((1u << column_bits) - 1)); };
  const auto finishes = [&](unsigned output) {
    return lane == 0 && row_of(output) < m && column_of(output) < n;
  };
  const auto residual_of = [&](unsigned output) {
    return args.residual + z * args.residual_batch + row_of(output) * args.residual_row +
           column_of(output) * args.residual_col;
  };
  if (args.bias || args.residual) {  // loaded early: their latency overlaps that of a and b
    for (unsigned output = first_output; output < outputs; output += output_step) {
      if (!finishes(output)) continue;
      if (args.bias) ptx::prefetch_l2(args.bias + column_of(output));
      if (args.residual) ptx::prefetch_l2(residual_of(output));
    }
  }

  // Beyond the last row and column, these are read again and the results dropped.
  const T *a[Tile::kSide], *b[Tile::kSide];
#pragma unroll
  for (int i = 0; i < Tile::kSide; ++i) {
    const unsigned row = min(m0 + m_thread + (i << plan.m_bits), m - 1);
    const unsigned column = min(n0 + n_thread + (i << plan.n_bits), n - 1);
    a[i] = args.a + z * args.a_batch + row * args.a_row + k_thread * args.a_col;
    b[i] = args.b + z * args.b_batch + column * args.b_col + k_thread * args.b_row;
  }
  const int64_t a_step = args.a_col << plan.k_bits, b_step = args.b_row << plan.k_bits;
  C sum[Tile::kSide][Tile::kSide] = {};
  for (unsigned l = k_thread; l < k; l += Tile::kDepth << plan.k_bits) {
    T a_held[Tile::kDepth][Tile::kSide], b_held[Tile::kDepth][Tile::kSide];
#pragma unroll
    for (int d = 0; d < Tile::kDepth; ++d) {
      const bool inside = l + (d << plan.k_bits) < k;
#pragma unroll
      for (int i = 0; i < Tile::kSide; ++i) {
        a_held[d][i] = inside ? *a[i] : store<T>(C(0));
        b_held[d][i] = inside ? *b[i] : store<T>(C(0));
        a[i] += a_step;
        b[i] += b_step;
      }
    }
#pragma unroll
    for (int d = 0; d < Tile::kDepth; ++d) {
#pragma unroll
      for (int i = 0; i < Tile::kSide; ++i) {
#pragma unroll
        for (int j = 0; j < Tile::kSide; ++j) sum[i][j] += load(a_held[d][i]) * load(b_held[d][j]);
      }
    }
  }

  const auto swizzled = [&](unsigned output, unsigned along_k) {
    return (output << plan.k_bits) + (along_k ^ (output << plan.swizzle & (k_threads - 1)));
  };
#pragma unroll
  for (int i = 0; i < Tile::kSide; ++i) {
#pragma unroll
    for (int j = 0; j < Tile::kSide; ++j) {
      const unsigned row = m_thread + (i << plan.m_bits), column = n_thread + (j << plan.n_bits);
      partial[swizzled((row << column_bits) + column, k_thread)] = sum[i][j];
    }
  }
  __syncthreads();
  // The lanes of a warp run this loop together, or one lane per output is enough.
  for (unsigned output = first_output; output < outputs; output += output_step) {
    C total = C(0);
#pragma unroll 4
    for (unsigned l = lane; l < k_threads; l += 1u << lane_bits) {
      total += partial[swizzled(output, l)];
    }
    for (int step = (1 << lane_bits) / 2; step > 0; step /= 2) {
      total += __shfl_xor_sync(0xffffffff, total, step);
    }
    if (!finishes(output)) continue;
    const unsigned row = row_of(output), column = column_of(output);
    const auto residual = [&] {
      return residual_at(args, z, row, column, -C(0));  // a sum of zero keeps its sign
    };
    args.out[z * args.out_batch + row * args.out_row + column * args.out_col] =
        store<Out>(finish_element(RuntimeActivate{args.activation}, total,
                                  column_terms(args.bias, column), residual));
  }
}

constexpr int bits_for(int64_t count) {  // of the smallest power of two that reaches it
  return std::bit_width(static_cast<uint64_t>(count - 1));
}

constexpr int64_t kMaxBlocks = 65535;  // of a launch, in every dimension except the first

template <typename T, typename Out>
cudaError_t gemm_small(const GemmArgs<T, Out>& args, cudaStream_t stream);

// Halves a product too large for one launch along args.*size: batch, m or n.
template <typename T, typename Out>
cudaError_t gemm_halves(const GemmArgs<T, Out>& args, int64_t GemmProblem::* size,
                        cudaStream_t stream) {
  GemmArgs<T, Out> first = args, second = args;
  first.*size = args.*size / 2;
  second.*size = args.*size - first.*size;
  const int64_t z = args.batch - second.batch, row = args.m - second.m, col = args.n - second.n;
  second.a += z * args.a_batch + row * args.a_row;
  second.b += z * args.b_batch + col * args.b_col;
  if (args.bias) second.bias += col;
  if (args.residual) {
    second.residual += z * args.residual_batch + row * args.residual_row + col * args.residual_col;
  }
  second.out += z * args.out_batch + row * args.out_row + col * args.out_col;
  if (auto err = gemm_small(first, stream); err != cudaSuccess) return err;
  return gemm_small(second, stream);
}

template <typename T, typename Out>
cudaError_t gemm_short(const GemmArgs<T, Out>& args, cudaStream_t stream) {
  int column_bits = std::min(bits_for(args.n), kShortColumnBits);
  const int row_bits = std::min(bits_for(args.m), kShortBits - column_bits);
  column_bits = std::min(bits_for(args.n), kShortBits - row_bits);
  const dim3 block(1 << column_bits, 1 << row_bits);
  const int64_t n_blocks = ceil_div(args.n, block.x), m_blocks = ceil_div(args.m, block.y);
  if (args.batch > INT_MAX) return gemm_halves(args, &GemmProblem::batch, stream);
  if (m_blocks > kMaxBlocks) return gemm_halves(args, &GemmProblem::m, stream);
  if (n_blocks > kMaxBlocks) return gemm_halves(args, &GemmProblem::n, stream);
  const dim3 grid(args.batch, n_blocks, m_blocks);
  return args.k <= kShortK<T> / 2
             ? launch(gemm_short_kernel<kShortK<T> / 2, T, Out>, grid, block, 0, stream, args)
             : launch(gemm_short_kernel<kShortK<T>, T, Out>, grid, block, 0, stream, args);
}

// For batch, m and n of at least 1, and k below 2^31.
template <typename T, typename Out>
cudaError_t gemm_small(const GemmArgs<T, Out>& args, cudaStream_t stream) {
  using Tile = SmallTile<T>;
  constexpr int kBlockBits = 7, kWarpBits = 5;
  constexpr int64_t kDeviceThreads = 1 << 16;  // beyond that many, more k per thread,
  constexpr int64_t kMaxSum = 32;              // but no longer sums, which round more
  if (args.k <= kShortK<T>) return gemm_short(args, stream);
  const int64_t m_tiles = ceil_div(args.m, Tile::kSide), n_tiles = ceil_div(args.n, Tile::kSide);
  const int64_t tiles = args.batch * m_tiles * n_tiles;
  SmallPlan plan{};
  while (plan.k_bits < Tile::kMaxBits && Tile::kDepth << plan.k_bits < args.k &&
         (tiles << plan.k_bits < kDeviceThreads || args.k >> plan.k_bits > kMaxSum)) {
    ++plan.k_bits;
  }
  const int tile_bits = std::max(kBlockBits - plan.k_bits, 0);
  plan.n_bits = std::min(bits_for(n_tiles), tile_bits);
  plan.m_bits = std::min(bits_for(m_tiles), tile_bits - plan.n_bits);
  plan.m_bits = std::max(plan.m_bits, kWarpBits - plan.k_bits - plan.n_bits);
  plan.k_fast = args.b_row == 1 && args.b_col != 1;
  plan.swizzle = plan.k_fast ? 0 : std::max(kWarpBits - plan.n_bits, 0);

  const int64_t n_blocks = ceil_div(n_tiles, int64_t{1} << plan.n_bits);
  const int64_t m_blocks = ceil_div(m_tiles, int64_t{1} << plan.m_bits);
  if (args.batch > INT_MAX) return gemm_halves(args, &GemmProblem::batch, stream);
  if (m_blocks > kMaxBlocks) return gemm_halves(args, &GemmProblem::m, stream);
  if (n_blocks > kMaxBlocks) return gemm_halves(args, &GemmProblem::n, stream);
  const dim3 grid(args.batch, n_blocks, m_blocks);
  const int threads = 1 << (plan.k_bits + plan.n_bits + plan.m_bits);
  return launch(gemm_small_kernel<T, Out>, grid, threads, threads * Tile::kPartialBytes, stream,
                args, plan);
}

}  // namespace
}  // namespace my_ops::cuda
