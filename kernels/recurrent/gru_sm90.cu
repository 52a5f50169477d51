// The engine on Hopper and newer for GRU.
#include "recurrent/cells/gru.h"
#include "recurrent/sm90.cuh"

MY_OPS_RECURRENT_SM90(my_ops::GruCell)
