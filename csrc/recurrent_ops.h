// Recurrent ops: the walk over the steps and the ops themselves, for any cell and on both backends.
//
// Op says whose ops they are: Cell, a cell of kernels/recurrent/cells that carries one value, c,
// and the names of its ops in messages, kCell, kCellBackward, kLayer and kLayerBackward.
//
// A Backend<Op> is made from a tensor, whose device it makes current, and has
//   storage(dtype)             the type in which it keeps activations of that dtype,
//   matmul(a, b, out)          out in the type of the arithmetic,
//   cell(...), cell_backward(...)   the pointwise part of a step,
//   sequence(...), sequence_backward(...)   all steps in one launch, or false where it has none,
//   dispatch(dtype, f)         f.operator()<T>() with the storage type,
//   ragged(args)               RaggedRows, RaggedShut, RaggedEnds or RaggedEndsBackward of
//                              include/recurrent.h.
#pragma once

#include <tuple>
#include <utility>

#include "recurrent/cells/cell.h"
#include "recurrent_checks.h"
#include "recurrent_ragged.h"

namespace my_ops {

// The tensors of one pointwise step; see include/recurrent.h for shapes.
struct CellTensors {
  Tensor gates_x, gates_h, bias, old_cell, new_h, new_cell;
  std::optional<Tensor> gates;

  template <typename T, typename Acc>
  RecurrentStep<T, Acc> args() const {
    return {.gates_x = in<Acc>(gates_x),
            .gates_h = in<Acc>(gates_h),
            .bias = in<T>(bias),
            .h = nullptr,
            .carried = in<Acc>(old_cell),
            .new_h = out<T>(new_h),
            .new_carried = out<Acc>(new_cell),
            .saved = gates ? out<T>(*gates) : nullptr,
            .batch = new_h.size(0),
            .hidden = new_h.size(1)};
  }
};

struct CellBackwardTensors {
  std::optional<Tensor> grad_h, grad_h_next, grad_cell;
  Tensor gates, old_cell, grad_gates, grad_old_cell;

