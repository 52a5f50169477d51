// bar: barriers among some of a block's warps. __syncthreads uses number 0.
#pragma once

#include <cstdint>

namespace my_ops::cuda::ptx {

// For warps whose threads may have diverged.
__device__ __forceinline__ void barrier_sync(int id, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// For warps whose threads arrive together.
__device__ __forceinline__ void bar_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Arrives without waiting; `threads` counts those that wait too.
__device__ __forceinline__ void bar_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace my_ops::cuda::ptx
