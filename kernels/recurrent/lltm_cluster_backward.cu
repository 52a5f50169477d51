// The instantiations of cluster_backward.cuh for LLTM.
#include "recurrent/cluster_backward.cuh"

#include "recurrent/cells/lltm.h"

MY_OPS_CLUSTER_BACKWARD(my_ops::LltmCell, float)
MY_OPS_CLUSTER_BACKWARD(my_ops::LltmCell, __half)
MY_OPS_CLUSTER_BACKWARD(my_ops::LltmCell, __nv_bfloat16)
