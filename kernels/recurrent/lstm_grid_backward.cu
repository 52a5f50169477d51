// The instantiations of grid_backward.cuh for LSTM.
#include "recurrent/grid_backward.cuh"

#include "recurrent/cells/lstm.h"

MY_OPS_GRID_BACKWARD(my_ops::LstmCell, float)
MY_OPS_GRID_BACKWARD(my_ops::LstmCell, __half)
MY_OPS_GRID_BACKWARD(my_ops::LstmCell, __nv_bfloat16)
