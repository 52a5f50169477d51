// The instantiations of grid_forward.cuh for LSTM.
#include "recurrent/grid_forward.cuh"

#include "recurrent/cells/lstm.h"

MY_OPS_GRID_FORWARD(my_ops::LstmCell, float)
MY_OPS_GRID_FORWARD(my_ops::LstmCell, __half)
MY_OPS_GRID_FORWARD(my_ops::LstmCell, __nv_bfloat16)
