// What the persistent kernels do for an item, a unit of a row, with the values of its cell.
#pragma once

#include "recurrent.h"

#include "common/numeric.cuh"
#include "ptx/recurrent.cuh"
#include "recurrent/cells/cell.h"
#include "recurrent/math.cuh"

namespace my_ops::cuda {

// The state of an item that stays in its block from step to step: the carried values, and h where
// the cell reads it.
template <typename Cell>
constexpr int kStateValues = Cell::kCarried + Cell::kReadsH;
template <typename Cell>
constexpr int kStateRoom = kStateValues<Cell> > 0 ? kStateValues<Cell> : 1;

// The terms without the product with h, from an item's place in gates_x and in the bias.
template <typename Cell, typename T>
__device__ __forceinline__ void load_addends(const float* gates_x, const T* bias, int64_t hidden,
                                             float (&addend)[kTerms<Cell>]) {
#pragma unroll
  for (int gate = 0; gate < Cell::kGates; ++gate) {
    const int term = input_term<Cell>(gate);
    addend[term] = __ldg(gates_x + gate * hidden) + load(bias[term * hidden]);
    if constexpr (Cell::kApart > 0) {
      if (term != gate) addend[gate] = load(bias[gate * hidden]);
    }
  }
}

template <int Count, typename T>
__device__ __forceinline__ void prefetch_values(const T* p, int64_t hidden) {
#pragma unroll
  for (int j = 0; j < Count; ++j) prefetch_l2(p + j * hidden);
}

template <int Count, typename T>
__device__ __forceinline__ void load_values(const T* p, int64_t hidden, float* values) {
#pragma unroll
  for (int j = 0; j < Count; ++j) values[j] = load(p[j * hidden]);
}

template <int Count, typename T>
__device__ __forceinline__ void store_values(T* p, int64_t hidden, const float* values) {
#pragma unroll
  for (int j = 0; j < Count; ++j) p[j * hidden] = store<T>(values[j]);
}

// h; advances the state.
template <typename Cell, typename T>
__device__ __forceinline__ float forward_of(const float (&z)[kTerms<Cell>],
                                            Values<float, kStateValues<Cell>>& state,
                                            float (&saved)[Cell::kSaved]) {
  float* const last_h = state.at + (Cell::kReadsH ? Cell::kCarried : 0);
  const float h =
      Cell::template forward<PersistentMath<T>>(z, Cell::kReadsH ? *last_h : 0.0f, state.at, saved);
  if constexpr (Cell::kReadsH) *last_h = h;
  return h;
}

// What forward has kept of one step of an item, and the gradient of its output.
template <typename Cell>
struct Kept {
  float saved[Cell::kSaved];
  Values<float, Cell::kCarried> carried, previous;  // after the step and before it
  float h_prev, grad_output;

  // at(t, values): where the first of `values` values of the item is in [steps, batch, values,
  // hidden]. A thread that prefetches asks for what the step Ahead rounds later reads.
  template <int Ahead, typename T, typename At>
  __device__ __forceinline__ void load(const RecurrentSequenceBackward<T>& seq, int64_t t, At at,
                                       bool prefetches) {
    constexpr int kCarried = Cell::kCarried, kSaved = Cell::kSaved;
    const int64_t hidden = seq.hidden, back = Ahead * seq.batch * hidden;
    const T* const saved_at = seq.saved + at(t, kSaved);
    const float* const carried_at = seq.carried + at(t, kCarried);
    const T* const grad_output_at = seq.grad_output + at(t, 1);
    load_values<kSaved>(saved_at, hidden, saved);
    load_values<kCarried>(carried_at, hidden, carried.at);
    if constexpr (Cell::kReadsPrevious) {
      if (t > 0) {
        load_values<kCarried>(seq.carried + at(t - 1, kCarried), hidden, previous.at);
      } else {
        load_values<kCarried>(seq.carried0 + at(0, kCarried), hidden, previous.at);
      }
    }
    if constexpr (Cell::kReadsH) {
      h_prev = cuda::load(t > 0 ? seq.output[at(t - 1, 1)] : seq.h0[at(0, 1)]);
    }
    if (seq.grad_output != nullptr) grad_output = cuda::load(*grad_output_at);
    if (prefetches && t >= Ahead) {
      prefetch_values<kSaved>(saved_at - back * kSaved, hidden);
      prefetch_values<kCarried>(carried_at - back * kCarried, hidden);
      if constexpr (Cell::kReadsH) prefetch_l2(seq.output + at(t, 1) - back);
      if (seq.grad_output != nullptr) prefetch_l2(grad_output_at - back);
    }
  }

  // through: what reaches h from the step after. state: the gradients of the carried values, and
  // that of the h before this step which does not pass through the weights.
  template <typename T>
  __device__ __forceinline__ void backward(float through, Values<float, kStateValues<Cell>>& state,
                                           float (&grad_terms)[kTerms<Cell>]) const {
    const float direct = Cell::template backward<PersistentMath<T>>(
        saved, previous.at, carried.at, h_prev, grad_output + through, state.at, grad_terms);
    if constexpr (Cell::kReadsH) state.at[Cell::kCarried] = direct;
  }
};

}  // namespace my_ops::cuda
