// The product kernel of half_sm90.cu.
// Plan: persistent blocks. One producer thread fills a ring of k-blocks by TMA. Two consumer
// warpgroups own 64 rows each; one may be ahead of the other by as much as the ring allows, so that
// the epilogue of one overlaps the products of the other. If the epilogue is long, epilogue warps,
// which take no part in the products, read rounded tiles from shared memory, finish and store them
// while the consumers work on the next tile. Operands are read in place: wgmma takes 16-bit
// operands with either index contiguous.
// Bound by tensor cores and, at large sizes, by the power they draw.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "gemm/epilogue.cuh"
#include "gemm/half_sm90/plan.h"
#include "gemm/pipeline_sm90.cuh"
#include "ptx/cluster.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/mma.cuh"
#include "ptx/registers.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "ptx/wgmma_mma_async.cuh"

namespace my_ops::cuda {
namespace {

template <typename T>
struct HalfProduct {
  CUtensorMap a, b;  // [batch, rows, columns], the columns contiguous
  CUtensorMap out;   // by subtiles, if vector_out
  GemmArgs<T, T> args;
  int m, n, k_blocks;
  int cluster_tiles_m, cluster_tiles_n, cluster_tiles;  // cluster_tiles_m * cluster_tiles_n * batch
  bool a_repeats, b_repeats;                            // the same matrix for every batch
  bool vector_out, vector_residual;                     // TMA can store it; its rows are aligned
};

constexpr int kBoxBytes = 64 * 64 * 2;
constexpr int kSubtileRows = 16, kSubtileColumns = 64;  // of the output, staged by one warp
constexpr int kSubtileVectors = kSubtileRows * kSubtileColumns / 8;  // of 16 bytes

template <typename Tile>
struct alignas(1024) HalfSmem {  // 1024 bytes: the swizzle repeats after these
  unsigned char ring[Tile::kStages * Tile::kStageBytes];                   // [stage] { a, b }
  uint4 subtiles[Tile::kConsumers * 4][Tile::kSubtiles][kSubtileVectors];  // two, used in turn
  uint64_t full[Tile::kStages], empty[Tile::kStages];
  uint64_t summed[Tile::kConsumers];    // a deferred tile's sums are staged; every lane arrives
  uint64_t finished[Tile::kConsumers];  // ... and have been stored
};

template <typename Tile, typename T>
__device__ __forceinline__ TilePlace tile_place(const HalfProduct<T>& p, int cluster_tile,
                                                ClusterPlace place) {
  return tile_place<Tile>(p.cluster_tiles_m, p.cluster_tiles_n, cluster_tile, place);
}

template <bool kAlongM, bool kAlongN, typename Tile, typename T>
__device__ __forceinline__ void produce(const HalfProduct<T>& p, HalfSmem<Tile>& smem,
                                        ClusterPlace place) {
  constexpr uint16_t kAll = (1 << Tile::kCluster) - 1;
  constexpr int kShareN = Tile::kN / Tile::kCluster, kShareK = Tile::kK / Tile::kCluster;
  RingPlace<Tile::kStages> at;
  for (int cluster_tile = first_cluster_tile<Tile>(); cluster_tile < p.cluster_tiles;
       cluster_tile += cluster_tile_step<Tile>()) {
    const TilePlace tile = tile_place<Tile>(p, cluster_tile, place);
    const int a_z = p.a_repeats ? 0 : tile.plane, b_z = p.b_repeats ? 0 : tile.plane;
    for (int k_block = 0; k_block < p.k_blocks; ++k_block) {
      const int k = k_block * Tile::kK;
      fill_stage(at, smem.full, smem.empty, Tile::kStageBytes, [&](int stage, uint64_t* full) {
        unsigned char* a = smem.ring + stage * Tile::kStageBytes;
        unsigned char* b = a + Tile::kBytesA;
        if constexpr (kAlongM) {
#pragma unroll
          for (int i = 0; i < Tile::kM / 64; ++i) {
            ptx::tma_load_3d(a + i * kBoxBytes, &p.a, full, tile.m + i * 64, k, a_z);
          }
        } else {
          ptx::tma_load_3d(a, &p.a, full, k, tile.m, a_z);
        }
        if constexpr (kAlongN) {  // a share of k
#pragma unroll
          for (int i = 0; i < Tile::kN / 64; ++i) {
            load_box<Tile::kCluster>(b + i * kBoxBytes + place.m * kShareK * 128, &p.b, full,
                                     tile.n + i * 64, k + place.m * kShareK, b_z, kAll);
          }
        } else {  // a share of n
          load_box<Tile::kCluster>(b + place.m * kShareN * 128, &p.b, full, k,
                                   tile.n + place.m * kShareN, b_z, kAll);
        }
      });
    }
  }
}

// A subtile is the part of the output that one warp stages at a time: kSubtileRows rows of eight
// 16-byte vectors. A vector's position is XORed with its row, so that accesses by rows or by
// columns have no bank conflicts.
__device__ __forceinline__ int subtile_vector(int row, int vector) {
  return row * 8 + (vector ^ row % 8);
}

// A lane's share of a subtile, in memory order. With vectors it is vector lane % 8 of every fourth
// row, otherwise elements lane and lane + 32 of every row.
struct SubtileRows {
  static constexpr int kSteps = kSubtileRows / 4;
  uint4 x[kSteps];
};

template <typename Tile, typename T>
__device__ __forceinline__ bool by_vectors(const HalfProduct<T>& p) {
  return Tile::kDeferred || (p.vector_out && p.vector_residual);
}

__device__ __forceinline__ int subtile_element(int row, int col) {
  return subtile_vector(row, col / 8) * 8 + col % 8;
}

template <typename Tile, typename T>
__device__ __forceinline__ void load_residual(const HalfProduct<T>& p, int z, int row0, int col0,
                                              SubtileRows& rows) {
  const GemmArgs<T, T>& args = p.args;
  const int lane = threadIdx.x % 32;
  const T* from = args.residual + z * args.residual_batch;
  if (by_vectors<Tile>(p)) {
    const int col = min(col0 + lane % 8 * 8, p.n - 8);
#pragma unroll
    for (int step = 0; step < SubtileRows::kSteps; ++step) {
      const int row = min(row0 + step * 4 + lane / 8, p.m - 1);
      rows.x[step] = *reinterpret_cast<const uint4*>(from + row * args.residual_row + col);
    }
  } else {
    T* x = reinterpret_cast<T*>(rows.x);
    const T* from0 = from + min(col0 + lane, p.n - 1) * args.residual_col;
    const T* from1 = from + min(col0 + lane + 32, p.n - 1) * args.residual_col;
#pragma unroll
    for (int i = 0; i < kSubtileRows; ++i) {
      const int64_t row = min(row0 + i, p.m - 1) * args.residual_row;
      x[2 * i] = from0[row];
      x[2 * i + 1] = from1[row];
    }
  }
}

template <typename Tile, typename T>
__device__ __forceinline__ void write_subtile(const HalfProduct<T>& p, const SubtileRows& rows,
                                              uint4* subtile) {
  const int lane = threadIdx.x % 32;
  if (by_vectors<Tile>(p)) {
#pragma unroll
    for (int step = 0; step < SubtileRows::kSteps; ++step) {
      subtile[subtile_vector(step * 4 + lane / 8, lane % 8)] = rows.x[step];
    }
  } else {
    const T* x = reinterpret_cast<const T*>(rows.x);
#pragma unroll
    for (int i = 0; i < 2 * kSubtileRows; ++i) {
      reinterpret_cast<T*>(subtile)[subtile_element(i / 2, lane + i % 2 * 32)] = x[i];
    }
  }
}

// Stores a subtile without TMA. Adjacent lanes store adjacent elements, so a row may start at any
// element.
template <typename T>
__device__ __forceinline__ void store_rows(const HalfProduct<T>& p, int z, int row0, int col0,
                                           const uint4* subtile) {
  const GemmArgs<T, T>& args = p.args;
  const T* x = reinterpret_cast<const T*>(subtile);
  const int lane = threadIdx.x % 32, rows = min(kSubtileRows, p.m - row0);
  T* out = args.out + z * args.out_batch + row0 * args.out_row + col0 + lane;
#pragma unroll 4
  for (int row = 0; row < rows; ++row, out += args.out_row) {
    if (col0 + lane < p.n) out[0] = x[subtile_element(row, lane)];
    if (col0 + lane + 32 < p.n) out[32] = x[subtile_element(row, lane + 32)];
  }
}

template <typename T, int kCount>
__device__ __forceinline__ void add_bias(const HalfProduct<T>& p, int col0, float (&x)[kCount]) {
  if (!p.args.bias) return;
  const int col = col0 + threadIdx.x % 4 * 2;
  apply_column_terms(
      x, [&](int c) { return ColumnTerms<float>{load(p.args.bias[min(col + c, p.n - 1)])}; });
}

// Adds a residual. `subtile` reorders it from rows to the layout of the accumulators.
template <typename Tile, typename T, int kCount>
__device__ __forceinline__ void add_residual(const HalfProduct<T>& p, const SubtileRows& rows,
                                             uint4* subtile, float (&x)[kCount]) {
  const int lane = threadIdx.x % 32;
  write_subtile<Tile>(p, rows, subtile);
  __syncwarp();
  const uint32_t* words = reinterpret_cast<const uint32_t*>(subtile);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 r = unpack<T>(words[subtile_vector(lane / 4 + 8 * i, j) * 4 + lane % 4]);
      x[4 * j + 2 * i] += r.x;
      x[4 * j + 2 * i + 1] += r.y;
    }
  }
  __syncwarp();
}

