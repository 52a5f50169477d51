// fast_fp32 on CUDA: torch's convolutions of windows, which are not products of what is in memory,
// over one or two dimensions of space, transposed or not, and their gradients. What it does not
// take goes to torch's own, pass by pass. Results have torch's strides.
#pragma once

#include "../include/convolution.h"
#include "binding_cuda.h"
#include "fast_fp32_convolution.h"

namespace my_ops::fast_fp32 {

template <typename Backend>
class Windows {
 public:
  // The output or a gradient.
  static Found compute(const Convolution& given, const Tensor& input, const Tensor& weight) {
    const std::optional<Tensor> other = optional_tensor(given.other);
    cuda::ConvolutionArgs args{};
    if (!fits(given, input, weight, other, &args)) return Left::kOther;
    cuda::ConvolutionPlan plan;
    const Device device(input);
    check_launch(cuda::plan_convolution(args, &plan), kOp);
    if (plan.choice == cuda::ConvolutionChoice::kMemory) return Left::kMemory;
    if (plan.choice != cuda::ConvolutionChoice::kOurs) return Left::kPlan;
    const bool last = is_channels_last(given.pass == Convolution::kGradWeight ? weight : input);
    const Sizes sizes = given.pass == Convolution::kForward     ? output_sizes(given, input, args)
                        : given.pass == Convolution::kGradInput ? sizes_of(input)
                                                                : sizes_of(weight);
    const Tensor result =
        empty_strided(input, sizes, dense_strides(sizes, last), input.scalar_type());
    std::optional<Tensor> grad;
    if (given.pass != Convolution::kForward) {
      grad = is_dense(*other) ? *other : dense(*other, is_channels_last(input));
    } else if (other) {
      args.bias = in<float>(*other);
    }
    args.input = in<float>(input);
    args.grad = grad ? in<float>(*grad) : nullptr;
    if (given.transposed) std::swap(args.input, args.grad);
    args.weight = in<float>(weight);
    args.result = out<float>(result);
    const Tensor workspace = empty(input, {plan.workspace}, ScalarType::Byte);
    check_launch(cuda::convolution(args, plan, workspace.mutable_data_ptr(), device.stream()), kOp);
    count(shape(args));
    return result;
  }

 private:
  static constexpr const char* kOp = "convolution";

  static bool is_dense(const Tensor& t) { return t.is_contiguous() || is_channels_last(t); }

  // Whether torch would accept these operands and the kernels know their layout. Sets args, but for
  // the pointers: those of the convolution whose input's gradient a transposed one is. Its input
  // and output are the other's output and input.
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
    if (input.size(1) != weight.size(given.transposed ? 0 : 1)) return false;
    // Without the channels last in the input, torch lets the weight decide.
    if (!is_channels_last(input) && is_channels_last(weight)) return false;
    args->batch = static_cast<int>(input.size(0));
    args->channels = static_cast<int>(weight.size(1));
    args->outputs = static_cast<int>(weight.size(0));
    args->input_last = args->output_last = is_channels_last(input);
    args->weight_last = is_channels_last(weight);
    for (int d = 0; d < 2; ++d) {
      const int64_t own = d - (4 - rank);  // one dimension is the width
      const int64_t size = own < 0 ? 1 : input.size(own + 2);
      const int64_t kernel = own < 0 ? 1 : weight.size(own + 2);
      const int64_t stride = own < 0 ? 1 : given.stride[own];
      const int64_t padding = own < 0 ? 0 : given.padding[own];
      const int64_t dilation = own < 0 ? 1 : given.dilation[own];
      if (stride < 1 || padding < 0 || dilation < 1) return false;
      if (stride > kMost || padding > kMost || dilation > kMost) return false;
      const int64_t reach = dilation * (kernel - 1), room = size + 2 * padding - reach - 1;
      int64_t image = size, windows = room / stride + 1;
      if (given.transposed) {
        const int64_t added = own < 0 ? 0 : given.output_padding[own];
        if (added < 0 || added >= stride) return false;
        image = (size - 1) * stride - 2 * padding + reach + added + 1, windows = size;
        if (image < 1 || image > kMost) return false;
      } else if (room < 0) {
        return false;
      }
      args->input_size[d] = static_cast<int>(image);
      args->kernel[d] = static_cast<int>(kernel);
      args->stride[d] = static_cast<int>(stride);
      args->padding[d] = static_cast<int>(padding);
      args->dilation[d] = static_cast<int>(dilation);
      args->output_size[d] = static_cast<int>(windows);
    }
    const Sizes output = output_sizes(given, input, *args);
    if (given.pass == Convolution::kGradWeight) {
      args->pass = cuda::ConvolutionPass::kGradWeight;
    } else {
      const bool forward = (given.pass == Convolution::kForward) != given.transposed;
      args->pass = forward ? cuda::ConvolutionPass::kForward : cuda::ConvolutionPass::kGradInput;
    }
    if (given.pass == Convolution::kForward) {
      return !other || (is_ours<Backend>(*other, input) && other->is_contiguous() &&
                        sizes_of(*other) == Sizes{output[1]});
    }
    if (!other || !is_ours<Backend>(*other, input) || sizes_of(*other) != output) return false;
    bool& last = given.transposed ? args->input_last : args->output_last;
    if (is_dense(*other)) last = is_channels_last(*other);
    return true;
  }
  static constexpr int64_t kMost = std::numeric_limits<int>::max() / 2;

  // Of the result of torch's convolution.
  static Sizes output_sizes(const Convolution& given, const Tensor& input,
                            const cuda::ConvolutionArgs& args) {
    Sizes sizes = {args.batch, given.transposed ? args.channels : args.outputs};
    for (int d = static_cast<int>(4 - input.dim()); d < 2; ++d)
      sizes.push_back(given.transposed ? args.input_size[d] : args.output_size[d]);
    return sizes;
  }

  // As a product.
  static Shape shape(const cuda::ConvolutionArgs& args) {
    const int64_t taps = int64_t{args.kernel[0]} * args.kernel[1];
    const int64_t windows = int64_t{args.batch} * args.output_size[0] * args.output_size[1];
    const int64_t points = int64_t{args.batch} * args.input_size[0] * args.input_size[1];
    const int64_t channels = args.channels, outputs = args.outputs;
    switch (args.pass) {
      case cuda::ConvolutionPass::kForward:
        return {kOp, 1, windows, outputs, channels * taps};
      case cuda::ConvolutionPass::kGradInput:
        return {kOp, 1, points, channels, outputs * taps};
      default:
        return {kOp, 1, outputs, channels * taps, windows};
    }
  }
};

}  // namespace my_ops::fast_fp32
