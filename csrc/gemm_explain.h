// The plan of a matrix product in words, for `python -m my_ops explain` and MY_OPS_LOG=plan.
#pragma once

#include <sstream>
#include <string>

#include "gemm/plan.h"

namespace my_ops {

inline const char* show(cuda::GemmKernel kernel) {
  switch (kernel) {
    case cuda::GemmKernel::kNone:
      return "none, the output is empty";
    case cuda::GemmKernel::kFp32Skinny:
      return "fp32_skinny";
    case cuda::GemmKernel::kFp32Narrow:
      return "fp32_narrow";
    case cuda::GemmKernel::kFp32Short:
      return "fp32_short";
    case cuda::GemmKernel::kFp32Sm90:
      return "fp32_sm90";
    case cuda::GemmKernel::kFp32Sm80:
      return "fp32_sm80";
    case cuda::GemmKernel::kHalfSm90:
      return "half_sm90";
    case cuda::GemmKernel::kSmall:
      return "small";
    case cuda::GemmKernel::kLibrary:
      return "library";
  }
  return "";
}

inline const char* show(cuda::LibraryCall call) {
  switch (call) {
    case cuda::LibraryCall::kProduct:
      return "its product";
    case cuda::LibraryCall::kGelu:
      return "its product with bias and gelu_tanh in the epilogue";
    case cuda::LibraryCall::kProductAndBias:
      return "its product with the bias, then one kernel for the rest";
    case cuda::LibraryCall::kSums:
      return "its product in float32, then one kernel for the rest";
    case cuda::LibraryCall::kTf32:
      return "its product in TF32";
    case cuda::LibraryCall::kConverted:
      return "the 16-bit operand in float32, then the plan of that product";
  }
  return "";
}

// "fp32_sm90, tile 128 x 128, k in 3 slices, 12.0 MiB of workspace"
inline std::string show(const cuda::GemmPlan& plan) {
  std::ostringstream text;
  text.precision(1);
  text << std::fixed << show(plan.kernel);
  if (plan.kernel == cuda::GemmKernel::kFp32Sm90) {
    text << ", tile " << cuda::fp32_sm90::kTileNames[plan.tile];
  }
  if (plan.kernel == cuda::GemmKernel::kHalfSm90) {
    text << ", tile " << cuda::half_sm90::kTileNames[plan.tile];
  }
  if (plan.kernel == cuda::GemmKernel::kLibrary) text << ": " << show(plan.library);
  if (plan.slices > 1) text << ", k in " << plan.slices << " slices";
  if (plan.workspace) text << ", " << plan.workspace / 1048576.0 << " MiB of workspace";
  return text.str();
}

// Where the costs of a plan on this device are from.
inline std::string show_costs(const cuda::DeviceFacts& device) {
  return std::string("costs: ") + cuda::known_costs_of(device).said;
}

// A line such as "  fp32_skinny: no, supports 2 to 64 rows and no batch" for each kernel that the
// plan tried, and then the plan.
template <typename T, typename Out>
std::string explain(const cuda::GemmProblem& problem, const cuda::DeviceFacts& device) {
  std::ostringstream text;
  const cuda::GemmPlan plan = cuda::plan_gemm<T, Out>(
      problem, device, cuda::costs_of(device), [&](cuda::GemmKernel kernel, const char* why) {
        if (why) text << "  " << show(kernel) << ": no, " << why << '\n';
      });
  text << "  " << show(plan) << '\n';
  return text.str();
}

}  // namespace my_ops
