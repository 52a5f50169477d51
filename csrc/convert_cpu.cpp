// Conversions of tensors on the CPU.
#include "convert.h"

#include "binding_cpu.h"
#include "elementwise/costs.h"

namespace my_ops {

namespace {

template <typename From, typename To>
void convert(const Tensor& from, const Tensor& to) {
  parallel(from.numel(), cpu::kElementwiseCosts.grain, [&](int64_t begin, int64_t end) {
    cpu::convert(in<From>(from) + begin, end - begin, out<To>(to) + begin);
  });
}

}  // namespace

Tensor converted_on_cpu(const Tensor& t, ScalarType dtype) {
  const Tensor result = empty(t, sizes_of(t), dtype);
  const bool widens = dtype == ScalarType::Float;
  const bool is_half = (widens ? t.scalar_type() : dtype) == ScalarType::Half;
  if (widens) {
    is_half ? convert<cpu::Half, float>(t, result) : convert<cpu::BFloat16, float>(t, result);
  } else {
    is_half ? convert<float, cpu::Half>(t, result) : convert<float, cpu::BFloat16>(t, result);
  }
  return result;
}

}  // namespace my_ops
