// Launch interface of the float GEMM for few rows or a small output. No torch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "gemm.h"

namespace my_ops::cuda {

// Whether gemm_fp32_skinny takes this problem on the current device, compute capability 9.0, and
// has been measured to beat the other ways there.
bool gemm_fp32_skinny_supported(const GemmArgs<float, float>& args);

// Bytes of scratch for gemm_fp32_skinny on the current device.
size_t gemm_fp32_skinny_workspace(const GemmArgs<float, float>& args);

// GEMM as gemm.h describes it, out of six bf16 products; outputs that these may spoil, Inf and NaN
// are formed again in float arithmetic. Deterministic, stream-ordered, safe to capture in a graph.
// workspace: gemm_fp32_skinny_workspace() bytes, 256-byte aligned, contents irrelevant.
cudaError_t gemm_fp32_skinny(const GemmArgs<float, float>& args, void* workspace,
                             cudaStream_t stream);

}  // namespace my_ops::cuda
