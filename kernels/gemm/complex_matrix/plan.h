// What a complex product costs besides the real one: pure host code.
#pragma once

#include <cstdint>

#include "complex_matrix.h"
#include "gemm/costs.h"

namespace my_ops::cuda::complex_matrix {

// The matrix, which is written once and of which b is read once, and a copy of a, of so many
// elements, that transposes it; 0: a is read as it is. Elements that are not next to each other are
// sectors of 32 bytes.
inline double preparation(const ComplexMatrixArgs& args, int64_t copied,
                          const ComplexCosts& costs) {
  constexpr double kPair = 8, kSector = 32;
  const bool dense = args.row_stride == 1 || args.col_stride == 1;
  const double elements = static_cast<double>(args.batch) * args.k * args.n;
  const double matrix =
      costs.launch + costs.byte * elements * ((dense ? kPair : kSector) + 2 * kPair);
  if (copied == 0) return matrix;
  return matrix + costs.launch + costs.byte * static_cast<double>(copied) * (kSector + kPair);
}

}  // namespace my_ops::cuda::complex_matrix
