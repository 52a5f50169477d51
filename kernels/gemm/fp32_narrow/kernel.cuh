// The product kernel of fp32_narrow_sm90.cu.
// Plan: persistent clusters of two blocks. One producer thread per block fills a ring of k-blocks
// by TMA: 128 rows of the wide operand as they are in memory, and 64 columns of the narrow one's
// parts, of which each block of the cluster loads half for both. Two consumer warpgroups read their
// 64 rows as fragments, split them in registers, and multiply from there: nothing of the wide
// operand is written. Leading products are promoted every 16 of k, or every 8 if k is short, and
// sums are compensated. Bound by memory, or by tensor cores at 6 (bf16: 3) times 2*m*n*k flop.
#pragma once

#include <cuda.h>

#include <type_traits>

#include "common/numeric.cuh"
#include "fp32/bf16_parts.cuh"
#include "gemm/epilogue.cuh"
#include "gemm/fp32_fma.cuh"
#include "gemm/fp32_narrow/plan.h"
#include "gemm/pipeline_sm90.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mma.cuh"
#include "ptx/registers.cuh"
#include "ptx/wgmma_mma_async.cuh"

namespace my_ops::cuda {
namespace {

using namespace fp32_narrow;

using Args = GemmArgs<float, float>;

struct Narrow {
  CUtensorMap wide, parts;
  Args args;
  Range* ranges;      // [k_blocks][groups] of the narrow operand
  float* partial;     // [slices][rows][columns], if slices > 1
  float* error;       // [slices][tiles_n][rows]: the error that tiny numbers may cause in a sum
  int rows, columns;  // of the output, or of its transpose
  bool transposed;    // the wide operand is b
  int padded_columns, groups, tiles_n;
  int k_blocks, k_blocks_per_slice, slices;
  int cluster_tiles;
};

constexpr int kConsumers = 2, kNarrowThreads = (kConsumers + 1) * 128;
constexpr int kPartBytes = kN * kK * 2;

// Indices of k within a k-block, in the order in which floats with contiguous k are multiplied: a
// thread reads four consecutive ones as a vector, and threads that share a row of shared memory
// read from different banks.
__device__ __forceinline__ int permuted_k(int at) {
  const int step = at / 16, in_step = at % 16;
  return step / 2 * 32 + in_step % 8 / 2 * 8 + step % 2 * 4 + in_step / 8 * 2 + in_step % 2;
}

// The magnitudes that a thread has seen in its two rows.
template <typename T>
struct SeenRows {
  float largest[2] = {};
  uint32_t smallest[2] = {0xffffffff, 0xffffffff};  // as in Range

  __device__ __forceinline__ void add(int row, float x) {
    largest[row] = fmaxf(largest[row], fabsf(x));
    smallest[row] = min(smallest[row], 2 * __float_as_uint(x) - 1);
  }
  __device__ __forceinline__ Range range(int row) const {
    return {__float_as_uint(largest[row]) << 1, smallest[row]};
  }
};

template <>
struct SeenRows<__nv_bfloat16> {
  uint32_t largest[2] = {};  // two at a time, each as in Range
  uint32_t smallest[2] = {0xffffffff, 0xffffffff};

  __device__ __forceinline__ void add(int row, uint32_t pair) {
    largest[row] = __vmaxu2(largest[row], pair & 0x7fff7fff);
    smallest[row] = __vminu2(smallest[row], __vadd2(__vadd2(pair, pair), 0xffffffff));
  }
  __device__ __forceinline__ Range range(int row) const {
    const uint32_t large = max(largest[row] & 0xffff, largest[row] >> 16);
    const uint32_t small = min(smallest[row] & 0xffff, smallest[row] >> 16);
    return {large << 17, ((small + 1) << 16) - 1};
  }
};

// A fragment's pairs as floats: four k of two rows.
template <typename T>
__device__ __forceinline__ void unpack_rows(const uint32_t (&pairs)[4], float (&x)[2][4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack<T>(pairs[i]);
    x[i % 2][i / 2 * 2] = pair.x, x[i % 2][i / 2 * 2 + 1] = pair.y;
  }
}

// A stage's rows of the wide operand: boxes of 128 bytes of its contiguous index.
template <typename T, bool kKFast>
struct WideTile {
  static constexpr bool kIsFloat = std::is_same_v<T, float>;
  static constexpr int kParts = kIsFloat ? 3 : std::is_same_v<T, __half> ? 2 : 1;
  static constexpr int kBox = 128 / sizeof(T), kBoxBytes = (kKFast ? kM : kK) * 128;
  static constexpr int kBytes = kM * kK * sizeof(T), kBoxes = kBytes / kBoxBytes;
  static constexpr int kStageBytes = kBytes + 3 * kPartBytes;
  static constexpr int kStages = kIsFloat ? 4 : 5;
  // Below this, elements lose bits. bf16 and fp16 have few, and fp16 no tiny numbers.
  static constexpr float kTinyElement = kIsFloat ? kTiny : 0x1p-126f;

