// LLTM on the CPU, forward and backward, in the formulas of lltm_cell.cu: the pointwise part of one
// step, bound by exp and tanh, which the compiler vectorizes once per instruction set, and all
// steps of some rows, which wait for no other row.
#include "lltm.h"

#include <algorithm>
#include <limits>

#include "recurrent/lltm_product_cpu.h"

namespace my_ops::cpu {
namespace {

// c[m, n] = a[m, k] @ packed, in tiles that fill the registers of the instruction set.
#ifdef MY_OPS_LEVELS
#define MY_OPS_MULTIPLY(LEVEL, T, BYTES, ROWS)                                                   \
  __attribute__((target(LEVEL))) void multiply(const T* a, int64_t a_row, const T* packed, T* c, \
                                               int64_t c_row, int64_t m, int64_t n, int64_t k) { \
    product_of<T, BYTES, ROWS>(a, a_row, packed, c, c_row, m, n, k);                             \
  }
MY_OPS_MULTIPLY("arch=x86-64-v4", float, 64, 8)
MY_OPS_MULTIPLY("arch=x86-64-v4", double, 64, 8)
MY_OPS_MULTIPLY("arch=x86-64-v3", float, 32, 4)
MY_OPS_MULTIPLY("arch=x86-64-v3", double, 32, 4)
MY_OPS_MULTIPLY("default", float, 16, 4)
MY_OPS_MULTIPLY("default", double, 16, 4)
#else
template <typename T>
void multiply(const T* a, int64_t a_row, const T* packed, T* c, int64_t c_row, int64_t m, int64_t n,
              int64_t k) {
  product_of<T, 16, 4>(a, a_row, packed, c, c_row, m, n, k);
}
#endif

template <typename T>
MY_OPS_INLINE T elu(T x) {
  const T negative = expm1_negative(x < T(0) || x != x ? x : T(0));
  return x > T(0) ? x : negative;
}

template <typename T>
MY_OPS_INLINE void cell_row(const LltmCell<T, T>& args, int64_t row) {
  const int64_t hidden = args.hidden;
  const T* zx = args.gates_x + row * 3 * hidden;
  const T* zh = args.gates_h + row * 3 * hidden;
  const T* bias = args.bias;
  const T* old_cell = args.old_cell + row * hidden;
  T* new_h = args.new_h + row * hidden;
  T* new_cell = args.new_cell + row * hidden;
  T* gates = args.gates ? args.gates + row * 3 * hidden : nullptr;
#pragma GCC ivdep
  for (int64_t u = 0; u < hidden; ++u) {
    const T i = sigmoid(zx[u] + zh[u] + bias[u]);
    const T o = sigmoid(zx[hidden + u] + zh[hidden + u] + bias[hidden + u]);
    const T g = elu(zx[2 * hidden + u] + zh[2 * hidden + u] + bias[2 * hidden + u]);
    const T cell = old_cell[u] + g * i;
    new_cell[u] = cell;
    new_h[u] = tanh(cell).value * o;
    if (gates) {
      gates[u] = i;
      gates[hidden + u] = o;
      gates[2 * hidden + u] = g;
    }
  }
}

template <typename T>
MY_OPS_INLINE void cell_backward_row(const LltmCellBackward<T, T>& args, int64_t row) {
  const int64_t hidden = args.hidden;
  const T* gh = args.grad_h ? args.grad_h + row * hidden : nullptr;
  const T* gh_next = args.grad_h_next ? args.grad_h_next + row * hidden : nullptr;
  const T* gc = args.grad_cell ? args.grad_cell + row * hidden : nullptr;
  const T* gates = args.gates + row * 3 * hidden;
  const T* old_cell = args.old_cell + row * hidden;
  T* grad_gates = args.grad_gates + row * 3 * hidden;
  T* grad_old_cell = args.grad_old_cell + row * hidden;
#pragma GCC ivdep
  for (int64_t u = 0; u < hidden; ++u) {
    const T i = gates[u];
    const T o = gates[hidden + u];
    const T g = gates[2 * hidden + u];
    const Tanh<T> squashed = tanh(old_cell[u] + g * i);
    const T grad_h = (gh ? gh[u] : T(0)) + (gh_next ? gh_next[u] : T(0));
    const T grad_cell = (gc ? gc[u] : T(0)) + grad_h * o * squashed.slope;
    grad_gates[u] = grad_cell * g * i * (T(1) - i);
    grad_gates[hidden + u] = grad_h * squashed.value * o * (T(1) - o);
    grad_gates[2 * hidden + u] = grad_cell * i * (g > T(0) ? T(1) : g + T(1));
    grad_old_cell[u] = grad_cell;
  }
}

// Panels of b, see lltm_product_cpu.h.
template <typename T>
void pack(const T* b, int64_t row, int64_t col, int64_t k, int64_t n, T* packed) {
  for (int64_t column = 0; column < n; column += kPanel<T>) {
    const int64_t columns = std::min<int64_t>(n - column, kPanel<T>);
    for (int64_t i = 0; i < k; ++i, packed += kPanel<T>) {
      for (int64_t j = 0; j < columns; ++j) packed[j] = b[i * row + (column + j) * col];
      for (int64_t j = columns; j < kPanel<T>; ++j) packed[j] = T(0);
    }
  }
}

// As LltmShut.
template <typename T>
void shut(T* gates_x, int64_t hidden) {
  std::fill_n(gates_x, 2 * hidden, -std::numeric_limits<T>::infinity());
  std::fill_n(gates_x + 2 * hidden, hidden, T(0));
}

constexpr int64_t kRows = 16;  // rows that walk the steps together: what a step needs stays in L1

template <typename T>
void sequence(const LltmSteps<T>& args, int64_t begin, int64_t end) {
  const int64_t inputs = args.inputs, hidden = args.hidden, all = args.batch * hidden;
  T* gates_x = args.workspace + begin * 6 * hidden;
  T* gates_h = gates_x + std::min(end - begin, kRows) * 3 * hidden;
  for (; begin < end; begin += kRows) {
    const int64_t first = begin * hidden, rows = std::min(end - begin, kRows);
    const T* h = args.h0 + first;
    const T* cell = args.c0 + first;
    for (int64_t t = 0; t < args.steps; ++t) {
      multiply(args.input + (t * args.batch + begin) * inputs, inputs, args.weights_x, gates_x,
               3 * hidden, rows, 3 * hidden, inputs);
      for (int64_t row = 0; args.lengths && row < rows; ++row) {
        if (t >= args.lengths[begin + row]) shut(gates_x + row * 3 * hidden, hidden);
      }
      multiply(h, hidden, args.weights_h, gates_h, 3 * hidden, rows, 3 * hidden, hidden);
      T* output = args.output + t * all + first;
      T* new_cell = (args.cells ? args.cells + t * all : args.c_n) + first;
      lltm_cell<T>({.gates_x = gates_x,
                    .gates_h = gates_h,
                    .bias = args.bias,
                    .old_cell = cell,
                    .new_h = output,
                    .new_cell = new_cell,
                    .gates = args.gates ? args.gates + 3 * (t * all + first) : nullptr,
                    .batch = rows,
                    .hidden = hidden},
                   0, rows);
      h = output;
      cell = new_cell;
    }
    if (cell != args.c_n + first) std::copy_n(cell, rows * hidden, args.c_n + first);
  }
}

template <typename T>
void sequence_backward(const LltmStepsBackward<T>& args, int64_t begin, int64_t end) {
  const int64_t hidden = args.hidden, all = args.batch * hidden;
  const auto start = [](const T* grad, int64_t at, int64_t n, T* into) {
    grad ? std::copy_n(grad + at, n, into) : std::fill_n(into, n, T(0));
  };
  for (; begin < end; begin += kRows) {
    const int64_t first = begin * hidden, rows = std::min(end - begin, kRows);
    T* grad_h = args.grad_h0 + first;  // of the step at hand, as is grad_cell
    T* grad_cell = args.grad_c0 + first;
    start(args.grad_h_n, first, rows * hidden, grad_h);
    start(args.grad_c_n, first, rows * hidden, grad_cell);
    for (int64_t t = args.steps - 1; t >= 0; --t) {
      const int64_t at = t * all + first;
      lltm_cell_backward<T>({.grad_h = args.grad_output ? args.grad_output + at : nullptr,
                             .grad_h_next = grad_h,
                             .grad_cell = grad_cell,
                             .gates = args.gates + 3 * at,
                             .old_cell = t > 0 ? args.cells + at - all : args.c0 + first,
                             .grad_gates = args.grad_gates + 3 * at,
                             .grad_old_cell = grad_cell,
                             .batch = rows,
                             .hidden = hidden},
                            0, rows);
      multiply(args.grad_gates + 3 * at, 3 * hidden, args.weights_h, grad_h, hidden, rows, hidden,
               3 * hidden);
    }
  }
}

}  // namespace

#define MY_OPS_LLTM(T)                                                                     \
  template <>                                                                              \
  MY_OPS_CLONES void lltm_cell(const LltmCell<T, T>& args, int64_t begin, int64_t end) {   \
    for (int64_t row = begin; row < end; ++row) cell_row(args, row);                       \
  }                                                                                        \
  template <>                                                                              \
  MY_OPS_CLONES void lltm_cell_backward(const LltmCellBackward<T, T>& args, int64_t begin, \
                                        int64_t end) {                                     \
    for (int64_t row = begin; row < end; ++row) cell_backward_row(args, row);              \
  }                                                                                        \
  template <>                                                                              \
  int64_t lltm_packed_size<T>(int64_t k, int64_t n) {                                      \
    return packed_size<T>(k, n);                                                           \
  }                                                                                        \
  template <>                                                                              \
  void lltm_pack(const T* b, int64_t row, int64_t col, int64_t k, int64_t n, T* packed) {  \
    pack(b, row, col, k, n, packed);                                                       \
  }                                                                                        \
  template <>                                                                              \
  void lltm_steps(const LltmSteps<T>& args, int64_t begin, int64_t end) {                  \
    sequence(args, begin, end);                                                            \
  }                                                                                        \
  template <>                                                                              \
  void lltm_steps_backward(const LltmStepsBackward<T>& args, int64_t begin, int64_t end) { \
    sequence_backward(args, begin, end);                                                   \
  }

MY_OPS_LLTM(float)
MY_OPS_LLTM(double)

}  // namespace my_ops::cpu
