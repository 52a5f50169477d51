// The operators of my_ops for C++ programs: values only, gradients are registered by Python.
// Link with my_ops::my_ops (CMake), or load _C.abi3.so before the first call.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ATen.h>

#include <optional>
#include <string_view>
#include <tuple>

namespace my_ops {
namespace detail {

template <typename Signature>
auto find(const char* op) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(op, "").typed<Signature>();
}

}  // namespace detail

inline at::Tensor add_one(const at::Tensor& x) {
  static const auto op = detail::find<at::Tensor(const at::Tensor&)>("my_ops::add_one");
  return op.call(x);
}

inline at::Tensor custom_add(const at::Tensor& a, const at::Tensor& b) {
  static const auto op =
      detail::find<at::Tensor(const at::Tensor&, const at::Tensor&)>("my_ops::custom_add");
  return op.call(a, b);
}

inline at::Tensor d_sigmoid(const at::Tensor& z) {
  static const auto op = detail::find<at::Tensor(const at::Tensor&)>("my_ops::d_sigmoid");
  return op.call(z);
}

inline at::Tensor round_ste(const at::Tensor& x) {
  static const auto op = detail::find<at::Tensor(const at::Tensor&)>("my_ops::round_ste");
  return op.call(x);
}

inline at::Tensor fill_index(int64_t height, int64_t width,
                             std::optional<at::ScalarType> dtype = std::nullopt,
                             std::optional<at::Device> device = std::nullopt) {
  static const auto op =
      detail::find<at::Tensor(c10::SymInt, c10::SymInt, std::optional<at::ScalarType>,
                              std::optional<at::Device>)>("my_ops::fill_index");
  return op.call(height, width, dtype, device);
}

inline at::Tensor gemm(const at::Tensor& a, const at::Tensor& b) {
  static const auto op =
      detail::find<at::Tensor(const at::Tensor&, const at::Tensor&)>("my_ops::gemm");
  return op.call(a, b);
}

inline at::Tensor linear(const at::Tensor& x, const at::Tensor& weight,
                         const std::optional<at::Tensor>& bias = std::nullopt,
                         std::string_view activation = "none") {
  static const auto op =
      detail::find<at::Tensor(const at::Tensor&, const at::Tensor&,
                              const std::optional<at::Tensor>&, c10::string_view)>(
          "my_ops::linear");
  return op.call(x, weight, bias, c10::string_view(activation.data(), activation.size()));
}

// Returns new_h, new_cell.
inline std::tuple<at::Tensor, at::Tensor> lltm_cell(const at::Tensor& input,
                                                    const at::Tensor& weights,
                                                    const at::Tensor& bias,
                                                    const at::Tensor& old_h,
                                                    const at::Tensor& old_cell) {
  static const auto op = detail::find<std::tuple<at::Tensor, at::Tensor>(
      const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
      const at::Tensor&)>("my_ops::lltm_cell");
  return op.call(input, weights, bias, old_h, old_cell);
}

// Returns output, h_n, c_n.
inline std::tuple<at::Tensor, at::Tensor, at::Tensor> lltm(const at::Tensor& input,
                                                           const at::Tensor& h0,
                                                           const at::Tensor& c0,
                                                           const at::Tensor& weights,
                                                           const at::Tensor& bias) {
  static const auto op = detail::find<std::tuple<at::Tensor, at::Tensor, at::Tensor>(
      const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
      const at::Tensor&)>("my_ops::lltm");
  return op.call(input, h0, c0, weights, bias);
}

}  // namespace my_ops
