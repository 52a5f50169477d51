// Launch interface of the Hopper GEMM of 16-bit operands. No torch.
#pragma once

#include <cuda_runtime_api.h>

#include "common/device.h"
#include "gemm.h"

namespace my_ops::cuda {

// GEMM as gemm.h describes it, summed in float, where half_sm90::supported holds for the current
// device. One rounding at the end of the epilogue; in large tiles with an activation or a residual
// one before these, too.
// Deterministic, stream-ordered, safe to capture in a graph. T: __half, __nv_bfloat16.
// workspace: half_sm90::workspace() bytes, 256-byte aligned, contents irrelevant before and after;
// not shared with calls on other streams. cudaErrorNotSupported, before any launch, where the
// driver has no tensor maps.
template <typename T>
cudaError_t gemm_half_sm90(const GemmArgs<T, T>& args, const DeviceFacts& device, void* workspace,
                           cudaStream_t stream);

}  // namespace my_ops::cuda
