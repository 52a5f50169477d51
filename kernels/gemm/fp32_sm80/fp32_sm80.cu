// Float GEMM as six bf16 tensor-core products, of three parts of each operand.
// Plan: a block computes a 128 x 128 tile. A cp.async ring holds k-blocks of 16 in the operand's
// memory order, in four stages, or two if shared memory is short. Operands are split in registers.
// Leading products are summed from zero over 8 of k, the others over 16, and promoted, that is
// added with rounding (the tensor core truncates). Segments of 256 are summed separately.
// Bound by tensor cores: 6 * 2*m*n*k bf16 flop.
#include "gemm/fp32_sm80/fp32_sm80.h"

#include <cuda_runtime.h>

#include "common/launch.cuh"
#include "fp32/bf16_parts.cuh"
#include "gemm/epilogue.cuh"
#include "gemm/fp32_sm80/plan.h"
#include "ptx/cp_async.cuh"

namespace my_ops::cuda {
namespace {

using namespace fp32_sm80;

constexpr int kThreads = 256;         // 2 x 4 warps, each 64 x 32 of the tile
constexpr int kSegmentBlocks = 16;    // k-blocks that are summed separately
constexpr int kOperand = kTile * kK;  // floats of a stage

constexpr float kTinyProduct = 0x1p-126f;  // smaller products may lose their last bits

// One operand, seen as rows of k: a[m, k], or b[n, k].
struct Operand {
  const float* x;
  int64_t row_stride, k_stride;
  int rows;         // from the tile's first row on
  bool vectorized;  // vectors of four are aligned
};

// Position of an element in a stage, [row][k] or [k][row]. The latter is swizzled, so that the
// lanes of a read access different banks.
template <bool kKFast>
__device__ __forceinline__ int offset(int row, int l) {
  return kKFast ? row * kK + l : l * kTile + (row ^ l / 4 * 8);
}

template <bool kKFast, int kWidth>
__device__ __forceinline__ void load_stage(const Operand& op, float* smem, int64_t l0, int64_t k) {
  constexpr int kFast = (kKFast ? kK : kTile) / kWidth;  // vectors along the fast index
#pragma unroll
  for (int i = 0; i < kTile * kK / kWidth / kThreads; ++i) {
    const int v = threadIdx.x + i * kThreads;
    const int fast = v % kFast * kWidth, slow = v / kFast;
    const int row = kKFast ? slow : fast, l = kKFast ? fast : slow;
    const int rows = op.rows - row;
    const int64_t ks = k - l0 - l;
    const int64_t along = kKFast ? ks : rows;
    const bool inside = rows > 0 && ks > 0;
    const int valid = inside ? static_cast<int>(min(along, int64_t{kWidth})) : 0;
    const float* from = op.x + (inside ? row * op.row_stride + (l0 + l) * op.k_stride : 0);
    ptx::cp_async<4 * kWidth>(smem + offset<kKFast>(row, l), from, 4 * valid);
  }
}

template <bool kKFast>
__device__ __forceinline__ void load_stage(const Operand& op, float* smem, int64_t l0, int64_t k) {
  if (op.vectorized) {
    load_stage<kKFast, 4>(op, smem, l0, k);
  } else {
    load_stage<kKFast, 1>(op, smem, l0, k);
  }
}

// A lane's four consecutive k in one row.
template <bool kKFast>
__device__ __forceinline__ void read(const float* smem, int row, int lane, float (&v)[4]) {
  const float* const at = smem + offset<kKFast>(row, fragment_k(lane));
  if constexpr (kKFast) {
    const float4 f = *reinterpret_cast<const float4*>(at);
    v[0] = f.x, v[1] = f.y, v[2] = f.z, v[3] = f.w;
  } else {
#pragma unroll
    for (int e = 0; e < 4; ++e) v[e] = at[e * kTile];
  }
}

constexpr int kMmaM = 4, kMmaN = 4;  // mma tiles of 16 x 8 per warp

// Row and column of sum[i][j][x] within the tile.
__device__ __forceinline__ int row_of(int i, int x) {
  return threadIdx.x / 128 * 64 + i * 16 + threadIdx.x % 32 / 4 + x / 2 * 8;
}
__device__ __forceinline__ int column_of(int j, int x) {
  return threadIdx.x / 32 % 4 * 32 + j * 8 + threadIdx.x % 4 * 2 + x % 2;
}

// acc += a b over one stage; adds the elements' magnitudes to `range`.
template <bool kAKFast, bool kBKFast>
__device__ __forceinline__ void multiply(const float* a, const float* b, Range& range,
                                         float (&acc)[kMmaM][kMmaN][4]) {
  const int lane = threadIdx.x % 32, group = lane / 4;
  const int row0 = threadIdx.x / 128 * 64 + group, col0 = threadIdx.x / 32 % 4 * 32 + group;
  uint2 b_parts[kMmaN][kParts];
#pragma unroll
  for (int j = 0; j < kMmaN; ++j) {
    float v[4];
    read<kBKFast>(b, col0 + j * 8, lane, v);
#pragma unroll
    for (int e = 0; e < 4; ++e) range.add(v[e]);
    split_column(v, b_parts[j]);
  }
#pragma unroll
  for (int i = 0; i < kMmaM; ++i) {
    float top[4], bottom[4];
    read<kAKFast>(a, row0 + i * 16, lane, top);
    read<kAKFast>(a, row0 + i * 16 + 8, lane, bottom);
#pragma unroll
    for (int e = 0; e < 4; ++e) range.add(top[e]), range.add(bottom[e]);
    uint4 a_parts[kParts];
    split_rows(top, bottom, a_parts);
    float rest[kMmaN][4] = {};
    add_other_products(rest, a_parts, b_parts);
#pragma unroll
    for (int j = 0; j < kMmaN; ++j) {
      float first[4], second[4];
      multiply_leading(first, second, a_parts[0], b_parts[j][0]);
#pragma unroll
      for (int x = 0; x < 4; ++x) acc[i][j][x] += rest[j][x] + first[x] + second[x];
    }
  }
}

// A thread's sums over all of k. They are in shared memory, because they are needed only once per
// segment.
struct Sums {
  float* at;  // [kMmaM * kMmaN * 4][kThreads]

