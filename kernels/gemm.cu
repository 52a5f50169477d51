// gemm(): the only router of matrix products, from the problem to the kernel that runs it.
//   float on Hopper, few rows, small outputs    gemm_fp32_skinny: six bf16 products in one pass
//   float on Hopper, from about 600 cubed on    gemm_fp32_sm90: three fp16 products, split before
//   float on compute capability 8.0, large      gemm_fp32_sm80: three TF32 products
//   16 bits on Hopper, where it is faster       gemm_half_sm90: tensor cores, epilogue on the sums
//   small problems with an epilogue             gemm_simt
//   the rest                                    the caller's vendor library
#include "gemm.h"

#include <type_traits>

#include "gemm_fp32_skinny.h"
#include "gemm_fp32_sm80.h"
#include "gemm_half_sm90.h"
#include "gemm_simt.cuh"
#include "gemm_sm90.h"

namespace my_ops::cuda {
namespace {

// Up to this many multiply-adds, with few rows and otherwise, gemm_simt is faster than a library's
// product and the epilogue behind it, while k is short: a thread walks all of it, 0.08 us each.
constexpr int64_t kFewRows = 32;
constexpr int64_t kSimtLimitFewRows = int64_t{1} << 20;
constexpr int64_t kSimtLimit = int64_t{1} << 15;
constexpr int64_t kSimtMaxK = 32;

template <typename T, typename Out>
constexpr bool kIsFp32 = std::is_same_v<T, float> && std::is_same_v<Out, float>;

template <typename T, typename Out>
constexpr bool kIsHalf = std::is_same_v<T, Out> && sizeof(T) == 2;

constexpr int kEpilogueThreads = 256;

template <Activation kActivation, typename T>
__global__ void __launch_bounds__(kEpilogueThreads)
    linear_epilogue_kernel(const float* product, const T* bias, const T* residual, T* out,
                           int64_t m, int64_t n) {
  const int64_t at = int64_t{blockIdx.x} * kEpilogueThreads + threadIdx.x;
  if (at >= m * n) return;
  const float sum = bias ? product[at] + load(bias[at % n]) : product[at];
  const float y = Activate<kActivation>{}(sum);
  out[at] = store<T>(residual ? y + load(residual[at]) : y);
}

}  // namespace
}  // namespace my_ops::cuda

template <typename T, typename Out>
int64_t my_ops::cuda::gemm_workspace(const GemmArgs<T, Out>& args) {
  if constexpr (kIsFp32<T, Out>) {
    if (gemm_fp32_skinny_supported(args)) {
      return static_cast<int64_t>(gemm_fp32_skinny_workspace(args));
    }
    if (gemm_fp32_sm90_supported(args)) {
      return static_cast<int64_t>(gemm_fp32_sm90_workspace(args));
    }
  }
  if constexpr (kIsHalf<T, Out>) {
    if (gemm_half_sm90_supported(args)) {
      return static_cast<int64_t>(gemm_half_sm90_workspace(args));
    }
  }
  return 0;
}

template <typename T, typename Out>
cudaError_t my_ops::cuda::gemm(const GemmArgs<T, Out>& args, void* workspace, cudaStream_t stream) {
  if (args.batch == 0 || args.m == 0 || args.n == 0) return cudaSuccess;
  if constexpr (kIsFp32<T, Out>) {
    if (gemm_fp32_skinny_supported(args)) return gemm_fp32_skinny(args, workspace, stream);
    if (gemm_fp32_sm90_supported(args)) return gemm_fp32_sm90(args, workspace, stream);
    if (gemm_fp32_sm80_supported(args)) return gemm_fp32_sm80(args, stream);
  }
  if constexpr (kIsHalf<T, Out>) {
    if (gemm_half_sm90_supported(args)) return gemm_half_sm90(args, workspace, stream);
  }
  const int64_t limit = args.m <= kFewRows ? kSimtLimitFewRows : kSimtLimit;
  if (args.batch * args.m * args.n > limit / (args.k + 1)) return cudaErrorNotSupported;
  const bool fused = args.activation != Activation::kNone || args.residual;
  if (!fused || args.k > kSimtMaxK) return cudaErrorNotSupported;
  return gemm_simt(args, stream);
}

template <typename T>
cudaError_t my_ops::cuda::linear_epilogue(const float* product, const T* bias, const T* residual,
                                          T* out, int64_t m, int64_t n, Activation activation,
                                          cudaStream_t stream) {
  if (m == 0 || n == 0) return cudaSuccess;
  const auto blocks = static_cast<unsigned>(ceil_div(m * n, kEpilogueThreads));
  return dispatch_activation(activation, [&]<Activation kActivation>() {
    linear_epilogue_kernel<kActivation>
        <<<blocks, kEpilogueThreads, 0, stream>>>(product, bias, residual, out, m, n);
    return cudaGetLastError();
  });
}

#define MY_OPS_LINEAR_EPILOGUE(T)                                                          \
  template cudaError_t my_ops::cuda::linear_epilogue(const float*, const T*, const T*, T*, \
                                                     int64_t, int64_t, Activation, cudaStream_t);
MY_OPS_LINEAR_EPILOGUE(__half)
MY_OPS_LINEAR_EPILOGUE(__nv_bfloat16)

#define MY_OPS_GEMM(T, Out)                                               \
  template int64_t my_ops::cuda::gemm_workspace(const GemmArgs<T, Out>&); \
  template cudaError_t my_ops::cuda::gemm(const GemmArgs<T, Out>&, void*, cudaStream_t);

MY_OPS_GEMM(double, double)
MY_OPS_GEMM(float, float)
MY_OPS_GEMM(__half, __half)
MY_OPS_GEMM(__half, float)
MY_OPS_GEMM(__nv_bfloat16, __nv_bfloat16)
MY_OPS_GEMM(__nv_bfloat16, float)
