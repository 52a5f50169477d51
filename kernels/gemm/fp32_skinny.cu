// Float GEMM for few rows or a small output: six bf16 products per element on the tensor cores, k
// split over the whole device.
// Plan: a block forms kM x kN sums over a piece of k. b comes through a ring of 32 of k by
// cp.async, in the order it has in memory; a warp splits its own 16 columns in registers. a, small,
// is read straight from memory, split once a block and laid down as the fragments of mma. Sums are
// compensated: what an addition loses goes on to the next. A second kernel adds the pieces in
// double, applies the epilogue, and does in plain arithmetic what bf16 parts cannot hold. Bound by
// memory, the larger operand once.
#include "gemm/fp32_skinny.h"

#include <algorithm>

#include "common/launch.cuh"
#include "gemm/bf16_parts.cuh"
#include "gemm/epilogue.cuh"
#include "gemm/fp32_exact.cuh"
#include "gemm/fp32_skinny_plan.h"
#include "ptx/cp_async.cuh"
#include "ptx/griddepcontrol.cuh"

namespace my_ops::cuda {
namespace {

using namespace fp32_skinny;

constexpr int kK = kBlockK;
constexpr int kChunks = kK / 16;  // of k, an mma
constexpr int kPiece = 2;         // stages, after which their sum goes to that of all
constexpr int kWarpColumns = 16;  // two mma tiles
constexpr int kReduceThreads = 256;

struct Skinny {
  Args args;
  float* partial;  // [splits][m][n]
  float* error;    // [splits][tiles_m][tiles_n]: what a sum may lack for tiny numbers, mostly 0
  int tiles_m, tiles_n, splits;
  int k_blocks, k_blocks_per_split;
  bool a_wide, b_wide;  // vectors of four, of k in a, are aligned
};

// b's ring.
template <int kN, bool kKFast, int kThreads, int kStages>
struct Ring {
  static constexpr int kPitch = kKFast ? kK : kN;
  static constexpr int kFloats = kN * kK;                    // of a stage
  static constexpr int kSlowStep = kThreads / (kPitch / 4);  // rows that a thread's vectors skip

  float* smem;
  const float* x;
  int64_t row_stride, k_stride, rows, k;
  bool wide;  // and the whole tile lies inside

  // Swizzled, so that the lanes of a read meet different banks.
  static __device__ __forceinline__ int offset(int slow, int fast) {
    return slow * kPitch + (fast ^ (kKFast ? slow % 2 * 16 : slow / 4 % 4 * 8));
  }
  __device__ __forceinline__ void load(int stage, int64_t l0) const {
    float* const to = smem + stage * kFloats;
    if (wide && l0 + kK <= k) {
      const int fast = threadIdx.x % (kPitch / 4) * 4, slow = threadIdx.x / (kPitch / 4);
      const int64_t slow_stride = kKFast ? row_stride : k_stride;
      const float* from = x + l0 * k_stride + slow * slow_stride + fast;
#pragma unroll
      for (int i = 0; i < kFloats / 4 / kThreads; ++i) {
        // Rows a multiple of 16 apart are swizzled alike.
        const int at = kSlowStep % 16 == 0 ? offset(slow, fast) + i * kSlowStep * kPitch
                                           : offset(slow + i * kSlowStep, fast);
        ptx::cp_async<16>(to + at, from);
        from += kSlowStep * slow_stride;
      }
      return;
    }
    for (int v = threadIdx.x; v < kFloats; v += kThreads) {
      const int fast = v % kPitch, slow = v / kPitch;
      const int64_t row = kKFast ? slow : fast, l = l0 + (kKFast ? fast : slow);
      const bool inside = row < rows && l < k;
      ptx::cp_async<4>(to + offset(slow, fast), x + (inside ? row * row_stride + l * k_stride : 0),
                       inside ? 4 : 0);
    }
  }
  // A lane's four elements of k of one column.
  __device__ __forceinline__ void read(int stage, int chunk, int column, int lane,
                                       float (&v)[4]) const {
    const float* at = smem + stage * kFloats;
    const int l = chunk * 16 + chunk_k(lane);
    if constexpr (kKFast) {
      const float4 f = *reinterpret_cast<const float4*>(at + offset(column, l));
      v[0] = f.x, v[1] = f.y, v[2] = f.z, v[3] = f.w;
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) v[e] = at[offset(l, column) + e * kPitch];
    }
  }
};

template <int kTilesM, int kWarps, bool kBKFast>
struct Kernel {
  static constexpr int kM = 16 * kTilesM, kN = kWarpColumns * kWarps, kThreads = 32 * kWarps;
  static constexpr int kStages = 3;
  static constexpr int kBlocksPerSm = kTilesM == 1 ? 2 : 3;  // what registers allow
  static constexpr int kUnits = kTilesM * kChunks;  // fragments of a, 32 lanes each, a stage
  static constexpr int kUnitsPerWarp = (kUnits + kWarps - 1) / kWarps;
  using B = Ring<kN, kBKFast, kThreads, kStages>;
  using Fragments = uint4[kUnits][kParts][32];
  static constexpr int kSmemBytes = 2 * sizeof(Fragments) + kStages * B::kFloats * 4;
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// bf16 and the tensor cores are trusted with normal numbers only: what is smaller counts as lost.
constexpr float kLost = 0x1p-125f;
constexpr float kTinyProduct = 0x1p-100f;  // of smaller products, the last bits
constexpr float kErrorMargin = 0x1p25f;    // an output is kept if it is that much larger

// Over a warp.
__device__ __forceinline__ Range of_warp(Range range) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    range.add(Range{__shfl_xor_sync(0xffffffff, range.largest, step),
                    __shfl_xor_sync(0xffffffff, range.smallest, step)});
  }
  return range;
}

