// A recurrent cell: the arithmetic of one hidden unit, in one row of the batch, at one step. It is
// written once and serves the CPU, the CUDA kernel of a step and the persistent CUDA kernels.
//
// A cell has these constants,
//
//   kGates          rows of the recurrent weights per hidden unit
//   kApart          how many of them, the last ones, need the product with h apart from the input's
//                   share: 1 in GRU, whose reset gate multiplies that product alone
//   kVectors        learned parameters with a value for each unit besides the biases: 0 in LSTM
//   kCarried        values that a unit carries from step to step besides h: c of LSTM
//   kSaved          values that forward keeps for backward, in the type of the activations
//   kReadsH         whether the previous h also enters other than through the weights
//   kReadsPrevious  whether backward reads the carried values from before the step
//   kBounded        whether |h| <= max(1, |h_prev|) for any pre-activations and carried values
//
// and these functions, on values in the type of the arithmetic:
//
//   forward<Math>(z, h_prev, carried, saved) -> h     advances carried by one step
//   advance(saved, carried)                           advances carried, from the saved values
//   backward<Math>(saved, previous, carried, h_prev, grad_h, grad_carried, grad_z) -> grad_h_prev
//
// z: the pre-activations, including biases. z[gate] is the sum of the input's share and the product
// with h_prev. For the last kApart gates it is the product alone, and their input's shares follow
// from z[kGates] on, and then the kVectors parameters of the unit. So a cell has kTerms = kGates +
// kApart + kVectors terms, and as many gradients grad_z.
// previous, carried: the carried values before and after the step. grad_carried: in, the gradient
// of the values after the step; out, of those before it. grad_h_prev: the gradient of h_prev
// without the part through the weights; 0 unless kReadsH. saved is all that backward gets from
// forward; it does not get z.
//
// Math has the functions of the backend, as accurate as its results: sigmoid(x), tanh(x), elu(x),
// elu_slope(y), which is ELU's derivative as a function of ELU's value, and tanh_with_slope(x),
// which is tanh and its derivative as {value, slope}; and exp, expm1, log, log1p, softplus and
// sqrt, but for the CUDA kernel of a step.
//
// The engine handles time; a cell does not see lengths or resets. At a reset the engine passes
// zeros for h_prev and the carried values. On CUDA rows of a ragged batch that have ended still
// take steps: their input's share of a gate is shut(gate), which keeps the carried values and their
// gradient bit for bit, gives z no gradient where h has none, and keeps h finite. The engine
// discards that h.
#pragma once

#include "recurrent.h"

#ifdef __CUDACC__
#define MY_OPS_CELL __device__ __forceinline__
#else
#define MY_OPS_CELL inline __attribute__((always_inline))
#endif

namespace my_ops {

template <typename Cell>
constexpr int kTerms = Cell::kGates + Cell::kApart + Cell::kVectors;

template <typename Cell>
constexpr CellSizes kCellSizes{Cell::kGates, kTerms<Cell>,   Cell::kCarried,
                               Cell::kSaved, Cell::kVectors, Cell::kReadsH};

template <typename Cell>
constexpr cuda::CellFacts kCellFacts{Cell::kGates, kTerms<Cell>, Cell::kCarried + Cell::kReadsH,
                                     Cell::kBounded};

// Whether z[gate] is the whole pre-activation.
template <typename Cell>
MY_OPS_CELL constexpr bool is_sum(int gate) {
  return gate < Cell::kGates - Cell::kApart;
}

// The index in z of the input's share of a gate.
template <typename Cell>
MY_OPS_CELL constexpr int input_term(int gate) {
  return is_sum<Cell>(gate) ? gate : gate + Cell::kApart;
}

// Where grad_terms holds the gradient of z[term]: those of the input's shares alone first, then
// those of the gates, then those of the unit's parameters. So the terms of the product with h are a
// range, and those of the input's shares are another.
template <typename Cell>
MY_OPS_CELL constexpr int stored_term(int term) {
  constexpr int kBoth = Cell::kGates + Cell::kApart;
  return term < Cell::kGates ? term + Cell::kApart : term < kBoth ? term - Cell::kGates : term;
}

// An array that may be empty, which C++ arrays cannot be.
template <typename T, int Count>
struct Values {
  T at[Count > 0 ? Count : 1];
};

}  // namespace my_ops
