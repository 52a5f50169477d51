// Which float products fp32_sm90.cu accepts, with which tiles, and where their parts are in memory:
// pure host code.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "common/ceil_div.h"
#include "device.h"
#include "fp32/split_plan.h"
#include "gemm.h"
#include "gemm/costs.h"

namespace my_ops::cuda::fp32_sm90 {

inline constexpr int64_t kMinK = 96;  // from here on as accurate as a chain of float FMAs

// The shared memory is ProductSmem's; clusters have at most two blocks, which fill an SM each.
inline constexpr Needs kNeeds{.code = 90, .shared_bytes = 211 * 1024, .cluster = 2, .resident = 2};

// A cluster works on kClusterM x kClusterN tiles. Blocks in a line along n share their rows of a,
// and blocks in a line along m their columns of b; each block loads a share and multicasts it.
template <int M, int N, int ClusterM, int ClusterN>
struct Tile {
  static constexpr int kM = M, kN = N, kK = kSplitBlockK;
  static constexpr int kClusterM = ClusterM, kClusterN = ClusterN;
  static constexpr int kCluster = ClusterM * ClusterN;
  static constexpr int kClusterTileM = M * ClusterM, kClusterTileN = N * ClusterN;
  static constexpr int kConsumers = M / 64;
  static constexpr int kThreads = (kConsumers + 1) * 128;
  static constexpr int kGroupM = 2048 / kClusterTileM;  // walked together, for L2
  // As registers allow: whether sums are compensated, and whether the sums of a single product are
  // promoted.
  static constexpr bool kCompensated = N < 128, kPromoted = N < 256;
  // Accumulators need more than an even share of the registers.
  static constexpr bool kMoveRegisters = kConsumers > 1;
};

using LargeTile = Tile<128, 128, 2, 1>;
using WideTile = Tile<128, 96, 2, 1>;
using MediumTile = Tile<128, 64, 1, 2>;
using SmallTile = Tile<64, 64, 1, 1>;
using SingleTile = Tile<128, 256, 2, 1>;          // for one fp16 product per element
using SinglePromotedTile = Tile<128, 192, 2, 1>;  // for one, promoted

enum class TileChoice { kLarge, kWide, kMedium, kSmall, kSingle, kSinglePromoted };
inline constexpr const char* kTileNames[] = {"128 x 128",
                                             "128 x 96",
                                             "128 x 64",
                                             "64 x 64",
                                             "128 x 256, one product in place of three",
                                             "128 x 192, one product in place of three"};

// Clusters that run at once. Clusters of four blocks do not fit everywhere on the device; they ran
// at half the rate.
template <typename Tile>
int resident_clusters(int sm_count) {
  static_assert(Tile::kCluster <= 2);
  return sm_count / Tile::kCluster;
}

template <typename Tile>
int64_t cluster_tiles_of(const GemmProblem& p) {
  return ceil_div(p.m, Tile::kClusterTileM) * ceil_div(p.n, Tile::kClusterTileN) * p.batch;
}

inline bool fits(const GemmProblem& p) {
  constexpr int64_t kLimit = int64_t{1} << 29;  // row indices of three parts stay within int
  const bool sizes = p.batch > 0 && p.m > 0 && p.n > 0 && p.k > 0 && p.k < (1 << 24) &&
                     p.m < kLimit && p.n < kLimit && p.batch < kLimit && p.batch * p.m < kLimit &&
                     p.batch * p.n < kLimit;
  return sizes && p.out_col == 1 && p.batch * ceil_div(p.m, 64) * ceil_div(p.n, 64) < kLimit;
}

// A product's multiply-adds, and the elements of each operand whose split counts. That of a 16-bit
// operand does not: it moves fewer bytes than the conversion to float that every other kernel
// needs.
struct Size {
  double work, a, b;
  bool a_strided, b_strided;  // k is not contiguous
};

inline Size size_of(const GemmProblem& p) {
  const auto batch = static_cast<double>(p.batch), k = static_cast<double>(p.k);
  return {.work = batch * p.m * p.n * k,
          .a = p.half_a ? 0 : (p.a_batch == 0 ? 1 : batch) * p.m * k,
          .b = p.packed || p.half_b ? 0 : (p.b_batch == 0 ? 1 : batch) * p.n * k,
          .a_strided = p.a_col != 1,
          .b_strided = p.b_row != 1 && !p.packed};
}

// ---- which products ----

// Whether it was measured to be faster than the library's float GEMM. What the tensor cores save,
// in multiply-adds of the library, must be more than the cost of the launches and of splitting each
// element. Splitting costs more if k is not contiguous, and a second launch if k is also long.
inline bool pays(const GemmProblem& p, const GemmCosts::Fp32Sm90& costs) {
  if (p.packed && p.batch == 1 && p.m >= costs.packed_min_rows && p.n >= costs.packed_min_weight &&
      p.k >= costs.packed_min_weight) {
    return true;
  }
  if (std::min(p.m, p.n) < costs.min_side || p.k < costs.min_k) return false;
  const Size size = size_of(p);
  const bool two_passes = (size.a_strided || size.b_strided) && p.k > fp32_split::kMaxColumnK;
  const double a = size.a_strided ? costs.strided_element : costs.element;
  const double b = size.b_strided ? costs.strided_element : costs.element;
  return size.work >= costs.launches + (two_passes ? costs.second_pass : 0) + size.a * a +
                          size.b * b + p.preparation;
}

// Whether one product per element is faster than three at this size.
inline bool use_single(const GemmProblem& p, const GemmCosts::Fp32Sm90& costs) {
  return p.precision == Precision::kHigh && size_of(p).work >= costs.single_min_work;
}

// Whether all three matrices are aligned to 16-byte vectors along their contiguous index.
inline bool library_vectorizes(const GemmProblem& p) {
  const auto whole = [](bool aligned, int64_t batch, int64_t row, int64_t col) {
    return aligned && batch % 4 == 0 && (row == 1 ? col : row) % 4 == 0;
  };
  return whole(p.a_aligned, p.a_batch, p.a_row, p.a_col) &&
         whole(p.b_aligned, p.b_batch, p.b_row, p.b_col) &&
         whole(p.out_aligned, p.out_batch, p.out_row, p.out_col);
}

// Whether one fp16 product is faster than the library's TF32. The library needs no split but
// aligned rows, and is half as fast if k is contiguous in neither operand.
inline bool pays_beside_tf32(const GemmProblem& p, const GemmCosts::Fp32Sm90& costs) {
  if (std::min(p.m, p.n) < costs.min_side || p.k < costs.min_k) return false;
  if (!use_single(p, costs)) return false;
  if (!library_vectorizes(p)) return true;
  const Size size = size_of(p);
  const bool strided = p.a_col != 1 && p.b_row != 1;
  return size.work * (strided ? costs.tf32_strided_gain : 1) >=
         costs.tf32_launches + costs.tf32_element * (size.a + size.b);
}

// Why this kernel does not accept the product, or null if it does. It accepts a product if it can
// run, and if it was measured to be faster than the library at such sizes or the library is too
// inaccurate.
inline const char* refusal(const GemmProblem& p, const DeviceFacts& device,
                           const GemmCosts::Fp32Sm90& costs) {
  if (!device.hopper_code || !device.runs(kNeeds)) return "needs Hopper and code for 9.0a";
  if (!fits(p)) return "sizes or the layout of the output are beyond what it can index";
  if (p.k < kMinK) return "k is too short for its accuracy";
  if (p.library_too_inaccurate()) return nullptr;
  if (p.library_has_fast_tf32()) {
    return pays_beside_tf32(p, costs) ? nullptr : "the library's TF32 is as fast";
  }
  return pays(p, costs) ? nullptr : "too small to pay for splitting the operands";
}

// Whether products gain from a packed b. This is decided for a product with many rows, which gains
// most. Products too small to gain ignore the packed b.
inline bool packs(const PackArgs& pack, const DeviceFacts& device,
                  const GemmCosts::Fp32Sm90& costs) {
  GemmProblem product{};
  product.batch = pack.batch, product.n = pack.n, product.k = pack.k;
  product.m = pack.n > pack.k ? pack.n : pack.k;
  product.a_row = pack.k, product.a_col = 1;
  product.out_row = pack.n, product.out_col = 1;
  product.packed = true;
  return refusal(product, device, costs) == nullptr;
}

// ---- in which tiles ----

// If its tiles leave SMs idle, or k is long, the library may slice k; its errors show this. Its
// sums are then shorter, and those of the largest tiles here, which are neither compensated nor
// promoted, may be less accurate.
inline bool library_may_cut_k(const GemmProblem& p, int sm_count) {
  constexpr int64_t kTile = 128, kMaxWaves = 6, kLongK = 2048;
  constexpr double kIdle = 0.05;
  const int64_t tiles = p.batch * ceil_div(p.m, kTile) * ceil_div(p.n, kTile);
  const int64_t waves = ceil_div(tiles, int64_t{sm_count}), room = waves * sm_count;
  const bool idle = static_cast<double>(room - tiles) > kIdle * static_cast<double>(room);
  return waves <= kMaxWaves && (idle || p.k > waves * kLongK);
}

// How a tile would cover the product: the number of k-slices, if the output alone leaves much of
// the device idle, and the estimated cost, by whole waves.
struct Cover {
  int slices;
  double cost;  // in elements of a large tile's output times k-blocks; 15,000 take 1 us
};

inline constexpr int64_t kMinBlocks = 8, kMaxSlices = 64;  // k-blocks per slice; slices

// slowdown: of the tile relative to the large one, per unit of area.
template <typename Tile>
double cost_of_slices(const GemmProblem& p, int64_t slices, int sm_count, double slowdown,
                      const GemmCosts::Fp32Sm90& costs) {
  const int64_t blocks = ceil_div(ceil_div(p.k, kSplitBlockK), slices);
  const int64_t waves =
      ceil_div(cluster_tiles_of<Tile>(p) * slices, resident_clusters<Tile>(sm_count));
  const double cost = slowdown * Tile::kM * Tile::kN * static_cast<double>(waves * blocks);
  if (slices == 1) return cost;
  return cost + costs.reduce +
         costs.reduce_element * static_cast<double>(p.batch * p.m * p.n * slices);
}

template <typename Tile>
Cover cover(const GemmProblem& p, int sm_count, double slowdown, const GemmCosts::Fp32Sm90& costs) {
  constexpr int64_t kMoreWaves = 2;
  const int64_t k_blocks = ceil_div(p.k, kSplitBlockK);
  const int64_t resident = resident_clusters<Tile>(sm_count),
                cluster_tiles = cluster_tiles_of<Tile>(p);
  const int64_t fewest = ceil_div(cluster_tiles, resident);
  Cover best{};
  for (int64_t waves = fewest; waves <= fewest + kMoreWaves; ++waves) {
    const int64_t most =
        std::min({waves * resident / cluster_tiles, k_blocks / kMinBlocks, kMaxSlices});
    const int64_t blocks = ceil_div(k_blocks, std::max<int64_t>(most, 1));
    const int64_t slices = ceil_div(k_blocks, blocks);
    const double cost = cost_of_slices<Tile>(p, slices, sm_count, slowdown, costs);
    if (waves == fewest || cost < (1 - costs.more_waves_min_gain) * best.cost) {
      best = {static_cast<int>(slices), cost};
    }
  }
  return best;
}

// With slices so short that their sums need no compensation to be as accurate as the library's: for
// a shorter k, the library's own slices are short. None if k needs more than kMaxSlices.
inline constexpr int64_t kShortSlicesMinK = 8192;
template <typename Tile>
Cover cover_in_short_slices(const GemmProblem& p, int sm_count, const GemmCosts::Fp32Sm90& costs) {
  constexpr int64_t kShort = 16;  // k-blocks
  const int64_t k_blocks = ceil_div(p.k, kSplitBlockK);
  Cover best{0, std::numeric_limits<double>::infinity()};
  const int64_t fewest = ceil_div(k_blocks, kShort);
  for (int64_t wanted = fewest; wanted <= std::min(2 * fewest, kMaxSlices); ++wanted) {
    const int64_t blocks = ceil_div(k_blocks, wanted), slices = ceil_div(k_blocks, blocks);
    if (blocks < kMinBlocks && slices > 1) break;
    const double cost = cost_of_slices<Tile>(p, slices, sm_count, 1.0, costs);
    if (cost < best.cost) best = {static_cast<int>(slices), cost};
  }
  return best;
}

// The area that a tile's whole waves cover.
template <typename Tile>
double wave_area(const GemmProblem& p, int sm_count) {
  return Tile::kM * Tile::kN *
         static_cast<double>(
             ceil_div(cluster_tiles_of<Tile>(p), resident_clusters<Tile>(sm_count)));
}

// Whether the sums of one product per element are promoted, for accuracy or because tiles of that
// size leave fewer SMs idle.
inline bool promotes(const GemmProblem& p, int sm_count, double slowdown) {
  return library_may_cut_k(p, sm_count) || !library_vectorizes(p) ||
         slowdown * wave_area<SinglePromotedTile>(p, sm_count) < wave_area<SingleTile>(p, sm_count);
}

// Whether k is long, and contiguous in neither operand.
inline bool is_weight_gradient(const GemmProblem& p) {
  constexpr int64_t kLimit = int64_t{1} << 29;  // indices of both parts' k stay within int
  return !p.packed && !p.mixed() && p.a_row == 1 && p.a_col != 1 && p.b_col == 1 && p.b_row != 1 &&
         p.k > fp32_split::kMaxColumnK && p.batch * p.k < kLimit;
}

struct Choice {
  TileChoice tile;
  int slices;
};

inline Choice choose_tile(const GemmProblem& p, int sm_count, const GemmCosts::Fp32Sm90& costs) {
  if (use_single(p, costs)) {
    const bool promoted = promotes(p, sm_count, costs.promoted_slowdown);
    return {promoted ? TileChoice::kSinglePromoted : TileChoice::kSingle, 1};
  }
  const bool compensate = p.precision == Precision::kHighest && library_may_cut_k(p, sm_count);
  const bool short_slices = compensate && is_weight_gradient(p) && p.k >= kShortSlicesMinK;
  const Cover large = short_slices ? cover_in_short_slices<LargeTile>(p, sm_count, costs)
                                   : cover<LargeTile>(p, sm_count, 1.0, costs);
  const Cover wide = cover<WideTile>(p, sm_count, costs.wide_slowdown, costs);
  const Cover medium = cover<MediumTile>(p, sm_count, costs.medium_slowdown, costs);
  const Cover small = cover<SmallTile>(p, sm_count, costs.small_slowdown, costs);
  const double compensated = std::min({wide.cost, medium.cost, small.cost});
  if (large.cost <= compensated && (!compensate || short_slices)) {
    return {TileChoice::kLarge, large.slices};
  }
  if (wide.cost == compensated) return {TileChoice::kWide, wide.slices};
  if (medium.cost == compensated) return {TileChoice::kMedium, medium.slices};
  return {TileChoice::kSmall, small.slices};
}

// Whether the plan has one product per element.
inline bool is_single(const GemmPlan& plan) {
  const auto tile = static_cast<TileChoice>(plan.tile);
  return tile == TileChoice::kSingle || tile == TileChoice::kSinglePromoted;
}

// Whether the bf16 split is launched, for full-range data; otherwise fp32 FMAs are the fallback.
inline bool splits_bf16(const GemmProblem& p, int slices, const GemmCosts::Fp32Sm90& costs) {
  return size_of(p).work >= costs.bf16_min_work || slices > 1;
}

// Whether both operands are split in one pass although k is long, and contiguous in neither.
inline bool splits_along_rows(const GemmProblem& p, const GemmPlan& plan) {
  return is_weight_gradient(p) && !is_single(plan);
}

// ---- where the parts lie ----

// Allocates arrays in the workspace. Without a base it only counts bytes.
class Arena {
 public:
  explicit Arena(void* base) : base_(static_cast<char*>(base)) {}