  __device__ __forceinline__ float& operator()(int i, int j, int x) const {
    return at[((i * kMmaN + j) * 4 + x) * kThreads + threadIdx.x];
  }
  __device__ __forceinline__ void clear() const {
#pragma unroll
    for (int e = 0; e < kMmaM * kMmaN * 4; ++e) at[e * kThreads + threadIdx.x] = 0.0f;
  }
  // Adds acc and clears it.
  __device__ __forceinline__ void take(float (&acc)[kMmaM][kMmaN][4]) const {
#pragma unroll
    for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
      for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
        for (int x = 0; x < 4; ++x) {
          (*this)(i, j, x) += acc[i][j][x];
          acc[i][j][x] = 0.0f;
        }
      }
    }
  }
};

// Computes the tile by fp32 FMAs, for data that bf16 parts cannot hold.
__device__ __forceinline__ void multiply_by_fma(const Operand& a, const Operand& b, int64_t k,
                                                const Sums& sums) {
  sums.clear();
  float acc[kMmaM][kMmaN][4] = {};
  constexpr int kSegment = 128;
  for (int64_t l0 = 0; l0 < k; l0 += kSegment) {
    for (int64_t l = l0; l < min(l0 + kSegment, k); ++l) {
      float left[kMmaM][2], right[kMmaN][2];
#pragma unroll
      for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
        for (int x = 0; x < 2; ++x) {
          const int row = row_of(i, 2 * x);
          left[i][x] = row < a.rows ? a.x[row * a.row_stride + l * a.k_stride] : 0.0f;
        }
      }
#pragma unroll
      for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
        for (int x = 0; x < 2; ++x) {
          const int column = column_of(j, x);
          right[j][x] = column < b.rows ? b.x[column * b.row_stride + l * b.k_stride] : 0.0f;
        }
      }
#pragma unroll
      for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
        for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
          for (int x = 0; x < 4; ++x) {
            acc[i][j][x] = fmaf(left[i][x / 2], right[j][x % 2], acc[i][j][x]);
          }
        }
      }
    }
    sums.take(acc);
  }
}

struct Launch {
  GemmArgs<float, float> args;
  int64_t tiles_m, tiles_n;
  bool a_vectorized, b_vectorized;  // vectors of four are aligned
  int stages;                       // 4 or 2
};

