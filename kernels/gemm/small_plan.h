// Which products gemm_small takes: pure host code.
#pragma once

#include <climits>
#include <cstdint>

#include "device.h"
#include "gemm.h"
#include "gemm/costs.h"

namespace my_ops::cuda {

// How long a k is short; read in one round of loads.
template <typename T>
constexpr int kShortK = sizeof(T) == 8 ? 8 : 16;

// Sizes at which gemm_small was timed to beat a library's product, or that and an epilogue behind
// it. Of many outputs a library's product alone is faster sooner. Where k is not short, it is fast
// at a matrix times a vector, and at 16 bits in whole 16-byte vectors; but there it may split a
// long k and add the pieces in 16 bits.
template <typename T, typename Out>
bool is_small(const GemmArgs<T, Out>& args, const GemmCosts::Small& costs) {
  constexpr int64_t kVector = 8;
  const int64_t max_work = sizeof(T) == 8   ? costs.max_work_8_bytes
                           : sizeof(T) == 4 ? costs.max_work_4_bytes
                                            : costs.max_work_2_bytes;
  const int64_t outputs = args.batch * args.m * args.n;
  if (outputs > costs.max_outputs || outputs > max_work / (args.k + 1)) return false;
  if (args.has_activation_or_residual()) return true;
  if (outputs > costs.many_outputs && outputs > costs.max_work_of_many / (args.k + 1)) return false;
  if (sizeof(T) != 8 && args.k <= kShortK<T>) return true;
  if (sizeof(T) != 2) return args.m > 1 && args.n > 1;
  const bool whole_vectors = args.n % kVector == 0 && args.k % kVector == 0;
  return !whole_vectors ||
         (args.k >= costs.long_k && outputs <= costs.max_work_of_long_k / (args.k + 1));
}

// Whether tiles of the output serve better than gemm_small, which knows no k from 2^31 on.
template <typename T, typename Out>
bool fills_tiles(const GemmArgs<T, Out>& args, const GemmCosts::Small& costs) {
  constexpr int64_t kMinSide = 16;  // tiles that are as good as empty
  if (args.k > INT_MAX) return true;
  return args.m >= kMinSide && args.n >= kMinSide && !is_small(args, costs) &&
         args.batch * args.m * args.n >= costs.tile_min_work / (args.k + 1);
}

}  // namespace my_ops::cuda
