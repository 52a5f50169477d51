// Computes torch's convolutions, and their gradients, if the switch is on and ours are faster.
// Those of windows are the backend's (fast_fp32_windows_cuda.h); depthwise ones are in
// fast_fp32_depthwise.h. Those of single points (1 x 1 and the like) are products, and windows of
// one point where their plan leaves them to torch:
//
//   output[n]       = weight @ input[n]           weight [K, C], input[n] [C, points]
//   grad_input[n]   = weight^T @ grad[n]          grad[n] [K, points]
//   grad_weight     = sum over n of grad[n] @ input[n]^T
//
// Strides of the convolution drop points of the input. Where channels come last in memory, the
// transposed products have dense rows for all n, and are one product. Results have torch's strides.
#pragma once

#include <array>

#include "fast_fp32.h"
#include "fast_fp32_depthwise.h"

namespace my_ops::fast_fp32 {

inline Tensor transposed(const Tensor& t) {
  return as_strided(t, {t.size(0), t.size(2), t.size(1)}, {t.stride(0), t.stride(2), t.stride(1)});
}

// t [n, channels, ...] as [n, channels, points], or nothing if its strides do not allow that.
inline std::optional<Tensor> points(const Tensor& t) {
  int64_t count = 1, stride = 1;
  for (int64_t d = t.dim() - 1; d > 1; --d) {
    if (t.size(d) == 1) continue;
    if (count == 1) stride = t.stride(d);
    if (t.stride(d) != stride * count) return std::nullopt;
    count *= t.size(d);
  }
  return as_strided(t, {t.size(0), t.size(1), count}, {t.stride(0), t.stride(1), stride});
}

template <typename Backend>
class PointConvolutions {
 public:
  // The convolution's output. Whoever asks has seen that all of the kernel's sizes are 1, and that
  // there is no padding and one group.
  static Found forward(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                       const int64_t* stride) {
    const bool last = is_channels_last(input);
    if (!fits(input, weight)) return Left::kOther;
    const Tensor kept = without_dropped(input, stride, last);
    const std::optional<Tensor> x = points(kept);
    if (!x) return Left::kOther;
    const Tensor w = matrices(weight, kept.size(0));
    std::optional<Tensor> added = bias;
    if (bias && !last) {
      if (bias->dim() != 1) return Left::kOther;
      added = as_strided(*bias, {bias->size(0), 1}, {bias->stride(0), 1});
    }
    const Found y = last ? take(added, transposed(*x), transposed(w)) : take(added, w, *x);
    return shaped(y, sizes_with(kept, weight.size(0)), last);
  }

  static Found grad_input(const Tensor& grad, const Tensor& input, const Tensor& weight,
                          const int64_t* stride) {
    const bool last = is_channels_last(input);
    if (!fits(input, weight) || !fits_output(grad, input, weight, stride)) return Left::kOther;
    const std::optional<Tensor> g = points(grad);
    if (!g) return Left::kOther;
    const Tensor w = matrices(weight, grad.size(0));
    const Found result =
        last ? take(std::nullopt, transposed(*g), w) : take(std::nullopt, transposed(w), *g);
    const Found found = shaped(result, sizes_with(grad, input.size(1)), last);
    const Tensor* const kept = std::get_if<Tensor>(&found);
    if (!kept || !drops(input, stride)) return found;
    const Sizes sizes = sizes_of(input);
    Tensor all = empty_strided(input, sizes, dense_strides(sizes, last), input.scalar_type());
    torch::stable::zero_(all);
    Tensor places = without_dropped_view(all, stride);
    torch::stable::copy_(places, *kept);
    return all;
  }

  static Found grad_weight(const Tensor& grad, const Tensor& input, const Tensor& weight,
                           const int64_t* stride) {
    if (!fits(input, weight) || !fits_output(grad, input, weight, stride)) return Left::kOther;
    const Tensor kept = without_dropped(input, stride, is_channels_last(input));
    std::optional<Tensor> x = points(kept), g = points(grad);
    if (!x || !g) return Left::kOther;
    const int64_t k = weight.size(0), c = weight.size(1), count = x->size(2);
    // A product for each n writes n k c numbers, which are then summed; one product over all n
    // needs the channels last, for which at most n points (k + c) are moved.
    if (x->size(0) > 1 && count * (k + c) < k * c) {
      if (!rows(*x)) x = points(dense(kept, true));
      if (!rows(*g)) g = points(dense(grad, true));
    }
    Found found;
    if (rows(*x) && rows(*g)) {
      const int64_t all = x->size(0) * count;
      const Tensor left = as_strided(*g, {k, all}, {g->stride(1), g->stride(2)});
      const Tensor right = as_strided(*x, {all, c}, {x->stride(2), x->stride(1)});
      found = Products<Backend>::take_as(kOp, 2, std::nullopt, left, right, std::nullopt);
    } else {
      found = take(std::nullopt, *g, transposed(*x));
      if (const Tensor* const of_each = std::get_if<Tensor>(&found)) {
        found = aten("aten::sum", "dim_IntList", *of_each, std::optional(Sizes{0}), false,
                     std::optional<ScalarType>());
      }
    }
    return shaped(found, sizes_of(weight), is_channels_last(weight));
  }

