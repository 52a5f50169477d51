// Tells which code for Hopper and newer the build has for a device.
#include "common/probe.h"

namespace my_ops::cuda {
namespace {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
__global__ void __launch_bounds__(kHopperThreads) probe_kernel() {}
#else
__global__ void __launch_bounds__(kHopperThreads / 2) probe_kernel() {}
#endif

}  // namespace
}  // namespace my_ops::cuda

const void* my_ops::cuda::probe_sm90() { return reinterpret_cast<const void*>(&probe_kernel); }
