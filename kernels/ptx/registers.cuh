// Registers: how many a warpgroup has, special ones, and moves that the compiler does not relocate.
#pragma once

#include <cstdint>

namespace my_ops::cuda::ptx {

// Registers per thread of a warpgroup, taken from or given to the block's other warpgroups. sm_90a.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// threadIdx.x, read again here, so that values computed from it are not kept in registers.
__device__ __forceinline__ int tid_x() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// x, hidden from the compiler, so that it does not hoist what is computed from x out of a loop, or
// sink what x is computed from into a branch.
__device__ __forceinline__ uint32_t opaque(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}
__device__ __forceinline__ float opaque(float x) {
  asm volatile("" : "+f"(x));
  return x;
}

// x, with a move that stays in its branch, so that the compiler does not turn branches into a chain
// of selections.
__device__ __forceinline__ float mov(float x) {
  float y;
  asm volatile("mov.b32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace my_ops::cuda::ptx
