// LSTM with the gates in torch's order: input i, forget f, candidate g, output o.
//   i, f, o = sigmoid;  g = tanh;  c_t = f * c_{t-1} + i * g;  h_t = o * tanh(c_t)
#pragma once

#include <limits>

#include "recurrent/cells/cell.h"

namespace my_ops {

struct LstmCell {
  static constexpr int kGates = 4, kApart = 0, kVectors = 0, kCarried = 1, kSaved = 4;
  static constexpr bool kReadsH = false, kReadsPrevious = true, kBounded = true;

  template <typename Math, typename T>
  MY_OPS_CELL static T forward(const T* z, T /*h_prev*/, T* carried, T* saved) {
    saved[0] = Math::sigmoid(z[0]);
    saved[1] = Math::sigmoid(z[1]);
    saved[2] = Math::tanh(z[2]);
    saved[3] = Math::sigmoid(z[3]);
    advance(saved, carried);
    return saved[3] * Math::tanh(carried[0]);
  }

  template <typename T>
  MY_OPS_CELL static void advance(const T* saved, T* carried) {
    carried[0] = saved[1] * carried[0] + saved[0] * saved[2];
  }

  template <typename Math, typename T>
  MY_OPS_CELL static T backward(const T* saved, const T* previous, const T* carried, T /*h_prev*/,
                                T grad_h, T* grad_carried, T* grad_z) {
    const T i = saved[0], f = saved[1], g = saved[2], o = saved[3];
    const auto squashed = Math::tanh_with_slope(carried[0]);
    const T grad_c = grad_carried[0] + grad_h * o * squashed.slope;
    grad_z[0] = grad_c * g * i * (T(1) - i);
    grad_z[1] = grad_c * previous[0] * f * (T(1) - f);
    grad_z[2] = grad_c * i * (T(1) - g * g);
    grad_z[3] = grad_h * squashed.value * o * (T(1) - o);
    grad_carried[0] = grad_c * f;
    return T(0);
  }

  template <typename T>
  MY_OPS_CELL static T shut(int gate) {
    constexpr T kInfinity = std::numeric_limits<T>::infinity();
    return gate == 1 ? kInfinity : gate == 2 ? T(0) : -kInfinity;
  }
};

}  // namespace my_ops
