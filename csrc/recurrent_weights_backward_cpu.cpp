// The gradients of a recurrent layer's input and parameters on the CPU: ATen's products. The 16-bit
// types are computed in float.
#include "binding_cpu.h"
#include "recurrent_weights_backward.h"

namespace my_ops {
namespace {

Tensor mm(const Tensor& a, const Tensor& b) {
  const Tensor out = empty(a, {a.size(0), b.size(1)});
  aten("aten::mm", "out", a, b, out);
  return out;
}

void weights_backward(StableIValue* stack, uint64_t, uint64_t) {
  WeightsBackward a = weights_backward_arguments(stack);
  const ScalarType dtype = a.grad_gates.scalar_type(), acc = compute_dtype(dtype);
  for (Tensor* t : {&a.grad_gates, &a.input, &a.h0, &a.output}) *t = cast(*t, acc);
  a.weight_x = cast(a.weight_x, acc);
  WeightsGradients grads = weights_gradients(a, mm, [](const Tensor& rows) {
    Tensor ones = empty(rows, {1, rows.size(0)});
    torch::stable::fill_(ones, 1.0);
    return as_strided(mm(ones, rows), {rows.size(1)}, {1});
  });
  for (Tensor* t : {&grads.input, &grads.w_x, &grads.w_h, &grads.bias_x, &grads.bias_h}) {
    *t = cast(*t, dtype);
  }
  give(stack, grads);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(my_ops, CPU, m) { m.impl(WeightsBackward::kName, &weights_backward); }

}  // namespace my_ops
