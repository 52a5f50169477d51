// The product kernel of fp32_sm90.cu.
// Plan: persistent blocks. One producer warp fills a ring of k-blocks of all parts by TMA; consumer
// warpgroups own 64 rows each. Every 16 or 32 of k, the products of the leading parts are summed
// from zero and promoted, that is added to float registers with rounding (the tensor core
// truncates). Meanwhile the tensor core goes on with the cross products, which are small and have
// one accumulator for all of k. If registers allow, sums are compensated: what an addition loses is
// carried into the next.
// Bound by tensor cores: 3 (fp16) or 6 (bf16) times 2*m*n*k flop.
#pragma once

#include <type_traits>

#include "fp32/promotion.cuh"
#include "gemm/fp32_fma.cuh"
#include "gemm/fp32_sm90/plan.h"
#include "gemm/fp32_sm90/tile.cuh"
#include "gemm/pipeline_sm90.cuh"
#include "ptx/cluster.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/registers.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "ptx/wgmma_mma_async.cuh"

namespace my_ops::cuda {
namespace {

struct alignas(1024) ProductSmem {  // 1024 bytes: the swizzle repeats after these
  static constexpr int kRingBytes = 192 * 1024, kMaxStages = 6, kSuspectWords = 64;
  unsigned char ring[kRingBytes];
  uint64_t full[kMaxStages];
  TileExponents exponents[2];  // of each warpgroup
  StagedSubtile subtiles[8];   // of each consumer warp
  uint64_t empty[kMaxStages];
  uint32_t suspect[kSuspectWords];  // a bit per tile; with more tiles, bits are shared
  bool checked;                     // whether suspect outputs are looked for