  static __device__ __forceinline__ void load(unsigned char* to, const CUtensorMap* map,
                                              uint64_t* full, int row, int k) {
#pragma unroll
    for (int i = 0; i < kBoxes; ++i) {
      ptx::tma_load_2d(to + i * kBoxBytes, map, full, kKFast ? k + i * kBox : row,
                       kKFast ? row : k);
      if constexpr (!kKFast) row += kBox;
    }
  }

  // Reads the fragments of a warp's 16 rows.
  const unsigned char* from;  // of this stage and thread
  int swizzle;

  __device__ __forceinline__ WideTile(const unsigned char* stage, int thread) {
    const int warp = thread / 32, lane = thread % 32, group = lane / 4, t = lane % 4;
    if constexpr (kIsFloat && kKFast) {
      from = stage + (warp * 16 + group) * 128;
      swizzle = group ^ 2 * t;
    } else if constexpr (kIsFloat) {  // k 2 t of row `group`
      from = stage + warp / 2 * kBoxBytes + 2 * t * 128 + group % 4 * 4;
      swizzle = (warp % 2 * 4 + group / 4) ^ 2 * t;
    } else if constexpr (kKFast) {  // addresses for ldmatrix
      from = stage + (warp * 16 + lane / 8 % 2 * 8 + lane % 8) * 128;
      swizzle = lane % 8 ^ lane / 16;
    } else {
      from = stage + warp / 4 * kBoxBytes + (lane / 16 * 8 + lane % 8) * 128;
      swizzle = (warp % 4 * 2 + lane / 8 % 2) ^ lane % 8;
    }
  }

  // Four k of a thread's two rows; of 16 bits in pairs, as wgmma takes them.
  __device__ __forceinline__ void read(int step, float (&x)[2][4]) const {
    if constexpr (kKFast) {
      const unsigned char* at = from + step / 2 * kBoxBytes + (swizzle ^ step % 2) * 16;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float4 v = *reinterpret_cast<const float4*>(at + i * 8 * 128);
        x[i][0] = v.x, x[i][1] = v.y, x[i][2] = v.z, x[i][3] = v.w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int k = step * 16 + e / 2 * 8 + e % 2;  // beyond 2 t
          x[i][e] =
              *reinterpret_cast<const float*>(from + k * 128 + (swizzle ^ (i * 2) ^ (e % 2)) * 16);
        }
      }
    }
  }
  __device__ __forceinline__ void read(int step, uint32_t (&pairs)[4]) const {
    if constexpr (kKFast) {
      ptx::ldmatrix(pairs, from + (swizzle ^ 2 * step) * 16);
    } else {
      ptx::ldmatrix_trans(pairs, from + step * 16 * 128 + swizzle * 16);
    }
  }

  __device__ __forceinline__ void read_parts(int step, uint32_t (&parts)[kParts][4],
                                             SeenRows<T>& seen) const {
    if constexpr (kIsFloat) {
      float x[2][4];
      read(step, x);
      split(x, parts, seen);
    } else {
      uint32_t pairs[4];
      read(step, pairs);
      if constexpr (std::is_same_v<T, __nv_bfloat16>) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          seen.add(i % 2, pairs[i]);
          parts[0][i] = pairs[i];
        }
      } else {
        float x[2][4];
        unpack_rows<T>(pairs, x);
        split(x, parts, seen);
      }
    }
  }

 private:
  static __device__ __forceinline__ void split(const float (&x)[2][4], uint32_t (&parts)[kParts][4],
                                               SeenRows<T>& seen) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float first = x[i][2 * half], second = x[i][2 * half + 1];
        seen.add(i, first);
        seen.add(i, second);
        const Pair pair(first, second);
#pragma unroll
        for (int part = 0; part < kParts; ++part) parts[part][2 * half + i] = pair.part[part];
      }
    }
  }
};

template <typename T, bool kKFast>
struct alignas(1024) NarrowSmem {  // 1024 bytes: the swizzle repeats after these
  using Tile = WideTile<T, kKFast>;
  unsigned char ring[Tile::kStages][Tile::kStageBytes];
  uint64_t full[Tile::kStages], empty[Tile::kStages];
};

// A tile of the walk: tiles with the same rows are adjacent.
struct NarrowPlace {
  int row, column, slice, k_block, k_blocks;

  __device__ __forceinline__ NarrowPlace(const Narrow& p, int cluster_tile, int rank) {
    column = cluster_tile % p.tiles_n * kN;
    const int rest = cluster_tile / p.tiles_n;
    slice = rest % p.slices;
    row = (rest / p.slices * kCluster + rank) * kM;
    k_block = slice * p.k_blocks_per_slice;
    k_blocks = min(p.k_blocks_per_slice, p.k_blocks - k_block);
  }
};

