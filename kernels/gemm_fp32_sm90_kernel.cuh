// The product kernel of gemm_fp32_sm90.cu.
// Plan: persistent blocks; one producer warp fills a ring of k-blocks of all parts by TMA, consumer
// warpgroups own 64 rows each. Per 16 or 32 of k the product of the leading parts is formed from
// zero and added to float registers with rounding (the tensor core truncates), while the tensor
// core goes on with the small cross products, which have an accumulator of their own for the whole
// of k. Where registers allow, sums are compensated: what an addition loses goes on to the next.
// Bound by tensor cores: 3 (fp16) or 6 (bf16) times 2*m*n*k flop.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <climits>

#include "copy_async.cuh"
#include "gemm_fp32_exact.cuh"
#include "gemm_split.cuh"
#include "sm90.cuh"
#include "sm90_wgmma.cuh"

namespace my_ops::cuda {
namespace {

// Tiles of the output, walked by clusters.
struct ProductGrid {
  int units_m, units_n;  // of a cluster's tiles each
  int units;             // units_m * units_n * batch * splits
};

// Parts of a [parts * batch * m, ld] and of b [parts * batch * n, ld], and how to walk them.
struct ProductSource {
  CUtensorMap a, b;
  ProductGrid grid;
};

struct Fp32Product {
  ProductSource fast, full;  // of fp16 and of bf16 parts
  GemmArgs<float, float> args;
  const int32_t* a_exponent;  // [batch * m]
  const int32_t* b_exponent;  // [batch * n]
  SplitStatus a_status, b_status;
  float* partial;             // [splits][batch][m][n] sums over a piece of k, if splits > 1
  bool has_bf16;              // the bf16 split has run; else kBf16 data take the exact path
  bool a_repeats, b_repeats;  // the same matrix for every batch
  int m, n;
  int a_rows, b_rows;  // batch * m and batch * n, the distance of parts in the maps
  int k_blocks, k_blocks_per_split, splits;
};

struct Fp16Scheme {
  using Type = __half;
  static constexpr int kParts = 2, kShift = kFp16Shift, kLowBits = kFp16LowBits;
};

// TF32's accuracy: the leading parts alone.
struct SingleScheme {
  using Type = __half;
  static constexpr int kParts = 1, kShift = kFp16Shift;
};

struct Bf16Scheme {
  using Type = __nv_bfloat16;
  static constexpr int kParts = 3, kShift = kBf16Shift, kLowBits = 0;
};

// A cluster works on kClusterM x kClusterN tiles: blocks in a line along n share their rows of a,
// blocks in a line along m their columns of b; each loads only a part and sends it to the others.
template <int M, int N, int ClusterM, int ClusterN>
struct Tile {
  static constexpr int kM = M, kN = N, kK = kSplitBlockK;
  static constexpr int kClusterM = ClusterM, kClusterN = ClusterN;
  static constexpr int kCluster = ClusterM * ClusterN;
  static constexpr int kUnitM = M * ClusterM, kUnitN = N * ClusterN;
  static constexpr int kConsumers = M / 64;
  static constexpr int kThreads = (kConsumers + 1) * 128;
  static constexpr int kGroupM = 2048 / kUnitM;  // units of m walked together, for L2
  // Whether what the sums' additions lose is added later: up to where registers allow.
  static constexpr bool kCompensated = N < 128;
  // Accumulators that need more than an even share of the registers.
  static constexpr bool kMoveRegisters = kConsumers > 1;
};

struct TileOrigin {
  int m, n, z, split;
};

// The exponents of a warpgroup's rows and columns: on their way to shared memory while the products
// are summed.
struct TileExponents {
  int row[64], column[256];

  template <int kN>
  __device__ __forceinline__ void load(const Fp32Product& p, const TileOrigin& origin, int row0) {
    const int32_t* a = p.a_exponent + (p.a_repeats ? 0 : origin.z * p.m);
    const int32_t* b = p.b_exponent + (p.b_repeats ? 0 : origin.z * p.n);
    const int thread = threadIdx.x % 128;
    if (thread < 64) copy_async<4>(row + thread, a + min(row0 + thread, p.m - 1));
    for (int j = thread; j < kN; j += 128)
      copy_async<4>(column + j, b + min(origin.n + j, p.n - 1));
  }
  // All of the warpgroup's threads have come here, and what they load has landed.
  static __device__ __forceinline__ void wait(int consumer) {
    asm volatile("cp.async.wait_all;\nbar.sync %0, 128;" ::"r"(1 + consumer) : "memory");
  }

