// Turns a question about a product into a problem for plan_gemm.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../include/gemm.h"
#include "explain.h"

namespace my_ops {

template <typename T>
cuda::GemmProblem problem_of(const AskedProduct& asked, Activation activation, bool bfloat16) {
  cuda::GemmProblem p{};
  p.batch = asked.batch, p.m = asked.m, p.n = asked.n, p.k = asked.k;
  p.a_batch = p.m * p.k;
  p.a_row = asked.a_transposed ? 1 : p.k, p.a_col = asked.a_transposed ? p.m : 1;
  p.b_batch = p.k * p.n;
  p.b_row = asked.b_transposed ? 1 : p.n, p.b_col = asked.b_transposed ? p.k : 1;
  p.out_batch = p.residual_batch = p.m * p.n;
  p.out_row = p.residual_row = p.n, p.out_col = p.residual_col = 1;
  p.has_bias = asked.bias;
  p.has_residual = asked.residual;
  p.packed = asked.packed;
  p.activation = activation;
  p.precision = asked.high ? Precision::kHigh : Precision::kHighest;
  p.linear = asked.linear;
  p.library_tf32 = asked.library_tf32;
  p.library_gelu = bfloat16;
  p.library_tf32_call = std::is_same_v<T, float>;
  return p;
}

}  // namespace my_ops
