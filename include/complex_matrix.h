// Launch interface of what makes a complex product a real one. No torch here: raw pointers, sizes,
// a stream.
//
// Complex matrices are pairs (re, im) in memory. Read as floats, a [m, k] and the result [m, n] are
// real matrices of twice the columns, and
//
//   result [m, 2n] = a [m, 2k] @ matrix [2k, 2n]
//
// where each element b[l][j] is a block of four in the matrix:
//
//                columns 2j and 2j + 1
//   row 2l          re b      im b
//   row 2l + 1     -im b      re b
//
// These are the same real products, as many of them, as those of which a complex product consists.
// With the conjugate of a, the second row has the other sign.
#pragma once

#include <cstdint>

#ifdef MY_OPS_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace my_ops {

// Strides are in pairs.
struct ComplexMatrixArgs {
  const float* b;  // [batch, k, n]
  int64_t batch, k, n;
  int64_t batch_stride, row_stride, col_stride;
  bool conjugate_a, conjugate_b;

  // Rows of the matrix are next to each other in memory, or else columns: as in b.
  bool rows_are_inner() const { return row_stride == 1 && col_stride != 1; }
  int64_t matrix_row() const { return rows_are_inner() ? 1 : 2 * n; }
  int64_t matrix_col() const { return rows_are_inner() ? 2 * k : 1; }
};

#ifdef MY_OPS_WITH_CUDA
namespace cuda {

// Writes the matrix [batch, 2k, 2n]: dense, and aligned to 8 bytes.
cudaError_t write_complex_matrix(const ComplexMatrixArgs& args, float* matrix, cudaStream_t stream);

}  // namespace cuda
#endif

}  // namespace my_ops
