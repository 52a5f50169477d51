// gemm and linear on CUDA.
#include "gemm_cuda.h"

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h>

#include "gemm/fp32_sm80.h"

// Weak, as the stream in binding_cuda.h; a torch without it takes two kernels.
#pragma weak aoti_torch_cuda__addmm_activation

namespace my_ops {
namespace {

// Of 16-bit matrices, not rounded.
Tensor float_product(const Tensor& a, const Tensor& b) {
  const Tensor product = empty(a, {a.size(0), b.size(1)}, ScalarType::Float);
  aten("aten::mm", "dtype_out", a, b, ScalarType::Float, product);
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
  check_precision(precision, "gemm");
  check_out(out, a, b, "gemm");
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

// The kernel that the router takes on compute capability 8.0, on any device, and as on one with
// that much shared memory a block: for the tests.
Tensor gemm_fp32_sm80(const Tensor& a, const Tensor& b, std::optional<int64_t> shared_bytes) {
  constexpr const char* op = "_gemm_fp32_sm80";
  check_gemm(a, b, op);
  check(a.scalar_type() == ScalarType::Float && a.dim() == 2 && b.dim() == 2, op,
        ": a and b must be float32 matrices, got ", show(a), " and ", show(b));
  const Device device(a);
  const Tensor out = empty(a, gemm_sizes(a, b));
  if (out.numel() == 0) return out;
  cuda::DeviceFacts facts;
  check_launch(cuda::current_device(&facts), op);
  if (shared_bytes) facts.shared_bytes = static_cast<int>(*shared_bytes);
  const auto args = gemm_args<float, float>(product(a, b, out), std::nullopt);
  check_launch(cuda::gemm_fp32_sm80(args, facts, device.stream()), op);
  return out;
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
  const auto bytes = [&](int64_t count) { return empty(weight, {count}, ScalarType::Byte); };
  if (weight.scalar_type() != ScalarType::Float) return bytes(0);
  const cuda::PackArgs args = pack_args(weight);
  if (!cuda::gemm_packs(args)) return bytes(0);
  const Tensor packed = bytes(cuda::gemm_packed_bytes(args));
  const Tensor workspace = bytes(cuda::gemm_pack_workspace(args));
  check_launch(cuda::gemm_pack(args, packed.mutable_data_ptr(), workspace.mutable_data_ptr(),
                               device.stream()),
               "prepack");
  return packed;
}

// What prepack made of weight, or null; kernels other than Hopper's leave it aside.
const void* packed_data(const std::optional<Tensor>& packed, const Tensor& weight) {
  if (!packed) return nullptr;
  if (packed->numel() == 0 || weight.scalar_type() != ScalarType::Float) return nullptr;
  constexpr int64_t kAlign = 256;
  const int64_t bytes = cuda::gemm_packed_bytes(pack_args(weight));
  check(packed->numel() == bytes, "linear: packed must be what prepack made of weight, ", bytes,
        " bytes, got ", show(*packed));
  const int64_t offset = reinterpret_cast<uintptr_t>(packed->const_data_ptr()) % kAlign;
  check(packed->is_contiguous() && offset == 0,
        "linear: packed must be contiguous and start at a multiple of ", kAlign,
        " bytes, got strides ", show(packed->strides()), ", ", offset, " bytes beyond one");
  return packed->const_data_ptr();
}

// weight (out_features, in_features) as the b of a product.
Tensor transposed(const Tensor& weight) {
  return as_strided(weight, {weight.size(1), weight.size(0)}, {weight.stride(1), weight.stride(0)});
}

// Whether cuBLAS's own epilogue has the activation, as exact as ours. Its gelu is good to 2^-18,
// bf16's last place but not fp16's; its relu makes 0 of NaN. ATen forgets the activation of an
// empty sum.
bool library_fuses(const Tensor& weight, Activation activation,
                   const std::optional<Tensor>& residual) {
  return activation == Activation::kGeluTanh && !residual && weight.size(1) > 0 &&
         weight.scalar_type() == ScalarType::BFloat16 && aoti_torch_cuda__addmm_activation;
}

// By the router's kernels, or nothing where it names the vendor library.
std::optional<Tensor> kernel_linear(const Tensor& x, const Tensor& weight,
                                    const std::optional<Tensor>& bias, Activation activation,
                                    const std::optional<Tensor>& residual,
                                    const std::optional<Name>& precision, const void* packed,
                                    cudaStream_t stream) {
  const Tensor y = empty(x, linear_sizes(x, weight));
  const Product p = product(rows_of(x), transposed(weight), rows_of(y));
  bool launched = false;
  dispatch_floating<CudaTypes>(x.scalar_type(), [&]<typename T>() {
    auto args = gemm_args<T, T>(p, precision);
    args.bias = in<T>(bias);
    args.activation = activation;
    args.library_fuses = library_fuses(weight, activation, residual);
    if (residual) {
      args.residual = in<T>(*residual);
      args.residual_row = residual->stride(0);
      args.residual_col = residual->stride(1);
    }
    args.packed_b = packed;
    launched = launch_gemm(args, x, stream, "linear");
  });
  return launched ? std::optional(y) : std::nullopt;
}

// gelu_tanh(x @ weight.T + bias) by cuBLAS alone.
Tensor library_gelu_linear(const Tensor& x, const Tensor& weight,
                           const std::optional<Tensor>& bias) {
  const Sizes sizes = linear_sizes(x, weight);
  return allocated(x, sizes, x.scalar_type(), [&] {
    const Tensor added = bias ? *bias : zeros(x, {weight.size(0)}, x.scalar_type());
    AtenTensorHandle y = nullptr;
    constexpr double kBeta = 1, kAlpha = 1;
    constexpr int32_t kUseGelu = 1;
    check_torch(
        aoti_torch_cuda__addmm_activation(added.get(), rows_of(x).get(), transposed(weight).get(),
                                          kBeta, kAlpha, kUseGelu, &y),
        "aten::_addmm_activation");
    return x.dim() == 2 ? Tensor(y) : aten("aten::view", "", Tensor(y), sizes);
  });
}

// Of 16 bits by cuBLAS, and in one kernel what it leaves.
Tensor half_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                   Activation activation, const std::optional<Tensor>& residual,
                   cudaStream_t stream) {
  // Else cuBLAS rounds 16-bit products before it adds the bias.
  const bool whole_vectors = weight.size(0) % 8 == 0 && weight.size(1) % 8 == 0;
  if (whole_vectors && library_fuses(weight, activation, residual)) {
    return library_gelu_linear(x, weight, bias);
  }
  const Tensor sums = whole_vectors ? aten_linear(x, weight, bias, "none", std::nullopt)
                                    : float_product(rows_of(x), transposed(weight));
  if (whole_vectors && activation == Activation::kNone && !residual) return sums;
  const Tensor y = whole_vectors ? sums : empty(x, linear_sizes(x, weight));
  const std::optional<Tensor> dense = as_contiguous(residual);
  const auto finish = [&]<typename P, typename T>(const T* bias_left) {
    check_launch(cuda::linear_epilogue(in<P>(sums), bias_left, in<T>(dense), out<T>(y), y.numel(),
                                       weight.size(0), activation, stream),
                 "linear");
  };
  dispatch_floating<CudaTypes>(x.scalar_type(), [&]<typename T>() {
    if constexpr (sizeof(T) == 2) {
      whole_vectors ? finish.template operator()<T, T>(nullptr)
                    : finish.template operator()<float, T>(in<T>(bias));
    }
  });
  return y;
}

Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
              const Name& activation, const std::optional<Tensor>& residual,
              const std::optional<Name>& precision, const std::optional<Tensor>& packed) {
  check_linear(x, weight, bias, activation, residual, precision, packed);
  const void* const packed_b = packed_data(packed, weight);
  const Device device(x);
  const std::optional<Tensor> bias_ = as_contiguous(bias);
  const std::optional<Tensor> residual_ =
      residual ? std::optional(rows_of(*residual)) : std::nullopt;
  const Activation act = activation_of(activation);
  if (auto y =
          kernel_linear(x, weight, bias_, act, residual_, precision, packed_b, device.stream())) {
    return *y;
  }
  if (x.element_size() == 2) {
    return half_linear(x, weight, bias_, act, residual_, device.stream());
  }
  return aten_linear(x, weight, bias, activation, residual);
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