// What a sum of k products of parts may lack for numbers below the normal ones.
__device__ __forceinline__ float error_bound(const Range& a, const Range& b, int k) {
  float error = 0.0f;
  if (a.min_magnitude() < kTiny) error += kLost * b.max_magnitude();
  if (b.min_magnitude() < kTiny) error += kLost * a.max_magnitude();
  if (a.min_magnitude() * b.min_magnitude() < kTinyProduct) error += kLost;
  return error * static_cast<float>(k);
}

// A lane's share of a fragment of a: two rows, eight apart, of four of k.
struct AHalf {
  const float* row;  // at the lane's first k of a block 0; null beyond the last row
  float v[4];

  __device__ __forceinline__ void load(bool wide, int64_t l, int64_t k_stride, int64_t k_left) {
#pragma unroll
    for (int e = 0; e < 4; ++e) v[e] = 0.0f;
    if (!row) return;
    if (wide) {
      const float4 f = *reinterpret_cast<const float4*>(row + l);
      v[0] = f.x, v[1] = f.y, v[2] = f.z, v[3] = f.w;
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (e < k_left) v[e] = row[(l + e) * k_stride];
      }
    }
  }
};

// The end of an element, of whose sum a thread knows; whole warps come here, `inside` or not.
__device__ __forceinline__ void finish(const Args& args, int row, int col, float sum, float error,
                                       bool inside) {
  // Not kept: Inf, NaN, what rounds to Inf in bf16, and what tiny numbers may have spoilt.
  const bool kept = fabsf(sum) <= 0x1.fffffep127f && fabsf(sum) >= error * kErrorMargin;
  sum = formed_exactly(args, 0, row, col, inside && !kept, sum);
  if (!inside) return;
  args.out[row * args.out_row + col * args.out_col] =
      finish_element(RuntimeActivate{args.activation}, sum, column_terms(args.bias, col),
                     [&] { return residual_at(args, 0, row, col); });
}

#endif

template <int kTilesM, int kWarps, bool kBKFast>
__global__ void __launch_bounds__(32 * kWarps, Kernel<kTilesM, kWarps, kBKFast>::kBlocksPerSm)
    fp32_skinny_kernel(const __grid_constant__ Skinny p) {
#if __CUDA_ARCH__ >= 900
  using K = Kernel<kTilesM, kWarps, kBKFast>;
  extern __shared__ uint4 smem[];
  auto* const fragments = reinterpret_cast<typename K::Fragments*>(smem);
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const Args& args = p.args;
  const int split = blockIdx.x % p.splits, tile = blockIdx.x / p.splits;
  const int64_t n0 = int64_t{tile % p.tiles_n} * K::kN, m0 = int64_t{tile / p.tiles_n} * K::kM;
  const typename K::B b{reinterpret_cast<float*>(smem) + 2 * sizeof(typename K::Fragments) / 4,
                        args.b + n0 * args.b_col,
                        args.b_col,
                        args.b_row,
                        args.n - n0,
                        args.k,
                        p.b_wide && n0 + K::kN <= args.n};
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4;
  const int first = split * p.k_blocks_per_split;
  const int blocks = min(p.k_blocks_per_split, p.k_blocks - first);

  const auto load_b = [&](int block) {
    if (block < blocks) b.load(block % K::kStages, int64_t{first + block} * kK);
    ptx::cp_async_commit_group();
  };
  AHalf held[K::kUnitsPerWarp][2];
#pragma unroll
  for (int i = 0; i < K::kUnitsPerWarp; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t row = m0 + (warp + i * kWarps) / kChunks * 16 + half * 8 + group;
      held[i][half].row = row < args.m ? args.a + row * args.a_row : nullptr;
    }
  }
  const auto load_a = [&](int block) {
#pragma unroll
    for (int i = 0; i < K::kUnitsPerWarp; ++i) {
      const int unit = warp + i * kWarps;
      if (unit >= K::kUnits || block >= blocks) continue;
      const int64_t l = int64_t{first + block} * kK + unit % kChunks * 16 + chunk_k(lane);
      const bool wide = p.a_wide && l + 4 <= args.k;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        held[i][half].load(wide, l, args.a_col, args.k - l);
      }
    }
  };
  Range a_range, b_range;
  const auto split_a = [&](int block) {
#pragma unroll
    for (int i = 0; i < K::kUnitsPerWarp; ++i) {
      const int unit = warp + i * kWarps;
      if (unit >= K::kUnits || block >= blocks) continue;
      const float (&low)[4] = held[i][0].v;
      const float (&high)[4] = held[i][1].v;
#pragma unroll
      for (int e = 0; e < 4; ++e) a_range.add(low[e]), a_range.add(high[e]);
      uint4 parts[kParts];
      split_rows(low, high, parts);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        fragments[block % 2][unit][part][lane] = parts[part];
      }
    }
  };

  load_a(0);
