// Float GEMM for few rows or a small output: plain FMAs, k split over the whole device.
// Plan: a block forms kM x kN sums over a piece of k; a ring of 32 of k by cp.async, each operand
// in the order it has in memory; a second kernel adds the pieces and applies the epilogue. Bound by
// memory, the larger operand once; at 64 rows by FMAs.
#include "gemm_fp32_skinny.h"

#include <algorithm>

#include "device.h"
#include "gemm_epilogue.cuh"
#include "sm90.cuh"

namespace my_ops::cuda {
namespace {

using Args = GemmArgs<float, float>;

constexpr int kK = 32, kStages = 3, kPad = 4;  // pad: rows start in different banks
constexpr int kThreadsPerSm = 512;             // 128 registers each
constexpr int kPerThread = 4;                  // rows and columns of the output
constexpr int kReduceOutputs = 32, kReduceLanes = 8;

struct Skinny {
  Args args;
  float* partial;  // [splits][batch][m][n]
  int tiles_m, tiles_n, splits;
  int k_blocks, k_blocks_per_split;
  bool a_wide, b_wide;  // vectors of four are aligned
};

// One operand's ring, seen as rows of k, from a tile's first row on.
template <int kRows, bool kKFast, int kThreads>
struct Ring {
  static constexpr int kPitch = (kKFast ? kK : kRows) + kPad;
  static constexpr int kFloats = (kKFast ? kRows : kK) * kPitch;  // of a stage

  float* smem;
  const float* x;
  int64_t row_stride, k_stride, rows, k;
  bool wide;

  template <int kWidth>
  __device__ __forceinline__ void load(int stage, int64_t l0) const {
    constexpr int kFast = (kKFast ? kK : kRows) / kWidth;
    for (int v = threadIdx.x; v < kRows * kK / kWidth; v += kThreads) {
      const int fast = v % kFast * kWidth, slow = v / kFast;
      const int64_t row = kKFast ? slow : fast, l = l0 + (kKFast ? fast : slow);
      const int64_t along = kKFast ? k - l : rows - row;
      const bool inside = row < rows && l < k;
      const int bytes = inside ? 4 * static_cast<int>(min(along, int64_t{kWidth})) : 0;
      const float* from = x + (inside ? row * row_stride + l * k_stride : 0);
      const uint32_t to = sm90::smem_address(smem + stage * kFloats + slow * kPitch + fast);
      if constexpr (kWidth == 4) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                     "r"(bytes));
      } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from),
                     "r"(bytes));
      }
    }
  }
  __device__ __forceinline__ void load(int stage, int64_t l0) const {
    wide ? load<4>(stage, l0) : load<1>(stage, l0);
  }

  // Row i of the thread whose group of rows is `group`.
  static __device__ __forceinline__ int row(int group, int i) {
    return kKFast ? group + kRows / kPerThread * i : group * kPerThread + i;
  }
  // Four rows by four of k, from l on.
  __device__ __forceinline__ void read(int stage, int group, int l, float (&v)[4][4]) const {
    const float* at = smem + stage * kFloats;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 f = *reinterpret_cast<const float4*>(
          kKFast ? at + row(group, i) * kPitch + l : at + (l + i) * kPitch + group * kPerThread);
      const float e[4] = {f.x, f.y, f.z, f.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) v[kKFast ? i : j][kKFast ? j : i] = e[j];
    }
  }
};

template <int kM, int kN, bool kAKFast, bool kBKFast>
struct Kernel {
  static constexpr int kThreads = kM * kN / (kPerThread * kPerThread);
  using A = Ring<kM, kAKFast, kThreads>;
  using B = Ring<kN, kBKFast, kThreads>;
  static constexpr int kSmemBytes = kStages * (A::kFloats + B::kFloats) * 4;
};

