// fast_fp32 on the CPU, where it gains nothing. A product of plain loops replaces ours, so that
// everything about the switch except the GPU's kernels is tested on any machine.
#include "fast_fp32_convolution.h"

namespace my_ops {
namespace {

int refusal = -1;               // Left of every product; -2: out of memory
bool computes_windows = false;  // as zeros, forward only

struct Windows {
  static fast_fp32::Found compute(const fast_fp32::Convolution& given, const Tensor& input,
                                  const Tensor& weight) {
    if (!computes_windows || given.pass != fast_fp32::Convolution::kForward) {
      return fast_fp32::Left::kOther;
    }
    Sizes sizes = sizes_of(input);
    sizes[1] = weight.size(0);
    Tensor result = empty(input, sizes);
    torch::stable::zero_(result);
    fast_fp32::count(fast_fp32::Shape("convolution", 1, sizes[0], sizes[1], input.size(1)));
    return result;
  }
};

struct Cpu {
  static constexpr const char* kKey = "CPU";
  static bool on_device(const Tensor& t) { return t.is_cpu(); }
  using Windows = my_ops::Windows;

  template <typename Place>
  static std::optional<fast_fp32::Left> run(const char*, const Product& p,
                                            const fast_fp32::Added& added,
                                            const fast_fp32::ComplexMatrix*, const Place& place) {
    if (p.m < 8) return fast_fp32::Left::kPlan;
    if (refusal >= 0) return static_cast<fast_fp32::Left>(refusal);
    if (refusal == -2) throw std::runtime_error("out of memory");
    float* const c = out<float>(place());
    const float *a = in<float>(p.a), *b = in<float>(p.b);
    for (int64_t z = 0; z < p.batch; ++z) {
      for (int64_t i = 0; i < p.m; ++i) {
        for (int64_t j = 0; j < p.n; ++j) {
          double sum = added.bias ? added.bias[j] : 0;
          if (added.residual) {
            sum += added.residual[z * added.batch + i * added.row + j * added.col];
          }
          for (int64_t l = 0; l < p.k; ++l) {
            sum += static_cast<double>(a[z * p.a_batch + i * p.a_row + l * p.a_col]) *
                   b[z * p.b_batch + l * p.b_row + j * p.b_col];
          }
          c[z * p.out_batch + i * p.out_row + j * p.out_col] = static_cast<float>(sum);
        }
      }
    }
    return std::nullopt;
  }

  template <typename Place>
  static std::optional<fast_fp32::Left> depthwise(const cuda::DepthwiseArgs& a, const Tensor&,
                                                  const Place& place) {
    if (refusal >= 0) return static_cast<fast_fp32::Left>(refusal);
    if (refusal == -2) throw std::runtime_error("out of memory");
    const Tensor& result = place();
    const bool forward = a.pass == cuda::ConvolutionPass::kForward;
    const auto at = [&](int64_t n, int64_t c, int64_t y, int64_t x, const int (&size)[2]) {
      return a.last ? ((n * size[0] + y) * size[1] + x) * a.channels + c
                    : ((n * a.channels + c) * size[0] + y) * size[1] + x;
    };
    std::vector<double> sums(result.numel());
    for (int n = 0; n < a.batch; ++n) {
      for (int c = 0; c < a.channels; ++c) {
        for (int tap = 0; tap < a.kernel[0] * a.kernel[1]; ++tap) {
          const int64_t of_weight = int64_t{c} * a.kernel[0] * a.kernel[1] + tap;
          for (int p = 0; p < a.output_size[0]; ++p) {
            for (int q = 0; q < a.output_size[1]; ++q) {
              const int y = p * a.stride[0] - a.padding[0] + tap / a.kernel[1] * a.dilation[0];
              const int x = q * a.stride[1] - a.padding[1] + tap % a.kernel[1] * a.dilation[1];
              if (y < 0 || y >= a.input_size[0] || x < 0 || x >= a.input_size[1]) continue;
              const int64_t of_input = at(n, c, y, x, a.input_size);
              const int64_t of_output = at(n, c, p, q, a.output_size);
              if (forward) {
                sums[of_output] += double{a.weight[of_weight]} * a.input[of_input];
              } else if (a.pass == cuda::ConvolutionPass::kGradInput) {
                sums[of_input] += double{a.weight[of_weight]} * a.grad[of_output];
              } else {
                sums[of_weight] += double{a.grad[of_output]} * a.input[of_input];
              }
            }
          }
        }
      }
    }
    const int64_t points = int64_t{a.output_size[0]} * a.output_size[1];
    for (int64_t i = 0; i < result.numel(); ++i) {
      const int64_t c = a.last ? i % a.channels : i / points % a.channels;
      a.result[i] = static_cast<float>(sums[i] + (forward && a.bias ? a.bias[c] : 0.0F));
    }
    return std::nullopt;
  }

  static void write(const fast_fp32::ComplexMatrix& x, const Tensor& to) {
    const int64_t row = x.matrix_row(), col = x.matrix_col();
    for (int64_t z = 0; z < x.batch; ++z) {
      for (int64_t l = 0; l < x.k; ++l) {
        for (int64_t j = 0; j < x.n; ++j) {
          const float* const pair =
              x.b + 2 * (z * x.batch_stride + l * x.row_stride + j * x.col_stride);
          const float re = pair[0], im = x.conjugate_b ? -pair[1] : pair[1];
          const float sign = x.conjugate_a ? -1.0F : 1.0F;
          float* const block = out<float>(to) + 4 * z * x.k * x.n + 2 * l * row + 2 * j * col;
          block[0] = re, block[col] = im;
          block[row] = -sign * im, block[row + col] = sign * re;
        }
      }
    }
  }
};

}  // namespace
}  // namespace my_ops

MY_OPS_FAST_FP32_EXPORT void refuse(int left) { my_ops::refusal = left; }
MY_OPS_FAST_FP32_EXPORT void compute_windows(int on) { my_ops::computes_windows = on; }

MY_OPS_FAST_FP32(my_ops::Cpu)
