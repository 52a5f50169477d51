// The pointwise work of one step, forward and backward: one thread per unit of a row.
// Bound by memory: 6 to 9 values of [batch, hidden] are moved once in LLTM.
#pragma once

#include "recurrent.h"

#include "common/launch.cuh"
#include "common/numeric.cuh"
#include "recurrent/cells/cell.h"

namespace my_ops::cuda {

constexpr int kStepThreads = 128;

// The functions that cells call, accurate to a few units in the last place.
struct StepMath {
  template <typename C>
  struct Tanh {
    C value, slope;
  };

  template <typename C>
  __device__ static C sigmoid(C x) {
    return cuda::sigmoid(x);
  }
  template <typename C>
  __device__ static C tanh(C x) {
    return ::tanh(x);
  }
  template <typename C>
  __device__ static Tanh<C> tanh_with_slope(C x) {
    return {::tanh(x), tanh_slope(x)};
  }
  template <typename C>
  __device__ static C elu(C x) {
    return cuda::elu(x);
  }
  // ELU'(x) = 1 for x > 0, else exp(x) = y + 1: exact at 0, and nothing can overflow.
  template <typename C>
  __device__ static C elu_slope(C y) {
    return y > C(0) ? C(1) : y + C(1);
  }
};

template <int Count, typename T, typename Acc>
__device__ __forceinline__ void load_row(const T* from, int64_t stride, Acc (&to)[Count]) {
#pragma unroll
  for (int j = 0; j < Count; ++j) to[j] = load(from[j * stride]);
}

template <typename Cell, typename T, typename Acc>
__global__ void __launch_bounds__(kStepThreads)
    recurrent_step_kernel(const __grid_constant__ RecurrentStep<T, Acc> args) {
  const int64_t at = int64_t{blockIdx.x} * kStepThreads + threadIdx.x;  // in [batch, hidden]
  if (at >= args.batch * args.hidden) return;
  const int64_t row = at / args.hidden, unit = at % args.hidden;
  // The index of the first of an item's values in [batch, values, hidden].
  const auto first = [&](int values) {
    return values == 1 ? at : row * values * args.hidden + unit;
  };
  // All loads come before their first use, so that they are in flight together.
  Acc share[Cell::kGates], of_h[Cell::kGates], bias_x[Cell::kGates] = {}, bias_h[Cell::kGates] = {};
#pragma unroll
  for (int gate = 0; gate < Cell::kGates; ++gate) {
    const int64_t place = first(Cell::kGates) + gate * args.hidden;
    share[gate] = args.gates_x[place];
    of_h[gate] = args.gates_h[place];
  }
  Values<Acc, Cell::kCarried> carried;
#pragma unroll
  for (int j = 0; j < Cell::kCarried; ++j) {
    carried.at[j] = args.carried[first(Cell::kCarried) + j * args.hidden];
  }
  Acc h = 0, saved[Cell::kSaved];
  if constexpr (Cell::kReadsH) h = load(args.h[at]);
  if (args.bias_x != nullptr) load_row(args.bias_x + unit, args.hidden, bias_x);
  if (args.bias_h != nullptr) load_row(args.bias_h + unit, args.hidden, bias_h);
  const bool resets = args.reset != nullptr && args.reset[row];

  Acc z[kTerms<Cell>];
#pragma unroll
  for (int gate = 0; gate < Cell::kGates; ++gate) {
    share[gate] += bias_x[gate];
    of_h[gate] = (resets ? Acc(0) : of_h[gate]) + bias_h[gate];
    if (is_sum<Cell>(gate)) {
      z[gate] = share[gate] + of_h[gate];
    } else {
      z[gate] = of_h[gate];
      z[input_term<Cell>(gate)] = share[gate];
    }
  }
  if (resets) {
    carried = {};
    h = 0;
  }
  h = Cell::template forward<StepMath>(z, h, carried.at, saved);
  if (args.zoneout != nullptr) {
    const Acc share = load(args.zoneout[at]), h_prev = resets ? Acc(0) : load(args.h[at]);
    h = share * h_prev + (Acc(1) - share) * h;
  }
#pragma unroll
  for (int j = 0; j < Cell::kCarried; ++j) {
    const int64_t place = first(Cell::kCarried) + j * args.hidden;
    args.new_carried[place] = carried.at[j];
    if (args.kept_carried != nullptr) args.kept_carried[place] = store<T>(carried.at[j]);
  }
  args.new_h[at] = store<T>(h);
  if (args.saved) {
#pragma unroll
    for (int j = 0; j < Cell::kSaved; ++j) {
      args.saved[first(Cell::kSaved) + j * args.hidden] = store<T>(saved[j]);
    }
  }
}

template <typename Cell, typename T, typename Acc>
__global__ void __launch_bounds__(kStepThreads)
    recurrent_step_backward_kernel(const __grid_constant__ RecurrentStepBackward<T, Acc> args) {
  const int64_t at = int64_t{blockIdx.x} * kStepThreads + threadIdx.x;  // in [batch, hidden]
  if (at >= args.batch * args.hidden) return;
  const int64_t row = at / args.hidden, unit = at % args.hidden;
  const auto first = [&](int values) {
    return values == 1 ? at : row * values * args.hidden + unit;
  };
  Acc saved[Cell::kSaved];
#pragma unroll
  for (int j = 0; j < Cell::kSaved; ++j) {
    saved[j] = load(args.saved[first(Cell::kSaved) + j * args.hidden]);
  }
  Values<Acc, Cell::kCarried> previous, carried, grad_carried;
#pragma unroll
  for (int j = 0; j < Cell::kCarried; ++j) {
    const int64_t place = first(Cell::kCarried) + j * args.hidden;
    previous.at[j] = load(args.carried[place]);
    grad_carried.at[j] = args.grad_carried ? args.grad_carried[place] : Acc(0);
  }
  Acc grad_h = args.grad_h ? load(args.grad_h[at]) : Acc(0), h = 0;
  Acc grad_h_next = args.grad_h_next ? args.grad_h_next[at] : Acc(0);
  if constexpr (Cell::kReadsH) h = load(args.h[at]);
  if (Cell::kReadsH || args.zoneout != nullptr) grad_h += args.grad_h_direct[at];
  const Acc zoneout = args.zoneout != nullptr ? load(args.zoneout[at]) : Acc(0);
  const bool resets = args.reset != nullptr && args.reset[row];
  if (args.reset_next != nullptr && args.reset_next[row]) grad_h_next = 0;
  grad_h += grad_h_next;
  const Acc grad_kept = zoneout * grad_h;
  if (args.zoneout != nullptr) grad_h -= grad_kept;
  if (resets) {
    previous = {};
    h = 0;
  }
  carried = previous;
  Cell::advance(saved, carried.at);
  Acc grad_terms[kTerms<Cell>];
  Acc direct = Cell::template backward<StepMath>(saved, previous.at, carried.at, h, grad_h,
                                                 grad_carried.at, grad_terms);
  if (args.zoneout != nullptr) direct = Cell::kReadsH ? direct + grad_kept : grad_kept;
#pragma unroll
  for (int term = 0; term < kTerms<Cell>; ++term) {
    const int64_t place = first(kTerms<Cell>) + stored_term<Cell>(term) * args.hidden;
    args.grad_terms[place] = store<T>(grad_terms[term]);
  }
  if (Cell::kReadsH || args.zoneout != nullptr) {
    args.grad_h_direct[at] = resets ? Acc(0) : direct;
  }
#pragma unroll
  for (int j = 0; j < Cell::kCarried; ++j) {
    args.grad_carried_before[first(Cell::kCarried) + j * args.hidden] =
        resets ? Acc(0) : grad_carried.at[j];
  }
}

template <typename Args>
cudaError_t launch_step(void (*kernel)(Args), const Args& args, cudaStream_t stream) {
  const int64_t units = args.batch * args.hidden;
  if (units == 0) return cudaSuccess;
  return launch(kernel, ceil_div(units, kStepThreads), kStepThreads, 0, stream, args);
}

template <typename Cell, typename T, typename Acc>
cudaError_t recurrent_step(const RecurrentStep<T, Acc>& args, cudaStream_t stream) {
  return launch_step(recurrent_step_kernel<Cell, T, Acc>, args, stream);
}

template <typename Cell, typename T, typename Acc>
cudaError_t recurrent_step_backward(const RecurrentStepBackward<T, Acc>& args,
                                    cudaStream_t stream) {
  return launch_step(recurrent_step_backward_kernel<Cell, T, Acc>, args, stream);
}

}  // namespace my_ops::cuda
