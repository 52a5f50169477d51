// gemm(): the only router of matrix products, from the problem to the kernel that runs it.
#include "gemm.h"

#include "gemm_simt.cuh"

namespace my_ops::cuda {
namespace {

// Below this many multiply-adds a library call costs more than it saves (benchmarks/bench.py gemm).
constexpr int64_t kSimtLimit = int64_t{1} << 21;

}  // namespace
}  // namespace my_ops::cuda

template <typename T, typename Out>
cudaError_t my_ops::cuda::gemm(const GemmArgs<T, Out>& args, cudaStream_t stream) {
  if (args.batch == 0 || args.m == 0 || args.n == 0) return cudaSuccess;
  if (args.batch * args.m * args.n > kSimtLimit / (args.k + 1)) return cudaErrorNotSupported;
  return gemm_simt(args, stream);
}

template cudaError_t my_ops::cuda::gemm(const GemmArgs<double, double>&, cudaStream_t);
template cudaError_t my_ops::cuda::gemm(const GemmArgs<float, float>&, cudaStream_t);
template cudaError_t my_ops::cuda::gemm(const GemmArgs<__half, __half>&, cudaStream_t);
template cudaError_t my_ops::cuda::gemm(const GemmArgs<__half, float>&, cudaStream_t);
template cudaError_t my_ops::cuda::gemm(const GemmArgs<__nv_bfloat16, __nv_bfloat16>&,
                                        cudaStream_t);
template cudaError_t my_ops::cuda::gemm(const GemmArgs<__nv_bfloat16, float>&, cudaStream_t);
