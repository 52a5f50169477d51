// Device code shared by the split and the product: powers of two, and the path that the data need.
#pragma once

#include <cuda_runtime.h>

#include "fp32/split.h"

namespace my_ops::cuda {

inline constexpr int kFp16Shift = 14, kFp16LowBits = 11, kFp16Range = 27;
inline constexpr int kBf16Shift = 30, kBf16Range = 90;

// 2^e for a normal result, -126 <= e <= 127.
__device__ __forceinline__ float pow2(int e) { return __int_as_float((e + 127) << 23); }

// 2^e as two factors, which reach twice as far; below 2^-252 every float becomes zero anyway.
struct Pow2Pair {
  float first, second;
};

__device__ __forceinline__ Pow2Pair pow2_pair(int e) {
  const int half = e >> 1;
  return {pow2(max(half, -126)), pow2(max(e - half, -126))};
}

// What the blocks that split one operand found.
struct SplitStatus {
  const uint8_t* found;  // [count], 16-byte aligned
  int count;

  // This thread's share: the values of many blocks, combined with "or".
  __device__ uint32_t gather() const {
    uint32_t all = 0;
    for (int i = threadIdx.x; i < count / 16; i += blockDim.x) {
      const uint4 word = reinterpret_cast<const uint4*>(found)[i];
      all |= word.x | word.y | word.z | word.w;
    }
    for (int i = count / 16 * 16 + threadIdx.x; i < count; i += blockDim.x) all |= found[i];
    return all;
  }
};

// The path that both operands need; the same in every thread. Contains __syncthreads.
__device__ __forceinline__ SplitPath split_path(const SplitStatus& a, const SplitStatus& b) {
  constexpr uint32_t kEveryByte = 0x01010101;
  const uint32_t found = a.gather() | b.gather();
  const auto any = [&](SplitPath path) {
    return __syncthreads_or(found & static_cast<uint32_t>(path) * kEveryByte);
  };
  if (!__syncthreads_or(found)) return SplitPath::kFp16;
  if (any(SplitPath::kFma)) return SplitPath::kFma;
  return any(SplitPath::kBf16Checked) ? SplitPath::kBf16Checked : SplitPath::kBf16;
}

}  // namespace my_ops::cuda
