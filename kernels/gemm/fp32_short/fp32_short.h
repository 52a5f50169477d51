// Launch interface of the float GEMM for many rows and a short k. No torch.
#pragma once

#include <cuda_runtime_api.h>

#include "gemm.h"

namespace my_ops::cuda {

// Runs a plan of fp32_short::plan, as three fp16 products. Outputs of rows of a or columns of b
// that hold Inf, NaN or few nonzeros, and those that elements far below the largest may have
// changed, are recomputed with fp32 FMAs. Deterministic, stream-ordered, safe to capture in a
// graph.
cudaError_t gemm_fp32_short(const GemmArgs<float, float>& args, const GemmPlan& plan,
                            void* workspace, cudaStream_t stream);

}  // namespace my_ops::cuda