  template <typename T, typename Acc>
  RecurrentStepBackward<T, Acc> args() const {
    return {.grad_h = in<T>(grad_h),
            .grad_h_next = in<Acc>(grad_h_next),
            .grad_carried = in<Acc>(grad_cell),
            .saved = in<T>(gates),
            .h = nullptr,
            .carried = in<Acc>(old_cell),
            .grad_terms = out<T>(grad_gates),
            .grad_h_direct = nullptr,
            .grad_carried_before = out<Acc>(grad_old_cell),
            .batch = old_cell.size(0),
            .hidden = old_cell.size(1)};
  }
};

// The tensors of all steps; see include/recurrent.h for shapes.
struct SequenceTensors {
  Tensor input, bias, weights, h0, c0, output, c_n;
  std::optional<Tensor> lengths, gates, cells;
};

struct SequenceBackwardTensors {
  std::optional<Tensor> grad_output, grad_h_n, grad_c_n;
  Tensor gates, cells, c0, weights, grad_gates, grad_h0, grad_c0;
};

// t[step] of a contiguous (steps, batch, columns).
inline Tensor step_of(const Tensor& t, int64_t step) {
  const int64_t batch = t.size(1), columns = t.size(2);
  return as_strided(t, {batch, columns}, {columns, 1}, step * batch * columns);
}

// A contiguous (steps, batch, columns) as (steps * batch, columns).
inline Tensor all_steps(const Tensor& t) {
  return as_strided(t, {t.size(0) * t.size(1), t.size(2)}, {t.size(2), 1});
}

// The columns of weights that multiply h and x, transposed to (columns, gates * hidden): views.
inline std::pair<Tensor, Tensor> split_weights(const Tensor& weights, int64_t hidden) {
  const int64_t gates = weights.size(0), row = weights.stride(0), col = weights.stride(1);
  return {as_strided(weights, {hidden, gates}, {col, row}),
          as_strided(weights, {weights.size(1) - hidden, gates}, {col, row}, hidden * col)};
}

// The columns of weights that multiply h: a view.
inline Tensor recurrent_weights(const Tensor& weights, int64_t hidden) {
  return as_strided(weights, {weights.size(0), hidden}, {weights.stride(0), weights.stride(1)});
}

// The columns of the terms' gradients, (batch, kTerms * hidden), that the product with h has: a
// view.
inline Tensor product_terms(const Tensor& grad_gates, int64_t columns) {
  if (grad_gates.size(1) == columns) return grad_gates;
  return as_strided(grad_gates, {grad_gates.size(0), columns}, {grad_gates.size(1), 1});
}

// new_h, new_cell, and with save the activated gates.
template <typename Backend>
std::tuple<Tensor, Tensor, std::optional<Tensor>> cell_step(const Backend& backend,
                                                            const Tensor& input,
                                                            const Tensor& weights,
                                                            const Tensor& bias, const Tensor& old_h,
                                                            const Tensor& old_cell, bool save) {
  const ScalarType acc = compute_dtype(input.scalar_type());
  using Cell = typename Backend::Cell;
  const int64_t batch = old_h.size(0), hidden = old_h.size(1);
  const auto [weights_h, weights_x] = split_weights(weights, hidden);
  CellTensors step{.gates_x = empty(input, {batch, Cell::kGates * hidden}, acc),
                   .gates_h = empty(input, {batch, Cell::kGates * hidden}, acc),
                   .bias = as_contiguous(bias),
                   .old_cell = as_contiguous(cast(old_cell, acc)),
                   .new_h = empty(input, {batch, hidden}),
                   .new_cell = empty(input, {batch, hidden}, acc),
                   .gates = std::nullopt};
  if (save) step.gates = empty(input, {batch, Cell::kSaved * hidden});
  backend.matmul(input, weights_x, step.gates_x);
  backend.matmul(old_h, weights_h, step.gates_h);
  backend.cell(step);
  return {step.new_h, cast(step.new_cell, input.scalar_type()), step.gates};
}

// grad_gates, grad_old_cell.
template <typename Backend>
std::tuple<Tensor, Tensor> cell_step_backward(const Backend& backend,
                                              const std::optional<Tensor>& grad_h,
                                              const std::optional<Tensor>& grad_cell,
                                              const Tensor& gates, const Tensor& old_cell) {
  using Cell = typename Backend::Cell;
  const ScalarType acc = compute_dtype(gates.scalar_type());
  CellBackwardTensors step{
      .grad_h = std::nullopt,
      .grad_h_next = std::nullopt,
      .grad_cell = std::nullopt,
      .gates = as_contiguous(gates),
      .old_cell = as_contiguous(cast(old_cell, acc)),
      .grad_gates = empty(gates, {old_cell.size(0), kTerms<Cell> * old_cell.size(1)}),
      .grad_old_cell = empty(gates, sizes_of(old_cell), acc)};
  if (grad_h) step.grad_h = as_contiguous(*grad_h);
  if (grad_cell) step.grad_cell = as_contiguous(cast(*grad_cell, acc));
  backend.cell_backward(step);
  return {step.grad_gates, cast(step.grad_old_cell, gates.scalar_type())};
}

// The share of the input in the pre-activations of all steps, (steps, batch, kGates * hidden), shut
// beyond the ends.
template <typename Backend>
Tensor gates_of_input(const Backend& backend, const Tensor& input, const Tensor& weights,
                      const std::optional<Tensor>& lengths, int64_t hidden) {
  const Tensor gates_x = empty(input, {input.size(0), input.size(1), weights.size(0)},
                               compute_dtype(input.scalar_type()));
  backend.matmul(all_steps(as_contiguous(input)), split_weights(weights, hidden).second,
                 all_steps(gates_x));
  if (lengths) shut_gates(backend, *lengths, gates_x);
  return gates_x;
}

struct Forward {
  Tensor output, h_n, c_n;  // in the type of the input
  std::optional<Tensor> gates,
      cells;  // (steps, batch, kSaved * hidden), and (steps, batch, hidden)
};

// With lengths: beyond the ends c stays and the output is 0, or NaN where c is.
template <typename Backend>
Forward forward_steps(const Backend& backend, const Tensor& input, const Tensor& h0,
                      const Tensor& c0, const Tensor& weights, const Tensor& bias,
                      const std::optional<Tensor>& lengths, bool save) {
  const ScalarType acc = compute_dtype(input.scalar_type());
  const int64_t steps = input.size(0), batch = input.size(1), hidden = h0.size(1);
  Forward result{.output = empty(input, {steps, batch, hidden}),
                 .h_n = {},
                 .c_n = {},
                 .gates = std::nullopt,
                 .cells = std::nullopt};
  if (save) {
    result.gates = empty(input, {steps, batch, Backend::Cell::kSaved * hidden});
    result.cells = empty(input, {steps, batch, hidden}, acc);
  }
  SequenceTensors sequence{.input = input,
                           .bias = as_contiguous(bias),
                           .weights = weights,
                           .h0 = as_contiguous(h0),
                           .c0 = as_contiguous(c0),
                           .output = result.output,
                           .c_n = empty(input, {batch, hidden}),
                           .lengths = lengths,
                           .gates = result.gates,
                           .cells = result.cells};
  if (steps > 0 && backend.sequence(sequence)) {
    result.h_n = copy(step_of(result.output, steps - 1), input.scalar_type());
    result.c_n = sequence.c_n;
    return result;
  }
  const Tensor gates_x = gates_of_input(backend, input, weights, lengths, hidden);
  const Tensor weights_h = split_weights(weights, hidden).first;
  CellTensors step{.gates_x = {},
                   .gates_h = empty(input, {batch, weights.size(0)}, acc),
                   .bias = as_contiguous(bias),
                   .old_cell = as_contiguous(cast(c0, acc)),
                   .new_h = as_contiguous(h0),
                   .new_cell = empty(input, {batch, hidden}, acc),
                   .gates = std::nullopt};
  for (int64_t t = 0; t < steps; ++t) {
    backend.matmul(step.new_h, weights_h, step.gates_h);
    step.gates_x = step_of(gates_x, t);
    step.new_h = step_of(result.output, t);
    if (save) {
      step.gates = step_of(*result.gates, t);
      step.new_cell = step_of(*result.cells, t);
    }
    backend.cell(step);
    step.old_cell = step.new_cell;
  }
  result.h_n = copy(step.new_h, input.scalar_type());
  result.c_n = copy(step.old_cell, input.scalar_type());
  return result;
}

template <typename Backend>
Forward forward_ragged(const Backend& backend, const Tensor& input, const Tensor& h0,
                       const Tensor& c0, const Tensor& weights, const Tensor& bias,
                       const Tensor& lengths, bool save) {
  const int64_t steps = input.size(0);
  // Rows without a step start from zero: what their state holds stays out of the gradients' sums.
  const auto start = [&](const Tensor& state) {
    return rows_with_steps(backend, lengths, steps, state, std::nullopt);
  };
  Forward result = forward_steps(backend, input, start(h0), start(c0), weights, bias,
                                 std::optional(lengths), save);
  result.h_n = output_ends(backend, lengths, result.output, h0);
  result.c_n = rows_with_steps(backend, lengths, steps, result.c_n, c0);
  return result;
}

// grad_gates of every step, grad_h0, grad_c0.
template <typename Backend>
std::tuple<Tensor, Tensor, Tensor> backward_steps(const Backend& backend,
                                                  const std::optional<Tensor>& grad_output,
                                                  const std::optional<Tensor>& grad_h_n,
                                                  const std::optional<Tensor>& grad_c_n,
                                                  const Tensor& gates, const Tensor& cells,
                                                  const Tensor& c0, const Tensor& weights) {
  const ScalarType dtype = gates.scalar_type(), acc = compute_dtype(dtype);
  const int64_t steps = cells.size(0), batch = cells.size(1), hidden = cells.size(2);
  const Tensor grad_gates = empty(gates, {steps, batch, kTerms<typename Backend::Cell> * hidden});
  const std::optional<Tensor> grad_output_ = as_contiguous(grad_output);
  SequenceBackwardTensors sequence{.grad_output = grad_output_,
                                   .grad_h_n = grad_h_n,
                                   .grad_c_n = grad_c_n,
                                   .gates = gates,
                                   .cells = cells,
                                   .c0 = c0,
                                   .weights = weights,
                                   .grad_gates = grad_gates,
                                   .grad_h0 = empty(gates, {batch, hidden}),
                                   .grad_c0 = empty(gates, {batch, hidden})};
  if (steps > 0 && backend.sequence_backward(sequence)) {
    return {grad_gates, sequence.grad_h0, sequence.grad_c0};
  }
  const Tensor weights_h = recurrent_weights(weights, hidden);
  const auto start = [&](const std::optional<Tensor>& grad) {
    return grad ? copy(*grad, acc) : zeros(gates, {batch, hidden}, acc);
  };
  const Tensor grad_h = start(grad_h_n), grad_cell = start(grad_c_n);
  CellBackwardTensors step{.grad_h = std::nullopt,
                           .grad_h_next = grad_h,
                           .grad_cell = grad_cell,
                           .gates = {},
                           .old_cell = {},
                           .grad_gates = {},
                           .grad_old_cell = grad_cell};
  for (int64_t t = steps - 1; t >= 0; --t) {
    if (grad_output_) step.grad_h = step_of(*grad_output_, t);
    step.gates = step_of(gates, t);
    step.old_cell = t > 0 ? step_of(cells, t - 1) : as_contiguous(cast(c0, acc));
    step.grad_gates = step_of(grad_gates, t);
    backend.cell_backward(step);
    backend.matmul(product_terms(step.grad_gates, weights.size(0)), weights_h, grad_h);
  }
  return {grad_gates, cast(grad_h, dtype), cast(grad_cell, dtype)};
}

// c0 is finite in rows without a step: the caller, who keeps such rows out of its sums, sees to it.
template <typename Backend>
std::tuple<Tensor, Tensor, Tensor> backward_ragged(const Backend& backend,
                                                   const std::optional<Tensor>& grad_output,
                                                   const std::optional<Tensor>& grad_h_n,
                                                   const std::optional<Tensor>& grad_c_n,
                                                   const Tensor& gates, const Tensor& cells,
                                                   const Tensor& c0, const Tensor& weights,
                                                   const Tensor& lengths) {
  const int64_t steps = cells.size(0);
  const Tensor grad =
      output_ends_backward(backend, lengths, cells, grad_output, grad_h_n, gates.scalar_type());
  const auto [grad_gates, grad_h0, grad_c0] = backward_steps(
      backend, std::optional(grad), std::nullopt, grad_c_n, gates, cells, c0, weights);
  return {grad_gates, rows_with_steps(backend, lengths, steps, grad_h0, grad_h_n), grad_c0};
}

// ------------------------------------------------------------------------------------------- ops

inline std::optional<Tensor> cast(const std::optional<Tensor>& t, ScalarType dtype) {
  return t ? std::optional(cast(*t, dtype)) : std::nullopt;
}

// The ops of a cell on a backend, to be registered under its names.
template <typename Op, template <typename> typename BackendOf>
struct RecurrentOps {
  using Backend = BackendOf<Op>;
  static_assert(Op::Cell::kCarried == 1 && !Op::Cell::kReadsH,
                "the schemas have c, and h in backward not");

