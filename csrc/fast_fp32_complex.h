// Makes a complex product of torch's a real one of twice n and twice k, for fast_fp32.h: a, what is
// added and the result are read and written as they are, and b becomes the matrix of
// ../include/complex_matrix.h, which knows about conjugates. Only an a whose rows are not dense is
// copied.
#pragma once

#include "../include/complex_matrix.h"
#include "gemm_checks.h"

namespace my_ops::fast_fp32 {

// torch's flag. (aten::is_conj conjugates its tensor before it looks.)
inline bool is_conj(const Tensor& t) {
  using IsConj = bool (*)(AtenTensorHandle tensor);
  static const auto ask =
      reinterpret_cast<IsConj>(dlsym(RTLD_DEFAULT, "_ZN2at6native7is_conjERKNS_6TensorE"));
  check(ask != nullptr, "fast_fp32: this torch does not tell what is conjugated");
  return ask(t.get());
}

struct ComplexMatrix : ComplexMatrixArgs {
  int64_t copied = 0;  // elements of a; 0: it is read as it is
};

// *p has complex operands. It becomes the real product, of the copy and the matrix, which are yet
// to be made; until then its tensors are the complex ones.
inline ComplexMatrix make_real(Product* p) {
  ComplexMatrix matrix;
  matrix.b = in<float>(p->b);
  matrix.batch = p->b_batch == 0 ? 1 : p->batch, matrix.k = p->k, matrix.n = p->n;
  matrix.batch_stride = p->b_batch, matrix.row_stride = p->b_row, matrix.col_stride = p->b_col;
  matrix.conjugate_b = is_conj(p->b);
  const bool copies = p->a_col != 1;
  matrix.conjugate_a = !copies && is_conj(p->a);  // a copy has resolved it
  if (copies) {
    matrix.copied = p->a.numel();
    p->a_row = p->k, p->a_batch = p->m * p->k, p->a_col = 1;
  }
  p->k *= 2, p->n *= 2;
  p->a_batch *= 2, p->a_row *= 2, p->out_batch *= 2, p->out_row *= 2;
  p->b_batch = p->b_batch == 0 ? 0 : p->k * p->n;
  p->b_row = matrix.matrix_row(), p->b_col = matrix.matrix_col();
  return matrix;
}

}  // namespace my_ops::fast_fp32
