// Whether our kernels for convolutions are faster than cuDNN's strict ones: our time, from a model
// of what takes it, and the least that cuDNN was seen to take. Fitted to 237 random passes on an
// H200, cuDNN's rate of strided gradients of the input to 30 more, and of single points to 31
// cases, with both gradients in one time (docs/notes/convolutions.md); what classes of points add
// to ours is an estimate. Host only.
#pragma once

#include <algorithm>
#include <cmath>

#include "convolution.h"

namespace my_ops::cuda {

// Microseconds, of a megabyte or a million elements where it does not say otherwise.
struct ConvolutionCosts {
  double launch;               // of a call
  double split;                // of what the passes before the product move
  double block, narrow_block;  // of a wave of tiles, for each block of k
  double weight, turned_weight, output;
  double slices;  // of the partial sums of gradients of the weight, written and read
  // The same, of a tile, and of a block of k, as the number of these slices is chosen by.
  double slice_sums, slice_tile, slice_block;
  // TFLOP/s that cuDNN has at most: at all, or where it can transform windows (3 x 3, other sizes).
  double cudnn, cudnn_forward, cudnn_grad_input, cudnn_grad_weight, cudnn_grad_weight_narrow;
  double cudnn_by_channels, cudnn_large_grad_input, cudnn_large_grad_weight;
  // The same at 3 x 3, for few images or points, and for few points.
  double cudnn_few_grad_input, cudnn_few_grad_weight;
  double cudnn_strided_grad_input;
  // Of single points, where it transforms nothing: less with few channels, and in the gradient of
  // the weight also without the channels last.
  struct Points {
    double most, base, by_channel;
  } cudnn_points, cudnn_points_grad_weight, cudnn_points_grad_weight_last, cudnn_points_few_outputs;
  double margin;  // by which ours must be faster
};

inline constexpr ConvolutionCosts kFittedConvolutionCosts = {
    .launch = 10.9,
    .split = 0.282,
    .block = 0.98,
    .narrow_block = 0.713,
    .weight = 5.53,
    .turned_weight = 23.4,
    .output = 0.512,
    .slices = 1.66,
    .slice_sums = 0.333,
    .slice_tile = 2,
    .slice_block = 1,
    .cudnn = 45,
    .cudnn_forward = 85,
    .cudnn_grad_input = 115,
    .cudnn_grad_weight = 165,
    .cudnn_grad_weight_narrow = 40,
    .cudnn_by_channels = 60,
    .cudnn_large_grad_input = 165,
    .cudnn_large_grad_weight = 180,
    .cudnn_few_grad_input = 50,
    .cudnn_few_grad_weight = 100,
    .cudnn_strided_grad_input = 36,
    .cudnn_points = {.most = 40, .base = 21, .by_channel = 0.093},
    .cudnn_points_grad_weight = {.most = 27, .base = 0, .by_channel = 0.12},
    .cudnn_points_grad_weight_last = {.most = 27, .base = 4, .by_channel = 0.125},
    .cudnn_points_few_outputs = {.most = 27, .base = 9.5, .by_channel = 0.071},
    .margin = 1.1,
};

// What cuDNN has at most, of single points. Those are products, whose k is the channels read, or
// the points.
inline double cudnn_points_rate(const ConvolutionArgs& a, const ConvolutionCosts& c) {
  constexpr double kFewest = 64;  // channels that were timed
  const auto rate = [&](const ConvolutionCosts::Points& p, double channels) {
    return std::min(p.most, p.base + p.by_channel * std::max(channels, kFewest));
  };
  switch (a.pass) {
    case ConvolutionPass::kForward:
      return rate(c.cudnn_points, a.channels);
    case ConvolutionPass::kGradInput:
      return rate(c.cudnn_points, a.outputs);
    default:
      return std::min(
          rate(a.input_last ? c.cudnn_points_grad_weight_last : c.cudnn_points_grad_weight,
               std::sqrt(static_cast<double>(a.channels) * a.outputs)),
          rate(c.cudnn_points_few_outputs, a.outputs));
  }
}

// What cuDNN has at most. Winograd's and Fourier's transforms gain with the number of channels.
inline double cudnn_rate(const ConvolutionArgs& a, const ConvolutionCosts& c) {
  bool transforms = true, small = true, strided = false;
  for (int d = 0; d < 2; ++d) {
    transforms = transforms && a.stride[d] == 1 && a.dilation[d] == 1 && a.kernel[d] > 1;
    small = small && a.kernel[d] == 3;
    strided = strided || a.stride[d] > 1;
  }
  if (a.kernel[0] * a.kernel[1] == 1) return cudnn_points_rate(a, c);
  if (strided && a.pass == ConvolutionPass::kGradInput) return c.cudnn_strided_grad_input;
  if (!transforms) return c.cudnn;
  const double by_channels =
      c.cudnn_by_channels + 0.25 * std::sqrt(static_cast<double>(a.channels) * a.outputs);
  const bool few = static_cast<int64_t>(a.output_size[0]) * a.output_size[1] < 24 * 24;
  switch (a.pass) {
    case ConvolutionPass::kForward:
      return c.cudnn_forward;
    case ConvolutionPass::kGradInput:
      if (!small) return c.cudnn_large_grad_input;
      return std::min(few || a.batch < 32 ? c.cudnn_few_grad_input : c.cudnn_grad_input,
                      by_channels);
    default:
      if (!small) return c.cudnn_large_grad_weight;
      if (std::max(a.channels, a.outputs) <= 64) return c.cudnn_grad_weight_narrow;
      return std::min(few ? c.cudnn_few_grad_weight : c.cudnn_grad_weight, by_channels);
  }
}

// Of depthwise convolutions, in microseconds: a call, and what a million of bytes that are read or
// written and of FMAs add. torch's are the least that it was seen to take: cuDNN's with the
// channels last, otherwise torch's own. Those of gradients of the weight were fitted to 23 cases on
// an H200, those of forward and gradients of the input to both passes of 20; cuDNN's by the smaller
// size of the kernel. On other GPUs what is not a call is in inverse proportion to their SMs.
struct DepthwiseCosts {
  struct Terms {
    double launch, bytes, fmas;
  } last, planes, rows;  // ours, of the weight
  Terms torch_last_3, torch_last_5, torch_last_7, torch_planes;
  // Ours, forward and of the input; forward with strides and the channels last.
  Terms filter_last, filter_planes, filter_rows, filter_strided_last;
  Terms torch_filter_last_3, torch_filter_last, torch_filter_planes;
  Terms torch_strided_last, torch_strided_planes;  // of the input, with strides
  double margin, margin_elsewhere;  // by which ours must be faster, and on GPUs that nobody timed
  int sm_count, l2_bytes;           // of the GPU that was timed
};

inline constexpr DepthwiseCosts kFittedDepthwiseCosts = {
    .last = {.launch = 14, .bytes = 0.25, .fmas = 0.086},
    .planes = {.launch = 14, .bytes = 0.25, .fmas = 0.115},
    .rows = {.launch = 14, .bytes = 0.25, .fmas = 0.09},
    .torch_last_3 = {.launch = 25, .bytes = 0.3, .fmas = 0},
    .torch_last_5 = {.launch = 25, .bytes = 0.3, .fmas = 0.15},
    .torch_last_7 = {.launch = 25, .bytes = 0.3, .fmas = 4},
    .torch_planes = {.launch = 10, .bytes = 0, .fmas = 1.3},
    .filter_last = {.launch = 8.8, .bytes = 0.267, .fmas = 0.084},
    .filter_planes = {.launch = 25, .bytes = 0.387, .fmas = 0.032},
    .filter_rows = {.launch = 6, .bytes = 0.25, .fmas = 0.2},
    .filter_strided_last = {.launch = 8.8, .bytes = 0.44, .fmas = 0.084},
    .torch_filter_last_3 = {.launch = 5, .bytes = 0.33, .fmas = 0},
    .torch_filter_last = {.launch = 3.8, .bytes = 0.012, .fmas = 0.364},
    .torch_filter_planes = {.launch = 12, .bytes = 0.384, .fmas = 0.6},
    .torch_strided_last = {.launch = 8, .bytes = 0.9, .fmas = 0},
    .torch_strided_planes = {.launch = 8, .bytes = 3, .fmas = 0},
    .margin = 1.1,
    .margin_elsewhere = 2,
    .sm_count = 132,
    .l2_bytes = 62914560,
};

}  // namespace my_ops::cuda