  static std::tuple<Tensor, Tensor> cell(const Tensor& input, const Tensor& weights,
                                         const Tensor& bias, const Tensor& old_h,
                                         const Tensor& old_cell) {
    const auto [h, c, gates] = any_cell(input, weights, bias, old_h, old_cell, false);
    return {h, c};
  }

  static std::tuple<Tensor, Tensor, Tensor> cell_forward(const Tensor& input, const Tensor& weights,
                                                         const Tensor& bias, const Tensor& old_h,
                                                         const Tensor& old_cell) {
    const auto [h, c, gates] = any_cell(input, weights, bias, old_h, old_cell, true);
    return {h, c, *gates};
  }

  static std::tuple<Tensor, Tensor> cell_backward(const std::optional<Tensor>& grad_h,
                                                  const std::optional<Tensor>& grad_cell,
                                                  const Tensor& gates, const Tensor& old_cell) {
    check_cell_backward<Op>(grad_h, grad_cell, gates, old_cell);
    const Backend backend(gates);
    const ScalarType dtype = gates.scalar_type(), storage = Backend::storage(dtype);
    const auto [grad_gates, grad_old_cell] =
        cell_step_backward(backend, cast(grad_h, storage), cast(grad_cell, storage),
                           cast(gates, storage), cast(old_cell, storage));
    return {cast(grad_gates, dtype), cast(grad_old_cell, dtype)};
  }

