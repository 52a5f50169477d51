// A cell on the CPU, forward and backward: the pointwise part of one step, bound by exp and tanh,
// which the compiler vectorizes once per instruction set, and all steps of some rows, which wait
// for no other row.
#pragma once

#include "recurrent.h"

#include <algorithm>

#include "common/numeric_cpu.h"
#include "recurrent/cells/cell.h"
#include "recurrent/product_cpu.h"

namespace my_ops::cpu {

// The functions of cells.
struct CellMath {
  template <typename T>
  MY_OPS_INLINE static T sigmoid(T x) {
    return cpu::sigmoid(x);
  }
  template <typename T>
  MY_OPS_INLINE static T tanh(T x) {
    return cpu::tanh(x).value;
  }
  template <typename T>
  MY_OPS_INLINE static Tanh<T> tanh_with_slope(T x) {
    return cpu::tanh(x);
  }
  template <typename T>
  MY_OPS_INLINE static T elu(T x) {
    const T negative = expm1_negative(x < T(0) || x != x ? x : T(0));
    return x > T(0) ? x : negative;
  }
  template <typename T>
  MY_OPS_INLINE static T elu_slope(T y) {
    return y > T(0) ? T(1) : y + T(1);
  }
};

template <typename Cell, typename T>
MY_OPS_INLINE void step_row(const RecurrentStep<T, T>& args, int64_t row) {
  const int64_t hidden = args.hidden;
  const T* zx = args.gates_x + row * Cell::kGates * hidden;
  const T* zh = args.gates_h + row * Cell::kGates * hidden;
  // Where a bias is not given, something else is read and not used: with conditional loads the loop
  // would not be vectorized.
  const bool has_bx = args.bias_x, has_bh = args.bias_h, keeps = !(args.reset && args.reset[row]);
  const T* bx = has_bx ? args.bias_x : zx;
  const T* bh = has_bh ? args.bias_h : zx;
  const T* h = Cell::kReadsH ? args.h + row * hidden : nullptr;
  const T* carried = args.carried + row * Cell::kCarried * hidden;
  T* new_h = args.new_h + row * hidden;
  T* new_carried = args.new_carried + row * Cell::kCarried * hidden;
  T* saved = args.saved ? args.saved + row * Cell::kSaved * hidden : nullptr;
#pragma GCC ivdep
  for (int64_t u = 0; u < hidden; ++u) {
    T z[kTerms<Cell>], values[Cell::kSaved];
#pragma GCC unroll 8
    for (int gate = 0; gate < Cell::kGates; ++gate) {
      const int64_t at = gate * hidden + u;
      const T product = zh[at], given_x = bx[at], given_h = bh[at];
      const T share = zx[at] + (has_bx ? given_x : T(0));
      const T of_h = (keeps ? product : T(0)) + (has_bh ? given_h : T(0));
      if (is_sum<Cell>(gate)) {
        z[gate] = share + of_h;
      } else {
        z[gate] = of_h;
        z[input_term<Cell>(gate)] = share;
      }
    }
    Values<T, Cell::kCarried> state;
#pragma GCC unroll 8
    for (int j = 0; j < Cell::kCarried; ++j) {
      const T before = carried[j * hidden + u];
      state.at[j] = keeps ? before : T(0);
    }
    T h_prev = 0;
    if constexpr (Cell::kReadsH) {
      const T before = h[u];
      h_prev = keeps ? before : T(0);
    }
    const T result = Cell::template forward<CellMath>(z, h_prev, state.at, values);
#pragma GCC unroll 8
    for (int j = 0; j < Cell::kCarried; ++j) new_carried[j * hidden + u] = state.at[j];
    new_h[u] = result;
    if (saved) {
#pragma GCC unroll 8
      for (int j = 0; j < Cell::kSaved; ++j) saved[j * hidden + u] = values[j];
    }
  }
}

template <typename Cell, typename T>
MY_OPS_INLINE void step_backward_row(const RecurrentStepBackward<T, T>& args, int64_t row) {
  const int64_t hidden = args.hidden, state = row * Cell::kCarried * hidden;
  const T* saved = args.saved + row * Cell::kSaved * hidden;
  // Where a gradient is not given, something else is read and not used: with conditional loads the
  // loop would not be vectorized.
  const bool has_gh = args.grad_h, has_gc = args.grad_carried;
  const bool has_next = args.grad_h_next && !(args.reset_next && args.reset_next[row]);
  const bool keeps = !(args.reset && args.reset[row]);
  const T* gh = has_gh ? args.grad_h + row * hidden : saved;
  const T* gh_next = has_next ? args.grad_h_next + row * hidden : saved;
  const T* gc = has_gc ? args.grad_carried + state : args.carried + state;
  const T* h = Cell::kReadsH ? args.h + row * hidden : nullptr;
  const T* old_carried = args.carried + state;
  T* grad_terms = args.grad_terms + row * kTerms<Cell> * hidden;
  T* direct = Cell::kReadsH ? args.grad_h_direct + row * hidden : nullptr;
  T* grad_carried_before = args.grad_carried_before + state;
#pragma GCC ivdep
  for (int64_t u = 0; u < hidden; ++u) {
    T values[Cell::kSaved], grads[kTerms<Cell>];
#pragma GCC unroll 8
    for (int j = 0; j < Cell::kSaved; ++j) values[j] = saved[j * hidden + u];
    Values<T, Cell::kCarried> previous, carried, grad_carried;
#pragma GCC unroll 8
    for (int j = 0; j < Cell::kCarried; ++j) {
      const T before = old_carried[j * hidden + u];
      previous.at[j] = carried.at[j] = keeps ? before : T(0);
      const T given = gc[j * hidden + u];
      grad_carried.at[j] = has_gc ? given : T(0);
    }
    Cell::advance(values, carried.at);
    const T given = gh[u], given_next = gh_next[u];
    T grad_h = (has_gh ? given : T(0)) + (has_next ? given_next : T(0));
    T h_prev = 0;
    if constexpr (Cell::kReadsH) {
      const T before = h[u];
      h_prev = keeps ? before : T(0);
      grad_h += direct[u];
    }
    const T through_h = Cell::template backward<CellMath>(values, previous.at, carried.at, h_prev,
                                                          grad_h, grad_carried.at, grads);
    if constexpr (Cell::kReadsH) direct[u] = keeps ? through_h : T(0);
#pragma GCC unroll 8
    for (int j = 0; j < kTerms<Cell>; ++j) grad_terms[j * hidden + u] = grads[j];
#pragma GCC unroll 8
    for (int j = 0; j < Cell::kCarried; ++j) {
      grad_carried_before[j * hidden + u] = keeps ? grad_carried.at[j] : T(0);
    }
  }
}

// As RaggedShut; a cell without shut() takes no lengths.
template <typename Cell, typename T>
void shut_row(T* gates_x, int64_t hidden) {
  for (int gate = 0; gate < Cell::kGates; ++gate) {
    std::fill_n(gates_x + gate * hidden, hidden, Cell::template shut<T>(gate));
  }
}

// Of the rows from `row` on at step t.
template <typename Sequence>
const bool* reset_of(const Sequence& args, int64_t t, int64_t row) {
  return args.reset && t < args.steps ? args.reset + t * args.batch + row : nullptr;
}

constexpr int64_t kRows = 16;  // rows that walk the steps together: what a step needs stays in L1

template <typename Cell, typename T>
void walk(const RecurrentSequence<T>& args, int64_t begin, int64_t end) {
  constexpr int64_t kGates = Cell::kGates, kCarried = Cell::kCarried;
  const int64_t inputs = args.inputs, hidden = args.hidden, all = args.batch * hidden;
  T* gates_x = args.workspace + begin * 2 * kGates * hidden;
  T* gates_h = gates_x + std::min(end - begin, kRows) * kGates * hidden;
  for (; begin < end; begin += kRows) {
    const int64_t first = begin * hidden, rows = std::min(end - begin, kRows);
    const T* h = args.h0 + first;
    const T* carried = args.carried0 + kCarried * first;
    T* const carried_n = args.carried_n + kCarried * first;
    for (int64_t t = 0; t < args.steps; ++t) {
      product(args.input + (t * args.batch + begin) * inputs, inputs, args.weights_x, gates_x,
              kGates * hidden, rows, kGates * hidden, inputs);
      if constexpr (requires { Cell::template shut<T>(0); }) {
        for (int64_t row = 0; args.lengths && row < rows; ++row) {
          if (t >= args.lengths[begin + row]) {
            shut_row<Cell>(gates_x + row * kGates * hidden, hidden);
          }
        }
      }
      product(h, hidden, args.weights_h, gates_h, kGates * hidden, rows, kGates * hidden, hidden);
      const int64_t at = t * all + first;
      T* output = args.output + at;
      T* new_carried = args.carried ? args.carried + kCarried * at : carried_n;
      recurrent_step<Cell, T>({.gates_x = gates_x,
                               .gates_h = gates_h,
                               .bias_x = args.bias_x,
                               .bias_h = args.bias_h,
                               .h = h,
                               .carried = carried,
                               .reset = reset_of(args, t, begin),
                               .new_h = output,
                               .new_carried = new_carried,
                               .saved = args.saved ? args.saved + Cell::kSaved * at : nullptr,
                               .batch = rows,
                               .hidden = hidden},
                              0, rows);
      h = output;
      carried = new_carried;
    }
    if (carried != carried_n) std::copy_n(carried, kCarried * rows * hidden, carried_n);
  }
}

template <typename Cell, typename T>
void walk_backward(const RecurrentSequenceBackward<T>& args, int64_t begin, int64_t end) {
  constexpr int64_t kGates = Cell::kGates, kTerms = my_ops::kTerms<Cell>;
  constexpr int64_t kCarried = Cell::kCarried;
  const int64_t hidden = args.hidden, all = args.batch * hidden;
  const auto start = [](const T* grad, int64_t at, int64_t n, T* into) {
    grad ? std::copy_n(grad + at, n, into) : std::fill_n(into, n, T(0));
  };
  for (; begin < end; begin += kRows) {
    const int64_t first = begin * hidden, rows = std::min(end - begin, kRows);
    T* grad_h = args.grad_h0 + first;  // of the step at hand, as are the next two
    T* grad_carried = args.grad_carried0 + kCarried * first;
    T* grad_h_direct = Cell::kReadsH ? args.workspace + first : nullptr;
    start(args.grad_h_n, first, rows * hidden, grad_h);
    start(args.grad_carried_n, kCarried * first, kCarried * rows * hidden, grad_carried);
    if constexpr (Cell::kReadsH) std::fill_n(grad_h_direct, rows * hidden, T(0));
    for (int64_t t = args.steps - 1; t >= 0; --t) {
      const int64_t at = t * all + first;
      const T* h = nullptr;
      if constexpr (Cell::kReadsH) h = t > 0 ? args.output + at - all : args.h0 + first;
      recurrent_step_backward<Cell, T>(
          {.grad_h = args.grad_output ? args.grad_output + at : nullptr,
           .grad_h_next = grad_h,
           .grad_carried = grad_carried,
           .saved = args.saved + Cell::kSaved * at,
           .h = h,
           .carried =
               t > 0 ? args.carried + kCarried * (at - all) : args.carried0 + kCarried * first,
           .grad_terms = args.grad_terms + kTerms * at,
           .grad_h_direct = grad_h_direct,
           .grad_carried_before = grad_carried,
           .reset = reset_of(args, t, begin),
           .reset_next = reset_of(args, t + 1, begin),
           .batch = rows,
           .hidden = hidden},
          0, rows);
      product(args.grad_terms + kTerms * at, kTerms * hidden, args.weights_h, grad_h, hidden, rows,
              hidden, kGates * hidden);
    }
    for (int64_t row = 0; args.reset && row < rows; ++row) {
      if (args.steps > 0 && args.reset[begin + row])
        std::fill_n(grad_h + row * hidden, hidden, T(0));
    }
    if constexpr (Cell::kReadsH) {
      for (int64_t i = 0; i < rows * hidden; ++i) grad_h[i] += grad_h_direct[i];
    }
  }
}

}  // namespace my_ops::cpu

