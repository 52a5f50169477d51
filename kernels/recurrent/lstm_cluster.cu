// The instantiations of cluster_forward.cuh for LSTM.
#include "recurrent/cluster_forward.cuh"

#include "recurrent/cells/lstm.h"

MY_OPS_CLUSTER_FORWARD(my_ops::LstmCell, float)
MY_OPS_CLUSTER_FORWARD(my_ops::LstmCell, __half)
MY_OPS_CLUSTER_FORWARD(my_ops::LstmCell, __nv_bfloat16)