  // Undoes the scaling, exactly: acc *= 2^(row + column - 2 * shift).
  template <typename Scheme, int kCount>
  __device__ __forceinline__ void unscale(float (&acc)[kCount]) const {
    constexpr unsigned kWarp = 0xFFFFFFFF;
    constexpr int kN = kCount * 2;
    const int thread = threadIdx.x % 128, of_thread = thread / 32 * 16 + thread % 32 / 4;
    const int e_row[2] = {row[of_thread] - 2 * Scheme::kShift,
                          row[of_thread + 8] - 2 * Scheme::kShift};
    // Whether every factor is a normal float: lanes look at different columns of the tile.
    int lowest = INT_MAX, highest = INT_MIN;
#pragma unroll
    for (int j = threadIdx.x % 32; j < kN; j += 32) {
      lowest = min(lowest, column[j]);
      highest = max(highest, column[j]);
    }
    lowest = __reduce_min_sync(kWarp, lowest) + __reduce_min_sync(kWarp, min(e_row[0], e_row[1]));
    highest = __reduce_max_sync(kWarp, highest) + __reduce_max_sync(kWarp, max(e_row[0], e_row[1]));
    // Volatile: loaded where they are used, or they would take more registers than there are.
    const uint32_t first = sm90::smem_address(column + threadIdx.x % 4 * 2);
    const auto pair = [&](int j) {
      int2 e;
      asm volatile("ld.shared.v2.s32 {%0, %1}, [%2];" : "=r"(e.x), "=r"(e.y) : "r"(first + j * 32));
      return e;
    };
    if (lowest >= -126 && highest <= 127) {
      const int bits[2] = {__float_as_int(1.0f) + (e_row[0] << 23),
                           __float_as_int(1.0f) + (e_row[1] << 23)};
#pragma unroll
      for (int j = 0; j < kCount / 4; ++j) {
        const int2 e = pair(j);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          acc[j * 4 + i * 2] *= __int_as_float(bits[i] + (e.x << 23));
          acc[j * 4 + i * 2 + 1] *= __int_as_float(bits[i] + (e.y << 23));
        }
      }
      return;
    }
    // In two factors, so that exponents may go twice as far; below 2^-252 every float vanishes.
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < kCount / 4; ++j) {
        const int2 e = pair(j);
#pragma unroll
        for (int x = 0; x < 4; ++x) {
          acc[j * 4 + x] *= pow2(max((e_row[x / 2] + (x % 2 ? e.y : e.x) + half) >> 1, -126));
        }
      }
    }
  }
};

struct alignas(1024) ProductSmem {  // 1024: the repeat of the 128-byte swizzle
  static constexpr int kRingBytes = 192 * 1024, kMaxStages = 6;
  unsigned char ring[kRingBytes];
  uint64_t full[kMaxStages];   // loads landed: 1 arrival and the bytes
  TileExponents exponents[2];  // of each warpgroup
  uint64_t empty[kMaxStages];  // consumers are done, in every block loaded together with this one
};
static_assert(sizeof(ProductSmem) <= 227 * 1024);

// The ring's layout for one scheme: [stage] { a [part][kM][kK], b [part][kN][kK] }.
template <typename Scheme, typename Tile>
struct RingLayout {
  static constexpr int kPartA = Tile::kM * Tile::kK * 2, kPartB = Tile::kN * Tile::kK * 2;
  static constexpr int kBytes = Scheme::kParts * (kPartA + kPartB);
  static constexpr int kStages = ProductSmem::kRingBytes / kBytes;
  static_assert(kStages >= 2 && kStages <= ProductSmem::kMaxStages);
  static __device__ unsigned char* a(unsigned char* ring, int stage, int part) {
    return ring + stage * kBytes + part * kPartA;
  }
  static __device__ unsigned char* b(unsigned char* ring, int stage, int part) {
    return ring + stage * kBytes + Scheme::kParts * kPartA + part * kPartB;
  }
};