// The instantiations for a cell; to stand in namespace my_ops::cpu. Specializations, since clones
// per instruction set are made of functions, not of templates.
#define MY_OPS_RECURRENT_CPU(Cell, T)                                                             \
  template <>                                                                                     \
  MY_OPS_CLONES void recurrent_step<Cell>(const RecurrentStep<T, T>& args, int64_t begin,         \
                                          int64_t end) {                                          \
    for (int64_t row = begin; row < end; ++row) step_row<Cell>(args, row);                        \
  }                                                                                               \
  template <>                                                                                     \
  MY_OPS_CLONES void recurrent_step_backward<Cell>(const RecurrentStepBackward<T, T>& args,       \
                                                   int64_t begin, int64_t end) {                  \
    for (int64_t row = begin; row < end; ++row) step_backward_row<Cell>(args, row);               \
  }                                                                                               \
  template <>                                                                                     \
  void recurrent_sequence<Cell>(const RecurrentSequence<T>& args, int64_t begin, int64_t end) {   \
    walk<Cell>(args, begin, end);                                                                 \
  }                                                                                               \
  template <>                                                                                     \
  void recurrent_sequence_backward<Cell>(const RecurrentSequenceBackward<T>& args, int64_t begin, \
                                         int64_t end) {                                           \
    walk_backward<Cell>(args, begin, end);                                                        \
  }
