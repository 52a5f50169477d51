// Depthwise convolutions and their gradients: float in, float out, in fp32 FMAs.
// Plan, of gradients of the weight: threads keep the sums of all taps in registers and slide a
// window of the input over the outputs. A block's threads add theirs, and write the sums of a
// slice; a second launch adds slices. Of forward and the gradient of the input: threads keep all
// taps and walk down the rows of an image, which a ring in shared memory receives ahead. Bound by
// reading and writing what there is once, 4 bytes an element, and by FMAs at 7 x 7.
#include "convolution/depthwise.cuh"

#include <cuda_runtime.h>

#include <cstdint>

#include "common/ceil_div.h"
#include "common/launch.cuh"
#include "convolution.h"
#include "convolution/depthwise_filter.cuh"
#include "convolution/depthwise_plan.h"

namespace my_ops::cuda {
namespace depthwise_fma {
namespace {

template <typename Tile>
cudaError_t run(const Launch& a, cudaStream_t stream) {
  const auto slices = static_cast<unsigned>(a.slices);
  const auto channels = static_cast<unsigned>(a.channels);
  if constexpr (Tile::kLayout == Layout::kLast) {
    return launch(depthwise_last_kernel<Tile>, dim3((channels + 31) / 32, slices), Tile::kThreads,
                  0, stream, a);
  } else if constexpr (Tile::kLayout == Layout::kPlanes) {
    return launch(depthwise_planes_kernel<Tile>, dim3(slices, channels), Tile::kThreads, 0, stream,
                  a);
  } else {
    constexpr auto bytes = [](int segment) {
      return Tile::kWarps * (32 * segment * (Tile::kStride + 1) + Tile::kSize) * sizeof(float);
    };
    static_assert(bytes(kMostSegment) <= 48 * 1024);
    return launch(depthwise_rows_kernel<Tile>, dim3(slices, channels), Tile::kThreads,
                  bytes(a.segment), stream, a);
  }
}

}  // namespace
}  // namespace depthwise_fma

namespace depthwise_filter {
namespace {

// Of a dense tensor of these sizes.
Strides strides_of(const DepthwiseArgs& a, const int (&size)[2]) {
  const int64_t channels = a.channels, high = size[0], wide = size[1];
  switch (depthwise_fma::layout_of(a)) {
    case Layout::kLast:
      return {high * wide * channels, 1, wide * channels, a.channels};
    case Layout::kPlanes:
      return {channels * high * wide, high * wide, wide, 1};
    default:
      return {0, wide, channels * wide, 1};
  }
}

template <typename Tile>
cudaError_t run(const DepthwiseArgs& args, cudaStream_t stream) {
  static_assert(shared_bytes_suffice<Tile>());
  DeviceFacts device;
  if (auto err = current_device(&device); err != cudaSuccess) return err;
  const bool forward = args.pass == ConvolutionPass::kForward;
  const Geometry geometry = geometry_of(args);
  const Launch a{.x = forward ? args.input : args.grad,
                 .weight = args.weight,
                 .bias = args.bias,
                 .y = args.result,
                 .of_x = strides_of(args, forward ? args.input_size : args.output_size),
                 .of_y = strides_of(args, forward ? args.output_size : args.input_size),
                 .channels = args.channels,
                 .at = geometry,
                 .split = split_of<Tile>(geometry, args.channels, device.sm_count)};
  const auto slices = static_cast<unsigned>(a.split.slices);
  const auto channels = static_cast<unsigned>(a.channels);
  return launch(depthwise_filter_kernel<Tile>,
                Tile::kLast ? dim3((channels + 31) / 32, slices) : dim3(slices, channels),
                Tile::kThreads, shared_bytes<Tile>(a.split.groups), stream, a);
}

}  // namespace
}  // namespace depthwise_filter
}  // namespace my_ops::cuda

using namespace my_ops::cuda::depthwise_fma;

cudaError_t my_ops::cuda::plan_depthwise(const DepthwiseArgs& args, DepthwisePlan* plan) {
  DeviceFacts device;
  if (auto err = current_device(&device); err != cudaSuccess) return err;
  const bool of_weight = args.pass == ConvolutionPass::kGradWeight;
  *plan = of_weight ? plan_for(args, device, kFittedDepthwiseCosts)
                    : depthwise_filter::plan_for(args, device, kFittedDepthwiseCosts);
  return cudaSuccess;
}

cudaError_t my_ops::cuda::depthwise(const DepthwiseArgs& args, const DepthwisePlan& plan,
                                    void* workspace, cudaStream_t stream) {
  if (args.pass != ConvolutionPass::kGradWeight) {
    return depthwise_filter::with_tile(
        args, [&]<typename Tile>(Tile) { return depthwise_filter::run<Tile>(args, stream); });
  }
  const Launch a{.input = args.input,
                 .grad = args.grad,
                 .partial = static_cast<float*>(workspace),
                 .batch = args.batch,
                 .channels = args.channels,
                 .height = args.input_size[0],
                 .width = args.input_size[1],
                 .out_height = args.output_size[0],
                 .out_width = args.output_size[1],
                 .kernel = {args.kernel[0], args.kernel[1]},
                 .padding = {args.padding[0], args.padding[1]},
                 .slices = plan.slices,
                 .segment = segment_of(args)};
  const auto err = with_tile(args, [&]<typename Tile>(Tile) { return run<Tile>(a, stream); });
  if (err != cudaSuccess) return err;
  const int taps = args.kernel[0] * args.kernel[1];
  const int64_t blocks = ceil_div(int64_t{args.channels} * taps, kSumColumns);
  return launch(args.last ? depthwise_sum_kernel<true> : depthwise_sum_kernel<false>, blocks,
                dim3(kSumColumns, kSumRows), 0, stream, a.partial, args.result, a.slices,
                a.channels, taps);
}
