// What plan_gemm decides for a product that nobody has formed, on any device: c_api.h.
#include "gemm_explain.h"

#include <algorithm>
#include <cstring>

#include "../my_ops/include/my_ops/c_api.h"
#include "common/numeric_cpu.h"
#include "gemm_checks.h"

namespace my_ops {
namespace {

// An aligned address that nobody follows.
template <typename T>
T* somewhere() {
  return reinterpret_cast<T*>(uintptr_t{1} << 20);
}

template <typename T>
std::string explained(const my_ops_gemm_problem& problem, Activation activation) {
  cuda::GemmArgs<T, T> args{};
  args.a = args.b = somewhere<const T>();
  args.out = somewhere<T>();
  args.batch = problem.batch, args.m = problem.m, args.n = problem.n, args.k = problem.k;
  args.a_batch = args.m * args.k;
  args.a_row = problem.a_transposed ? 1 : args.k, args.a_col = problem.a_transposed ? args.m : 1;
  args.b_batch = args.k * args.n;
  args.b_row = problem.b_transposed ? 1 : args.n, args.b_col = problem.b_transposed ? args.k : 1;
  args.out_batch = args.m * args.n, args.out_row = args.n, args.out_col = 1;
  if (problem.bias) args.bias = somewhere<const T>();
  if (problem.residual) {
    args.residual = somewhere<const T>();
    args.residual_batch = args.out_batch, args.residual_row = args.n, args.residual_col = 1;
  }
  if (problem.packed) args.packed_b = somewhere<const T>();
  args.activation = activation;
  args.precision = problem.high ? Precision::kHigh : Precision::kHighest;
  args.linear = problem.linear;
  args.library_tf32 = problem.library_tf32;
  args.library_gelu = std::is_same_v<T, cpu::BFloat16>;
  return explain(args, {.major = problem.device.major,
                        .minor = problem.device.minor,
                        .sm_count = problem.device.sm_count,
                        .shared_bytes = problem.device.shared_bytes,
                        .code = problem.device.code,
                        .hopper_code = problem.device.hopper_code != 0});
}

}  // namespace
}  // namespace my_ops

extern "C" __attribute__((visibility("default"))) int64_t
my_ops_explain_gemm(const my_ops_gemm_problem* problem, char* text, int64_t size) {
  using namespace my_ops;
  const int64_t sizes[] = {problem->batch, problem->m, problem->n, problem->k};
  const bool overflows = std::any_of(std::begin(sizes), std::end(sizes),
                                     [](int64_t x) { return x < 0 || x > int64_t{1} << 20; });
  if (overflows || size < 0 || (size > 0 && !text)) return MY_OPS_INVALID_ARGUMENT;
  Activation activation;
  try {
    activation = activation_of(problem->activation);
  } catch (const std::runtime_error&) {
    return MY_OPS_INVALID_ARGUMENT;
  }
  const std::string dtype = problem->dtype;
  std::string said;
  if (dtype == "float64") {
    said = explained<double>(*problem, activation);
  } else if (dtype == "float32") {
    said = explained<float>(*problem, activation);
  } else if (dtype == "float16") {
    said = explained<cpu::Half>(*problem, activation);
  } else if (dtype == "bfloat16") {
    said = explained<cpu::BFloat16>(*problem, activation);
  } else {
    return MY_OPS_INVALID_ARGUMENT;
  }
  if (size > 0) {
    const auto kept = std::min(static_cast<size_t>(size - 1), said.size());
    std::memcpy(text, said.data(), kept);
    text[kept] = '\0';
  }
  return static_cast<int64_t>(said.size());
}
