// The engine on the CPU for LSTM.
#include "recurrent/cells/lstm.h"
#include "recurrent/cpu/cpu.h"

namespace my_ops::cpu {

MY_OPS_RECURRENT_CPU(LstmCell, float)
MY_OPS_RECURRENT_CPU(LstmCell, double)

}  // namespace my_ops::cpu
