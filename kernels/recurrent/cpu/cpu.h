// A cell on the CPU, forward and backward: the pointwise part of one step, and all steps of some
// rows, which are independent of other rows. Bound by exp and tanh, which the compiler vectorizes
// once per instruction set.
#pragma once

#include "recurrent.h"

#include <algorithm>

#include "common/copy_few.h"
#include "common/numeric_cpu.h"
#include "recurrent/cells/cell.h"
#include "recurrent/cpu/product_cpu.h"

namespace my_ops::cpu {

// Functions that cells call.
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

// Units that a loop takes at a time. Values that are absent or reset are read from an array of
// zeros, because loops with a branch would not be vectorized.
constexpr int64_t kUnits = 128;
template <typename T>
constexpr T kZeros[kUnits] = {};

template <typename T>
MY_OPS_INLINE const T* or_zeros(bool given, const T* array, int64_t place) {
  return given ? array + place : kZeros<T>;
}

// A row's units beyond whole vectors would be computed one by one. So those of some rows are
// gathered: row by row in arrays of kUnits, which are padded with zeros to whole vectors.
template <typename T>
constexpr int64_t kVector = 64 / sizeof(T);  // the widest, in units

MY_OPS_INLINE int64_t in_vectors(int64_t units, int64_t vector) {
  return (units + vector - 1) / vector * vector;
}

// Arrays of gathered units.
template <typename T, int Count>
struct Gathered {
  alignas(64) T at[Count > 0 ? Count : 1][kUnits];

