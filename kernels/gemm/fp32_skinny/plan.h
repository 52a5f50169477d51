// Which float products with few rows or a small output fp32_skinny_sm90.cu accepts: pure host code.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/ceil_div.h"
#include "device.h"
#include "gemm.h"
#include "gemm/costs.h"

namespace my_ops::cuda::fp32_skinny {

inline constexpr Needs kNeeds{.code = 90, .shared_bytes = 54 * 1024};  // few rows, which need more

// Tiles of 16 rows for few rows, otherwise of 32; blocks_per_sm of their blocks fit on an SM.
struct Tile {
  int m, n, blocks_per_sm;
};
inline constexpr Tile kFewRows{16, 128, 2}, kSmallOutput{32, 64, 3};
inline constexpr int kBlockK = 32;  // of k, per stage

inline const Tile& tile_of(const GemmProblem& p) {
  return p.m <= kFewRows.m ? kFewRows : kSmallOutput;
}

inline bool vectorizes(bool aligned, int64_t unit_stride, int64_t other_stride) {
  return aligned && unit_stride == 1 && other_stride % 4 == 0;
}
inline bool vectorizes_b(const GemmProblem& p) {
  return vectorizes(p.b_aligned, p.b_row, p.b_col) || vectorizes(p.b_aligned, p.b_col, p.b_row);
}

// Whether it was measured to be faster than the library's float GEMM and fp32_sm90.
inline bool pays(const GemmProblem& p, const GemmCosts::Fp32Skinny& costs) {
  if (p.m <= kFewRows.m) {
    return p.n >= costs.few_min_columns && p.n < (1 << 24) && p.m * p.k >= costs.few_min_input &&
           p.n * p.k >= costs.few_min_weight;
  }
  if (p.packed || p.n < kSmallOutput.m || p.k < costs.min_k) return false;
  return p.n <= (p.m <= kSmallOutput.m ? costs.max_columns : costs.max_columns_many);
}

// Plans the product if this kernel accepts it; otherwise returns why it does not.
inline const char* plan(const GemmProblem& p, const GemmCosts::Fp32Skinny& costs, GemmPlan* plan) {
  const DeviceFacts& device = plan->device;
  if (!device.is(9, 0) || !device.runs(kNeeds)) return "needs Hopper";
  if (p.batch != 1 || p.m < 2 || p.m > 64) return "supports 2 to 64 rows and no batch";
  if (p.library_has_fast_tf32()) return "the library's TF32 is as fast";
  if (p.k >= (1 << 28) || !vectorizes_b(p)) return "needs a b of aligned rows or columns";
  if (p.preparation > 0) return "its gain is not known well enough to pay for a preparation";
  if (!pays(p, costs)) return "too few columns, or k too short";
  constexpr int kMinBlocks = 4;  // k-blocks per slice
  const Tile& tile = tile_of(p);
  const int64_t tiles = ceil_div(p.m, tile.m) * ceil_div(p.n, tile.n);
  const int64_t k_blocks = ceil_div(p.k, kBlockK);
  const int64_t most =
      std::min<int64_t>(tile.blocks_per_sm * device.sm_count / tiles, k_blocks / kMinBlocks);
  const int64_t slices = ceil_div(k_blocks, ceil_div(k_blocks, std::max<int64_t>(most, 1)));
  plan->kernel = GemmKernel::kFp32Skinny;
  plan->slices = static_cast<int>(slices);
  plan->workspace = slices * (p.m * p.n + tiles) * static_cast<int64_t>(sizeof(float));
  return nullptr;
}

}  // namespace my_ops::cuda::fp32_skinny
