// LLTM on the CPU.
#include "lltm.h"
#include "recurrent_cpu.h"

namespace my_ops {

STABLE_TORCH_LIBRARY_IMPL(my_ops, CPU, m) { implement<Lltm, Cpu>(m); }

}  // namespace my_ops
