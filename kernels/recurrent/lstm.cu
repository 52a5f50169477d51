// The instantiations for LSTM of a step and of the router; those of the persistent kernels compile
// beside this, in lstm_*.cu.
#include "recurrent/cells/lstm.h"
#include "recurrent/persistent.cuh"
#include "recurrent/step.cuh"

MY_OPS_RECURRENT_STEP(my_ops::LstmCell, double, double)
MY_OPS_RECURRENT_STEP(my_ops::LstmCell, float, float)
MY_OPS_RECURRENT_STEP(my_ops::LstmCell, __half, float)
MY_OPS_RECURRENT_STEP(my_ops::LstmCell, __nv_bfloat16, float)
MY_OPS_RECURRENT_SEQUENCE(my_ops::LstmCell, float)
MY_OPS_RECURRENT_SEQUENCE(my_ops::LstmCell, __half)
MY_OPS_RECURRENT_SEQUENCE(my_ops::LstmCell, __nv_bfloat16)