#pragma unroll
  for (int block = 0; block < K::kStages - 1; ++block) load_b(block);
  split_a(0);
  load_a(1);
  float sum[kTilesM][2][4] = {};
  float pending[kTilesM][2][4] = {};  // what is still to be added to the sum
  for (int block = 0; block < blocks; ++block) {
    ptx::cp_async_wait_group<K::kStages - 2>();
    __syncthreads();  // this stage has landed for all, and what is written next has been read
    load_b(block + K::kStages - 1);
    split_a(block + 1);
    load_a(block + 2);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      uint2 b_part[2][kParts];
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        float v[4];
        b.read(block % K::kStages, chunk, warp * kWarpColumns + t * 8 + group, lane, v);
#pragma unroll
        for (int e = 0; e < 4; ++e) b_range.add(v[e]);
        split_column(v, b_part[t]);
      }
#pragma unroll
      for (int m = 0; m < kTilesM; ++m) {
        uint4 a_part[kParts];
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          a_part[part] = fragments[block % 2][m * kChunks + chunk][part][lane];
        }
        float rest[2][4] = {};
        add_other_products(rest, a_part, b_part);
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          float first[4], second[4];
          multiply_leading(first, second, a_part[0], b_part[t][0]);
#pragma unroll
          for (int i = 0; i < 4; ++i) pending[m][t][i] += rest[t][i] + first[i] + second[i];
        }
      }
    }
    if (block % kPiece != kPiece - 1) continue;
#pragma unroll
    for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
      for (int t = 0; t < 2; ++t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float before = sum[m][t][i];
          sum[m][t][i] += pending[m][t][i];
          pending[m][t][i] -= sum[m][t][i] - before;  // what the sum cannot hold
        }
      }
    }
  }

  float* const partial = p.partial + split * args.m * args.n;
#pragma unroll
  for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int64_t row = m0 + m * 16 + i / 2 * 8 + group;
        const int64_t col = n0 + warp * kWarpColumns + t * 8 + lane % 4 * 2 + i % 2;
        if (row < args.m && col < args.n) {
          partial[row * args.n + col] = sum[m][t][i] + pending[m][t][i];
        }
      }
    }
  }
  a_range = of_warp(a_range), b_range = of_warp(b_range);
  auto* const ranges = reinterpret_cast<Range(*)[2]>(smem);
  __syncthreads();  // the stages have been read
  if (lane == 0) ranges[warp][0] = a_range, ranges[warp][1] = b_range;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int w = 1; w < kWarps; ++w) a_range.add(ranges[w][0]), b_range.add(ranges[w][1]);
  p.error[split * p.tiles_m * p.tiles_n + tile] = error_bound(a_range, b_range, blocks * kK);
#endif
}