// This block's place in its cluster.
struct ClusterPlace {
  int m, n;
};

template <typename Tile>
__device__ __forceinline__ ClusterPlace cluster_place() {
  if constexpr (Tile::kCluster == 1) return {0, 0};
  const int rank = sm90::cluster_ctarank();
  return {rank % Tile::kClusterM, rank / Tile::kClusterM};
}

// Units in groups of kGroupM along m, so that blocks at work share operands in L2.
template <typename Tile>
__device__ __forceinline__ TileOrigin tile_origin(const Fp32Product& p, const ProductGrid& grid,
                                                  int unit, ClusterPlace place) {
  const int plane_units = grid.units_m * grid.units_n;
  const int plane = unit / plane_units, in_plane = unit % plane_units;
  const int group = in_plane / (Tile::kGroupM * grid.units_n);
  const int in_group = in_plane % (Tile::kGroupM * grid.units_n);
  const int first = group * Tile::kGroupM, rows = min(Tile::kGroupM, grid.units_m - first);
  TileOrigin origin;
  origin.m = (first + in_group % rows) * Tile::kUnitM + place.m * Tile::kM;
  origin.n = in_group / rows * Tile::kUnitN + place.n * Tile::kN;
  origin.split = plane % p.splits;
  origin.z = plane / p.splits;
  return origin;
}

__device__ __forceinline__ int k_blocks_of(const Fp32Product& p, int split) {
  return min(p.k_blocks_per_split, p.k_blocks - split * p.k_blocks_per_split);
}

// Loads a share of a tile's rows for all kSharers blocks named in `blocks`.
template <int kSharers>
__device__ __forceinline__ void load_share(unsigned char* smem, const CUtensorMap* map,
                                           uint64_t* full, int k, int row, uint16_t blocks) {
  if constexpr (kSharers == 1) {
    sm90::tma_load_2d(smem, map, full, k, row);
  } else {
    sm90::tma_load_2d_multicast(smem, map, full, k, row, blocks);
  }
}

template <typename Scheme, typename Tile>
__device__ __forceinline__ void produce(const Fp32Product& p, const ProductSource& source,
                                        ProductSmem& smem, ClusterPlace place) {
  using Layout = RingLayout<Scheme, Tile>;
  constexpr int kRowsA = Tile::kM / Tile::kClusterN, kRowsB = Tile::kN / Tile::kClusterM;
  constexpr int kRowBytes = Tile::kK * 2;
  uint16_t same_m = 0;  // blocks with this block's rows of a
#pragma unroll
  for (int i = 0; i < Tile::kClusterN; ++i) same_m |= 1 << (place.m + i * Tile::kClusterM);
  const uint16_t same_n = ((1 << Tile::kClusterM) - 1) << (place.n * Tile::kClusterM);
  sm90::RingPlace<Layout::kStages> at;
  for (int unit = blockIdx.x / Tile::kCluster; unit < source.grid.units;
       unit += gridDim.x / Tile::kCluster) {
    const TileOrigin origin = tile_origin<Tile>(p, source.grid, unit, place);
    const int a_row = (p.a_repeats ? 0 : origin.z * p.m) + origin.m + place.n * kRowsA;
    const int b_row = (p.b_repeats ? 0 : origin.z * p.n) + origin.n + place.m * kRowsB;
    const int k_blocks = k_blocks_of(p, origin.split);
    int k = origin.split * p.k_blocks_per_split * Tile::kK;
    for (int i = 0; i < k_blocks; ++i, k += Tile::kK) {
      sm90::mbarrier_wait(&smem.empty[at.stage], at.phase ^ 1);
      uint64_t* full = &smem.full[at.stage];
      sm90::mbarrier_arrive_expect_tx(full, Layout::kBytes);
#pragma unroll
      for (int part = 0; part < Scheme::kParts; ++part) {
        unsigned char* a = Layout::a(smem.ring, at.stage, part) + place.n * kRowsA * kRowBytes;
        unsigned char* b = Layout::b(smem.ring, at.stage, part) + place.m * kRowsB * kRowBytes;
        load_share<Tile::kClusterN>(a, &source.a, full, k, part * p.a_rows + a_row, same_m);
        load_share<Tile::kClusterM>(b, &source.b, full, k, part * p.b_rows + b_row, same_n);
      }
      at.advance();
    }
  }
}