  static std::tuple<Tensor, Tensor, Tensor> layer(const Tensor& input, const Tensor& h0,
                                                  const Tensor& c0, const Tensor& weights,
                                                  const Tensor& bias,
                                                  const std::optional<Tensor>& lengths) {
    const Forward r = any_layer(input, h0, c0, weights, bias, lengths, false);
    return {r.output, r.h_n, r.c_n};
  }

  static std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> layer_forward(
      const Tensor& input, const Tensor& h0, const Tensor& c0, const Tensor& weights,
      const Tensor& bias, const std::optional<Tensor>& lengths) {
    const Forward r = any_layer(input, h0, c0, weights, bias, lengths, true);
    return {r.output, r.h_n, r.c_n, *r.gates, *r.cells};
  }

  static std::tuple<Tensor, Tensor, Tensor> layer_backward(const std::optional<Tensor>& grad_output,
                                                           const std::optional<Tensor>& grad_h_n,
                                                           const std::optional<Tensor>& grad_c_n,
                                                           const Tensor& gates, const Tensor& cells,
                                                           const Tensor& c0, const Tensor& weights,
                                                           const std::optional<Tensor>& lengths) {
    check_layer_backward<Op>(grad_output, grad_h_n, grad_c_n, gates, cells, c0, weights, lengths);
    const Backend backend(gates);
    const ScalarType dtype = gates.scalar_type(), storage = Backend::storage(dtype);
    const auto grad_output_ = cast(grad_output, storage), grad_h_n_ = cast(grad_h_n, storage),
               grad_c_n_ = cast(grad_c_n, storage);
    const Tensor gates_ = as_contiguous(cast(gates, storage)), cells_ = as_contiguous(cells),
                 c0_ = cast(c0, storage), weights_ = cast(weights, storage);
    const auto [grad_gates, grad_h0, grad_c0] =
        lengths ? backward_ragged(backend, grad_output_, grad_h_n_, grad_c_n_, gates_, cells_, c0_,
                                  weights_, as_contiguous(*lengths))
                : backward_steps(backend, grad_output_, grad_h_n_, grad_c_n_, gates_, cells_, c0_,
                                 weights_);
    return {cast(grad_gates, dtype), cast(grad_h0, dtype), cast(grad_c0, dtype)};
  }