  MY_OPS_INLINE void pad(int64_t units) {
    if (units % kVector<T> == 0) return;
    for (int j = 0; j < Count; ++j)
      std::fill_n(at[j] + units / kVector<T> * kVector<T>, kVector<T>, T(0));
  }
};

// What a loop over units reads and writes; the values of one unit are `apart` from each other.
template <typename Cell, typename T>
struct StepUnits {
  const T *zx[Cell::kGates], *zh[Cell::kGates], *bx[Cell::kGates], *bh[Cell::kGates];
  Values<const T*, Cell::kCarried> carried;
  const T *h, *zoneout;
  T *new_h, *new_carried, *saved;
  int64_t apart;
};

template <typename Cell, typename T>
MY_OPS_INLINE void step_units(const StepUnits<Cell, T>& s, int64_t units) {
#pragma GCC ivdep
  for (int64_t u = 0; u < units; ++u) {
    T z[kTerms<Cell>], values[Cell::kSaved];
#pragma GCC unroll 8
    for (int gate = 0; gate < Cell::kGates; ++gate) {
      const T share = s.zx[gate][u] + s.bx[gate][u], product = s.zh[gate][u] + s.bh[gate][u];
      z[gate] = is_sum<Cell>(gate) ? share + product : product;
      if (!is_sum<Cell>(gate)) z[input_term<Cell>(gate)] = share;
    }
    Values<T, Cell::kCarried> state;
#pragma GCC unroll 8
    for (int j = 0; j < Cell::kCarried; ++j) state.at[j] = s.carried.at[j][u];
    const T result = Cell::template forward<CellMath>(z, s.h[u], state.at, values);
#pragma GCC unroll 8
    for (int j = 0; j < Cell::kCarried; ++j) s.new_carried[j * s.apart + u] = state.at[j];
    s.new_h[u] = result;
    if (s.saved) {
#pragma GCC unroll 8
      for (int j = 0; j < Cell::kSaved; ++j) s.saved[j * s.apart + u] = values[j];
    }
  }
  if (s.zoneout) {
#pragma GCC ivdep
    for (int64_t u = 0; u < units; ++u)
      s.new_h[u] = s.zoneout[u] * s.h[u] + (T(1) - s.zoneout[u]) * s.new_h[u];
  }
}

// Units of one row, from `first` on. gates_h begins with the first of the rows and the units.
template <typename Cell, typename T>
MY_OPS_INLINE StepUnits<Cell, T> step_of_row(const RecurrentStep<T, T>& args, int64_t row,
                                             Range rows, Range some, int64_t first) {
  const int64_t hidden = args.hidden, width = some.end - some.begin;
  const int64_t of_h = (row - rows.begin) * Cell::kGates * width + first - some.begin;
  const bool keeps = !(args.reset && args.reset[row]);
  const auto place = [&](int values, int value) { return (row * values + value) * hidden + first; };
  StepUnits<Cell, T> s;
#pragma GCC unroll 8
  for (int gate = 0; gate < Cell::kGates; ++gate) {
    s.zx[gate] = args.gates_x + place(Cell::kGates, gate);
    s.zh[gate] = or_zeros(keeps, args.gates_h, of_h + gate * width);
    s.bx[gate] = or_zeros(args.bias_x, args.bias_x, gate * hidden + first);
    s.bh[gate] = or_zeros(args.bias_h, args.bias_h, gate * hidden + first);
  }
#pragma GCC unroll 8
  for (int j = 0; j < Cell::kCarried; ++j) {
    s.carried.at[j] = or_zeros(keeps, args.carried, place(Cell::kCarried, j));
  }
  s.h = or_zeros((Cell::kReadsH || args.zoneout) && keeps, args.h, place(1, 0));
  s.zoneout = args.zoneout ? args.zoneout + place(1, 0) : nullptr;
  s.new_h = args.new_h + place(1, 0);
  s.new_carried = args.new_carried + place(Cell::kCarried, 0);
  s.saved = args.saved ? args.saved + place(Cell::kSaved, 0) : nullptr;
  s.apart = hidden;
  return s;
}

// The units from `first` on of some rows, fewer than a vector of each.
template <typename Cell, typename T>
MY_OPS_INLINE void step_rest(const RecurrentStep<T, T>& args, Range rows, Range some,
                             int64_t first) {
  constexpr int kGates = Cell::kGates, kCarried = Cell::kCarried, kSaved = Cell::kSaved;
  const int64_t width = some.end - first, most = kUnits / width;
  Gathered<T, kGates> zx, zh, bx, bh;
  Gathered<T, kCarried> carried, new_carried;
  Gathered<T, kSaved> saved;
  Gathered<T, 1> h, zoneout, new_h;
  for (int64_t row = rows.begin; row < rows.end; row += most) {
    const int64_t count = std::min(rows.end - row, most), units = count * width;
    if (row == rows.begin) {
      for (auto* each : {&bx, &bh}) each->pad(units);
    }
    if (row == rows.begin || count < most) {
      for (auto* each : {&zx, &zh}) each->pad(units);
      carried.pad(units);
      for (auto* each : {&h, &zoneout}) each->pad(units);
    }
    for (int64_t i = 0, at = 0; i < count; ++i, at += width) {
      const auto s = step_of_row<Cell, T>(args, row + i, rows, some, first);
#pragma GCC unroll 8
      for (int gate = 0; gate < kGates; ++gate) {
        copy_few(s.zx[gate], width, zx.at[gate] + at);
        copy_few(s.zh[gate], width, zh.at[gate] + at);
        if (row > rows.begin) continue;
        copy_few(s.bx[gate], width, bx.at[gate] + at);
        copy_few(s.bh[gate], width, bh.at[gate] + at);
      }
#pragma GCC unroll 8
      for (int j = 0; j < kCarried; ++j) copy_few(s.carried.at[j], width, carried.at[j] + at);
      copy_few(s.h, width, h.at[0] + at);
      if (s.zoneout) copy_few(s.zoneout, width, zoneout.at[0] + at);
    }
    StepUnits<Cell, T> all;
#pragma GCC unroll 8
    for (int gate = 0; gate < kGates; ++gate) {
      all.zx[gate] = zx.at[gate];
      all.zh[gate] = zh.at[gate];
      all.bx[gate] = bx.at[gate];
      all.bh[gate] = bh.at[gate];
    }
#pragma GCC unroll 8
    for (int j = 0; j < kCarried; ++j) all.carried.at[j] = carried.at[j];
    all.h = h.at[0];
    all.zoneout = args.zoneout ? zoneout.at[0] : nullptr;
    all.new_h = new_h.at[0];
    all.new_carried = new_carried.at[0];
    all.saved = args.saved ? saved.at[0] : nullptr;
    all.apart = kUnits;
    step_units(all, in_vectors(units, kVector<T>));
    for (int64_t i = 0, at = 0; i < count; ++i, at += width) {
      const auto s = step_of_row<Cell, T>(args, row + i, rows, some, first);
      copy_few(new_h.at[0] + at, width, s.new_h);
#pragma GCC unroll 8
      for (int j = 0; j < kCarried; ++j) {
        copy_few(new_carried.at[j] + at, width, s.new_carried + j * s.apart);
      }
      if (!s.saved) continue;
#pragma GCC unroll 8
      for (int j = 0; j < kSaved; ++j) {
        copy_few(saved.at[j] + at, width, s.saved + j * s.apart);
      }
    }
  }
}

template <typename Cell, typename T>
MY_OPS_INLINE void step_rows(const RecurrentStep<T, T>& args, Range rows, Range units) {
  const int64_t width = units.end - units.begin, rest = width % kVector<T>;
  const int64_t whole = units.end - rest;
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    for (int64_t first = units.begin; first < whole; first += kUnits) {
      step_units(step_of_row<Cell, T>(args, row, rows, units, first),
                 std::min(whole - first, kUnits));
    }
  }
  if (rest > 0) step_rest<Cell, T>(args, rows, units, whole);
}