// Stores a warpgroup's rows: finished, or as they are if k was split.
template <typename Scheme, typename Tile, int kCount>
__device__ __forceinline__ void finish(const Fp32Product& p, const TileOrigin& origin, int row0,
                                       const TileExponents& exponents, int consumer,
                                       float (&acc)[kCount]) {
  const int col0 = origin.n + threadIdx.x % 4 * 2;
  const bool whole = p.splits == 1;
  float* base;
  int64_t ld;
  if (whole) {
    base = p.args.out + origin.z * p.args.out_batch;
    ld = p.args.out_row;
    exponents.wait(consumer);
    exponents.unscale<Scheme>(acc);
    if (p.args.bias) {
      const float* bias = p.args.bias + col0;
      const int columns = p.n - col0;
#pragma unroll
      for (int j = 0; j < kCount / 2; ++j) {
        const int col = j / 2 * 8 + j % 2;
        const float x = col < columns ? bias[col] : 0.0f;
        acc[j / 2 * 4 + j % 2] += x;
        acc[j / 2 * 4 + 2 + j % 2] += x;
      }
    }
    with_activation(p.args.activation, [&](auto activation) {
#pragma unroll
      for (int x = 0; x < kCount; ++x) acc[x] = activation(acc[x]);
    });
  } else {
    base = p.partial + (int64_t{origin.split} * p.args.batch + origin.z) * p.m * p.n;
    ld = p.n;
  }
  const bool pairs = ld % 2 == 0 && reinterpret_cast<uintptr_t>(base) % 8 == 0;
  const bool residual = whole && p.args.residual;
  // Column pairs loaded together; more would not fit in registers.
  constexpr int kPiece = Tile::kN % 64 == 0 ? 8 : 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = row0 + 8 * i;
    if (row >= p.m) continue;
    float* out = base + row * ld;
#pragma unroll
    for (int j0 = 0; j0 < Tile::kN / 8; j0 += kPiece) {
      if (residual) {
#pragma unroll
        for (int j = j0; j < j0 + kPiece; ++j) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const int col = min(col0 + 8 * j + c, p.n - 1);
            acc[4 * j + 2 * i + c] += residual_at(p.args, origin.z, row, col);
          }
        }
      }
#pragma unroll
      for (int j = j0; j < j0 + kPiece; ++j) {
        const int col = col0 + 8 * j;
        const float2 x{acc[4 * j + 2 * i], acc[4 * j + 2 * i + 1]};
        if (pairs && col + 1 < p.n) {
          *reinterpret_cast<float2*>(out + col) = x;
        } else {
          if (col < p.n) out[col] = x.x;
          if (col + 1 < p.n) out[col + 1] = x.y;
        }
      }
    }
  }
}

// Frees a stage in every block that loads into this one: one thread for each.
template <typename Tile>
struct Releaser {
  ProductSmem& smem;
  int thread;
  bool active;

  __device__ Releaser(ProductSmem& ring, ClusterPlace place)
      : smem(ring),
        thread(threadIdx.x % 128),
        active(thread < Tile::kCluster &&
               (thread % Tile::kClusterM == place.m || thread / Tile::kClusterM == place.n)) {}
  __device__ __forceinline__ void operator()(int stage) const {
    if (active) sm90::mbarrier_arrive_cluster(&smem.empty[stage], thread);
  }
};

// A stage's parts as the tensor core sees them. Addresses count 16 bytes; a 16-element piece of k
// is 32 bytes of the swizzled row.
template <typename Layout, typename Tile>
struct StageOperands {
  uint32_t base_a, base_b;

  __device__ StageOperands(ProductSmem& smem, int stage, int consumer)
      : base_a(sm90::wgmma_address(Layout::a(smem.ring, stage, 0) + consumer * 64 * Tile::kK * 2)),
        base_b(sm90::wgmma_address(Layout::b(smem.ring, stage, 0))) {}
  __device__ __forceinline__ uint64_t a(int part, int k) const {
    return sm90::wgmma_descriptor(base_a + (part * Layout::kPartA + k * 2) / 16);
  }
  __device__ __forceinline__ uint64_t b(int part, int k) const {
    return sm90::wgmma_descriptor(base_b + (part * Layout::kPartB + k * 2) / 16);
  }
};

