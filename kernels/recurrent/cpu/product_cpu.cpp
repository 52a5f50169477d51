// Products of a recurrent layer: see product_cpu.h. Bound by arithmetic: the tiles fill the
// registers of the instruction set.
#include "recurrent/cpu/product_cpu.h"

#ifdef __SSE__
#include <xmmintrin.h>
#endif

#include <algorithm>
#include <type_traits>

#include "recurrent.h"

#include "common/numeric_cpu.h"

// The levels below are chosen at run time, whatever -march says. GCC inlines nothing into them that
// is compiled for a processor by its name, so what they inline is for any x86-64, and calls nothing
// from headers.
#ifdef MY_OPS_LEVELS
#pragma GCC push_options
#pragma GCC target("arch=x86-64")
#endif

#include "common/copy_few.h"

namespace my_ops::cpu {
namespace {

// Rows of a panel that are fetched before they are read: one of many rows exceeds the first level.
constexpr int64_t kAhead = 16;

constexpr int64_t kBlock = 128;  // of k, summed on its own: a sum's error grows with its length

// The sums of an element, of every kChains-th product each: with few rows, additions would wait for
// each other.
template <int Rows>
constexpr int kChains = Rows == 1 ? 4 : (Rows < 4 ? 2 : 1);

// The first of a vector's elements, as far as there are so many.
template <typename T, typename Vector>
MY_OPS_INLINE void store(const Vector& vector, int64_t count, T* to) {
  constexpr int64_t kLanes = sizeof(Vector) / sizeof(T);
  if (count >= kLanes) {
    __builtin_memcpy(to, &vector, sizeof(vector));
    return;
  }
  T part[kLanes];
  __builtin_memcpy(part, &vector, sizeof(vector));
  if (count > 0) copy_few(part, count, to);
}

// c[Rows, Vectors] = a[Rows, k] @ panel[k, Vectors], of which `columns` are stored. One vector or
// two.
template <typename T, int Bytes, int Rows, int Vectors>
MY_OPS_INLINE void product_tile(const T* a, int64_t a_row, const T* panel, T* c, int64_t c_row,
                                int64_t k, int64_t columns) {
  typedef T Vector __attribute__((vector_size(Bytes)));
  typedef T Unaligned __attribute__((vector_size(Bytes), aligned(alignof(T)), may_alias));
  constexpr int kLanes = Bytes / sizeof(T), kSums = kChains<Rows>;
  Vector total[Rows][Vectors] = {};
  for (int64_t begin = 0; begin < k; begin += kBlock) {
    const int64_t end = k - begin < kBlock ? k : begin + kBlock;
    Vector sums[kSums][Rows][Vectors] = {};
    for (int64_t i = begin; i < end; i += kSums) {
#pragma GCC unroll 4
      for (int chain = 0; chain < kSums; ++chain, panel += kPanel<T>) {
        if (chain > 0 && i + chain >= end) break;
        Vector b[Vectors];
#pragma GCC unroll 2
        for (int v = 0; v < Vectors; ++v) {
          __builtin_prefetch(panel + kAhead * kPanel<T> + v * kLine / sizeof(T));
          b[v] = *reinterpret_cast<const Unaligned*>(panel + v * kLanes);
        }
#pragma GCC unroll 10
        for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 2
          for (int v = 0; v < Vectors; ++v) sums[chain][r][v] += a[r * a_row + i + chain] * b[v];
        }
      }
    }
#pragma GCC unroll 10
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < Vectors; ++v) {
#pragma GCC unroll 4
        for (int chain = 1; chain < kSums; ++chain) sums[0][r][v] += sums[chain][r][v];
        total[r][v] += sums[0][r][v];
      }
    }
  }
#pragma GCC unroll 10
  for (int r = 0; r < Rows; ++r, c += c_row) {
#pragma GCC unroll 2
    for (int v = 0; v < Vectors; ++v) store(total[r][v], columns - v * kLanes, c + v * kLanes);
  }
}

