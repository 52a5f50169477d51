// Activations of the fused linear layer, applied to the accumulator. Formulas: torch.nn.functional.
#pragma once

#include "common/numeric.cuh"
#include "gemm.h"
#include "ptx/math.cuh"

namespace my_ops::cuda {

template <Activation kActivation>
struct Activate {
  template <typename C>
  __device__ C operator()(C x) const {
    if constexpr (kActivation == Activation::kRelu) {
      return x <= C(0) ? C(0) : x;  // NaN stays NaN
    } else if constexpr (kActivation == Activation::kGelu) {
      return C(0.5) * x * (C(1) + erf(x * C(0.70710678118654752)));  // x Phi(x)
    } else if constexpr (kActivation == Activation::kGeluTanh) {
      return C(0.5) * x * (C(1) + tanh(C(0.79788456080286536) * (x + C(0.044715) * x * x * x)));
    } else if constexpr (kActivation == Activation::kSilu) {
      return x / (C(1) + exp(-x));
    } else if constexpr (kActivation == Activation::kSigmoid) {
      return sigmoid(x);
    } else {
      return x;
    }
  }
};

// Activations for results of 16 bits: good to 2^-17, relative, and few instructions. Activate is
// good to float's last bits.
template <Activation kActivation>
struct FastActivate {
  static constexpr float kLog2e = 1.4426950408889634f;
  __device__ __forceinline__ float operator()(float x) const {
    if constexpr (kActivation == Activation::kRelu) {
      return Activate<Activation::kRelu>{}(x);
    } else if constexpr (kActivation == Activation::kGelu) {
      // Phi(-a) = exp(-a^2 / 2) t P(t), t = 1 / (1 + 0.31 a); P: a minimax fit for 0 <= a <= 15.
      const float a = fminf(fabsf(x), 100.0f);
      const float t = ptx::rcp_approx_ftz(fmaf(0.31f, a, 1.0f));
      float p = -0.0739286f;
      p = fmaf(p, t, 0.18044922f);
      p = fmaf(p, t, 0.01574578f);
      p = fmaf(p, t, 0.13342906f);
      p = fmaf(p, t, 0.12044158f);
      p = fmaf(p, t, 0.12386065f);
      return fmaf(-a * t, p * ptx::ex2_approx_ftz(-0.5f * kLog2e * a * a),
                  Activate<Activation::kRelu>{}(x));
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
      return x;
    }
  }
};

// What a residual adds to element [z][row][col]; 0 without one.
template <typename T, typename Out>
__device__ __forceinline__ compute_t<Out> residual_at(const GemmArgs<T, Out>& args, int64_t z,
                                                      int64_t row, int64_t col) {
  if (!args.residual) return compute_t<Out>(0);
  return load(
      args.residual[z * args.residual_batch + row * args.residual_row + col * args.residual_col]);
}

// Calls f, on the device, with the functor of a run-time activation: one branch, outside the
// element loop.
template <typename F>
__device__ __forceinline__ void with_activation(Activation activation, F f) {
  switch (activation) {
    case Activation::kNone:
      return f(Activate<Activation::kNone>{});
    case Activation::kRelu:
      return f(Activate<Activation::kRelu>{});
    case Activation::kGelu:
      return f(Activate<Activation::kGelu>{});
    case Activation::kGeluTanh:
      return f(Activate<Activation::kGeluTanh>{});
    case Activation::kSilu:
      return f(Activate<Activation::kSilu>{});
    case Activation::kSigmoid:
      return f(Activate<Activation::kSigmoid>{});
  }
}

// Calls f.operator()<activation>(), on the host.
template <typename F>
cudaError_t dispatch_activation(Activation activation, const F& f) {
  switch (activation) {
    case Activation::kNone:
      return f.template operator()<Activation::kNone>();
    case Activation::kRelu:
      return f.template operator()<Activation::kRelu>();
    case Activation::kGelu:
      return f.template operator()<Activation::kGelu>();
    case Activation::kGeluTanh:
      return f.template operator()<Activation::kGeluTanh>();
    case Activation::kSilu:
      return f.template operator()<Activation::kSilu>();
    case Activation::kSigmoid:
      return f.template operator()<Activation::kSigmoid>();
  }
  return cudaErrorInvalidValue;
}

}  // namespace my_ops::cuda
