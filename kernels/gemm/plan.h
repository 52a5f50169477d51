// The plan of a matrix product: pure host code that depends only on the arguments and the device.
// The kernels are tried in order, and the first that accepts the product plans it. The vendor's
// library gets the rest. If the library would round floats to TF32 and more accuracy is requested,
// it is ruled out, and these kernels accept every product.
#pragma once

#include <climits>
#include <cstdint>
#include <type_traits>

#include "device.h"
#include "gemm.h"
#include "gemm/costs.h"
#include "gemm/costs_of.h"
#include "gemm/fp32_narrow/plan.h"
#include "gemm/fp32_short/plan.h"
#include "gemm/fp32_skinny/plan.h"
#include "gemm/fp32_sm80/plan.h"
#include "gemm/fp32_sm90/plan.h"
#include "gemm/half_sm90/plan.h"
#include "gemm/small/plan.h"

namespace my_ops::cuda {

template <typename T, typename Out>
constexpr bool kIsFp32 = std::is_same_v<T, float> && std::is_same_v<Out, float>;

template <typename T, typename Out>
constexpr bool kIsHalf = std::is_same_v<T, Out> && sizeof(T) == 2;

// How the library best computes a product that no kernel accepts. With unaligned 16-bit rows cuBLAS
// rounds the product before it adds a bias. With few outputs it may add slices of k in 16 bits,
// which it does not do if they are to stay in float; so few of those cost nothing.
template <typename T, typename Out>
LibraryCall library_call(const GemmProblem& p) {
  if constexpr (kIsHalf<T, Out>) {
    if (!p.linear) return LibraryCall::kProduct;
    const bool unaligned = p.n % 8 != 0 || p.k % 8 != 0;
    if (unaligned || (p.has_bias && half_sm90::workspace(p) > 0)) return LibraryCall::kSums;
    if (half_sm90::library_fuses(p)) return LibraryCall::kGelu;
    if (!p.has_activation_or_residual()) return LibraryCall::kProduct;
    return few_outputs(p.m, p.n, p.k) ? LibraryCall::kSums : LibraryCall::kProductAndBias;
  } else {
    return p.asks_for_tf32() ? LibraryCall::kTf32 : LibraryCall::kProduct;
  }
}

// Calls asked(kernel, why) for each kernel tried: why it does not accept the product, or null for
// the last.
template <typename T, typename Out, typename Asked>
GemmPlan plan_gemm(const GemmProblem& p, const DeviceFacts& device, const GemmCosts& costs,
                   Asked asked) {
  GemmPlan plan{.device = device};
  const GemmPlan converted{
      .device = device, .kernel = GemmKernel::kLibrary, .library = LibraryCall::kConverted};
  if (p.batch == 0 || p.m == 0 || p.n == 0) return plan;
  const auto accepts = [&](GemmKernel kernel, const char* why) {
    asked(kernel, why);
    return why == nullptr;
  };
  // Whether the library is ruled out. Before compute capability 8.0 it has no TF32.
  const bool needed = kIsFp32<T, Out> && p.library_too_inaccurate() && device.major >= 8;
  const bool small = p.k <= INT_MAX && is_small<T>(p, costs.small);  // whatever the costs are
  if constexpr (kIsFp32<T, Out>) {
    const char* const thin =
        needed && !fills_tiles<T>(p, costs.small) ? "does not fill a tile" : nullptr;
    if (accepts(GemmKernel::kFp32Skinny, fp32_skinny::plan(p, costs.fp32_skinny, &plan)))
      return p.mixed() ? converted : plan;
    const bool sm90_accepts = !thin && fp32_sm90::refusal(p, device, costs.fp32_sm90) == nullptr;
    if (accepts(GemmKernel::kFp32Narrow,
                thin ? thin : fp32_narrow::plan(p, costs.fp32_narrow, sm90_accepts, &plan)))
      return plan;
    if (accepts(GemmKernel::kFp32Short,
                thin ? thin : fp32_short::plan(p, costs, sm90_accepts, &plan)))
      return plan;
    if (accepts(GemmKernel::kFp32Sm90, thin ? thin : fp32_sm90::plan(p, costs.fp32_sm90, &plan)))
      return plan;
    if (p.mixed()) return converted;
    if (accepts(GemmKernel::kFp32Sm80, thin ? thin : fp32_sm80::plan(p, costs.fp32_sm80, &plan)))
      return plan;
  }
  if constexpr (kIsHalf<T, Out>) {
    const char* const why = small ? "so small that another kernel is faster" : nullptr;
    if (accepts(GemmKernel::kHalfSm90, why ? why : half_sm90::plan(p, costs.half_sm90, &plan)))
      return plan;
  }
  const bool takes_small = small || (needed && p.k <= INT_MAX);
  if (accepts(GemmKernel::kSmall, takes_small ? nullptr : "too large")) {
    plan.kernel = GemmKernel::kSmall;
    return plan;
  }
  accepts(GemmKernel::kLibrary, nullptr);
  plan.kernel = GemmKernel::kLibrary;
  plan.library = library_call<T, Out>(p);
  return plan;
}

template <typename T, typename Out>
GemmPlan plan_gemm(const GemmProblem& p, const DeviceFacts& device) {
  return plan_gemm<T, Out>(p, device, costs_of(device), [](GemmKernel, const char*) {});
}

}  // namespace my_ops::cuda
