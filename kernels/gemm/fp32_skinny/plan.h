// Which float products with few rows or a small output fp32_skinny_sm90.cu takes: pure host code.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/ceil_div.h"
#include "device.h"
#include "gemm.h"
#include "gemm/costs.h"

namespace my_ops::cuda::fp32_skinny {

using Args = GemmArgs<float, float>;

inline constexpr Needs kNeeds{.code = 90, .shared_bytes = 54 * 1024};  // few rows, which need more

// Tiles of 16 rows for few rows, otherwise of 32; blocks_per_sm of their blocks fit on an SM.
struct Tile {
  int m, n, blocks_per_sm;
};
inline constexpr Tile kFewRows{16, 128, 2}, kSmallOutput{32, 64, 3};
inline constexpr int kBlockK = 32;  // of k, per stage

inline const Tile& tile_of(const Args& args) {
  return args.m <= kFewRows.m ? kFewRows : kSmallOutput;
}

inline bool vectorizes(const float* x, int64_t unit_stride, int64_t other_stride) {
  return unit_stride == 1 && other_stride % 4 == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0;
}
inline bool vectorizes_b(const Args& args) {
  return vectorizes(args.b, args.b_row, args.b_col) || vectorizes(args.b, args.b_col, args.b_row);
}

// Whether it was measured to be faster than the library's float GEMM and fp32_sm90.
inline bool pays(const Args& args, const GemmCosts::Fp32Skinny& costs) {
  if (args.m <= kFewRows.m) {
    return args.n >= costs.few_min_columns && args.n < (1 << 24) &&
           args.m * args.k >= costs.few_min_input && args.n * args.k >= costs.few_min_weight;
  }
  if (args.packed_b || args.n < kSmallOutput.m || args.k < costs.min_k) return false;
  return args.n <= (args.m <= kSmallOutput.m ? costs.max_columns : costs.max_columns_many);
}

// Plans the product if this kernel takes it; otherwise returns why it does not.
inline const char* plan(const Args& args, const GemmCosts::Fp32Skinny& costs, GemmPlan* plan) {
  const DeviceFacts& device = plan->device;
  if (!device.is(9, 0) || !device.runs(kNeeds)) return "needs Hopper";
  if (args.batch != 1 || args.m < 2 || args.m > 64) return "takes 2 to 64 rows and no batch";
  if (args.library_has_fast_tf32()) return "the library's TF32 is as fast";
  if (args.k >= (1 << 28) || !vectorizes_b(args)) return "needs a b of aligned rows or columns";
  if (!pays(args, costs)) return "too few columns, or k too short";
  constexpr int kMinBlocks = 4;  // k-blocks per slice
  const Tile& tile = tile_of(args);
  const int64_t tiles = ceil_div(args.m, tile.m) * ceil_div(args.n, tile.n);
  const int64_t k_blocks = ceil_div(args.k, kBlockK);
  const int64_t most =
      std::min<int64_t>(tile.blocks_per_sm * device.sm_count / tiles, k_blocks / kMinBlocks);
  const int64_t slices = ceil_div(k_blocks, ceil_div(k_blocks, std::max<int64_t>(most, 1)));
  plan->kernel = GemmKernel::kFp32Skinny;
  plan->slices = static_cast<int>(slices);
  plan->workspace = slices * (args.m * args.n + tiles) * static_cast<int64_t>(sizeof(float));
  return nullptr;
}

}  // namespace my_ops::cuda::fp32_skinny
