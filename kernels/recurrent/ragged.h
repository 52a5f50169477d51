// The work around the steps of a ragged batch, line by line. A line is a row of the batch at one
// step. These are the formulas of ragged.cu and ragged_cpu.cpp. Bound by memory.
#pragma once

#include "recurrent.h"

#include "recurrent/cells/cell.h"

#ifdef __CUDACC__
#include "common/numeric.cuh"
#endif

namespace my_ops {

template <typename T>
MY_OPS_CELL T sum(T a, T b) {
#ifdef __CUDACC__
  return cuda::store<T>(cuda::load(a) + cuda::load(b));
#else
  return a + b;
#endif
}

template <typename T>
int64_t lines_of(const RaggedRows<T>& args) {
  return args.batch;
}
template <typename Acc>
int64_t lines_of(const RaggedShut<Acc>& args) {
  return args.steps * args.batch;
}
template <typename T>
int64_t lines_of(const RaggedEnds<T>& args) {
  return (args.steps + 1) * args.batch;  // the last ones are h_n
}
template <typename T>
int64_t lines_of(const RaggedEndsBackward<T>& args) {
  return args.steps * args.batch;
}

inline int64_t lines_of(const RaggedReset& args) { return args.steps * args.batch; }
template <typename T, typename Acc>
int64_t lines_of(const RaggedStartBackward<T, Acc>& args) {
  return args.batch;
}

template <typename T>
MY_OPS_CELL void ragged_unit(const RaggedRows<T>& args, int64_t, int64_t row, int64_t end,
                             int64_t unit) {
  const int64_t at = row * args.hidden + unit;
  args.out[at] = end > 0 ? args.some[at] : args.none ? args.none[at] : T{};
}

template <typename Acc>
MY_OPS_CELL void ragged_unit(const RaggedShut<Acc>& args, int64_t t, int64_t row, int64_t end,
                             int64_t unit) {
  if (t < end) return;
  Acc* gates = args.gates_x + (t * args.batch + row) * args.gates * args.hidden + unit;
  for (int gate = 0; gate < args.gates; ++gate) gates[gate * args.hidden] = args.shut[gate];
}

template <typename T>
MY_OPS_CELL void ragged_unit(const RaggedEnds<T>& args, int64_t t, int64_t row, int64_t end,
                             int64_t unit) {
  const int64_t at = row * args.hidden + unit, step = args.batch * args.hidden;
  if (t == args.steps) {
    args.h_n[at] = end > 0 ? args.output[(end - 1) * step + at] : args.h0[at];
  } else if (t >= end) {
    args.output[t * step + at] = T{};
  }
}

template <typename T>
MY_OPS_CELL void ragged_unit(const RaggedEndsBackward<T>& args, int64_t t, int64_t row, int64_t end,
                             int64_t unit) {
  const int64_t state = row * args.hidden + unit, at = t * args.batch * args.hidden + state;
  T grad = args.grad_output && t < end ? args.grad_output[at] : T{};
  if (args.grad_h_n && t + 1 == end) grad = sum(grad, args.grad_h_n[state]);
  args.grad[at] = grad;
}

MY_OPS_CELL void ragged_unit(const RaggedReset& args, int64_t t, int64_t row, int64_t end,
                             int64_t) {
  const int64_t at = t * args.batch + row;
  args.out[at] = args.reset[at] && t < end;
}

template <typename T, typename Acc>
MY_OPS_CELL void ragged_unit(const RaggedStartBackward<T, Acc>& args, int64_t, int64_t row, int64_t,
                             int64_t unit) {
  const int64_t at = row * args.hidden + unit;
  const Acc through = args.reset && args.reset[row] ? Acc(0) : args.through[at];
  const Acc grad = args.direct ? through + args.direct[at] : through;
#ifdef __CUDACC__
  args.grad_h0[at] = cuda::store<T>(grad);
#else
  args.grad_h0[at] = grad;
#endif
}

// Units first, first + step, ... of a line.
template <typename Ragged>
MY_OPS_CELL void ragged_line(const Ragged& args, int64_t line, int64_t first, int64_t step) {
  const int64_t t = line / args.batch, row = line % args.batch;
  const int64_t length = args.lengths ? args.lengths[row] : args.steps;
  const int64_t end = length < 0 ? 0 : length < args.steps ? length : args.steps;
  for (int64_t unit = first; unit < args.hidden; unit += step) {
    ragged_unit(args, t, row, end, unit);
  }
}

}  // namespace my_ops
