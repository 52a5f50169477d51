// The pointwise part of one LLTM step on the CPU, forward and backward, in the formulas of
// lltm_cell.cu. Bound by exp and tanh, which the compiler vectorizes once per instruction set.
#include "lltm.h"

#include "common_cpu.h"

namespace my_ops::cpu {
namespace {

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
  }

MY_OPS_LLTM(float)
MY_OPS_LLTM(double)

}  // namespace my_ops::cpu
