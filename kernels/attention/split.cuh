// The pass before the products: every operand as two fp16 parts, padded with zeros, and scaled by a
// power of two per block of rows or, where the product sums over rows alone, per column of a block.
// For the gradient of the output also the terms of each row.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "attention.h"
#include "attention/plan.h"

namespace my_ops::cuda::attention_sm90 {
namespace {

constexpr float kLog2eFloat = 1.44269504088896340736f;
constexpr double kLog2e = 1.44269504088896340736, kLn2 = 0.693147180559945309417;

enum SplitKind { kByBlock, kByColumn, kGradient };  // the last: by block, of the output's gradient

struct SplitArgs {
  Heads<const float> x;
  __half* parts;   // [2][heads][padded][kD]
  float* inverse;  // what undoes the scale: [heads][padded / kRows], kByColumn: [..][..][kD]
  int heads, length, padded, dim, head_count;
  // kGradient only:
  Heads<const float> o;
  const float* lse;  // [heads][lse_stride], natural
  int lse_stride;
  float* lse2;   // [heads][padded], in units of log 2
  float* delta;  // [heads][padded]
};

// 2^(14 - exponent of max), and its inverse.
__device__ __forceinline__ float2 power_scale(float max) {
  int e = __float_as_int(max) >> 23;
  e = min(max == 0.0f ? 127 : e, 254);
  e = ::max(e, 15);
  return {__int_as_float((268 - e) << 23), __int_as_float((e - 14) << 23)};
}

__device__ __forceinline__ void split_pair(float a, float b, uint32_t& high, uint32_t& low) {
  const __half2 h = __floats2half2_rn(a, b);
  const float2 f = __half22float2(h);
  const __half2 l = __floats2half2_rn(a - f.x, b - f.y);
  high = reinterpret_cast<const uint32_t&>(h);
  low = reinterpret_cast<const uint32_t&>(l);
}

template <int kD, SplitKind kKind>
__global__ void __launch_bounds__(256) split_kernel(const SplitArgs p) {
  constexpr int kPerRow = kD / 4, kSteps = kRows * kPerRow / 256, kRowStep = 256 / kPerRow;
  const int head = blockIdx.y, row0 = blockIdx.x * kRows;
  const int column = threadIdx.x % kPerRow * 4, row_in = threadIdx.x / kPerRow;
  const float* x = p.x.x + head / p.head_count * p.x.batch + head % p.head_count * p.x.head;
  const float* o =
      kKind == kGradient
          ? p.o.x + head / p.head_count * p.o.batch + head % p.head_count * p.o.head
          : nullptr;
  float4 v[kSteps];
  float most[4] = {};  // of a column
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const int row = row0 + row_in + i * kRowStep;
    v[i] = {0.0f, 0.0f, 0.0f, 0.0f};
    if (row < p.length && column < p.dim) {
      v[i] = *reinterpret_cast<const float4*>(x + row * p.x.row + column);
    }
    const float* f = reinterpret_cast<const float*>(&v[i]);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float a = fabsf(f[c]);
      if (a < INFINITY) most[c] = fmaxf(most[c], a);
    }
  }
  float scale[4];
  const int64_t block = int64_t{head} * (p.padded / kRows) + blockIdx.x;
  if constexpr (kKind == kByColumn) {
    __shared__ float4 warp_most[8][kPerRow];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int d = 16; d >= kPerRow; d /= 2) {
#pragma unroll
      for (float& m : most) m = fmaxf(m, __shfl_xor_sync(~0u, m, d));
    }
    if (lane < kPerRow) warp_most[warp][lane] = {most[0], most[1], most[2], most[3]};
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float4 m = warp_most[i][column / 4];
      most[0] = fmaxf(most[0], m.x), most[1] = fmaxf(most[1], m.y);
      most[2] = fmaxf(most[2], m.z), most[3] = fmaxf(most[3], m.w);
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float2 both = power_scale(most[c]);
      scale[c] = both.x;
      if (row_in == 0) p.inverse[block * kD + column + c] = both.y;
    }
  } else {
    __shared__ float warp_most[8];
    float all = fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3]));
#pragma unroll
    for (int d = 16; d; d /= 2) all = fmaxf(all, __shfl_xor_sync(~0u, all, d));
    if (threadIdx.x % 32 == 0) warp_most[threadIdx.x / 32] = all;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 8; ++i) all = fmaxf(all, warp_most[i]);
    const float2 both = power_scale(all);
    scale[0] = scale[1] = scale[2] = scale[3] = both.x;
    if (threadIdx.x == 0) p.inverse[block] = both.y;
  }
  const int64_t part = int64_t{p.heads} * p.padded * kD;
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const int row = row0 + row_in + i * kRowStep;
    uint2 high, low;
    split_pair(v[i].x * scale[0], v[i].y * scale[1], high.x, low.x);
    split_pair(v[i].z * scale[2], v[i].w * scale[3], high.y, low.y);
    __half* to = p.parts + (int64_t{head} * p.padded + row) * kD + column;
    *reinterpret_cast<uint2*>(to) = high;
    *reinterpret_cast<uint2*>(to + part) = low;
    if constexpr (kKind == kGradient) {
      float sum = 0.0f;
      if (row < p.length && column < p.dim) {
        const float4 y = *reinterpret_cast<const float4*>(o + row * p.o.row + column);
        sum = fmaf(v[i].x, y.x, fmaf(v[i].y, y.y, fmaf(v[i].z, y.z, v[i].w * y.w)));
      }
#pragma unroll
      for (int d = kPerRow / 2; d; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
      if (column == 0) {
        p.delta[int64_t{head} * p.padded + row] = sum;
        // Infinite, of either sign, for a row without keys: its weights are 0.
        const float lse = row < p.length ? p.lse[int64_t{head} * p.lse_stride + row] : INFINITY;
        p.lse2[int64_t{head} * p.padded + row] = 
            isinf(lse) ? INFINITY : static_cast<float>(lse * kLog2e);
      }
    }
  }
}

}  // namespace
}  // namespace my_ops::cuda::attention_sm90
