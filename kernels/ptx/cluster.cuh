// Clusters of blocks: a block's rank, its neighbours' shared memory, the barrier of all. sm_90.
#pragma once

#include <cstdint>

#include "ptx/shared_address.cuh"

namespace my_ops::cuda::ptx {

// Address of the same shared memory location in another block of the cluster.
__device__ __forceinline__ uint32_t mapa(const void* p, int rank) {
  uint32_t remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(p)), "r"(rank));
  return remote;
}

__device__ __forceinline__ int cluster_ctarank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}

__device__ __forceinline__ int cluster_nctarank() {
  uint32_t blocks;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
  return static_cast<int>(blocks);
}

__device__ __forceinline__ void barrier_cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void barrier_cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Loads from a block of the cluster, with an address from mapa.
__device__ __forceinline__ float4 ld_cluster(uint32_t address) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// Stores into a block of the cluster, with addresses from mapa. Bytes that have arrived count on
// that block's mbarrier.
__device__ __forceinline__ void st_async(uint32_t address, uint32_t barrier, float v0, float v1,
                                         float v2, float v3) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
      "[%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
      "f"(v0), "f"(v1), "f"(v2), "f"(v3), "r"(barrier)
      : "memory");
}

}  // namespace my_ops::cuda::ptx
