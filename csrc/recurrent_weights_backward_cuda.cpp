// The gradients of a recurrent layer's input and parameters on CUDA: in one launch, or by products.
#include "gemm_cuda.h"
#include "recurrent_steps.h"
#include "recurrent_weights_backward.h"

namespace my_ops {
namespace {

// Up to here one launch is faster on the host, and up to 17 us slower on the GPU.
constexpr int64_t kFewRows = 256;
constexpr int64_t kMostWork = int64_t{1} << 28;  // multiply-adds of all products

struct WeightsGradients {
  Tensor input, w_x, w_h, bias_x, bias_h;
};

// Contiguous rows [first, first + count) of a contiguous tensor.
Tensor rows_of(const Tensor& t, int64_t first, int64_t count) {
  Sizes sizes = sizes_of(t);
  const int64_t row = t.dim() > 1 ? t.size(1) : 1;
  sizes[0] = count;
  return as_strided(t, sizes, contiguous_strides(sizes), first * row);
}

// to = the rows of from, contiguous, from `first` on, then those before.
void rotate(const Tensor& from, int64_t first, const Tensor& to) {
  const int64_t rest = from.size(0) - first;
  Tensor front = rows_of(to, 0, rest), back = rows_of(to, rest, first);
  torch::stable::copy_(front, rows_of(from, first, rest));
  torch::stable::copy_(back, rows_of(from, 0, first));
}

// h before every step, (steps * batch, hidden).
Tensor before(const Tensor& h0, const Tensor& output, const std::optional<Tensor>& reset) {
  const int64_t rows = output.size(0) * output.size(1), batch = output.size(1);
  Tensor result = empty(output, {rows, output.size(2)});
  Tensor first = rows_of(result, 0, batch), others = rows_of(result, batch, rows - batch);
  torch::stable::copy_(first, h0);
  torch::stable::copy_(others, rows_of(all_steps(output), 0, rows - batch));
  if (reset) {
    aten("aten::masked_fill_", "Tensor", result, as_strided(*reset, {rows, 1}, {1, 1}),
         zeros(output, {}, output.scalar_type()));
  }
  return result;
}

void by_products(const WeightsBackward& a, const Tensor& terms, const Tensor& h0,
                 const Tensor& output, const std::optional<Tensor>& reset,
                 const WeightsGradients& grads, const Device& device) {
  std::optional<Name> precision;
  if (terms.scalar_type() == ScalarType::Float && library_rounds().value_or(false)) {
    precision.emplace("tf32", 4);
  }
  const auto multiply = [&](const Tensor& left, const Tensor& right, const Tensor& out) {
    gemm_into(left, right, out, precision, device);
  };
  const int64_t rows = a.steps() * a.batch(), gates = a.rows(), all = a.columns();
  const int64_t alone = all - gates;  // the last gates' shares of the input come first
  const Tensor grad = all_steps(terms), x = all_steps(as_contiguous(a.input));
  const Tensor of_x = as_strided(grad, {rows, gates}, {all, 1}), of_h = product_terms(grad, gates);
  if (a.weight_x) {
    Tensor weight = *a.weight_x;
    if (alone > 0) {
      weight = empty(terms, {gates, a.inputs()});
      rotate(as_contiguous(*a.weight_x), gates - alone, weight);
    }
    multiply(of_x, weight, all_steps(grads.input));
  }
  const Tensor w_x = alone > 0 ? empty(terms, {gates, a.inputs()}) : grads.w_x;
  multiply(transposed(of_x), x, w_x);
  if (alone > 0) rotate(w_x, alone, grads.w_x);
  multiply(transposed(of_h), before(h0, output, reset), grads.w_h);
  const Tensor sums = aten("aten::sum", "dim_IntList", grad, std::optional(Sizes{0}), false,
                           std::optional<ScalarType>());
  rotate(rows_of(sums, 0, gates), alone, grads.bias_x);
  Tensor bias_h = grads.bias_h;
  torch::stable::copy_(bias_h, rows_of(sums, alone, gates));
}

void weights_backward(StableIValue* stack, uint64_t, uint64_t) {
  const WeightsBackward a = weights_backward_arguments(stack);
  const Device device(a.grad_gates);
  const Tensor grad = as_contiguous(a.grad_gates), h0 = as_contiguous(a.h0),
               output = as_contiguous(a.output);
  const auto reset = as_contiguous(a.reset);
  const WeightsGradients grads{
      empty(grad, a.weight_x ? sizes_of(a.input) : Sizes{0}), empty(grad, {a.rows(), a.inputs()}),
      empty(grad, {a.rows(), a.hidden()}), empty(grad, {a.rows()}), empty(grad, {a.rows()})};
  const auto give_all = [&] {
    give(stack, grads.input, grads.w_x, grads.w_h, grads.bias_x, grads.bias_h);
  };
  const int64_t rows = a.steps() * a.batch();
  if (rows > kFewRows || rows * a.columns() * (2 * a.inputs() + a.hidden()) > kMostWork) {
    by_products(a, grad, h0, output, reset, grads, device);
    return give_all();
  }
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
  give_all();
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(my_ops, CUDA, m) { m.impl(WeightsBackward::kName, &weights_backward); }

}  // namespace my_ops
