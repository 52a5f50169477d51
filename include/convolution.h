// Launch interface of convolutions. No torch here: raw pointers, sizes, a stream.
#pragma once

#include <cstdint>

#ifdef MY_OPS_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

#include "device.h"

namespace my_ops::cuda {

// A transposed convolution is the gradient of an input.
enum class ConvolutionPass { kForward, kGradInput, kGradWeight };

// A convolution over two dimensions of space, height and width, or one of its gradients:
//
//   output[n][k][p][q] = bias[k] + sum over c, r, s of
//       weight[k][c][r][s] * input[n][c][p * stride - padding + r * dilation][...]
//
// Tensors are dense, in this order of dimensions, or with the channels last.
struct ConvolutionArgs {
  ConvolutionPass pass;
  int batch, channels, outputs;
  int input_size[2], output_size[2], kernel[2];
  int stride[2], padding[2], dilation[2];
  bool input_last, weight_last, output_last;  // whether the channels are last in memory
  const float* input;
  const float* weight;
  const float* bias;  // of the result, for each of its channels; null: none
  const float* grad;  // of the output; gradients only
  float* result;      // the output, or the gradient of the input or of the weight
};

// Who computes a convolution, and why.
enum class ConvolutionChoice {
  kOurs,
  kAsFast,  // cuDNN: it should be as fast, or ours cannot run
  kMemory,  // cuDNN: ours would take too much memory
};

// As decided by plan_convolution.
struct ConvolutionPlan {
  DeviceFacts device;
  ConvolutionChoice choice = ConvolutionChoice::kAsFast;
  int slices = 1;         // of the windows that a gradient of the weight sums over
  int64_t workspace = 0;  // bytes
};

// A depthwise convolution, which has a group and one output for each channel, or one of its
// gradients:
//
//   output[n][c][p][q] = bias[c] + sum over r, s of
//       weight[c][r][s] * input[n][c][p * stride - padding + r * dilation][...]
//
// Tensors are dense, in this order of dimensions, or but for the weight with the channels last.
struct DepthwiseArgs {
  ConvolutionPass pass;
  int batch, channels;
  int input_size[2], output_size[2], kernel[2];
  int stride[2], padding[2], dilation[2];
  bool last;            // whether the channels are last in memory
  const float* input;   // forward, gradient of the weight
  const float* weight;  // forward, gradient of the input
  const float* bias;    // forward; null: none
  const float* grad;    // of the output; gradients only
  float* result;        // the output, or the gradient of the input or of the weight
};

// As decided by plan_depthwise.
struct DepthwisePlan {
  ConvolutionChoice choice = ConvolutionChoice::kAsFast;
  int slices = 1;         // of a gradient of the weight: of the images, or of what there is more of
  int64_t workspace = 0;  // bytes
};

#ifdef MY_OPS_WITH_CUDA
// Returns the plan for the current device. It does not look at the pointers.
cudaError_t plan_convolution(const ConvolutionArgs& args, ConvolutionPlan* plan);

// Runs a plan for these arguments, on the device it was made for; its choice must be kOurs.
// workspace: plan.workspace bytes, 256-byte aligned.
//
// As accurate as a float convolution: each number is a sum of two fp16 parts, which hold magnitudes
// that span 2^27 within an operand. The device looks at the data: beyond that it takes three bf16
// parts, up to 2^90, and fp32 FMAs for anything else. Deterministic, safe to capture in a graph.
cudaError_t convolution(const ConvolutionArgs& args, const ConvolutionPlan& plan, void* workspace,
                        cudaStream_t stream);

// The same for a depthwise one. Its products and sums are fp32 FMAs, in a fixed order; taps in the
// padding add nothing, not even to NaN.
cudaError_t plan_depthwise(const DepthwiseArgs& args, DepthwisePlan* plan);
cudaError_t depthwise(const DepthwiseArgs& args, const DepthwisePlan& plan, void* workspace,
                      cudaStream_t stream);
#endif

}  // namespace my_ops::cuda
