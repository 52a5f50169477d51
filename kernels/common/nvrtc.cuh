// What the kernels use of the headers of C++ and CUDA, for NVRTC, which knows neither.
#pragma once

using int32_t = int;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
using uintptr_t = unsigned long long;

#define INT_MAX 2147483647

namespace std {

template <typename T>
constexpr const T& min(const T& a, const T& b) {
  return b < a ? b : a;
}
template <typename T>
constexpr const T& max(const T& a, const T& b) {
  return a < b ? b : a;
}

template <typename T, T kValue>
struct integral_constant {
  static constexpr T value = kValue;
  constexpr operator T() const { return kValue; }
};

template <typename A, typename B>
inline constexpr bool is_same_v = false;
template <typename A>
inline constexpr bool is_same_v<A, A> = true;

template <bool kFirst, typename A, typename B>
struct conditional {
  using type = A;
};
template <typename A, typename B>
struct conditional<false, A, B> {
  using type = B;
};
template <bool kFirst, typename A, typename B>
using conditional_t = typename conditional<kFirst, A, B>::type;

template <typename T>
struct numeric_limits;
template <>
struct numeric_limits<float> {
  static constexpr float infinity() { return __builtin_bit_cast(float, 0x7F800000); }
};

}  // namespace std

#define __is_same(A, B) (std::is_same_v<A, B>)

#include "ptx/math.cuh"

struct __half {
  uint16_t bits;
};
struct __nv_bfloat16 {
  uint16_t bits;
};
struct alignas(4) __half2 {
  __half x, y;
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};

__device__ __forceinline__ uint16_t __half_as_ushort(__half v) { return v.bits; }
__device__ __forceinline__ float __half2float(__half v) {
  return my_ops::cuda::ptx::cvt_f32_f16(v.bits);
}
__device__ __forceinline__ __half __float2half_rn(float v) {
  return {my_ops::cuda::ptx::cvt_rn_f16(v)};
}
__device__ __forceinline__ float2 __half22float2(__half2 v) {
  return {__half2float(v.x), __half2float(v.y)};
}
__device__ __forceinline__ __half2 __floats2half2_rn(float x, float y) {
  return {__float2half_rn(x), __float2half_rn(y)};
}

__device__ __forceinline__ uint16_t __bfloat16_as_ushort(__nv_bfloat16 v) { return v.bits; }
__device__ __forceinline__ float __bfloat162float(__nv_bfloat16 v) {
  return __uint_as_float(uint32_t{v.bits} << 16);
}
__device__ __forceinline__ __nv_bfloat16 __float2bfloat16_rn(float v) {
  return {static_cast<uint16_t>(my_ops::cuda::ptx::cvt_rn_bf16x2(v, 0.0f))};
}
__device__ __forceinline__ float2 __bfloat1622float2(__nv_bfloat162 v) {
  return {__bfloat162float(v.x), __bfloat162float(v.y)};
}
__device__ __forceinline__ __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  const uint32_t pair = my_ops::cuda::ptx::cvt_rn_bf16x2(x, y);
  return reinterpret_cast<const __nv_bfloat162&>(pair);
}
