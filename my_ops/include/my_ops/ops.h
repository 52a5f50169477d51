// The operators of my_ops for C++ programs: values only, gradients are registered by Python.
// Link with my_ops::my_ops (CMake), or load _C.so before the first call. Wrong arguments throw
// std::exception with the same messages as in Python.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>

namespace my_ops {
namespace detail {

// Calls an operator with its first arguments; the others take their defaults.
template <typename... Args>
torch::jit::Stack call(const char* name, Args&&... args) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  torch::jit::Stack stack;
  torch::jit::push(stack, std::forward<Args>(args)...);
  const auto& arguments = op.schema().arguments();
  for (size_t i = stack.size(); i < arguments.size(); ++i) {
    stack.push_back(arguments[i].default_value().value());
  }
  op.callBoxed(&stack);
  return stack;
}

template <typename... Args>
at::Tensor call_for_tensor(const char* name, Args&&... args) {
  return call(name, std::forward<Args>(args)...)[0].toTensor();
}

}  // namespace detail

inline at::Tensor add_one(const at::Tensor& x) {
  return detail::call_for_tensor("my_ops::add_one", x);
}

inline at::Tensor custom_add(const at::Tensor& a, const at::Tensor& b) {
  return detail::call_for_tensor("my_ops::custom_add", a, b);
}

inline at::Tensor d_sigmoid(const at::Tensor& z) {
  return detail::call_for_tensor("my_ops::d_sigmoid", z);
}

inline at::Tensor round_ste(const at::Tensor& x) {
  return detail::call_for_tensor("my_ops::round_ste", x);
}

inline at::Tensor fill_index(int64_t height, int64_t width,
                             std::optional<at::ScalarType> dtype = std::nullopt,
                             std::optional<at::Device> device = std::nullopt) {
  return detail::call_for_tensor("my_ops::fill_index", height, width, dtype, device);
}

inline at::Tensor gemm(const at::Tensor& a, const at::Tensor& b) {
  return detail::call_for_tensor("my_ops::gemm", a, b);
}

inline at::Tensor linear(const at::Tensor& x, const at::Tensor& weight,
                         const std::optional<at::Tensor>& bias = std::nullopt,
                         const std::string& activation = "none") {
  return detail::call_for_tensor("my_ops::linear", x, weight, bias, activation);
}

// Returns new_h, new_cell.
inline std::tuple<at::Tensor, at::Tensor> lltm_cell(const at::Tensor& input,
                                                    const at::Tensor& weights,
                                                    const at::Tensor& bias, const at::Tensor& old_h,
                                                    const at::Tensor& old_cell) {
  const auto out = detail::call("my_ops::lltm_cell", input, weights, bias, old_h, old_cell);
  return {out[0].toTensor(), out[1].toTensor()};
}

// Returns output, h_n, c_n. lengths: when each row ends; reset: before which steps its state is
// zero; zoneout: the share of h that stays from the step before.
inline std::tuple<at::Tensor, at::Tensor, at::Tensor> lltm(
    const at::Tensor& input, const at::Tensor& h0, const at::Tensor& c0, const at::Tensor& weights,
    const at::Tensor& bias, const std::optional<at::Tensor>& lengths = std::nullopt,
    const std::optional<at::Tensor>& reset = std::nullopt,
    const std::optional<at::Tensor>& zoneout = std::nullopt) {
  const auto out =
      detail::call("my_ops::lltm", input, h0, c0, weights, bias, lengths, reset, zoneout);
  return {out[0].toTensor(), out[1].toTensor(), out[2].toTensor()};
}

// Returns new_h, new_cell.
inline std::tuple<at::Tensor, at::Tensor> lstm_cell(
    const at::Tensor& input, const at::Tensor& weight_ih, const at::Tensor& weight_hh,
    const std::optional<at::Tensor>& bias_ih, const std::optional<at::Tensor>& bias_hh,
    const at::Tensor& old_h, const at::Tensor& old_cell) {
  const auto out = detail::call("my_ops::lstm_cell", input, weight_ih, weight_hh, bias_ih, bias_hh,
                                old_h, old_cell);
  return {out[0].toTensor(), out[1].toTensor()};
}

// Returns output, h_n, c_n.
inline std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm(
    const at::Tensor& input, const at::Tensor& h0, const at::Tensor& c0,
    const at::Tensor& weight_ih, const at::Tensor& weight_hh,
    const std::optional<at::Tensor>& bias_ih = std::nullopt,
    const std::optional<at::Tensor>& bias_hh = std::nullopt,
    const std::optional<at::Tensor>& lengths = std::nullopt,
    const std::optional<at::Tensor>& reset = std::nullopt,
    const std::optional<at::Tensor>& zoneout = std::nullopt) {
  const auto out = detail::call("my_ops::lstm", input, h0, c0, weight_ih, weight_hh, bias_ih,
                                bias_hh, lengths, reset, zoneout);
  return {out[0].toTensor(), out[1].toTensor(), out[2].toTensor()};
}

inline at::Tensor gru_cell(const at::Tensor& input, const at::Tensor& weight_ih,
                           const at::Tensor& weight_hh, const std::optional<at::Tensor>& bias_ih,
                           const std::optional<at::Tensor>& bias_hh, const at::Tensor& old_h) {
  return detail::call_for_tensor("my_ops::gru_cell", input, weight_ih, weight_hh, bias_ih, bias_hh,
                                 old_h);
}

// Returns output, h_n.
inline std::tuple<at::Tensor, at::Tensor> gru(
    const at::Tensor& input, const at::Tensor& h0, const at::Tensor& weight_ih,
    const at::Tensor& weight_hh, const std::optional<at::Tensor>& bias_ih = std::nullopt,
    const std::optional<at::Tensor>& bias_hh = std::nullopt,
    const std::optional<at::Tensor>& lengths = std::nullopt,
    const std::optional<at::Tensor>& reset = std::nullopt,
    const std::optional<at::Tensor>& zoneout = std::nullopt) {
  const auto out = detail::call("my_ops::gru", input, h0, weight_ih, weight_hh, bias_ih, bias_hh,
                                lengths, reset, zoneout);
  return {out[0].toTensor(), out[1].toTensor()};
}

}  // namespace my_ops