// Sums of several parts' products over a tile's k, rounded every kPromote of k.
template <typename Scheme, typename Tile, int kCount>
__device__ __forceinline__ void sum_parts(ProductSmem& smem, const Releaser<Tile>& release,
                                          int consumer, int k_blocks,
                                          sm90::RingPlace<RingLayout<Scheme, Tile>::kStages>& at,
                                          float (&sum)[kCount]) {
  using Layout = RingLayout<Scheme, Tile>;
  using Mma = sm90::Wgmma<typename Scheme::Type, Tile::kN>;
  constexpr int kParts = Scheme::kParts;
  constexpr bool kCompensated = Tile::kCompensated;
  constexpr int kPromote = kCompensated ? 16 : 32;  // of k, between additions to the rounded sum
  float lead[kCount], cross[kCount];
  float pending[kCompensated ? kCount : 1];  // what is still to be added to the sum
  const int piece = k_blocks <= 8 ? 2 : 4;   // blocks of k, after which it is
#pragma unroll
  for (int i = 0; i < kCount; ++i) sum[i] = 0.0f;
#pragma unroll
  for (float& x : pending) x = 0.0f;
  int previous = -1;
  for (int block = 0; block < k_blocks; ++block) {
    sm90::mbarrier_wait(&smem.full[at.stage], at.phase);
    const StageOperands<Layout, Tile> part(smem, at.stage, consumer);
#pragma unroll
    for (int k0 = 0; k0 < Tile::kK; k0 += kPromote) {
      sm90::wgmma_fence();
#pragma unroll
      for (int k = k0; k < k0 + kPromote; k += 16) {
        Mma::run(lead, part.a(0, k), part.b(0, k), k != k0);
      }
      sm90::wgmma_commit_group();
      bool add = block != 0 || k0 != 0;
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
      sm90::wgmma_commit_group();
      sm90::wgmma_wait_group<1>();  // lead is complete, cross may run on
      sm90::wgmma_pin(lead);
      if (k0 == 0 && previous >= 0) release(previous);
#pragma unroll
      for (int i = 0; i < kCount; ++i) (kCompensated ? pending : sum)[i] += lead[i];
    }
    if constexpr (kCompensated) {
      if (block % piece == piece - 1) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          const float before = sum[i];
          sum[i] += pending[i];
          pending[i] -= sum[i] - before;  // what the sum cannot hold
        }
      }
    }
    previous = at.stage;
    at.advance();
  }
  sm90::wgmma_wait_group<0>();
  sm90::wgmma_pin(cross);
  release(previous);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    constexpr float kUnit = 1.0f / (1 << Scheme::kLowBits);
    if constexpr (kCompensated) {
      sum[i] += fmaf(cross[i], kUnit, pending[i]);
    } else {
      sum[i] = fmaf(cross[i], kUnit, sum[i]);
    }
  }
}

// Sum of one part's products, left in the tensor core: its truncation is far below the part's.
template <typename Scheme, typename Tile, int kCount>
__device__ __forceinline__ void sum_single(ProductSmem& smem, const Releaser<Tile>& release,
                                           int consumer, int k_blocks,
                                           sm90::RingPlace<RingLayout<Scheme, Tile>::kStages>& at,
                                           float (&sum)[kCount]) {
  using Mma = sm90::Wgmma<typename Scheme::Type, Tile::kN>;
  int previous = -1;
  for (int block = 0; block < k_blocks; ++block) {
    sm90::mbarrier_wait(&smem.full[at.stage], at.phase);
    const StageOperands<RingLayout<Scheme, Tile>, Tile> part(smem, at.stage, consumer);
    sm90::wgmma_fence();
#pragma unroll
    for (int k = 0; k < Tile::kK; k += 16) {
      Mma::run(sum, part.a(0, k), part.b(0, k), block != 0 || k != 0);
    }
    sm90::wgmma_commit_group();
    sm90::wgmma_wait_group<1>();  // the previous stage has been read
    if (previous >= 0) release(previous);
    previous = at.stage;
    at.advance();
  }
  sm90::wgmma_wait_group<0>();
  sm90::wgmma_pin(sum);
  release(previous);
}