 private:
  static std::tuple<Tensor, Tensor, std::optional<Tensor>> any_cell(
      const Tensor& input, const Tensor& weights, const Tensor& bias, const Tensor& old_h,
      const Tensor& old_cell, bool save) {
    check_cell<Op>(input, weights, bias, old_h, old_cell);
    const Backend backend(input);
    const ScalarType dtype = input.scalar_type(), storage = Backend::storage(dtype);
    const auto [h, c, gates] =
        cell_step(backend, cast(input, storage), cast(weights, storage), cast(bias, storage),
                  cast(old_h, storage), cast(old_cell, storage), save);
    return {cast(h, dtype), cast(c, dtype), cast(gates, dtype)};
  }

  static Forward any_layer(const Tensor& input, const Tensor& h0, const Tensor& c0,
                           const Tensor& weights, const Tensor& bias,
                           const std::optional<Tensor>& lengths, bool save) {
    check_layer<Op>(input, h0, c0, weights, bias, lengths);
    const Backend backend(input);
    const ScalarType dtype = input.scalar_type(), storage = Backend::storage(dtype);
    const Tensor input_ = cast(input, storage), h0_ = cast(h0, storage), c0_ = cast(c0, storage),
                 weights_ = cast(weights, storage), bias_ = cast(bias, storage);
    const Forward r =
        lengths ? forward_ragged(backend, input_, h0_, c0_, weights_, bias_,
                                 as_contiguous(*lengths), save)
                : forward_steps(backend, input_, h0_, c0_, weights_, bias_, lengths, save);
    return {cast(r.output, dtype), cast(r.h_n, dtype), cast(r.c_n, dtype), cast(r.gates, dtype),
            r.cells};
  }
};

}  // namespace my_ops
