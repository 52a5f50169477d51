// The instantiations of cluster_backward.cuh for GRU.
#include "recurrent/cluster_backward.cuh"

#include "recurrent/cells/gru.h"

MY_OPS_CLUSTER_BACKWARD(my_ops::GruCell, float)
MY_OPS_CLUSTER_BACKWARD(my_ops::GruCell, __half)
MY_OPS_CLUSTER_BACKWARD(my_ops::GruCell, __nv_bfloat16)
