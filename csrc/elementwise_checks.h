// Elementwise ops: the checks and allocations that both backends share.
#pragma once

#include <limits>

#include "../include/elementwise.h"
#include "binding.h"

namespace my_ops {

// A result of the layout that torch gives an elementwise op: x's own where x is dense.
inline Tensor result_like(const Tensor& x, ScalarType dtype) {
  return x.is_contiguous() ? empty(x, sizes_of(x), dtype) : empty_as(x);
}

struct Unary {
  Tensor x, out;  // of one dense layout: elements correspond by position in memory
};

// out has the layout that torch gives an elementwise result: x's own where it is dense. Other
// layouts are copied into out, and the kernel then runs in place.
inline Unary unary(const Tensor& x) {
  const Tensor out = result_like(x, x.scalar_type());
  if (x.is_contiguous()) return {x, out};
  if (strides_of(x) == strides_of(out)) return {x, out};
  Tensor copy = out;
  torch::stable::copy_(copy, x);
  return {out, out};
}

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
  check(is_floating(t.scalar_type()) || is_integer(t.scalar_type()), op, ": ", name,
        " must have a real floating or integer dtype, got ",
        torch::headeronly::toString(t.scalar_type()));
}

// a and b in torch's result type, and how to walk them.
struct Binary {
  Tensor a, b, out;
  bool flat;  // one dense layout: the broadcast is not needed
  Broadcast shape;
};

inline ScalarType result_type(const Tensor& a, const Tensor& b) {
  if (a.scalar_type() == b.scalar_type()) return a.scalar_type();
  std::array<StableIValue, 2> stack{torch::stable::detail::from(a), torch::stable::detail::from(b)};
  check_torch(torch_call_dispatcher("aten::result_type", "Tensor", stack.data(), TORCH_ABI_VERSION),
              "aten::result_type");
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

// Strides of t seen as sizes: 0 along broadcast dimensions.
inline Sizes broadcast_strides(const Tensor& t, const Sizes& sizes) {
  Sizes strides(sizes.size(), 0);
  const size_t lead = sizes.size() - t.dim();
  for (int64_t d = 0; d < t.dim(); ++d) strides[lead + d] = t.size(d) == 1 ? 0 : t.stride(d);
  return strides;
}

// Merges neighbouring dimensions that both operands walk as one. False if more than kMaxDims
// remain.
inline bool coalesce(const Sizes& sizes, const Sizes& a, const Sizes& b, Broadcast* shape) {
  int dims = 0;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] == 1) continue;
    if (dims > 0 && shape->a_strides[dims - 1] == a[d] * sizes[d] &&
        shape->b_strides[dims - 1] == b[d] * sizes[d]) {
      --dims;
      shape->sizes[dims] *= sizes[d];
    } else {
      if (dims == Broadcast::kMaxDims) return false;
      shape->sizes[dims] = sizes[d];
    }
    shape->a_strides[dims] = a[d];
    shape->b_strides[dims] = b[d];
    ++dims;
  }
  if (dims == 0) {
    shape->sizes[0] = 1;
    shape->a_strides[0] = shape->b_strides[0] = 0;
    dims = 1;
  }
  shape->dims = dims;
  return true;
}

inline Binary binary(const Tensor& a, const Tensor& b, const char* op) {
  check_real(a, op, "a");
  check_real(b, op, "b");
  check_same_device(b, "b", a, "a", op);
  const Sizes sizes = broadcast_sizes(a, b, op);
  const ScalarType dtype = result_type(a, b);
  Binary plan{cast(a, dtype), cast(b, dtype), {}, false, {}};
  const bool same_shape = sizes_of(a) == sizes && sizes_of(b) == sizes;
  if (same_shape) {
    plan.out = result_like(plan.a, dtype);
    const Sizes dense = strides_of(plan.out);
    plan.flat = (plan.a.is_contiguous() && plan.b.is_contiguous()) ||
                (strides_of(plan.a) == dense && strides_of(plan.b) == dense);
    if (plan.flat) return plan;
  }
  plan.out = empty(plan.a, sizes, dtype);
  if (!coalesce(sizes, broadcast_strides(plan.a, sizes), broadcast_strides(plan.b, sizes),
                &plan.shape)) {
    plan.a = as_contiguous(aten("aten::expand", "", plan.a, sizes, false));
    plan.b = as_contiguous(aten("aten::expand", "", plan.b, sizes, false));
    plan.flat = true;
  }
  return plan;
}

struct Gradient {
  Tensor grad, z, out;  // of one dense layout
};

inline Gradient d_sigmoid_backward_operands(const Tensor& grad, const Tensor& z) {
  constexpr const char* op = "d_sigmoid_backward";
  check_floating(z, op, "z");
  check_same_device(grad, "grad", z, "z", op);
  check_same_dtype(grad, "grad", z, "z", op);
  check(sizes_of(grad) == sizes_of(z), op, ": grad must have the shape of z, got ", show(grad),
        " and ", show(z));
  const Unary io = unary(z);
  if (strides_of(grad) == strides_of(io.out)) return {grad, io.x, io.out};
  Tensor dense = empty_as(io.out);
  torch::stable::copy_(dense, grad);
  return {dense, io.x, io.out};
}

inline void check_fill_index(int64_t height, int64_t width, ScalarType dtype) {
  check(is_floating(dtype) || dtype == ScalarType::Int || dtype == ScalarType::Long,
        "fill_index: dtype must be floating, int32 or int64, got ",
        torch::headeronly::toString(dtype));
  check(height >= 0, "fill_index: height must not be negative, got ", height);
  check(width >= 0, "fill_index: width must not be negative, got ", width);
  check(dtype != ScalarType::Int || height == 0 || width == 0 ||
            height - 1 <= std::numeric_limits<int32_t>::max() - (width - 1),
        "fill_index: height + width - 2 must fit int32, got height ", height, " and width ", width);
}

inline void check_fill_index(const Tensor& out) {
  check(out.dim() == 2, "fill_index: out must be (height, width), got ", show(out));
  check_fill_index(out.size(0), out.size(1), out.scalar_type());
}

}  // namespace my_ops