template <typename Cell, typename T>
struct StepBackwardUnits {
  Values<const T*, Cell::kCarried> old_carried, grad_after;
  const T *given, *next, *h, *saved, *zoneout;
  T *grad_terms, *direct, *grad_before;
  int64_t apart;
};

template <typename Cell, typename T>
MY_OPS_INLINE void step_backward_units(const StepBackwardUnits<Cell, T>& s, int64_t units) {
  const T *given = s.given, *next = s.next;
  T* const direct = s.direct;
  T grad_kept[kUnits], grad_cell[kUnits];
  if (s.zoneout) {
#pragma GCC ivdep
    for (int64_t u = 0; u < units; ++u) {
      const T grad = given[u] + next[u] + direct[u];
      grad_kept[u] = s.zoneout[u] * grad;
      grad_cell[u] = grad - grad_kept[u];
      direct[u] = T(0);
    }
    given = grad_cell;
    next = kZeros<T>;
  }
#pragma GCC ivdep
  for (int64_t u = 0; u < units; ++u) {
    T values[Cell::kSaved], grads[kTerms<Cell>];
#pragma GCC unroll 8
    for (int j = 0; j < Cell::kSaved; ++j) values[j] = s.saved[j * s.apart + u];
    Values<T, Cell::kCarried> previous, carried, grad_carried;
#pragma GCC unroll 8
    for (int j = 0; j < Cell::kCarried; ++j) {
      previous.at[j] = carried.at[j] = s.old_carried.at[j][u];
      grad_carried.at[j] = s.grad_after.at[j][u];
    }
    Cell::advance(values, carried.at);
    T grad_h = given[u] + next[u];
    if constexpr (Cell::kReadsH) grad_h += direct[u];
    const T through_h = Cell::template backward<CellMath>(values, previous.at, carried.at, s.h[u],
                                                          grad_h, grad_carried.at, grads);
    if constexpr (Cell::kReadsH) direct[u] = through_h;
#pragma GCC unroll 8
    for (int j = 0; j < kTerms<Cell>; ++j) {
      s.grad_terms[stored_term<Cell>(j) * s.apart + u] = grads[j];
    }
#pragma GCC unroll 8
    for (int j = 0; j < Cell::kCarried; ++j) s.grad_before[j * s.apart + u] = grad_carried.at[j];
  }
  if (s.zoneout) {
    for (int64_t u = 0; u < units; ++u) direct[u] += grad_kept[u];
  }
}

