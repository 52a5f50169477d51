// cp.async: asynchronous copies to shared memory. sm_80.
#pragma once

#include <cstdint>

#include "ptx/shared_address.cuh"

namespace my_ops::cuda::ptx {

// Copies the first `bytes` of 4 or 16 bytes, and fills the rest with zeros.
template <int kBytes>
__device__ __forceinline__ void cp_async(void* to, const void* from, int bytes = kBytes) {
  static_assert(kBytes == 4 || kBytes == 16);
  const uint32_t smem = shared_address(to);
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem), "l"(from),
                 "r"(bytes));
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(smem), "l"(from), "r"(bytes));
  }
}

// Makes a group of the thread's copies since its last group.
__device__ __forceinline__ void cp_async_commit_group() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until all but the thread's last kPending groups have landed.
template <int kPending>
__device__ __forceinline__ void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Waits until all of the thread's copies have landed.
__device__ __forceinline__ void cp_async_wait_all() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

}  // namespace my_ops::cuda::ptx
