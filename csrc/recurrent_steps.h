// Recurrent ops: the loop over the steps, for any cell and on both backends.
//
// A Backend<Op> (recurrent_cpu.h, recurrent_cuda.h) is made from a tensor and makes its device
// current. It has
//   cell                       the CellSizes of the cell,
//   shut<Acc>(gate)            as the cell has it, unless a step leaves out rows that have ended,
//   storage(dtype)             the type in which a step reads and writes activations of that dtype,
//   storage_of_backward(dtype)                       the same of a step backward,
//   storage_of_layer(dtype, weights, steps, batch, masks)   of all steps, with so many weights,
//   storage_of_weights(dtype)  the type in which it reads parameters,
//   matmul(a, b, out)          out in the type of the arithmetic,
//   prepared(b, rows)          prepares b for many products with that many rows,
//   step(...), step_backward(...)   the pointwise part of a step,
//   sequence(...), sequence_backward(...)   all steps in one launch, or false if it cannot,
//   dispatch(dtype, f)         f.operator()<T>() with the storage type,
//   ragged(args)               one of the structs Ragged... of include/recurrent.h.
#pragma once

#include <tuple>
#include <utility>

#include "recurrent_checks.h"
#include "recurrent_ragged.h"

namespace my_ops {

// The tensors of one pointwise step; see include/recurrent.h for shapes.
struct StepTensors {
  Tensor gates_x, gates_h;
  std::optional<Tensor> bias_x, bias_h, vectors;
  Tensor h;
  std::optional<Tensor> carried, lengths, reset, zoneout;
  Tensor new_h;
  std::optional<Tensor> new_carried, kept_carried, saved;
  int64_t t = 0;

  template <typename T, typename Acc>
  RecurrentStep<T, Acc> args() const {
    return {.gates_x = in<Acc>(gates_x),
            .gates_h = in<Acc>(gates_h),
            .bias_x = in<T>(bias_x),
            .bias_h = in<T>(bias_h),
            .vectors = in<T>(vectors),
            .h = in<T>(h),
            .carried = in<Acc>(carried),
            .lengths = in<int64_t>(lengths),
            .reset = in<bool>(reset),
            .zoneout = in<T>(zoneout),
            .new_h = out<T>(new_h),
            .new_carried = out<Acc>(new_carried),
            .kept_carried = out<T>(kept_carried),
            .saved = out<T>(saved),
            .t = t,
            .batch = new_h.size(0),
            .hidden = new_h.size(1)};
  }
};

struct StepBackwardTensors {
  std::optional<Tensor> grad_h, grad_h_next, grad_carried;
  Tensor saved;
  std::optional<Tensor> h, carried;
  Tensor grad_terms;
  std::optional<Tensor> grad_h_direct, grad_carried_before, lengths, reset, reset_next, zoneout;
  int64_t t, batch, hidden;

