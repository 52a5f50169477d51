// LLTM on the CPU.
#include "lltm.h"
#include "recurrent_cpu.h"

namespace my_ops {

STABLE_TORCH_LIBRARY_IMPL(my_ops, CPU, m) {
  using Ops = RecurrentOps<Lltm, Cpu>;
  m.impl("lltm_cell", TORCH_BOX(&Ops::cell));
  m.impl("lltm_cell_forward", TORCH_BOX(&Ops::cell_forward));
  m.impl("lltm_cell_backward", TORCH_BOX(&Ops::cell_backward));
  m.impl("lltm", TORCH_BOX(&Ops::layer));
  m.impl("lltm_forward", TORCH_BOX(&Ops::layer_forward));
  m.impl("lltm_backward", TORCH_BOX(&Ops::layer_backward));
}

}  // namespace my_ops
