// Launch interface of the float GEMM for few rows or a small output. No torch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "common/device.h"
#include "gemm.h"

namespace my_ops::cuda {

// Bytes of scratch for gemm_fp32_skinny.
size_t gemm_fp32_skinny_workspace(const GemmArgs<float, float>& args, const DeviceFacts& device);

// GEMM as gemm.h describes it, where fp32_skinny::supported holds for the current device: out of
// six bf16 products; outputs that these may spoil, Inf and NaN are formed again in float
// arithmetic. Deterministic, stream-ordered, safe to capture in a graph.
// workspace: gemm_fp32_skinny_workspace() bytes, 256-byte aligned, contents irrelevant.
cudaError_t gemm_fp32_skinny(const GemmArgs<float, float>& args, const DeviceFacts& device,
                             void* workspace, cudaStream_t stream);

}  // namespace my_ops::cuda
