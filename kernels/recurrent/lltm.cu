// The engine on CUDA for LLTM.
#include "recurrent/cells/lltm.h"
#include "recurrent/cuda.cuh"

MY_OPS_RECURRENT_CUDA(my_ops::LltmCell)
