// How pre-activations are computed from a cell's parameters; see my_ops/recurrent/_weights.py.
//
// A kind of parameters defines how many tensors it takes, their names, which of them backward
// takes, the sizes they are for, its checks, and which matrices and biases they are.
#pragma once

#include <span>

#include "binding.h"

namespace my_ops {

// For all gates. The matrices are views (gates * hidden, columns); a bias is (gates * hidden,).
// What a cell has of other parameters with a value for each unit is (vectors * hidden,).
struct Weights {
  Tensor x, h;
  std::optional<Tensor> bias_x, bias_h, vectors = std::nullopt;
};

// "(batch, 3 * hidden_size)", in messages.
struct Rule {
  const char* before;
  int values;
  const char* after;
};
inline std::ostream& operator<<(std::ostream& text, const Rule& rule) {
  return text << rule.before << rule.values << " * hidden_size" << rule.after;
}

inline Tensor columns(const Tensor& matrix, int64_t first, int64_t count) {
  return as_strided(matrix, {matrix.size(0), count}, {matrix.stride(0), matrix.stride(1)},
                    first * matrix.stride(1));
}

// What a layer's parameters say if they agree with each other. Then a state or an input that
// differs is wrong, and not a parameter.
struct UnitSizes {
  int64_t hidden, inputs;
};

// Weights of h and of the input in one matrix, (gates * hidden, hidden + inputs), and one bias.
struct OneMatrix {
  static constexpr std::array kNames{"weights", "bias"};
  static constexpr size_t kRequired = 2;
  static constexpr const char* kRecurrent = "weights";
  static constexpr size_t kRecurrentAt = 0;

  static void check(std::span<const std::optional<Tensor>> given, int gates, int64_t inputs,
                    int64_t hidden, const char* op) {
    const Tensor &weights = *given[0], &bias = *given[1];
    check_shape(weights, "weights", {gates * hidden, hidden + inputs},
                Rule{"(", gates, ", hidden_size + input_size)"}, op);
    const Rule rule{"", gates, ""};
    my_ops::check((bias.dim() == 1 && bias.size(0) == gates * hidden) ||
                      (bias.dim() == 2 && bias.size(0) == 1 && bias.size(1) == gates * hidden),
                  op, ": bias must be (", rule, ",) or (1, ", rule, ") = (", gates * hidden,
                  ",), got ", show(bias));
  }
  static std::optional<UnitSizes> sizes(std::span<const std::optional<Tensor>> given, int gates) {
    const Tensor &weights = *given[0], &bias = *given[1];
    if (weights.dim() != 2 || weights.size(0) % gates != 0 || bias.numel() != weights.size(0)) {
      return std::nullopt;
    }
    const int64_t hidden = weights.size(0) / gates, inputs = weights.size(1) - hidden;
    return inputs < 0 ? std::nullopt : std::optional(UnitSizes{hidden, inputs});
  }
  static void check_recurrent(const Tensor& weights, int gates, int64_t hidden, const char* op) {
    my_ops::check(
        weights.dim() == 2 && weights.size(0) == gates * hidden && weights.size(1) >= hidden, op,
        ": weights must be ", Rule{"(", gates, ", hidden_size + input_size)"},
        " with hidden_size = ", hidden, ", got ", show(weights));
  }
  static Weights of(std::span<const std::optional<Tensor>> given, int64_t hidden) {
    const Tensor& weights = *given[0];
    return {.x = columns(weights, hidden, weights.size(1) - hidden),
            .h = columns(weights, 0, hidden),
            .bias_x = as_contiguous(given[1]),
            .bias_h = std::nullopt};
  }
  static Tensor of_h(const Tensor& weights, int64_t hidden) { return columns(weights, 0, hidden); }
};

// The parameters of torch.nn.LSTM and GRU.
struct TwoMatrices {
  static constexpr std::array kNames{"weight_ih", "weight_hh", "bias_ih", "bias_hh"};
  static constexpr size_t kRequired = 2;  // the biases may be None
  static constexpr const char* kRecurrent = "weight_hh";
  static constexpr size_t kRecurrentAt = 1;

  static void check(std::span<const std::optional<Tensor>> given, int gates, int64_t inputs,
                    int64_t hidden, const char* op) {
    check_shape(*given[0], kNames[0], {gates * hidden, inputs}, Rule{"(", gates, ", input_size)"},
                op);
    check_recurrent(*given[1], gates, hidden, op);
    for (size_t i : {2, 3}) {
      if (!given[i]) continue;
      check_shape(*given[i], kNames[i], {gates * hidden}, Rule{"(", gates, ",)"}, op);
    }
  }
  static std::optional<UnitSizes> sizes(std::span<const std::optional<Tensor>> given, int gates) {
    const Tensor &of_x = *given[0], &of_h = *given[1];
    if (of_x.dim() != 2 || of_h.dim() != 2 || of_x.size(0) != of_h.size(0) ||
        of_h.size(0) != gates * of_h.size(1)) {
      return std::nullopt;
    }
    return UnitSizes{of_h.size(1), of_x.size(1)};
  }
  static void check_recurrent(const Tensor& weight, int gates, int64_t hidden, const char* op) {
    check_shape(weight, kNames[1], {gates * hidden, hidden}, Rule{"(", gates, ", hidden_size)"},
                op);
  }
  static Weights of(std::span<const std::optional<Tensor>> given, int64_t) {
    return {.x = *given[0],
            .h = *given[1],
            .bias_x = as_contiguous(given[2]),
            .bias_h = as_contiguous(given[3])};
  }
  static Tensor of_h(const Tensor& weight, int64_t) { return weight; }
};

}  // namespace my_ops
