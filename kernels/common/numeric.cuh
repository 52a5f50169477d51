// Shared by the CUDA kernels: conversions between storage and arithmetic types, small arithmetic.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/ceil_div.h"

namespace my_ops::cuda {

// The arithmetic type of a storage type.
template <typename T>
struct Compute {
  using type = T;
};
template <>
struct Compute<__half> {
  using type = float;
};
template <>
struct Compute<__nv_bfloat16> {
  using type = float;
};
template <typename T>
using compute_t = typename Compute<T>::type;

template <typename T>
__device__ T load(T x) {
  return x;
}
__device__ inline float load(__half x) { return __half2float(x); }
__device__ inline float load(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T, typename C>
__device__ T store(C x) {
  if constexpr (__is_same(T, __half)) {
    return __float2half_rn(x);
  } else if constexpr (__is_same(T, __nv_bfloat16)) {
    return __float2bfloat16_rn(x);
  } else {
    return static_cast<T>(x);
  }
}

__device__ __forceinline__ uint32_t bits(float v) { return __float_as_uint(v); }
__device__ __forceinline__ uint32_t bits(__half v) { return __half_as_ushort(v); }
__device__ __forceinline__ uint32_t bits(__nv_bfloat16 v) { return __bfloat16_as_ushort(v); }

// Two values in 16 bits each, the first in the low half.
template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  if constexpr (__is_same(T, __half)) {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  }
}

template <typename T>
__device__ __forceinline__ float2 unpack(uint32_t pair) {
  if constexpr (__is_same(T, __half)) {
    return __half22float2(reinterpret_cast<const __half2&>(pair));
  } else {
    return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(pair));
  }
}

// Adjacent elements, loaded and stored as one vector.
template <typename T, int kSize>
struct alignas(sizeof(T) * kSize) Vector {
  T at[kSize];
};

// exp(-|x|) and exp(-|x|) - 1. They never overflow, and are accurate for large and small |x|: to 1
// ulp in float, where expf has 2. -|x| = n ln(2) + r, with exp(r) from its series.
__device__ inline float exp_minus_abs(float x) {
  const float z = x != x ? x : fmaxf(-fabsf(x), -104.0f);  // exp is 0 from -104 on
  const float n = rintf(z * 0x1.715476p+0f);
  const float r = fmaf(n, -0x1.7f7d1cp-20f, fmaf(n, -0x1.62e400p-1f, z));
  float p = 1.0f / 5040;
  p = fmaf(p, r, 1.0f / 720);
  p = fmaf(p, r, 1.0f / 120);
  p = fmaf(p, r, 1.0f / 24);
  p = fmaf(p, r, 1.0f / 6);
  p = fmaf(p, r, 0.5f);
  p = fmaf(p, r * r, r);
  // 2^n itself may not be a normal number: 2^(n + 64) is.
  const float scale = __int_as_float((static_cast<int>(n) + 64 + 127) << 23);
  return fmaf(scale, p, scale) * 0x1p-64f;
}
__device__ inline double exp_minus_abs(double x) { return exp(-fabs(x)); }
__device__ inline float expm1_minus_abs(float x) { return expm1f(-fabsf(x)); }
__device__ inline double expm1_minus_abs(double x) { return expm1(-fabs(x)); }

template <typename C>
__device__ C sigmoid(C x) {
  const C e = exp_minus_abs(x);
  return (x < C(0) ? e : C(1)) / (C(1) + e);
}

// 1 - tanh(x)^2 as 4e / (1 + e)^2 with e = exp(-2|x|), which does not cancel for large x.
template <typename C>
__device__ C tanh_slope(C x) {
  const C e = exp_minus_abs(x + x);
  return C(4) * e / ((C(1) + e) * (C(1) + e));
}

__device__ inline float elu(float x) { return x > 0.0f ? x : expm1f(x); }
__device__ inline double elu(double x) { return x > 0.0 ? x : expm1(x); }

}  // namespace my_ops::cuda
