// Launch interface of the float GEMM for the tensor cores of compute capability 8.0. No torch.
#pragma once

#include <cuda_runtime_api.h>

#include "gemm.h"

namespace my_ops::cuda {

// Whether the current device gains by it: six bf16 products must cost less than one of floats,
// which holds for 8.0 (16 times the rate) and not for 8.6 and 8.9 (two to four times). Or, from 8.0
// on, whether it has to serve because the vendor library falls short.
bool gemm_fp32_sm80_supported(const GemmArgs<float, float>& args);

// GEMM as gemm.h describes it, as accurate as a float GEMM from k = 96 on, for any strides.
// Tiles of 128 x 128 whose operands hold Inf, NaN or nonzeros below 2^-102, and those with sums
// that overflow or come near the denormals, are formed again in plain float arithmetic, at about a
// tenth of the rate. Deterministic, stream-ordered, no workspace.
cudaError_t gemm_fp32_sm80(const GemmArgs<float, float>& args, cudaStream_t stream);

}  // namespace my_ops::cuda
