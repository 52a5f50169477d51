// The instantiations of grid_forward.cuh for LLTM.
#include "recurrent/grid_forward.cuh"

#include "recurrent/cells/lltm.h"

MY_OPS_GRID_FORWARD(my_ops::LltmCell, float)
MY_OPS_GRID_FORWARD(my_ops::LltmCell, __half)
MY_OPS_GRID_FORWARD(my_ops::LltmCell, __nv_bfloat16)
