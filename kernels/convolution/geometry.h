// Where the windows of a convolution lie in an image, and where their sums go: host code, and what
// the kernels ask of it.
//
// The gradient of the input is a convolution of the output's gradient with the weight turned
// around. With strides it is one for each class of points. Along a dimension, point i sums over
// taps t and outputs o with i = o * stride - padding + t * dilation, so only over taps with
//
//   (i + padding - t * dilation) % stride == 0
//
// which are the same for all points of one remainder i % stride. With g = gcd(stride, dilation)
// they are stride / g apart, their outputs dilation / g, and the next point of that remainder has
// the next outputs. So the windows of all classes are a single point apart, and a window stands for
// one point of each class.
#pragma once

#include <algorithm>
#include <numeric>

#include "convolution.h"

namespace my_ops::cuda::convolution_sm90 {

inline constexpr int kMaxStride = 8;

// The taps of a class along one dimension; without any, the sums are zeros.
struct ClassTaps {
  int first, count;  // of the weight's taps, turned around for the gradient of the input
  int shift;         // of the first from a window's first point
};

// Height and width.
struct Geometry {
  int image[2], windows[2], kernel[2], stride[2], padding[2], dilation[2];
  int result[2];    // points; those of a gradient of the weight do not count
  int classes[2];   // points of the result from window to window, each of another class
  int tap_step[2];  // between taps of a class
  ClassTaps taps_of[2][kMaxStride];

  constexpr int window_count() const { return windows[0] * windows[1]; }
  constexpr int class_count() const { return classes[0] * classes[1]; }
  constexpr int taps() const { return kernel[0] * kernel[1]; }
  // How far the last window begins after the last point of the image, as the first one begins
  // `padding` before the first.
  constexpr int after(int d) const {
    return (windows[d] - 1) * stride[d] - padding[d] - (image[d] - 1);
  }
};

// A class of points, and what its windows read. `tap` counts the taps of the class.
struct PointClass {
  int remainder[2];
  ClassTaps taps[2];

  constexpr PointClass(const Geometry& g, int index)
      : remainder{index / g.classes[1], index % g.classes[1]},
        taps{g.taps_of[0][remainder[0]], g.taps_of[1][remainder[1]]} {}

  constexpr int count() const { return taps[0].count * taps[1].count; }
  // From a window's first point.
  constexpr int offset(const Geometry& g, int d, int tap) const {
    return taps[d].shift + tap * g.dilation[d];
  }
  // The weight's, of a tap down and a tap to the right.
  constexpr int weight_tap(const Geometry& g, int down, int right) const {
    return (taps[0].first + down * g.tap_step[0]) * g.kernel[1] + taps[1].first +
           right * g.tap_step[1];
  }
};

// A window: its image, and its place among the windows there.
struct Window {
  int n, place[2];

  constexpr Window(const Geometry& g, int m)
      : n(m / g.window_count()),
        place{m % g.window_count() / g.windows[1], m % g.window_count() % g.windows[1]} {}

  // Its first point, which may lie outside the image.
  constexpr int first(const Geometry& g, int d) const {
    return place[d] * g.stride[d] - g.padding[d];
  }
  // Its point of the result along a dimension, which may lie after the last.
  constexpr int point(const Geometry& g, const PointClass& of, int d) const {
    return place[d] * g.classes[d] + of.remainder[d];
  }
};

// The windows along one dimension of a gradient of the input.
inline void set_classes(const ConvolutionArgs& args, int d, Geometry* g) {
  const int stride = args.stride[d], dilation = args.dilation[d], kernel = args.kernel[d];
  const int common = std::gcd(stride, dilation), points = args.input_size[d];
  g->image[d] = args.output_size[d];
  g->result[d] = points;
  g->classes[d] = std::min(stride, points);
  g->windows[d] = (points + g->classes[d] - 1) / g->classes[d];
  g->stride[d] = 1;
  g->dilation[d] = dilation / common;
  g->tap_step[d] = stride / common;
  int before[kMaxStride], most = 0;  // how far a class's first tap lies before its window's index
  bool any = false;
  for (int remainder = 0; remainder < g->classes[d]; ++remainder) {
    ClassTaps& taps = g->taps_of[d][remainder] = {};
    const int reached = remainder + args.padding[d];
    for (int tap = 0; tap < std::min(kernel, g->tap_step[d]); ++tap) {
      if ((reached - tap * dilation) % stride != 0) continue;
      taps.count = (kernel - 1 - tap) / g->tap_step[d] + 1;
      const int last = tap + (taps.count - 1) * g->tap_step[d];
      taps.first = kernel - 1 - last;
      before[remainder] = (last * dilation - reached) / stride;
      most = any ? std::max(most, before[remainder]) : before[remainder];
      any = true;
    }
  }
  g->padding[d] = most;
  for (int remainder = 0; remainder < g->classes[d]; ++remainder) {
    ClassTaps& taps = g->taps_of[d][remainder];
    if (taps.count > 0) taps.shift = most - before[remainder];
  }
}

inline Geometry geometry_of(const ConvolutionArgs& args) {
  Geometry g{};
  for (int d = 0; d < 2; ++d) {
    g.kernel[d] = args.kernel[d];
    if (args.pass == ConvolutionPass::kGradInput) {
      set_classes(args, d, &g);
      continue;
    }
    g.image[d] = args.input_size[d];
    g.result[d] = g.windows[d] = args.output_size[d];
    g.stride[d] = args.stride[d];
    g.padding[d] = args.padding[d];
    g.dilation[d] = args.dilation[d];
    g.classes[d] = g.tap_step[d] = 1;
    g.taps_of[d][0] = {.first = 0, .count = args.kernel[d], .shift = 0};
  }
  return g;
}

}  // namespace my_ops::cuda::convolution_sm90
