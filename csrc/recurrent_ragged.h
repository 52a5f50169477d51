// Ragged batches: what surrounds the steps, from tensors to the structs of include/recurrent.h.
// Backend: see recurrent_ops.h.
#pragma once

#include "../include/recurrent.h"
#include "binding.h"

namespace my_ops {

// Rows of `some` where a row has a step, else of `none`, or zero.
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
  using Cell = typename Backend::Cell;
  const auto launch = [&]<typename Acc>() {
    RaggedShut<Acc> args{.gates_x = out<Acc>(gates_x),
                         .gates = Cell::kGates,
                         .shut = {},
                         .lengths = in<int64_t>(lengths),
                         .steps = gates_x.size(0),
                         .batch = gates_x.size(1),
                         .hidden = gates_x.size(2) / Cell::kGates};
    static_assert(Cell::kGates <= args.kMaxGates);
    for (int gate = 0; gate < Cell::kGates; ++gate) {
      args.shut[gate] = Cell::template shut<Acc>(gate);
    }
    backend.ragged(args);
  };
  if (gates_x.scalar_type() == ScalarType::Double) {
    launch.template operator()<double>();
  } else {
    launch.template operator()<float>();
  }
}

// Clears the output beyond the ends; h_n.
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
Tensor output_ends_backward(const Backend& backend, const Tensor& lengths, const Tensor& cells,
                            const std::optional<Tensor>& grad_output,
                            const std::optional<Tensor>& grad_h_n, ScalarType dtype) {
  const auto grad_output_ = as_contiguous(grad_output), grad_h_n_ = as_contiguous(grad_h_n);
  const Tensor grad = empty(cells, sizes_of(cells), dtype);
  backend.dispatch(dtype, [&]<typename T>() {
    backend.ragged(RaggedEndsBackward<T>{.grad_output = in<T>(grad_output_),
                                         .grad_h_n = in<T>(grad_h_n_),
                                         .grad = out<T>(grad),
                                         .lengths = in<int64_t>(lengths),
                                         .steps = cells.size(0),
                                         .batch = cells.size(1),
                                         .hidden = cells.size(2)});
  });
  return grad;
}

}  // namespace my_ops
