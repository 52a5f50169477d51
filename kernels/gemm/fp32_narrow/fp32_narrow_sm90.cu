// Float GEMM for a wide operand, which has many rows and may have 16 bits, and a narrow one of few
// columns: six bf16 products (bf16: three, fp16: five), split on the way.
// Plan: a small kernel splits the narrow operand into three bf16 parts; the product kernel reads
// the wide one once and splits it in registers; if k is sliced, a third adds the slices in double.
// Each launch overlaps the end of the previous one. Transposed products, such as gradients of
// weights, have b as the wide operand.
#include "gemm/fp32_narrow/fp32_narrow.h"

#include <algorithm>

#include "common/launch.cuh"
#include "common/tensor_map.h"
#include "gemm/fp32_narrow/kernel.cuh"

namespace my_ops::cuda {
namespace {

constexpr int kSplitThreads = 256, kReduceThreads = 256;

struct NarrowSplit {
  const float* x;
  int64_t column_stride, k_stride;
  int columns, k;
  bool permuted;    // the order of k is permuted_k
  uint16_t* parts;  // [3][padded_columns][ld] in bf16
  int ld, padded_columns, groups;
  Range* ranges;  // [k_blocks][groups]
};

// Splits 64 of k of 32 columns.
__global__ void __launch_bounds__(kSplitThreads)
    fp32_narrow_split_kernel(const __grid_constant__ NarrowSplit p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __shared__ float tile[kSplitColumns][kK + 1];
  __shared__ Range ranges[kSplitThreads / 32];
  const int k0 = blockIdx.x / p.groups * kK, col0 = blockIdx.x % p.groups * kSplitColumns;
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  Range range;
#pragma unroll
  for (int i = 0; i < kSplitColumns * kK / kSplitThreads; ++i) {
    const int at = threadIdx.x + i * kSplitThreads;
    const bool k_fast = p.k_stride == 1;
    const int l = k_fast ? at % kK : at / kSplitColumns;
    const int col = k_fast ? at / kK : at % kSplitColumns;
    const bool inside = k0 + l < p.k && col0 + col < p.columns;
    const float x = inside ? p.x[(k0 + l) * p.k_stride + (col0 + col) * p.column_stride] : 0.0f;
    range.add(x);
    tile[col][l] = x;
  }
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) range.add(shuffled(range, lanes));
  if (threadIdx.x % 32 == 0) ranges[threadIdx.x / 32] = range;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 1; i < kSplitThreads / 32; ++i) range.add(ranges[i]);
    p.ranges[blockIdx.x] = range;
  }
  const int col = threadIdx.x / 8, l0 = threadIdx.x % 8 * 8;
  uint32_t words[kParts][4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int l = l0 + 2 * i;
    const Pair pair(tile[col][p.permuted ? permuted_k(l) : l],
                    tile[col][p.permuted ? permuted_k(l + 1) : l + 1]);
#pragma unroll
    for (int part = 0; part < kParts; ++part) words[part][i] = pair.part[part];
  }
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    uint16_t* const to = p.parts + (int64_t{part} * p.padded_columns + col0 + col) * p.ld + k0 + l0;
    *reinterpret_cast<uint4*>(to) =
        make_uint4(words[part][0], words[part][1], words[part][2], words[part][3]);
  }
#endif
}

// Adds the slices, in order.
__global__ void __launch_bounds__(kReduceThreads)
    fp32_narrow_reduce_kernel(const __grid_constant__ Narrow p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  ptx::griddepcontrol_wait();
  const int64_t total = int64_t{p.rows} * p.columns;
  const int64_t at = int64_t{blockIdx.x} * kReduceThreads + threadIdx.x;
  const bool inside = at < total;
  const int row = inside ? static_cast<int>(at / p.columns) : 0;
  const int col = inside ? static_cast<int>(at % p.columns) : 0;
  const float* const partial = p.partial + (inside ? at : 0);
  const float* const errors = p.error + int64_t{col / kN} * p.rows + row;
  double sum = 0.0;
  float error = 0.0f;
#pragma unroll 4
  for (int slice = 0; slice < p.slices; ++slice) {
    sum += partial[slice * total];
    error += errors[int64_t{slice} * p.tiles_n * p.rows];
  }
  const Args& args = p.args;
  const int i = p.transposed ? col : row, j = p.transposed ? row : col;
  float x = static_cast<float>(sum);
  x = recomputed(args, 0, i, j, inside && is_suspect(x, error), x);
  if (!inside) return;
  args.out[i * args.out_row + j * args.out_col] =
      finish_element(RuntimeActivate{args.activation}, x, column_terms(args.bias, j),
                     [&] { return residual_at(args, 0, i, j); });
#endif
}

