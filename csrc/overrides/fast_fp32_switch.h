// What the module that computes (../fast_fp32.h) gives to the one whose kernels replace torch's.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <atomic>
#include <cstdint>
#include <optional>

namespace my_ops::fast_fp32 {

// A convolution with one group, transposed or not, or a depthwise one; or one of its gradients.
struct Convolution {
  enum Pass { kForward, kGradInput, kGradWeight } pass;
  AtenTensorHandle input, weight;
  AtenTensorHandle other;  // forward: the bias or null; otherwise the gradient of the output
  // One for each dimension of space, of which there are `space`.
  const int64_t *stride, *padding, *dilation, *output_padding;  // the last of transposed ones
  int64_t space;
  bool transposed;
  bool of_points;  // not transposed, with kernels of a single point and no padding
  bool depthwise;  // a group for each channel, with one output
  bool rounds;     // whether torch's settings allow TF32 in convolutions
};

// A call of torch's memory-efficient attention. The bias has all sizes of the scores, or is null.
struct AttentionCall {
  AtenTensorHandle q, k, v, bias;
  double dropout;
  bool causal;
  std::optional<double> scale;
};

// What its gradient needs besides.
struct AttentionSaved {
  AtenTensorHandle grad, out, logsumexp;
  bool needs_bias;  // whether the gradient of the bias is asked for
};

struct Switch {
  const std::atomic<bool>* on;
  // Products whose batch * m * n * k is smaller stay torch's.
  int64_t least;
  // Computes a @ b, plus self unless that is null, for an op on tensors of this rank, into *out or,
  // if that is null, into a new tensor, whose handle it puts there. Returns whether it did so;
  // otherwise the product is torch's.
  int (*take)(int64_t rank, AtenTensorHandle self, AtenTensorHandle a, AtenTensorHandle b,
              AtenTensorHandle* out);
  // Computes it into a new tensor, whose handle it puts into *result. If it does not, *result stays
  // null, and the convolution is torch's.
  void (*convolve)(const Convolution& convolution, AtenTensorHandle* result);
  // Attention with fewer multiply-adds in a product stays torch's.
  int64_t least_attention;
  // Compute what torch's two ops return, in new tensors, whose handles they put into results; that
  // of a gradient that is not asked for stays null. They return whether they did so; otherwise the
  // call is torch's. Null: this device has no attention.
  bool (*attend)(const AttentionCall& call, bool needs_logsumexp, AtenTensorHandle* results);
  bool (*attend_backward)(const AttentionCall& call, const AttentionSaved& saved,
                          AtenTensorHandle* results);
};

}  // namespace my_ops::fast_fp32
