// The epilogue of every product, activation(sum + bias) + residual, once for each way in which a
// kernel holds its sums: single elements, accumulators of a warpgroup, vectors of a row. They share
// ColumnTerms; a scale per column would be one more member. A formula is Activate<...>,
// FastActivate<...> or RuntimeActivate.
#pragma once

#include "common/numeric.cuh"
#include "gemm.h"
#include "gemm/activation.cuh"

namespace my_ops::cuda {

// What is applied to a column's sums before the activation.
template <typename C>
struct ColumnTerms {
  C bias;

  __device__ __forceinline__ C operator()(C sum) const { return sum + bias; }
};

template <typename T>
__device__ __forceinline__ ColumnTerms<compute_t<T>> column_terms(const T* bias, int64_t col) {
  return {bias ? load(bias[col]) : compute_t<T>(0)};
}

// What a residual adds to element [z][row][col]; `absent` without one.
template <typename T, typename Out>
__device__ __forceinline__ compute_t<Out> residual_at(const GemmArgs<T, Out>& args, int64_t z,
                                                      int64_t row, int64_t col,
                                                      compute_t<Out> absent = 0) {
  if (!args.residual) return absent;
  return load(
      args.residual[z * args.residual_batch + row * args.residual_row + col * args.residual_col]);
}

// ---- single elements ----

// Chooses the activation again for every element: for kernels that finish one at a time.
struct RuntimeActivate {
  Activation activation;

  template <typename C>
  __device__ __forceinline__ C operator()(C x) const {
    with_activation(activation, [&]<Activation kActivation>() { x = Activate<kActivation>{}(x); });
    return x;
  }
};

// x + y. If x is a product, the compiler may not contract the two.
__device__ __forceinline__ float add_rn(float x, float y) { return __fadd_rn(x, y); }
__device__ __forceinline__ double add_rn(double x, double y) { return __dadd_rn(x, y); }

// residual() is read last, when the registers of the activation are free.
template <typename Formula, typename C, typename Residual>
__device__ __forceinline__ C finish_element(Formula formula, C sum, ColumnTerms<C> column,
                                            Residual residual) {
  const C activated = formula(column(sum));
  return add_rn(activated, residual());
}

// ---- accumulators of a warpgroup ----

// x[4 * j + 2 * i + c] belongs to row 8 * i and column 8 * j + c, counted from the lane's first.
// terms(c) returns the ColumnTerms of a column; beyond the edge of the product, the kernel decides
// what it reads.
template <int kCount, typename Terms>
__device__ __forceinline__ void apply_column_terms(float (&x)[kCount], Terms terms) {
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const ColumnTerms<float> column = terms(8 * j + c);
      x[4 * j + c] = column(x[4 * j + c]);
      x[4 * j + 2 + c] = column(x[4 * j + 2 + c]);
    }
  }
}

template <template <Activation> typename Formula, int kCount>
__device__ __forceinline__ void activate(Activation activation, float (&x)[kCount]) {
  with_activation(activation, [&]<Activation kActivation>() {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = Formula<kActivation>{}(x[i]);
  });
}

// ---- vectors of a row ----

// bias: for the vector's columns, or null.
template <typename T, typename Formula, int kSize>
__device__ __forceinline__ void finish_vector(float (&x)[kSize], Formula formula, const T* bias,
                                              const Vector<T, kSize>& residual, bool has_residual) {
  if (bias) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) x[i] = ColumnTerms<float>{load(bias[i])}(x[i]);
  }
#pragma unroll
  for (int i = 0; i < kSize; ++i) x[i] = formula(x[i]);
  if (has_residual) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) x[i] += load(residual.at[i]);
  }
}

}  // namespace my_ops::cuda
