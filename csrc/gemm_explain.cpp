// Returns plan_gemm's decision for a product of given sizes, on any device.
#include "gemm_explain.h"

#include "activation.h"
#include "common/numeric_cpu.h"
#include "gemm_problem.h"

namespace my_ops {
namespace {

template <typename T>
std::string explained(const AskedProduct& asked, Activation activation) {
  return explain<T, T>(problem_of<T>(asked, activation, std::is_same_v<T, cpu::BFloat16>),
                       asked.device.facts());
}

}  // namespace
}  // namespace my_ops

MY_OPS_EXPLAIN my_ops_explain_gemm(const my_ops::AskedProduct* asked, char* text, int64_t size) {
  using namespace my_ops;
  if (!asked || !asked->dtype || !asked->activation) return kCannotAnswer;
  const int64_t batch = asked->batch, m = asked->m, n = asked->n, k = asked->k;
  if (!can_answer({{batch, m, k}, {batch, k, n}, {batch, m, n}}, text, size)) return kCannotAnswer;
  Activation activation;
  try {
    activation = activation_of(asked->activation);
  } catch (const std::runtime_error&) {
    return kCannotAnswer;
  }
  const std::string dtype = asked->dtype;
  if (dtype == "float64") return give_answer(explained<double>(*asked, activation), text, size);
  if (dtype == "float32") return give_answer(explained<float>(*asked, activation), text, size);
  if (dtype == "float16") return give_answer(explained<cpu::Half>(*asked, activation), text, size);
  if (dtype == "bfloat16") {
    return give_answer(explained<cpu::BFloat16>(*asked, activation), text, size);
  }
  return kCannotAnswer;
}
