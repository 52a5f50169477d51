// The gradients of a recurrent layer's input and parameters from those of its terms: arguments and
// checks. my_ops/recurrent/_checks.py makes the same checks of fake tensors.
#pragma once

#include "recurrent_ops.h"

namespace my_ops {

struct WeightsBackward {
  static constexpr const char* kName = "recurrent_weights_backward";

  Tensor grad_gates, input, h0, output;
  std::optional<Tensor> weight_x, reset;  // without a weight grad_input is empty
  int64_t gates;

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

}  // namespace my_ops
