// LSTM's ops.
#pragma once

#include "recurrent/cells/lstm.h"
#include "recurrent_ops.h"

namespace my_ops {

struct Lstm {
  using Cell = LstmCell;
  using Weights = TwoMatrices;
  static constexpr const char* kCell = "lstm_cell";
  static constexpr const char* kCellBackward = "lstm_cell_backward";
  static constexpr const char* kLayer = "lstm";
  static constexpr const char* kLayerBackward = "lstm_backward";
};

}  // namespace my_ops
