// gemm and linear on CUDA.
#include "gemm_cuda.h"

namespace my_ops {
namespace {

void launch(const Product& p, const Device& device) {
  dispatch_floating<CudaTypes>(p.a.scalar_type(), [&]<typename T>() {
    if (!launch_gemm<T, T>(p, nullptr, Activation::kNone, device.stream(), "gemm")) aten_gemm(p);
  });
}

void gemm_out(const Tensor& a, const Tensor& b, Tensor out) {
  check_gemm(a, b, "gemm");
  check_out(out, a, b, "gemm");
  const Device device(a);
  launch(product(a, b, out), device);
}

Tensor gemm(const Tensor& a, const Tensor& b) {
  check_gemm(a, b, "gemm");
  const Device device(a);
  const Tensor out = empty(a, gemm_sizes(a, b));
  launch(product(a, b, out), device);
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

Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
              const std::string& activation) {
  check_linear(x, weight, bias, activation);
  const Device device(x);
  const Tensor rows = rows_of(x);
  const std::optional<Tensor> bias_ = bias ? std::optional(as_contiguous(*bias)) : std::nullopt;
  const Tensor y = empty(x, linear_sizes(x, weight));
  const Tensor y_rows = rows_of(y);
  const Tensor weight_t =
      as_strided(weight, {weight.size(1), weight.size(0)}, {weight.stride(1), weight.stride(0)});
  bool launched = false;
  dispatch_floating<CudaTypes>(x.scalar_type(), [&]<typename T>() {
    launched = launch_gemm<T, T>(product(rows, weight_t, y_rows), in<T>(bias_),
                                 activation_of(activation), device.stream(), "linear");
  });
  if (launched) return y;
  // Where rows are not whole 16-byte vectors, cuBLAS rounds 16-bit products before it adds the
  // bias.
  const bool whole_vectors = weight.size(0) % 8 == 0 && weight.size(1) % 8 == 0;
  if (whole_vectors || x.element_size() != 2) return aten_linear(x, weight, bias, activation);
  const Tensor product = empty(x, {rows.size(0), weight.size(0)}, ScalarType::Float);
  aten("aten::mm", "dtype_out", rows, weight_t, ScalarType::Float, product);
  const auto epilogue = [&]<typename T>() {
    check_launch(cuda::linear_epilogue(in<float>(product), in<T>(bias_), out<T>(y), product.size(0),
                                       product.size(1), activation_of(activation), device.stream()),
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
}

}  // namespace my_ops
