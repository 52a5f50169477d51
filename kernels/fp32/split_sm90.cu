// Splits operands into fp16 or bf16 parts; split.h says which and why.
// Plan: operands with contiguous k take one pass, in which one to eight warps hold a row in
// registers. Strided operands with a short k also take one pass, with eight rows in shared memory.
// If k is long and contiguous in neither operand, one pass splits with exponents from a sample of
// k, and a second kernel repeats it where they do not suit. The rest take two passes: the first
// finds the extremes of each k-slice, and the second transposes 32 x 64 tiles through shared
// memory. Bound by memory: 4 bytes read and 4 written per element, and 4 more read with two passes.
#include "fp32/split.h"

#include <algorithm>

#include "common/launch.cuh"
#include "fp32/split_device.cuh"
#include "fp32/split_sampled.cuh"
#include "gemm/fp32_sm90/plan.h"
#include "ptx/griddepcontrol.cuh"

namespace my_ops::cuda {
namespace {

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

// ---- two passes: 32 rows x one k-slice per block, lanes along the rows ----

struct TileBlock {
  int z, row, slice;  // row counts from the start of batch z
  __device__ TileBlock(const SplitOperand& op, int block) {
    const int row_blocks = (op.rows + kTileRows - 1) / kTileRows;
    slice = block / (row_blocks * op.batch);
    const int rest = block % (row_blocks * op.batch);
    z = rest / row_blocks;
    row = rest % row_blocks * kTileRows;
  }
};

// First pass: extremes and number of nonzeros of each row of the slice. Warps take every eighth
// element of k, or every eighth row if k is contiguous.
template <typename T>
__device__ __forceinline__ void slice_stats(const SplitOperand& op, int block,
                                            RowStats (&scratch)[kWarps][kTileRows]) {
  constexpr int kBatch = 16;  // loads in flight
  const TileBlock tile(op, block);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int begin = tile.slice * op.slice_k, end = min(begin + op.slice_k, op.k);
  const int first = begin + (op.by_rows ? lane : warp), step = op.by_rows ? 32 : kWarps;
  const T* base = static_cast<const T*>(op.x) + tile.z * op.batch_stride;
  for (int r = op.by_rows ? warp : lane; r < kTileRows; r += op.by_rows ? kWarps : kTileRows) {
    RowStats stats;
    if (tile.row + r < op.rows) {
      const T* x = base + (tile.row + r) * op.row_stride;
      for (int l = first; l < end; l += kBatch * step) {
        T e[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          e[i] = l + i * step < end ? x[(l + i * step) * op.k_stride] : store<T>(0.0f);
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          if (l + i * step >= end) break;
          stats.add(load(e[i]));
        }
      }
    }
    if (op.by_rows) stats = {warp_reduce(stats.extremes), warp_sum(stats.nonzero)};
    if (!op.by_rows || lane == 0) scratch[warp][r] = stats;
  }
  __syncthreads();
  if (warp != 0 || tile.row + lane >= op.rows) return;
  RowStats stats;
  for (int i = 0; i < kWarps; ++i) {
    if (!op.by_rows || i == lane % kWarps) stats.add(scratch[i][lane]);
  }
  const int64_t rows = int64_t{op.batch} * op.rows;
  const int64_t index = int64_t{tile.z} * op.rows + tile.row + lane;
  uint32_t* out = op.stats + tile.slice * rows + index;
  out[0] = stats.extremes.largest;
  out[op.slices * rows] = stats.extremes.smallest;
  out[2 * op.slices * rows] = stats.nonzero;
  if (tile.slice == 0) op.tiny[index] = op.tiny[rows + index] = 0;
}

template <typename Parts>
struct alignas(16) TileSmem {
  uint16_t part[2][Parts::kCount][kTileRows][kTileK + 8];  // 8: rows start in different banks
};

// Each thread of a tile pass holds eight adjacent elements of k in one row.
__device__ __forceinline__ int tile_row(const SplitOperand& op) {
  return op.by_rows ? threadIdx.x / 8 : threadIdx.x % 32;
}

__device__ __forceinline__ int tile_column(const SplitOperand& op) {
  return (op.by_rows ? threadIdx.x % 8 : threadIdx.x / 32) * 8;
}

template <typename T>
__device__ __forceinline__ void load_tile(const SplitOperand& op, int z, int row0, int l0,
                                          bool vectorized, T (&v)[8]) {
  const int row = row0 + tile_row(op), l = l0 + tile_column(op);
  const T* x = static_cast<const T*>(op.x) + z * op.batch_stride + row * op.row_stride;
  if (vectorized && row < op.rows && l + 8 <= op.k) {
    constexpr int kVector = 16 / sizeof(T);
#pragma unroll
    for (int i = 0; i < 8; i += kVector) {
      *reinterpret_cast<uint4*>(v + i) = *reinterpret_cast<const uint4*>(x + l + i);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    v[i] = row < op.rows && l + i < op.k ? x[(l + i) * op.k_stride] : store<T>(0.0f);
  }
}

// Splits and stores rows row0 .. row0+31, k from l0 to l0+63. Calls must alternate `buffer`.
template <typename Parts, typename T>
__device__ __forceinline__ void store_tile(const SplitOperand& op, TileSmem<Parts>& smem,
                                           int buffer, int z, int row0, int l0, const T (&v)[8],
                                           Pow2Pair factor, uint16_t* to, int parts) {
  uint32_t word[4][Parts::kCount];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    Parts::split(load(v[2 * i]) * factor.first * factor.second,
                 load(v[2 * i + 1]) * factor.first * factor.second, word[i]);
  }
  const int row = tile_row(op), l = tile_column(op);
#pragma unroll
  for (int part = 0; part < Parts::kCount; ++part) {
    if (part >= parts) break;
    *reinterpret_cast<uint4*>(&smem.part[buffer][part][row][l]) = {word[0][part], word[1][part],
                                                                   word[2][part], word[3][part]};
  }
  __syncthreads();  // written, and the other buffer has been read
  const int out_row = row0 + threadIdx.x / 8, out_l = threadIdx.x % 8 * 8;
  if (out_row >= op.rows) return;
  const int64_t rows = int64_t{op.batch} * op.rows, index = int64_t{z} * op.rows + out_row;
#pragma unroll
  for (int part = 0; part < Parts::kCount; ++part) {
    if (part >= parts) break;
    *reinterpret_cast<uint4*>(to + (part * rows + index) * op.ld + l0 + out_l) =
        *reinterpret_cast<const uint4*>(&smem.part[buffer][part][threadIdx.x / 8][out_l]);
  }
}

// Splits a block's rows of one k-slice, whose extremes are known from slice_stats. parts:
// Split::fp16_parts.
template <typename T>
__device__ __forceinline__ SplitPath split_slice(const SplitOperand& op, int block, int parts,
                                                 TileSmem<Fp16Parts>& smem,
                                                 RowStats (&scratch)[kWarps][kTileRows]) {
  const TileBlock tile(op, block);
  const int64_t rows = int64_t{op.batch} * op.rows, first = int64_t{tile.z} * op.rows + tile.row;
  const bool vectorized = vectorizes<T>(op);
  const int begin = tile.slice * op.slice_k, end = min(begin + op.slice_k, op.ld);
  alignas(16) T v[8], next[8];
  load_tile(op, tile.z, tile.row, begin, vectorized, v);
  ptx::griddepcontrol_wait();

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  RowStats stats;
  if (tile.row + lane < op.rows) {
#pragma unroll 4
    for (int slice = warp; slice < op.slices; slice += kWarps) {
      const uint32_t* in = op.stats + slice * rows + first + lane;
      stats.add({{in[0], in[op.slices * rows]}, in[2 * op.slices * rows]});
    }
  }
  scratch[warp][lane] = stats;
  __syncthreads();
  const int row = tile_row(op);
  stats = RowStats{};
#pragma unroll
  for (int i = 0; i < kWarps; ++i) stats.add(scratch[i][row]);
  const RowScale scale(stats.extremes.largest);
  const Pow2Pair factor = pow2_pair(Fp16Parts::kShift - scale.exponent);
  const bool inside = tile.row + row < op.rows;
  const uint32_t dense = dense_row(parts);
  const bool count = inside && needs_count(stats.extremes, scale, op.k, dense);
  if (inside && tile.slice == 0 && tile_column(op) == 0) op.exponent[first + row] = scale.exponent;

  Counts counts;
  int buffer = 0;
  for (int l0 = begin; l0 < end; l0 += kTileK, buffer ^= 1) {
    if (l0 + kTileK < end) load_tile(op, tile.z, tile.row, l0 + kTileK, vectorized, next);
    if (count) {
#pragma unroll
      for (int i = 0; i < 8; ++i) counts.add(load(v[i]), scale);
    }
    store_tile<Fp16Parts>(op, smem, buffer, tile.z, tile.row, l0, v, factor, op.parts,
                          fp16_parts<T>(op));
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = next[i];
  }

  SplitPath path = is_finite(stats.extremes.largest) ? SplitPath::kFp16 : SplitPath::kFma;
  if (count && path == SplitPath::kFp16) {
    // The last block that adds to a row's counters sees their final values. The path can only grow
    // with them.
    uint32_t* tiny = op.tiny + first + row;
    if (counts.tiny_fp16 != 0) counts.tiny_fp16 += atomicAdd(tiny, counts.tiny_fp16);
    if (counts.tiny_bf16 != 0) counts.tiny_bf16 += atomicAdd(tiny + rows, counts.tiny_bf16);
    path = row_path(counts.tiny_fp16, counts.tiny_bf16, stats.nonzero, dense);
  }
  return path;
}

#endif

// kMixed: an operand has 16 bits.
template <int kRowThreads, int kVectors, bool kMixed>
__global__ void __launch_bounds__(kThreads, kVectors == 4 ? 3 : 2)
    split_first_kernel(const Split split) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(16) float held[];  // filled in vectors of four
  __shared__ RowSmem<kRowThreads> row_smem;
  __shared__ RowStats scratch[kWarps][kTileRows];
  ptx::griddepcontrol_launch_dependents();
  const int which = blockIdx.x >= split.blocks[0];
  const int block = blockIdx.x - (which ? split.blocks[0] : 0);
  const SplitOperand& op = split.operand[which];
  SplitPath path = SplitPath::kFp16;
  switch (op.mode) {
    case SplitMode::kRows:
      path = with_elements<kMixed>(op, [&]<typename T>() {
        return split_rows<kRowThreads, kVectors, T>(op, block, split.blocks[which],
                                                    split.fp16_parts, row_smem);
      });
      break;
    case SplitMode::kColumns:
      path = split_columns(op, block, held, split.fp16_parts);
      break;
    case SplitMode::kSlices:
      with_elements<kMixed>(op, [&]<typename T>() { slice_stats<T>(op, block, scratch); });
      break;
    case SplitMode::kSampled:
      break;  // by split_sampled_kernel
  }
  report(path, op.status + block);
#endif
}

__global__ void __launch_bounds__(kThreads) split_second_kernel(const Split split) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __shared__ TileSmem<Fp16Parts> smem;
  __shared__ RowStats scratch[kWarps][kTileRows];
  ptx::griddepcontrol_launch_dependents();
  const int which = blockIdx.x >= split.tile_blocks[0];
  const SplitOperand& op = split.operand[which];
  const int block = blockIdx.x - (which ? split.tile_blocks[0] : 0);
  const SplitPath path = with_elements<true>(
      op, [&]<typename T>() { return split_slice<T>(op, block, split.fp16_parts, smem, scratch); });
  report(path, op.status + split.blocks[which] + block);
#endif
}

