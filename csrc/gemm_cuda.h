// The launch of a matrix product, for gemm, linear and LLTM.
#pragma once

#include "../include/gemm.h"
#include "binding_cuda.h"
#include "gemm_checks.h"

namespace my_ops {

// A plain product; the caller adds an epilogue. precision: as check_precision describes it.
template <typename T, typename Out>
cuda::GemmArgs<T, Out> gemm_args(const Product& p, const std::optional<Name>& precision) {
  return {.a = in<T>(p.a),
          .b = in<T>(p.b),
          .bias = nullptr,
          .out = out<Out>(p.out),
          .batch = p.batch,
          .m = p.m,
          .n = p.n,
          .k = p.k,
          .a_batch = p.a_batch,
          .a_row = p.a_row,
          .a_col = p.a_col,
          .b_batch = p.b_batch,
          .b_row = p.b_row,
          .b_col = p.b_col,
          .out_batch = p.out_batch,
          .out_row = p.out_row,
          .out_col = p.out_col,
          .residual = nullptr,
          .residual_batch = 0,
          .residual_row = 0,
          .residual_col = 0,
          .activation = Activation::kNone,
          .precision =
              precision == "high" || precision == "tf32" ? Precision::kHigh : Precision::kHighest,
          .library_tf32 = precision == "highest" || precision == "tf32",
          .library_fuses = false};
}

// False where the router names the vendor library: nothing has been launched then. like: a tensor
// of the problem's device.
template <typename T, typename Out>
bool launch_gemm(const cuda::GemmArgs<T, Out>& args, const Tensor& like, cudaStream_t stream,
                 const char* op) {
  std::optional<Tensor> workspace;  // freed into torch's allocator, which orders it by stream
  if (const int64_t bytes = cuda::gemm_workspace(args)) {
    workspace = empty(like, {bytes}, ScalarType::Byte);
  }
  const cudaError_t status =
      cuda::gemm(args, workspace ? workspace->mutable_data_ptr() : nullptr, stream);
  if (status == cudaErrorNotSupported) return false;
  check_launch(status, op);
  return true;
}

}  // namespace my_ops
