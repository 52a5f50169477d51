// The gradients of a recurrent layer's input and parameters on CUDA: in one launch, or by products.
#include "gemm_cuda.h"
#include "recurrent_weights_backward.h"

namespace my_ops {
namespace {

WeightsGradients by_products(const WeightsBackward& a, const Device& device) {
  std::optional<Name> precision;
  if (a.grad_gates.scalar_type() == ScalarType::Float && library_uses_tf32().value_or(false)) {
    precision.emplace("tf32", 4);
  }
  const auto product_into = [&](const Tensor& left, const Tensor& right, const Tensor& out) {
    gemm_into(left, right, out, precision, device);
  };
  return weights_gradients(a, product_into, [](const Tensor& rows) {
    return aten("aten::sum", "dim_IntList", rows, std::optional(Sizes{0}), false,
                std::optional<ScalarType>());
  });
}

WeightsGradients in_one_launch(const WeightsBackward& a, const Device& device) {
  const Tensor grad = as_contiguous(a.grad_gates), h0 = as_contiguous(a.h0),
               output = as_contiguous(a.output);
  const auto reset = as_contiguous(a.reset);
  const WeightsGradients grads{.input = empty(grad, a.weight_x ? sizes_of(a.input) : Sizes{0}),
                               .w_x = empty(grad, {a.rows(), a.inputs()}),
                               .w_h = empty(grad, {a.rows(), a.hidden()}),
                               .bias_x = empty(grad, {a.rows()}),
                               .bias_h = empty(grad, {a.rows()})};
  dispatch_floating<CudaTypes>(grad.scalar_type(), [&]<typename T>() {
    check_launch(cuda::recurrent_weights_backward(
                     cuda::RecurrentWeightsBackward<T>{
                         .grad_terms = in<T>(grad),
                         .input = in<T>(a.input),
                         .input_step = a.input.stride(0),
                         .input_row = a.input.stride(1),
                         .input_col = a.input.stride(2),
                         .h0 = in<T>(h0),
                         .output = in<T>(output),
                         .reset = in<bool>(reset),
                         .w_x = in<T>(a.weight_x),
                         .w_row = a.weight_x ? a.weight_x->stride(0) : 0,
                         .w_col = a.weight_x ? a.weight_x->stride(1) : 0,
                         .grad_input = out<T>(grads.input),
                         .grad_w_x = out<T>(grads.w_x),
                         .grad_w_h = out<T>(grads.w_h),
                         .grad_bias_x = out<T>(grads.bias_x),
                         .grad_bias_h = out<T>(grads.bias_h),
                         .steps = a.steps(),
                         .batch = a.batch(),
                         .inputs = a.inputs(),
                         .hidden = a.hidden(),
                         .gates = a.gates,
                         .terms = a.columns() / std::max<int64_t>(a.hidden(), 1)},
                     device.stream()),
                 WeightsBackward::kName);
  });
  return grads;
}

}  // namespace

WeightsGradients cuda::weights_backward(const WeightsBackward& a) {
  const Device device(a.grad_gates);
  const bool dense = a.vectors == 0 && a.heads == 1;
  const bool few = dense && a.parameters &&
                   cuda::recurrent_weights_backward_faster(a.steps() * a.batch(), a.columns(),
                                                           a.inputs(), a.hidden());
  return few ? in_one_launch(a, device) : by_products(a, device);
}

STABLE_TORCH_LIBRARY_IMPL(my_ops, CUDA, m) {
  m.impl(WeightsBackward::kName, [](StableIValue* stack, uint64_t, uint64_t) {
    give(stack, cuda::weights_backward(weights_backward_arguments(stack)));
  });
}

}  // namespace my_ops