// For operands that are kSampled: both kernels in place of the two above.
__global__ void __launch_bounds__(kThreads, kSampledBlocksPerSm / 2)
    split_sampled_kernel(const Split split) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __shared__ SampledSmem<kSampledRows> smem;
  ptx::griddepcontrol_launch_dependents();
  const int which = blockIdx.x >= split.blocks[0];
  const int block = blockIdx.x - (which ? split.blocks[0] : 0);
  const SplitOperand& op = split.operand[which];
  split_sampled(op, block, smem);
  if (threadIdx.x == 0) op.status[block] = static_cast<uint8_t>(SplitPath::kFp16);
#endif
}

__global__ void __launch_bounds__(kThreads) check_sampled_kernel(const Split split) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __shared__ SampledSmem<kSampledRows> smem;
  ptx::griddepcontrol_launch_dependents();
  const int which = blockIdx.x >= split.tile_blocks[0];
  const int block = blockIdx.x - (which ? split.tile_blocks[0] : 0);
  const SplitOperand& op = split.operand[which];
  report(check_sampled(op, block, smem), op.status + split.blocks[which] + block);
#endif
}

// The bf16 parts of full-range data. They use the exponents of the fp16 split.
__global__ void __launch_bounds__(kThreads) split_bf16_kernel(const Split split) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __shared__ TileSmem<Bf16Parts> smem;
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const SplitOperand &a = split.operand[0], &b = split.operand[1];
  const SplitPath path = split_path({a.status, a.status_count}, {b.status, b.status_count});
  if (path != SplitPath::kBf16 && path != SplitPath::kBf16Checked) return;
  int buffer = 0;
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    const SplitOperand& op = split.operand[which];
    with_elements<true>(op, [&]<typename T>() {
      const bool vectorized = vectorizes<T>(op);
      const int64_t row_tiles = (op.rows + kTileRows - 1) / kTileRows;
      const int k_tiles = op.ld / kTileK;
      for (int64_t t = blockIdx.x; t < op.batch * row_tiles * k_tiles;
           t += gridDim.x, buffer ^= 1) {
        const int l0 = static_cast<int>(t % k_tiles) * kTileK;
        const int row0 = static_cast<int>(t / k_tiles % row_tiles) * kTileRows;
        const int z = static_cast<int>(t / k_tiles / row_tiles);
        alignas(16) T v[8];
        load_tile(op, z, row0, l0, vectorized, v);
        const int row = min(row0 + tile_row(op), op.rows - 1);
        const int exponent = op.exponent[int64_t{z} * op.rows + row];
        store_tile<Bf16Parts>(op, smem, buffer, z, row0, l0, v,
                              pow2_pair(Bf16Parts::kShift - exponent), op.bf16_parts,
                              Bf16Parts::kCount);
      }
    });
  }