template <bool kAKFast, bool kBKFast>
__global__ void __launch_bounds__(kThreads) fp32_sm80_kernel(const __grid_constant__ Launch tiles) {
#if __CUDA_ARCH__ >= 800
  extern __shared__ __align__(16) float smem[];
  const GemmArgs<float, float>& args = tiles.args;
  // Tiles are walked in groups of 8 along m, so that concurrent blocks share operands in L2.
  constexpr int kGroup = 8;
  const int64_t plane = tiles.tiles_m * tiles.tiles_n;
  const int64_t z = blockIdx.x / plane, in_plane = blockIdx.x % plane;
  const int64_t first = in_plane / (kGroup * tiles.tiles_n) * kGroup;
  const int64_t in_group = in_plane % (kGroup * tiles.tiles_n);
  const int64_t group_rows = min(int64_t{kGroup}, tiles.tiles_m - first);
  const int64_t m0 = (first + in_group % group_rows) * kTile, n0 = in_group / group_rows * kTile;
  const auto clip = [](int64_t rows) { return static_cast<int>(min(rows, int64_t{kTile})); };
  const Operand a{args.a + z * args.a_batch + m0 * args.a_row, args.a_row, args.a_col,
                  clip(args.m - m0), tiles.a_vectorized};
  const Operand b{args.b + z * args.b_batch + n0 * args.b_col, args.b_col, args.b_row,
                  clip(args.n - n0), tiles.b_vectorized};

  const Sums sums{smem};
  float* const ring = smem + kTile * kTile;
  const auto stage_a = [&](int64_t k_block) {
    return ring + (static_cast<int>(k_block) & (tiles.stages - 1)) * 2 * kOperand;
  };
  const auto load = [&](int64_t k_block) {
    if (k_block * kK < args.k) {
      load_stage<kAKFast>(a, stage_a(k_block), k_block * kK, args.k);
      load_stage<kBKFast>(b, stage_a(k_block) + kOperand, k_block * kK, args.k);
    }
    ptx::cp_async_commit_group();
  };
  for (int k_block = 0; k_block < tiles.stages - 1; ++k_block) load(k_block);

  sums.clear();
  float acc[kMmaM][kMmaN][4] = {};
  Range range;
  for (int64_t k_block = 0; k_block * kK < args.k; ++k_block) {
    if (tiles.stages == 4) {
      ptx::cp_async_wait_group<2>();
    } else {
      ptx::cp_async_wait_group<0>();
    }
    __syncthreads();  // this stage is filled, and the previous one has been read
    load(k_block + tiles.stages - 1);
    multiply<kAKFast, kBKFast>(stage_a(k_block), stage_a(k_block) + kOperand, range, acc);
    if (k_block % kSegmentBlocks == kSegmentBlocks - 1) sums.take(acc);
  }
  sums.take(acc);
  bool by_fma = range.min_magnitude() < kTiny;
#pragma unroll
  for (int e = 0; e < kMmaM * kMmaN * 4; ++e) {
    const float sum = fabsf(sums.at[e * kThreads + threadIdx.x]);
    by_fma |= !isfinite(sum) || (sum > 0.0f && sum < args.k * kTinyProduct);
  }
  if (__syncthreads_or(by_fma)) multiply_by_fma(a, b, args.k, sums);

  float* out = args.out + z * args.out_batch;
  with_activation(args.activation, [&]<Activation kActivation>() {
#pragma unroll 1  // otherwise the activations are most of the code to compile
    for (int mma_tile = 0; mma_tile < kMmaM * kMmaN; ++mma_tile) {
      const int i = mma_tile / kMmaN, j = mma_tile % kMmaN;
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const int64_t row = m0 + row_of(i, x), column = n0 + column_of(j, x);
        if (row >= args.m || column >= args.n) continue;
        out[row * args.out_row + column * args.out_col] =
            finish_element(Activate<kActivation>{}, sums(i, j, x), column_terms(args.bias, column),
                           [&] { return residual_at(args, z, row, column); });
      }
    }
  });
#endif
}

// Whether vectors of four along the contiguous index are aligned, in every row and batch.
bool vectorizes(const float* x, int64_t batch_stride, int64_t row_stride, int64_t k_stride) {
  const bool k_fast = k_stride == 1;
  return (k_fast || row_stride == 1) && reinterpret_cast<uintptr_t>(x) % 16 == 0 &&
         batch_stride % 4 == 0 && (k_fast ? row_stride : k_stride) % 4 == 0;
}

template <bool kAKFast, bool kBKFast>
cudaError_t run(const Launch& tiles, cudaStream_t stream) {
  const auto kernel = fp32_sm80_kernel<kAKFast, kBKFast>;
  const size_t bytes = needs(tiles.stages).shared_bytes;
  if (auto err = allow_shared_bytes(kernel, bytes); err != cudaSuccess) return err;
  return launch(kernel, tiles.args.batch * tiles.tiles_m * tiles.tiles_n, kThreads, bytes, stream,
                tiles);
}

}  // namespace
}  // namespace my_ops::cuda

cudaError_t my_ops::cuda::gemm_fp32_sm80(const GemmArgs<float, float>& args, const GemmPlan& plan,
                                         cudaStream_t stream) {
  const Launch tiles{args,
                     ceil_div(args.m, kTile),
                     ceil_div(args.n, kTile),
                     vectorizes(args.a, args.a_batch, args.a_row, args.a_col),
                     vectorizes(args.b, args.b_batch, args.b_col, args.b_row),
                     plan.tile};
  if (args.a_col == 1) {
    return args.b_row == 1 ? run<true, true>(tiles, stream) : run<true, false>(tiles, stream);
  }
  return args.b_row == 1 ? run<false, true>(tiles, stream) : run<false, false>(tiles, stream);
}
