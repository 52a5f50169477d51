// The engine on CUDA for LSTM.
#include "recurrent/cells/lstm.h"
#include "recurrent/cuda.cuh"

MY_OPS_RECURRENT_CUDA(my_ops::LstmCell)
