// The instantiations of cluster_forward.cuh for LLTM.
#include "recurrent/cluster_forward.cuh"

#include "recurrent/cells/lltm.h"

MY_OPS_CLUSTER_FORWARD(my_ops::LltmCell, float)
MY_OPS_CLUSTER_FORWARD(my_ops::LltmCell, __half)
MY_OPS_CLUSTER_FORWARD(my_ops::LltmCell, __nv_bfloat16)