// Rounds one subtile of a warp's results into shared memory.
template <typename T>
__device__ __forceinline__ void round_subtile(uint4* subtile, const float* x) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    ptx::stmatrix(subtile + subtile_vector(lane % 16, j + lane / 16),
                  pack<T>(x[4 * j], x[4 * j + 1]), pack<T>(x[4 * j + 2], x[4 * j + 3]),
                  pack<T>(x[4 * j + 4], x[4 * j + 5]), pack<T>(x[4 * j + 6], x[4 * j + 7]));
  }
}

// Stores a subtile that this warp has written to shared memory.
template <typename Tile, typename T>
__device__ __forceinline__ void store_subtile(const HalfProduct<T>& p, int z, int row0, int col0,
                                              uint4* subtile) {
  const int lane = threadIdx.x % 32;
  if (Tile::kDeferred || p.vector_out) {
    ptx::fence_proxy_async();
    __syncwarp();
    if (lane == 0 && row0 < p.m) ptx::tma_store_3d(&p.out, subtile, col0, row0, z);
    if (lane == 0) ptx::tma_store_commit_group();
  } else {
    __syncwarp();
    store_rows(p, z, row0, col0, subtile);
  }
}

// Applies the epilogue to a warpgroup's sums and stores them, subtile by subtile. kPlain: no
// activation and no residual. Only then is the loop unrolled, which keeps the code small. turn: the
// next of the two subtiles in shared memory, also across tiles, which may have an odd number.
template <bool kPlain, typename Tile, typename T, int kCount>
__device__ __forceinline__ void finish(const HalfProduct<T>& p, const TilePlace& tile, int consumer,
                                       const float (&sum)[kCount],
                                       uint4 (&subtiles)[Tile::kSubtiles][kSubtileVectors],
                                       int& turn) {
  constexpr int kSubtiles = Tile::kN / kSubtileColumns;
  const GemmArgs<T, T>& args = p.args;
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  const int row0 = tile.m + consumer * 64 + warp * kSubtileRows;
  SubtileRows residual;
  if (!kPlain && args.residual) load_residual<Tile>(p, tile.plane, row0, tile.n, residual);
#pragma unroll kPlain ? kSubtiles : 1
  for (int c = 0; c < kSubtiles; ++c) {
    const int col0 = tile.n + c * kSubtileColumns;
    if (col0 >= p.n) break;
    uint4* subtile = subtiles[turn];
    turn ^= 1;
    if (lane == 0) ptx::tma_store_wait_group_read<1>();  // for the last subtile but one
    __syncwarp();
    float x[32];
    if constexpr (kPlain) {
#pragma unroll
      for (int i = 0; i < 32; ++i) x[i] = sum[c * 32 + i];
    } else {
#pragma unroll
      for (int at = 0; at < kSubtiles; ++at) {
        if (at != c) continue;
#pragma unroll
        for (int i = 0; i < 32; ++i) x[i] = ptx::mov(sum[at * 32 + i]);
      }
    }
    add_bias(p, col0, x);
    if constexpr (!kPlain) {
      activate<FastActivate>(args.activation, x);
      if (args.residual) {
        add_residual<Tile>(p, residual, subtile, x);
        if (c + 1 < kSubtiles)
          load_residual<Tile>(p, tile.plane, row0, col0 + kSubtileColumns, residual);
      }
    }
    round_subtile<T>(subtile, x);
    store_subtile<Tile>(p, tile.plane, row0, col0, subtile);
  }
}

