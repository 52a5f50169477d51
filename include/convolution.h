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

#ifdef MY_OPS_WITH_CUDA
// Whether ours should be faster than cuDNN's strict kernels; false also where ours cannot run. It
// does not look at the pointers.
cudaError_t plan_convolution(const ConvolutionArgs& args, bool* ours);

// Bytes of the workspace, aligned to 256. Of a convolution that is ours, like the next.
int64_t convolution_workspace(const ConvolutionArgs& args);

// As accurate as a float convolution: each number is a sum of two fp16 parts, which hold magnitudes
// that span 2^27 within an operand. The device looks at the data: beyond that it takes three bf16
// parts, up to 2^90, and fp32 FMAs for anything else. Deterministic, safe to capture in a graph.
cudaError_t convolution(const ConvolutionArgs& args, void* workspace, cudaStream_t stream);
#endif

}  // namespace my_ops::cuda
