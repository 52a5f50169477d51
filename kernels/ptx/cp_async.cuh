// cp.async: copies to shared memory that run on beside their thread. sm_80.
#pragma once

#include <cstdint>

#include "ptx/shared_address.cuh"

namespace my_ops::cuda::ptx {

// Copies 4 or 16 bytes, of which `bytes` exist; the rest becomes zero.
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

// Makes a group of the thread's copies since the last one.
__device__ __forceinline__ void cp_async_commit_group() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Until all but the thread's last kPending groups have landed.
template <int kPending>
__device__ __forceinline__ void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Until all of the thread's copies have landed.
__device__ __forceinline__ void cp_async_wait_all() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

}  // namespace my_ops::cuda::ptx