  template <typename T>
  T* take(int64_t count) {
    constexpr size_t kAlign = 256;
    T* array = base_ ? reinterpret_cast<T*>(base_ + used_) : nullptr;
    used_ += (static_cast<size_t>(count) * sizeof(T) + kAlign - 1) / kAlign * kAlign;
    return array;
  }
  int64_t used() const { return static_cast<int64_t>(used_); }

 private:
  char* base_;
  size_t used_ = 0;
};

// A packed operand: the results of its fp16 split.
struct Packed {
  uint8_t* status;
  uint16_t* parts;
  int32_t* exponent;

  Packed(Arena* arena, int64_t rows, int64_t ld)
      : status(arena->take<uint8_t>(1)),
        parts(arena->take<uint16_t>(2 * rows * ld)),
        exponent(arena->take<int32_t>(rows)) {}
};

// The memory that the fp16 split of an operand needs besides its parts.
inline void place_scratch(Arena* arena, SplitOperand* op) {
  const int64_t rows = int64_t{op->batch} * op->rows;
  op->status = arena->take<uint8_t>(op->status_count);
  if (op->mode == SplitMode::kSlices || op->mode == SplitMode::kSampled) {
    op->stats = arena->take<uint32_t>(3 * op->slices * rows);
    op->tiny = arena->take<uint32_t>(2 * rows);
  }
  if (op->mode == SplitMode::kSampled) {
    op->guess = arena->take<int32_t>(rows);
    op->unclean = arena->take<uint8_t>(op->status_count);
  }
}

// The split of a product's operands, and the rest of its workspace.
struct Layout {
  Split split;
  float* partial;  // [slices][batch][m][n] partial sums, if slices > 1
  int64_t bytes;
};

// Pointers are null without a workspace, and those of the operands always.
inline Layout lay_out(const GemmProblem& p, const GemmPlan& plan, void* workspace,
                      const void* packed_b) {
  const auto operand = [&](bool half, int64_t batch_stride, int64_t row_stride, int64_t k_stride,
                           int64_t rows) {
    SplitOperand op{};
    op.elements = !half                ? Elements::kFloat
                  : p.half_is_bfloat16 ? Elements::kBFloat16
                                       : Elements::kHalf;
    op.batch_stride = batch_stride, op.row_stride = row_stride, op.k_stride = k_stride;
    op.batch = batch_stride == 0 ? 1 : static_cast<int>(p.batch);
    op.rows = static_cast<int>(rows), op.k = static_cast<int>(p.k);
    return op;
  };
  Layout layout{};
  Split& split = layout.split;
  split.operand[0] = operand(p.half_a, p.a_batch, p.a_row, p.a_col, p.m);
  split.operand[1] = operand(p.half_b, p.b_batch, p.b_col, p.b_row, p.n);
  split.fp16_parts = is_single(plan) ? 1 : 2;
  split.along_rows = splits_along_rows(p, plan);
  plan_split(&split, plan.device.sm_count);
  if (p.packed) skip_operand(&split, 1);

  Arena arena(workspace);
  for (SplitOperand& op : split.operand) {
    const int64_t rows = int64_t{op.batch} * op.rows;
    if (&op == &split.operand[1] && p.packed) {
      Arena given(const_cast<void*>(packed_b));
      const Packed packed(&given, rows, op.ld);
      op.parts = packed.parts;
      op.exponent = packed.exponent;
      op.status = packed.status;
      op.bf16_parts = plan.bf16_split ? arena.take<uint16_t>(3 * rows * op.ld) : nullptr;
    } else {
      const int64_t fp16_rows = split.along_rows ? int64_t{op.batch} * op.row_ld : rows;
      op.parts = op.bf16_parts = arena.take<uint16_t>(
          std::max(op.fp16_parts * fp16_rows * op.ld, plan.bf16_split ? 3 * rows * op.ld : 0));
      op.exponent = arena.take<int32_t>(rows);
      place_scratch(&arena, &op);
    }
  }
  const int64_t outputs = p.batch * p.m * p.n;
  layout.partial = plan.slices > 1 ? arena.take<float>(plan.slices * outputs) : nullptr;
  layout.bytes = arena.used();
  return layout;
}

// Plans the product if this kernel accepts it; otherwise returns why it does not.
inline const char* plan(const GemmProblem& p, const GemmCosts::Fp32Sm90& costs, GemmPlan* plan) {
  if (const char* why = refusal(p, plan->device, costs)) return why;
  const auto [tile, slices] = choose_tile(p, plan->device.sm_count, costs);
  plan->kernel = GemmKernel::kFp32Sm90;
  plan->tile = static_cast<int>(tile);
  plan->slices = slices;
  plan->bf16_split = splits_bf16(p, slices, costs);
  plan->workspace = lay_out(p, *plan, nullptr, nullptr).bytes;
  return nullptr;
}

}  // namespace my_ops::cuda::fp32_sm90
