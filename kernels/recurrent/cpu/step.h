// The pointwise part of a step on the CPU, forward and backward. Bound by exp and tanh, which the
// compiler vectorizes once per instruction set.
#pragma once

#include "recurrent.h"

#include <algorithm>

#include "common/copy_few.h"
#include "common/numeric_cpu.h"
#include "recurrent/cells/cell.h"

namespace my_ops::cpu {

// Whether a row of a ragged batch has ended before the step, forward or backward.
template <typename Step>
MY_OPS_INLINE bool has_ended(const Step& step, int64_t row) {
  return step.lengths && step.t >= step.lengths[row];
}

// Copies, or fills with zeros for null. They may be the same array.
template <typename T>
MY_OPS_INLINE void keep(const T* from, int64_t count, T* to) {
  if (!from) {
    std::fill_n(to, count, T(0));
  } else if (from != to) {
    std::copy_n(from, count, to);
  }
}

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
  template <typename T>
  MY_OPS_INLINE static T exp(T x) {
    return cpu::exp(x);
  }
  template <typename T>
  MY_OPS_INLINE static T expm1(T x) {
    return cpu::expm1(x);
  }
  template <typename T>
  MY_OPS_INLINE static T log(T x) {
    return cpu::log(x);
  }
  template <typename T>
  MY_OPS_INLINE static T log1p(T x) {
    return cpu::log1p(x);
  }
  template <typename T>
  MY_OPS_INLINE static T softplus(T x) {
    return cpu::softplus(x);
  }
  template <typename T>
  MY_OPS_INLINE static T sqrt(T x) {
    return cpu::sqrt(x);
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
  Values<const T*, Cell::kVectors> vectors;
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
#pragma GCC unroll 8
    for (int j = 0; j < Cell::kVectors; ++j) {
      z[Cell::kGates + Cell::kApart + j] = s.vectors.at[j][u];
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
  for (int j = 0; j < Cell::kVectors; ++j) s.vectors.at[j] = args.vectors + j * hidden + first;
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

// The next rows that run, at most so many. Moves `row` past them.
struct Running {
  int64_t at[kUnits], count = 0;
};
template <typename Step>
MY_OPS_INLINE Running next_running(const Step& args, int64_t& row, int64_t end, int64_t most) {
  Running rows;
  for (; row < end && rows.count < most; ++row) {
    if (!has_ended(args, row)) rows.at[rows.count++] = row;
  }
  return rows;
}

// The units from `first` on of some rows, fewer than a vector of each.
template <typename Cell, typename T>
MY_OPS_INLINE void step_rest(const RecurrentStep<T, T>& args, Range rows, Range some,
                             int64_t first) {
  constexpr int kGates = Cell::kGates, kVectors = Cell::kVectors, kCarried = Cell::kCarried,
                kSaved = Cell::kSaved;
  const int64_t width = some.end - first, most = kUnits / width;
  Gathered<T, kGates> zx, zh, bx, bh;
  Gathered<T, kVectors> vectors;
  Gathered<T, kCarried> carried, new_carried;
  Gathered<T, kSaved> saved;
  Gathered<T, 1> h, zoneout, new_h;
  bool begins = true;
  for (int64_t row = rows.begin; row < rows.end; begins = false) {
    const Running running = next_running(args, row, rows.end, most);
    const int64_t count = running.count, units = count * width;
    if (begins) {
      for (auto* each : {&bx, &bh}) each->pad(units);
      vectors.pad(units);
    }
    if (begins || count < most) {
      for (auto* each : {&zx, &zh}) each->pad(units);
      carried.pad(units);
      for (auto* each : {&h, &zoneout}) each->pad(units);
    }
    for (int64_t i = 0, at = 0; i < count; ++i, at += width) {
      const auto s = step_of_row<Cell, T>(args, running.at[i], rows, some, first);
#pragma GCC unroll 8
      for (int gate = 0; gate < kGates; ++gate) {
        copy_few(s.zx[gate], width, zx.at[gate] + at);
        copy_few(s.zh[gate], width, zh.at[gate] + at);
        if (!begins) continue;
        copy_few(s.bx[gate], width, bx.at[gate] + at);
        copy_few(s.bh[gate], width, bh.at[gate] + at);
      }
#pragma GCC unroll 8
      for (int j = 0; j < (begins ? kVectors : 0); ++j) {
        copy_few(s.vectors.at[j], width, vectors.at[j] + at);
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
    for (int j = 0; j < kVectors; ++j) all.vectors.at[j] = vectors.at[j];
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
      const auto s = step_of_row<Cell, T>(args, running.at[i], rows, some, first);
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

// A step of a row that has ended.
template <typename Cell, typename T>
MY_OPS_INLINE void keep_row(const RecurrentStep<T, T>& args, int64_t row, Range units) {
  const int64_t width = units.end - units.begin;
  const auto place = [&](int values, int value) {
    return (row * values + value) * args.hidden + units.begin;
  };
  std::fill_n(args.new_h + place(1, 0), width, T(0));
  for (int j = 0; j < Cell::kCarried; ++j) {
    keep(args.carried + place(Cell::kCarried, j), width,
         args.new_carried + place(Cell::kCarried, j));
  }
  for (int j = 0; args.saved && j < Cell::kSaved; ++j) {
    std::fill_n(args.saved + place(Cell::kSaved, j), width, T(0));
  }
}

template <typename Cell, typename T>
MY_OPS_INLINE void step_rows(const RecurrentStep<T, T>& args, Range rows, Range units) {
  const int64_t width = units.end - units.begin, rest = width % kVector<T>;
  const int64_t whole = units.end - rest;
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    if (has_ended(args, row)) {
      keep_row<Cell, T>(args, row, units);
      continue;
    }
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
  bool begins = true;
  for (int64_t row = rows.begin; row < rows.end; begins = false) {
    const Running running = next_running(args, row, rows.end, most);
    const int64_t count = running.count, units = count * width;
    if (begins || count < most) {
      for (auto* each : {&old_carried, &grad_after}) each->pad(units);
      saved.pad(units);
      for (auto* each : {&given, &next, &h, &zoneout, &direct}) each->pad(units);
    }
    for (int64_t i = 0, at = 0; i < count; ++i, at += width) {
      const auto s = step_backward_of_row<Cell, T>(args, running.at[i], first);
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
      const auto s = step_backward_of_row<Cell, T>(args, running.at[i], first);
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

// As keep_row. The gradient of h is 0 there.
template <typename Cell, typename T>
MY_OPS_INLINE void keep_row_backward(const RecurrentStepBackward<T, T>& args, int64_t row) {
  const int64_t terms = kTerms<Cell> * args.hidden, carried = Cell::kCarried * args.hidden;
  std::fill_n(args.grad_terms + row * terms, terms, T(0));
  if constexpr (Cell::kCarried > 0) {
    keep(args.grad_carried ? args.grad_carried + row * carried : nullptr, carried,
         args.grad_carried_before + row * carried);
  }
}

template <typename Cell, typename T>
MY_OPS_INLINE void step_backward_rows(const RecurrentStepBackward<T, T>& args, Range rows) {
  const int64_t hidden = args.hidden, rest = hidden % kVector<T>;
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    if (has_ended(args, row)) {
      keep_row_backward<Cell, T>(args, row);
      continue;
    }
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

}  // namespace my_ops::cpu
