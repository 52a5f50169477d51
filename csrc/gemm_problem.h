// Turns a question about a product into arguments of plan_gemm.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../include/gemm.h"
#include "explain.h"

namespace my_ops {

// Operands get an aligned address that is never read.
template <typename T>
cuda::GemmArgs<T, T> args_of(const AskedProduct& problem, Activation activation, bool bfloat16) {
  T* const somewhere = reinterpret_cast<T*>(uintptr_t{1} << 20);
  cuda::GemmArgs<T, T> args{};
  args.a = args.b = args.out = somewhere;
  args.batch = problem.batch, args.m = problem.m, args.n = problem.n, args.k = problem.k;
  args.a_batch = args.m * args.k;
  args.a_row = problem.a_transposed ? 1 : args.k, args.a_col = problem.a_transposed ? args.m : 1;
  args.b_batch = args.k * args.n;
  args.b_row = problem.b_transposed ? 1 : args.n, args.b_col = problem.b_transposed ? args.k : 1;
  args.out_batch = args.m * args.n, args.out_row = args.n, args.out_col = 1;
  if (problem.bias) args.bias = somewhere;
  if (problem.residual) {
    args.residual = somewhere;
    args.residual_batch = args.out_batch, args.residual_row = args.n, args.residual_col = 1;
  }
  if (problem.packed) args.packed_b = somewhere;
  args.activation = activation;
  args.precision = problem.high ? Precision::kHigh : Precision::kHighest;
  args.linear = problem.linear;
  args.library_tf32 = problem.library_tf32;
  args.library_gelu = bfloat16;
  args.library_tf32_call = std::is_same_v<T, float>;
  return args;
}

}  // namespace my_ops
