// griddepcontrol: lets kernels started by launch_overlapped overlap the previous kernel. sm_90.
#pragma once

#include <cstdint>

namespace my_ops::cuda::ptx {

// Waits for the grids this one was allowed to overlap; their writes are visible afterwards.
__device__ __forceinline__ void griddepcontrol_wait() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

__device__ __forceinline__ void griddepcontrol_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace my_ops::cuda::ptx