 private:
  static constexpr const char* kOp = "convolution";

  static Found take(const std::optional<Tensor>& added, const Tensor& a, const Tensor& b) {
    return Products<Backend>::take_as(kOp, 3, added, a, b, std::nullopt);
  }

  // What views and the strides of results rely on; the products check the rest.
  static bool fits(const Tensor& input, const Tensor& weight) {
    const bool known_strides = input.dim() == 3 || is_channels_last(input) ||
                               (input.is_contiguous() && !is_channels_last(weight));
    return input.dim() == weight.dim() && input.dim() > 2 && input.size(1) == weight.size(1) &&
           known_strides && storage_bytes(input).suffices() && storage_bytes(weight).suffices();
  }

  static bool fits_output(const Tensor& grad, const Tensor& input, const Tensor& weight,
                          const int64_t* stride) {
    Sizes sizes = sizes_with(input, weight.size(0));
    for (size_t d = 2; d < sizes.size(); ++d) sizes[d] = (sizes[d] - 1) / stride[d - 2] + 1;
    return sizes_of(grad) == sizes && storage_bytes(grad).suffices();
  }

  static bool drops(const Tensor& input, const int64_t* stride) {
    for (int64_t d = 2; d < input.dim(); ++d) {
      if (stride[d - 2] > 1 && input.size(d) > 1) return true;
    }
    return false;
  }

  static Tensor without_dropped_view(const Tensor& t, const int64_t* stride) {
    Sizes sizes = sizes_of(t), strides = strides_of(t);
    for (size_t d = 2; d < sizes.size(); ++d) {
      sizes[d] = (sizes[d] - 1) / stride[d - 2] + 1;
      strides[d] *= stride[d - 2];
    }
    return as_strided(t, sizes, strides);
  }

  // The points of the input that the convolution reads.
  static Tensor without_dropped(const Tensor& input, const int64_t* stride, bool last) {
    return drops(input, stride) ? dense(without_dropped_view(input, stride), last) : input;
  }

  static Sizes sizes_with(const Tensor& t, int64_t channels) {
    Sizes sizes = sizes_of(t);
    sizes[1] = channels;
    return sizes;
  }

  // The weight as [n, K, C], the same matrix n times.
  static Tensor matrices(const Tensor& weight, int64_t n) {
    return as_strided(weight, {n, weight.size(0), weight.size(1)},
                      {0, weight.stride(0), weight.stride(1)});
  }

  // Whether the points of all n have one stride.
  static bool rows(const Tensor& t) {
    return t.size(0) == 1 || t.stride(0) == t.size(2) * t.stride(2);
  }

  static Found shaped(const Found& found, const Sizes& sizes, bool last) {
    const Tensor* const result = std::get_if<Tensor>(&found);
    if (!result) return found;
    return as_strided(*result, sizes, dense_strides(sizes, last));
  }
};

template <typename Backend>
Found convolve_points(const Convolution& given, const Tensor& input, const Tensor& weight) {
  using Convolutions = PointConvolutions<Backend>;
  switch (given.pass) {
    case Convolution::kForward:
      return Convolutions::forward(input, weight, optional_tensor(given.other), given.stride);
    case Convolution::kGradInput:
      return Convolutions::grad_input(tensor(given.other), input, weight, given.stride);
    case Convolution::kGradWeight:
      return Convolutions::grad_weight(tensor(given.other), input, weight, given.stride);
  }
  return Left::kOther;
}

template <typename Backend>
Found compute(const Convolution& given, const Tensor& input, const Tensor& weight) {
  if (given.depthwise) return convolve_depthwise<Backend>(given, input, weight);
  Found found = Left::kPlan;
  if (given.of_points) found = convolve_points<Backend>(given, input, weight);
  const Left* const why = std::get_if<Left>(&found);
  if (why && *why == Left::kPlan) {
    const Found of_windows = Backend::Windows::compute(given, input, weight);
    if (!given.of_points || std::holds_alternative<Tensor>(of_windows)) return of_windows;
  }
  return found;
}

// For the kernels in C++, which own their tensors. *result is the output, or the gradient of the
// input or of the weight; otherwise it is null.
template <typename Backend>
void convolve(const Convolution& given, AtenTensorHandle* result) {
  try {
    const Tensor input = tensor(given.input), weight = tensor(given.weight);
    if (given.rounds) return count(Left::kConvolution);
    const Found found = compute<Backend>(given, input, weight);
    if (const Tensor* const tensor = std::get_if<Tensor>(&found)) {
      *result = new_handle(tensor->get());
    } else {
      count(std::get<Left>(found));
    }
  } catch (const std::exception&) {  // torch's may need less memory, or raises its own error
    count(Left::kFailed);
  }
}

}  // namespace my_ops::fast_fp32
