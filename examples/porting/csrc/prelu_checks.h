// prelu: the checks that both backends share, and what a launch needs.
#pragma once

#include "binding.h"
#include "prelu.h"

namespace my_ops {

struct Prelu {
  Tensor x, slope, out;
  int64_t n, channels, inner;
};

inline void check_prelu(const Tensor& x, const Tensor& slope) {
  check_floating(x, "prelu", "x");
  check(x.dim() >= 2, "prelu: x must be (batch, channels, ...), got ", show(x));
  check_same_device(slope, "slope", x, "x", "prelu");
  check_same_dtype(slope, "slope", x, "x", "prelu");
  check_shape(slope, "slope", {x.size(1)}, "(channels,)", "prelu");
}

inline Prelu prelu_operands(const Tensor& x, const Tensor& slope) {
  int64_t inner = 1;
  for (int64_t d = 2; d < x.dim(); ++d) inner *= x.size(d);
  return {
      as_contiguous(x), as_contiguous(slope), empty(x, sizes_of(x)), x.numel(), x.size(1), inner};
}

}  // namespace my_ops