template <int kM, int kN, bool kAKFast, bool kBKFast>
__global__ void __launch_bounds__(kM* kN / 16, kThreadsPerSm / (kM * kN / 16))
    fp32_skinny_kernel(const __grid_constant__ Skinny p) {
#if __CUDA_ARCH__ >= 900
  using K = Kernel<kM, kN, kAKFast, kBKFast>;
  extern __shared__ float smem[];
  sm90::griddepcontrol_launch_dependents();
  const Args& args = p.args;
  const int split = blockIdx.x % p.splits, tile = blockIdx.x / p.splits;
  const int64_t n0 = int64_t{tile % p.tiles_n} * kN,
                m0 = int64_t{tile / p.tiles_n % p.tiles_m} * kM;
  const int64_t z = tile / p.tiles_n / p.tiles_m;
  const typename K::A a{smem,        args.a + z * args.a_batch + m0 * args.a_row,
                        args.a_row,  args.a_col,
                        args.m - m0, args.k,
                        p.a_wide};
  const typename K::B b{smem + kStages * K::A::kFloats,
                        args.b + z * args.b_batch + n0 * args.b_col,
                        args.b_col,
                        args.b_row,
                        args.n - n0,
                        args.k,
                        p.b_wide};
  // A warp's lanes: four groups of rows by eight of columns, so that reads do not collide.
  constexpr int kWarpsM = kM / 16;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int m_group = lane / 8 + 4 * (warp % kWarpsM), n_group = lane % 8 + 8 * (warp / kWarpsM);

  const int first = split * p.k_blocks_per_split;
  const int blocks = min(p.k_blocks_per_split, p.k_blocks - first);
  const auto load = [&](int block) {
    if (block < blocks) {
      a.load(block % kStages, int64_t{first + block} * kK);
      b.load(block % kStages, int64_t{first + block} * kK);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
#pragma unroll
  for (int block = 0; block < kStages - 1; ++block) load(block);
  float sum[4][4] = {};
  for (int block = 0; block < blocks; ++block) {
    asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2) : "memory");
    __syncthreads();  // this stage has landed for all, and the one before it has been read
    load(block + kStages - 1);
    float piece[4][4] = {};
#pragma unroll 4  // all eight would not fit in registers
    for (int l = 0; l < kK; l += 4) {
      float x[4][4], y[4][4];
      a.read(block % kStages, m_group, l, x);
      b.read(block % kStages, n_group, l, y);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
          for (int j = 0; j < 4; ++j) piece[i][j] = fmaf(x[i][e], y[j][e], piece[i][j]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) sum[i][j] += piece[i][j];
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int64_t row = m0 + K::A::row(m_group, i), col = n0 + K::B::row(n_group, j);
      if (row >= args.m || col >= args.n) continue;
      p.partial[((split * args.batch + z) * args.m + row) * args.n + col] = sum[i][j];
    }
  }
#endif
}

// Adds the pieces: lane y of an output takes every eighth one, then lanes are added in order.
__global__ void __launch_bounds__(kReduceOutputs* kReduceLanes)
    fp32_skinny_reduce_kernel(const __grid_constant__ Skinny p) {
#if __CUDA_ARCH__ >= 900
  __shared__ float lanes[kReduceLanes][kReduceOutputs];
  sm90::griddepcontrol_wait();
  const Args& args = p.args;
  const int64_t plane = args.m * args.n, total = args.batch * plane;
  const int64_t at = int64_t{blockIdx.x} * kReduceOutputs + threadIdx.x;
  float sum = 0.0f;
  if (at < total) {
#pragma unroll 4
    for (int split = threadIdx.y; split < p.splits; split += kReduceLanes) {
      sum += p.partial[split * total + at];
    }
  }
  lanes[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || at >= total) return;
#pragma unroll
  for (int y = 1; y < kReduceLanes; ++y) sum += lanes[y][threadIdx.x];
  const int64_t z = at / plane, row = at % plane / args.n, col = at % args.n;
  if (args.bias) sum += args.bias[col];
  with_activation(args.activation, [&](auto activation) { sum = activation(sum); });
  args.out[z * args.out_batch + row * args.out_row + col * args.out_col] =
      sum + residual_at(args, z, row, col);
#endif
}

constexpr int kFewRows = 16;

struct SkinnyTile {
  int m, n;
};

SkinnyTile skinny_tile(const Args& args) {
  return args.m <= kFewRows ? SkinnyTile{16, 128} : SkinnyTile{64, 64};
}

cudaError_t make_skinny(const Args& args, void* workspace, Skinny* p) {
  DeviceFacts device;
  if (auto err = current_device(&device); err != cudaSuccess) return err;
  const SkinnyTile tile = skinny_tile(args);
  const auto wide = [](const float* x, int64_t batch, int64_t row, int64_t k) {
    const int64_t slow = k == 1 ? row : k;
    return (k == 1 || row == 1) && slow % 4 == 0 && batch % 4 == 0 &&
           reinterpret_cast<uintptr_t>(x) % 16 == 0;
  };
  p->args = args;
  p->partial = static_cast<float*>(workspace);
  p->tiles_m = static_cast<int>(ceil_div(args.m, tile.m));
  p->tiles_n = static_cast<int>(ceil_div(args.n, tile.n));
  p->k_blocks = static_cast<int>(ceil_div(args.k, kK));
  const int64_t tiles = args.batch * p->tiles_m * p->tiles_n;
  const int blocks_per_sm = kThreadsPerSm / (tile.m * tile.n / (kPerThread * kPerThread));
  constexpr int kMinBlocks = 4;  // of k, per piece
  const int64_t splits =
      std::min<int64_t>(blocks_per_sm * device.sm_count / tiles, p->k_blocks / kMinBlocks);
  p->k_blocks_per_split = static_cast<int>(ceil_div(p->k_blocks, std::max<int64_t>(splits, 1)));
  p->splits = static_cast<int>(ceil_div(p->k_blocks, p->k_blocks_per_split));
  p->a_wide = wide(args.a, args.a_batch, args.a_row, args.a_col);
  p->b_wide = wide(args.b, args.b_batch, args.b_col, args.b_row);
  return cudaSuccess;
}

