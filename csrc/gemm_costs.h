// The costs of products, and plans with costs of any value, for `python -m my_ops tune` and
// benchmarks/fit_gemm.py, which call the functions below through ctypes: my_ops/_gemm_costs.py. No
// device and no CUDA is needed to answer.
#pragma once

#include <cmath>
#include <cstdint>
#include <optional>
#include <string_view>
#include <type_traits>

#include "activation.h"
#include "explain.h"
#include "gemm/plan.h"
#include "gemm_problem.h"

namespace my_ops {

// From a number for each cost, in the order of for_each_cost. Nothing if one is negative, is not
// finite or, for a whole number, has a fraction or too many digits.
inline std::optional<cuda::GemmCosts> costs_from(const double* numbers) {
  constexpr double kMostExact = 0x1p53;
  cuda::GemmCosts costs{};
  bool valid = true;
  cuda::for_each_cost(costs, [&]<typename T>(const char*, T& cost) {
    const double number = *numbers++;
    if (!std::isfinite(number) || number < 0 || (std::is_integral_v<T> && number > kMostExact)) {
      valid = false;
      return;
    }
    cost = static_cast<T>(number);
    valid = valid && static_cast<double>(cost) == number;
  });
  return valid ? std::optional(costs) : std::nullopt;
}

// Calls use<T>(problem) with the question's type.
template <typename Half, typename BFloat16, typename Use>
auto with_problem(const AskedProduct& asked, Use use) {
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
cuda::GemmPlan plan_with(const cuda::GemmProblem& p, const AskedDevice& device,
                         const cuda::GemmCosts& costs) {
  return cuda::plan_gemm<T, T>(p, device.facts(), costs, [](cuda::GemmKernel, const char*) {});
}

}  // namespace my_ops

// A line for the version of the costs, and one for each cost: its name, and int or float.
MY_OPS_EXPLAIN my_ops_gemm_costs_names(char* text, int64_t size);

// The costs that a GPU has in this process; with own, those it has if it was given none.
MY_OPS_EXPLAIN my_ops_gemm_costs_get(const my_ops::AskedDevice* gpu, int own, double* numbers,
                                     int64_t count);

// Where those that it has are from, in words.
MY_OPS_EXPLAIN my_ops_gemm_costs_said(const my_ops::AskedDevice* gpu, char* text, int64_t size);

// Gives a GPU of this name and peak clock costs that plans of this process use from now on, in all
// threads; text says where they are from. Nothing happens if they are not valid.
MY_OPS_EXPLAIN my_ops_gemm_costs_give(const my_ops::AskedDevice* gpu, const char* name,
                                      int clock_khz, const double* numbers, int64_t count,
                                      const char* text);

// For each problem, with these costs: a number for its plan, which the next function puts into
// words. The number of k-slices follows from the tile, whatever the costs are.
MY_OPS_EXPLAIN my_ops_gemm_plans(const my_ops::AskedProduct* problems, int64_t problem_count,
                                 const double* numbers, int64_t count, int64_t* codes);
MY_OPS_EXPLAIN my_ops_gemm_plan_words(int64_t code, char* text, int64_t size);

// Builds for CUDA have it: the current GPU. The result is an error of CUDA.
MY_OPS_EXPLAIN my_ops_gemm_costs_gpu(my_ops::AskedDevice* gpu, char* name, int64_t size,
                                     int* clock_khz);
