// A recurrent cell: the arithmetic of one hidden unit, in one row of the batch, at one step. It is
// written once and serves the CPU, the CUDA kernel of a step and the persistent CUDA kernels.
//
// A cell has these constants,
//
//   kGates          rows of the recurrent weights per hidden unit
//   kApart          how many of them, the last ones, need the product with h apart from the input's
//                   share: 1 in GRU, whose reset gate multiplies that product alone
//   kCarried        values that a unit carries from step to step besides h: c of LSTM
//   kSaved          values that forward keeps for backward, in the type of the activations
//   kReadsH         whether h of the step before enters other than through the weights
//   kReadsPrevious  whether backward reads the carried values from before the step
//
// and these functions, of values in the type of the arithmetic:
//
//   forward<Math>(z, h_prev, carried, saved) -> h     carried: from before the step to after it
//   advance(saved, carried)                           the same for carried, from what is saved
//   backward<Math>(saved, previous, carried, h_prev, grad_h, grad_carried, grad_z) -> grad_h_prev
//
// z: the pre-activations, biases included. z[gate] is the sum of the input's share and the product
// with h_prev, but for the kApart last gates the product alone; the input's shares of these follow,
// from z[kGates] on. A cell thus has kTerms = kGates + kApart terms, and as many gradients grad_z.
// previous, carried: the carried values before and after the step. grad_carried: in place, from
// after the step to before it. grad_h_prev: the gradient of h_prev other than through the weights,
// 0 unless kReadsH. saved is all that forward hands to backward: backward may not ask for z.
//
// Math names the functions of the backend, as accurate as its results: sigmoid(x), tanh(x), elu(x),
// elu_slope(y), the derivative by ELU's value, and tanh_with_slope(x), tanh and its derivative as
// {value, slope}.
//
// Time is the engine's affair: a cell knows no lengths and no resets. A reset is a step whose
// h_prev and carried values the engine takes as zero; rows of a ragged batch that have ended still
// take steps, in which shut(gate), the input's share of a gate, holds what is carried and makes h
// zero.
#pragma once

#ifdef __CUDACC__
#define MY_OPS_CELL __device__ __forceinline__
#else
#define MY_OPS_CELL inline __attribute__((always_inline))
#endif

namespace my_ops {

template <typename Cell>
constexpr int kTerms = Cell::kGates + Cell::kApart;

// Whether z[gate] is the whole pre-activation.
template <typename Cell>
MY_OPS_CELL constexpr bool is_sum(int gate) {
  return gate < Cell::kGates - Cell::kApart;
}

// Where z has the input's share of a gate.
template <typename Cell>
MY_OPS_CELL constexpr int input_term(int gate) {
  return is_sum<Cell>(gate) ? gate : gate + Cell::kApart;
}

// Values of which a cell may have none: C++ has no empty arrays.
template <typename T, int Count>
struct Values {
  T at[Count > 0 ? Count : 1];
};

}  // namespace my_ops
