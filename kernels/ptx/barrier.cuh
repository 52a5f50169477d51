// bar: barriers among some of a block's warps. Number 0 is that of __syncthreads.
#pragma once

#include <cstdint>

namespace my_ops::cuda::ptx {

// Of warps whose threads may have diverged.
__device__ __forceinline__ void barrier_sync(int id, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Of warps whose threads come here together.
__device__ __forceinline__ void bar_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace my_ops::cuda::ptx
