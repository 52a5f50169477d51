// Returns plan_gemm's decision for a product of given sizes, on any device: see c_api.h.
#include "gemm_explain.h"

#include <algorithm>
#include <cstring>

#include "activation.h"
#include "common/numeric_cpu.h"
#include "gemm_problem.h"

namespace my_ops {
namespace {

template <typename T>
std::string explained(const my_ops_gemm_problem& problem, Activation activation) {
  return explain(args_of<T>(problem, activation, std::is_same_v<T, cpu::BFloat16>),
                 facts_of(problem));
}

}  // namespace
}  // namespace my_ops

extern "C" __attribute__((visibility("default"))) int64_t
my_ops_explain_gemm(const my_ops_gemm_problem* problem, char* text, int64_t size) {
  using namespace my_ops;
  if (!problem || !problem->dtype || !problem->activation) return MY_OPS_INVALID_ARGUMENT;
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
