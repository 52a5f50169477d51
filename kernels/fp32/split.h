// Splits matrices into 16-bit parts whose products a tensor core can add with float accuracy, also
// a 16-bit one beside a float one; split_plan.h says how. Only fp32_sm90.cu uses this.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "fp32/split_plan.h"

namespace my_ops::cuda {

// fp16 parts, exponents and status of both operands, in one launch, or two if an operand is kSlices
// or both are kSampled.
cudaError_t split_fp16(const Split& split, cudaStream_t stream);

// bf16 parts of both operands, if the status says kBf16; otherwise does nothing.
cudaError_t split_bf16(const Split& split, int sm_count, cudaStream_t stream);

// The status of operand i in one byte.
cudaError_t combine_status(const Split& split, int i, uint8_t* status, cudaStream_t stream);

}  // namespace my_ops::cuda
