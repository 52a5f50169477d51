// The tiles of convolution_sm90.cu. Host and device.
#pragma once

#include "gemm/fp32_sm90/plan.h"

namespace my_ops::cuda::convolution_sm90 {

// Sums of few columns leave room for compensation, which takes more time than it is worth here.
struct NarrowTile : fp32_sm90::Tile<128, 64, 2, 1> {
  static constexpr bool kCompensated = false;
};
using LargeTile = fp32_sm90::LargeTile;

}  // namespace my_ops::cuda::convolution_sm90
