// LLTM: a recurrent cell with three gates, input i, output o and candidate g, and no forget gate.
//   i, o = sigmoid;  g = ELU;  c_t = c_{t-1} + g * i;  h_t = tanh(c_t) * o
#pragma once

#include <limits>

#include "recurrent/cells/cell.h"

namespace my_ops {

struct LltmCell {
  static constexpr int kGates = 3, kApart = 0, kVectors = 0, kCarried = 1, kSaved = 3;
  static constexpr bool kReadsH = false, kReadsPrevious = false, kBounded = true;

  template <typename Math, typename T>
  MY_OPS_CELL static T forward(const T* z, T /*h_prev*/, T* carried, T* saved) {
    saved[0] = Math::sigmoid(z[0]);
    saved[1] = Math::sigmoid(z[1]);
    saved[2] = Math::elu(z[2]);
    advance(saved, carried);
    return Math::tanh(carried[0]) * saved[1];
  }

  template <typename T>
  MY_OPS_CELL static void advance(const T* saved, T* carried) {
    carried[0] += saved[2] * saved[0];
  }

  template <typename Math, typename T>
  MY_OPS_CELL static T backward(const T* saved, const T* /*previous*/, const T* carried,
                                T /*h_prev*/, T grad_h, T* grad_carried, T* grad_z) {
    const T i = saved[0], o = saved[1], g = saved[2];
    const auto squashed = Math::tanh_with_slope(carried[0]);
    grad_carried[0] += grad_h * o * squashed.slope;
    grad_z[0] = grad_carried[0] * g * i * (T(1) - i);
    grad_z[1] = grad_h * squashed.value * o * (T(1) - o);
    grad_z[2] = grad_carried[0] * i * Math::elu_slope(g);
    return T(0);
  }

  template <typename T>
  MY_OPS_CELL static T shut(int gate) {
    constexpr T kInfinity = std::numeric_limits<T>::infinity();
    return gate < 2 ? -kInfinity : T(0);
  }
};

}  // namespace my_ops