  // The bit for a cluster tile.
  template <typename Tile>
  static __device__ __forceinline__ int turn(int cluster_tile) {
    return cluster_tile / cluster_tile_step<Tile>() % (32 * kSuspectWords);
  }
};
static_assert(sizeof(ProductSmem) == fp32_sm90::kNeeds.shared_bytes);

// The ring's layout for one scheme: [stage] { a [part][kM][kK], b [part][kN][kK] }. Parts that are
// stored along the rows are in whole boxes of 64 rows x kK.
template <typename Scheme, typename Tile>
struct RingLayout {
  static constexpr int kRowsB = Scheme::kAlongRows ? (Tile::kN + 63) / 64 * 64 : Tile::kN;
  static constexpr int kPartA = Tile::kM * Tile::kK * 2, kPartB = kRowsB * Tile::kK * 2;
  static constexpr int kBytes = Scheme::kParts * (kPartA + kPartB);
  static constexpr int kStages = ProductSmem::kRingBytes / kBytes;
  static_assert(kStages >= 2 && kStages <= ProductSmem::kMaxStages);
  // Of a part in its stage.
  static __device__ __forceinline__ int a(int part) { return part * kPartA; }
  static __device__ __forceinline__ int b(int part) {
    return Scheme::kParts * kPartA + part * kPartB;
  }
};

// [stage] { a [kM][kK], b [kN][kK], the low part of one of them }.
template <typename Tile>
struct RingLayout<MixedScheme, Tile> {
  static constexpr int kPartA = Tile::kM * Tile::kK * 2, kPartB = Tile::kN * Tile::kK * 2;
  static constexpr int kBytes = kPartA + kPartB + (kPartA > kPartB ? kPartA : kPartB);
  static constexpr int kStages = ProductSmem::kRingBytes / kBytes < ProductSmem::kMaxStages
                                     ? ProductSmem::kRingBytes / kBytes
                                     : ProductSmem::kMaxStages;
  static __device__ __forceinline__ int a(int part) { return part * (kPartA + kPartB); }
  static __device__ __forceinline__ int b(int part) { return kPartA + part * kPartB; }
};

template <typename Tile>
__device__ __forceinline__ TileOrigin tile_origin(const Fp32Product& p, const ProductGrid& grid,
                                                  int cluster_tile, ClusterPlace place) {
  const TilePlace tile =
      tile_place<Tile>(grid.cluster_tiles_m, grid.cluster_tiles_n, cluster_tile, place);
  return {tile.m, tile.n, tile.plane / p.slices, tile.plane % p.slices};
}

__device__ __forceinline__ int k_blocks_of(const Fp32Product& p, int slice) {
  return min(p.k_blocks_per_slice, p.k_blocks - slice * p.k_blocks_per_slice);
}

template <typename Scheme, typename Tile>
__device__ __forceinline__ void produce(const Fp32Product& p, const ProductSource& source,
                                        ProductSmem& smem, ClusterPlace place) {
  using Layout = RingLayout<Scheme, Tile>;
  constexpr int kRowsA = Tile::kM / Tile::kClusterN, kRowsB = Tile::kN / Tile::kClusterM;
  constexpr int kRowBytes = Tile::kK * 2;
  uint16_t same_m = 0;  // blocks with the same rows of a
#pragma unroll
  for (int i = 0; i < Tile::kClusterN; ++i) same_m |= 1 << (place.m + i * Tile::kClusterM);
  const uint16_t same_n = ((1 << Tile::kClusterM) - 1) << (place.n * Tile::kClusterM);
  constexpr bool kMixed = std::is_same_v<Scheme, MixedScheme>;
  const int a_parts = kMixed ? 1 + p.low_in_a : Scheme::kParts;
  const int b_parts = kMixed ? 2 - p.low_in_a : Scheme::kParts;
  const int bytes = a_parts * Layout::kPartA + b_parts * Layout::kPartB;
  constexpr int kShareA = Tile::kK / Tile::kClusterN, kShareB = Tile::kK / Tile::kClusterM;
  RingPlace<Layout::kStages> at;
  for (int cluster_tile = first_cluster_tile<Tile>(); cluster_tile < source.grid.cluster_tiles;
       cluster_tile += cluster_tile_step<Tile>()) {
    const TileOrigin origin = tile_origin<Tile>(p, source.grid, cluster_tile, place);
    const int a_line = (p.a_repeats ? 0 : origin.z * p.ld) + place.n * kShareA;
    const int b_line = (p.b_repeats ? 0 : origin.z * p.ld) + place.m * kShareB;
    const int a_row = (p.a_repeats ? 0 : origin.z * p.m) + origin.m + place.n * kRowsA;
    const int b_row = (p.b_repeats ? 0 : origin.z * p.n) + origin.n + place.m * kRowsB;
    const int k_blocks = k_blocks_of(p, origin.slice);
    int k = origin.slice * p.k_blocks_per_slice * Tile::kK;
    for (int i = 0; i < k_blocks; ++i, k += Tile::kK) {
      fill_stage(at, smem.full, smem.empty, bytes, [&](int stage, uint64_t* full) {
        unsigned char* const to = smem.ring + stage * Layout::kBytes;
#pragma unroll
        for (int part = 0; part < Scheme::kParts; ++part) {
          if constexpr (Scheme::kAlongRows) {  // a share of k
            const int a_lines = (p.a_repeats ? 1 : p.args.batch) * p.ld;
            const int b_lines = (p.b_repeats ? 1 : p.args.batch) * p.ld;
#pragma unroll
            for (int i = 0; i < Tile::kM; i += 64) {
              load_box<Tile::kClusterN>(
                  to + Layout::a(part) + i * Tile::kK * 2 + place.n * kShareA * 128, &source.a,
                  full, origin.m + i, part * a_lines + a_line + k, same_m);
            }
#pragma unroll
            for (int j = 0; j < Tile::kN; j += 64) {
              load_box<Tile::kClusterM>(
                  to + Layout::b(part) + j * Tile::kK * 2 + place.m * kShareB * 128, &source.b,
                  full, origin.n + j, part * b_lines + b_line + k, same_n);
            }
            continue;
          }
          unsigned char* const a = to + Layout::a(part) + place.n * kRowsA * kRowBytes;
          unsigned char* const b = to + Layout::b(part) + place.m * kRowsB * kRowBytes;
          if (part < a_parts) {
            load_box<Tile::kClusterN>(a, &source.a, full, k, part * p.a_rows + a_row, same_m);
          }
          if (part < b_parts) {
            load_box<Tile::kClusterM>(b, &source.b, full, k, part * p.b_rows + b_row, same_n);
          }
        }
      });
    }
  }
}

// The matrix descriptors of a stage's parts. Addresses count 16 bytes; 16 elements of k are 32
// bytes of a swizzled row, or 16 lines of a box if parts are stored along the rows.
template <typename Layout, typename Tile, bool kAlongRows>
struct StageOperands {
  uint32_t base_b, base_a;