// Passes a warp's sums, with the bias added, to the epilogue warps.
template <typename Tile, typename T, int kCount>
__device__ __forceinline__ void defer(const HalfProduct<T>& p, HalfSmem<Tile>& smem,
                                      const TilePlace& tile, int consumer,
                                      const float (&sum)[kCount]) {
  const int warp = threadIdx.x % 128 / 32;
#pragma unroll
  for (int c = 0; c < Tile::kSubtiles; ++c) {
    float x[32];
#pragma unroll
    for (int i = 0; i < 32; ++i) x[i] = sum[c * 32 + i];
    add_bias(p, tile.n + c * kSubtileColumns, x);
    round_subtile<T>(smem.subtiles[consumer * 4 + warp][c], x);
  }
  ptx::mbarrier_arrive(&smem.summed[consumer]);
}

// Applies activation and residual to a subtile in shared memory; each lane takes its own share.
template <typename Tile, typename T>
__device__ __forceinline__ void finish_subtile(const HalfProduct<T>& p, int z, int row0, int col0,
                                               uint4* subtile) {
  const int lane = threadIdx.x % 32;
  SubtileRows rows, residual;
  if (p.args.residual) load_residual<Tile>(p, z, row0, col0, residual);
#pragma unroll
  for (int step = 0; step < SubtileRows::kSteps; ++step) {
    rows.x[step] = subtile[subtile_vector(step * 4 + lane / 8, lane % 8)];
  }
  with_activation(p.args.activation, [&]<Activation kActivation>() {
#pragma unroll
    for (int step = 0; step < SubtileRows::kSteps; ++step) {
      uint32_t* pairs = reinterpret_cast<uint32_t*>(&rows.x[step]);
      const auto* added = reinterpret_cast<const Vector<T, 2>*>(&residual.x[step]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 y = unpack<T>(pairs[i]);
        float x[2] = {y.x, y.y};
        finish_vector<T>(x, FastActivate<kActivation>{}, nullptr, added[i], p.args.residual);
        pairs[i] = pack<T>(x[0], x[1]);
      }
    }
  });
  write_subtile<Tile>(p, rows, subtile);
}

