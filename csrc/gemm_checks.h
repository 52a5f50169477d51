// gemm and linear: the checks, which my_ops/ops/_checks.py also makes of fake tensors, the problem
// as sizes and strides, and the library path that both backends share.
#pragma once

#include <string>
#include <utility>

#include "../include/gemm.h"
#include "activation.h"
#include "binding.h"

namespace my_ops {

// out = a @ b, with every operand as [batch, rows, columns] and strides in elements. If all rows of
// a batch have the same pitch, the batch is folded into m, so that a weight needs a single product.
struct Product {
  Tensor a, b, out;
  int64_t batch, m, n, k;
  int64_t a_batch, a_row, a_col;
  int64_t b_batch, b_row, b_col;
  int64_t out_batch, out_row, out_col;
};

// The accuracy that a float32 product needs, and the one that cuBLAS has with torch's setting:
//   absent       float32's own accuracy; cuBLAS has it
//   "highest"    float32's own accuracy; cuBLAS may not have it
//   "high"       TF32's accuracy; cuBLAS has more
//   "tf32"       TF32's accuracy; cuBLAS has it
inline void check_precision(const std::optional<Name>& precision, const char* op) {
  if (!precision) return;
  check(*precision == "highest" || *precision == "high" || *precision == "tf32", op,
        ": precision must be highest, high or tf32, got '", *precision, "'");
}

// The operands of a product have one dtype, or one is float32 and the other has 16 bits: float32
// holds each of its values.
inline void check_operand_dtype(const Tensor& t, const char* name, const Tensor& other,
                                const char* other_name, const char* op) {
  const ScalarType dtype = t.scalar_type(), other_dtype = other.scalar_type();
  const auto is_half = [](ScalarType s) {
    return s == ScalarType::Half || s == ScalarType::BFloat16;
  };
  const bool mixed = (dtype == ScalarType::Float && is_half(other_dtype)) ||
                     (is_half(dtype) && other_dtype == ScalarType::Float);
  check(dtype == other_dtype || mixed, op, ": ", name, " must have the dtype of ", other_name,
        ", or one must be float32 and the other float16 or bfloat16, got ", show(dtype), " and ",
        show(other_dtype));
}

// The operand with the dtype of the product.
inline const Tensor& wider(const Tensor& a, const Tensor& b) {
  return b.scalar_type() == ScalarType::Float ? b : a;
}

// cast, but a dimension that repeats its elements still does, instead of taking memory for each.
inline Tensor cast_once(const Tensor& t, ScalarType dtype) {
  if (t.scalar_type() == dtype) return t;
  Sizes once = sizes_of(t), strides = strides_of(t);
  for (size_t d = 0; d < once.size(); ++d) {
    if (strides[d] == 0 && once[d] > 1) once[d] = 1;
  }
  const Tensor converted = cast(as_strided(t, once, strides), dtype);
  for (size_t d = 0; d < once.size(); ++d) {
    if (strides[d] != 0) strides[d] = converted.stride(static_cast<int64_t>(d));
  }
  return as_strided(converted, sizes_of(t), strides);
}

// The operands as libraries and most kernels take them: of one dtype. A 16-bit operand beside a
// float32 one is converted, exactly, in a pass of its own.
struct Operands {
  Tensor a, b;
};
inline Operands of_one_dtype(const Tensor& a, const Tensor& b) {
  const ScalarType dtype = wider(a, b).scalar_type();
  return {cast_once(a, dtype), cast_once(b, dtype)};
}

inline void check_gemm(const Tensor& a, const Tensor& b, const char* op) {
  check_floating(a, op, "a");
  check_same_device(b, "b", a, "a", op);
  check_operand_dtype(b, "b", a, "a", op);
  check(a.dim() == 2 || a.dim() == 3, op, ": a must be (m, k) or (batch, m, k), got ", show(a));
  check(b.dim() == 2 || b.dim() == 3, op, ": b must be (k, n) or (batch, k, n), got ", show(b));
  const int64_t k = a.size(a.dim() - 1);
  check(b.size(b.dim() - 2) == k, op, ": b must have k = ", k, " rows, the columns of a, got ",
        show(a), " and ", show(b));
  if (a.dim() == 3 && b.dim() == 3) {
    check(a.size(0) == b.size(0) || a.size(0) == 1 || b.size(0) == 1, op,
          ": the batch of b must equal that of a, or one must be 1, got ", show(a), " and ",
          show(b));
  }
}

inline Sizes gemm_sizes(const Tensor& a, const Tensor& b) {
  const int64_t m = a.size(a.dim() - 2), n = b.size(b.dim() - 1);
  if (a.dim() == 2 && b.dim() == 2) return {m, n};
  const int64_t in_a = a.dim() == 3 ? a.size(0) : 1;
  const int64_t in_b = b.dim() == 3 ? b.size(0) : 1;
  return {in_a == 1 ? in_b : in_a, m, n};
}

// The first byte of t's elements, and the one after the last.
inline std::pair<const char*, const char*> extent(const Tensor& t) {
  int64_t last = 0;
  for (int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
  const char* begin = static_cast<const char*>(t.const_data_ptr());
  return {begin, begin + (last + 1) * static_cast<int64_t>(t.element_size())};
}

inline bool overlap(const Tensor& s, const Tensor& t) {
  if (s.numel() == 0 || t.numel() == 0) return false;
  const auto [s_begin, s_end] = extent(s);
  const auto [t_begin, t_end] = extent(t);
  return s_begin < t_end && t_begin < s_end;
}

inline void check_no_overlap(const Tensor& out, const Tensor& t, const char* name, const char* op) {
  if (!overlap(out, t)) return;
  const auto [begin, end] = extent(t);
  check(false, op, ": out must not overlap ", name, " in memory, got both within one stretch of ",
        end - begin, " bytes");
}

inline void check_out(const Tensor& out, const Tensor& a, const Tensor& b, const char* op) {
  check_same_device(out, "out", a, "a", op);
  check_same_dtype(out, "out", wider(a, b), "the result", op);
  const Sizes sizes = gemm_sizes(a, b);
  check(sizes_of(out) == sizes, op, ": out must be of shape ",
        show(IntHeaderOnlyArrayRef(sizes.data(), sizes.size())), ", got ", show(out));
  check_one_address_each(out, "out", op);
  check_no_overlap(out, a, "a", op);
  check_no_overlap(out, b, "b", op);
}

// If out is undefined, the result is a new tensor with these strides.
inline Product product(const Tensor& a, const Tensor& b, const Tensor& out,
                       const Sizes& out_strides) {
  const auto batch_stride = [](const Tensor& t) {
    return t.dim() == 3 && t.size(0) != 1 ? t.stride(0) : 0;
  };
  const Sizes sizes = gemm_sizes(a, b);
  const size_t rank = sizes.size();
  Product p{a, b, out};
  p.batch = rank == 3 ? sizes[0] : 1;
  p.m = a.size(a.dim() - 2);
  p.k = a.size(a.dim() - 1);
  p.n = b.size(b.dim() - 1);
  p.a_batch = batch_stride(a);
  p.a_row = a.stride(a.dim() - 2);
  p.a_col = a.stride(a.dim() - 1);
  p.b_batch = batch_stride(b);
  p.b_row = b.stride(b.dim() - 2);
  p.b_col = b.stride(b.dim() - 1);
  p.out_batch = rank == 3 ? out_strides[0] : 0;
  p.out_row = out_strides[rank - 2];
  p.out_col = out_strides[rank - 1];
  const bool folds = p.b_batch == 0 && p.a_batch == p.m * p.a_row && p.out_batch == p.m * p.out_row;
  if (p.batch > 1 && folds) {
    p.m *= p.batch;
    p.batch = 1;
  }
  return p;
}
inline Product product(const Tensor& a, const Tensor& b, const Tensor& out) {
  return product(a, b, out, strides_of(out));
}

// Operands in the form that aten::mm and aten::bmm take.
inline Tensor matrices(const Tensor& t, int64_t batch, int64_t rows, int64_t columns,
                       int64_t batch_stride, int64_t row, int64_t column) {
  if (batch != 1) return as_strided(t, {batch, rows, columns}, {batch_stride, row, column});
  const bool as_it_is = t.dim() == 2 && t.size(0) == rows;  // no batch is folded into it
  return as_it_is ? t : as_strided(t, {rows, columns}, {row, column});
}
inline Tensor a_matrices(const Product& p) {
  return matrices(p.a, p.batch, p.m, p.k, p.a_batch, p.a_row, p.a_col);
}
inline Tensor b_matrices(const Product& p) {
  return matrices(p.b, p.batch, p.k, p.n, p.b_batch, p.b_row, p.b_col);
}
// A view with its own version counter: register_out increments that of the tensor.
inline Tensor out_matrices(const Product& p) {
  if (p.batch == 1) return as_strided(p.out, {p.m, p.n}, {p.out_row, p.out_col});
  return as_strided(p.out, {p.batch, p.m, p.n}, {p.out_batch, p.out_row, p.out_col});
}

// ATen's product, which calls oneDNN, MKL or cuBLAS.
inline void aten_gemm(const Product& p) {
  aten(p.batch == 1 ? "aten::mm" : "aten::bmm", "out", a_matrices(p), b_matrices(p),
       out_matrices(p));
}

inline Sizes linear_sizes(const Tensor& x, const Tensor& weight) {
  Sizes sizes = sizes_of(x);
  sizes.back() = weight.size(0);
  return sizes;
}

inline void check_prepack(const Tensor& weight) {
  check_floating(weight, "prepack", "weight");
  check(weight.dim() == 2, "prepack: weight must be (out_features, in_features), got ",
        show(weight));
}

inline void check_residual(const Tensor& residual, const Tensor& x, const Tensor& weight) {
  check_same_device(residual, "residual", x, "x", "linear");
  check_same_dtype(residual, "residual", wider(x, weight), "the result", "linear");
  check_shape(residual, "residual", linear_sizes(x, weight), "of the shape of the output",
              "linear");
}

inline void check_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                         const std::string& activation, const std::optional<Tensor>& residual,
                         const std::optional<Name>& precision,
                         const std::optional<Tensor>& packed) {
  constexpr const char* op = "linear";
  check_floating(x, op, "x");
  check_same_device(weight, "weight", x, "x", op);
  check_operand_dtype(weight, "weight", x, "x", op);
  check(x.dim() >= 1, op, ": x must have at least one dimension, got ", show(x));
  check(weight.dim() == 2, op, ": weight must be (out_features, in_features), got ", show(weight));
  check(weight.size(1) == x.size(x.dim() - 1), op,
        ": weight must have in_features = ", x.size(x.dim() - 1), ", the last dimension of x, got ",
        show(x), " and ", show(weight));
  if (bias) {
    check_same_device(*bias, "bias", x, "x", op);
    check_same_dtype(*bias, "bias", wider(x, weight), "the result", op);
    check_shape(*bias, "bias", {weight.size(0)}, "(out_features,)", op);
  }
  if (residual) check_residual(*residual, x, weight);
  activation_of(activation);
  check_precision(precision, op);
  if (packed) {
    check_same_device(*packed, "packed", x, "x", op);
    check(packed->scalar_type() == ScalarType::Byte && packed->dim() == 1, op,
          ": packed must be what prepack made of weight, got ", show(*packed), " of ",
          show(packed->scalar_type()));
  }
}

// x as a matrix [rows, in_features]: a view if all rows have the same pitch.
inline Tensor rows_of(const Tensor& x) {
  if (x.dim() == 2) return x;
  const int64_t columns = x.size(x.dim() - 1);
  int64_t rows = 1;
  for (int64_t d = 0; d < x.dim() - 1; ++d) rows *= x.size(d);
  return as_strided(as_contiguous(x), {rows, columns}, {columns, 1});
}

// Applies an activation in place, with ATen's op of the same name. If ATen has none, the call
// raises.
inline void aten_activate(const std::string& activation, const Tensor& y) {
  if (activation == "none") return;
  if (activation == "gelu" || activation == "gelu_tanh") {
    aten("aten::gelu_", "", y, std::string(activation == "gelu" ? "none" : "tanh"));
  } else {
    aten(("aten::" + activation + "_").c_str(), "", y);
  }
}

// Computes all of linear with ATen.
inline Tensor aten_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                          const std::string& activation, const std::optional<Tensor>& residual) {
  try {
    // As one matrix; otherwise ATen may add the bias after rounding the product.
    Tensor y = aten("aten::linear", "", rows_of(x), weight, bias);
    if (x.dim() != 2) y = aten("aten::_unsafe_view", "", y, linear_sizes(x, weight));
    aten_activate(activation, y);
    return residual ? torch::stable::subtract(y, *residual, -1.0) : y;
  } catch (const std::exception& error) {
    fail_allocation(error, linear_sizes(x, weight), x.scalar_type(), device_of(x));
  }
}

}  // namespace my_ops