template <typename Cell, typename T>
MY_OPS_INLINE StepBackwardUnits<Cell, T> step_backward_of_row(
    const RecurrentStepBackward<T, T>& args, int64_t row, int64_t first) {
  const bool keeps = !(args.reset && args.reset[row]);
  const bool has_next = args.grad_h_next && !(args.reset_next && args.reset_next[row]);
  const auto place = [&](int values, int value) {
    return (row * values + value) * args.hidden + first;
  };
  StepBackwardUnits<Cell, T> s;
#pragma GCC unroll 8
  for (int j = 0; j < Cell::kCarried; ++j) {
    const int64_t state = place(Cell::kCarried, j);
    s.old_carried.at[j] = or_zeros(keeps, args.carried, state);
    s.grad_after.at[j] = or_zeros(args.grad_carried, args.grad_carried, state);
  }
  s.given = or_zeros(args.grad_h, args.grad_h, place(1, 0));
  s.next = or_zeros(has_next, args.grad_h_next, place(1, 0));
  s.h = or_zeros(Cell::kReadsH && keeps, args.h, place(1, 0));
  s.saved = args.saved + place(Cell::kSaved, 0);
  s.zoneout = args.zoneout ? args.zoneout + place(1, 0) : nullptr;
  s.grad_terms = args.grad_terms + place(kTerms<Cell>, 0);
  s.direct = args.grad_h_direct + (Cell::kReadsH || args.zoneout ? place(1, 0) : 0);
  s.grad_before = args.grad_carried_before + place(Cell::kCarried, 0);
  s.apart = args.hidden;
  return s;
}

// As step_rest.
template <typename Cell, typename T>
MY_OPS_INLINE void step_backward_rest(const RecurrentStepBackward<T, T>& args, Range rows,
                                      int64_t first) {
  constexpr int kCarried = Cell::kCarried, kSaved = Cell::kSaved, kTerms = my_ops::kTerms<Cell>;
  const int64_t width = args.hidden - first, most = kUnits / width;
  const bool has_direct = Cell::kReadsH || args.zoneout;
  Gathered<T, kCarried> old_carried, grad_after, grad_before;
  Gathered<T, kSaved> saved;
  Gathered<T, kTerms> grad_terms;
  Gathered<T, 1> given, next, h, zoneout, direct;
  for (int64_t row = rows.begin; row < rows.end; row += most) {
    const int64_t count = std::min(rows.end - row, most), units = count * width;
    if (row == rows.begin || count < most) {
      for (auto* each : {&old_carried, &grad_after}) each->pad(units);
      saved.pad(units);
      for (auto* each : {&given, &next, &h, &zoneout, &direct}) each->pad(units);
    }
    for (int64_t i = 0, at = 0; i < count; ++i, at += width) {
      const auto s = step_backward_of_row<Cell, T>(args, row + i, first);
#pragma GCC unroll 8
      for (int j = 0; j < kCarried; ++j) {
        copy_few(s.old_carried.at[j], width, old_carried.at[j] + at);
        copy_few(s.grad_after.at[j], width, grad_after.at[j] + at);
      }
#pragma GCC unroll 8
      for (int j = 0; j < kSaved; ++j) copy_few(s.saved + j * s.apart, width, saved.at[j] + at);
      copy_few(s.given, width, given.at[0] + at);
      copy_few(s.next, width, next.at[0] + at);
      copy_few(s.h, width, h.at[0] + at);
      if (s.zoneout) copy_few(s.zoneout, width, zoneout.at[0] + at);
      if (has_direct) copy_few<T>(s.direct, width, direct.at[0] + at);
    }
    StepBackwardUnits<Cell, T> all;
#pragma GCC unroll 8
    for (int j = 0; j < kCarried; ++j) {
      all.old_carried.at[j] = old_carried.at[j];
      all.grad_after.at[j] = grad_after.at[j];
    }
    all.given = given.at[0];
    all.next = next.at[0];
    all.h = h.at[0];
    all.saved = saved.at[0];
    all.zoneout = args.zoneout ? zoneout.at[0] : nullptr;
    all.grad_terms = grad_terms.at[0];
    all.direct = direct.at[0];
    all.grad_before = grad_before.at[0];
    all.apart = kUnits;
    step_backward_units(all, in_vectors(units, kVector<T>));
    for (int64_t i = 0, at = 0; i < count; ++i, at += width) {
      const auto s = step_backward_of_row<Cell, T>(args, row + i, first);
#pragma GCC unroll 8
      for (int j = 0; j < kTerms; ++j) {
        copy_few(grad_terms.at[j] + at, width, s.grad_terms + j * s.apart);
      }
#pragma GCC unroll 8
      for (int j = 0; j < kCarried; ++j) {
        copy_few(grad_before.at[j] + at, width, s.grad_before + j * s.apart);
      }
      if (has_direct) copy_few<T>(direct.at[0] + at, width, s.direct);
    }
  }
}

