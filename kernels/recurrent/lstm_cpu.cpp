// The engine on the CPU for LSTM.
#include "recurrent/cells/lstm.h"
#include "recurrent/cpu/cpu.h"

namespace my_ops::cpu {

MY_OPS_RECURRENT_CPU(LstmCell)

}  // namespace my_ops::cpu