#endif
}

__global__ void __launch_bounds__(kThreads)
    combine_status_kernel(SplitStatus status, uint8_t* combined) {
  const SplitPath path = split_path(status, {});
  if (threadIdx.x == 0) *combined = static_cast<uint8_t>(path);
}

using SplitKernel = void (*)(const Split);

template <bool kMixed>
SplitKernel first_pass(RowShape shape) {
  switch (shape.threads) {
    case 32:
      return split_first_kernel<32, 4, kMixed>;
    case 64:
      return split_first_kernel<64, 4, kMixed>;
    case 128:
      return split_first_kernel<128, 4, kMixed>;
    default:
      return shape.vectors == 4 ? split_first_kernel<256, 4, kMixed>
                                : split_first_kernel<256, 8, kMixed>;
  }
}

}  // namespace
}  // namespace my_ops::cuda

cudaError_t my_ops::cuda::combine_status(const Split& split, int i, uint8_t* status,
                                         cudaStream_t stream) {
  const SplitOperand& op = split.operand[i];
  return launch(combine_status_kernel, 1, kThreads, 0, stream,
                SplitStatus{op.status, op.status_count}, status);
}

cudaError_t my_ops::cuda::split_fp16(const Split& split, cudaStream_t stream) {
  if (split.along_rows) {
    if (auto err = launch(split_sampled_kernel, split.blocks[0] + split.blocks[1], kThreads, 0,
                          stream, split);
        err != cudaSuccess) {
      return err;
    }
    return sm90::launch_overlapped(check_sampled_kernel,
                                   split.tile_blocks[0] + split.tile_blocks[1], kThreads, 0, 1,
                                   stream, split);
  }
  const RowShape shape = row_shape(split.operand[0].k);
  const bool mixed = split.operand[0].elements != split.operand[1].elements;
  const SplitKernel first = mixed ? first_pass<true>(shape) : first_pass<false>(shape);
  constexpr int kMaxSmem = column_index(0, kMaxColumnK) * sizeof(float), kMaxStatic = 8 * 1024;
  static_assert(kMaxSmem + kMaxStatic <= fp32_sm90::kNeeds.shared_bytes);
  int smem = 0;
  for (const SplitOperand& op : split.operand) {
    if (op.mode == SplitMode::kColumns) smem = column_index(0, op.ld) * sizeof(float);
  }
  if (smem != 0) {
    if (auto err = allow_shared_bytes(first, kMaxSmem); err != cudaSuccess) return err;
  }
  if (auto err = launch(first, split.blocks[0] + split.blocks[1], kThreads, smem, stream, split);
      err != cudaSuccess) {
    return err;
  }
  const int tile_blocks = split.tile_blocks[0] + split.tile_blocks[1];
  if (tile_blocks == 0) return cudaSuccess;
  return sm90::launch_overlapped(split_second_kernel, tile_blocks, kThreads, 0, 1, stream, split);
}

cudaError_t my_ops::cuda::split_bf16(const Split& split, int sm_count, cudaStream_t stream) {
  return sm90::launch_overlapped(split_bf16_kernel, 4 * sm_count, kThreads, 0, 1, stream, split);
}
