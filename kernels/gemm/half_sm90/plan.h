// Which 16-bit products half_sm90.cu accepts, and with which tiles: pure host code.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/ceil_div.h"
#include "device.h"
#include "gemm.h"
#include "gemm/costs.h"

namespace my_ops::cuda::half_sm90 {

// The blocks of a cluster are in a line along m and share their columns of b; each block loads a
// share and multicasts it. Epilogue warps need aligned rows.
template <int N, int Cluster, int EpilogueWarps = 0>
struct HalfTile {
  static constexpr int kM = 128, kN = N, kK = 64;
  static constexpr int kCluster = Cluster, kClusterM = Cluster, kClusterN = 1;
  static constexpr int kClusterTileM = kM * Cluster, kClusterTileN = N;
  static constexpr int kConsumers = kM / 64;
  static constexpr int kThreads = (kConsumers + 1) * 128;
  static constexpr int kGroupM = 2048 / kClusterTileM;  // walked together, for L2
  static constexpr int kBytesA = kM * kK * 2, kBytesB = kN * kK * 2;
  static constexpr int kStageBytes = kBytesA + kBytesB;
  static constexpr int kEpilogueWarps = EpilogueWarps;       // warps in addition to the producer's
  static constexpr bool kDeferred = EpilogueWarps > 0;       // these warps do the tile's epilogue
  static constexpr int kSubtiles = kDeferred ? kN / 64 : 2;  // staged at a time by each warp
  static constexpr int kStages = (kDeferred ? 160 : 192) * 1024 / kStageBytes;
  // The size of HalfSmem: ring, subtiles and barriers, rounded up to whole repeats of the swizzle.
  static constexpr int kSharedBytes =
      (kStages * (kStageBytes + 16) + kConsumers * (4 * kSubtiles * 2048 + 16) + 1023) / 1024 *
      1024;
  // Accumulators and epilogue need more than an even share of the registers.
  static constexpr bool kMoveRegisters = N > 64;
  static constexpr int kFewRegisters = kDeferred ? 88 : 40;
  static constexpr int kManyRegisters = kDeferred ? 208 : 232;
};

using LargeTile = HalfTile<256, 2>;
using DeferredTile = HalfTile<256, 2, 3>;  // as large, with epilogue warps
using WideTile = HalfTile<192, 2>;
using MediumTile = HalfTile<128, 2>;
using SmallTile = HalfTile<64, 1>;

// The needs of the most demanding tile, whose blocks fill an SM each.
inline constexpr Needs kNeeds{
    .code = 90,
    .shared_bytes =
        std::max({LargeTile::kSharedBytes, DeferredTile::kSharedBytes, WideTile::kSharedBytes,
                  MediumTile::kSharedBytes, SmallTile::kSharedBytes}),
    .cluster = LargeTile::kCluster,
    .resident = LargeTile::kCluster};

// An operand [batch, rows, columns]; the columns are contiguous if any index is.
struct Operand {
  const uint16_t* x;
  int64_t batch, rows, columns;
  int64_t batch_stride, row_stride, column_stride;
  int64_t ld;      // of the padded copy
  uint16_t* copy;  // [batch, rows, ld], or null: read in place
  bool aligned;    // it starts at a multiple of 16 bytes
  bool repeats;    // the same matrix for every batch
  bool swapped;    // rows are k
};

inline bool fits(const GemmProblem& p) {
  constexpr int64_t kLimit = int64_t{1} << 30;
  const auto small = [](int64_t x) { return x > 0 && x < kLimit; };
  return small(p.batch) && small(p.m) && small(p.n) && small(p.k) && p.out_col == 1 &&
         static_cast<double>(p.batch) * ceil_div(p.m, 128) * ceil_div(p.n, 64) < kLimit;
}

// Whether TMA can read it in place: pitches are multiples of 16 bytes, below 2^40 bytes.
inline bool in_place(const Operand& op) {
  constexpr int64_t kMaxPitch = int64_t{1} << 39;
  const auto pitch = [](int64_t stride) {
    return stride > 0 && stride % 8 == 0 && stride < kMaxPitch;
  };
  return op.column_stride == 1 && op.aligned && (op.rows == 1 || pitch(op.row_stride)) &&
         (op.batch == 1 || pitch(op.batch_stride));
}

// Whether TMA can store the output. n must be a multiple of 8 too, because TMA writes 16 bytes even
// if a row ends within them.
inline bool tma_can_store(const GemmProblem& p) {
  return p.n % 8 == 0 && p.out_aligned && p.out_row % 8 == 0 &&
         (p.batch == 1 || p.out_batch % 8 == 0);
}

// Whether the residual, if any, can be read in vectors.
inline bool vector_residual(const GemmProblem& p) {
  return !p.has_residual || (p.residual_aligned && p.residual_col == 1 && p.residual_row % 8 == 0 &&
                             (p.batch == 1 || p.residual_batch % 8 == 0));
}

// x: [batch][outer][k]. The two indices are swapped if that makes the contiguous one the last.
inline Operand make_operand(bool aligned, int64_t batch, int64_t outer, int64_t k,
                            int64_t batch_stride, int64_t outer_stride, int64_t k_stride) {
  Operand op{};
  op.aligned = aligned;
  op.repeats = batch_stride == 0;
  op.batch = op.repeats ? 1 : batch;
  op.batch_stride = batch_stride;
  op.swapped = k_stride != 1 && outer_stride == 1;
  op.rows = op.swapped ? k : outer;
  op.columns = op.swapped ? outer : k;
  op.row_stride = op.swapped ? k_stride : outer_stride;
  op.column_stride = op.swapped ? outer_stride : k_stride;
  op.ld = ceil_div(op.columns, 8) * 8;
  return op;
}

// Bytes of the padded copies; sets their addresses if there is a workspace.
inline int64_t place(Operand (&operands)[2], void* workspace) {
  int64_t used = 0;
  for (Operand& op : operands) {
    if (in_place(op)) continue;
    if (workspace) op.copy = reinterpret_cast<uint16_t*>(static_cast<char*>(workspace) + used);
    used += ceil_div(op.batch * op.rows * op.ld * 2, 256) * 256;
  }
  return used;
}

inline void make_operands(const GemmProblem& p, Operand (&operands)[2]) {
  operands[0] = make_operand(p.a_aligned, p.batch, p.m, p.k, p.a_batch, p.a_row, p.a_col);
  operands[1] = make_operand(p.b_aligned, p.batch, p.n, p.k, p.b_batch, p.b_col, p.b_row);
}

// Bytes of the padded copies.
inline int64_t workspace(const GemmProblem& p) {
  Operand operands[2];
  make_operands(p, operands);
  return place(operands, nullptr);
}

// Estimated time in us, by whole waves of tiles. block_us: of one k-block of one tile.
template <typename Tile>
double tile_cost(const GemmProblem& p, int sm_count, double block_us, double end_us) {
  const int64_t cluster_tiles =
      ceil_div(p.m, Tile::kClusterTileM) * ceil_div(p.n, Tile::kClusterTileN) * p.batch;
  const double waves = static_cast<double>(ceil_div(cluster_tiles, sm_count / Tile::kCluster));
  return waves * (static_cast<double>(ceil_div(p.k, 64)) * block_us + end_us);
}

enum class TileChoice { kLarge, kDeferred, kWide, kMedium, kSmall };
inline constexpr const char* kTileNames[] = {"128 x 256", "128 x 256, with epilogue warps",
                                             "128 x 192", "128 x 128", "128 x 64"};

// The tile that finishes first.
inline TileChoice choose_tile(const GemmProblem& p, int sm_count,
                              const GemmCosts::HalfSm90& costs) {
  const double large = tile_cost<LargeTile>(p, sm_count, costs.large_us, costs.end_us);
  const double wide = tile_cost<WideTile>(p, sm_count, costs.wide_us, costs.end_us);
  const double medium = tile_cost<MediumTile>(p, sm_count, costs.medium_us, costs.end_us);
  const double small = tile_cost<SmallTile>(p, sm_count, costs.small_us, costs.end_us);
  const double best = std::min({large, wide, medium, small});
  if (best == large) {
    // A block with a single tile has no next one to overlap its epilogue with.
    const bool single =
        ceil_div(p.m, LargeTile::kM) * ceil_div(p.n, LargeTile::kN) * p.batch <= sm_count;
    const bool vectors = tma_can_store(p) && vector_residual(p);
    const bool defers = p.has_activation_or_residual() && vectors && !single;
    return defers ? TileChoice::kDeferred : TileChoice::kLarge;
  }
  if (best == wide) return TileChoice::kWide;
  return best == medium ? TileChoice::kMedium : TileChoice::kSmall;
}

// Whether the epilogue warps keep up with the products and the last wave leaves few SMs idle.
inline bool defers_well(const GemmProblem& p, int sm_count, TileChoice tile,
                        const GemmCosts::HalfSm90& costs) {
  const bool slow =
      p.activation == Activation::kGelu || (p.activation != Activation::kNone && p.has_residual);
  if (p.k < (slow ? costs.epilogue_warps_min_k_slow : costs.epilogue_warps_min_k)) return false;
  if (tile != TileChoice::kDeferred) return false;
  const int64_t clusters = sm_count / DeferredTile::kCluster;
  const int64_t cluster_tiles =
      ceil_div(p.m, DeferredTile::kClusterTileM) * ceil_div(p.n, DeferredTile::kClusterTileN);
  const int64_t room = ceil_div(cluster_tiles, clusters) * clusters * DeferredTile::kClusterTileM *
                       DeferredTile::kClusterTileN;
  return static_cast<double>(p.m * p.n) >=
         costs.epilogue_warps_min_share * static_cast<double>(room);
}

// Whether the library is to apply the whole epilogue itself. With few rows it sums slices of a long
// k in 16 bits then, which a plain product of the same sizes does not. With k = 0 ATen omits the
// activation.
inline bool library_fuses(const GemmProblem& p) {
  constexpr int64_t kFewestRows = 64, kLongK = 1024;
  return p.linear && p.library_gelu && p.activation == Activation::kGeluTanh && !p.has_residual &&
         p.k > 0 && (p.m >= kFewestRows || p.k <= kLongK);
}

// Why the library was measured to be as fast or faster, or null if it was not. This kernel gains on
// unaligned rows, for which the library does not use Hopper's instructions (though the library
// slices a long k, and copies of operands cost a launch and their bytes). It also gains on products
// with an epilogue for which the library needs a second launch: small ones, where the launch costs
// more than the library's better tiles gain, and large ones, where the epilogue is hidden.
inline const char* loses(const GemmProblem& p, int sm_count, TileChoice tile,
                         const GemmCosts::HalfSm90& costs) {
  const bool copied = workspace(p) > 0;
  if (copied || !tma_can_store(p)) {
    const GemmCosts::HalfSm90::Unaligned& sizes = copied ? costs.copied : costs.in_place;
    const int64_t tiles = ceil_div(p.m, SmallTile::kM) * ceil_div(p.n, SmallTile::kN) * p.batch;
    const bool gains = std::min({p.m, p.n, p.k}) >= sizes.min_size && tiles >= sizes.min_tiles &&
                       p.k <= sizes.max_k_per_tile * tiles;
    return gains ? nullptr : "rows are unaligned, but there are too few tiles for so long a k";
  }
  if (p.batch != 1 || !p.has_activation_or_residual()) {
    return "the library is as fast at a plain product of aligned rows";
  }
  if (library_fuses(p)) return "the library has the activation in its own epilogue";
  if (p.m * p.n >= costs.epilogue_max_outputs) {
    return defers_well(p, sm_count, tile, costs) ? nullptr
                                                 : "its epilogue warps would hold up the products";
  }
  const bool small = std::min(p.m, p.n) >= costs.epilogue_min_side && p.k <= costs.epilogue_max_k;
  return small ? nullptr : "the library's tiles gain more than a second launch costs";
}

// Plans the product if this kernel accepts it; otherwise returns why it does not.
inline const char* plan(const GemmProblem& p, const GemmCosts::HalfSm90& costs, GemmPlan* plan) {
  const DeviceFacts& device = plan->device;
  if (!device.hopper_code || !device.runs(kNeeds)) return "needs Hopper and code for 9.0a";
  if (!fits(p)) return "sizes or the layout of the output are beyond what it can index";
  const TileChoice tile = choose_tile(p, device.sm_count, costs);
  if (const char* why = loses(p, device.sm_count, tile, costs)) return why;
  plan->kernel = GemmKernel::kHalfSm90;
  plan->tile = static_cast<int>(tile);
  plan->workspace = workspace(p);
  return nullptr;
}

}  // namespace my_ops::cuda::half_sm90
