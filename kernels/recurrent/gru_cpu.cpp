// The engine on the CPU for GRU.
#include "recurrent/cells/gru.h"
#include "recurrent/cpu/cpu.h"

namespace my_ops::cpu {

MY_OPS_RECURRENT_CPU(GruCell)

}  // namespace my_ops::cpu