  __device__ StageOperands(ProductSmem& smem, int stage, int consumer)
      : base_b(ptx::wgmma_address(smem.ring + stage * Layout::kBytes)),
        base_a(base_b + consumer * 64 * Tile::kK * 2 / 16) {}
  __device__ __forceinline__ uint64_t a(int part, int k) const {
    if constexpr (kAlongRows) {
      return ptx::wgmma_descriptor_rows<Tile::kK>(base_a + (Layout::a(part) + k * 128) / 16);
    }
    return ptx::wgmma_descriptor(base_a + (Layout::a(part) + k * 2) / 16);
  }
  __device__ __forceinline__ uint64_t b(int part, int k) const {
    if constexpr (kAlongRows) {
      return ptx::wgmma_descriptor_rows<Tile::kK>(base_b + (Layout::b(part) + k * 128) / 16);
    }
    return ptx::wgmma_descriptor(base_b + (Layout::b(part) + k * 2) / 16);
  }
};

// Sums the products of several parts over a tile's k, promoted every kPromote of k.
template <typename Scheme, typename Tile, int kCount>
__device__ __forceinline__ void sum_parts(ProductSmem& smem, const Releaser<Tile>& release,
                                          int consumer, bool low_in_a, int k_blocks,
                                          RingPlace<RingLayout<Scheme, Tile>::kStages>& at,
                                          float (&sum)[kCount]) {
  using Layout = RingLayout<Scheme, Tile>;
  using Mma = ptx::Wgmma<typename Scheme::Type, Tile::kN, Scheme::kAlongRows, Scheme::kAlongRows>;
  constexpr int kParts = Scheme::kParts;
  constexpr bool kCompensated = Tile::kCompensated;
  constexpr int kPromote = kCompensated ? 16 : 32;  // of k, between additions to the rounded sum
  float lead[kCount], cross[kCount];
  float pending[kCompensated ? kCount : 1];   // not yet added to the sum
  const int segment = k_blocks <= 8 ? 2 : 4;  // k-blocks between such additions
#pragma unroll
  for (int i = 0; i < kCount; ++i) sum[i] = 0.0f;
#pragma unroll
  for (float& x : pending) x = 0.0f;
  int previous = -1;
  for (int k_block = 0; k_block < k_blocks; ++k_block) {
    ptx::mbarrier_wait(&smem.full[at.stage], at.phase);
    const StageOperands<Layout, Tile, Scheme::kAlongRows> part(smem, at.stage, consumer);
#pragma unroll
    for (int k0 = 0; k0 < Tile::kK; k0 += kPromote) {
      ptx::wgmma_fence();
#pragma unroll
      for (int k = k0; k < k0 + kPromote; k += 16) {
        Mma::run(lead, part.a(0, k), part.b(0, k), k != k0);
      }
      ptx::wgmma_commit_group();
      bool add = k_block != 0 || k0 != 0;
      if constexpr (std::is_same_v<Scheme, MixedScheme>) {
#pragma unroll
        for (int k = k0; k < k0 + kPromote; k += 16) {
          Mma::run(cross, part.a(low_in_a, k), part.b(!low_in_a, k), add);
          add = true;
        }
      } else {
#pragma unroll
        for (int order = kParts - 1; order > 0; --order) {
#pragma unroll
          for (int i = 0; i <= order; ++i) {
#pragma unroll
            for (int k = k0; k < k0 + kPromote; k += 16) {
              Mma::run(cross, part.a(i, k), part.b(order - i, k), add);
              add = true;
            }
          }
        }
      }
      ptx::wgmma_commit_group();
      ptx::wgmma_wait_group<1>();  // lead is complete, cross may still run
      ptx::wgmma_fence_operand(lead);
      if (k0 == 0 && previous >= 0) release(previous);
      if constexpr (kCompensated) {
        promote(pending, lead);
      } else {
        promote(sum, lead);
      }
    }
    if constexpr (kCompensated) {
      if (k_block % segment == segment - 1) compensate(sum, pending);
    }
    previous = at.stage;
    at.advance();
  }
  ptx::wgmma_wait_group<0>();
  ptx::wgmma_fence_operand(cross);
  release(previous);
  if constexpr (kCompensated) {
    add_cross<Scheme::kLowBits>(sum, cross, pending);
  } else {
    add_cross<Scheme::kLowBits>(sum, cross);
  }
}

// Sums the products of the leading parts, without promotion.
template <typename Scheme, typename Tile, int kCount>
__device__ __forceinline__ void sum_single(ProductSmem& smem, const Releaser<Tile>& release,
                                           int consumer, int k_blocks,
                                           RingPlace<RingLayout<Scheme, Tile>::kStages>& at,
                                           float (&sum)[kCount]) {
  using Mma = ptx::Wgmma<typename Scheme::Type, Tile::kN>;
  sum_stages(at, smem.full, release, k_blocks, sum, [&](int stage, bool first) {
    const StageOperands<RingLayout<Scheme, Tile>, Tile, false> part(smem, stage, consumer);
#pragma unroll
    for (int k = 0; k < Tile::kK; k += 16) {
      Mma::run(sum, part.a(0, k), part.b(0, k), !first || k != 0);
    }
  });
}

// The same, promoted every kSegment k-blocks.
template <typename Scheme, typename Tile, int kCount>
__device__ __forceinline__ void sum_single_promoted(
    ProductSmem& smem, const Releaser<Tile>& release, int consumer, int k_blocks,
    RingPlace<RingLayout<Scheme, Tile>::kStages>& at, float (&sum)[kCount]) {
  constexpr int kSegment = 8;  // k-blocks
  float segment_sum[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) sum[i] = 0.0f;
  for (int k_block = 0; k_block < k_blocks; k_block += kSegment) {
    const int count = min(kSegment, k_blocks - k_block);
    sum_single<Scheme, Tile>(smem, release, consumer, count, at, segment_sum);
    promote(sum, segment_sum);
  }
}

// Recomputes the block's suspect tiles with fp32 FMAs. Threads 0 to 255 take part.
template <typename Tile>
__device__ __forceinline__ void recompute_suspect(const Fp32Product& p, const ProductGrid& grid,
                                                  ProductSmem& smem, ClusterPlace place,
                                                  int thread) {
  FmaSmem& fma_smem = reinterpret_cast<FmaSmem&>(smem.ring);
  fma_barrier();  // all tiles are done, so the ring is free
  for (int cluster_tile = first_cluster_tile<Tile>(); cluster_tile < grid.cluster_tiles;
       cluster_tile += cluster_tile_step<Tile>()) {
    const int turn = ProductSmem::turn<Tile>(cluster_tile);
    if (!(smem.suspect[turn / 32] >> turn % 32 & 1)) continue;
    const TileOrigin origin = tile_origin<Tile>(p, grid, cluster_tile, place);
    for (int i = 0; i < Tile::kM; i += kFmaTile) {
      for (int j = 0; j < Tile::kN; j += kFmaTile) {
        multiply_tile_by_fma(p.args, fma_smem, thread, origin.z, origin.m + i, origin.n + j,
                             origin.n + Tile::kN);
      }
    }
  }
}

template <typename Scheme, typename Tile>
__device__ __forceinline__ void consume(const Fp32Product& p, const ProductGrid& grid,
                                        ProductSmem& smem, ClusterPlace place) {
  const int consumer = __shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0) - 1;  // provably uniform
  const int thread = threadIdx.x % 128;
  constexpr bool kMayLose = std::is_same_v<Scheme, Bf16Scheme>;
  const Releaser<Tile> release{smem.empty};
  float sum[Tile::kN / 2];
  RingPlace<RingLayout<Scheme, Tile>::kStages> at;
  for (int cluster_tile = first_cluster_tile<Tile>(); cluster_tile < grid.cluster_tiles;
       cluster_tile += cluster_tile_step<Tile>()) {
    const TileOrigin origin = tile_origin<Tile>(p, grid, cluster_tile, place);
    const int k_blocks = k_blocks_of(p, origin.slice);
    TileExponents& exponents = smem.exponents[consumer];
    TileExponents::wait(consumer);  // those of the previous tile have been read
    if (p.slices == 1) exponents.load<Tile::kN>(p, origin, origin.m + consumer * 64);
    if constexpr (Scheme::kParts == 1 && Tile::kPromoted) {
      sum_single_promoted<Scheme, Tile>(smem, release, consumer, k_blocks, at, sum);
    } else if constexpr (Scheme::kParts == 1) {
      sum_single<Scheme, Tile>(smem, release, consumer, k_blocks, at, sum);
    } else {
      sum_parts<Scheme, Tile>(smem, release, consumer, p.low_in_a, k_blocks, at, sum);
    }
    const int first_row = origin.m + consumer * 64;
    if constexpr (kMayLose) {
      if (smem.checked) {
        exponents.wait(consumer);
        const float limit = kSuspectBelow * static_cast<float>(p.args.k);
        if (exponents.suspect(sum, limit, p.m - first_row, p.n - origin.n)) {
          const int turn = ProductSmem::turn<Tile>(cluster_tile);
          atomicOr(&smem.suspect[turn / 32], 1u << turn % 32);
        }
      }
    }
    const int row0 = first_row + thread / 32 * 16 + thread % 32 / 4;
    finish<Scheme, Tile>(p, origin, row0, exponents, consumer, smem.subtiles, sum);
  }
  if constexpr (kMayLose && Tile::kConsumers > 1) {
    if (smem.checked) recompute_suspect<Tile>(p, grid, smem, place, threadIdx.x - 128);
  }
}

// Computes fp16 parts with Scheme in tiles of Tile, and bf16 parts in tiles of FullTile.
template <typename Scheme, typename Tile, typename FullTile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    fp32_product_kernel(const __grid_constant__ Fp32Product p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  static_assert(Tile::kThreads == FullTile::kThreads && Tile::kClusterM == FullTile::kClusterM &&
                Tile::kClusterN == FullTile::kClusterN);
  extern __shared__ __align__(1024) unsigned char raw_smem[];
  ProductSmem& smem = *reinterpret_cast<ProductSmem*>(raw_smem);
  const ClusterPlace place = cluster_place<Tile>();
  if (threadIdx.x == 0) {
    init_ring<Tile>(ProductSmem::kMaxStages, smem.full, smem.empty);
    for (uint32_t& word : smem.suspect) word = 0;
    ptx::fence_mbarrier_init();
    ptx::prefetch_tensormap(&p.fast.a);
    ptx::prefetch_tensormap(&p.fast.b);
  }
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const SplitPath path = product_path(p);  // also publishes the barriers
  // With k-slices, the reduction looks for suspect outputs.
  if (threadIdx.x == 0) smem.checked = path == SplitPath::kBf16Checked && p.slices == 1;
  __syncthreads();
  if constexpr (Tile::kCluster > 1) cluster_sync();
  if (path == SplitPath::kFma) {
    multiply_by_fma<Tile::kThreads>(p.args, reinterpret_cast<FmaSmem&>(smem.ring));
  } else if (threadIdx.x < 128) {
    if constexpr (Tile::kMoveRegisters) ptx::setmaxnreg_dec<40>();
    if (threadIdx.x == 0) {
      if (path == SplitPath::kFp16) {
        produce<Scheme, Tile>(p, p.fast, smem, place);
      } else {
        produce<Bf16Scheme, FullTile>(p, p.full, smem, place);
      }
    }
    __syncwarp();
  } else {
    if constexpr (Tile::kMoveRegisters) ptx::setmaxnreg_inc<232>();
    if (path == SplitPath::kFp16) {
      consume<Scheme, Tile>(p, p.fast.grid, smem, place);
    } else {
      consume<Bf16Scheme, FullTile>(p, p.full.grid, smem, place);
    }
  }
  if constexpr (FullTile::kConsumers == 1) {  // one warpgroup has too few threads
    __syncthreads();
    if (smem.checked) recompute_suspect<FullTile>(p, p.full.grid, smem, place, threadIdx.x);
  }
  if constexpr (Tile::kCluster > 1) cluster_sync();
#endif
}

}  // namespace
}  // namespace my_ops::cuda
