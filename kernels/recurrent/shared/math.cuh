// The functions of cells in the persistent kernels, for activations of type T.
//
// float: within 1.2e-7 of the true value, and within a few units in the last place near zero. There
// the differences of exponentials would cancel, and polynomials replace them (both sides are
// computed, without a branch). fp16 omits the polynomials. bf16 uses the hardware's tanh, accurate
// to 2^-11.
#pragma once

#include "common/numeric.cuh"
#include "ptx/math.cuh"
#include "ptx/registers.cuh"

namespace my_ops::cuda {

template <typename T>
struct PersistentMath {
  static constexpr bool kHardwareTanh = __is_same(T, __nv_bfloat16);
  struct Tanh {
    float value, slope;
  };

  __device__ __forceinline__ static float sigmoid(float z) {
    if constexpr (kHardwareTanh) return fmaf(0.5f, ptx::tanh_approx(0.5f * z), 0.5f);
    return ptx::rcp_approx_ftz(1.0f + exp_flushed(-z));  // 0 for an infinite divisor
  }

  __device__ __forceinline__ static float tanh(float v) {
    if constexpr (kHardwareTanh) return ptx::tanh_approx(v);
    return tanh_from(v, tanh_remainder(v));
  }

  // The slope is 1 - t^2 without the difference, which would cancel for large v.
  __device__ __forceinline__ static Tanh tanh_with_slope(float v) {
    const float r = tanh_remainder(v);
    return {tanh_from(v, r), fmaf(-4.0f * r, r, 4.0f * r)};
  }

  __device__ __forceinline__ static float elu(float z) {
    const float below = sizeof(T) == 4 ? expm1_negative(z) : exp_flushed(z) - 1.0f;
    return z <= 0.0f ? below : z;  // NaN passes through
  }

  __device__ __forceinline__ static float elu_slope(float value) {
    return !(value <= 0.0f) ? 1.0f : value + 1.0f;
  }

  __device__ __forceinline__ static float exp(float x) { return expf(x); }
  __device__ __forceinline__ static float expm1(float x) { return expm1f(x); }
  __device__ __forceinline__ static float log(float x) { return logf(x); }
  __device__ __forceinline__ static float log1p(float x) { return log1pf(x); }
  __device__ __forceinline__ static float sqrt(float x) { return sqrtf(x); }
  __device__ __forceinline__ static float softplus(float x) {
    const float sum = fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x)));
    return x > 20.0f || x != x ? x : sum;  // as torch's
  }

 private:
  // Flushes subnormal results to zero, which changes nothing: 1 is added or subtracted.
  __device__ __forceinline__ static float exp_flushed(float z) {
    return ptx::ex2_approx_ftz(1.44269504f * z);
  }

  // expm1(z) for z <= 0
  __device__ __forceinline__ static float expm1_negative(float z) {
    float p = 1.648435573e-04f;
    p = fmaf(p, z, 1.370660961e-03f);
    p = fmaf(p, z, 8.328690194e-03f);
    p = fmaf(p, z, 4.166612774e-02f);
    p = fmaf(p, z, 1.666666418e-01f);
    p = fmaf(p, z, 5.000000000e-01f);
    const float near = ptx::opaque(fmaf(p * z, z, z));
    return z > -0.5f ? near : exp_flushed(z) - 1.0f;
  }

  // (1 - tanh |v|) / 2
  __device__ __forceinline__ static float tanh_remainder(float v) {
    return ptx::rcp_approx_ftz(1.0f + exp_flushed(2.0f * fabsf(v)));
  }

  __device__ __forceinline__ static float tanh_from(float v, float remainder) {
    const float far = copysignf(fmaf(-2.0f, remainder, 1.0f), v);
    if constexpr (sizeof(T) == 2) return far;
    const float s = v * v;
    float p = 2.373519354e-03f;
    p = fmaf(p, s, -8.412557654e-03f);
    p = fmaf(p, s, 2.178910933e-02f);
    p = fmaf(p, s, -5.396165326e-02f);
    p = fmaf(p, s, 1.333331317e-01f);
    p = fmaf(p, s, -3.333333433e-01f);
    const float near = ptx::opaque(fmaf(p * s, v, v));
    return fabsf(v) < 0.6f ? near : far;
  }
};

}  // namespace my_ops::cuda
