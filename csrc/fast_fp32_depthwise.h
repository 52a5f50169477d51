// Gradients of the weights of torch's depthwise convolutions, over one or two dimensions of space,
// and how convolutions lie in memory. A backend computes what fits:
//
//   grad_depthwise(args, like, place)
//       writes the gradient into the tensor place(); returns why it did not, in which case nothing
//       is written. args is complete but for the result; like is a tensor of the device.
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

// Whether the kernels know the layout of these operands, which torch has checked in forward. Sets
// args, but for the pointers and whether the channels are last.
template <typename Backend>
bool fits_depthwise(const Convolution& given, const Tensor& grad, const Tensor& input,
                    const Tensor& weight, cuda::DepthwiseArgs* args) {
  constexpr int64_t kMost = std::numeric_limits<int>::max() / 2;
  const int64_t rank = input.dim();
  if ((rank != 3 && rank != 4) || weight.dim() != rank || grad.dim() != rank) return false;
  for (const Tensor* t : {&input, &weight, &grad}) {
    if (!is_ours<Backend>(*t, input)) return false;
    for (int64_t d = 0; d < rank; ++d) {
      if (t->size(d) < 1 || t->size(d) > kMost) return false;
    }
  }
  if (!input.is_contiguous() && !is_channels_last(input)) return false;
  args->batch = static_cast<int>(input.size(0));
  args->channels = static_cast<int>(input.size(1));
  if (grad.size(0) != args->batch || grad.size(1) != args->channels) return false;
  for (int d = 0; d < 2; ++d) {
    const int64_t own = d - (4 - rank);  // one dimension is the width
    const int64_t size = own < 0 ? 1 : input.size(own + 2);
    const int64_t kernel = own < 0 ? 1 : weight.size(own + 2);
    const int64_t stride = own < 0 ? 1 : given.stride[own];
    const int64_t padding = own < 0 ? 0 : given.padding[own];
    if (own >= 0 && given.dilation[own] != 1) return false;
    if (stride > kMost || padding < 0 || padding > kMost / 2) return false;
    const int64_t room = size + 2 * padding - kernel;
    if (room < 0 || (own >= 0 && grad.size(own + 2) != room / stride + 1)) return false;
    args->input_size[d] = static_cast<int>(size);
    args->output_size[d] = static_cast<int>(room / stride + 1);
    args->kernel[d] = static_cast<int>(kernel);
    args->stride[d] = static_cast<int>(stride);
    args->padding[d] = static_cast<int>(padding);
  }
  if (rank == 3) args->stride[0] = args->stride[1];
  return true;
}

template <typename Backend>
Found grad_depthwise(const Convolution& given, const Tensor& input, const Tensor& weight) {
  const Tensor other = tensor(given.other);
  cuda::DepthwiseArgs args{};
  if (!fits_depthwise<Backend>(given, other, input, weight, &args)) return Left::kOther;
  args.last = is_channels_last(input);
  const auto lies = [&](const Tensor& t) {
    return args.last ? is_channels_last(t) : t.is_contiguous();
  };
  Tensor grad, result;
  const auto place = [&]() -> const Tensor& {
    grad = lies(other) ? other : dense(other, args.last);
    args.input = in<float>(input), args.grad = in<float>(grad);
    const Sizes sizes = sizes_of(weight);
    result = empty_strided(input, sizes, dense_strides(sizes, is_channels_last(weight)),
                           input.scalar_type());
    args.result = out<float>(result);
    return result;
  };
  if (const std::optional<Left> left = Backend::grad_depthwise(args, input, place)) return *left;
  count(Shape("convolution", args.channels, 1, int64_t{args.kernel[0]} * args.kernel[1],
              int64_t{args.batch} * args.output_size[0] * args.output_size[1]));
  return result;
}

}  // namespace my_ops::fast_fp32
