// Which float products fp32_narrow_sm90.cu accepts, and where its workspace is: pure host code.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/ceil_div.h"
#include "device.h"
#include "fp32/split_plan.h"
#include "gemm.h"
#include "gemm/costs.h"
#include "gemm/fp32_sm90/plan.h"

namespace my_ops::cuda::fp32_narrow {

// A cluster of two blocks takes 2 x kM rows of the wide operand and kN columns.
inline constexpr int kM = 128, kN = 64, kK = 64, kCluster = 2;
inline constexpr int kSplitColumns = 32;  // of a block of the split

inline constexpr Needs kNeeds{.code = 90, .shared_bytes = 225 * 1024, .cluster = 2, .resident = 2};

inline constexpr int64_t kMinK = 1024;  // for a shorter one, sums of 16 of k are too long

// The operand with many rows, which is read as it is: a, or b if the product is transposed. The
// other operand, of floats, is narrow.
struct Wide {
  bool is_b;
  Elements elements;
  bool starts_aligned, narrow_is_float;
  int64_t rows, columns;  // of the output, whose columns are the narrow operand's
  int64_t row_stride, k_stride;
  int64_t column_stride, narrow_k_stride;

  bool k_fast() const { return k_stride == 1; }
  int64_t ld() const { return k_fast() ? row_stride : k_stride; }
  int element_bytes() const { return elements == Elements::kFloat ? 4 : 2; }
  // Whether TMA can read it.
  bool aligned() const {
    return starts_aligned && (row_stride == 1 || k_stride == 1) && ld() > 0 &&
           ld() * element_bytes() % 16 == 0 && ld() < (int64_t{1} << 36);
  }
};

inline Wide wide_of(const GemmProblem& p) {
  const auto elements = [&](bool half) {
    if (!half) return Elements::kFloat;
    return p.half_is_bfloat16 ? Elements::kBFloat16 : Elements::kHalf;
  };
  if (p.m >= p.n) {
    return {.is_b = false,
            .elements = elements(p.half_a),
            .starts_aligned = p.a_aligned,
            .narrow_is_float = !p.half_b,
            .rows = p.m,
            .columns = p.n,
            .row_stride = p.a_row,
            .k_stride = p.a_col,
            .column_stride = p.b_col,
            .narrow_k_stride = p.b_row};
  }
  return {.is_b = true,
          .elements = elements(p.half_b),
          .starts_aligned = p.b_aligned,
          .narrow_is_float = !p.half_a,
          .rows = p.n,
          .columns = p.m,
          .row_stride = p.b_col,
          .k_stride = p.b_row,
          .column_stride = p.a_row,
          .narrow_k_stride = p.a_col};
}

inline int64_t cluster_tiles(const Wide& wide) {
  return ceil_div(wide.rows, int64_t{kM * kCluster}) * ceil_div(wide.columns, int64_t{kN});
}

// The narrow operand's parts, and the sums of k-slices.
struct Layout {
  int64_t ld, padded_columns;             // of the parts: [3][padded_columns][ld]
  int64_t k_blocks, groups;               // ranges: [k_blocks][groups]
  int64_t tiles_n;                        // errors: [slices][tiles_n][rows]
  int64_t ranges, partial, error, bytes;  // offsets of bytes
};

inline Layout lay_out(const Wide& wide, int64_t k, int slices) {
  constexpr int64_t kAlign = 256, kParts = 3, kRangeBytes = 8;
  Layout at{};
  at.k_blocks = ceil_div(k, int64_t{kK});
  at.ld = at.k_blocks * kK;
  at.tiles_n = ceil_div(wide.columns, int64_t{kN});
  at.padded_columns = at.tiles_n * kN;
  at.groups = at.padded_columns / kSplitColumns;
  const auto place = [&](int64_t bytes) {
    const int64_t begin = at.bytes;
    at.bytes += ceil_div(bytes, kAlign) * kAlign;
    return begin;
  };
  place(kParts * at.padded_columns * at.ld * 2);
  at.ranges = place(at.k_blocks * at.groups * kRangeBytes);
  if (slices > 1) {
    at.partial = place(slices * wide.rows * wide.columns * 4);
    at.error = place(slices * at.tiles_n * wide.rows * 4);
  }
  return at;
}

inline int choose_slices(const Wide& wide, int64_t k, int sm_count) {
  constexpr int64_t kMinBlocks = 4, kMaxSlices = 64;  // k-blocks per slice; slices
  const int64_t tiles = cluster_tiles(wide), resident = sm_count / kCluster;
  const int64_t k_blocks = ceil_div(k, int64_t{kK});
  const int64_t most = std::min({resident / tiles, k_blocks / kMinBlocks, kMaxSlices});
  return static_cast<int>(ceil_div(k_blocks, ceil_div(k_blocks, std::max<int64_t>(most, 1))));
}

// What kernels cost, in multiply-adds of a library: launches, waves of tiles, and multiply-adds of
// so much each.
inline double cost(double waves, double work, double each, const GemmCosts::Fp32Narrow& costs) {
  return costs.launches + costs.end * waves + work * each;
}

// Here, with tiles in whole waves.
inline double cost_here(const Wide& wide, int64_t k, int slices, int sm_count, double each,
                        const GemmCosts::Fp32Narrow& costs) {
  const int64_t resident = sm_count / kCluster;
  const int64_t waves = ceil_div(cluster_tiles(wide) * slices, resident);
  const int64_t k_blocks = ceil_div(ceil_div(k, int64_t{kK}), int64_t{slices});
  const double work = static_cast<double>(waves) * static_cast<double>(resident * k_blocks) *
                      (kM * kCluster * kN * kK);
  return cost(static_cast<double>(waves), work, each, costs);
}

// Of operands that are split beforehand.
inline double cost_of_split(const GemmProblem& p, double each, const GemmCosts::Fp32Narrow& costs) {
  const double elements =
      static_cast<double>(p.m) * p.k + (p.packed ? 0.0 : static_cast<double>(p.n) * p.k);
  return elements * costs.split_element + cost(1, fp32_sm90::size_of(p).work, each, costs);
}

// A 16-bit operand is converted first.
inline double cost_of_library(const GemmProblem& p, const Wide& wide,
                              const GemmCosts::Fp32Narrow& costs) {
  const double conversion =
      p.mixed() ? costs.conversion * static_cast<double>(wide.rows) * p.k : 0.0;
  return conversion + fp32_sm90::size_of(p).work;
}

// Plans the product if this kernel accepts it; otherwise returns why it does not. sm90_accepts:
// whether fp32_sm90 would.
inline const char* plan(const GemmProblem& p, const GemmCosts::Fp32Narrow& costs, bool sm90_accepts,
                        GemmPlan* plan) {
  constexpr int64_t kMaxRows = int64_t{1} << 29, kMaxK = int64_t{1} << 24;
  const DeviceFacts& device = plan->device;
  if (!device.hopper_code || !device.runs(kNeeds)) return "needs Hopper and code for 9.0a";
  const Wide wide = wide_of(p);
  if (p.batch != 1 || !wide.narrow_is_float)
    return "supports no batch, and a narrow operand in float32 only";
  if (!wide.aligned()) return "needs aligned rows or columns of the larger operand";
  if (wide.rows >= kMaxRows || p.k >= kMaxK || cluster_tiles(wide) >= kMaxRows) {
    return "sizes are beyond what it can index";
  }
  if (wide.columns > costs.max_columns) return "neither m nor n is small";
  if (p.k < kMinK) return "k is too short for its accuracy";
  if (wide.is_b && (p.has_bias || p.has_activation_or_residual())) {
    return "has no epilogue where b is the larger operand";
  }
  if (p.library_has_fast_tf32()) return "the library's TF32 is as fast";
  const int slices = choose_slices(wide, p.k, device.sm_count);
  const auto& product = p.mixed() ? costs.halves : costs.floats;
  const double own = cost_here(wide, p.k, slices, device.sm_count, product.here, costs);
  if (own + p.preparation > cost_of_library(p, wide, costs))
    return "too small to pay for its launches";
  if (sm90_accepts && own > cost_of_split(p, product.split, costs))
    return "so wide that a split beforehand pays";
  plan->kernel = GemmKernel::kFp32Narrow;
  plan->slices = slices;
  plan->workspace = lay_out(wide, p.k, slices).bytes;
  return nullptr;
}

}  // namespace my_ops::cuda::fp32_narrow
