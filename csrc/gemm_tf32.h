// cuBLAS's product in TF32, whatever torch's settings are: LibraryCall::kTf32.
#pragma once

#include <climits>

#include "gemm_cuda.h"

namespace my_ops {

// A matrix, or a batch of them, for cuBLAS: by columns, or transposed.
struct ColumnMajor {
  Tensor matrix;
  int transposed, ld;
};

// The transpose of t, which is copied if neither of its indices is contiguous.
inline ColumnMajor column_major(const Tensor& t) {
  const int64_t dim = t.dim(), rows = t.size(dim - 2), columns = t.size(dim - 1);
  const int64_t row = rows == 1 ? columns : t.stride(dim - 2);
  const int64_t column = columns == 1 ? rows : t.stride(dim - 1);
  const auto fits = [](int64_t ld, int64_t least) { return ld >= least && ld <= INT_MAX; };
  if ((t.stride(dim - 1) == 1 || columns == 1) && fits(row, columns)) {
    return {t, 0, static_cast<int>(row)};
  }
  if ((t.stride(dim - 2) == 1 || rows == 1) && fits(column, rows)) {
    return {t, 1, static_cast<int>(column)};
  }
  return {as_contiguous(t), 0, static_cast<int>(columns)};
}

using Multiply = int (*)(void*, int, int, int, int, int, const void*, const void*, int, int,
                         const void*, int, int, const void*, void*, int, int, int, int);
using MultiplyBatch = int (*)(void*, int, int, int, int, int, const void*, const void*, int, int,
                              long long, const void*, int, int, long long, const void*, void*, int,
                              int, long long, int, int, int);
struct LibraryProducts {
  Multiply one = reinterpret_cast<Multiply>(dlsym(RTLD_DEFAULT, "cublasGemmEx"));
  MultiplyBatch batch =
      reinterpret_cast<MultiplyBatch>(dlsym(RTLD_DEFAULT, "cublasGemmStridedBatchedEx"));
};
inline const LibraryProducts& library_products() {
  static const LibraryProducts products;
  return products;
}

// Whether tf32_gemm can be called for float products.
template <typename T>
bool has_tf32_gemm() {
  return std::is_same_v<T, float> && library_products().one && library_products().batch;
}

// out = a @ b + beta out, where out has contiguous rows; false if a size is beyond cuBLAS's.
inline bool tf32_gemm(const Product& p, float beta) {
  constexpr int kFloat = 0, kTf32 = 77, kDefaultAlgorithm = -1;
  const int64_t ld = p.m == 1 ? p.n : p.out_row;
  if (std::max({p.batch, p.m, p.n, p.k, ld}) > INT_MAX || ld < p.n) return false;
  void* handle = nullptr;
  check_torch(torch_get_current_cuda_blas_handle(&handle), "cuBLAS's handle");
  const ColumnMajor a = column_major(a_matrices(p)), b = column_major(b_matrices(p));
  const auto m = static_cast<int>(p.m), n = static_cast<int>(p.n), k = static_cast<int>(p.k);
  const float alpha = 1;
  const void *const a_data = a.matrix.const_data_ptr(), *const b_data = b.matrix.const_data_ptr();
  void* const out = p.out.mutable_data_ptr();
  // The transposed product, since a matrix by rows is its transpose by columns.
  const int status =
      p.batch == 1 ? library_products().one(handle, b.transposed, a.transposed, n, m, k, &alpha,
                                            b_data, kFloat, b.ld, a_data, kFloat, a.ld, &beta, out,
                                            kFloat, static_cast<int>(ld), kTf32, kDefaultAlgorithm)
                   : library_products().batch(handle, b.transposed, a.transposed, n, m, k, &alpha,
                                              b_data, kFloat, b.ld, b.matrix.stride(0), a_data,
                                              kFloat, a.ld, a.matrix.stride(0), &beta, out, kFloat,
                                              static_cast<int>(ld), p.out_batch,
                                              static_cast<int>(p.batch), kTf32, kDefaultAlgorithm);
  check(status == 0, "gemm: cuBLAS failed with status ", status, " in a product ", m, " x ", n,
        " x ", k);
  return true;
}

}  // namespace my_ops
