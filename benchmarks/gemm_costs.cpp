// Compiled by gemm_times.py: products on the GPU by plans with costs of any value.
#include "../csrc/gemm_costs.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

using namespace my_ops;
using namespace my_ops::cuda;
using Problem = my_ops::AskedProduct;

extern "C" int64_t workspace(const Problem* problem, const double* numbers) {
  return with_problem<__half, __nv_bfloat16>(*problem, [&]<typename T>(const GemmProblem& p) {
    return plan_with<T>(p, problem->device, *costs_from(numbers)).workspace;
  });
}

// operands: a, b, bias, residual, packed b, out, workspace.
extern "C" int multiply(const Problem* problem, const double* numbers, void* const* operands,
                        cudaStream_t stream) {
  return with_problem<__half, __nv_bfloat16>(*problem, [&]<typename T>(const GemmProblem& p) {
    const GemmArgs<T, T> args{p,
                              {.a = static_cast<const T*>(operands[0]),
                               .b = static_cast<const T*>(operands[1]),
                               .bias = static_cast<const T*>(operands[2]),
                               .out = static_cast<T*>(operands[5]),
                               .residual = static_cast<const T*>(operands[3]),
                               .packed_b = operands[4]}};
    return gemm(args, plan_with<T>(p, problem->device, *costs_from(numbers)), operands[6], stream);
  });
}

// The epilogue after a library's product of 16 bits, or with float sums, in place.
extern "C" int finish(const Problem* problem, bool float_sums, const void* sums,
                      void* const* operands, cudaStream_t stream) {
  return with_problem<__half, __nv_bfloat16>(
      *problem, [&]<typename T>(const GemmProblem& args) -> cudaError_t {
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
