// All layers and directions in one call, on CUDA.
#include "recurrent_layers.h"

namespace my_ops {

STABLE_TORCH_LIBRARY_IMPL(my_ops, CUDA, m) { LayersBinding<cuda::layers>::implement(m); }

}  // namespace my_ops
