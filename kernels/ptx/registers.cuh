// Registers: how many a warpgroup has, special ones, and moves that stay where they are written.
#pragma once

#include <cstdint>

namespace my_ops::cuda::ptx {

// Of each thread of a warpgroup, taken from or given to the block's others. sm_90a.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// threadIdx.x, read here: what follows from it is not kept in registers from earlier uses on.
__device__ __forceinline__ int tid_x() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// x, of which the compiler no longer knows what it is: nothing computed from it leaves its loop.
__device__ __forceinline__ uint32_t opaque(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

// x, by a move that stays in its branch: of several such branches the compiler makes no chain of
// selections.
__device__ __forceinline__ float mov(float x) {
  float y;
  asm volatile("mov.b32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace my_ops::cuda::ptx
