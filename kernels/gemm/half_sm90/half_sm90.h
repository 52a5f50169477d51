// Launch interface of the Hopper GEMM for 16-bit operands. No torch.
#pragma once

#include <cuda_runtime_api.h>

#include "gemm.h"

namespace my_ops::cuda {

// Runs a plan of half_sm90::plan, with sums in float. Results are rounded once, at the end of the
// epilogue; in large tiles with an activation or a residual also before these.
// Deterministic, stream-ordered, safe to capture in a graph. T: __half, __nv_bfloat16.
template <typename T>
cudaError_t gemm_half_sm90(const GemmArgs<T, T>& args, const GemmPlan& plan, void* workspace,
                           cudaStream_t stream);

}  // namespace my_ops::cuda
