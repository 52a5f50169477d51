// What the kernels for many rows share, forward and backward, in 16 bits on Hopper: the ring of
// k-blocks in shared memory, the product with W_h, and four units of a row as one vector.
#pragma once

#include <cuda.h>

#include "common/launch.cuh"
#include "common/numeric.cuh"
#include "common/tensor_map.h"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/registers.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "ptx/wgmma_mma_async.cuh"
#include "recurrent/plan.h"
#include "recurrent/terms.cuh"
#include "recurrent/weights.cuh"

namespace my_ops::cuda {

constexpr int kArrivedStride = 32;  // words, so that each counter has its own 128 bytes

// Each stage holds one k-block of a tile of rows.
template <int kBytes>
struct KBlockRing {
  unsigned char* stages_at;
  uint64_t *full, *empty;
  int stages;
  int stage = 0;
  uint32_t phase = 0;

  // Called by one thread. readers: warpgroups that read a stage.
  __device__ __forceinline__ void init(int readers) const {
    for (int i = 0; i < stages; ++i) {
      ptx::mbarrier_init(&full[i], 1);
      ptx::mbarrier_init(&empty[i], readers);
    }
  }
  __device__ __forceinline__ unsigned char* at_stage() const { return stages_at + stage * kBytes; }
  __device__ __forceinline__ void advance() {
    if (++stage == stages) {
      stage = 0;
      phase ^= 1;
    }
  }
  // Run by one thread: waits until the next stage is empty, and loads a k-block.
  __device__ __forceinline__ void fill(const CUtensorMap* map, int first_k, int row, int step) {
    ptx::mbarrier_wait(&empty[stage], phase ^ 1);
    ptx::mbarrier_arrive_expect_tx(&full[stage], kBytes);
    ptx::tma_load_3d(at_stage(), map, &full[stage], first_k, row, step);
    advance();
  }
};

// The product of 64 rows of the ring's k-blocks, from byte first_byte of each on, with the block's
// weights. Run by a warpgroup.
template <typename T, int kColumns, int kBytes>
__device__ __forceinline__ void multiply_k_blocks(KBlockRing<kBytes>& ring, int first_byte,
                                                  const unsigned char* weights, int k_blocks,
                                                  float (&sum)[kColumns / 2]) {
  const uint32_t weights_at = ptx::wgmma_address(weights);
  const auto release = [&](int stage) {
    if (threadIdx.x % 128 == 0) ptx::mbarrier_arrive(&ring.empty[stage]);
  };
  int previous = -1;
  for (int k_block = 0; k_block < k_blocks; ++k_block) {
    ptx::mbarrier_wait(&ring.full[ring.stage], ring.phase);
    ptx::wgmma_fence();
    const uint32_t a = ptx::wgmma_address(ring.at_stage() + first_byte),
                   b = weights_at + k_block * (kColumns * 8);
#pragma unroll
    for (int k = 0; k < kWarpgroupK; k += 16) {
      ptx::Wgmma<T, kColumns>::run(sum, ptx::wgmma_descriptor(a + k / 8),
                                   ptx::wgmma_descriptor(b + k / 8), k_block != 0 || k != 0);
    }
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<1>();  // the previous k-block has been read
    if (previous >= 0) release(previous);
    previous = ring.stage;
    ring.advance();
  }
  ptx::wgmma_wait_group<0>();
  ptx::wgmma_fence_operand(sum);
  release(previous);
}

// Four units of a row.
template <typename T>
__device__ __forceinline__ uint2 rounded(const float (&v)[4]) {
  return {pack<T>(v[0], v[1]), pack<T>(v[2], v[3])};
}
template <typename T>
__device__ __forceinline__ void store_four(T* p, uint2 v) {
  ptx::st_global(reinterpret_cast<uint2*>(p), v);
}
template <typename T>
__device__ __forceinline__ float4 load_four(const T* p) {
  const auto v = *reinterpret_cast<const Vector<T, 4>*>(p);
  return {load(v.at[0]), load(v.at[1]), load(v.at[2]), load(v.at[3])};
}

}  // namespace my_ops::cuda