  template <typename T, typename Acc>
  RecurrentStepBackward<T, Acc> args() const {
    return {.grad_h = in<T>(grad_h),
            .grad_h_next = in<Acc>(grad_h_next),
            .grad_carried = in<Acc>(grad_carried),
            .saved = in<T>(saved),
            .h = in<T>(h),
            .carried = in<T>(carried),
            .grad_terms = out<T>(grad_terms),
            .grad_h_direct = out<Acc>(grad_h_direct),
            .grad_carried_before = out<Acc>(grad_carried_before),
            .lengths = in<int64_t>(lengths),
            .reset = in<bool>(reset),
            .reset_next = in<bool>(reset_next),
            .zoneout = in<T>(zoneout),
            .t = t,
            .batch = batch,
            .hidden = hidden};
  }
};

// The tensors of all steps; see include/recurrent.h for shapes. All have the input's type; all
// except the input and the weights are contiguous.
struct SequenceTensors {
  Tensor input;
  Weights weights;
  Tensor h0;
  std::optional<Tensor> c0;
  Masks masks;
  Tensor output, h_n;
  std::optional<Tensor> c_n, saved, carried;
};

struct SequenceBackwardTensors {
  std::optional<Tensor> grad_output, grad_h_n, grad_c_n;
  Tensor saved;
  std::optional<Tensor> carried, output, h0, c0;
  Tensor weights_h;
  std::optional<Tensor> lengths, reset, zoneout;
  Tensor grad_terms, grad_h0;
  std::optional<Tensor> grad_c0;
  int64_t steps, batch, hidden;
  bool of_states;  // whether grad_h0 and grad_c0 are read
};

// t[step] of a contiguous (steps, batch, columns).
inline Tensor step_of(const Tensor& t, int64_t step) {
  const int64_t batch = t.size(1), columns = t.size(2);
  return as_strided(t, {batch, columns}, {columns, 1}, step * batch * columns);
}
inline std::optional<Tensor> step_of(const std::optional<Tensor>& t, int64_t step) {
  return t ? std::optional(step_of(*t, step)) : std::nullopt;
}

// t[step] of a contiguous (steps, batch); none after the last step.
inline std::optional<Tensor> reset_of(const std::optional<Tensor>& t, int64_t step) {
  if (!t || step >= t->size(0)) return std::nullopt;
  return as_strided(*t, {t->size(1)}, {1}, step * t->size(1));
}

// A contiguous (steps, batch, columns) as (steps * batch, columns).
inline Tensor all_steps(const Tensor& t) {
  return as_strided(t, {t.size(0) * t.size(1), t.size(2)}, {t.size(2), 1});
}

// A view.
inline Tensor transposed(const Tensor& t) {
  return as_strided(t, {t.size(1), t.size(0)}, {t.stride(1), t.stride(0)});
}

// The columns of the terms' gradients, (batch, kTerms * hidden), that belong to the product with h,
// as a view.
inline Tensor product_terms(const Tensor& grad_terms, const CellSizes& cell) {
  if (cell.terms == cell.gates) return grad_terms;
  const int64_t all = grad_terms.size(1), hidden = all / cell.terms;
  const int64_t apart = cell.terms - cell.gates - cell.vectors;
  return as_strided(grad_terms, {grad_terms.size(0), cell.gates * hidden}, {all, 1},
                    apart * hidden);
}

inline std::optional<Tensor> cast(const std::optional<Tensor>& t, ScalarType dtype) {
  return t ? std::optional(cast(*t, dtype)) : std::nullopt;
}

// Returns new_h, new_carried in the type of the arithmetic and, with save, the saved values.
template <typename Backend>
StepTensors one_step(const Backend& backend, const Tensor& input, const Weights& weights,
                     const Tensor& old_h, const std::optional<Tensor>& old_carried, bool save) {
  const ScalarType acc = compute_dtype(input.scalar_type());
  const CellSizes& cell = backend.cell;
  const int64_t batch = old_h.size(0), hidden = old_h.size(1);
  StepTensors step{.gates_x = empty(input, {batch, cell.gates * hidden}, acc),
                   .gates_h = empty(input, {batch, cell.gates * hidden}, acc),
                   .bias_x = weights.bias_x,
                   .bias_h = weights.bias_h,
                   .vectors = weights.vectors,
                   .h = cell.reads_h ? as_contiguous(old_h) : old_h,
                   .carried = as_contiguous(cast(old_carried, acc)),
                   .lengths = std::nullopt,
                   .reset = std::nullopt,
                   .zoneout = std::nullopt,
                   .new_h = empty(input, {batch, hidden}),
                   .new_carried = std::nullopt,
                   .kept_carried = std::nullopt,
                   .saved = std::nullopt};
  if (cell.carried > 0) step.new_carried = empty(input, {batch, cell.carried * hidden}, acc);
  if (save) step.saved = empty(input, {batch, cell.saved * hidden});
  if (step.new_h.numel() == 0) return step;
  backend.matmul(input, transposed(weights.x), step.gates_x);
  backend.matmul(old_h, transposed(weights.h), step.gates_h);
  backend.step(step);
  return step;
}

// The gradients of the terms, of h without the part through the weights, and of carried values.
template <typename Backend>
StepBackwardTensors one_step_backward(const Backend& backend, const std::optional<Tensor>& grad_h,
                                      const std::optional<Tensor>& grad_carried,
                                      const Tensor& saved, const std::optional<Tensor>& old_h,
                                      const std::optional<Tensor>& old_carried) {
  const CellSizes& cell = backend.cell;
  const ScalarType acc = compute_dtype(saved.scalar_type());
  const int64_t batch = saved.size(0), hidden = saved.size(1) / cell.saved;
  StepBackwardTensors step{.grad_h = as_contiguous(grad_h),
                           .grad_h_next = std::nullopt,
                           .grad_carried = as_contiguous(cast(grad_carried, acc)),
                           .saved = as_contiguous(saved),
                           .h = as_contiguous(old_h),
                           .carried = as_contiguous(old_carried),
                           .grad_terms = empty(saved, {batch, cell.terms * hidden}),
                           .grad_h_direct = std::nullopt,
                           .grad_carried_before = std::nullopt,
                           .lengths = std::nullopt,
                           .reset = std::nullopt,
                           .reset_next = std::nullopt,
                           .zoneout = std::nullopt,
                           .t = 0,
                           .batch = batch,
                           .hidden = hidden};
  if (cell.reads_h) step.grad_h_direct = zeros(saved, {batch, hidden}, acc);
  if (cell.carried > 0) {
    step.grad_carried_before = empty(saved, {batch, cell.carried * hidden}, acc);
  }
  if (batch > 0 && hidden > 0) backend.step_backward(step);
  return step;
}

// The input gates of all steps, (steps, batch, kGates * hidden), shut after the rows' ends if the
// backend does that.
template <typename Backend>
Tensor gates_of_input(const Backend& backend, const SequenceTensors& s) {
  const Tensor gates_x = empty(s.input, {s.input.size(0), s.input.size(1), s.weights.x.size(0)},
                               compute_dtype(s.input.scalar_type()));
  backend.matmul(all_steps(as_contiguous(s.input)), transposed(s.weights.x), all_steps(gates_x));
  if constexpr (requires { backend.template shut<float>(0); }) {
    if (s.masks.lengths) shut_gates(backend, *s.masks.lengths, gates_x);
  }
  return gates_x;
}

struct Forward {
  Tensor output, h_n;  // in the type of the input
  std::optional<Tensor> c_n, saved, carried;
};

// Where the states at the end go; new tensors by default.
struct Ends {
  std::optional<Tensor> h_n, c_n;
};

// With lengths: after a row's end c stays, and the output is 0, or NaN where c is NaN.
template <typename Backend>
Forward forward_steps(const Backend& backend, const Tensor& input, const Tensor& h0,
                      const std::optional<Tensor>& c0, const Weights& weights, const Masks& masks,
                      bool save, const Ends& ends = {}) {
  const CellSizes& cell = backend.cell;
  const ScalarType dtype = input.scalar_type(), acc = compute_dtype(dtype);
  const int64_t steps = input.size(0), batch = input.size(1), hidden = h0.size(1);
  SequenceTensors s{.input = input,
                    .weights = weights,
                    .h0 = as_contiguous(h0),
                    .c0 = as_contiguous(c0),
                    .masks = masks,
                    .output = empty(input, {steps, batch, hidden}),
                    .h_n = ends.h_n ? *ends.h_n : empty(input, {batch, hidden}),
                    .c_n = ends.c_n,
                    .saved = std::nullopt,
                    .carried = std::nullopt};
  if (cell.carried > 0 && !s.c_n) s.c_n = empty(input, {batch, cell.carried * hidden});
  if (save) s.saved = empty(input, {steps, batch, cell.saved * hidden});
  if (save && cell.carried > 0) s.carried = empty(input, {steps, batch, cell.carried * hidden});
  const bool done = s.h_n.numel() == 0 || (steps > 0 && backend.sequence(s));
  if (done) return {s.output, s.h_n, s.c_n, s.saved, s.carried};
  const Tensor gates_x = gates_of_input(backend, s);
  StepTensors step{.gates_x = {},
                   .gates_h = empty(input, {batch, weights.h.size(0)}, acc),
                   .bias_x = weights.bias_x,
                   .bias_h = weights.bias_h,
                   .vectors = weights.vectors,
                   .h = s.h0,
                   .carried = as_contiguous(cast(c0, acc)),
                   .lengths = masks.lengths,
                   .reset = std::nullopt,
                   .zoneout = std::nullopt,
                   .new_h = s.h0,
                   .new_carried = std::nullopt,
                   .kept_carried = std::nullopt,
                   .saved = std::nullopt};
  if (cell.carried > 0) step.new_carried = empty(input, {batch, cell.carried * hidden}, acc);
  const auto weights_h = backend.prepared(transposed(weights.h), batch);
  for (int64_t t = 0; t < steps; ++t) {
    step.t = t;
    step.h = step.new_h;
    backend.matmul(step.h, weights_h, step.gates_h);
    step.gates_x = step_of(gates_x, t);
    step.reset = reset_of(masks.reset, t);
    step.zoneout = step_of(masks.zoneout, t);
    step.new_h = step_of(s.output, t);
    step.saved = step_of(s.saved, t);
    if (s.carried) (dtype == acc ? step.new_carried : step.kept_carried) = step_of(s.carried, t);
    backend.step(step);
    step.carried = step.new_carried;
  }
  torch::stable::copy_(s.h_n, step.new_h);
  if (s.c_n) torch::stable::copy_(*s.c_n, *step.carried);
  return {s.output, s.h_n, s.c_n, s.saved, s.carried};
}

template <typename Backend>
Forward forward_ragged(const Backend& backend, const Tensor& input, const Tensor& h0,
                       const std::optional<Tensor>& c0, const Weights& weights, const Masks& masks,
                       bool save) {
  const int64_t steps = input.size(0);
  const Tensor& lengths = *masks.lengths;
  // Rows without a step start from zero, so that their state does not enter the gradients' sums.
  const Tensor start_h = rows_with_steps(backend, lengths, steps, h0, std::nullopt);
  std::optional<Tensor> start_c;
  if (c0) start_c = rows_with_steps(backend, lengths, steps, *c0, std::nullopt);
  Forward result = forward_steps(backend, input, start_h, start_c, weights, masks, save);
  result.h_n = output_ends(backend, lengths, result.output, h0);
  if (c0) result.c_n = rows_with_steps(backend, lengths, steps, *result.c_n, c0);
  return result;
}

struct Backward {
  Tensor grad_terms, grad_h0;
  std::optional<Tensor> grad_c0;
};

// What backward reads besides the gradients. All except weights_h are contiguous.
struct SavedTensors {
  Tensor saved;
  std::optional<Tensor> carried, output, h0, c0;
  Tensor weights_h;
  int64_t steps, batch, hidden;
  bool of_states = true;  // whether the gradients of h0 and c0 are read
};

template <typename Backend>
Backward backward_steps(const Backend& backend, const std::optional<Tensor>& grad_output,
                        const std::optional<Tensor>& grad_h_n,
                        const std::optional<Tensor>& grad_c_n, const SavedTensors& of_forward,
                        const Masks& masks) {
  const CellSizes& cell = backend.cell;
  const ScalarType dtype = of_forward.saved.scalar_type(), acc = compute_dtype(dtype);
  const int64_t steps = of_forward.steps, batch = of_forward.batch, hidden = of_forward.hidden;
  const Tensor& like = of_forward.saved;
  SequenceBackwardTensors s{.grad_output = as_contiguous(grad_output),
                            .grad_h_n = grad_h_n,
                            .grad_c_n = grad_c_n,
                            .saved = of_forward.saved,
                            .carried = of_forward.carried,
                            .output = of_forward.output,
                            .h0 = of_forward.h0,
                            .c0 = of_forward.c0,
                            .weights_h = of_forward.weights_h,
                            .lengths = masks.lengths,
                            .reset = masks.reset,
                            .zoneout = masks.zoneout,
                            .grad_terms = empty(like, {steps, batch, cell.terms * hidden}),
                            .grad_h0 = empty(like, {batch, hidden}),
                            .grad_c0 = std::nullopt,
                            .steps = steps,
                            .batch = batch,
                            .hidden = hidden,
                            .of_states = of_forward.of_states};
  if (cell.carried > 0) s.grad_c0 = empty(like, {batch, cell.carried * hidden});
  const bool done = s.grad_h0.numel() == 0 || (steps > 0 && backend.sequence_backward(s));
  if (done) return {s.grad_terms, s.grad_h0, s.grad_c0};
  const auto start = [&](const std::optional<Tensor>& grad, int64_t columns) {
    return grad ? copy(*grad, acc) : zeros(like, {batch, columns}, acc);
  };
  const Tensor grad_h = start(grad_h_n, hidden);
  std::optional<Tensor> grad_carried, direct;
  if (cell.carried > 0) grad_carried = start(grad_c_n, cell.carried * hidden);
  if (cell.reads_h || masks.zoneout) direct = zeros(like, {batch, hidden}, acc);
  const auto c0 = as_contiguous(of_forward.c0);
  StepBackwardTensors step{.grad_h = std::nullopt,
                           .grad_h_next = grad_h,
                           .grad_carried = grad_carried,
                           .saved = {},
                           .h = std::nullopt,
                           .carried = std::nullopt,
                           .grad_terms = {},
                           .grad_h_direct = direct,
                           .grad_carried_before = grad_carried,
                           .lengths = masks.lengths,
                           .reset = std::nullopt,
                           .reset_next = std::nullopt,
                           .zoneout = std::nullopt,
                           .t = 0,
                           .batch = batch,
                           .hidden = hidden};
  const auto weights_h = backend.prepared(of_forward.weights_h, batch);
  for (int64_t t = steps - 1; t >= 0; --t) {
    step.t = t;
    step.grad_h = step_of(s.grad_output, t);
    step.saved = step_of(of_forward.saved, t);
    step.h = t > 0 ? step_of(of_forward.output, t - 1) : of_forward.h0;
    step.carried = t > 0 ? step_of(of_forward.carried, t - 1) : c0;
    step.reset_next = reset_of(masks.reset, t + 1);
    step.reset = reset_of(masks.reset, t);
    step.zoneout = step_of(masks.zoneout, t);
    step.grad_terms = step_of(s.grad_terms, t);
    backend.step_backward(step);
    backend.matmul(product_terms(step.grad_terms, cell), weights_h, grad_h);
  }
  const Tensor grad_h0 = step.reset || direct
                             ? start_backward(backend, grad_h, direct, step.reset, dtype)
                             : cast(grad_h, dtype);
  return {s.grad_terms, grad_h0, cast(grad_carried, dtype)};
}

// c0 must be finite in rows without a step; the caller ensures this, as it keeps them out of its
// sums.
template <typename Backend>
Backward backward_ragged(const Backend& backend, const std::optional<Tensor>& grad_output,
                         const std::optional<Tensor>& grad_h_n,
                         const std::optional<Tensor>& grad_c_n, const SavedTensors& of_forward,
                         const Masks& masks) {
  const Tensor grad = output_ends_backward(backend, *masks.lengths, of_forward.saved,
                                           {of_forward.steps, of_forward.batch, of_forward.hidden},
                                           grad_output, grad_h_n);
  Backward result =
      backward_steps(backend, std::optional(grad), std::nullopt, grad_c_n, of_forward, masks);
  result.grad_h0 =
      rows_with_steps(backend, *masks.lengths, of_forward.steps, result.grad_h0, grad_h_n);
  return result;
}

// As the backend reads them.
template <typename Backend>
Masks prepared(const Backend& backend, const Masks& masks, ScalarType storage) {
  Masks result{as_contiguous(masks.lengths), as_contiguous(masks.reset),
               as_contiguous(cast(masks.zoneout, storage))};
  if (result.lengths && result.reset) {
    result.reset = resets_of_steps(backend, *result.lengths, *result.reset);
  }
  return result;
}

// One layer and direction, in the type of the input. The weights are in storage_of_weights.
template <typename Backend>
Forward forward_layer(const Backend& backend, const Tensor& input, const Tensor& h0,
                      const std::optional<Tensor>& c0, const Weights& weights, const Masks& given,
                      bool save, const Ends& ends = {}) {
  const ScalarType dtype = input.scalar_type();
  const ScalarType storage = Backend::storage_of_layer(dtype, weights.x.numel() + weights.h.numel(),
                                                       input.size(0), input.size(1), given);
  const Tensor x = cast(input, storage), h = cast(h0, storage);
  const auto c = cast(c0, storage);
  const Masks masks = prepared(backend, given, storage);
  const Forward r = masks.lengths ? forward_ragged(backend, x, h, c, weights, masks, save)
                                  : forward_steps(backend, x, h, c, weights, masks, save,
                                                  storage == dtype ? ends : Ends{});
  return {cast(r.output, dtype), cast(r.h_n, dtype), cast(r.c_n, dtype), cast(r.saved, dtype),
          cast(r.carried, dtype)};
}

// Likewise, from tensors of any layout.
template <typename Backend>
Backward backward_layer(const Backend& backend, const std::optional<Tensor>& grad_output,
                        const std::optional<Tensor>& grad_h_n,
                        const std::optional<Tensor>& grad_c_n, const SavedTensors& given,
                        const Masks& of_rows) {
  const ScalarType dtype = given.saved.scalar_type();
  const ScalarType storage =
      Backend::storage_of_layer(dtype, given.weights_h.numel(), given.steps, given.batch, of_rows);
  const auto grad = cast(grad_output, storage), of_h = cast(grad_h_n, storage),
             of_c = cast(grad_c_n, storage);
  const SavedTensors of_forward{.saved = as_contiguous(cast(given.saved, storage)),
                                .carried = as_contiguous(cast(given.carried, storage)),
                                .output = as_contiguous(cast(given.output, storage)),
                                .h0 = as_contiguous(cast(given.h0, storage)),
                                .c0 = cast(given.c0, storage),
                                .weights_h = given.weights_h,
                                .steps = given.steps,
                                .batch = given.batch,
                                .hidden = given.hidden,
                                .of_states = given.of_states};
  const Masks masks = prepared(backend, of_rows, storage);
  const Backward r = masks.lengths ? backward_ragged(backend, grad, of_h, of_c, of_forward, masks)
                                   : backward_steps(backend, grad, of_h, of_c, of_forward, masks);
  return {cast(r.grad_terms, dtype), cast(r.grad_h0, dtype), cast(r.grad_c0, dtype)};
}

}  // namespace my_ops
