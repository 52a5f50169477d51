// All layers and directions in one call, on the CPU.
#include "recurrent_layers.h"

namespace my_ops {

STABLE_TORCH_LIBRARY_IMPL(my_ops, CPU, m) { LayersBinding<cpu::layers>::implement(m); }

}  // namespace my_ops
