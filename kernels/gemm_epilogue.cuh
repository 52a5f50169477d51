// Activations of the fused linear layer, applied to the accumulator. Formulas: torch.nn.functional.
#pragma once

#include "common.cuh"
#include "gemm.h"

namespace my_ops::cuda {

template <Activation kActivation>
struct Activate {
  template <typename C>
  __device__ C operator()(C x) const {
    if constexpr (kActivation == Activation::kRelu) {
      return x > C(0) || x != x ? x : C(0);  // NaN stays NaN
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

// Calls f.operator()<activation>().
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
