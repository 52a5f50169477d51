// Which products gemm_small accepts: pure host code.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>

#include "device.h"
#include "gemm.h"
#include "gemm/costs.h"

namespace my_ops::cuda {

// k is short up to this value: it is read in one round of loads.
template <typename T>
constexpr int kShortK = sizeof(T) == 8 ? 8 : 16;

// Whether gemm_small was measured to be faster than the library's product, or its product and
// epilogue. With many outputs the library's plain product is faster from a smaller size on. If k is
// not short, the library is fast at matrix-vector products, and at 16 bits with aligned rows; but
// for the latter it may slice a long k and add the slices in 16 bits.
template <typename T>
bool is_small(const GemmProblem& p, const GemmCosts::Small& costs) {
  constexpr int64_t kVector = 8;
  const int64_t max_work = sizeof(T) == 8   ? costs.max_work_8_bytes
                           : sizeof(T) == 4 ? costs.max_work_4_bytes
                                            : costs.max_work_2_bytes;
  const int64_t outputs = p.batch * p.m * p.n;
  if (outputs > costs.max_outputs || outputs > max_work / (p.k + 1)) return false;
  if (p.has_activation_or_residual()) return true;
  if (outputs > costs.many_outputs && outputs > costs.max_work_of_many / (p.k + 1)) return false;
  if (sizeof(T) != 8 && p.k <= kShortK<T>) return true;
  if (sizeof(T) != 2) return p.m > 1 && p.n > 1;
  const bool rows_aligned = p.n % kVector == 0 && p.k % kVector == 0;
  return !rows_aligned || (p.k >= costs.long_k && outputs <= costs.max_work_of_long_k / (p.k + 1));
}

// Whether a tiled kernel is faster than gemm_small, which cannot take k from 2^31 on.
template <typename T>
bool fills_tiles(const GemmProblem& p, const GemmCosts::Small& costs) {
  if (p.k > INT_MAX) return true;
  return std::min(p.m, p.n) >= costs.tile_min_side && !is_small<T>(p, costs) &&
         p.batch * p.m * p.n >= costs.tile_min_work / (p.k + 1);
}

}  // namespace my_ops::cuda