// A tile of up to Rows rows.
template <typename T, int Bytes, int Rows, int Vectors>
MY_OPS_INLINE void product_rows(const T* a, int64_t a_row, const T* panel, T* c, int64_t c_row,
                                int64_t rows, int64_t k, int64_t columns) {
  if constexpr (Rows > 1) {
    if (rows < Rows) {
      return product_rows<T, Bytes, Rows - 1, Vectors>(a, a_row, panel, c, c_row, rows, k, columns);
    }
  }
  product_tile<T, Bytes, Rows, Vectors>(a, a_row, panel, c, c_row, k, columns);
}

// The rows of one strip of columns, in as few tiles as possible, all of about the same size: the
// sums of a tile of few rows would wait for each other.
template <typename T, int Bytes, int Rows, int Vectors>
MY_OPS_INLINE void product_strip(const T* a, int64_t a_row, const T* panel, T* c, int64_t c_row,
                                 int64_t m, int64_t k, int64_t columns) {
  for (int64_t tiles = (m + Rows - 1) / Rows; tiles > 0; --tiles) {
    const int64_t rows = (m + tiles - 1) / tiles;
    product_rows<T, Bytes, Rows, Vectors>(a, a_row, panel, c, c_row, rows, k, columns);
    a += rows * a_row;
    c += rows * c_row;
    m -= rows;
  }
}

template <typename T, int Bytes, int Rows>
MY_OPS_INLINE void product_of(const T* a, int64_t a_row, const T* packed, T* c, int64_t c_row,
                              int64_t m, int64_t n, int64_t k) {
  constexpr int kColumns = 2 * Bytes / sizeof(T);
  for (int64_t column = 0; column < n; column += kColumns) {
    const T* panel = packed + column / kPanel<T> * kPanel<T> * k + column % kPanel<T>;
    if (2 * (n - column) <= kColumns) {
      product_strip<T, Bytes, Rows, 1>(a, a_row, panel, c + column, c_row, m, k, n - column);
    } else {
      product_strip<T, Bytes, Rows, 2>(a, a_row, panel, c + column, c_row, m, k, n - column);
    }
  }
}

template <typename T>
void multiply_anywhere(const T* a, int64_t a_row, const T* packed, T* c, int64_t c_row, int64_t m,
                       int64_t n, int64_t k) {
  product_of<T, 16, 4>(a, a_row, packed, c, c_row, m, n, k);
}

// c[m, n] = a[m, k] @ packed, in tiles that fill the registers of the instruction set.
#ifdef MY_OPS_LEVELS
#pragma GCC pop_options
#define MY_OPS_MULTIPLY(LEVEL, T, ...)                                                           \
  __attribute__((target(LEVEL))) void multiply(const T* a, int64_t a_row, const T* packed, T* c, \
                                               int64_t c_row, int64_t m, int64_t n, int64_t k) { \
    __VA_ARGS__(a, a_row, packed, c, c_row, m, n, k);                                            \
  }
#define MY_OPS_MULTIPLY_LEVELS(T)                             \
  MY_OPS_MULTIPLY("arch=x86-64-v4", T, product_of<T, 64, 10>) \
  MY_OPS_MULTIPLY("arch=x86-64-v3", T, product_of<T, 32, 6>)  \
  MY_OPS_MULTIPLY("default", T, multiply_anywhere)
MY_OPS_MULTIPLY_LEVELS(float)
MY_OPS_MULTIPLY_LEVELS(double)
#endif

