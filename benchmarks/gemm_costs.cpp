// Compiled by gemm_costs.py: plan_gemm with costs of any value, which needs no GPU; with CUDA also
// the kernels that such a plan runs.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string_view>

#include "../csrc/activation.h"
#include "../csrc/gemm_explain.h"
#include "../csrc/gemm_problem.h"
#include "costs_from.h"  // written by gemm_costs.py: GemmCosts costs_from(const double* numbers)
#ifdef MY_OPS_WITH_CUDA
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#else
#include "common/numeric_cpu.h"
#endif

using namespace my_ops;
using namespace my_ops::cuda;
using Problem = my_ops::AskedProduct;

namespace {

#ifdef MY_OPS_WITH_CUDA
using Half = __half;
using BFloat16 = __nv_bfloat16;
#else
using Half = cpu::Half;
using BFloat16 = cpu::BFloat16;
#endif

// Calls use<T>(problem) with the question's type.
template <typename Use>
auto with_problem(const Problem& asked, Use use) {
  const std::string_view dtype = asked.dtype;
  const auto of = [&]<typename T>() {
    auto p = problem_of<T>(asked, activation_of(asked.activation), dtype == "bfloat16");
    p.library_tf32_call = false;  // the library's times are those of its settings
    return use.template operator()<T>(p);
  };
  if (dtype == "float64") return of.template operator()<double>();
  if (dtype == "float32") return of.template operator()<float>();
  if (dtype == "float16") return of.template operator()<Half>();
  return of.template operator()<BFloat16>();
}

template <typename T>
GemmPlan plan_of(const Problem& asked, const GemmProblem& p, const GemmCosts& costs) {
  return plan_gemm<T, T>(p, asked.device.facts(), costs, [](GemmKernel, const char*) {});
}

constexpr int64_t kTiles = 8, kLibraryCalls = 8;

}  // namespace

// For each problem, a number for its plan, which `describe` puts into words, and the workspace. The
// number of k-slices follows from the tile, whatever the costs are.
extern "C" void plans(const Problem* problems, int64_t count, const double* numbers, int64_t* codes,
                      int64_t* workspaces) {
  const GemmCosts costs = costs_from(numbers);
  for (int64_t i = 0; i < count; ++i) {
    const GemmPlan plan = with_problem(problems[i], [&]<typename T>(const GemmProblem& p) {
      return plan_of<T>(problems[i], p, costs);
    });
    const int64_t call = static_cast<int64_t>(plan.kernel) * kLibraryCalls +
                         (plan.kernel == GemmKernel::kLibrary ? static_cast<int>(plan.library) : 0);
    codes[i] = call * kTiles + plan.tile;
    workspaces[i] = plan.workspace;
  }
}

extern "C" void describe(int64_t code, char* text, int64_t size) {
  const int64_t call = code / kTiles;
  const GemmPlan plan{.kernel = static_cast<GemmKernel>(call / kLibraryCalls),
                      .library = static_cast<LibraryCall>(call % kLibraryCalls),
                      .tile = static_cast<int>(code % kTiles)};
  const std::string words = show(plan);
  const auto kept = std::min<size_t>(words.size(), size - 1);
  std::memcpy(text, words.data(), kept);
  text[kept] = '\0';
}

#ifdef MY_OPS_WITH_CUDA

extern "C" int ask_device(Problem* problem) {
  DeviceFacts facts;
  const cudaError_t status = current_device(&facts);
  problem->device = {facts.major,    facts.minor, facts.sm_count,   facts.shared_bytes,
                     facts.l2_bytes, facts.code,  facts.hopper_code};
  return status;
}

// operands: a, b, bias, residual, packed b, out, workspace.
extern "C" int multiply(const Problem* problem, const double* numbers, void* const* operands,
                        cudaStream_t stream) {
  return with_problem(*problem, [&]<typename T>(const GemmProblem& p) {
    const GemmArgs<T, T> args{p,
                              {.a = static_cast<const T*>(operands[0]),
                               .b = static_cast<const T*>(operands[1]),
                               .bias = static_cast<const T*>(operands[2]),
                               .out = static_cast<T*>(operands[5]),
                               .residual = static_cast<const T*>(operands[3]),
                               .packed_b = operands[4]}};
    return gemm(args, plan_of<T>(*problem, p, costs_from(numbers)), operands[6], stream);
  });
}

// The epilogue after a library's product of 16 bits, or with float sums, in place.
extern "C" int finish(const Problem* problem, bool float_sums, const void* sums,
                      void* const* operands, cudaStream_t stream) {
  return with_problem(*problem, [&]<typename T>(const GemmProblem& args) -> cudaError_t {
    if constexpr (sizeof(T) == 2) {
      const auto run = [&](const auto* typed, const void* bias) {
        return linear_epilogue(typed, static_cast<const T*>(bias),
                               static_cast<const T*>(operands[3]), static_cast<T*>(operands[5]),
                               args.m * args.n, args.n, args.activation, stream);
      };
      return float_sums ? run(static_cast<const float*>(sums), operands[2])
                        : run(static_cast<const T*>(sums), nullptr);
    }
    return cudaErrorInvalidValue;
  });
}

extern "C" int64_t packed_bytes(const Problem* problem, int64_t* workspace) {
  const PackArgs args{
      .batch = 1, .k = problem->k, .n = problem->n, .row_stride = 1, .col_stride = problem->k};
  *workspace = gemm_pack_workspace(args);
  return gemm_packed_bytes(args);
}

extern "C" int pack(const Problem* problem, const float* b, void* packed, void* workspace,
                    cudaStream_t stream) {
  return gemm_pack({.b = b,
                    .batch = 1,
                    .k = problem->k,
                    .n = problem->n,
                    .row_stride = 1,
                    .col_stride = problem->k},
                   packed, workspace, stream);
}

#endif
