// The work of the persistent kernels for an item, a unit of a row, with the values of its cell.
#pragma once

#include <type_traits>

#include "recurrent.h"

#include "common/numeric.cuh"
#include "ptx/memory.cuh"
#include "recurrent/cells/cell.h"
#include "recurrent/shared/math.cuh"

namespace my_ops::cuda {

// The state of an item, which stays in its block from step to step: the carried values, and h if
// the cell reads it.
template <typename Cell>
constexpr int kStateValues = Cell::kCarried + Cell::kReadsH;
template <typename Cell>
constexpr int kStateRoom = kStateValues<Cell> > 0 ? kStateValues<Cell> : 1;

// A unit's biases by term, and then its own parameters.
template <typename Cell, typename T>
__device__ __forceinline__ void load_biases(const RecurrentSequence<T>& seq, int64_t unit,
                                            float (&bias)[kTerms<Cell>]) {
#pragma unroll
  for (int gate = 0; gate < Cell::kGates; ++gate) {
    const int64_t place = gate * seq.hidden + unit;
    bias[input_term<Cell>(gate)] = seq.bias_x != nullptr ? load(seq.bias_x[place]) : 0.0f;
    const float of_h = seq.bias_h != nullptr ? load(seq.bias_h[place]) : 0.0f;
    bias[gate] = is_sum<Cell>(gate) ? bias[gate] + of_h : of_h;
  }
#pragma unroll
  for (int j = 0; j < Cell::kVectors; ++j) {
    bias[Cell::kGates + Cell::kApart + j] = load(seq.vectors[j * seq.hidden + unit]);
  }
}

// The terms of an item from its shares of the input, its biases, and its products with h, which are
// ignored after a reset.
template <typename Cell, typename Share, typename Bias, typename Product>
__device__ __forceinline__ void add_terms(Share share, Bias bias, Product product, bool resets,
                                          float (&z)[kTerms<Cell>]) {
#pragma unroll
  for (int gate = 0; gate < Cell::kGates; ++gate) {
    const int term = input_term<Cell>(gate);
    z[term] = share(gate) + bias(term);
    if (term != gate) z[gate] = bias(gate);
    const float sum = product(gate);
    z[gate] += resets ? 0.0f : sum;
  }
#pragma unroll
  for (int term = Cell::kGates + Cell::kApart; term < kTerms<Cell>; ++term) z[term] = bias(term);
}

// A number of values, as a type.
template <int Values>
using Count = std::integral_constant<int, Values>;

template <int Count, typename T>
__device__ __forceinline__ void prefetch_values(const T* p, int64_t hidden) {
#pragma unroll
  for (int j = 0; j < Count; ++j) ptx::prefetch_l2(p + j * hidden);
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

// Nonzero means true. A byte loaded ahead is not converted before its step, because the conversion
// would wait for the load.
__device__ __forceinline__ uint8_t load_byte(const bool* p) {
  return __ldg(reinterpret_cast<const uint8_t*>(p));
}

// What zoneout does to an item in a step.
struct Zoneout {
  bool given;
  float share;   // of h that stays
  float h_prev;  // read if the cell does not keep it in its state
};

// Returns h, and advances the state.
template <typename Cell, typename T>
__device__ __forceinline__ float forward_of(const float (&z)[kTerms<Cell>], bool resets,
                                            const Zoneout& zoneout,
                                            Values<float, kStateValues<Cell>>& state,
                                            float (&saved)[Cell::kSaved]) {
  if (resets) state = {};
  float* const last_h = state.at + (Cell::kReadsH ? Cell::kCarried : 0);
  float h =
      Cell::template forward<PersistentMath<T>>(z, Cell::kReadsH ? *last_h : 0.0f, state.at, saved);
  if (zoneout.given) {
    const float h_prev = Cell::kReadsH ? *last_h : resets ? 0.0f : zoneout.h_prev;
    h = zoneout.share * h_prev + (1.0f - zoneout.share) * h;
  }
  if constexpr (Cell::kReadsH) *last_h = h;
  return h;
}

// A block's vectors of two steps in shared memory. Units that do not exist stay zero; rows that do
// not exist may hold anything, because rows are independent.
template <typename Vector>
__device__ __forceinline__ void clear(Vector (&vectors)[2]) {
  auto* const words = reinterpret_cast<uint32_t*>(vectors);
  for (int i = threadIdx.x; i < static_cast<int>(sizeof(vectors) / 4); i += blockDim.x) {
    words[i] = 0;
  }
}

struct ToFloat {
  template <typename T>
  __device__ __forceinline__ float operator()(T value) const {
    return load(value);
  }
};

// What forward saved for one step of an item, and the gradient of its output. Value: float, or what
// was loaded, of one item or several. Values loaded ahead are not converted before their step,
// because the conversion would wait for the load.
template <typename Cell, typename Value = float>
struct Kept {
  Value saved[Cell::kSaved];
  Values<Value, Cell::kCarried> carried, previous;  // after the step and before it
  Value h_prev, grad_output;
  uint8_t reset;  // not 0: the step starts from zero

  // Calls read(p, member) for each value that a step of backward reads, but reset: *p is the value
  // and member(kept) its place. at(t, values): the index of the first of the item's `values` values
  // in [steps, batch, values, hidden].
  template <typename T, typename At, typename Read>
  __device__ __forceinline__ static void visit(const RecurrentSequenceBackward<T>& seq, int64_t t,
                                               At at, Read read) {
    constexpr int kCarried = Cell::kCarried, kSaved = Cell::kSaved;
#pragma unroll
    for (int k = 0; k < kSaved; ++k) {
      read(seq.saved + at(t, kSaved) + k * seq.hidden,
           [k](Kept& of) -> Value& { return of.saved[k]; });
    }
#pragma unroll
    for (int k = 0; k < kCarried; ++k) {
      const int64_t vector = k * seq.hidden;
      read(seq.carried + at(t, kCarried) + vector,
           [k](Kept& of) -> Value& { return of.carried.at[k]; });
      if constexpr (Cell::kReadsPrevious) {
        read((t > 0 ? seq.carried + at(t - 1, kCarried) : seq.carried0 + at(0, kCarried)) + vector,
             [k](Kept& of) -> Value& { return of.previous.at[k]; });
      }
    }
    if constexpr (Cell::kReadsH) {
      read(t > 0 ? seq.output + at(t - 1, 1) : seq.h0 + at(0, 1),
           [](Kept& of) -> Value& { return of.h_prev; });
    }
    if (seq.grad_output != nullptr) {
      read(seq.grad_output + at(t, 1), [](Kept& of) -> Value& { return of.grad_output; });
    }
  }

  // Calls request(p, values) for each array of which every step of backward reads its own values:
  // p is [steps, batch, values, hidden].
  template <typename T, typename Request>
  __device__ __forceinline__ static void visit_arrays(const RecurrentSequenceBackward<T>& seq,
                                                      Request request) {
    request(seq.saved, Count<Cell::kSaved>());
    if constexpr (Cell::kCarried > 0) request(seq.carried, Count<Cell::kCarried>());
    if constexpr (Cell::kReadsH) request(seq.output, Count<1>());
    if (seq.grad_output != nullptr) request(seq.grad_output, Count<1>());
  }

  // line: the item's index in [steps, batch]. Value is T, or as many values of T as it has bytes.
  template <typename T, typename At>
  __device__ __forceinline__ void load(const RecurrentSequenceBackward<T>& seq, int64_t t,
                                       int64_t line, At at) {
    visit(seq, t, at,
          [&](const T* p, auto member) { member(*this) = *reinterpret_cast<const Value*>(p); });
    if (seq.reset != nullptr) reset = load_byte(seq.reset + line);
  }

  // An item's values, by of(value).
  template <typename Of>
  __device__ __forceinline__ Kept<Cell> item(Of of) const {
    Kept<Cell> to;
#pragma unroll
    for (int k = 0; k < Cell::kSaved; ++k) to.saved[k] = of(saved[k]);
#pragma unroll
    for (int k = 0; k < Cell::kCarried; ++k) {
      to.carried.at[k] = of(carried.at[k]);
      to.previous.at[k] = of(previous.at[k]);
    }
    to.h_prev = of(h_prev);
    to.grad_output = of(grad_output);
    to.reset = reset;
    return to;
  }

  // Requests an item's values of step t - Ahead, or of the first step.
  template <int Ahead, typename T, typename At>
  __device__ __forceinline__ static void prefetch(const RecurrentSequenceBackward<T>& seq,
                                                  int64_t t, At at) {
    const int64_t hidden = seq.hidden, back = min(int64_t{Ahead}, t) * seq.batch * hidden;
    visit_arrays(seq, [&]<int Values>(const T* p, Count<Values>) {
      prefetch_values<Values>(p + at(t, Values) - back * Values, hidden);
    });
  }

  // The gradient that reaches h from the step after, whose state and grad_kept these are. product:
  // the part through the weights.
  __device__ __forceinline__ static float through(float product,
                                                  const Values<float, kStateValues<Cell>>& state,
                                                  bool zoned, float grad_kept) {
    if constexpr (Cell::kReadsH) return product + state.at[Cell::kCarried];
    return zoned ? product + grad_kept : product;
  }

  // through: the gradient that reaches h from the next step. state: the gradients of the carried
  // values, and that of the previous h without the part through the weights. published: the
  // gradients of the gates that do go through the weights. grad_kept, with zoneout: the gradient of
  // the previous h as the part of h that stays, if the state has none of the previous h.
  template <typename T>
  __device__ __forceinline__ void backward(float through, bool real, bool zoned, float zoneout,
                                           float& grad_kept,
                                           Values<float, kStateValues<Cell>>& state,
                                           float (&grad_terms)[kTerms<Cell>],
                                           float (&published)[Cell::kGates]) const {
    const bool resets = reset != 0;
    Values<float, Cell::kCarried> before = previous;
    if (resets) before = {};
    float grad_h = grad_output + through;
    float kept = 0.0f;
    if (zoned) {
      kept = zoneout * grad_h;
      grad_h -= kept;
    }
    float grad_z[kTerms<Cell>];
    const float direct = Cell::template backward<PersistentMath<T>>(
        saved, before.at, carried.at, resets ? 0.0f : h_prev, grad_h, state.at, grad_z);
    if constexpr (Cell::kReadsH) {
      state.at[Cell::kCarried] = zoned ? direct + kept : direct;
    } else {
      grad_kept = resets ? 0.0f : kept;
    }
    if (resets) state = {};
#pragma unroll
    for (int term = 0; term < kTerms<Cell>; ++term) {
      // 0 * inf of a padding unit must not reach other units.
      const float grad = real ? grad_z[term] : 0.0f;
      grad_terms[stored_term<Cell>(term)] = grad;
      if (term < Cell::kGates) published[term] = resets ? 0.0f : grad;
    }
  }
};

}  // namespace my_ops::cuda