// Loads a stage: rows as they are, and the block's share of columns, for both blocks.
template <typename T, bool kKFast>
__device__ __forceinline__ void load_stage(const Narrow& p, unsigned char* to, uint64_t* full,
                                           const NarrowPlace& place, int k, int rank) {
  using Tile = WideTile<T, kKFast>;
  constexpr int kShare = kN / kCluster;
  Tile::load(to, &p.wide, full, place.row, k);
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    load_box<kCluster>(to + Tile::kBytes + part * kPartBytes + rank * kShare * kK * 2, &p.parts,
                       full, k, part * p.padded_columns + place.column + rank * kShare,
                       uint16_t{(1 << kCluster) - 1});
  }
}

template <typename T, bool kKFast>
__device__ __forceinline__ void produce(const Narrow& p, NarrowSmem<T, kKFast>& smem, int rank) {
  using Tile = WideTile<T, kKFast>;
  RingPlace<Tile::kStages> at;
  for (int tile = blockIdx.x / kCluster; tile < p.cluster_tiles; tile += gridDim.x / kCluster) {
    const NarrowPlace place(p, tile, rank);
    for (int i = 0; i < place.k_blocks; ++i) {
      fill_stage(at, smem.full, smem.empty, Tile::kStageBytes, [&](int stage, uint64_t* full) {
        load_stage<T, kKFast>(p, smem.ring[stage], full, place, (place.k_block + i) * kK, rank);
      });
    }
  }
}

// This lane's share of the narrow operand's range over a tile's columns and k.
__device__ __forceinline__ Range narrow_range(const Narrow& p, const NarrowPlace& place) {
  constexpr int kGroups = kN / kSplitColumns;
  Range range;
  for (int i = threadIdx.x % 32; i < place.k_blocks * kGroups; i += 32) {
    range.add(p.ranges[(place.k_block + i / kGroups) * p.groups + place.column / kSplitColumns +
                       i % kGroups]);
  }
  return range;
}

// Stores the errors of a slice's sums, one for each of a thread's rows.
__device__ __forceinline__ void store_errors(const Narrow& p, const NarrowPlace& place, int row0,
                                             const float (&error)[2]) {
  if (threadIdx.x % 4 != 0) return;
  float* const to = p.error + (int64_t{place.slice} * p.tiles_n + place.column / kN) * p.rows;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (row0 + 8 * i < p.rows) to[row0 + 8 * i] = error[i];
  }
}

// Stores a warpgroup's sums: outputs after the epilogue, or partial sums of a slice.
template <int kCount>
__device__ __forceinline__ void store_sums(const Narrow& p, int slice, int row0, int col0,
                                           float (&sum)[kCount]) {
  const Args& args = p.args;
  const bool whole = p.slices == 1;
  float* base = args.out;
  int64_t row_stride = p.transposed ? args.out_col : args.out_row;
  int64_t col_stride = p.transposed ? args.out_row : args.out_col;
  if (whole) {
    if (args.bias) {
      const float* bias = args.bias + col0;
      const int left = p.columns - col0;
      apply_column_terms(sum, [&](int c) { return ColumnTerms<float>{c < left ? bias[c] : 0.0f}; });
    }
    activate<Activate>(args.activation, sum);
  } else {
    base = p.partial + int64_t{slice} * p.rows * p.columns;
    row_stride = p.columns, col_stride = 1;
  }
  const bool pairs =
      col_stride == 1 && row_stride % 2 == 0 && reinterpret_cast<uintptr_t>(base) % 8 == 0;
  const bool residual = whole && args.residual;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = row0 + 8 * i;
    if (row >= p.rows) continue;
    float* const out = base + row * row_stride;
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
      const int col = col0 + 8 * j;
      float2 x{sum[4 * j + 2 * i], sum[4 * j + 2 * i + 1]};
      if (residual) {
        const auto added = [&](int c) {
          return residual_at(args, 0, row, min(col + c, p.columns - 1));
        };
        x = {x.x + added(0), x.y + added(1)};
      }
      if (pairs && col + 1 < p.columns) {
        *reinterpret_cast<float2*>(out + col) = x;
      } else {
        if (col < p.columns) out[col * col_stride] = x.x;
        if (col + 1 < p.columns) out[(col + 1) * col_stride] = x.y;
      }
    }
  }
}

