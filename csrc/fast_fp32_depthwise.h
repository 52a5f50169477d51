// torch's depthwise convolutions, over one or two dimensions of space, and their gradients; and how
// convolutions lie in memory. A backend computes what fits:
//
//   depthwise(args, like, place)
//       writes the output or the gradient into the tensor place(), which completes args; returns
//       why it did not, in which case nothing is written. like is a tensor of the device.
#pragma once

#include <limits>

#include "../include/convolution.h"
#include "fast_fp32.h"

namespace my_ops::fast_fp32 {

// Strides of a dense tensor of these sizes, with the channels last or in their place.
inline Sizes dense_strides(const Sizes& sizes, bool channels_last) {
  if (!channels_last) return contiguous_strides(sizes);
  Sizes strides(sizes.size());
  strides[1] = 1;
  int64_t reach = sizes[1];
  for (size_t d = sizes.size() - 1; d > 1; --d) {
    strides[d] = reach;
    reach *= sizes[d];
  }
  strides[0] = reach;
  return strides;
}

// Results of convolutions have the channels where their input has them.
inline bool is_channels_last(const Tensor& t) {
  return t.dim() > 3 && strides_of(t) == dense_strides(sizes_of(t), true);
}

inline Tensor dense(const Tensor& t, bool channels_last) {
  const Sizes sizes = sizes_of(t);
  Tensor result = empty_strided(t, sizes, dense_strides(sizes, channels_last), t.scalar_type());
  torch::stable::copy_(result, t);
  return result;
}

// Of the result of torch's convolution.
inline Sizes output_sizes(const Tensor& input, const cuda::DepthwiseArgs& args) {
  Sizes sizes = {args.batch, args.channels};
  for (auto d = static_cast<int>(4 - input.dim()); d < 2; ++d) {
    sizes.push_back(args.output_size[d]);
  }
  return sizes;
}

// As products of a single row, one for each channel.
inline Shape depthwise_shape(const cuda::DepthwiseArgs& args) {
  const int64_t taps = int64_t{args.kernel[0]} * args.kernel[1];
  const int64_t windows = int64_t{args.batch} * args.output_size[0] * args.output_size[1];
  const int64_t points = int64_t{args.batch} * args.input_size[0] * args.input_size[1];
  switch (args.pass) {
    case cuda::ConvolutionPass::kForward:
      return {"convolution", args.channels, 1, windows, taps};
    case cuda::ConvolutionPass::kGradInput:
      return {"convolution", args.channels, 1, points, taps};
    default:
      return {"convolution", args.channels, 1, taps, windows};
  }
}

// Whether the kernels know the layout of these operands, which torch checks as well. Sets args, but
// for the pointers.
template <typename Backend>
bool fits_depthwise(const Convolution& given, const Tensor& input, const Tensor& weight,
                    const std::optional<Tensor>& other, cuda::DepthwiseArgs* args) {
  constexpr int64_t kMost = std::numeric_limits<int>::max() / 2;
  const int64_t rank = input.dim();
  if ((rank != 3 && rank != 4) || weight.dim() != rank || given.space != rank - 2) return false;
  for (const Tensor* t : {&input, &weight}) {
    if (!is_ours<Backend>(*t, input)) return false;
    for (int64_t d = 0; d < rank; ++d) {
      if (t->size(d) < 1 || t->size(d) > kMost) return false;
    }
  }
  if (!input.is_contiguous() && !is_channels_last(input)) return false;
  args->pass = given.pass == Convolution::kForward     ? cuda::ConvolutionPass::kForward
               : given.pass == Convolution::kGradInput ? cuda::ConvolutionPass::kGradInput
                                                       : cuda::ConvolutionPass::kGradWeight;
  args->batch = static_cast<int>(input.size(0));
  args->channels = static_cast<int>(input.size(1));
  args->last = is_channels_last(input);
  for (int d = 0; d < 2; ++d) {
    const int64_t own = d - (4 - rank);  // one dimension is the width
    const int64_t size = own < 0 ? 1 : input.size(own + 2);
    const int64_t kernel = own < 0 ? 1 : weight.size(own + 2);
    const int64_t stride = own < 0 ? 1 : given.stride[own];
    const int64_t padding = own < 0 ? 0 : given.padding[own];
    const int64_t dilation = own < 0 ? 1 : given.dilation[own];
    if (stride > kMost || padding < 0 || padding > kMost / 2 || dilation > kMost) return false;
    const int64_t room = size + 2 * padding - dilation * (kernel - 1) - 1;
    if (room < 0) return false;
    args->input_size[d] = static_cast<int>(size);
    args->output_size[d] = static_cast<int>(room / stride + 1);
    args->kernel[d] = static_cast<int>(kernel);
    args->stride[d] = static_cast<int>(stride);
    args->padding[d] = static_cast<int>(padding);
    args->dilation[d] = static_cast<int>(dilation);
  }
  if (rank == 3) args->stride[0] = args->stride[1];
  if (given.pass != Convolution::kGradWeight) {
    // Without the channels last in the input, torch lets the weight decide.
    if (!weight.is_contiguous() || (!args->last && is_channels_last(weight))) return false;
  } else if (args->dilation[0] * args->dilation[1] != 1) {
    return false;
  }
  if (given.pass == Convolution::kForward && !other) return true;
  const bool forward = given.pass == Convolution::kForward;
  return is_ours<Backend>(*other, input) && (!forward || other->is_contiguous()) &&
         sizes_of(*other) == (forward ? Sizes{args->channels} : output_sizes(input, *args));
}

template <typename Backend>
Found convolve_depthwise(const Convolution& given, const Tensor& input, const Tensor& weight) {
  const std::optional<Tensor> other = optional_tensor(given.other);
  cuda::DepthwiseArgs args{};
  if (!fits_depthwise<Backend>(given, input, weight, other, &args)) return Left::kOther;
  const bool forward = given.pass == Convolution::kForward;
  const bool of_weight = given.pass == Convolution::kGradWeight;
  Tensor grad, result;
  const auto place = [&]() -> const Tensor& {
    if (!forward) {
      const bool lies = args.last ? is_channels_last(*other) : other->is_contiguous();
      grad = lies ? *other : dense(*other, args.last);
      args.grad = in<float>(grad);
    } else if (other) {
      args.bias = in<float>(*other);
    }
    args.input = in<float>(input), args.weight = in<float>(weight);
    const Sizes sizes = forward     ? output_sizes(input, args)
                        : of_weight ? sizes_of(weight)
                                    : sizes_of(input);
    const bool last = of_weight ? is_channels_last(weight) : args.last;
    result = empty_strided(input, sizes, dense_strides(sizes, last), input.scalar_type());
    args.result = out<float>(result);
    return result;
  };
  if (const std::optional<Left> left = Backend::depthwise(args, input, place)) return *left;
  count(depthwise_shape(args));
  return result;
}

}  // namespace my_ops::fast_fp32
