// Plain loads and prefetches, where the place of the instruction matters.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace my_ops::cuda::ptx {

__device__ __forceinline__ void prefetch_l2(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

// Two neighbours at a shared address of 8 bytes. Volatile: loaded where they are used, not held in
// registers from an earlier use on.
__device__ __forceinline__ int2 ld_shared_v2(uint32_t address) {
  int2 x;
  asm volatile("ld.shared.v2.s32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(address));
  return x;
}

}  // namespace my_ops::cuda::ptx
