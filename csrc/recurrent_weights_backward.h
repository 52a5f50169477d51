// The gradients of a recurrent layer's input and parameters from those of its terms: arguments,
// checks and the computation by products. my_ops/recurrent/_checks.py makes the same checks of fake
// tensors.
#pragma once

#include "recurrent_ops.h"

namespace my_ops {

struct WeightsBackward {
  static constexpr const char* kName = "recurrent_weights_backward";

  Tensor grad_gates, input, h0, output;
  std::optional<Tensor> weight_x, reset;  // without a weight grad_input is empty
  int64_t gates;
  bool parameters = true;  // whether their gradients are computed too, or the input's alone
  int64_t vectors = 0;     // parameters with a value for each unit, whose terms come last
  int64_t heads = 1;       // which divide the hidden units

  int64_t steps() const { return grad_gates.size(0); }
  int64_t batch() const { return grad_gates.size(1); }
  int64_t columns() const { return grad_gates.size(2); }
  int64_t inputs() const { return input.size(2); }
  int64_t hidden() const { return h0.size(1); }
  int64_t rows() const { return gates * hidden(); }  // of the weights
};

inline void check_weights_backward(const WeightsBackward& a) {
  constexpr const char* op = WeightsBackward::kName;
  check_floating(a.grad_gates, op, "grad_gates");
  const std::pair<const Tensor*, const char*> others[] = {
      {&a.input, "input"}, {&a.h0, "h0"}, {&a.output, "output"}};
  for (const auto& [t, name] : others) check_kind(*t, name, a.grad_gates, "grad_gates", op);
  if (a.weight_x) check_kind(*a.weight_x, "weight_x", a.grad_gates, "grad_gates", op);
  check(a.input.dim() == 3, op, ": input must be (steps, batch, input_size), got ", show(a.input));
  check(a.h0.dim() == 2, op, ": h0 must be (batch, hidden_size), got ", show(a.h0));
  const int64_t steps = a.input.size(0), batch = a.input.size(1), hidden = a.h0.size(1);
  check_shape(a.h0, "h0", {batch, hidden}, "(batch, hidden_size)", op);
  check_shape(a.output, "output", {steps, batch, hidden}, "(steps, batch, hidden_size)", op);
  check(a.gates >= 1, op, ": gates must be positive, got ", a.gates);
  const Tensor& grad = a.grad_gates;
  const int64_t columns = grad.dim() == 3 ? grad.size(2) : 0, gates = a.gates * hidden;
  check(grad.dim() == 3 && grad.size(0) == steps && grad.size(1) == batch && columns >= gates &&
            columns <= 2 * gates && columns % std::max<int64_t>(hidden, 1) == 0,
        op, ": grad_gates must be (steps, batch, terms * hidden_size) = (", steps, ", ", batch,
        ", ", gates, ") or more columns, at most twice as many, got ", show(grad));
  if (a.weight_x) {
    check_shape(*a.weight_x, "weight_x", {a.gates * hidden, a.input.size(2)},
                "(gates * hidden_size, input_size)", op);
  }
  check_masks({std::nullopt, a.reset, std::nullopt}, grad, "grad_gates", steps, batch, hidden, op);
}

inline WeightsBackward weights_backward_arguments(StableIValue* stack) {
  Stack given(stack);
  WeightsBackward a;
  for (Tensor* t : {&a.grad_gates, &a.input, &a.h0, &a.output}) *t = given.tensor();
  a.weight_x = given.optional();
  a.reset = given.optional();
  a.gates = given.integer();
  check_weights_backward(a);
  return a;
}

// Contiguous; without a weight the input's is empty, and without the parameters there is no other.
struct WeightsGradients {
  Tensor input, w_x, w_h, bias_x, bias_h;
  std::optional<Tensor> one;  // the weights of h and x side by side, in place of w_h and w_x
  std::vector<Tensor> vectors;
};
namespace cpu {
WeightsGradients weights_backward(WeightsBackward a, bool one_matrix = false);
}
namespace cuda {
WeightsGradients weights_backward(const WeightsBackward& a);
}

inline void give(StableIValue* stack, const WeightsGradients& g) {
  give(stack, g.input, g.w_x, g.w_h, g.bias_x, g.bias_h);
}

// Rows [first, first + count) of a contiguous tensor.
inline Tensor some_rows(const Tensor& t, int64_t first, int64_t count) {
  Sizes sizes = sizes_of(t);
  sizes[0] = count;
  return as_strided(t, sizes, contiguous_strides(sizes), first * (t.dim() > 1 ? t.size(1) : 1));
}

inline Tensor joined(const std::vector<Tensor>& parts, int64_t dim = 0) {
  return aten("aten::cat", "", parts, dim);
}

// The rows of a contiguous tensor from `first` on, then those before.
inline Tensor rotated(const Tensor& t, int64_t first) {
  if (first == 0) return t;
  return joined({some_rows(t, first, t.size(0) - first), some_rows(t, 0, first)});
}

// h before every step, (steps * batch, hidden).
inline Tensor before_steps(const WeightsBackward& a) {
  const Tensor output = all_steps(as_contiguous(a.output));
  if (output.size(0) == 0) return output;
  const int64_t rows = output.size(0);
  if (rows == a.batch() && !a.reset) return as_contiguous(a.h0);
  const Tensor h = joined({as_contiguous(a.h0), some_rows(output, 0, rows - a.batch())});
  if (a.reset) {
    aten("aten::masked_fill_", "Tensor", h, as_strided(as_contiguous(*a.reset), {rows, 1}, {1, 1}),
         zeros(h, {}, h.scalar_type()));
  }
  return h;
}

// That of the recurrent weights of several heads, (gates * hidden, hidden / heads), from the terms
// of the product with h, by columns of a contiguous matrix from `first` on: for each gate, a
// product of batches, of which each is a head.
template <typename ProductInto>
Tensor heads_gradient(const WeightsBackward& a, const Tensor& grad, int64_t first,
                      const ProductInto& product_into) {
  const int64_t rows = grad.size(0), all = grad.size(1), units = a.hidden() / a.heads;
  const Tensor before = before_steps(a), result = empty(grad, {a.rows(), units});
  const Tensor h = as_strided(before, {a.heads, rows, units}, {units, a.hidden(), 1});
  for (int64_t gate = 0; gate < a.gates; ++gate) {
    product_into(
        as_strided(grad, {a.heads, units, rows}, {units, 1, all}, first + gate * a.hidden()), h,
        as_strided(result, {a.heads, units, units}, {units * units, units, 1},
                   gate * a.hidden() * units));
  }
  return result;
}

// product_into(a, b, out) is out = a @ b, of matrices and, with several heads, of batches of them;
// sum(a), of contiguous rows, is their sum.
template <typename ProductInto, typename Sum>
WeightsGradients weights_gradients(const WeightsBackward& a, const ProductInto& product_into,
                                   const Sum& sum) {
  const auto product = [&](const Tensor& left, const Tensor& right) {
    const Tensor out = empty(left, {left.size(0), right.size(1)});
    product_into(left, right, out);
    return out;
  };
  const int64_t rows = a.steps() * a.batch(), gates = a.rows(), all = a.columns();
  const int64_t of_gates = all - a.vectors * a.hidden();
  const Tensor grad = all_steps(as_contiguous(a.grad_gates));
  const Tensor x = all_steps(as_contiguous(a.input));
  const auto columns = [&](int64_t first, int64_t count) {
    return as_strided(grad, {rows, count}, {all, 1}, first);
  };
  // The last input gates come first. Either those or the weights are put in order.
  const int64_t alone = of_gates - gates;
  const bool ordered = alone > 0 && rows <= 2 * a.inputs();
  const Tensor of_x =
      ordered ? joined({columns(alone, gates - alone), columns(0, alone)}, 1) : columns(0, gates);
  const Tensor of_h = columns(alone, gates);
  const int64_t first = ordered ? 0 : alone;  // of the weights' rows in of_x
  WeightsGradients grads{.input = empty(grad, {0})};
  if (a.weight_x) {
    const Tensor& w = *a.weight_x;
    const Tensor in_order = first == 0 ? w : rotated(as_contiguous(w), gates - first);
    const Sizes sizes = sizes_of(a.input);
    grads.input = as_strided(product(of_x, in_order), sizes, contiguous_strides(sizes));
  }
  if (!a.parameters) return grads;
  grads.w_x = rotated(product(transposed(of_x), x), first);
  grads.w_h = a.heads == 1 ? product(transposed(of_h), before_steps(a))
                           : heads_gradient(a, grad, alone, product_into);
  const Tensor sums = sum(grad);
  grads.bias_x = rotated(some_rows(sums, 0, gates), alone);
  grads.bias_h = copy(some_rows(sums, alone, gates), sums.scalar_type());
  for (int64_t at = of_gates; at < all; at += a.hidden()) {
    grads.vectors.push_back(copy(some_rows(sums, at, a.hidden()), sums.scalar_type()));
  }
  return grads;
}

}  // namespace my_ops
