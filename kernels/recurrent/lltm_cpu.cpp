// The engine on the CPU for LLTM.
#include "recurrent/cells/lltm.h"
#include "recurrent/cpu/cpu.h"

namespace my_ops::cpu {

MY_OPS_RECURRENT_CPU(LltmCell)

}  // namespace my_ops::cpu
