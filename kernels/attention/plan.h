// The sizes of attention_sm90.cu's blocks, and its workspace. Host and device.
#pragma once

#include <cstdint>

#include "attention.h"

namespace my_ops::cuda::attention_sm90 {

constexpr int kRows = 128;  // of a block of the stationary operand, and of a scale
constexpr int kMaxDim = 128, kMaxHeads = 65535;  // of a grid

constexpr int64_t padded(int64_t rows) { return (rows + kRows - 1) / kRows * kRows; }
// Of a head's parts: whole boxes of 64.
constexpr int width(int dim) { return dim <= 64 ? 64 : kMaxDim; }

}  // namespace my_ops::cuda::attention_sm90
