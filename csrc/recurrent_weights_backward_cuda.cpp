// The gradients of a recurrent layer's input and parameters on CUDA.
#include "binding_cuda.h"
#include "recurrent_weights_backward.h"

namespace my_ops {
namespace {

void weights_backward(StableIValue* stack, uint64_t, uint64_t) {
  const WeightsBackward a = weights_backward_arguments(stack);
  const Device device(a.grad_gates);
  const Tensor grad = as_contiguous(a.grad_gates), h0 = as_contiguous(a.h0),
               output = as_contiguous(a.output);
  const auto reset = as_contiguous(a.reset);
  const Sizes of_input = a.weight_x ? sizes_of(a.input) : Sizes{0};
  const Tensor grad_input = empty(grad, of_input), grad_w_x = empty(grad, {a.rows(), a.inputs()}),
               grad_w_h = empty(grad, {a.rows(), a.hidden()}), grad_b_x = empty(grad, {a.rows()}),
               grad_b_h = empty(grad, {a.rows()});
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
                         .grad_input = out<T>(grad_input),
                         .grad_w_x = out<T>(grad_w_x),
                         .grad_w_h = out<T>(grad_w_h),
                         .grad_bias_x = out<T>(grad_b_x),
                         .grad_bias_h = out<T>(grad_b_h),
                         .steps = a.steps(),
                         .batch = a.batch(),
                         .inputs = a.inputs(),
                         .hidden = a.hidden(),
                         .gates = a.gates,
                         .terms = a.columns() / std::max<int64_t>(a.hidden(), 1)},
                     device.stream()),
                 WeightsBackward::kName);
  });
  give(stack, grad_input, grad_w_x, grad_w_h, grad_b_x, grad_b_h);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(my_ops, CUDA, m) { m.impl(WeightsBackward::kName, &weights_backward); }

}  // namespace my_ops
