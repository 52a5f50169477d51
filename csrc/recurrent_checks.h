// Recurrent ops: their arguments and checks. my_ops/recurrent/_checks.py makes the same checks of
// fake tensors.
//
// Op: the ops of a cell; see recurrent_ops.h.
#pragma once

#include "recurrent/cells/cell.h"
#include "recurrent_weights.h"

namespace my_ops {

// h and, if the cell carries a value, c.
template <typename Cell>
constexpr size_t kStates = 1 + Cell::kCarried;
template <typename Cell>
using States = std::array<Tensor, kStates<Cell>>;
template <typename Cell>
using GivenStates = std::array<std::optional<Tensor>, kStates<Cell>>;
template <typename Op>
using Parameters = std::array<std::optional<Tensor>, Op::Weights::kNames.size()>;

// What a call of all steps also takes.
struct Masks {
  std::optional<Tensor> lengths, reset, zoneout;
};

template <typename Op>
struct StepArguments {
  Tensor input;
  Parameters<Op> parameters;
  States<typename Op::Cell> states;
};

template <typename Op>
struct StepBackwardArguments {
  GivenStates<typename Op::Cell> grads;
  Tensor gates;
  std::optional<Tensor> old_h, old_cell;  // those that the cell's backward reads
};

template <typename Op>
struct LayerArguments {
  Tensor input;
  States<typename Op::Cell> states;
  Parameters<Op> parameters;
  Masks masks;
};

template <typename Op>
struct LayerBackwardArguments {
  std::optional<Tensor> grad_output;
  GivenStates<typename Op::Cell> grads;
  Tensor gates;
  std::optional<Tensor> output, cells, h0, c0;  // those that the cell's backward reads
  Tensor recurrent;
  Masks masks;
  bool of_states = true;  // whether the gradients of h0 and c0 are read
};

inline void check_like(const std::optional<Tensor>& t, const char* name, const Tensor& like,
                       const char* like_name, const char* op) {
  if (!t) return;
  check_same_device(*t, name, like, like_name, op);
  check_same_dtype(*t, name, like, like_name, op);
  check_same_shape(*t, name, like, like_name, op);
}

inline void check_kind(const Tensor& t, const char* name, const Tensor& like, const char* like_name,
                       const char* op) {
  check_same_device(t, name, like, like_name, op);
  check_same_dtype(t, name, like, like_name, op);
}

inline void check_masks(const Masks& masks, const Tensor& like, const char* like_name,
                        int64_t steps, int64_t batch, int64_t hidden, const char* op) {
  if (const auto& lengths = masks.lengths) {
    check_same_device(*lengths, "lengths", like, like_name, op);
    check(lengths->scalar_type() == ScalarType::Long, op, ": lengths must be of dtype int64, got ",
          show(lengths->scalar_type()));
    check_shape(*lengths, "lengths", {batch}, "(batch,)", op);
  }
  if (const auto& reset = masks.reset) {
    check_same_device(*reset, "reset", like, like_name, op);
    check(reset->scalar_type() == ScalarType::Bool, op, ": reset must be of dtype bool, got ",
          show(reset->scalar_type()));
    check_shape(*reset, "reset", {steps, batch}, "(steps, batch)", op);
  }
  if (const auto& zoneout = masks.zoneout) {
    check_kind(*zoneout, "zoneout", like, like_name, op);
    check_shape(*zoneout, "zoneout", {steps, batch, hidden}, "(steps, batch, hidden_size)", op);
  }
}

// The input is (batch, input_size), or (steps, batch, input_size) if steps is true.
template <typename Op>
void check_inputs(const Tensor& input, bool steps, const Parameters<Op>& parameters,
                  const States<typename Op::Cell>& states, const char* const (&names)[2],
                  const char* op) {
  using Weights = typename Op::Weights;
  check_floating(input, op, "input");
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (parameters[i]) check_kind(*parameters[i], Weights::kNames[i], input, "input", op);
  }
  for (size_t i = 0; i < states.size(); ++i) check_kind(states[i], names[i], input, "input", op);
  const int64_t dims = steps ? 3 : 2;
  const char* const rule = steps ? "(steps, batch, input_size)" : "(batch, input_size)";
  check(input.dim() == dims, op, ": input must be ", rule, ", got ", show(input));
  check(states[0].dim() == 2, op, ": ", names[0], " must be (batch, hidden_size), got ",
        show(states[0]));
  const std::optional<UnitSizes> agreed = Weights::sizes(parameters, Op::Cell::kGates);
  const int64_t batch = input.size(dims - 2), hidden = agreed ? agreed->hidden : states[0].size(1);
  for (size_t i = 0; i < states.size(); ++i) {
    check_shape(states[i], names[i], {batch, hidden}, "(batch, hidden_size)", op);
  }
  if (agreed) {
    Sizes want = sizes_of(input);
    want.back() = agreed->inputs;
    check_shape(input, "input", want, rule, op);
  }
  Weights::check(parameters, Op::Cell::kGates, input.size(dims - 1), hidden, op);
}

