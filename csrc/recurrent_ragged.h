// The work around the steps for ragged batches and resets: turns tensors into the structs of
// include/recurrent.h. For Backend see recurrent_steps.h.
#pragma once

#include "../include/recurrent.h"
#include "binding.h"

namespace my_ops {

// Rows of `some` for rows that have a step, and else those of `none`, or zero.
template <typename Backend>
Tensor rows_with_steps(const Backend& backend, const Tensor& lengths, int64_t steps,
                       const Tensor& some, const std::optional<Tensor>& none) {
  const Tensor rows = empty(some, sizes_of(some));
  const Tensor some_ = as_contiguous(some);
  const auto none_ = as_contiguous(none);
  backend.dispatch(some.scalar_type(), [&]<typename T>() {
    backend.ragged(RaggedRows<T>{.some = in<T>(some_),
                                 .none = in<T>(none_),
                                 .out = out<T>(rows),
                                 .lengths = in<int64_t>(lengths),
                                 .steps = steps,
                                 .batch = some.size(0),
                                 .hidden = some.size(1)});
  });
  return rows;
}

template <typename Backend>
void shut_gates(const Backend& backend, const Tensor& lengths, const Tensor& gates_x) {
  const int gates = backend.cell.gates;
  const auto launch = [&]<typename Acc>() {
    RaggedShut<Acc> args{.gates_x = out<Acc>(gates_x),
                         .gates = gates,
                         .shut = {},
                         .lengths = in<int64_t>(lengths),
                         .steps = gates_x.size(0),
                         .batch = gates_x.size(1),
                         .hidden = gates_x.size(2) / gates};
    for (int gate = 0; gate < gates; ++gate) {
      args.shut[gate] = backend.template shut<Acc>(gate);
    }
    backend.ragged(args);
  };
  if (gates_x.scalar_type() == ScalarType::Double) {
    launch.template operator()<double>();
  } else {
    launch.template operator()<float>();
  }
}

// Sets the output after the rows' ends to 0. Returns h_n.
template <typename Backend>
Tensor output_ends(const Backend& backend, const Tensor& lengths, const Tensor& output,
                   const Tensor& h0) {
  const Tensor h_n = empty(h0, sizes_of(h0)), h0_ = as_contiguous(h0);
  backend.dispatch(output.scalar_type(), [&]<typename T>() {
    backend.ragged(RaggedEnds<T>{.output = out<T>(output),
                                 .h0 = in<T>(h0_),
                                 .h_n = out<T>(h_n),
                                 .lengths = in<int64_t>(lengths),
                                 .steps = output.size(0),
                                 .batch = output.size(1),
                                 .hidden = output.size(2)});
  });
  return h_n;
}

// The gradient of the steps' own output.
template <typename Backend>
Tensor output_ends_backward(const Backend& backend, const Tensor& lengths, const Tensor& like,
                            const Sizes& sizes, const std::optional<Tensor>& grad_output,
                            const std::optional<Tensor>& grad_h_n) {
  const auto grad_output_ = as_contiguous(grad_output), grad_h_n_ = as_contiguous(grad_h_n);
  const Tensor grad = empty(like, sizes);
  backend.dispatch(like.scalar_type(), [&]<typename T>() {
    backend.ragged(RaggedEndsBackward<T>{.grad_output = in<T>(grad_output_),
                                         .grad_h_n = in<T>(grad_h_n_),
                                         .grad = out<T>(grad),
                                         .lengths = in<int64_t>(lengths),
                                         .steps = sizes[0],
                                         .batch = sizes[1],
                                         .hidden = sizes[2]});
  });
  return grad;
}

// Resets without those after the rows' ends.
template <typename Backend>
Tensor resets_of_steps(const Backend& backend, const Tensor& lengths, const Tensor& reset) {
  const Tensor result = empty(reset, sizes_of(reset));
  backend.ragged(RaggedReset{.reset = in<bool>(reset),
                             .out = out<bool>(result),
                             .lengths = in<int64_t>(lengths),
                             .steps = reset.size(0),
                             .batch = reset.size(1)});
  return result;
}

// The gradient of the first h, in dtype.
template <typename Backend>
Tensor start_backward(const Backend& backend, const Tensor& through,
                      const std::optional<Tensor>& direct, const std::optional<Tensor>& reset,
                      ScalarType dtype) {
  const Tensor grad_h0 = empty(through, sizes_of(through), dtype);
  backend.dispatch(dtype, [&]<typename T>() {
    using Acc = std::conditional_t<std::is_same_v<T, double>, double, float>;
    backend.ragged(RaggedStartBackward<T, Acc>{.through = in<Acc>(through),
                                               .direct = in<Acc>(direct),
                                               .reset = in<bool>(reset),
                                               .grad_h0 = out<T>(grad_h0),
                                               .lengths = nullptr,
                                               .steps = 1,
                                               .batch = through.size(0),
                                               .hidden = through.size(1)});
  });
  return grad_h0;
}

}  // namespace my_ops
