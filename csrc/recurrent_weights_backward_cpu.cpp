// The gradients of a recurrent layer's input and parameters on the CPU: ATen's products. The 16-bit
// types are computed in float.
#include <cstring>

#include "binding_cpu.h"
#include "recurrent_weights_backward.h"

namespace my_ops {
namespace {

// Columns of a contiguous tensor, whose last dimension is `all`, as a matrix.
Tensor matrix(const Tensor& t, int64_t rows, int64_t all, int64_t first, int64_t count) {
  return as_strided(t, {rows, count}, {all, 1}, first);
}

Tensor mm(const Tensor& a, const Tensor& b) {
  const Tensor out = empty(a, {a.size(0), b.size(1)});
  aten("aten::mm", "out", a, b, out);
  return out;
}

// h before every step, (steps * batch, hidden).
Tensor before(const Tensor& h0, const Tensor& output, const std::optional<Tensor>& reset) {
  const int64_t steps = output.size(0), batch = output.size(1), hidden = output.size(2);
  const Tensor result = empty(output, {steps * batch, hidden});
  const size_t row = static_cast<size_t>(hidden * output.element_size());
  char* const to = static_cast<char*>(result.mutable_data_ptr());
  for (int64_t r = 0; r < steps * batch; ++r) {
    if (reset && in<bool>(*reset)[r]) {
      std::memset(to + r * row, 0, row);
    } else {
      const bool first = r < batch;
      std::memcpy(to + r * row, in<char>(first ? h0 : output) + (first ? r : r - batch) * row, row);
    }
  }
  return result;
}

void weights_backward(StableIValue* stack, uint64_t, uint64_t) {
  const WeightsBackward a = weights_backward_arguments(stack);
  const ScalarType dtype = a.grad_gates.scalar_type(), acc = compute_dtype(dtype);
  const auto dense = [&](const Tensor& t) { return as_contiguous(cast(t, acc)); };
  const int64_t rows = a.steps() * a.batch(), gates = a.rows(), all = a.columns();
  const int64_t alone = all - gates, both = gates - alone;
  const Tensor grad = dense(a.grad_gates);
  const Tensor x = matrix(dense(a.input), rows, a.inputs(), 0, a.inputs());
  const Tensor of_h = matrix(grad, rows, all, alone, gates);
  Tensor of_x = of_h;
  if (alone > 0) {  // the last gates' shares of the input come first
    of_x = empty(grad, {rows, gates});
    Tensor first = matrix(of_x, rows, gates, 0, both),
           last = matrix(of_x, rows, gates, both, alone);
    torch::stable::copy_(first, matrix(grad, rows, all, alone, both));
    torch::stable::copy_(last, matrix(grad, rows, all, 0, alone));
  }
  const Tensor h = before(dense(a.h0), dense(a.output), as_contiguous(a.reset));
  Tensor ones = empty(grad, {1, rows});
  torch::stable::fill_(ones, 1.0);
  const auto total = [&](const Tensor& t) { return as_strided(mm(ones, t), {gates}, {1}); };
  Tensor grad_input = empty(grad, {0});
  if (a.weight_x) {
    const Sizes sizes = sizes_of(a.input);
    grad_input = as_strided(mm(of_x, cast(*a.weight_x, acc)), sizes, contiguous_strides(sizes));
  }
  give(stack, cast(grad_input, dtype), cast(mm(transposed(of_x), x), dtype),
       cast(mm(transposed(of_h), h), dtype), cast(total(of_x), dtype), cast(total(of_h), dtype));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(my_ops, CPU, m) { m.impl(WeightsBackward::kName, &weights_backward); }

}  // namespace my_ops
