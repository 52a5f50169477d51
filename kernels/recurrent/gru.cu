// The engine on CUDA for GRU.
#include "recurrent/cells/gru.h"
#include "recurrent/cuda.cuh"

MY_OPS_RECURRENT_CUDA(my_ops::GruCell)
