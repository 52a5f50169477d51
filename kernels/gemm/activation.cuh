// The formulas of the activations, as in torch.nn.functional, and the choice among them. An
// activation in gemm.h's list without a formula here does not compile.
#pragma once

#include "gemm.h"
#include "ptx/math.cuh"

namespace my_ops::cuda {

// x * sigmoid(t). The divisor is in [1, 2], so a reciprocal and a step of Newton's method replace
// the division, whose branches for other divisors would be code for each of a tile's sums.
__device__ __forceinline__ float times_sigmoid(float x, float t) {
  const float e = exp(-fabs(t)), divisor = 1.0f + e;
  float r = ptx::rcp_approx_ftz(divisor);
  r = fmaf(fmaf(-divisor, r, 1.0f), r, r);
  return x * (t < 0.0f ? e * r : r);
}
__device__ __forceinline__ double times_sigmoid(double x, double t) { return x / (1.0 + exp(-t)); }

// Accurate to the last bits of the type.
template <Activation kActivation>
struct Activate {
  template <typename C>
  __device__ C operator()(C x) const {
    if constexpr (kActivation == Activation::kRelu) {
      return x <= C(0) ? C(0) : x;  // NaN stays NaN
    } else if constexpr (kActivation == Activation::kGelu) {
      return C(0.5) * x * (C(1) + erf(x * C(0.70710678118654752)));  // x Phi(x)
    } else if constexpr (kActivation == Activation::kGeluTanh) {
      const C u = C(0.79788456080286536) * (x + C(0.044715) * x * x * x);
      if constexpr (sizeof(C) == 8) {
        return C(0.5) * x * (C(1) + tanh(u));  // rounds as torch does
      } else {
        return times_sigmoid(x, C(2) * u);  // the same, without the branches of tanh
      }
    } else if constexpr (kActivation == Activation::kSilu) {
      return times_sigmoid(x, x);
    } else if constexpr (kActivation == Activation::kSigmoid) {
      return times_sigmoid(C(1), x);
    } else {
      static_assert(kActivation == Activation::kNone, "an activation without a formula");
      return x;
    }
  }
};

// Accurate to 2^-17, relative, which is enough for 16-bit results. These take few instructions;
// activations without a formula here use Activate.
template <Activation kActivation>
struct FastActivate {
  static constexpr float kLog2e = 1.4426950408889634f;
  __device__ __forceinline__ float operator()(float x) const {
    if constexpr (kActivation == Activation::kGelu) {
      // Phi(-a) = exp(-a^2 / 2) t P(t), t = 1 / (1 + 0.31 a); P: a minimax fit for 0 <= a <= 15.
      const float a = fminf(fabsf(x), 100.0f);
      const float t = ptx::rcp_approx_ftz(fmaf(0.31f, a, 1.0f));
      float p = -0.0739286f;
      p = fmaf(p, t, 0.18044922f);
      p = fmaf(p, t, 0.01574578f);
      p = fmaf(p, t, 0.13342906f);
      p = fmaf(p, t, 0.12044158f);
      p = fmaf(p, t, 0.12386065f);
      const float linear = x * (x > 0.0f ? 1.0f : 0.0f);  // NaN for -infinity, as torch's
      return fmaf(-a * t, p * ptx::ex2_approx_ftz(-0.5f * kLog2e * a * a), linear);
    } else if constexpr (kActivation == Activation::kGeluTanh) {
      // (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u)), u = c (x + 0.044715 x^3)
      constexpr float kScale = -2.0f * kLog2e * 0.7978845608028654f;
      const float e = ptx::ex2_approx_ftz(x * fmaf(0.044715f * kScale, x * x, kScale));
      return x * ptx::rcp_approx_ftz(1.0f + e);
    } else if constexpr (kActivation == Activation::kSilu) {
      return x * ptx::rcp_approx_ftz(1.0f + ptx::ex2_approx_ftz(-kLog2e * x));
    } else if constexpr (kActivation == Activation::kSigmoid) {
      return ptx::rcp_approx_ftz(1.0f + ptx::ex2_approx_ftz(-kLog2e * x));
    } else {
      return Activate<kActivation>{}(x);
    }
  }
};

// Calls f.operator()<activation>(), on the device: one branch, outside the loop over elements.
template <typename F>
__device__ __forceinline__ void with_activation(Activation activation, F f) {
  switch (activation) {
#define MY_OPS_CASE(activation, name) \
  case Activation::activation:        \
    return f.template operator()<Activation::activation>();
    MY_OPS_ACTIVATIONS(MY_OPS_CASE)
#undef MY_OPS_CASE
  }
}

// The same on the host.
template <typename F>
cudaError_t dispatch_activation(Activation activation, const F& f) {
  switch (activation) {
#define MY_OPS_CASE(activation, name) \
  case Activation::activation:        \
    return f.template operator()<Activation::activation>();
    MY_OPS_ACTIVATIONS(MY_OPS_CASE)
#undef MY_OPS_CASE
  }
  return cudaErrorInvalidValue;
}

}  // namespace my_ops::cuda