// The work of an epilogue warp: its share of the subtiles of every tile except the block's last.
template <typename Tile, typename T>
__device__ __forceinline__ void finish_deferred(const HalfProduct<T>& p, HalfSmem<Tile>& smem,
                                                ClusterPlace place) {
  const int lane = threadIdx.x % 32, epilogue_warp = threadIdx.x / 32 - 1;
  const int step = cluster_tile_step<Tile>();
  uint32_t phase = 0;
  for (int cluster_tile = first_cluster_tile<Tile>(); cluster_tile + step < p.cluster_tiles;
       cluster_tile += step, phase ^= 1) {
    const TilePlace tile = tile_place<Tile>(p, cluster_tile, place);
    for (int consumer = 0; consumer < Tile::kConsumers; ++consumer) {
      const auto each_subtile = [&](auto f) {
        for (int i = epilogue_warp; i < 4 * Tile::kSubtiles; i += Tile::kEpilogueWarps) {
          const int warp = i / Tile::kSubtiles, c = i % Tile::kSubtiles;
          const int row0 = tile.m + consumer * 64 + warp * kSubtileRows;
          const int col0 = tile.n + c * kSubtileColumns;
          if (row0 < p.m && col0 < p.n) f(row0, col0, smem.subtiles[consumer * 4 + warp][c]);
        }
      };
      ptx::mbarrier_wait(&smem.summed[consumer], phase);
      each_subtile([&](int row0, int col0, uint4* subtile) {
        finish_subtile<Tile>(p, tile.plane, row0, col0, subtile);
      });
      ptx::fence_proxy_async();
      __syncwarp();
      if (lane == 0) {
        each_subtile([&](int row0, int col0, uint4* subtile) {
          ptx::tma_store_3d(&p.out, subtile, col0, row0, tile.plane);
        });
        ptx::tma_store_commit_group();
        ptx::tma_store_wait_group_read<0>();
      }
      ptx::mbarrier_arrive(&smem.finished[consumer]);
    }
  }
}

