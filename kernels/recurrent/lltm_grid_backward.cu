// The instantiations of grid_backward.cuh for LLTM.
#include "recurrent/grid_backward.cuh"

#include "recurrent/cells/lltm.h"

MY_OPS_GRID_BACKWARD(my_ops::LltmCell, float)
MY_OPS_GRID_BACKWARD(my_ops::LltmCell, __half)
MY_OPS_GRID_BACKWARD(my_ops::LltmCell, __nv_bfloat16)
