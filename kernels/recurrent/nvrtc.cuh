// The engine's kernels for NVRTC, which compiles those that a cell of a program's own needs, for
// its header. tools/build/kernel_text.py puts this and what it includes into one file.
#include "common/nvrtc.cuh"
// The others need what is above.
#include "recurrent/block/backward.cuh"
#include "recurrent/block/forward.cuh"
#include "recurrent/cluster/backward.cuh"
#include "recurrent/cluster/forward.cuh"
#include "recurrent/grid/backward.cuh"
#include "recurrent/grid/forward.cuh"
#include "recurrent/warp/backward.cuh"
#include "recurrent/warp/forward.cuh"
