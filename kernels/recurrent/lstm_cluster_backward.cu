// The instantiations of cluster_backward.cuh for LSTM.
#include "recurrent/cluster_backward.cuh"

#include "recurrent/cells/lstm.h"

MY_OPS_CLUSTER_BACKWARD(my_ops::LstmCell, float)
MY_OPS_CLUSTER_BACKWARD(my_ops::LstmCell, __half)
MY_OPS_CLUSTER_BACKWARD(my_ops::LstmCell, __nv_bfloat16)
