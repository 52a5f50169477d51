// GRU with the gates in torch's order: reset r, update u, candidate n. The reset gate multiplies
// the product with h and its bias, as in torch and cuDNN, so that one product serves all gates.
//   r, u = sigmoid;  n = tanh(x_n + r * h_n);  h_t = n + u * (h_{t-1} - n)
#pragma once

#include <limits>

#include "recurrent/cells/cell.h"

namespace my_ops {

struct GruCell {
  static constexpr int kGates = 3, kApart = 1, kVectors = 0, kCarried = 0, kSaved = 4;
  static constexpr bool kReadsH = true, kReadsPrevious = false, kBounded = true;

  template <typename Math, typename T>
  MY_OPS_CELL static T forward(const T* z, T h_prev, T* /*carried*/, T* saved) {
    const T h_n = z[2], x_n = z[3];
    const T r = saved[0] = Math::sigmoid(z[0]);
    const T u = saved[1] = Math::sigmoid(z[1]);
    const T n = saved[2] = Math::tanh(x_n + r * h_n);
    saved[3] = h_n;
    return n + u * (h_prev - n);
  }

  template <typename T>
  MY_OPS_CELL static void advance(const T* /*saved*/, T* /*carried*/) {}

  template <typename Math, typename T>
  MY_OPS_CELL static T backward(const T* saved, const T* /*previous*/, const T* /*carried*/,
                                T h_prev, T grad_h, T* /*grad_carried*/, T* grad_z) {
    const T r = saved[0], u = saved[1], n = saved[2], h_n = saved[3];
    const T grad_x_n = grad_h * (T(1) - u) * (T(1) - n * n);
    grad_z[0] = grad_x_n * h_n * r * (T(1) - r);
    grad_z[1] = grad_h * (h_prev - n) * u * (T(1) - u);
    grad_z[2] = grad_x_n * r;
    grad_z[3] = grad_x_n;
    return grad_h * u;
  }

  template <typename T>
  MY_OPS_CELL static T shut(int gate) {
    return gate < 2 ? -std::numeric_limits<T>::infinity() : T(0);
  }
};

}  // namespace my_ops
