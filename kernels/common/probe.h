// Kernels that are never launched. Their attributes tell which of the build's code a device runs.
#pragma once

namespace my_ops::cuda {

const void* probe();       // compiled as most kernels are
const void* probe_sm90();  // as those for Hopper and newer, of which older devices have no code

// The threads that probe_sm90's kernel allows in code for 9.0a; in other code it allows half.
constexpr int kHopperThreads = 64;

}  // namespace my_ops::cuda
