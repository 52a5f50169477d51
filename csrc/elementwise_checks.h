// The checks of the elementwise family. my_ops/ops/_checks.py makes the same checks of fake
// tensors.
#pragma once

#include <limits>
#include <utility>

#include "binding.h"

namespace my_ops {

inline bool is_integer(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Byte:
    case ScalarType::Char:
    case ScalarType::Short:
    case ScalarType::UInt16:
    case ScalarType::Int:
    case ScalarType::UInt32:
    case ScalarType::Long:
    case ScalarType::UInt64:
      return true;
    default:
      return false;
  }
}

inline void check_real(const Tensor& t, const char* op, const char* name) {
  check_given(t, op, name);
  check(is_floating(t.scalar_type()) || is_integer(t.scalar_type()), op, ": ", name,
        " must have a real floating or integer dtype, got ", show(t.scalar_type()));
}

inline ScalarType result_type(const Tensor& a, const Tensor& b, const char* op) {
  if (a.scalar_type() == b.scalar_type()) return a.scalar_type();
  std::array<StableIValue, 2> stack{torch::stable::detail::from(a), torch::stable::detail::from(b)};
  const int32_t status =
      torch_call_dispatcher("aten::result_type", "Tensor", stack.data(), TORCH_ABI_VERSION);
  check(status == TORCH_SUCCESS, op, ": b must have a dtype that torch promotes with that of a, ",
        "got ", show(b.scalar_type()), " and ", show(a.scalar_type()));
  return torch::stable::detail::to<ScalarType>(stack[0]);
}

inline Sizes broadcast_sizes(const Tensor& a, const Tensor& b, const char* op) {
  const int64_t dims = a.dim() > b.dim() ? a.dim() : b.dim();
  Sizes sizes(dims);
  for (int64_t d = 0; d < dims; ++d) {  // from the last dimension
    const int64_t in_a = d < a.dim() ? a.size(a.dim() - 1 - d) : 1;
    const int64_t in_b = d < b.dim() ? b.size(b.dim() - 1 - d) : 1;
    check(in_a == in_b || in_a == 1 || in_b == 1, op,
          ": b must broadcast with a (equal sizes, or 1), got ", show(a), " and ", show(b));
    sizes[dims - 1 - d] = in_a == 1 ? in_b : in_a;
  }
  return sizes;
}

// The shape and dtype of the result.
inline std::pair<Sizes, ScalarType> check_custom_add(const Tensor& a, const Tensor& b) {
  constexpr const char* op = "custom_add";
  check_real(a, op, "a");
  check_real(b, op, "b");
  check_same_device(b, "b", a, "a", op);
  return {broadcast_sizes(a, b, op), result_type(a, b, op)};
}

inline void check_d_sigmoid_backward(const Tensor& grad, const Tensor& z) {
  constexpr const char* op = "d_sigmoid_backward";
  check_floating(z, op, "z");
  check_same_device(grad, "grad", z, "z", op);
  check_same_dtype(grad, "grad", z, "z", op);
  check_same_shape(grad, "grad", z, "z", op);
}

inline void check_fill_index(int64_t height, int64_t width, ScalarType dtype) {
  check(is_floating(dtype) || dtype == ScalarType::Int || dtype == ScalarType::Long,
        "fill_index: dtype must be floating, int32 or int64, got ", show(dtype));
  check(height >= 0, "fill_index: height must not be negative, got ", height);
  check(width >= 0, "fill_index: width must not be negative, got ", width);
  check(dtype != ScalarType::Int || height == 0 || width == 0 ||
            height - 1 <= std::numeric_limits<int32_t>::max() - (width - 1),
        "fill_index: height + width - 2 must fit int32, got height ", height, " and width ", width);
}

inline void check_fill_index(const Tensor& out) {
  check_given(out, "fill_index", "out");
  check(out.dim() == 2, "fill_index: out must be (height, width), got ", show(out));
  check_fill_index(out.size(0), out.size(1), out.scalar_type());
  check_one_address_each(out, "out", "fill_index");
}

}  // namespace my_ops