template <typename Scheme, typename Tile>
__device__ __forceinline__ void consume(const Fp32Product& p, const ProductGrid& grid,
                                        ProductSmem& smem, ClusterPlace place) {
  const int consumer = __shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0) - 1;  // provably uniform
  const int thread = threadIdx.x % 128;
  const Releaser<Tile> release(smem, place);
  float sum[Tile::kN / 2];
  sm90::RingPlace<RingLayout<Scheme, Tile>::kStages> at;
  for (int unit = blockIdx.x / Tile::kCluster; unit < grid.units;
       unit += gridDim.x / Tile::kCluster) {
    const TileOrigin origin = tile_origin<Tile>(p, grid, unit, place);
    const int k_blocks = k_blocks_of(p, origin.split);
    TileExponents& exponents = smem.exponents[consumer];
    TileExponents::wait(consumer);  // those of the tile before have been read
    if (p.splits == 1) exponents.load<Tile::kN>(p, origin, origin.m + consumer * 64);
    if constexpr (Scheme::kParts == 1) {
      sum_single<Scheme, Tile>(smem, release, consumer, k_blocks, at, sum);
    } else {
      sum_parts<Scheme, Tile>(smem, release, consumer, k_blocks, at, sum);
    }
    const int row0 = origin.m + consumer * 64 + thread / 32 * 16 + thread % 32 / 4;
    finish<Scheme, Tile>(p, origin, row0, exponents, consumer, sum);
  }
}

// Fp16 parts by Scheme in tiles of Tile, bf16 parts in tiles of FullTile.
template <typename Scheme, typename Tile, typename FullTile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    fp32_product_kernel(const __grid_constant__ Fp32Product p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  static_assert(Tile::kThreads == FullTile::kThreads && Tile::kClusterM == FullTile::kClusterM &&
                Tile::kClusterN == FullTile::kClusterN);
  extern __shared__ unsigned char raw_smem[];
  ProductSmem& smem = *reinterpret_cast<ProductSmem*>(raw_smem);
  const ClusterPlace place = cluster_place<Tile>();
  if (threadIdx.x == 0) {
    for (int i = 0; i < ProductSmem::kMaxStages; ++i) {
      sm90::mbarrier_init(&smem.full[i], 1);
      sm90::mbarrier_init(&smem.empty[i],
                          Tile::kConsumers * (Tile::kClusterM + Tile::kClusterN - 1));
    }
    sm90::fence_mbarrier_init();
    sm90::prefetch_tensor_map(&p.fast.a);
    sm90::prefetch_tensor_map(&p.fast.b);
  }
  sm90::griddepcontrol_launch_dependents();
  sm90::griddepcontrol_wait();
  SplitPath path = split_path(p.a_status, p.b_status);  // also publishes the barriers
  if (path == SplitPath::kBf16 && !p.has_bf16) path = SplitPath::kExact;
  if constexpr (Tile::kCluster > 1) {
    sm90::barrier_cluster_arrive();  // the barriers of every block are ready
    sm90::barrier_cluster_wait();
  }
  if (path == SplitPath::kExact) {
    multiply_exactly<Tile::kThreads>(p.args, reinterpret_cast<ExactSmem&>(smem.ring));
  } else if (threadIdx.x < 128) {
    if constexpr (Tile::kMoveRegisters) sm90::setmaxnreg_dec<40>();
    if (threadIdx.x == 0) {
      if (path == SplitPath::kFp16) {
        produce<Scheme, Tile>(p, p.fast, smem, place);
      } else {
        produce<Bf16Scheme, FullTile>(p, p.full, smem, place);
      }
    }
    __syncwarp();
  } else {
    if constexpr (Tile::kMoveRegisters) sm90::setmaxnreg_inc<232>();
    if (path == SplitPath::kFp16) {
      consume<Scheme, Tile>(p, p.fast.grid, smem, place);
    } else {
      consume<Bf16Scheme, FullTile>(p, p.full.grid, smem, place);
    }
  }
  if constexpr (Tile::kCluster > 1) {
    sm90::barrier_cluster_arrive();  // no block leaves while another may write to it
    sm90::barrier_cluster_wait();
  }
#endif
}

}  // namespace
}  // namespace my_ops::cuda
