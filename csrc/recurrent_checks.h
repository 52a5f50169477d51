// Recurrent ops: the checks. my_ops/ops/_checks.py makes them of fake tensors.
//
// Op: the ops of a cell; see recurrent_ops.h.
#pragma once

#include "binding.h"

namespace my_ops {

// "(batch, 3 * hidden_size)"
inline std::string rule_of(const char* before, int values, const char* after) {
  std::string rule = before;
  rule += std::to_string(values);
  rule += " * hidden_size";
  return rule += after;
}

// input is (batch, input_size), or with steps (steps, batch, input_size).
template <typename Op>
void check_recurrent_inputs(const Tensor& input, bool steps, const Tensor& weights,
                            const Tensor& bias, const Tensor& h, const char* h_name,
                            const Tensor& c, const char* c_name, const char* op) {
  check_floating(input, op, "input");
  const std::pair<const Tensor*, const char*> others[] = {
      {&weights, "weights"}, {&bias, "bias"}, {&h, h_name}, {&c, c_name}};
  for (const auto& [t, name] : others) {
    check_same_device(*t, name, input, "input", op);
    check_same_dtype(*t, name, input, "input", op);
  }
  const int64_t dims = steps ? 3 : 2;
  check(input.dim() == dims, op, ": input must be ",
        steps ? "(steps, batch, input_size)" : "(batch, input_size)", ", got ", show(input));
  check(h.dim() == 2, op, ": ", h_name, " must be (batch, hidden_size), got ", show(h));
  const int64_t batch = input.size(dims - 2), hidden = h.size(1);
  check_shape(h, h_name, {batch, hidden}, "(batch, hidden_size)", op);
  check_shape(c, c_name, {batch, hidden}, "(batch, hidden_size)", op);
  const int64_t gates = Op::Cell::kGates * hidden, terms = kTerms<typename Op::Cell> * hidden;
  check_shape(weights, "weights", {gates, hidden + input.size(dims - 1)},
              rule_of("(", Op::Cell::kGates, ", hidden_size + input_size)").c_str(), op);
  const std::string rule = rule_of("", kTerms<typename Op::Cell>, "");
  check((bias.dim() == 1 && bias.size(0) == terms) ||
            (bias.dim() == 2 && bias.size(0) == 1 && bias.size(1) == terms),
        op, ": bias must be (", rule, ",) or (1, ", rule, ") = (", terms, ",), got ", show(bias));
}

inline void check_lengths(const std::optional<Tensor>& lengths, const Tensor& like,
                          const char* like_name, int64_t batch, const char* op) {
  if (!lengths) return;
  check_same_device(*lengths, "lengths", like, like_name, op);
  check(lengths->scalar_type() == ScalarType::Long, op, ": lengths must be of dtype int64, got ",
        show(lengths->scalar_type()));
  check_shape(*lengths, "lengths", {batch}, "(batch,)", op);
}

inline void check_like(const std::optional<Tensor>& t, const char* name, const Tensor& like,
                       const char* like_name, const char* op) {
  if (!t) return;
  check_same_device(*t, name, like, like_name, op);
  check_same_dtype(*t, name, like, like_name, op);
  check_same_shape(*t, name, like, like_name, op);
}

template <typename Op>
void check_cell(const Tensor& input, const Tensor& weights, const Tensor& bias, const Tensor& old_h,
                const Tensor& old_cell) {
  check_recurrent_inputs<Op>(input, false, weights, bias, old_h, "old_h", old_cell, "old_cell",
                             Op::kCell);
}

template <typename Op>
void check_layer(const Tensor& input, const Tensor& h0, const Tensor& c0, const Tensor& weights,
                 const Tensor& bias, const std::optional<Tensor>& lengths) {
  check_recurrent_inputs<Op>(input, true, weights, bias, h0, "h0", c0, "c0", Op::kLayer);
  check_lengths(lengths, input, "input", input.size(1), Op::kLayer);
}

template <typename Op>
void check_cell_backward(const std::optional<Tensor>& grad_h,
                         const std::optional<Tensor>& grad_cell, const Tensor& gates,
                         const Tensor& old_cell) {
  constexpr const char* op = Op::kCellBackward;
  check_floating(gates, op, "gates");
  check_same_device(old_cell, "old_cell", gates, "gates", op);
  check_same_dtype(old_cell, "old_cell", gates, "gates", op);
  check(old_cell.dim() == 2, op, ": old_cell must be (batch, hidden_size), got ", show(old_cell));
  constexpr int kSaved = Op::Cell::kSaved;
  check_shape(gates, "gates", {old_cell.size(0), kSaved * old_cell.size(1)},
              rule_of("(batch, ", kSaved, ")").c_str(), op);
  check_like(grad_h, "grad_h", old_cell, "old_cell", op);
  check_like(grad_cell, "grad_cell", old_cell, "old_cell", op);
}

template <typename Op>
void check_layer_backward(const std::optional<Tensor>& grad_output,
                          const std::optional<Tensor>& grad_h_n,
                          const std::optional<Tensor>& grad_c_n, const Tensor& gates,
                          const Tensor& cells, const Tensor& c0, const Tensor& weights,
                          const std::optional<Tensor>& lengths) {
  constexpr const char* op = Op::kLayerBackward;
  check_floating(gates, op, "gates");
  check_same_device(cells, "cells", gates, "gates", op);
  check(cells.scalar_type() == compute_dtype(gates.scalar_type()), op,
        ": cells must be float32, or float64 where gates are, got ", show(cells.scalar_type()));
  for (const auto& [t, name] : {std::pair(&c0, "c0"), std::pair(&weights, "weights")}) {
    check_same_device(*t, name, gates, "gates", op);
    check_same_dtype(*t, name, gates, "gates", op);
  }
  check(cells.dim() == 3, op, ": cells must be (steps, batch, hidden_size), got ", show(cells));
  const int64_t steps = cells.size(0), batch = cells.size(1), hidden = cells.size(2);
  constexpr int kGates = Op::Cell::kGates, kSaved = Op::Cell::kSaved;
  check_shape(gates, "gates", {steps, batch, kSaved * hidden},
              rule_of("(steps, batch, ", kSaved, ")").c_str(), op);
  check_shape(c0, "c0", {batch, hidden}, "(batch, hidden_size)", op);
  check(weights.dim() == 2 && weights.size(0) == kGates * hidden && weights.size(1) >= hidden, op,
        ": weights must be ", rule_of("(", kGates, ", hidden_size + input_size)"),
        " with hidden_size = ", hidden, ", got ", show(weights));
  if (grad_output) {
    check_same_device(*grad_output, "grad_output", gates, "gates", op);
    check_same_dtype(*grad_output, "grad_output", gates, "gates", op);
    check_same_shape(*grad_output, "grad_output", cells, "cells", op);
  }
  check_like(grad_h_n, "grad_h_n", c0, "c0", op);
  check_like(grad_c_n, "grad_c_n", c0, "c0", op);
  check_lengths(lengths, gates, "gates", batch, op);
}

}  // namespace my_ops
