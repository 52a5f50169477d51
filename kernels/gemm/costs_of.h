// Which costs a GPU has: those that the program was given for it, those fitted to its times here,
// or cautious ones.
#pragma once

#include <atomic>
#include <cstdint>

#include "device.h"
#include "gemm/costs.h"
#include "gemm/fitted_costs.h"

namespace my_ops::cuda {

// Costs that the program was given, of a GPU that its owner has measured: a list that only grows,
// the newest first, so that plans read it without a lock.
struct GivenCosts {
  DeviceFacts device;
  const char* said;  // where they are from
  GemmCosts costs;
  const GivenCosts* next;
};
inline std::atomic<const GivenCosts*> given_costs = nullptr;

// The facts that identify a GPU. A device of no known model is any of that size.
constexpr bool is_same_gpu(const DeviceFacts& a, const DeviceFacts& b) {
  return a.is(b.major, b.minor) && a.sm_count == b.sm_count && a.l2_bytes == b.l2_bytes &&
         (a.model == b.model || a.model == 0 || b.model == 0);
}

// The costs of GPUs that nobody has timed, from an H200's. So few products are taken that a GPU
// with a quarter of its gains still gains.
constexpr GemmCosts cautious_costs() {
  constexpr int kCaution = 4;
  GemmCosts costs = kFittedCosts[0].costs;
  costs.fp32_skinny.few_min_weight *= kCaution;
  costs.fp32_skinny.min_k *= kCaution;
  costs.fp32_narrow.launches *= kCaution;
  costs.fp32_narrow.end *= kCaution;
  costs.fp32_short.launches *= kCaution;
  costs.fp32_short.byte *= kCaution;
  costs.fp32_sm90.packed_min_rows *= kCaution;
  costs.fp32_sm90.packed_min_weight *= kCaution;
  costs.fp32_sm90.launches *= kCaution;
  costs.fp32_sm90.second_pass *= kCaution;
  costs.fp32_sm90.element *= kCaution;
  costs.fp32_sm90.strided_element *= kCaution;
  costs.fp32_sm90.tf32_launches *= kCaution;
  costs.fp32_sm90.tf32_element *= kCaution;
  costs.small.max_outputs /= kCaution;
  costs.small.many_outputs /= kCaution;
  costs.small.max_work_of_many /= kCaution;
  costs.small.max_work_8_bytes /= kCaution;
  costs.small.max_work_4_bytes /= kCaution;
  costs.small.max_work_2_bytes /= kCaution;
  costs.small.max_work_of_long_k /= kCaution;
  return costs;
}
inline constexpr GemmCosts kCautiousCosts = cautious_costs();

// The same with the six bf16 products of fp32_sm80, for compute capability 8.0. Their peak there is
// 2.7 times that of fp32 FMAs; half of it is assumed.
constexpr GemmCosts cautious_costs_of_sm80() {
  GemmCosts costs = kCautiousCosts;
  costs.fp32_sm80.product = 0.75;
  return costs;
}
inline constexpr GemmCosts kCautiousCostsOfSm80 = cautious_costs_of_sm80();

// An H20, by its number of SMs, has fp16 products at 3.4 times the rate of fp32 FMAs, where other
// Hopper GPUs have 15 times: three of them gain nothing, and what splits operands costs the more.
constexpr bool has_few_tensor_cores(const DeviceFacts& device) {
  return device.is(9, 0) && device.sm_count == 78;
}
constexpr GemmCosts cautious_costs_of_few_tensor_cores() {
  constexpr double kLaunches = 1e12;
  GemmCosts costs = kCautiousCosts;
  costs.fp32_narrow.launches = kLaunches;
  costs.fp32_short.launches = kLaunches;
  costs.fp32_sm90.launches = kLaunches;
  costs.fp32_sm90.packed_min_weight = int64_t{1} << 20;
  return costs;
}
inline constexpr GemmCosts kCautiousCostsOfFewTensorCores = cautious_costs_of_few_tensor_cores();

struct KnownCosts {
  const GemmCosts& costs;
  const char* said;  // where they are from
};

// What a GPU has that was given none.
inline KnownCosts own_costs_of(const DeviceFacts& device) {
  for (const GpuCosts& gpu : kFittedCosts) {
    if (device.is(gpu.major, gpu.minor) && device.sm_count == gpu.sm_count &&
        device.l2_bytes == gpu.l2_bytes) {
      return {gpu.costs, "built in"};
    }
  }
  const GemmCosts& costs = device.is(8, 0)                ? kCautiousCostsOfSm80
                           : has_few_tensor_cores(device) ? kCautiousCostsOfFewTensorCores
                                                          : kCautiousCosts;
  return {costs, "cautious, `python -m my_ops tune` measures this GPU"};
}

inline KnownCosts known_costs_of(const DeviceFacts& device) {
  const GivenCosts* given = given_costs.load(std::memory_order_acquire);
  for (; given; given = given->next) {
    if (is_same_gpu(device, given->device)) return {given->costs, given->said};
  }
  return own_costs_of(device);
}

inline const GemmCosts& costs_of(const DeviceFacts& device) { return known_costs_of(device).costs; }

}  // namespace my_ops::cuda
