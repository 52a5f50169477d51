// fast_fp32 on CUDA: torch's convolutions of windows, which are not products of what is in memory,
// over one or two dimensions of space, and their gradients. What it does not take goes to torch's
// own, pass by pass. Results have torch's strides.
#pragma once

#include "../include/convolution.h"
#include "binding_cuda.h"
#include "fast_fp32_convolution.h"

namespace my_ops::fast_fp32 {

template <typename Backend>
class Windows {
 public:
  // The output or a gradient, or nothing if it stays torch's.
  static std::optional<Tensor> compute(const Convolution& given, const Tensor& input,
                                       const Tensor& weight) {
    const std::optional<Tensor> other = optional_tensor(given.other);
    cuda::ConvolutionArgs args{};
    if (!fits(given, input, weight, other, &args)) {
      count(Left::kOther);
      return std::nullopt;
    }
    bool ours = false;
    const Device device(input);
    check_launch(cuda::plan_convolution(args, &ours), kOp);
    if (!ours) {
      count(Left::kPlan);
      return std::nullopt;
    }
    const Sizes sizes = result_sizes(given, input, weight, args);
    const bool last = given.pass == Convolution::kGradWeight ? args.weight_last : args.input_last;
    const Tensor result =
        empty_strided(input, sizes, dense_strides(sizes, last), input.scalar_type());
    args.input = in<float>(input);
    args.weight = in<float>(weight);
    std::optional<Tensor> grad;
    if (given.pass != Convolution::kForward) {
      grad = is_dense(*other) ? *other : dense(*other, args.output_last);
      args.grad = in<float>(*grad);
    } else if (other) {
      args.bias = in<float>(*other);
    }
    args.result = out<float>(result);
    const Tensor workspace = empty(input, {cuda::convolution_workspace(args)}, ScalarType::Byte);
    check_launch(cuda::convolution(args, workspace.mutable_data_ptr(), device.stream()), kOp);
    count(shape(given, args));
    return result;
  }

 private:
  static constexpr const char* kOp = "convolution";

  static bool is_dense(const Tensor& t) { return t.is_contiguous() || is_channels_last(t); }

  // Whether torch would accept these operands and the kernels know their layout. Sets args, but for
  // the pointers.
  static bool fits(const Convolution& given, const Tensor& input, const Tensor& weight,
                   const std::optional<Tensor>& other, cuda::ConvolutionArgs* args) {
    const int64_t rank = input.dim();
    if ((rank != 3 && rank != 4) || weight.dim() != rank || given.space != rank - 2) return false;
    for (const Tensor* t : {&input, &weight}) {
      if (!is_ours<Backend>(*t, input) || !is_dense(*t)) return false;
      for (int64_t d = 0; d < rank; ++d) {
        if (t->size(d) < 1 || t->size(d) > kMost) return false;
      }
    }
    if (input.size(1) != weight.size(1)) return false;
    // Without the channels last in the input, torch lets the weight decide.
    if (!is_channels_last(input) && is_channels_last(weight)) return false;
    args->batch = static_cast<int>(input.size(0));
    args->channels = static_cast<int>(input.size(1));
    args->outputs = static_cast<int>(weight.size(0));
    args->input_last = is_channels_last(input);
    args->weight_last = is_channels_last(weight);
    Sizes output = {input.size(0), weight.size(0)};
    for (int d = 0; d < 2; ++d) {
      const int64_t own = d - (4 - rank);  // one dimension is the width
      const int64_t image = own < 0 ? 1 : input.size(own + 2);
      const int64_t kernel = own < 0 ? 1 : weight.size(own + 2);
      const int64_t stride = own < 0 ? 1 : given.stride[own];
      const int64_t padding = own < 0 ? 0 : given.padding[own];
      const int64_t dilation = own < 0 ? 1 : given.dilation[own];
      if (stride < 1 || padding < 0 || dilation < 1) return false;
      if (stride > kMost || padding > kMost || dilation > kMost) return false;
      const int64_t room = image + 2 * padding - dilation * (kernel - 1) - 1;
      if (room < 0) return false;
      args->input_size[d] = static_cast<int>(image);
      args->kernel[d] = static_cast<int>(kernel);
      args->stride[d] = static_cast<int>(stride);
      args->padding[d] = static_cast<int>(padding);
      args->dilation[d] = static_cast<int>(dilation);
      args->output_size[d] = static_cast<int>(room / stride + 1);
      if (own >= 0) output.push_back(args->output_size[d]);
    }
    args->output_last = args->input_last;
    if (given.pass == Convolution::kForward) {
      args->pass = cuda::ConvolutionPass::kForward;
      return !other || (is_ours<Backend>(*other, input) && other->is_contiguous() &&
                        sizes_of(*other) == Sizes{weight.size(0)});
    }
    args->pass = given.pass == Convolution::kGradInput ? cuda::ConvolutionPass::kGradInput
                                                       : cuda::ConvolutionPass::kGradWeight;
    if (!other || !is_ours<Backend>(*other, input) || sizes_of(*other) != output) return false;
    if (is_dense(*other)) args->output_last = is_channels_last(*other);
    return true;
  }
  static constexpr int64_t kMost = std::numeric_limits<int>::max() / 2;

  static Sizes result_sizes(const Convolution& given, const Tensor& input, const Tensor& weight,
                            const cuda::ConvolutionArgs& args) {
    if (given.pass == Convolution::kGradInput) return sizes_of(input);
    if (given.pass == Convolution::kGradWeight) return sizes_of(weight);
    Sizes sizes = {args.batch, args.outputs};
    for (int d = static_cast<int>(4 - input.dim()); d < 2; ++d)
      sizes.push_back(args.output_size[d]);
    return sizes;
  }

  // As a product.
  static Shape shape(const Convolution& given, const cuda::ConvolutionArgs& args) {
    const int64_t taps = int64_t{args.kernel[0]} * args.kernel[1];
    const int64_t windows = int64_t{args.batch} * args.output_size[0] * args.output_size[1];
    const int64_t points = int64_t{args.batch} * args.input_size[0] * args.input_size[1];
    const int64_t channels = args.channels, outputs = args.outputs;
    switch (given.pass) {
      case Convolution::kForward:
        return {kOp, 1, windows, outputs, channels * taps};
      case Convolution::kGradInput:
        return {kOp, 1, points, channels, outputs * taps};
      default:
        return {kOp, 1, outputs, channels * taps, windows};
    }
  }
};

}  // namespace my_ops::fast_fp32
