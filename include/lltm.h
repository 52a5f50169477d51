// Launch interface of LLTM. No torch here: raw pointers, sizes, a stream.
//
// One step, from pre-activations in the gate order (input, output, candidate):
//   i, o = sigmoid;  g = ELU;  cell' = cell + g * i;  h' = tanh(cell') * o
// T is the type of activations, Acc the type of the arithmetic and of the cell state: float for
// float and the 16-bit types, double for double.
//
// A ragged batch takes the same steps: beyond a row's end both gates are shut, i = o = 0, so that c
// stays, h is 0 and no gradient arises. What stands around the steps is in the structs LltmRows to
// LltmEndsBackward; row b ends after lengths[b] steps, of which values below 0 and above `steps`
// count as these.
#pragma once

#include <cstdint>

#ifdef MY_OPS_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace my_ops {

template <typename T, typename Acc>
struct LltmCell {
  const Acc* gates_x;   // [batch, 3, hidden] pre-activations: the share of the input
  const Acc* gates_h;   // [batch, 3, hidden] the share of old_h
  const T* bias;        // [3, hidden]
  const Acc* old_cell;  // [batch, hidden]
  T* new_h;             // [batch, hidden]
  Acc* new_cell;        // [batch, hidden]; may be old_cell
  T* gates;             // [batch, 3, hidden] activated i, o, g for backward, or null
  int64_t batch, hidden;
};

template <typename T, typename Acc>
struct LltmCellBackward {
  const T* grad_h;         // [batch, hidden] of new_h, or null for zero
  const Acc* grad_h_next;  // [batch, hidden] a second term of it, or null
  const Acc* grad_cell;    // [batch, hidden] of new_cell, or null for zero
  const T* gates;          // [batch, 3, hidden] activated, from the forward pass
  const Acc* old_cell;     // [batch, hidden]
  T* grad_gates;           // [batch, 3, hidden] of the pre-activations
  Acc* grad_old_cell;      // [batch, hidden]; may be grad_cell
  int64_t batch, hidden;
};

// Rows of a state: of `some` where a row has a step, else of `none`, or zero.
template <typename T>
struct LltmRows {
  const T* some;  // [batch, hidden]
  const T* none;  // [batch, hidden], or null for zero; may be out
  T* out;         // [batch, hidden]; may be some
  const int64_t* lengths;
  int64_t steps, batch, hidden;
};

// The share of the input in the pre-activations beyond the ends: -inf, -inf, 0.
template <typename Acc>
struct LltmShut {
  Acc* gates_x;  // [steps, batch, 3, hidden]
  const int64_t* lengths;
  int64_t steps, batch, hidden;
};

// The output beyond the ends, 0, and the last h of every row.
template <typename T>
struct LltmEnds {
  T* output;    // [steps, batch, hidden]
  const T* h0;  // [batch, hidden], h_n of a row without a step
  T* h_n;       // [batch, hidden]
  const int64_t* lengths;
  int64_t steps, batch, hidden;
};

// The gradient of the steps' own output from those of LltmEnds' results.
template <typename T>
struct LltmEndsBackward {
  const T* grad_output;  // [steps, batch, hidden], or null for zero
  const T* grad_h_n;     // [batch, hidden], or null for zero
  T* grad;               // [steps, batch, hidden]
  const int64_t* lengths;
  int64_t steps, batch, hidden;
};

namespace cpu {

// All steps of a layer.
template <typename T>
struct LltmSteps {
  const T* input;          // [steps, batch, inputs]
  const T* bias;           // [3, hidden]
  const T* weights_x;      // the weights of the input transposed, [inputs, 3, hidden], by lltm_pack
  const T* weights_h;      // the weights of h transposed, [hidden, 3, hidden], by lltm_pack
  const T* h0;             // [batch, hidden]
  const T* c0;             // [batch, hidden]
  const int64_t* lengths;  // [batch] of a ragged batch, or null
  T* output;               // [steps, batch, hidden]
  T* c_n;                  // [batch, hidden]
  T* gates;                // [steps, batch, 3, hidden] activated i, o, g for backward, or null
  T* cells;                // [steps, batch, hidden] for backward, or null
  T* workspace;            // [batch, 2, 3, hidden]
  int64_t steps, batch, inputs, hidden;
};

template <typename T>
struct LltmStepsBackward {
  const T* grad_output;  // [steps, batch, hidden], or null for zero
  const T* grad_h_n;     // [batch, hidden], or null for zero
  const T* grad_c_n;     // [batch, hidden], or null for zero
  const T* gates;        // [steps, batch, 3, hidden]
  const T* cells;        // [steps, batch, hidden]
  const T* c0;           // [batch, hidden]
  const T* weights_h;    // the weights of h, [3, hidden, hidden], by lltm_pack
  T* grad_gates;         // [steps, batch, 3, hidden]
  T* grad_h0;            // [batch, hidden]
  T* grad_c0;            // [batch, hidden]
  int64_t steps, batch, hidden;
};

// All of these for float and double.

// Elements of [k, n] packed, and the packing of b with its strides in elements.
template <typename T>
int64_t lltm_packed_size(int64_t k, int64_t n);
template <typename T>
void lltm_pack(const T* b, int64_t row, int64_t col, int64_t k, int64_t n, T* packed);

// Rows [begin, end) of the batch.
template <typename T>
void lltm_cell(const LltmCell<T, T>& args, int64_t begin, int64_t end);
template <typename T>
void lltm_cell_backward(const LltmCellBackward<T, T>& args, int64_t begin, int64_t end);
template <typename T>
void lltm_steps(const LltmSteps<T>& args, int64_t begin, int64_t end);
template <typename T>
void lltm_steps_backward(const LltmStepsBackward<T>& args, int64_t begin, int64_t end);

// LltmRows, LltmShut, LltmEnds or LltmEndsBackward.
template <typename Ragged>
void lltm_ragged(const Ragged& args);

}  // namespace cpu

#ifdef MY_OPS_WITH_CUDA
namespace cuda {

template <typename T, typename Acc>
cudaError_t lltm_cell(const LltmCell<T, Acc>& args, cudaStream_t stream);
template <typename T, typename Acc>
cudaError_t lltm_cell_backward(const LltmCellBackward<T, Acc>& args, cudaStream_t stream);

// LltmRows, LltmShut, LltmEnds or LltmEndsBackward.
template <typename Ragged>
cudaError_t lltm_ragged(const Ragged& args, cudaStream_t stream);

}  // namespace cuda
#endif

}  // namespace my_ops
