// cp.async.bulk.tensor: boxes of a tensor map to and from shared memory by the tensor memory
// accelerator. sm_90. common/tensor_map.h makes the maps.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "ptx/shared_address.cuh"

namespace my_ops::cuda::ptx {

__device__ __forceinline__ void prefetch_tensormap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Loads consecutive bytes, a multiple of 16 at aligned addresses; they count on the barrier.
__device__ __forceinline__ void bulk_load(void* smem, const void* from, uint32_t bytes,
                                          uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(smem)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

// Loads the box at (column, row) of the map to shared memory; its bytes count on the barrier.
__device__ __forceinline__ void tma_load_2d(void* smem, const CUtensorMap* map, uint64_t* barrier,
                                            int column, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4}], [%2];" ::"r"(shared_address(smem)),
      "l"(map), "r"(shared_address(barrier)), "r"(column), "r"(row)
      : "memory");
}

// The same box to the same place in every block of the cluster whose bit is set in `blocks`.
__device__ __forceinline__ void tma_load_2d_multicast(void* smem, const CUtensorMap* map,
                                                      uint64_t* barrier, int column, int row,
                                                      uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared_address(smem)),
      "l"(map), "r"(shared_address(barrier)), "r"(column), "r"(row), "h"(blocks)
      : "memory");
}

// Loads the box at (x, y, z) of a map of three dimensions to shared memory.
__device__ __forceinline__ void tma_load_3d(void* smem, const CUtensorMap* map, uint64_t* barrier,
                                            int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(shared_address(smem)),
      "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z)
      : "memory");
}

__device__ __forceinline__ void tma_load_3d_multicast(void* smem, const CUtensorMap* map,
                                                      uint64_t* barrier, int x, int y, int z,
                                                      uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(shared_address(smem)),
      "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "h"(blocks)
      : "memory");
}

// Loads channels of consecutive windows' points: of those windows, in row-major order of an image
// and on through the images, whose first point is (x, y) of image n or after that, the point
// `right` and `down` from there.
__device__ __forceinline__ void tma_load_im2col(void* smem, const CUtensorMap* map,
                                                uint64_t* barrier, int channel, int x, int y, int n,
                                                int right, int down) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8};" ::"r"(shared_address(smem)),
      "l"(map), "r"(shared_address(barrier)), "r"(channel), "r"(x), "r"(y), "r"(n),
      "h"(static_cast<uint16_t>(right)), "h"(static_cast<uint16_t>(down))
      : "memory");
}

// Stores a box from shared memory at (x, y, z) of a map. The writer of the shared memory must fence
// first.
__device__ __forceinline__ void tma_store_3d(const CUtensorMap* map, const void* smem, int x, int y,
                                             int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(
          map),
      "r"(shared_address(smem)), "r"(x), "r"(y), "r"(z)
      : "memory");
}

__device__ __forceinline__ void tma_store_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until all but the newest kPending of the thread's groups have read their shared memory.
template <int kPending>
__device__ __forceinline__ void tma_store_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Waits until all but the newest kPending of the thread's groups have written their memory.
template <int kPending>
__device__ __forceinline__ void tma_store_wait_group() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// Orders writes to global memory that the thread has seen before later TMA reads of it.
__device__ __forceinline__ void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Orders a thread's own writes to shared memory before later TMA reads of it.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace my_ops::cuda::ptx
