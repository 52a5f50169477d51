// Launch interface of the Hopper GEMM: float products from fp16 tensor-core products. No torch.
#pragma once

#include <cuda_runtime_api.h>

#include "gemm.h"

namespace my_ops::cuda {

// Runs a plan of fp32_sm90::plan. As accurate as a float GEMM: the mean of |error| / (|a| @ |b|) is
// at or below that of float FMAs, and several times below it for k above a few hundred.
// The device decides from the data how each call multiplies:
//   three fp16 products per element, or two beside a 16-bit operand, if rows of a and columns of b
//     span less than 2^27 in magnitude and hold at least 96 nonzeros, or none. A few strays per row
//     are allowed, at an absolute error of 2^-50 of the row's maximum, or 2^-39 in 16 bits;
//   six bf16 products beyond that, up to a span of 2^90; small problems take fp32 FMAs instead;
//   the same six products beyond 2^90, with suspect outputs recomputed by fp32 FMAs;
//   FMAs alone, slowly, for Inf and NaN.
// Precision::kHigh takes one fp16 product instead of three if that is faster, without the rule
// about nonzeros. It promotes its sums if the library's TF32 would have shorter ones.
// Deterministic, stream-ordered, safe to capture in a graph.
cudaError_t gemm_fp32_sm90(const GemmArgs<float, float>& args, const GemmPlan& plan,
                           void* workspace, cudaStream_t stream);

}  // namespace my_ops::cuda
