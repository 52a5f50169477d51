// The gradients of a recurrent layer's input and parameters on the CPU: ATen's products, except the
// small ones, which take less time than ATen takes to begin. The 16-bit types are computed in
// float.
#include "binding_cpu.h"
#include "recurrent/cpu/costs.h"
#include "recurrent_weights_backward.h"

namespace my_ops {
namespace {

constexpr cpu::RecurrentCosts kCosts{};

Tensor mm(const Tensor& a, const Tensor& b) {
  const int64_t m = a.size(0), n = b.size(1), k = a.size(1);
  const Tensor c = empty(a, {m, n});
  if (b.stride(1) != 1 || m * n * k > kCosts.few_products || k > kCosts.few_terms) {
    aten("aten::mm", "out", a, b, c);
    return c;
  }
  const auto multiply = [&]<typename T>() {
    cpu::few_products<T>({.a = in<T>(a),
                          .b = in<T>(b),
                          .c = out<T>(c),
                          .a_row = a.stride(0),
                          .b_row = b.stride(0),
                          .b_col = 1,
                          .c_row = n,
                          .m = m,
                          .k = k},
                         a.stride(1), n);
  };
  if (a.scalar_type() == ScalarType::Double) {
    multiply.template operator()<double>();
  } else {
    multiply.template operator()<float>();
  }
  return c;
}

}  // namespace

WeightsGradients cpu::weights_backward(WeightsBackward a) {
  const ScalarType dtype = a.grad_gates.scalar_type(), acc = compute_dtype(dtype);
  for (Tensor* t : {&a.grad_gates, &a.input, &a.h0, &a.output}) *t = cast(*t, acc);
  a.weight_x = cast(a.weight_x, acc);
  WeightsGradients grads = weights_gradients(a, mm, [](const Tensor& rows) {
    Tensor ones = empty(rows, {1, rows.size(0)});
    torch::stable::fill_(ones, 1.0);
    return as_strided(mm(ones, rows), {rows.size(1)}, {1});
  });
  for (Tensor* t : {&grads.input, &grads.w_x, &grads.w_h, &grads.bias_x, &grads.bias_h}) {
    if (t->defined()) *t = cast(*t, dtype);
  }
  return grads;
}

STABLE_TORCH_LIBRARY_IMPL(my_ops, CPU, m) {
  m.impl(WeightsBackward::kName, [](StableIValue* stack, uint64_t, uint64_t) {
    give(stack, cpu::weights_backward(weights_backward_arguments(stack)));
  });
}

}  // namespace my_ops
