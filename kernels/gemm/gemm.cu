// plan_gemm() for the current device, and gemm(), which runs a plan.
#include "gemm.h"

#include "common/launch.cuh"
#include "gemm/epilogue.cuh"
#include "gemm/fp32_narrow/fp32_narrow.h"
#include "gemm/fp32_short/fp32_short.h"
#include "gemm/fp32_skinny/fp32_skinny.h"
#include "gemm/fp32_sm80/fp32_sm80.h"
#include "gemm/fp32_sm90/fp32_sm90.h"
#include "gemm/half_sm90/half_sm90.h"
#include "gemm/plan.h"
#include "gemm/small/small.cuh"

namespace my_ops::cuda {
namespace {

constexpr int kEpilogueThreads = 128;
constexpr int kEpilogueVector = 8;  // 16 bytes of the output per thread

// Bound by memory: one vector of each operand per thread.
template <Activation kActivation, int kSize, typename P, typename T>
__global__ void __launch_bounds__(kEpilogueThreads)
    linear_epilogue_kernel(const P* product, const T* bias, const T* residual, T* out,
                           int64_t vectors, int64_t n) {
  using Results = Vector<T, kSize>;
  const int64_t at = int64_t{blockIdx.x} * kEpilogueThreads + threadIdx.x;
  if (at >= vectors) return;
  const auto sums = reinterpret_cast<const Vector<P, kSize>*>(product)[at];
  Results added{}, result;
  if (residual) added = reinterpret_cast<const Results*>(residual)[at];
  float y[kSize];
#pragma unroll
  for (int i = 0; i < kSize; ++i) y[i] = load(sums.at[i]);
  finish_vector(y, FastActivate<kActivation>{}, bias ? bias + at * kSize % n : nullptr, added,
                residual != nullptr);
#pragma unroll
  for (int i = 0; i < kSize; ++i) result.at[i] = store<T>(y[i]);
  reinterpret_cast<Results*>(out)[at] = result;
}

}  // namespace
}  // namespace my_ops::cuda

template <typename T, typename Out>
cudaError_t my_ops::cuda::plan_gemm(const GemmProblem& problem, GemmPlan* plan) {
  DeviceFacts device;
  if (auto err = current_device(&device); err != cudaSuccess) return err;
  *plan = plan_gemm<T, Out>(problem, device);
  return cudaSuccess;
}

template <typename T, typename Out>
cudaError_t my_ops::cuda::gemm(const GemmArgs<T, Out>& args, const GemmPlan& plan, void* workspace,
                               cudaStream_t stream) {
  if (plan.kernel == GemmKernel::kNone) return cudaSuccess;
  if (plan.kernel == GemmKernel::kSmall) return gemm_small(args, stream);
  if constexpr (kIsFp32<T, Out>) {
    switch (plan.kernel) {
      case GemmKernel::kFp32Skinny:
        return gemm_fp32_skinny(args, plan, workspace, stream);
      case GemmKernel::kFp32Narrow:
        return gemm_fp32_narrow(args, plan, workspace, stream);
      case GemmKernel::kFp32Short:
        return gemm_fp32_short(args, plan, workspace, stream);
      case GemmKernel::kFp32Sm90:
        return gemm_fp32_sm90(args, plan, workspace, stream);
      case GemmKernel::kFp32Sm80:
        return gemm_fp32_sm80(args, plan, stream);
      default:
        break;
    }
  }
  if constexpr (kIsHalf<T, Out>) {
    if (plan.kernel == GemmKernel::kHalfSm90) return gemm_half_sm90(args, plan, workspace, stream);
  }
  return cudaErrorInvalidValue;  // a plan for other types or for the library
}

template <typename P, typename T>
cudaError_t my_ops::cuda::linear_epilogue(const P* product, const T* bias, const T* residual,
                                          T* out, int64_t outputs, int64_t n, Activation activation,
                                          cudaStream_t stream) {
  if (outputs == 0) return cudaSuccess;
  const auto aligned = [](const auto* p) {
    return reinterpret_cast<uintptr_t>(p) % (sizeof(*p) * kEpilogueVector) == 0;
  };
  const auto run = [&]<Activation kActivation, int kSize>() {
    const int64_t vectors = outputs / kSize;
    return launch(linear_epilogue_kernel<kActivation, kSize, P, T>,
                  ceil_div(vectors, kEpilogueThreads), kEpilogueThreads, 0, stream, product, bias,
                  residual, out, vectors, n);
  };
  const bool whole =
      n % kEpilogueVector == 0 && aligned(product) && aligned(residual) && aligned(out);
  return dispatch_activation(activation, [&]<Activation kActivation>() {
    return whole ? run.template operator()<kActivation, kEpilogueVector>()
                 : run.template operator()<kActivation, 1>();
  });
}

#define MY_OPS_LINEAR_EPILOGUE(P, T)                                                            \
  template cudaError_t my_ops::cuda::linear_epilogue(const P*, const T*, const T*, T*, int64_t, \
                                                     int64_t, Activation, cudaStream_t);
MY_OPS_LINEAR_EPILOGUE(float, __half)
MY_OPS_LINEAR_EPILOGUE(float, __nv_bfloat16)
MY_OPS_LINEAR_EPILOGUE(__half, __half)
MY_OPS_LINEAR_EPILOGUE(__nv_bfloat16, __nv_bfloat16)

#define MY_OPS_GEMM(T, Out)                                                                \
  template cudaError_t my_ops::cuda::plan_gemm<T, Out>(const GemmProblem&, GemmPlan*);     \
  template cudaError_t my_ops::cuda::gemm(const GemmArgs<T, Out>&, const GemmPlan&, void*, \
                                          cudaStream_t);

MY_OPS_GEMM(double, double)
MY_OPS_GEMM(float, float)
MY_OPS_GEMM(__half, __half)
MY_OPS_GEMM(__half, float)
MY_OPS_GEMM(__nv_bfloat16, __nv_bfloat16)
MY_OPS_GEMM(__nv_bfloat16, float)
