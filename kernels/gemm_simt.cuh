// GEMM on the ordinary cores: every type, size and stride, with the fused epilogue.
// Plan: a 64 x 64 tile of the output a block, 4 x 4 a thread; slices of k pass through shared
// memory, the next one loading into registers meanwhile. Bound by latency at the sizes it is routed
// to.
#pragma once

#include "gemm_epilogue.cuh"

namespace my_ops::cuda {
namespace {

struct SimtTile {
  static constexpr int kM = 64, kN = 64, kK = 16;
  static constexpr int kThreads = 256;
  static constexpr int kPerThread = 4;               // rows and columns of the output
  static constexpr int kLoads = kM * kK / kThreads;  // elements of a slice a thread
  static constexpr int kPad = 4;                     // keeps transposing stores off one bank
};
static_assert(SimtTile::kM == SimtTile::kN, "one loader serves both operands");

// One operand's slice [kK][kM]: rows of the tile are its m (or n) index. Consecutive threads follow
// the operand's unit stride, so that either layout loads coalesced.
template <typename T>
struct SimtLoader {
  const T* base;
  int64_t row_stride, k_stride;
  int64_t rows, k;  // extents from the tile's corner; loads beyond them give 0
  bool along_k;
  T held[SimtTile::kLoads];

  __device__ void row_and_k(int i, int* row, int* l) const {
    const int at = threadIdx.x + i * SimtTile::kThreads;
    *row = along_k ? at / SimtTile::kK : at % SimtTile::kM;
    *l = along_k ? at % SimtTile::kK : at / SimtTile::kM;
  }
  __device__ void fetch(int64_t k0) {
#pragma unroll
    for (int i = 0; i < SimtTile::kLoads; ++i) {
      int row, l;
      row_and_k(i, &row, &l);
      const bool inside = row < rows && k0 + l < k;
      held[i] = inside ? base[row * row_stride + (k0 + l) * k_stride] : store<T>(compute_t<T>(0));
    }
  }
  __device__ void put(compute_t<T> (*slice)[SimtTile::kM + SimtTile::kPad]) const {
#pragma unroll
    for (int i = 0; i < SimtTile::kLoads; ++i) {
      int row, l;
      row_and_k(i, &row, &l);
      slice[l][row] = load(held[i]);
    }
  }
};

template <typename T, typename Out, Activation kActivation>
__global__ void __launch_bounds__(SimtTile::kThreads)
    gemm_simt_kernel(const __grid_constant__ GemmArgs<T, Out> args, int64_t m_tiles,
                     int64_t n_tiles) {
  using C = compute_t<T>;
  constexpr int kPer = SimtTile::kPerThread;
  __shared__ C a_slice[SimtTile::kK][SimtTile::kM + SimtTile::kPad];
  __shared__ C b_slice[SimtTile::kK][SimtTile::kN + SimtTile::kPad];

  const int64_t tile = blockIdx.x;
  const int64_t n0 = tile % n_tiles * SimtTile::kN;
  const int64_t m0 = tile / n_tiles % m_tiles * SimtTile::kM;
  const int64_t z = tile / n_tiles / m_tiles;
  SimtLoader<T> a{args.a + z * args.a_batch + m0 * args.a_row,
                  args.a_row,
                  args.a_col,
                  args.m - m0,
                  args.k,
                  args.a_col == 1,
                  {}};
  SimtLoader<T> b{args.b + z * args.b_batch + n0 * args.b_col,
                  args.b_col,
                  args.b_row,
                  args.n - n0,
                  args.k,
                  args.b_row == 1,
                  {}};

  C acc[kPer][kPer] = {};
  const int row = threadIdx.x / (SimtTile::kN / kPer) * kPer;
  const int col = threadIdx.x % (SimtTile::kN / kPer) * kPer;
  a.fetch(0);
  b.fetch(0);
  for (int64_t k0 = 0; k0 < args.k; k0 += SimtTile::kK) {
    a.put(a_slice);
    b.put(b_slice);
    __syncthreads();  // the slices are whole
    a.fetch(k0 + SimtTile::kK);
    b.fetch(k0 + SimtTile::kK);
#pragma unroll
    for (int l = 0; l < SimtTile::kK; ++l) {
#pragma unroll
      for (int i = 0; i < kPer; ++i) {
#pragma unroll
        for (int j = 0; j < kPer; ++j) acc[i][j] += a_slice[l][row + i] * b_slice[l][col + j];
      }
    }
    __syncthreads();  // the slices are rewritten
  }

#pragma unroll
  for (int i = 0; i < kPer; ++i) {
#pragma unroll
    for (int j = 0; j < kPer; ++j) {
      const int64_t y = m0 + row + i, x = n0 + col + j;
      if (y >= args.m || x >= args.n) continue;
      const C sum = args.bias ? acc[i][j] + load(args.bias[x]) : acc[i][j];
      args.out[z * args.out_batch + y * args.out_row + x * args.out_col] =
          store<Out>(Activate<kActivation>{}(sum) + residual_at(args, z, y, x));
    }
  }
}

template <Activation kActivation, typename T, typename Out>
cudaError_t launch_gemm_simt(const GemmArgs<T, Out>& args, cudaStream_t stream) {
  const int64_t m_tiles = ceil_div(args.m, SimtTile::kM);
  const int64_t n_tiles = ceil_div(args.n, SimtTile::kN);
  const auto blocks = static_cast<unsigned>(args.batch * m_tiles * n_tiles);
  gemm_simt_kernel<T, Out, kActivation>
      <<<blocks, SimtTile::kThreads, 0, stream>>>(args, m_tiles, n_tiles);
  return cudaGetLastError();
}

template <typename T, typename Out>
cudaError_t gemm_simt(const GemmArgs<T, Out>& args, cudaStream_t stream) {
  return dispatch_activation(args.activation, [&]<Activation kActivation>() {
    return launch_gemm_simt<kActivation>(args, stream);
  });
}

}  // namespace
}  // namespace my_ops::cuda
