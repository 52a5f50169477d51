// Launch interface of the float GEMM for a wide and a narrow operand. No torch.
#pragma once

#include <cuda_runtime_api.h>

#include "gemm.h"

namespace my_ops::cuda {

// Runs a plan of fp32_narrow::plan, as six bf16 products, five beside an fp16 operand, three beside
// a bf16 one; suspect outputs, Inf and NaN are recomputed with fp32 FMAs. Deterministic,
// stream-ordered, safe to capture in a graph.
cudaError_t gemm_fp32_narrow(const GemmArgs<float, float>& args, const GemmPlan& plan,
                             void* workspace, cudaStream_t stream);

}  // namespace my_ops::cuda
