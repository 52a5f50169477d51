// What surrounds the steps of a ragged batch: a block takes a line at a time.
#include <algorithm>

#include "common/launch.cuh"
#include "recurrent/lltm_ragged.h"

namespace my_ops::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int64_t kMaxBlocks = int64_t{1} << 30;

template <typename Ragged>
__global__ void __launch_bounds__(kThreads)
    lltm_ragged_kernel(const __grid_constant__ Ragged args, int64_t lines) {
  for (int64_t line = blockIdx.x; line < lines; line += gridDim.x) {
    ragged_line(args, line, threadIdx.x, kThreads);
  }
}

}  // namespace
}  // namespace my_ops::cuda

template <typename Ragged>
cudaError_t my_ops::cuda::lltm_ragged(const Ragged& args, cudaStream_t stream) {
  const int64_t lines = lines_of(args);
  if (lines == 0 || args.hidden == 0) return cudaSuccess;
  return launch(lltm_ragged_kernel<Ragged>, std::min(lines, kMaxBlocks), kThreads, 0, stream, args,
                lines);
}

#define MY_OPS_LLTM_RAGGED(T)                                                       \
  template cudaError_t my_ops::cuda::lltm_ragged(const LltmRows<T>&, cudaStream_t); \
  template cudaError_t my_ops::cuda::lltm_ragged(const LltmEnds<T>&, cudaStream_t); \
  template cudaError_t my_ops::cuda::lltm_ragged(const LltmEndsBackward<T>&, cudaStream_t);
MY_OPS_LLTM_RAGGED(double)
MY_OPS_LLTM_RAGGED(float)
MY_OPS_LLTM_RAGGED(__half)
MY_OPS_LLTM_RAGGED(__nv_bfloat16)
template cudaError_t my_ops::cuda::lltm_ragged(const LltmShut<double>&, cudaStream_t);
template cudaError_t my_ops::cuda::lltm_ragged(const LltmShut<float>&, cudaStream_t);
