// The engine on Hopper and newer for LLTM.
#include "recurrent/cells/lltm.h"
#include "recurrent/sm90.cuh"

MY_OPS_RECURRENT_SM90(my_ops::LltmCell)
