// The instantiations of grid_backward.cuh for GRU.
#include "recurrent/grid_backward.cuh"

#include "recurrent/cells/gru.h"

MY_OPS_GRID_BACKWARD(my_ops::GruCell, float)
MY_OPS_GRID_BACKWARD(my_ops::GruCell, __half)
MY_OPS_GRID_BACKWARD(my_ops::GruCell, __nv_bfloat16)
