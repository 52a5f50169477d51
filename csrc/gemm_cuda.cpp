// gemm and linear on CUDA.
#include "gemm_cuda.h"

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h>

#include "gemm_tf32.h"

// Weak, like the stream in binding_cuda.h. If torch lacks it, two kernels are used.
#pragma weak aoti_torch_cuda__addmm_activation

namespace my_ops {
namespace {

// The product of 16-bit matrices, in float.
Tensor float_product(const Tensor& a, const Tensor& b) {
  const Tensor product = empty(a, {a.size(0), b.size(1)}, ScalarType::Float);
  aten("aten::mm", "dtype_out", a, b, ScalarType::Float, product);
  return product;
}

// Batches that share b are rows of one product here. torch.matmul does not see that in a b with a
// batch of 1; with few outputs cuBLAS may sum 16-bit rows in 16 bits, but batches in float.
void library_gemm(const Product& p) {
  const bool rows = p.batch == 1 && p.b.dim() == 3 && p.out.element_size() == 2;
  if (!rows || !cuda::few_outputs(p.m, p.n, p.k)) return aten_gemm(p);
  Tensor out = out_matrices(p);
  torch::stable::copy_(out, float_product(a_matrices(p), b_matrices(p)));
}

}  // namespace

void gemm_into(const Tensor& a, const Tensor& b, const Tensor& out,
               const std::optional<Name>& precision, const Device& device) {
  const Product p = product(a, b, out);
  dispatch_floating<CudaTypes>(out.scalar_type(), [&]<typename T>() {
    auto args = gemm_args<T, T>(p, precision);
    args.library_tf32_call = has_tf32_gemm<T>();
    const cuda::GemmPlan plan = launch_gemm(args, out, device.stream(), "gemm");
    if (plan.kernel != cuda::GemmKernel::kLibrary) return;
    if (plan.library == cuda::LibraryCall::kTf32 && tf32_gemm(p, 0)) return;
    if (plan.library != cuda::LibraryCall::kConverted) return library_gemm(p);
    const Operands converted = of_one_dtype(a, b);
    gemm_into(converted.a, converted.b, out, precision, device);
  });
}

namespace {

void gemm_out(const Tensor& a, const Tensor& b, Tensor out, const std::optional<Name>& precision) {
  check_gemm(a, b, "gemm");
  check_precision(precision, "gemm");
  check_out(out, a, b, "gemm");
  const Device device(a);
  gemm_into(a, b, out, precision, device);
}

Tensor gemm(const Tensor& a, const Tensor& b, const std::optional<Name>& precision) {
  check_gemm(a, b, "gemm");
  check_precision(precision, "gemm");
  const Device device(a);
  const Tensor out = empty(wider(a, b), gemm_sizes(a, b));
  gemm_into(a, b, out, precision, device);
  return out;
}

// weight (out_features, in_features) as the b of a product.
Tensor transposed(const Tensor& weight) {
  return as_strided(weight, {weight.size(1), weight.size(0)}, {weight.stride(1), weight.stride(0)});
}

Tensor prepack(const Tensor& weight) {
  check_prepack(weight);
  const Device device(weight);
  const Tensor b = transposed(weight);
  if (weight.scalar_type() != ScalarType::Float || !cuda::gemm_packs(pack_args(b))) {
    return empty(weight, {0}, ScalarType::Byte);
  }
  return packed(b, device.stream(), "prepack");
}

// The packed form of the weight, or null. Only Hopper's kernels use it.
const void* packed_data(const std::optional<Tensor>& packed, const Tensor& weight) {
  if (!packed) return nullptr;
  if (packed->numel() == 0 || weight.scalar_type() != ScalarType::Float) return nullptr;
  constexpr int64_t kAlign = 256;
  const int64_t bytes = cuda::gemm_packed_bytes(pack_args(transposed(weight)));
  check(packed->numel() == bytes, "linear: packed must be what prepack made of weight, ", bytes,
        " bytes, got ", show(*packed));
  const int64_t offset = reinterpret_cast<uintptr_t>(packed->const_data_ptr()) % kAlign;
  check(packed->is_contiguous() && offset == 0,
        "linear: packed must be contiguous and start at a multiple of ", kAlign,
        " bytes, got strides ", show(packed->strides()), ", ", offset, " bytes beyond one");
  return packed->const_data_ptr();
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
    return x.dim() == 2 ? Tensor(y) : aten("aten::_unsafe_view", "", Tensor(y), sizes);
  });
}

