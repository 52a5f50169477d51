// The engine on Hopper and newer for LSTM.
#include "recurrent/cells/lstm.h"
#include "recurrent/sm90.cuh"

MY_OPS_RECURRENT_SM90(my_ops::LstmCell)
