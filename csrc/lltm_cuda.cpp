// LLTM on CUDA.
#include "lltm.h"
#include "recurrent_cuda.h"

namespace my_ops {

STABLE_TORCH_LIBRARY_IMPL(my_ops, CUDA, m) { implement<Lltm, Cuda>(m); }

}  // namespace my_ops
