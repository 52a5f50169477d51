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

__device__ __forceinline__ void barrier_cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void barrier_cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

}  // namespace my_ops::cuda::ptx
