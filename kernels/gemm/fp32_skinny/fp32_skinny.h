// Launch interface of the float GEMM for few rows or a small output. No torch.
#pragma once

#include <cuda_runtime_api.h>

#include "gemm.h"

namespace my_ops::cuda {

// Runs a plan of fp32_skinny::plan, as six bf16 products; suspect outputs, Inf and NaN are
// recomputed with fp32 FMAs. Deterministic, stream-ordered, safe to capture in a graph.
cudaError_t gemm_fp32_skinny(const GemmArgs<float, float>& args, const GemmPlan& plan,
                             void* workspace, cudaStream_t stream);

}  // namespace my_ops::cuda