// Adds the pieces: an output has blockDim.y lanes, which take them in turn and are then added in
// order.
__global__ void __launch_bounds__(kReduceThreads)
    fp32_skinny_reduce_kernel(const __grid_constant__ Skinny p, int tile_m, int tile_n) {
#if __CUDA_ARCH__ >= 900
  __shared__ double sums[kReduceThreads];
  __shared__ float bounds[kReduceThreads];
  const int n = static_cast<int>(p.args.n), total = static_cast<int>(p.args.m) * n;
  const int at = blockIdx.x * blockDim.x + threadIdx.x, row = at / n, col = at % n;
  const float* const pieces = p.partial + at;
  const float* const errors = p.error + row / tile_m * p.tiles_n + col / tile_n;
  ptx::griddepcontrol_wait();
  double sum = 0.0;
  float error = 0.0f;
  if (at < total) {
#pragma unroll 8
    for (int split = threadIdx.y; split < p.splits; split += blockDim.y) {
      sum += pieces[int64_t{split} * total];
      error += errors[split * p.tiles_m * p.tiles_n];
    }
  }
  if (blockDim.y > 1) {
    const int thread = threadIdx.y * blockDim.x + threadIdx.x;
    sums[thread] = sum;
    bounds[thread] = error;
    __syncthreads();
    if (thread >= max(blockDim.x, 32)) return;
    sum = error = 0.0f;
#pragma unroll 8
    for (int lane = threadIdx.x; lane < kReduceThreads; lane += blockDim.x) {
      sum += sums[lane];
      error += bounds[lane];
    }
  }
  finish(p.args, row, col, static_cast<float>(sum), error, at < total && threadIdx.y == 0);
#endif
}

using FewRows = Kernel<1, 8, true>;
using SmallOutput = Kernel<2, 4, true>;
static_assert(FewRows::kM == kFewRows.m && FewRows::kN == kFewRows.n &&
              FewRows::kBlocksPerSm == kFewRows.blocks_per_sm);
static_assert(SmallOutput::kM == kSmallOutput.m && SmallOutput::kN == kSmallOutput.n &&
              SmallOutput::kBlocksPerSm == kSmallOutput.blocks_per_sm);
static_assert(FewRows::kSmemBytes == kNeeds.shared_bytes);
static_assert(SmallOutput::kSmemBytes <= kNeeds.shared_bytes);

Skinny prepare(const Args& args, const GemmPlan& plan, void* workspace) {
  const fp32_skinny::Tile& tile = tile_of(args);
  Skinny p{};
  p.args = args;
  p.tiles_m = static_cast<int>(ceil_div(args.m, tile.m));
  p.tiles_n = static_cast<int>(ceil_div(args.n, tile.n));
  p.splits = plan.splits;
  p.k_blocks = static_cast<int>(ceil_div(args.k, kK));
  p.k_blocks_per_split = static_cast<int>(ceil_div(p.k_blocks, p.splits));
  p.partial = static_cast<float*>(workspace);
  p.error = p.partial + p.splits * args.m * args.n;
  p.a_wide = whole_vectors(args.a, args.a_col, args.a_row);
  p.b_wide = whole_vectors_b(args);
  return p;
}

template <typename K, auto kKernel>
cudaError_t run(const Skinny& p, cudaStream_t stream) {
  if (auto err = allow_shared_bytes(kKernel, K::kSmemBytes); err != cudaSuccess) return err;
  const int64_t blocks = int64_t{p.tiles_m} * p.tiles_n * p.splits;
  if (auto err = sm90::launch_overlapped(kKernel, blocks, K::kThreads, K::kSmemBytes, 1, stream, p);
      err != cudaSuccess) {
    return err;
  }
  // About eight pieces a lane, all of them in flight.
  const unsigned lanes = p.splits <= 8 ? 1 : p.splits <= 64 ? 8 : 32;
  const dim3 threads(kReduceThreads / lanes, lanes);
  return sm90::launch_overlapped(fp32_skinny_reduce_kernel,
                                 ceil_div(p.args.m * p.args.n, threads.x), threads, 0, 1, stream, p,
                                 int{K::kM}, int{K::kN});
}

template <int kTilesM, int kWarps>
cudaError_t run(const Skinny& p, cudaStream_t stream) {
  const bool k_fast = p.args.b_row == 1 || p.args.b_col != 1;
  return k_fast ? run<Kernel<kTilesM, kWarps, true>, fp32_skinny_kernel<kTilesM, kWarps, true>>(
                      p, stream)
                : run<Kernel<kTilesM, kWarps, false>, fp32_skinny_kernel<kTilesM, kWarps, false>>(
                      p, stream);
}

}  // namespace
}  // namespace my_ops::cuda

cudaError_t my_ops::cuda::gemm_fp32_skinny(const GemmArgs<float, float>& args, const GemmPlan& plan,
                                           void* workspace, cudaStream_t stream) {
  const Skinny p = prepare(args, plan, workspace);
  return args.m <= kFewRows.m ? run<1, 8>(p, stream) : run<2, 4>(p, stream);
}
