// The launch of a matrix product, for gemm, linear and LLTM.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "../include/gemm.h"
#include "binding_cuda.h"
#include "gemm_checks.h"
#include "gemm_explain.h"

// Weak, like the stream in binding_cuda.h.
#pragma weak torch_get_current_cuda_blas_handle

namespace my_ops {

inline bool is_aligned(const Tensor& t) {
  return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
}

// A plain product; the caller adds an epilogue. In a float product one operand may have 16 bits.
// For precision see check_precision.
template <typename T, typename Out>
cuda::GemmArgs<T, Out> gemm_args(const Product& p, const std::optional<Name>& precision) {
  cuda::GemmArgs<T, Out> args{};
  args.batch = p.batch, args.m = p.m, args.n = p.n, args.k = p.k;
  args.a_batch = p.a_batch, args.a_row = p.a_row, args.a_col = p.a_col;
  args.b_batch = p.b_batch, args.b_row = p.b_row, args.b_col = p.b_col;
  args.out_batch = p.out_batch, args.out_row = p.out_row, args.out_col = p.out_col;
  if (precision == "high" || precision == "tf32") args.precision = Precision::kHigh;
  args.library_tf32 = precision == "highest" || precision == "tf32";
  args.a_aligned = is_aligned(p.a), args.b_aligned = is_aligned(p.b);
  args.half_a = p.a.element_size() < sizeof(T), args.half_b = p.b.element_size() < sizeof(T);
  if (args.mixed()) {
    const Tensor& half = args.half_a ? p.a : p.b;
    args.half_is_bfloat16 = half.scalar_type() == ScalarType::BFloat16;
    args.half_operand = half.const_data_ptr();
  }
  if (!args.half_a) args.a = in<T>(p.a);
  if (!args.half_b) args.b = in<T>(p.b);
  if (p.out.defined()) {
    args.out = out<Out>(p.out);
    args.out_aligned = is_aligned(p.out);
  }
  return args;
}

// b (k, n) of products.
inline cuda::PackArgs pack_args(const Tensor& b) {
  return {.b = in<float>(b),
          .batch = 1,
          .k = b.size(0),
          .n = b.size(1),
          .batch_stride = 0,
          .row_stride = b.stride(0),
          .col_stride = b.stride(1)};
}

// With MY_OPS_LOG=plan, every plan is printed to stderr.
inline bool logs_plans() {
  static const bool logs = [] {
    const char* wanted = std::getenv("MY_OPS_LOG");
    return wanted != nullptr && std::string_view(wanted) == "plan";
  }();
  return logs;
}

// b of products, as fp32_sm90 reads it: float, on the current device.
inline Tensor packed(const Tensor& b, cudaStream_t stream, const char* op) {
  const cuda::PackArgs args = pack_args(b);
  const auto bytes = [&](int64_t count) { return empty(b, {count}, ScalarType::Byte); };
  const Tensor parts = bytes(cuda::gemm_packed_bytes(args));
  const Tensor workspace = bytes(cuda::gemm_pack_workspace(args));
  check_launch(
      cuda::gemm_pack(args, parts.mutable_data_ptr(), workspace.mutable_data_ptr(), stream), op);
  return parts;
}

inline void log_plan(const cuda::GemmProblem& args, const cuda::GemmPlan& plan, const Tensor& like,
                     const char* op) {
  if (!logs_plans()) return;
  std::fprintf(stderr, "my_ops: %s of %s, m %lld n %lld k %lld batch %lld: %s; %s\n", op,
               name_of(like.scalar_type()).c_str(), static_cast<long long>(args.m),
               static_cast<long long>(args.n), static_cast<long long>(args.k),
               static_cast<long long>(args.batch), show(plan).c_str(),
               show_costs(plan.device).c_str());
}

// Plans a product for the current device, which is the device of like.
template <typename T, typename Out>
cuda::GemmPlan planned(const cuda::GemmProblem& problem, const Tensor& like, const char* op) {
  cuda::GemmPlan plan;
  check_launch(cuda::plan_gemm<T, Out>(problem, &plan), op);
  log_plan(problem, plan, like, op);
  return plan;
}

// Whether cuBLAS may round float products to TF32, if torch tells. torch sets its handle from all
// of its flags and guards.
inline std::optional<bool> library_uses_tf32() {
  using GetMathMode = int (*)(void*, int*);
  static const auto get_math_mode =
      reinterpret_cast<GetMathMode>(dlsym(RTLD_DEFAULT, "cublasGetMathMode"));
  constexpr int kOfReducedPrecisionReductions = 16;  // these flags are for 16-bit types
  void* handle = nullptr;
  int mode = -1;
  if (!get_math_mode || torch_get_current_cuda_blas_handle(&handle) != TORCH_SUCCESS ||
      get_math_mode(handle, &mode) != 0) {
    return std::nullopt;
  }
  return (mode & ~kOfReducedPrecisionReductions) != 0;
}

// Plans a float product in torch's precision: TF32's where cuBLAS may use that. Only where the
// tensor cores would take the product, because asking makes cuBLAS's handle.
inline cuda::GemmPlan planned_as_torchs(cuda::GemmProblem* problem, const Tensor& like,
                                        const char* op) {
  cuda::GemmPlan plan;
  check_launch(cuda::plan_gemm<float, float>(*problem, &plan), op);
  if (plan.on_tensor_cores() && library_uses_tf32().value_or(false)) {
    problem->precision = Precision::kHigh;
    problem->library_tf32 = true;
    check_launch(cuda::plan_gemm<float, float>(*problem, &plan), op);
  }
  log_plan(*problem, plan, like, op);
  return plan;
}

// out = a @ b, as the op gemm, for arguments that were checked.
void gemm_into(const Tensor& a, const Tensor& b, const Tensor& out,
               const std::optional<Name>& precision, const Device& device);

// Runs a plan; its kernel must not be kLibrary.
template <typename T, typename Out>
void launch_plan(const cuda::GemmArgs<T, Out>& args, const cuda::GemmPlan& plan, const Tensor& like,
                 cudaStream_t stream, const char* op) {
  std::optional<Tensor> workspace;  // freed to torch's allocator, which orders reuse by stream
  if (plan.workspace > 0) workspace = empty(like, {plan.workspace}, ScalarType::Byte);
  check_launch(cuda::gemm(args, plan, workspace ? workspace->mutable_data_ptr() : nullptr, stream),
               op);
}

// Plans a product and runs the plan, unless its kernel is kLibrary; then the caller runs it. like:
// a tensor on the problem's device, of the result's dtype.
template <typename T, typename Out>
cuda::GemmPlan launch_gemm(const cuda::GemmArgs<T, Out>& args, const Tensor& like,
                           cudaStream_t stream, const char* op) {
  const cuda::GemmPlan plan = planned<T, Out>(args, like, op);
  if (plan.kernel != cuda::GemmKernel::kLibrary) launch_plan(args, plan, like, stream, op);
  return plan;
}

}  // namespace my_ops
