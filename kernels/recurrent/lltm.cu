// The instantiations for LLTM of a step and of the router; those of the persistent kernels compile
// beside this, in lltm_*.cu.
#include "recurrent/cells/lltm.h"
#include "recurrent/persistent.cuh"
#include "recurrent/step.cuh"

MY_OPS_RECURRENT_STEP(my_ops::LltmCell, double, double)
MY_OPS_RECURRENT_STEP(my_ops::LltmCell, float, float)
MY_OPS_RECURRENT_STEP(my_ops::LltmCell, __half, float)
MY_OPS_RECURRENT_STEP(my_ops::LltmCell, __nv_bfloat16, float)
MY_OPS_RECURRENT_SEQUENCE(my_ops::LltmCell, float)
MY_OPS_RECURRENT_SEQUENCE(my_ops::LltmCell, __half)
MY_OPS_RECURRENT_SEQUENCE(my_ops::LltmCell, __nv_bfloat16)