#ifdef __SSE__
// A cache line of each of the panel's columns, which are rows of transposed weights.
void pack_lines(const float* from, int64_t row, float* to) {
  for (int j = 0; j < kPanel<float>; j += 4, from += 4 * row) {
    for (int i = 0; i < kLine / int64_t{sizeof(float)}; i += 4) {
      __m128 a = _mm_loadu_ps(from + i), b = _mm_loadu_ps(from + row + i);
      __m128 c = _mm_loadu_ps(from + 2 * row + i), d = _mm_loadu_ps(from + 3 * row + i);
      _MM_TRANSPOSE4_PS(a, b, c, d);
      float* const at = to + i * kPanel<float> + j;
      _mm_storeu_ps(at, a);
      _mm_storeu_ps(at + kPanel<float>, b);
      _mm_storeu_ps(at + 2 * kPanel<float>, c);
      _mm_storeu_ps(at + 3 * kPanel<float>, d);
    }
  }
}
#endif

}  // namespace

// Panel by panel, each [k, kPanel], the last one padded with zeros. As many rows at a time as fill
// a cache line of transposed weights.
template <typename T>
void pack(const T* b, int64_t row, int64_t col, int64_t k, int64_t n, T* packed) {
  constexpr int64_t kTogether = kLine / sizeof(T);
  for (int64_t column = 0; column < n; column += kPanel<T>, packed += k * kPanel<T>) {
    const int64_t columns = std::min<int64_t>(n - column, kPanel<T>);
    if (columns < kPanel<T>) std::fill_n(packed, k * kPanel<T>, T(0));
    for (int64_t i = 0; i < k; i += kTogether) {
      const int64_t rows = std::min(kTogether, k - i);
      const T* from = b + i * row + column * col;
      T* to = packed + i * kPanel<T>;
#ifdef __SSE__
      if constexpr (std::is_same_v<T, float>) {
        if (row == 1 && rows == kTogether && columns == kPanel<T>) {
          pack_lines(from, col, to);
          continue;
        }
      }
#endif
      for (int64_t j = 0; j < columns; ++j) {
        for (int64_t r = 0; r < rows; ++r) to[r * kPanel<T> + j] = from[r * row + j * col];
      }
    }
  }
}

template <typename T>
void product(const T* a, int64_t a_row, const T* packed, T* c, int64_t c_row, int64_t m, int64_t n,
             int64_t k) {
#ifdef MY_OPS_LEVELS
  multiply(a, a_row, packed, c, c_row, m, n, k);
#else
  multiply_anywhere(a, a_row, packed, c, c_row, m, n, k);
#endif
}

template <typename T>
void product_columns(const Product<T>& args, int64_t begin, int64_t end, T* packed) {
  static_assert(kColumnsTogether % kPanel<T> == 0);
  for (; begin < end; begin += kColumnsTogether) {
    const int64_t columns = std::min(end - begin, kColumnsTogether);
    pack(args.b + begin * args.b_col, args.b_row, args.b_col, args.k, columns, packed);
    product(args.a, args.a_row, packed, args.c + begin, args.c_row, args.m, columns, args.k);
  }
}

template <typename T>
void few_products(const Product<T>& args, int64_t a_col, int64_t n) {
  for (int64_t i = 0; i < args.m; ++i) {
    T* const c = args.c + i * args.c_row;
    std::fill_n(c, n, T(0));
    for (int64_t j = 0; j < args.k; ++j) {
      const T a = args.a[i * args.a_row + j * a_col];
      const T* const b = args.b + j * args.b_row;
#pragma GCC ivdep
      for (int64_t column = 0; column < n; ++column) c[column] += a * b[column];
    }
  }
}

#define MY_OPS_PRODUCT(T)                                                 \
  template void pack(const T*, int64_t, int64_t, int64_t, int64_t, T*);   \
  template void product_columns(const Product<T>&, int64_t, int64_t, T*); \
  template void few_products(const Product<T>&, int64_t, int64_t);        \
  template void product(const T*, int64_t, const T*, T*, int64_t, int64_t, int64_t, int64_t);
MY_OPS_PRODUCT(float)
MY_OPS_PRODUCT(double)

}  // namespace my_ops::cpu