// Applies bias, activation and residual to sums, in one kernel.
Tensor finish_linear(const Tensor& sums, const Tensor& y, const std::optional<Tensor>& bias,
                     Activation activation, const std::optional<Tensor>& residual,
                     cudaStream_t stream) {
  const std::optional<Tensor> dense = as_contiguous(residual);
  const auto finish = [&]<typename P, typename T>() {
    check_launch(cuda::linear_epilogue(in<P>(sums), in<T>(bias), in<T>(dense), out<T>(y), y.numel(),
                                       y.size(y.dim() - 1), activation, stream),
                 "linear");
  };
  dispatch_floating<CudaTypes>(y.scalar_type(), [&]<typename T>() {
    if constexpr (sizeof(T) == 2) {
      sums.scalar_type() == ScalarType::Float ? finish.template operator()<float, T>()
                                              : finish.template operator()<T, T>();
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
  const Tensor y = empty(wider(x, weight), linear_sizes(x, weight));
  const Product p = product(rows_of(x), transposed(weight), rows_of(y));
  cuda::GemmPlan plan;
  dispatch_floating<CudaTypes>(y.scalar_type(), [&]<typename T>() {
    auto args = gemm_args<T, T>(p, precision);
    args.bias = in<T>(bias_);
    args.has_bias = bias_.has_value();
    args.activation = act;
    args.linear = true;
    args.library_tf32_call = has_tf32_gemm<T>();
    // As accurate as ours: to 2^-18, which is enough for bfloat16 but not for float16.
    args.library_gelu = std::is_same_v<T, __nv_bfloat16> && aoti_torch_cuda__addmm_activation;
    if (residual_) {
      args.residual = in<T>(*residual_);
      args.has_residual = true;
      args.residual_aligned = is_aligned(*residual_);
      args.residual_row = residual_->stride(0);
      args.residual_col = residual_->stride(1);
    }
    args.packed_b = packed_b;
    args.packed = packed_b != nullptr;
    plan = launch_gemm(args, y, device.stream(), "linear");
  });
  if (plan.kernel != cuda::GemmKernel::kLibrary) return y;
  switch (plan.library) {
    case cuda::LibraryCall::kProduct:
      return aten_linear(x, weight, bias, activation, residual);
    case cuda::LibraryCall::kGelu:
      return library_gelu_linear(x, weight, bias_);
    case cuda::LibraryCall::kProductAndBias: {
      const Tensor sums = aten_linear(x, weight, bias_, "none", std::nullopt);
      return finish_linear(sums, sums, std::nullopt, act, residual_, device.stream());
    }
    case cuda::LibraryCall::kSums:
      return finish_linear(float_product(rows_of(x), transposed(weight)), y, bias_, act, residual_,
                           device.stream());
    case cuda::LibraryCall::kTf32: {
      Tensor out = p.out;
      if (bias_) torch::stable::copy_(out, as_strided(*bias_, {p.m, p.n}, {0, 1}));
      return tf32_gemm(p, bias_ ? 1 : 0) ? y : aten_linear(x, weight, bias, activation, residual);
    }
    case cuda::LibraryCall::kConverted: {
      const Operands converted = of_one_dtype(x, weight);
      return linear(converted.a, converted.b, bias, activation, residual, precision, packed);
    }
  }
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(my_ops, CUDA, m) {
  m.impl("gemm", TORCH_BOX(&gemm));
  m.impl("gemm.out", TORCH_BOX(&gemm_out));
  m.impl("linear", TORCH_BOX(&linear));
  m.impl("prepack", TORCH_BOX(&prepack));
}

}  // namespace my_ops
