// A copy of a few elements without a call. What is inlined where -march does not matter includes
// this file there.
#pragma once

#include "common/numeric_cpu.h"

namespace my_ops::cpu {

template <int64_t Length, typename T>
MY_OPS_INLINE void copy_ends(const T* from, int64_t n, T* to) {
  T first[Length], last[Length];
  __builtin_memcpy(first, from, sizeof(first));
  __builtin_memcpy(last, from + n - Length, sizeof(last));
  __builtin_memcpy(to, first, sizeof(first));
  __builtin_memcpy(to + n - Length, last, sizeof(last));
}

// Copies n elements, 0 < n < 16, in two moves that may overlap.
template <typename T>
MY_OPS_INLINE void copy_few(const T* from, int64_t n, T* to) {
  if (n >= 8) {
    copy_ends<8>(from, n, to);
  } else if (n >= 4) {
    copy_ends<4>(from, n, to);
  } else if (n >= 2) {
    copy_ends<2>(from, n, to);
  } else {
    *to = *from;
  }
}

}  // namespace my_ops::cpu