template <typename Cell, typename T>
MY_OPS_INLINE void step_backward_rows(const RecurrentStepBackward<T, T>& args, Range rows) {
  const int64_t hidden = args.hidden, rest = hidden % kVector<T>;
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    for (int64_t first = 0; first < hidden - rest; first += kUnits) {
      step_backward_units(step_backward_of_row<Cell, T>(args, row, first),
                          std::min(hidden - rest - first, kUnits));
    }
  }
  if (rest > 0) step_backward_rest<Cell, T>(args, rows, hidden - rest);
  for (int64_t row = rows.begin; args.reset && row < rows.end; ++row) {
    if (!args.reset[row]) continue;  // nothing reaches the state before a reset
    if (Cell::kReadsH || args.zoneout) std::fill_n(args.grad_h_direct + row * hidden, hidden, T(0));
    std::fill_n(args.grad_carried_before + row * Cell::kCarried * hidden, Cell::kCarried * hidden,
                T(0));
  }
}

// See RaggedShut. A cell without shut() takes no lengths.
template <typename Cell, typename T>
void shut_row(T* gates_x, int64_t hidden) {
  for (int gate = 0; gate < Cell::kGates; ++gate) {
    std::fill_n(gates_x + gate * hidden, hidden, Cell::template shut<T>(gate));
  }
}

// For the rows from `row` on, at step t.
template <typename Sequence>
const bool* reset_of(const Sequence& args, int64_t t, int64_t row) {
  return args.reset && t < args.steps ? args.reset + t * args.batch + row : nullptr;
}

constexpr int64_t kRows = 16;  // rows that run a step together; a step's data stay in L1

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
                               .zoneout = args.zoneout ? args.zoneout + at : nullptr,
                               .new_h = output,
                               .new_carried = new_carried,
                               .saved = args.saved ? args.saved + Cell::kSaved * at : nullptr,
                               .batch = rows,
                               .hidden = hidden},
                              {0, rows}, {0, hidden});
      h = output;
      carried = new_carried;
    }
    if (carried != carried_n) std::copy_n(carried, kCarried * rows * hidden, carried_n);
  }
}

constexpr int64_t kRowsOfUnits = 32;  // their pre-activations stay in L1 until they are read