template <typename T, bool kKFast>
__device__ __forceinline__ void consume(const Narrow& p, NarrowSmem<T, kKFast>& smem, int rank) {
  using Tile = WideTile<T, kKFast>;
  using Mma = ptx::WgmmaRegisters<__nv_bfloat16, kN>;
  constexpr int kSteps = kK / 16, kCount = kN / 2, kSegment = 4;  // k-blocks per addition
  const int thread = threadIdx.x - 128, lane = thread % 32;
  const auto release = [&](int stage) {
    if (lane < kCluster) ptx::mbarrier_arrive_cluster(&smem.empty[stage], lane);
  };
  RingPlace<Tile::kStages> at;
  for (int tile = blockIdx.x / kCluster; tile < p.cluster_tiles; tile += gridDim.x / kCluster) {
    const NarrowPlace place(p, tile, rank);
    float sum[kCount], pending[kCount], lead[kCount], cross[kCount];
    uint32_t a[2][Tile::kParts][4];
    SeenRows<T> seen;
    Range narrow = narrow_range(p, place);
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum[i] = pending[i] = 0.0f;
    int previous = -1;
    for (int k_block = 0; k_block < place.k_blocks; ++k_block) {
      ptx::mbarrier_wait(&smem.full[at.stage], at.phase);
      const Tile from(smem.ring[at.stage], thread);
      const uint32_t b = ptx::wgmma_address(smem.ring[at.stage] + Tile::kBytes);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        uint32_t (&parts)[Tile::kParts][4] = a[step % 2];
        from.read_parts(step, parts, seen);
        const auto columns = [&](int part) {
          return ptx::wgmma_descriptor(b + (part * kPartBytes + step * 32) / 16);
        };
        ptx::wgmma_fence();
        Mma::run(lead, parts[0], columns(0), false);
        ptx::wgmma_commit_group();
        bool add = k_block != 0 || step != 0;
#pragma unroll
        for (int order = 2; order > 0; --order) {
#pragma unroll
          for (int part = 0; part <= order; ++part) {
            if (part >= Tile::kParts) break;
            Mma::run(cross, parts[part], columns(order - part), add);
            add = true;
          }
        }
        ptx::wgmma_commit_group();
        ptx::wgmma_wait_group<1>();  // lead is complete, cross may still run
        ptx::wgmma_fence_operand(lead);
        if (step == 0 && previous >= 0) release(previous);
#pragma unroll
        for (int i = 0; i < kCount; ++i) pending[i] += lead[i];
      }
      if (k_block % kSegment == kSegment - 1) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          const float before = sum[i];
          sum[i] += pending[i];
          pending[i] -= sum[i] - before;  // what the sum lost
        }
      }
      previous = at.stage;
      at.advance();
    }
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_fence_operand(cross);
    release(previous);
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum[i] += cross[i] + pending[i];

    const int row0 = place.row + thread / 32 * 16 + lane / 4;
    const int col0 = place.column + lane % 4 * 2;
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) narrow.add(shuffled(narrow, lanes));
    float error[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      Range row = seen.range(i);
      row.add(shuffled(row, 1));
      row.add(shuffled(row, 2));
      error[i] = error_bound(row, narrow, place.k_blocks * kK, Tile::kTinyElement);
    }
    if (p.slices == 1) {
      Suspects<kCount> suspects;
#pragma unroll
      for (int i = 0; i < kCount; ++i) suspects.add(i, is_suspect(sum[i], error[i / 2 % 2]));
      recompute(p.args, row0, col0, p.transposed, suspects, sum);
    } else {
      store_errors(p, place, row0, error);
    }
    store_sums(p, place.slice, row0, col0, sum);
  }
}

template <typename T, bool kKFast>
__global__ void __launch_bounds__(kNarrowThreads, 1)
    fp32_narrow_kernel(const __grid_constant__ Narrow p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Smem = NarrowSmem<T, kKFast>;
  extern __shared__ __align__(1024) unsigned char raw_smem[];
  Smem& smem = *reinterpret_cast<Smem*>(raw_smem);
  const int rank = ptx::cluster_ctarank();
  if (threadIdx.x == 0) {
    for (int i = 0; i < Smem::Tile::kStages; ++i) {
      ptx::mbarrier_init(&smem.full[i], 1);
      ptx::mbarrier_init(&smem.empty[i], kConsumers * 4 * kCluster);  // a thread of each warp
    }
    ptx::fence_mbarrier_init();
    ptx::prefetch_tensormap(&p.wide);
    ptx::prefetch_tensormap(&p.parts);
  }
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  __syncthreads();
  cluster_sync();
  if (threadIdx.x < 128) {
    ptx::setmaxnreg_dec<40>();
    if (threadIdx.x == 0) produce<T, kKFast>(p, smem, rank);
    __syncwarp();
  } else {
    ptx::setmaxnreg_inc<232>();
    consume<T, kKFast>(p, smem, rank);
  }
  cluster_sync();
#endif
}

}  // namespace
}  // namespace my_ops::cuda
