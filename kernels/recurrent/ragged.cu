// The work around the steps of a ragged batch: a block takes one line at a time.
#include <algorithm>

#include "common/launch.cuh"
#include "recurrent/ragged.h"

namespace my_ops::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int64_t kMaxBlocks = int64_t{1} << 30;

template <typename Ragged>
__global__ void __launch_bounds__(kThreads)
    ragged_kernel(const __grid_constant__ Ragged args, int64_t lines) {
  for (int64_t line = blockIdx.x; line < lines; line += gridDim.x) {
    ragged_line(args, line, threadIdx.x, kThreads);
  }
}

}  // namespace
}  // namespace my_ops::cuda

template <typename Ragged>
cudaError_t my_ops::cuda::ragged(const Ragged& args, cudaStream_t stream) {
  const int64_t lines = lines_of(args);
  if (lines == 0 || args.hidden == 0) return cudaSuccess;
  return launch(ragged_kernel<Ragged>, std::min(lines, kMaxBlocks), kThreads, 0, stream, args,
                lines);
}

#define MY_OPS_RAGGED(T, Acc)                                                            \
  template cudaError_t my_ops::cuda::ragged(const RaggedRows<T>&, cudaStream_t);         \
  template cudaError_t my_ops::cuda::ragged(const RaggedEnds<T>&, cudaStream_t);         \
  template cudaError_t my_ops::cuda::ragged(const RaggedEndsBackward<T>&, cudaStream_t); \
  template cudaError_t my_ops::cuda::ragged(const RaggedStartBackward<T, Acc>&, cudaStream_t);
MY_OPS_RAGGED(double, double)
MY_OPS_RAGGED(float, float)
MY_OPS_RAGGED(__half, float)
MY_OPS_RAGGED(__nv_bfloat16, float)
template cudaError_t my_ops::cuda::ragged(const RaggedReset&, cudaStream_t);
template cudaError_t my_ops::cuda::ragged(const RaggedShut<double>&, cudaStream_t);
template cudaError_t my_ops::cuda::ragged(const RaggedShut<float>&, cudaStream_t);
