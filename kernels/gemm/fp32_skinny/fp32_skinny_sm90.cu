// Float GEMM for few rows or a small output: six bf16 tensor-core products, k sliced over the whole
// device.
// Plan: a block computes kM x kN sums over one k-slice. b passes through a cp.async ring of
// k-blocks of 32, in its memory order; each warp splits its own 16 columns in registers. a is
// small: it is read directly, split once per block and kept in shared memory as mma fragments. Sums
// are compensated: what an addition loses is carried into the next. A second kernel adds the slices
// in double, applies the epilogue, and recomputes with fp32 FMAs what bf16 parts cannot hold.
// Bound by memory: the larger operand is read once.
#include "gemm/fp32_skinny/fp32_skinny.h"

#include <algorithm>

#include "common/launch.cuh"
#include "fp32/bf16_parts.cuh"
#include "gemm/epilogue.cuh"
#include "gemm/fp32_fma.cuh"
#include "gemm/fp32_skinny/plan.h"
#include "ptx/cp_async.cuh"
#include "ptx/griddepcontrol.cuh"

namespace my_ops::cuda {
namespace {

using namespace fp32_skinny;

using Args = GemmArgs<float, float>;

constexpr int kK = kBlockK;
constexpr int kKSteps = kK / 16;  // mmas along k, per stage
constexpr int kSegment = 2;       // k-blocks between additions of their sum to the total
constexpr int kWarpColumns = 16;  // two mma tiles
constexpr int kReduceThreads = 256;

struct Skinny {
  Args args;
  float* partial;  // [slices][m][n]
  float* error;    // [slices][tiles_m][tiles_n]: the error that tiny numbers may cause in a sum
  int tiles_m, tiles_n, slices;
  int k_blocks, k_blocks_per_slice;
  bool a_vectorized, b_vectorized;  // vectors of four are aligned; in a, along k
};

// b's ring.
template <int kN, bool kKFast, int kThreads, int kStages>
struct Ring {
  static constexpr int kPitch = kKFast ? kK : kN;
  static constexpr int kFloats = kN * kK;                    // of a stage
  static constexpr int kSlowStep = kThreads / (kPitch / 4);  // from a thread's vector to its next

  float* smem;
  const float* x;
  int64_t row_stride, k_stride, rows, k;
  bool vectorized;  // and the whole tile is inside

