// GRU's ops.
#pragma once

#include "recurrent/cells/gru.h"
#include "recurrent_ops.h"

namespace my_ops {

struct Gru {
  using Cell = GruCell;
  using Weights = TwoMatrices;
  static constexpr const char* kCell = "gru_cell";
  static constexpr const char* kCellBackward = "gru_cell_backward";
  static constexpr const char* kLayer = "gru";
  static constexpr const char* kLayerBackward = "gru_backward";
};

}  // namespace my_ops
