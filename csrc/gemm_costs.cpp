// Reads and sets the costs of products, and plans with any.
#include "gemm_costs.h"

#include <sstream>
#include <string>

#include "common/numeric_cpu.h"
#include "gemm_explain.h"

namespace my_ops {
namespace {

constexpr int64_t kTiles = 8, kLibraryCalls = 8;

bool can_answer(const void* asked, const double* numbers, int64_t count) {
  return asked && numbers && count == cuda::kCostCount;
}

int64_t code_of(const cuda::GemmPlan& plan) {
  const int64_t kernel = static_cast<int64_t>(plan.kernel) * kLibraryCalls;
  const bool library = plan.kernel == cuda::GemmKernel::kLibrary;
  return (kernel + (library ? static_cast<int64_t>(plan.library) : 0)) * kTiles + plan.tile;
}

cuda::GemmPlan plan_of(int64_t code) {
  const int64_t call = code / kTiles;
  return {.kernel = static_cast<cuda::GemmKernel>(call / kLibraryCalls),
          .library = static_cast<cuda::LibraryCall>(call % kLibraryCalls),
          .tile = static_cast<int>(code % kTiles)};
}

}  // namespace
}  // namespace my_ops

MY_OPS_EXPLAIN my_ops_gemm_costs_names(char* text, int64_t size) {
  using namespace my_ops;
  std::ostringstream said;
  said << cuda::kCostsVersion << '\n';
  cuda::GemmCosts costs{};
  cuda::for_each_cost(costs, [&]<typename T>(const char* name, T&) {
    said << name << (std::is_integral_v<T> ? " int\n" : " float\n");
  });
  return give_answer(said.str(), text, size);
}

MY_OPS_EXPLAIN my_ops_gemm_costs_get(const my_ops::AskedDevice* gpu, int own, double* numbers,
                                     int64_t count) {
  using namespace my_ops;
  if (!can_answer(gpu, numbers, count)) return kCannotAnswer;
  const cuda::DeviceFacts facts = gpu->facts();
  cuda::GemmCosts costs = own ? cuda::own_costs_of(facts).costs : cuda::costs_of(facts);
  cuda::for_each_cost(
      costs, [&](const char*, const auto& cost) { *numbers++ = static_cast<double>(cost); });
  return count;
}

MY_OPS_EXPLAIN my_ops_gemm_costs_said(const my_ops::AskedDevice* gpu, char* text, int64_t size) {
  using namespace my_ops;
  if (!gpu) return kCannotAnswer;
  return give_answer(cuda::known_costs_of(gpu->facts()).said, text, size);
}

MY_OPS_EXPLAIN my_ops_gemm_costs_give(const my_ops::AskedDevice* gpu, const char* name,
                                      int clock_khz, const double* numbers, int64_t count,
                                      const char* text) {
  using namespace my_ops;
  if (!can_answer(gpu, numbers, count) || !name || !text) return kCannotAnswer;
  const std::optional<cuda::GemmCosts> costs = costs_from(numbers);
  if (!costs) return kCannotAnswer;
  cuda::DeviceFacts facts = gpu->facts();
  facts.model = cuda::model_of(name, clock_khz);
  // Never freed: other threads may be reading the list.
  const char* const said = (new std::string(text))->c_str();
  auto* const given = new cuda::GivenCosts{facts, said, *costs, cuda::given_costs.load()};
  while (!cuda::given_costs.compare_exchange_weak(given->next, given)) {
  }
  return count;
}

MY_OPS_EXPLAIN my_ops_gemm_plans(const my_ops::AskedProduct* problems, int64_t problem_count,
                                 const double* numbers, int64_t count, int64_t* codes) {
  using namespace my_ops;
  if (!can_answer(problems, numbers, count)) return kCannotAnswer;
  const std::optional<cuda::GemmCosts> costs = costs_from(numbers);
  if (!costs) return kCannotAnswer;
  for (int64_t i = 0; i < problem_count; ++i) {
    codes[i] = with_problem<cpu::Half, cpu::BFloat16>(
        problems[i], [&]<typename T>(const cuda::GemmProblem& p) {
          return code_of(plan_with<T>(p, problems[i].device, *costs));
        });
  }
  return problem_count;
}

MY_OPS_EXPLAIN my_ops_gemm_plan_words(int64_t code, char* text, int64_t size) {
  return my_ops::give_answer(my_ops::show(my_ops::plan_of(code)), text, size);
}
