// gemm and linear on CUDA.
#include "gemm_cuda.h"

#include "../kernels/gemm_fp32_sm80.h"

namespace my_ops {
namespace {

// Of 16-bit matrices, not rounded.
Tensor float_product(const Product& p) {
  const Tensor product = empty(p.a, {p.m, p.n}, ScalarType::Float);
  aten("aten::mm", "dtype_out", a_matrices(p), b_matrices(p), ScalarType::Float, product);
  return product;
}

void launch(const Product& p, const std::optional<Name>& precision, const Device& device) {
  dispatch_floating<CudaTypes>(p.a.scalar_type(), [&]<typename T>() {
    const auto args = gemm_args<T, T>(p, precision);
    if (!launch_gemm(args, p.a, device.stream(), "gemm")) aten_gemm(p);
  });
}

void gemm_out(const Tensor& a, const Tensor& b, Tensor out, const std::optional<Name>& precision) {
  check_gemm(a, b, "gemm");
  check_out(out, a, b, "gemm");
  check_precision(precision, "gemm");
  const Device device(a);
  launch(product(a, b, out), precision, device);
}

Tensor gemm(const Tensor& a, const Tensor& b, const std::optional<Name>& precision) {
  check_gemm(a, b, "gemm");
  check_precision(precision, "gemm");
  const Device device(a);
  const Tensor out = empty(a, gemm_sizes(a, b));
  launch(product(a, b, out), precision, device);
  return out;
}

// The kernel that the router takes on compute capability 8.0, on any device: for the tests.
Tensor gemm_fp32_sm80(const Tensor& a, const Tensor& b) {
  constexpr const char* op = "_gemm_fp32_sm80";
  check_gemm(a, b, op);
  check(a.scalar_type() == ScalarType::Float && a.dim() == 2 && b.dim() == 2, op,
        ": a and b must be float32 matrices, got ", show(a), " and ", show(b));
  const Device device(a);
  const Tensor out = empty(a, gemm_sizes(a, b));
  const auto args = gemm_args<float, float>(product(a, b, out), std::nullopt);
  check_launch(cuda::gemm_fp32_sm80(args, device.stream()), op);
  return out;
}

Activation activation_of(const std::string& name) {
  if (name == "relu") return Activation::kRelu;
  if (name == "gelu") return Activation::kGelu;
  if (name == "gelu_tanh") return Activation::kGeluTanh;
  if (name == "silu") return Activation::kSilu;
  if (name == "sigmoid") return Activation::kSigmoid;
  return Activation::kNone;  // check_linear let only "none" through
}

// weight (out_features, in_features) as the b of a product.
cuda::PackArgs pack_args(const Tensor& weight) {
  return {.b = in<float>(weight),
          .batch = 1,
          .k = weight.size(1),
          .n = weight.size(0),
          .batch_stride = 0,
          .row_stride = weight.stride(1),
          .col_stride = weight.stride(0)};
}

Tensor prepack(const Tensor& weight) {
  check_prepack(weight);
  const Device device(weight);
  if (weight.scalar_type() != ScalarType::Float) return empty(weight, {0}, ScalarType::Byte);
  const cuda::PackArgs args = pack_args(weight);
  const Tensor packed = empty(weight, {cuda::gemm_packed_bytes(args)}, ScalarType::Byte);
  if (packed.numel() > 0) {
    check_launch(cuda::gemm_pack(args, packed.mutable_data_ptr(), device.stream()), "prepack");
  }
  return packed;
}

Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
              const Name& activation, const std::optional<Tensor>& residual,
              const std::optional<Name>& precision, const std::optional<Tensor>& packed) {
  check_linear(x, weight, bias, activation, residual);
  check_precision(precision, "linear");
  const Device device(x);
  const Tensor rows = rows_of(x);
  const std::optional<Tensor> bias_ = bias ? std::optional(as_contiguous(*bias)) : std::nullopt;
  const std::optional<Tensor> residual_ =
      residual ? std::optional(rows_of(*residual)) : std::nullopt;
  const Tensor y = empty(x, linear_sizes(x, weight));
  const Tensor weight_t =
      as_strided(weight, {weight.size(1), weight.size(0)}, {weight.stride(1), weight.stride(0)});
  const Product p = product(rows, weight_t, rows_of(y));
  bool launched = false;
  dispatch_floating<CudaTypes>(x.scalar_type(), [&]<typename T>() {
    auto args = gemm_args<T, T>(p, precision);
    args.bias = in<T>(bias_);
    args.activation = activation_of(activation);
    if (residual_) {
      args.residual = in<T>(*residual_);
      args.residual_row = residual_->stride(0);
      args.residual_col = residual_->stride(1);
    }
    if constexpr (std::is_same_v<T, float>) {
      if (packed && packed->numel() > 0) {
        const int64_t bytes = cuda::gemm_packed_bytes(pack_args(weight));
        check_same_device(*packed, "packed", x, "x", "linear");
        check(packed->scalar_type() == ScalarType::Byte && packed->numel() == bytes,
              "linear: packed must be what prepack made of weight, ", bytes, " bytes, got ",
              show(*packed));
        args.packed_b = packed->const_data_ptr();
      }
    }
    launched = launch_gemm(args, x, device.stream(), "linear");
  });
  if (launched) return y;
  // Where rows are not whole 16-byte vectors, cuBLAS rounds 16-bit products before it adds the
  // bias.
  const bool whole_vectors = weight.size(0) % 8 == 0 && weight.size(1) % 8 == 0;
  if (whole_vectors || x.element_size() != 2) {
    return aten_linear(x, weight, bias, activation, residual);
  }
  const Tensor product = float_product(p);
  const std::optional<Tensor> dense =
      residual_ ? std::optional(as_contiguous(*residual_)) : std::nullopt;
  const auto epilogue = [&]<typename T>() {
    check_launch(cuda::linear_epilogue(in<float>(product), in<T>(bias_), in<T>(dense), out<T>(y),
                                       product.size(0), product.size(1), activation_of(activation),
                                       device.stream()),
                 "linear");
  };
  if (x.scalar_type() == ScalarType::Half) {
    epilogue.operator()<__half>();
  } else {
    epilogue.operator()<__nv_bfloat16>();
  }
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(my_ops, CUDA, m) {
  m.impl("gemm", TORCH_BOX(&gemm));
  m.impl("gemm.out", TORCH_BOX(&gemm_out));
  m.impl("linear", TORCH_BOX(&linear));
  m.impl("prepack", TORCH_BOX(&prepack));
  m.impl("_gemm_fp32_sm80", TORCH_BOX(&gemm_fp32_sm80));
}

}  // namespace my_ops
