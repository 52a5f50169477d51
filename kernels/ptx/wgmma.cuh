// wgmma: asynchronous products by a warpgroup. This file has their synchronisation and their
// operands' descriptors; the products are in wgmma_mma_async.cuh. sm_90a.
#pragma once

#include <cstdint>

#include "ptx/shared_address.cuh"

namespace my_ops::cuda::ptx {

// Orders register and shared memory accesses before the products that follow.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most kPending groups, the newest ones, are unfinished.
template <int kPending>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Emits no instruction. It keeps the compiler from moving uses of r ahead of the preceding wait.
template <int kCount>
__device__ __forceinline__ void wgmma_fence_operand(float (&r)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(r[i])::"memory");
}

template <int kCount>
__device__ __forceinline__ void wgmma_fence_operand(uint32_t (&r)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(r[i])::"memory");
}

// The matrix descriptor of a tile with 64 16-bit elements of k per row, stored with the 128-byte
// swizzle (which repeats after 8 rows). `address` is wgmma_address of the tile's start; adding 2 to
// it moves the tile by 16 elements of k.
__device__ __forceinline__ uint32_t wgmma_address(const void* smem) {
  return (shared_address(smem) & 0x3FFFF) >> 4;
}

__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t address) {
  constexpr uint64_t kSwizzle128 = 1, kRepeatBytes = 1024;
  return address | uint64_t{1} << 16 | (kRepeatBytes >> 4) << 32 | kSwizzle128 << 62;
}

// The same for a tile stored along the index of its rows: consecutive boxes of 64 rows x kBox of k,
// with a line of 64 rows for each k. Adding 128 moves the tile by 16 elements of k.
template <int kBox>
__device__ __forceinline__ uint64_t wgmma_descriptor_rows(uint32_t address) {
  constexpr uint64_t kSwizzle128 = 1, kRepeatBytes = 1024, kBoxBytes = kBox * 128;
  return address | (kBoxBytes >> 4) << 16 | (kRepeatBytes >> 4) << 32 | kSwizzle128 << 62;
}

}  // namespace my_ops::cuda::ptx