template <typename Cell, typename T>
void step_of_units(RecurrentStep<T, T> args, const T* weights_h, Range units) {
  constexpr int64_t kGates = Cell::kGates;
  const int64_t hidden = args.hidden, of_gate = packed_size<T>(hidden, hidden);
  T gates_h[kRowsOfUnits * kGates * kUnitsTogether];
  args.gates_h = gates_h;
  for (int64_t unit = units.begin; unit < units.end; unit += kUnitsTogether) {
    const int64_t width = std::min(kUnitsTogether, units.end - unit);
    for (int64_t row = 0; row < args.batch; row += kRowsOfUnits) {
      const int64_t rows = std::min(args.batch - row, kRowsOfUnits);
      for (int64_t i = 0; i < rows * kGates; ++i) {  // the product hides the latency
        const T* gates_x = args.gates_x + (row * kGates + i) * hidden + unit;
        for (int64_t u = 0; u < width; u += kLine / sizeof(T))
          __builtin_prefetch(gates_x + u, 0, 2);
      }
      for (int gate = 0; gate < kGates; ++gate) {
        product(args.h + row * hidden, hidden, weights_h + gate * of_gate + unit * hidden,
                gates_h + gate * width, kGates * width, rows, width, hidden);
      }
      recurrent_step<Cell, T>(args, {row, row + rows}, {unit, unit + width});
    }
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
    T* grad_h = args.grad_h0 + first;  // of the current step, like the next two
    T* grad_carried = args.grad_carried0 + kCarried * first;
    const bool has_direct = Cell::kReadsH || args.zoneout;
    T* grad_h_direct = has_direct ? args.workspace + first : nullptr;
    start(args.grad_h_n, first, rows * hidden, grad_h);
    start(args.grad_carried_n, kCarried * first, kCarried * rows * hidden, grad_carried);
    if (has_direct) std::fill_n(grad_h_direct, rows * hidden, T(0));
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
           .zoneout = args.zoneout ? args.zoneout + at : nullptr,
           .batch = rows,
           .hidden = hidden},
          0, rows);
      product(args.grad_terms + kTerms * at + Cell::kApart * hidden, kTerms * hidden,
              args.weights_h, grad_h, hidden, rows, hidden, kGates * hidden);
    }
    for (int64_t row = 0; args.reset && row < rows; ++row) {
      if (args.steps > 0 && args.reset[begin + row])
        std::fill_n(grad_h + row * hidden, hidden, T(0));
    }
    if (has_direct) {
      for (int64_t i = 0; i < rows * hidden; ++i) grad_h[i] += grad_h_direct[i];
    }
  }
}

}  // namespace my_ops::cpu

// The instantiations for a cell, for use in namespace my_ops::cpu. They are specializations,
// because only functions, not templates, can have clones per instruction set.
#define MY_OPS_RECURRENT_CPU(Cell, T)                                                             \
  template <>                                                                                     \
  MY_OPS_CLONES void recurrent_step<Cell>(const RecurrentStep<T, T>& args, Range rows,            \
                                          Range units) {                                          \
    step_rows<Cell>(args, rows, units);                                                           \
  }                                                                                               \
  template <>                                                                                     \
  void recurrent_units<Cell>(const RecurrentStep<T, T>& args, const T* weights_h, Range units) {  \
    step_of_units<Cell>(args, weights_h, units);                                                  \
  }                                                                                               \
  template <>                                                                                     \
  MY_OPS_CLONES void recurrent_step_backward<Cell>(const RecurrentStepBackward<T, T>& args,       \
                                                   int64_t begin, int64_t end) {                  \
    const FlushDenormals flush;                                                                   \
    step_backward_rows<Cell, T>(args, {begin, end});                                              \
  }                                                                                               \
  template <>                                                                                     \
  void recurrent_sequence<Cell>(const RecurrentSequence<T>& args, int64_t begin, int64_t end) {   \
    walk<Cell>(args, begin, end);                                                                 \
  }                                                                                               \
  template <>                                                                                     \
  void recurrent_sequence_backward<Cell>(const RecurrentSequenceBackward<T>& args, int64_t begin, \
                                         int64_t end) {                                           \
    const FlushDenormals flush;                                                                   \
    walk_backward<Cell>(args, begin, end);                                                        \
  }
