// Products for the steps of LLTM on the CPU: a few rows times weights that stay in the cache,
// packed once for all steps. A library would pack them at every step, and share the step among
// threads.
#pragma once

#include "common/numeric_cpu.h"

namespace my_ops::cpu {

// Columns of one panel: 128 bytes, two of the widest vectors.
template <typename T>
constexpr int kPanel = 128 / sizeof(T);

// Packed weights [k, n]: a panel after the other, each [k, kPanel], the last one filled up with
// zeros.
template <typename T>
constexpr int64_t packed_size(int64_t k, int64_t n) {
  return (n + kPanel<T> - 1) / kPanel<T> * kPanel<T> * k;
}

// c[Rows, 2 vectors] = a[Rows, k] @ panel[k, 2 vectors], of which `columns` are stored.
template <typename T, int Bytes, int Rows>
MY_OPS_INLINE void product_tile(const T* a, int64_t a_row, const T* panel, T* c, int64_t c_row,
                                int64_t k, int64_t columns) {
  typedef T Vector __attribute__((vector_size(Bytes)));
  typedef T Unaligned __attribute__((vector_size(Bytes), aligned(alignof(T)), may_alias));
  constexpr int kLanes = Bytes / sizeof(T);
  Vector left[Rows] = {}, right[Rows] = {};
  for (int64_t i = 0; i < k; ++i, panel += kPanel<T>) {
    const Vector b_left = *reinterpret_cast<const Unaligned*>(panel);
    const Vector b_right = *reinterpret_cast<const Unaligned*>(panel + kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      left[r] += a[r * a_row + i] * b_left;
      right[r] += a[r * a_row + i] * b_right;
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r, c += c_row) {
    T part[2 * kLanes];
    T* row = columns < 2 * kLanes ? part : c;
    *reinterpret_cast<Unaligned*>(row) = left[r];
    *reinterpret_cast<Unaligned*>(row + kLanes) = right[r];
    if (row == part) std::memcpy(c, part, columns * sizeof(T));
  }
}

// The rows of one strip of columns: tiles of Rows, then of half of that, down to one.
template <typename T, int Bytes, int Rows>
MY_OPS_INLINE void product_strip(const T* a, int64_t a_row, const T* panel, T* c, int64_t c_row,
                                 int64_t m, int64_t k, int64_t columns) {
  int64_t row = 0;
  for (; row + Rows <= m; row += Rows) {
    product_tile<T, Bytes, Rows>(a + row * a_row, a_row, panel, c + row * c_row, c_row, k, columns);
  }
  if constexpr (Rows > 1) {
    product_strip<T, Bytes, Rows / 2>(a + row * a_row, a_row, panel, c + row * c_row, c_row,
                                      m - row, k, columns);
  }
}

template <typename T, int Bytes, int Rows>
MY_OPS_INLINE void product_of(const T* a, int64_t a_row, const T* packed, T* c, int64_t c_row,
                              int64_t m, int64_t n, int64_t k) {
  constexpr int kColumns = 2 * Bytes / sizeof(T);
  for (int64_t column = 0; column < n; column += kColumns) {
    const T* panel = packed + column / kPanel<T> * kPanel<T> * k + column % kPanel<T>;
    product_strip<T, Bytes, Rows>(a, a_row, panel, c + column, c_row, m, k, n - column);
  }
}

}  // namespace my_ops::cpu
