// LSTM on the CPU.
#include "lstm.h"
#include "recurrent_cpu.h"

namespace my_ops {

STABLE_TORCH_LIBRARY_IMPL(my_ops, CPU, m) { implement<Lstm, Cpu>(m); }

}  // namespace my_ops