template <bool kAlongM, bool kAlongN, typename Tile, typename T>
__device__ __forceinline__ void consume(const HalfProduct<T>& p, HalfSmem<Tile>& smem,
                                        ClusterPlace place) {
  using Mma = ptx::Wgmma<T, Tile::kN, kAlongM, kAlongN>;
  const int consumer = __shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0) - 1;  // provably uniform
  const int thread = threadIdx.x % 128;
  const Releaser<Tile> release{smem.empty};
  const auto a_at = [](uint32_t base, int k) {
    return kAlongM ? ptx::wgmma_descriptor_rows<Tile::kK>(base + k * 8)
                   : ptx::wgmma_descriptor(base + k / 8);
  };
  const auto b_at = [](uint32_t base, int k) {
    return kAlongN ? ptx::wgmma_descriptor_rows<Tile::kK>(base + k * 8)
                   : ptx::wgmma_descriptor(base + k / 8);
  };
  const bool plain = p.args.activation == Activation::kNone && !p.args.residual;
  float sum[Tile::kN / 2];
  uint32_t tile_phase = 0;
  int turn = 0;
  RingPlace<Tile::kStages> at;
  for (int cluster_tile = first_cluster_tile<Tile>(); cluster_tile < p.cluster_tiles;
       cluster_tile += cluster_tile_step<Tile>()) {
    const TilePlace tile = tile_place<Tile>(p, cluster_tile, place);
    sum_stages(at, smem.full, release, p.k_blocks, sum, [&](int stage, bool first) {
      const unsigned char* operands = smem.ring + stage * Tile::kStageBytes;
      const uint32_t a = ptx::wgmma_address(operands + consumer * kBoxBytes);
      const uint32_t b = ptx::wgmma_address(operands + Tile::kBytesA);
#pragma unroll
      for (int k = 0; k < Tile::kK; k += 16) {
        Mma::run(sum, a_at(a, k), b_at(b, k), !first || k != 0);
      }
    });
    uint4(&subtiles)[Tile::kSubtiles][kSubtileVectors] = smem.subtiles[consumer * 4 + thread / 32];
    if constexpr (Tile::kDeferred) {
      ptx::mbarrier_wait(&smem.finished[consumer], tile_phase ^ 1);
      tile_phase ^= 1;
      if (cluster_tile + cluster_tile_step<Tile>() < p.cluster_tiles) {
        defer<Tile>(p, smem, tile, consumer, sum);
      } else {
        finish<false, Tile>(p, tile, consumer, sum, subtiles, turn);
      }
    } else if (plain) {
      finish<true, Tile>(p, tile, consumer, sum, subtiles, turn);
    } else {
      finish<false, Tile>(p, tile, consumer, sum, subtiles, turn);
    }
  }
  if (thread % 32 == 0) ptx::tma_store_wait_group_read<0>();  // before shared memory is freed
}

// kAlongM: a is stored along m, not k; kAlongN: b is stored along n.
template <typename T, bool kAlongM, bool kAlongN, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    half_product_kernel(const __grid_constant__ HalfProduct<T> p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char raw_smem[];
  HalfSmem<Tile>& smem = *reinterpret_cast<HalfSmem<Tile>*>(raw_smem);
  static_assert(sizeof(HalfSmem<Tile>) == Tile::kSharedBytes);
  const ClusterPlace place = cluster_place<Tile>();
  if (threadIdx.x == 0) {
    init_ring<Tile>(Tile::kStages, smem.full, smem.empty);
    if constexpr (Tile::kDeferred) {
      for (int i = 0; i < Tile::kConsumers; ++i) {
        ptx::mbarrier_init(&smem.summed[i], 128);
        ptx::mbarrier_init(&smem.finished[i], 32 * Tile::kEpilogueWarps);
      }
    }
    ptx::fence_mbarrier_init();
    ptx::prefetch_tensormap(&p.a);
    ptx::prefetch_tensormap(&p.b);
    ptx::prefetch_tensormap(&p.out);
  }
  if constexpr (Tile::kCluster > 1) {
    cluster_sync();
  } else {
    __syncthreads();
  }
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  if (threadIdx.x < 128) {
    if constexpr (Tile::kMoveRegisters) ptx::setmaxnreg_dec<Tile::kFewRegisters>();
    if (threadIdx.x == 0) produce<kAlongM, kAlongN>(p, smem, place);
    if constexpr (Tile::kDeferred) {
      if (threadIdx.x >= 32) finish_deferred(p, smem, place);
    }
    __syncwarp();
  } else {
    if constexpr (Tile::kMoveRegisters) ptx::setmaxnreg_inc<Tile::kManyRegisters>();
    consume<kAlongM, kAlongN>(p, smem, place);
  }
  if constexpr (Tile::kCluster > 1) cluster_sync();
#endif
}

}  // namespace
}  // namespace my_ops::cuda
