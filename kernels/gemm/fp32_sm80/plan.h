// Which float products fp32_sm80.cu accepts: pure host code.
#pragma once

#include <climits>
#include <cstdint>

#include "common/ceil_div.h"
#include "device.h"
#include "gemm.h"

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

// Plans the product if this kernel accepts it; otherwise returns why it does not. It accepts
// products for which six bf16 ones cost less than one of floats, which holds on 8.0 (16 times the
// rate) but not on 8.6 and 8.9 (two to four times). From 8.0 on it also accepts those for which the
// library is too inaccurate.
inline const char* plan(const GemmProblem& p, GemmPlan* plan) {
  const DeviceFacts& device = plan->device;
  if (stages(device) == 0) return "needs compute capability 8.0 or later, and code for it";
  if (p.k < kMinK) return "k is too short for its accuracy";
  const double blocks = static_cast<double>(p.batch) * ceil_div(p.m, kTile) * ceil_div(p.n, kTile);
  if (blocks >= INT_MAX) return "more tiles than a launch supports";
  if (!p.library_too_inaccurate()) {
    if (!device.is(8, 0)) return "six bf16 products cost more than the library's one of float";
    if (p.library_has_fast_tf32()) return "the library's TF32 is as fast";
    if (p.preparation > 0) return "its gain is not known well enough to pay for a preparation";
    // k is not sliced.
    if (blocks < device.sm_count) return "fewer tiles than SMs";
  }
  plan->kernel = GemmKernel::kFp32Sm80;
  plan->tile = stages(device);
  return nullptr;
}

}  // namespace my_ops::cuda::fp32_sm80
