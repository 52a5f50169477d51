// The instantiations of grid_forward.cuh for GRU.
#include "recurrent/grid_forward.cuh"

#include "recurrent/cells/gru.h"

MY_OPS_GRID_FORWARD(my_ops::GruCell, float)
MY_OPS_GRID_FORWARD(my_ops::GruCell, __half)
MY_OPS_GRID_FORWARD(my_ops::GruCell, __nv_bfloat16)
