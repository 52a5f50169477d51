// Launch interface of attention. No torch here: raw pointers, sizes, strides, a stream.
#pragma once

#include <cstdint>

#ifdef MY_OPS_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

#include "device.h"

namespace my_ops::cuda {

// An array [batch][heads][rows][dim] with these strides in elements; those of dim are 1. Strides
// are multiples of 4 and x is aligned to 16 bytes.
template <typename T>
struct Heads {
  T* x;
  int64_t batch, head, row;
};

// out = softmax(scale q k^T + bias) v for each batch and head. No output may overlap an input.
struct AttentionArgs {
  int batch, heads;
  int q_length, k_length;  // at least 1
  int dim;                 // of a head: at most 128, a multiple of 4
  bool causal;             // row i sees keys 0 to i only
  float scale;             // above 0
  Heads<const float> q, k, v;
  // Added to the scaled scores; null: nothing. Any strides, 0 where it is broadcast. It may hold
  // -inf; a row that is -inf throughout gives zeros, and an infinite log-sum-exp.
  const float* bias;
  int64_t bias_batch, bias_head, bias_row, bias_column;
  // Of the scaled scores with bias, [batch][heads][logsumexp_stride], natural. The stride is
  // q_length, rounded up to a multiple of 32 at most; what is beyond q_length is infinite.
  float* logsumexp;
  int logsumexp_stride;
};

struct AttentionGradients {
  Heads<const float> grad, out;  // of the output; the output itself
  Heads<float> q, k, v;          // of these
  float* bias;                   // [batch][heads][q_length][k_length], not summed; null: none
};

// Bytes of the workspaces, aligned to 256.
int64_t attention_workspace(const AttentionArgs& args);
int64_t attention_backward_workspace(const AttentionArgs& args);

// With fewer multiply-adds in a product torch's is as fast, so nobody need ask for a plan.
inline constexpr int64_t kAttentionMinWork = int64_t{1} << 22;

// Ours, or why not: torch's should be as fast, or there is no code for the device; the kernels do
// not take these sizes.
enum class AttentionPlan { kOurs, kTorchs, kOtherSizes };

#ifdef MY_OPS_WITH_CUDA
// For the current device.
cudaError_t plan_attention(const AttentionArgs& args, bool backward, AttentionPlan* plan);

// Write args.logsumexp and out. As accurate as float: three products of fp16 parts (see
// docs/notes/attention.md). Deterministic, stream-ordered, safe to capture in a graph. NaN and Inf
// in q, k and v give NaN in the rows of the output that they reach.
cudaError_t attention(const AttentionArgs& args, const Heads<float>& out, void* workspace,
                      cudaStream_t stream);
// Reads args.logsumexp. args.bias is needed for the gradient of bias.
cudaError_t attention_backward(const AttentionArgs& args, const AttentionGradients& gradients,
                               void* workspace, cudaStream_t stream);
#endif

}  // namespace my_ops::cuda
