// Launch interface of the float GEMM for the tensor cores of compute capability 8.0. No torch.
#pragma once

#include <cuda_runtime_api.h>

#include "gemm.h"

namespace my_ops::cuda {

// Runs a plan of fp32_sm80::plan, for any strides, with the accuracy of a float GEMM. Tiles of 128
// x 128 are recomputed with fp32 FMAs, at about a tenth of the rate, if their operands hold Inf,
// NaN or nonzeros below 2^-102, or if sums overflow or come near the denormals. Deterministic,
// stream-ordered, no workspace.
cudaError_t gemm_fp32_sm80(const GemmArgs<float, float>& args, const GemmPlan& plan,
                           cudaStream_t stream);

}  // namespace my_ops::cuda