  // Swizzled, so that the lanes of a read access different banks.
  static __device__ __forceinline__ int offset(int slow, int fast) {
    return slow * kPitch + (fast ^ (kKFast ? slow % 2 * 16 : slow / 4 % 4 * 8));
  }
  __device__ __forceinline__ void load(int stage, int64_t l0) const {
    float* const to = smem + stage * kFloats;
    if (vectorized && l0 + kK <= k) {
      const int fast = threadIdx.x % (kPitch / 4) * 4, slow = threadIdx.x / (kPitch / 4);
      const int64_t slow_stride = kKFast ? row_stride : k_stride;
      const float* from = x + l0 * k_stride + slow * slow_stride + fast;
#pragma unroll
      for (int i = 0; i < kFloats / 4 / kThreads; ++i) {
        // Rows a multiple of 16 apart have the same swizzle.
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
  // A lane's four elements of k in one column.
  __device__ __forceinline__ void read(int stage, int k_step, int column, int lane,
                                       float (&v)[4]) const {
    const float* at = smem + stage * kFloats;
    const int l = k_step * 16 + fragment_k(lane);
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
  static constexpr int kBlocksPerSm = kTilesM == 1 ? 2 : 3;  // as registers allow
  static constexpr int kFragments = kTilesM * kKSteps;  // fragments of a, 32 lanes each, a stage
  static constexpr int kFragmentsPerWarp = (kFragments + kWarps - 1) / kWarps;
  using B = Ring<kN, kBKFast, kThreads, kStages>;
  using Fragments = uint4[kFragments][kParts][32];
  static constexpr int kSmemBytes = 2 * sizeof(Fragments) + kStages * B::kFloats * 4;
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// The range over a warp.
__device__ __forceinline__ Range of_warp(Range range) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    range.add(Range{__shfl_xor_sync(0xffffffff, range.largest, step),
                    __shfl_xor_sync(0xffffffff, range.smallest, step)});
  }
  return range;
}

// Half of a lane's fragment of a: four consecutive k of one of its two rows.
struct AHalf {
  const float* row;  // at k = 0; null past the last row
  float v[4];

  __device__ __forceinline__ void load(bool vectorized, int64_t l, int64_t k_stride,
                                       int64_t k_left) {
#pragma unroll
    for (int e = 0; e < 4; ++e) v[e] = 0.0f;
    if (!row) return;
    if (vectorized) {
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

// The epilogue of one output, whose sum is in this thread. Must be called by whole warps, `inside`
// or not.
__device__ __forceinline__ void finish(const Args& args, int row, int col, float sum, float error,
                                       bool inside) {
  sum = recomputed(args, 0, row, col, inside && is_suspect(sum, error), sum);
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
  const int slice = blockIdx.x % p.slices, tile = blockIdx.x / p.slices;
  const int64_t n0 = int64_t{tile % p.tiles_n} * K::kN, m0 = int64_t{tile / p.tiles_n} * K::kM;
  const typename K::B b{reinterpret_cast<float*>(smem) + 2 * sizeof(typename K::Fragments) / 4,
                        args.b + n0 * args.b_col,
                        args.b_col,
                        args.b_row,
                        args.n - n0,
                        args.k,
                        p.b_vectorized && n0 + K::kN <= args.n};
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4;
  const int first = slice * p.k_blocks_per_slice;
  const int blocks = min(p.k_blocks_per_slice, p.k_blocks - first);

  const auto load_b = [&](int k_block) {
    if (k_block < blocks) b.load(k_block % K::kStages, int64_t{first + k_block} * kK);
    ptx::cp_async_commit_group();
  };
  AHalf held[K::kFragmentsPerWarp][2];
#pragma unroll
  for (int i = 0; i < K::kFragmentsPerWarp; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t row = m0 + (warp + i * kWarps) / kKSteps * 16 + half * 8 + group;
      held[i][half].row = row < args.m ? args.a + row * args.a_row : nullptr;
    }
  }
  const auto load_a = [&](int k_block) {
#pragma unroll
    for (int i = 0; i < K::kFragmentsPerWarp; ++i) {
      const int fragment = warp + i * kWarps;
      if (fragment >= K::kFragments || k_block >= blocks) continue;
      const int64_t l = int64_t{first + k_block} * kK + fragment % kKSteps * 16 + fragment_k(lane);
      const bool vectorized = p.a_vectorized && l + 4 <= args.k;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        held[i][half].load(vectorized, l, args.a_col, args.k - l);
      }
    }
  };
  Range a_range, b_range;
  const auto split_a = [&](int k_block) {
#pragma unroll
    for (int i = 0; i < K::kFragmentsPerWarp; ++i) {
      const int fragment = warp + i * kWarps;
      if (fragment >= K::kFragments || k_block >= blocks) continue;
      const float (&low)[4] = held[i][0].v;
      const float (&high)[4] = held[i][1].v;
#pragma unroll
      for (int e = 0; e < 4; ++e) a_range.add(low[e]), a_range.add(high[e]);
      uint4 parts[kParts];
      split_rows(low, high, parts);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        fragments[k_block % 2][fragment][part][lane] = parts[part];
      }
    }
  };

  load_a(0);
#pragma unroll
  for (int k_block = 0; k_block < K::kStages - 1; ++k_block) load_b(k_block);
  split_a(0);
  load_a(1);
  float sum[kTilesM][2][4] = {};
  float pending[kTilesM][2][4] = {};  // not yet added to the sum
  for (int k_block = 0; k_block < blocks; ++k_block) {
    ptx::cp_async_wait_group<K::kStages - 2>();
    __syncthreads();  // all have this stage, and the stage written next has been read
    load_b(k_block + K::kStages - 1);
    split_a(k_block + 1);
    load_a(k_block + 2);
#pragma unroll
    for (int k_step = 0; k_step < kKSteps; ++k_step) {
      uint2 b_part[2][kParts];
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        float v[4];
        b.read(k_block % K::kStages, k_step, warp * kWarpColumns + t * 8 + group, lane, v);
#pragma unroll
        for (int e = 0; e < 4; ++e) b_range.add(v[e]);
        split_column(v, b_part[t]);
      }
#pragma unroll
      for (int m = 0; m < kTilesM; ++m) {
        uint4 a_part[kParts];
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          a_part[part] = fragments[k_block % 2][m * kKSteps + k_step][part][lane];
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
    if (k_block % kSegment != kSegment - 1) continue;
#pragma unroll
    for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
      for (int t = 0; t < 2; ++t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float before = sum[m][t][i];
          sum[m][t][i] += pending[m][t][i];
          pending[m][t][i] -= sum[m][t][i] - before;  // what the sum lost
        }
      }
    }
  }

  float* const partial = p.partial + slice * args.m * args.n;
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
  p.error[slice * p.tiles_m * p.tiles_n + tile] = error_bound(a_range, b_range, blocks * kK);
#endif
}

// Adds the slices: blockDim.y threads share the slices of an output, and their sums are added in
// order.
__global__ void __launch_bounds__(kReduceThreads)
    fp32_skinny_reduce_kernel(const __grid_constant__ Skinny p, int tile_m, int tile_n) {
#if __CUDA_ARCH__ >= 900
  __shared__ double sums[kReduceThreads];
  __shared__ float bounds[kReduceThreads];
  const int n = static_cast<int>(p.args.n), total = static_cast<int>(p.args.m) * n;
  const int at = blockIdx.x * blockDim.x + threadIdx.x, row = at / n, col = at % n;
  const float* const partial = p.partial + at;
  const float* const errors = p.error + row / tile_m * p.tiles_n + col / tile_n;
  ptx::griddepcontrol_wait();
  double sum = 0.0;
  float error = 0.0f;
  if (at < total) {
#pragma unroll 8
    for (int slice = threadIdx.y; slice < p.slices; slice += blockDim.y) {
      sum += partial[int64_t{slice} * total];
      error += errors[slice * p.tiles_m * p.tiles_n];
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
  p.slices = plan.slices;
  p.k_blocks = static_cast<int>(ceil_div(args.k, kK));
  p.k_blocks_per_slice = static_cast<int>(ceil_div(p.k_blocks, p.slices));
  p.partial = static_cast<float*>(workspace);
  p.error = p.partial + p.slices * args.m * args.n;
  p.a_vectorized = vectorizes(args.a, args.a_col, args.a_row);
  p.b_vectorized = vectorizes_b(args);
  return p;
}

template <typename K, auto kKernel>
cudaError_t run(const Skinny& p, cudaStream_t stream) {
  if (auto err = allow_shared_bytes(kKernel, K::kSmemBytes); err != cudaSuccess) return err;
  const int64_t blocks = int64_t{p.tiles_m} * p.tiles_n * p.slices;
  if (auto err = sm90::launch_overlapped(kKernel, blocks, K::kThreads, K::kSmemBytes, 1, stream, p);
      err != cudaSuccess) {
    return err;
  }
  // About eight slices per thread, all of them in flight.
  const unsigned lanes = p.slices <= 8 ? 1 : p.slices <= 64 ? 8 : 32;
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
