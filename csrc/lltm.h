// LLTM's ops.
#pragma once

#include "recurrent/cells/lltm.h"
#include "recurrent_ops.h"

namespace my_ops {

struct Lltm {
  using Cell = LltmCell;
  using Weights = OneMatrix;
  static constexpr const char* kCell = "lltm_cell";
  static constexpr const char* kCellBackward = "lltm_cell_backward";
  static constexpr const char* kLayer = "lltm";
  static constexpr const char* kLayerBackward = "lltm_backward";
};

}  // namespace my_ops