// Shapes at which the measured times beat a library's float GEMM and the split one.
bool pays(const Args& args) {
  constexpr int64_t kMinK = 4096, kMinWork = int64_t{1} << 25;
  constexpr int64_t kMinRows = 5, kMinWide = 512, kMaxWide = 8192;                      // few rows
  constexpr int64_t kMaxRows = 64, kMinSide = 64, kMaxSide = 1024, kMaxWork = 1 << 28;  // small
  const int64_t outputs = args.m * args.n;
  if (args.batch != 1 || args.k < kMinK || args.k >= (1 << 28) || args.n > kMaxWide ||
      args.m < kMinRows || args.m > kMaxRows || outputs * args.k < kMinWork) {
    return false;
  }
  if (args.m <= kFewRows) return args.n >= kMinWide;
  const bool k_fast = args.b_row == 1;  // with b the other way round the library is as fast
  return k_fast && args.n >= kMinSide && args.n <= kMaxSide && outputs * args.k <= kMaxWork;
}

template <int kM, int kN, bool kAKFast, bool kBKFast>
cudaError_t run(const Skinny& p, cudaStream_t stream) {
  using K = Kernel<kM, kN, kAKFast, kBKFast>;
  constexpr auto kKernel = fp32_skinny_kernel<kM, kN, kAKFast, kBKFast>;
  if (auto err =
          cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, K::kSmemBytes);
      err != cudaSuccess) {
    return err;
  }
  const auto blocks = static_cast<unsigned>(p.args.batch * p.tiles_m * p.tiles_n * p.splits);
  kKernel<<<blocks, K::kThreads, K::kSmemBytes, stream>>>(p);
  if (auto err = cudaGetLastError(); err != cudaSuccess) return err;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  const int64_t outputs = p.args.batch * p.args.m * p.args.n;
  config.gridDim = dim3(static_cast<unsigned>(ceil_div(outputs, kReduceOutputs)));
  config.blockDim = dim3(kReduceOutputs, kReduceLanes);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, fp32_skinny_reduce_kernel, p);
}

template <int kM, int kN>
cudaError_t run(const Skinny& p, cudaStream_t stream) {
  const bool a_k = p.args.a_col == 1 || p.args.a_row != 1;
  const bool b_k = p.args.b_row == 1 || p.args.b_col != 1;
  if (a_k) return b_k ? run<kM, kN, true, true>(p, stream) : run<kM, kN, true, false>(p, stream);
  return b_k ? run<kM, kN, false, true>(p, stream) : run<kM, kN, false, false>(p, stream);
}

}  // namespace
}  // namespace my_ops::cuda

bool my_ops::cuda::gemm_fp32_skinny_supported(const GemmArgs<float, float>& args) {
  if (args.precision != Precision::kHighest || !pays(args)) return false;
  DeviceFacts device;
  if (current_device(&device) != cudaSuccess || !device.is(9, 0)) return false;
  constexpr auto kKernel = fp32_skinny_kernel<16, 128, true, true>;
  static const bool built = sm90::has_body(reinterpret_cast<const void*>(kKernel));
  return built;
}

size_t my_ops::cuda::gemm_fp32_skinny_workspace(const GemmArgs<float, float>& args) {
  Skinny p{};
  if (make_skinny(args, nullptr, &p) != cudaSuccess) return 0;
  return static_cast<size_t>(p.splits * args.batch * args.m * args.n) * sizeof(float);
}

cudaError_t my_ops::cuda::gemm_fp32_skinny(const GemmArgs<float, float>& args, void* workspace,
                                           cudaStream_t stream) {
  Skinny p{};
  if (auto err = make_skinny(args, workspace, &p); err != cudaSuccess) return err;
  return args.m <= kFewRows ? run<16, 128>(p, stream) : run<64, 64>(p, stream);
}