template <typename T, bool kKFast>
cudaError_t run(const sm90::TensorMapEncoder& encoder, const Wide& wide, const void* x, Narrow* p,
                int sm_count, cudaStream_t stream) {
  using Smem = NarrowSmem<T, kKFast>;
  static_assert(sizeof(Smem) <= kNeeds.shared_bytes);
  const int64_t lines = kKFast ? wide.rows : p->args.k, in_line = kKFast ? p->args.k : wide.rows;
  if (auto err = sm90::make_tensor_map<sizeof(T)>(encoder, &p->wide, const_cast<void*>(x), lines,
                                                  in_line, wide.ld(), kKFast ? kM : kK);
      err != cudaSuccess) {
    return err;
  }
  constexpr auto kKernel = fp32_narrow_kernel<T, kKFast>;
  if (auto err = allow_shared_bytes(kKernel, sizeof(Smem)); err != cudaSuccess) return err;
  const int clusters = std::min(p->cluster_tiles, sm_count / kCluster);
  return sm90::launch_overlapped(kKernel, clusters * kCluster, kNarrowThreads, sizeof(Smem),
                                 kCluster, stream, *p);
}

template <typename T>
cudaError_t run(const sm90::TensorMapEncoder& encoder, const Wide& wide, const void* x, Narrow* p,
                int sm_count, cudaStream_t stream) {
  return wide.k_fast() ? run<T, true>(encoder, wide, x, p, sm_count, stream)
                       : run<T, false>(encoder, wide, x, p, sm_count, stream);
}

cudaError_t run(const sm90::TensorMapEncoder& encoder, const Wide& wide, const void* x, Narrow* p,
                int sm_count, cudaStream_t stream) {
  switch (wide.elements) {
    case Elements::kFloat:
      return run<float>(encoder, wide, x, p, sm_count, stream);
    case Elements::kHalf:
      return run<__half>(encoder, wide, x, p, sm_count, stream);
    case Elements::kBFloat16:
      return run<__nv_bfloat16>(encoder, wide, x, p, sm_count, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace
}  // namespace my_ops::cuda

cudaError_t my_ops::cuda::gemm_fp32_narrow(const GemmArgs<float, float>& args, const GemmPlan& plan,
                                           void* workspace, cudaStream_t stream) {
  sm90::TensorMapEncoder encoder;
  if (auto err = sm90::tensor_map_encoder(&encoder); err != cudaSuccess) return err;
  const Wide wide = wide_of(args);
  const float* const x = wide.is_b ? args.b : args.a;
  const void* const elements = x ? x : args.half_operand;
  const Layout at = lay_out(wide, args.k, plan.slices);
  auto* const base = static_cast<unsigned char*>(workspace);
  Narrow p{};
  p.args = args;
  p.ranges = reinterpret_cast<Range*>(base + at.ranges);
  p.partial = reinterpret_cast<float*>(base + at.partial);
  p.error = reinterpret_cast<float*>(base + at.error);
  p.rows = static_cast<int>(wide.rows);
  p.columns = static_cast<int>(wide.columns);
  p.transposed = wide.is_b;
  p.padded_columns = static_cast<int>(at.padded_columns);
  p.groups = static_cast<int>(at.groups);
  p.tiles_n = static_cast<int>(at.tiles_n);
  p.k_blocks = static_cast<int>(at.k_blocks);
  p.slices = plan.slices;
  p.k_blocks_per_slice = static_cast<int>(ceil_div(at.k_blocks, int64_t{plan.slices}));
  p.cluster_tiles = static_cast<int>(cluster_tiles(wide)) * plan.slices;
  if (auto err = sm90::make_tensor_map(encoder, &p.parts, base, 3 * at.padded_columns, at.ld, at.ld,
                                       kN / kCluster);
      err != cudaSuccess) {
    return err;
  }
  const NarrowSplit split{.x = wide.is_b ? args.a : args.b,
                          .column_stride = wide.column_stride,
                          .k_stride = wide.narrow_k_stride,
                          .columns = p.columns,
                          .k = static_cast<int>(args.k),
                          .permuted = wide.elements == Elements::kFloat && wide.k_fast(),
                          .parts = reinterpret_cast<uint16_t*>(base),
                          .ld = static_cast<int>(at.ld),
                          .padded_columns = p.padded_columns,
                          .groups = p.groups,
                          .ranges = p.ranges};
  if (auto err = sm90::launch_overlapped(fp32_narrow_split_kernel, at.k_blocks * at.groups,
                                         kSplitThreads, 0, 1, stream, split);
      err != cudaSuccess) {
    return err;
  }
  if (auto err = run(encoder, wide, elements, &p, plan.device.sm_count, stream);
      err != cudaSuccess) {
    return err;
  }
  if (plan.slices == 1) return cudaSuccess;
  return sm90::launch_overlapped(fp32_narrow_reduce_kernel,
                                 ceil_div(args.m * args.n, int64_t{kReduceThreads}), kReduceThreads,
                                 0, 1, stream, p);
}
