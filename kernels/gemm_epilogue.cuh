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

}  // namespace my_ops::cuda