template <typename Op>
void check_step(const StepArguments<Op>& a) {
  check_inputs<Op>(a.input, false, a.parameters, a.states, {"old_h", "old_cell"}, Op::kCell);
}

template <typename Op>
void check_layer(const LayerArguments<Op>& a) {
  check_inputs<Op>(a.input, true, a.parameters, a.states, {"h0", "c0"}, Op::kLayer);
  check_masks(a.masks, a.input, "input", a.input.size(0), a.input.size(1), a.states[0].size(1),
              Op::kLayer);
}

template <typename Op>
void check_step_backward(const StepBackwardArguments<Op>& a) {
  constexpr const char* op = Op::kCellBackward;
  const std::pair<const std::optional<Tensor>*, const char*> states[] = {{&a.old_h, "old_h"},
                                                                         {&a.old_cell, "old_cell"}};
  const auto& [first, first_name] = states[a.old_h ? 0 : 1];
  const Tensor& state = **first;
  check_floating(a.gates, op, "gates");
  for (const auto& [t, name] : states) {
    if (*t) check_kind(**t, name, a.gates, "gates", op);
  }
  check(state.dim() == 2, op, ": ", first_name, " must be (batch, hidden_size), got ", show(state));
  if (a.old_h && a.old_cell) check_same_shape(*a.old_cell, "old_cell", *a.old_h, "old_h", op);
  constexpr int kSaved = Op::Cell::kSaved;
  check_shape(a.gates, "gates", {state.size(0), kSaved * state.size(1)},
              Rule{"(batch, ", kSaved, ")"}, op);
  constexpr const char* kNames[] = {"grad_h", "grad_cell"};
  for (size_t i = 0; i < a.grads.size(); ++i) {
    check_like(a.grads[i], kNames[i], state, first_name, op);
  }
}

template <typename Op>
void check_layer_backward(const LayerBackwardArguments<Op>& a) {
  constexpr const char* op = Op::kLayerBackward;
  using Weights = typename Op::Weights;
  check_floating(a.gates, op, "gates");
  if (a.output) check_kind(*a.output, "output", a.gates, "gates", op);
  if (a.cells) check_kind(*a.cells, "cells", a.gates, "gates", op);
  const std::pair<const std::optional<Tensor>*, const char*> states[] = {{&a.h0, "h0"},
                                                                         {&a.c0, "c0"}};
  for (const auto& [t, name] : states) {
    if (*t) check_kind(**t, name, a.gates, "gates", op);
  }
  check_kind(a.recurrent, Weights::kRecurrent, a.gates, "gates", op);
  const char* first_name = a.output ? "output" : "cells";
  const Tensor& first = a.output ? *a.output : *a.cells;
  check(first.dim() == 3, op, ": ", first_name, " must be (steps, batch, hidden_size), got ",
        show(first));
  if (a.output && a.cells) check_same_shape(*a.cells, "cells", *a.output, "output", op);
  const int64_t steps = first.size(0), batch = first.size(1), hidden = first.size(2);
  constexpr int kSaved = Op::Cell::kSaved;
  check_shape(a.gates, "gates", {steps, batch, kSaved * hidden},
              Rule{"(steps, batch, ", kSaved, ")"}, op);
  for (const auto& [t, name] : states) {
    if (*t) check_shape(**t, name, {batch, hidden}, "(batch, hidden_size)", op);
  }
  Weights::check_recurrent(a.recurrent, Op::Cell::kGates, hidden, op);
  if (a.grad_output) {
    check_kind(*a.grad_output, "grad_output", a.gates, "gates", op);
    check_same_shape(*a.grad_output, "grad_output", first, first_name, op);
  }
  const auto& [state, state_name] = states[a.h0 ? 0 : 1];
  constexpr const char* kNames[] = {"grad_h_n", "grad_c_n"};
  for (size_t i = 0; i < a.grads.size(); ++i) {
    check_like(a.grads[i], kNames[i], **state, state_name, op);
  }
  check_masks(a.masks, a.gates, "gates", steps, batch, hidden, op);
}

}  // namespace my_ops
