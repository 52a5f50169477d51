// What surrounds the steps of a ragged batch, line by line: a line is a row of the batch at one
// step. The formulas of lltm_ragged.cu and lltm_ragged_cpu.cpp; bound by memory.
#pragma once

#include <cmath>

#include "lltm.h"

#ifdef __CUDACC__
#include "common/numeric.cuh"
#define MY_OPS_UNIT __device__
#else
#define MY_OPS_UNIT
#endif

namespace my_ops {

template <typename T>
MY_OPS_UNIT T sum(T a, T b) {
#ifdef __CUDACC__
  return cuda::store<T>(cuda::load(a) + cuda::load(b));
#else
  return a + b;
#endif
}

template <typename T>
int64_t lines_of(const LltmRows<T>& args) {
  return args.batch;
}
template <typename Acc>
int64_t lines_of(const LltmShut<Acc>& args) {
  return args.steps * args.batch;
}
template <typename T>
int64_t lines_of(const LltmEnds<T>& args) {
  return (args.steps + 1) * args.batch;  // the last ones are h_n
}
template <typename T>
int64_t lines_of(const LltmEndsBackward<T>& args) {
  return args.steps * args.batch;
}

template <typename T>
MY_OPS_UNIT void ragged_unit(const LltmRows<T>& args, int64_t, int64_t row, int64_t end,
                             int64_t unit) {
  const int64_t at = row * args.hidden + unit;
  args.out[at] = end > 0 ? args.some[at] : args.none ? args.none[at] : T{};
}

template <typename Acc>
MY_OPS_UNIT void ragged_unit(const LltmShut<Acc>& args, int64_t t, int64_t row, int64_t end,
                             int64_t unit) {
  if (t < end) return;
  Acc* gates = args.gates_x + (t * args.batch + row) * 3 * args.hidden + unit;
  gates[0] = gates[args.hidden] = static_cast<Acc>(-INFINITY);
  gates[2 * args.hidden] = Acc{};
}

template <typename T>
MY_OPS_UNIT void ragged_unit(const LltmEnds<T>& args, int64_t t, int64_t row, int64_t end,
                             int64_t unit) {
  const int64_t at = row * args.hidden + unit, step = args.batch * args.hidden;
  if (t == args.steps) {
    args.h_n[at] = end > 0 ? args.output[(end - 1) * step + at] : args.h0[at];
  } else if (t >= end) {
    args.output[t * step + at] = T{};
  }
}

template <typename T>
MY_OPS_UNIT void ragged_unit(const LltmEndsBackward<T>& args, int64_t t, int64_t row, int64_t end,
                             int64_t unit) {
  const int64_t state = row * args.hidden + unit, at = t * args.batch * args.hidden + state;
  T grad = args.grad_output && t < end ? args.grad_output[at] : T{};
  if (args.grad_h_n && t + 1 == end) grad = sum(grad, args.grad_h_n[state]);
  args.grad[at] = grad;
}

// Units first, first + step, ... of a line.
template <typename Ragged>
MY_OPS_UNIT void ragged_line(const Ragged& args, int64_t line, int64_t first, int64_t step) {
  const int64_t t = line / args.batch, row = line % args.batch, length = args.lengths[row];
  const int64_t end = length < 0 ? 0 : length < args.steps ? length : args.steps;
  for (int64_t unit = first; unit < args.hidden; unit += step) {
    ragged_unit(args, t, row, end, unit);
  }
}

}  // namespace my_ops
