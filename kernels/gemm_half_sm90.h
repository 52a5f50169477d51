// Launch interface of the Hopper GEMM of 16-bit operands. No torch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "gemm.h"

namespace my_ops::cuda {

// Whether gemm_half_sm90 takes this problem on the current device, compute capability 9.0, and has
// been measured to be at least as fast as a library call at such sizes. T: __half, __nv_bfloat16.
template <typename T>
bool gemm_half_sm90_supported(const GemmArgs<T, T>& args);

// Bytes of scratch for gemm_half_sm90: for operands that the copy engine cannot read in place.
template <typename T>
size_t gemm_half_sm90_workspace(const GemmArgs<T, T>& args);

// GEMM as gemm.h describes it, summed in float. One rounding at the end of the epilogue; in large
// tiles with an activation or a residual one before these, too.
// Deterministic, stream-ordered, safe to capture in a graph.
// workspace: gemm_half_sm90_workspace() bytes, 256-byte aligned, contents irrelevant before and
// after; not shared with calls on other streams. cudaErrorNotSupported, before any launch, where
// the device is another, a dimension is empty or out_col is not 1.
template <typename T>
cudaError_t gemm_half_sm90(const GemmArgs<T, T>& args, void* workspace, cudaStream_t stream);

}  // namespace my_ops::cuda
