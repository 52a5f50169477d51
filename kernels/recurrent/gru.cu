// The instantiations for GRU of a step and of the router; those of the persistent kernels compile
// beside this, in gru_*.cu.
#include "recurrent/cells/gru.h"
#include "recurrent/persistent.cuh"
#include "recurrent/step.cuh"

MY_OPS_RECURRENT_STEP(my_ops::GruCell, double, double)
MY_OPS_RECURRENT_STEP(my_ops::GruCell, float, float)
MY_OPS_RECURRENT_STEP(my_ops::GruCell, __half, float)
MY_OPS_RECURRENT_STEP(my_ops::GruCell, __nv_bfloat16, float)
MY_OPS_RECURRENT_SEQUENCE(my_ops::GruCell, float)
MY_OPS_RECURRENT_SEQUENCE(my_ops::GruCell, __half)
MY_OPS_RECURRENT_SEQUENCE(my_ops::GruCell, __nv_bfloat16)
