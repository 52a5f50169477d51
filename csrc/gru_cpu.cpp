// GRU on the CPU.
#include "gru.h"
#include "recurrent_cpu.h"

namespace my_ops {

STABLE_TORCH_LIBRARY_IMPL(my_ops, CPU, m) { implement<Gru, Cpu>(m); }

}  // namespace my_ops
