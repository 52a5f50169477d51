// Persistent recurrent kernels of the LLTM layer: one launch runs all time steps.
//   gates = [h_{t-1}, x_t] W^T + bias, rows in the order input i, output o, candidate g
//   i = sigmoid, o = sigmoid, g = ELU;  c_t = c_{t-1} + g * i;  h_t = tanh(c_t) * o
// The input part x W_x^T and the weight gradients are large GEMMs outside these launches.
// Defined for T = float, __half and __nv_bfloat16. Sums, gates and c are float for every T; float
// results have float accuracy (an infinite weight or h0 may give NaN for infinity). NaN and
// infinity in any input end in NaN or infinity, never in a hang. Same inputs on the same device
// give the same bits.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace my_ops::cuda {

// Every pointer is aligned to 16 bytes except w_h, which needs the alignment of T only (a w_h whose
// rows start at multiples of 16 bytes loads faster). Nothing may alias.
template <typename T>
struct LltmSequence {
  const float* gx;  // [steps, batch, 3 * hidden]  x W_x^T
  const T* bias;    // [3 * hidden]
  const T* w_h;     // [3 * hidden, hidden], consecutive rows w_row elements apart
  int64_t w_row;
  const T* h0;   // [batch, hidden]
  const T* c0;   // [batch, hidden]
  T* output;     // [steps, batch, hidden]      h of every step
  T* c_n;        // [batch, hidden]             c of the last step
  T* gates;      // [steps, batch, 3 * hidden]  activated i, o, g for backward; null in inference
  float* cells;  // [steps, batch, hidden]      c of every step; null exactly when gates is
  int64_t steps;
  int64_t batch;
  int64_t hidden;
};

// Gradients of the recurrence; grad_gates feeds the GEMMs for the weights, the bias and x.
template <typename T>
struct LltmSequenceBackward {
  const T* grad_output;  // [steps, batch, hidden], or null for zeros
  const T* grad_h_n;     // [batch, hidden], or null for zeros
  const T* grad_c_n;     // [batch, hidden], or null for zeros
  const T* gates;        // [steps, batch, 3 * hidden]  as saved by the forward pass
  const float* cells;    // [steps, batch, hidden]
  const T* w_h;          // [3 * hidden, hidden], consecutive rows w_row elements apart
  int64_t w_row;
  T* grad_gates;  // [steps, batch, 3 * hidden]  before the activations
  T* grad_h0;     // [batch, hidden]
  T* grad_c0;     // [batch, hidden]
  int64_t steps;
  int64_t batch;
  int64_t hidden;
};

// Whether on the current device one launch is the way to take: W_h on chip, all blocks resident
// together, and so few rows that it beats a product and a cell for each step. Where this is false,
// the launchers below return cudaErrorNotSupported.
template <typename T>
bool lltm_persistent_supported(int64_t batch, int64_t hidden);

template <typename T>
bool lltm_persistent_backward_supported(int64_t batch, int64_t hidden);

// Bytes of scratch for the two directions, aligned to 16. The launcher initialises it; two launches
// that may overlap need two of them.
template <typename T>
size_t lltm_persistent_workspace(int64_t steps, int64_t batch, int64_t hidden);

template <typename T>
size_t lltm_persistent_backward_workspace(int64_t steps, int64_t batch, int64_t hidden);

// Run on the current device; usable under stream capture. Zero steps are refused
// (cudaErrorInvalidValue): there is nothing to write but c_n = c0, which is the caller's copy. An
// empty batch or hidden is cudaSuccess.
template <typename T>
cudaError_t lltm_persistent(const LltmSequence<T>& args, void* workspace, cudaStream_t stream);

template <typename T>
cudaError_t lltm_persistent_backward(const LltmSequenceBackward<T>& args, void* workspace,
                                     cudaStream_t stream);

}  // namespace my_ops::cuda
