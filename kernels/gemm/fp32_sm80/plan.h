// Which float products fp32_sm80.cu accepts: pure host code.
#pragma once

#include <climits>
#include <cstdint>

#include "common/ceil_div.h"
#include "device.h"
#include "gemm.h"
#include "gemm/costs.h"

namespace my_ops::cuda::fp32_sm80 {

inline constexpr int kTile = 128, kK = 16;
inline constexpr int64_t kMinK = 96;  // from here on as accurate as a chain of float FMAs

// Shared memory: a ring of stages, and the tile's sums.
constexpr Needs needs(int stages) {
  return {.code = 80, .shared_bytes = (stages * 2 * kTile * kK + kTile * kTile) * 4};
}

// The number of stages, 4 or 2, for which the device has room; 0 if it cannot run the kernel.
inline int stages(const DeviceFacts& device) {
  return device.runs(needs(4)) ? 4 : device.runs(needs(2)) ? 2 : 0;
}

// What the kernel costs, in multiply-adds of a library: tiles in whole waves, a block to an SM. k
// is not sliced.
inline double cost(int64_t tiles, int64_t k, int sm_count, const GemmCosts::Fp32Sm80& costs) {
  const int64_t room = ceil_div(tiles, int64_t{sm_count}) * sm_count;
  return costs.launches +
         costs.product * kTile * kTile * static_cast<double>(room) * static_cast<double>(k);
}

// Plans the product if this kernel accepts it; otherwise returns why it does not. It accepts
// products for which six bf16 ones cost less than one of floats: on 8.0 their peak rate is 16 times
// as high, on 8.6 and 8.9 only two to four times. From 8.0 on it also accepts those for which the
// library is too inaccurate.
inline const char* plan(const GemmProblem& p, const GemmCosts::Fp32Sm80& costs, GemmPlan* plan) {
  const DeviceFacts& device = plan->device;
  if (stages(device) == 0) return "needs compute capability 8.0 or later, and code for it";
  if (p.k < kMinK) return "k is too short for its accuracy";
  const double tiles = static_cast<double>(p.batch) * ceil_div(p.m, kTile) * ceil_div(p.n, kTile);
  if (tiles >= INT_MAX) return "more tiles than a launch supports";
  if (!p.library_too_inaccurate()) {
    if (costs.product >= 1) return "six bf16 products cost more than the library's one of float";
    if (p.library_has_fast_tf32()) return "the library's TF32 is as fast";
    const double library = static_cast<double>(p.batch) * p.m * p.n * p.k;
    const double own = cost(static_cast<int64_t>(tiles), p.k, device.sm_count, costs);
    if (own + p.preparation > library) {
      return "tiles would leave SMs idle, or are too few to pay for the launch";
    }
  }
  plan->kernel = GemmKernel::kFp32Sm80;
  plan->tile = stages(device);
  return nullptr;
}

}  // namespace my_ops::cuda::fp32_sm80
