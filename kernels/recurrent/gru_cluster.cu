// The instantiations of cluster_forward.cuh for GRU.
#include "recurrent/cluster_forward.cuh"

#include "recurrent/cells/gru.h"

MY_OPS_CLUSTER_FORWARD(my_ops::GruCell, float)
MY_OPS_CLUSTER_FORWARD(my_ops::GruCell, __half)
MY_OPS_CLUSTER_FORWARD(my_ops::GruCell, __nv_bfloat16)
