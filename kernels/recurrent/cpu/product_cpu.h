// Products of a recurrent layer on the CPU. For its steps, a few rows times weights that stay in
// the cache: pack() of include/recurrent.h packs these once for all steps. A library would pack
// them at every step, and divide each step among threads. For many rows, product_columns() packs
// weights where they are read.
#pragma once

#include <cstdint>

namespace my_ops::cpu {

constexpr int64_t kLine = 64;  // bytes of a cache line

// c[m, n] = a[m, k] @ packed, for float and double.
template <typename T>
void product(const T* a, int64_t a_row, const T* packed, T* c, int64_t c_row, int64_t m, int64_t n,
             int64_t k);

}  // namespace my_ops::cpu
