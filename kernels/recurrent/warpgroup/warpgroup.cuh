// What the kernels for many rows share, forward and backward, on Hopper: the counters of the tiles,
// the ring of k-blocks in shared memory, the product with W_h in 16 bits, and adjacent units of a
// row as one vector.
#pragma once

#include <cuda.h>

#include <type_traits>

#include "common/launch.cuh"
#include "common/numeric.cuh"
#include "common/tensor_map.h"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/registers.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "ptx/wgmma_mma_async.cuh"
#include "recurrent/shared/terms.cuh"
#include "recurrent/shared/weights.cuh"
#include "recurrent/warpgroup/plan.h"

namespace my_ops::cuda {

// The vector type of kBytes bytes.
template <int kBytes>
using WordOf =
    std::conditional_t<kBytes == 16, uint4, std::conditional_t<kBytes == 8, uint2, uint32_t>>;

__device__ __forceinline__ uint32_t* counter_of(uint32_t* arrived, int tile) {
  return arrived + tile * kArrivedStride;
}

// Each stage holds one k-block of a tile of rows.
struct TileRing {
  unsigned char* stages_at;
  uint64_t *full, *empty;
  int stages;
  int stage = 0;
  uint32_t phase = 0;

  // Called by one thread.
  __device__ __forceinline__ void init() const {
    for (int i = 0; i < stages; ++i) {
      ptx::mbarrier_init(&full[i], 1);
      ptx::mbarrier_init(&empty[i], 1);
    }
  }
  __device__ __forceinline__ unsigned char* at_stage() const {
    return stages_at + stage * kWarpgroupStageBytes;
  }
  __device__ __forceinline__ void advance() {
    if (++stage == stages) {
      stage = 0;
      phase ^= 1;
    }
  }
  // Run by one thread: waits until the next stage is empty, and loads a k-block.
  __device__ __forceinline__ void fill(const CUtensorMap* map, int first_k, int row, int step) {
    ptx::mbarrier_wait(&empty[stage], phase ^ 1);
    ptx::mbarrier_arrive_expect_tx(&full[stage], kWarpgroupStageBytes);
    ptx::tma_load_3d(at_stage(), map, &full[stage], first_k, row, step);
    advance();
  }
};

// The tiles of a warpgroup that run through all steps together, in turns: while the group exchanges
// what one needs, the warpgroup multiplies another.
struct Turns {
  int first, apart, count;

  __device__ __forceinline__ int tile(int turn) const { return first + turn * apart; }
};

// Calls f for all tiles of warpgroup `which` in a group's blocks.
template <typename Plan, typename F>
__device__ __forceinline__ void each_turns(int64_t batch, const Plan& plan, int group, int which,
                                           F f) {
  const int tiles = static_cast<int>((batch + kWarpgroupRows - 1) / kWarpgroupRows);
  const int apart = 2 * plan.groups;
  for (int tile = group + which * plan.groups; tile < tiles; tile += plan.turns * apart) {
    f(Turns{tile, apart, min(plan.turns, (tiles - tile + apart - 1) / apart)});
  }
}

// The product of 64 rows of the ring's k-blocks with the block's weights. Run by a warpgroup.
template <typename T, int kColumns>
__device__ __forceinline__ void multiply_k_blocks(TileRing& ring, const unsigned char* weights,
                                                  int k_blocks, float (&sum)[kColumns / 2]) {
  const uint32_t weights_at = ptx::wgmma_address(weights);
  const auto release = [&](int stage) {
    if (threadIdx.x % 128 == 0) ptx::mbarrier_arrive(&ring.empty[stage]);
  };
  int previous = -1;
  for (int k_block = 0; k_block < k_blocks; ++k_block) {
    ptx::mbarrier_wait(&ring.full[ring.stage], ring.phase);
    ptx::wgmma_fence();
    const uint32_t a = ptx::wgmma_address(ring.at_stage()),
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

// Adjacent units of a row.
template <typename T, int Size>
__device__ __forceinline__ Vector<T, Size> rounded(const float (&v)[Size]) {
  Vector<T, Size> to;
  if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int e = 0; e < Size; e += 2) {
      reinterpret_cast<uint32_t*>(&to)[e / 2] = pack<T>(v[e], v[e + 1]);
    }
  } else {
#pragma unroll
    for (int e = 0; e < Size; ++e) to.at[e] = v[e];
  }
  return to;
}
template <typename T, int Size>
__device__ __forceinline__ void store_vector(T* p, const Vector<T, Size>& v) {
  using Word = WordOf<sizeof(v)>;
  ptx::st_global(reinterpret_cast<Word*>(p), reinterpret_cast<const Word&>(v));
}
// Of what no kernel writes meanwhile.
template <int Size>
__device__ __forceinline__ Vector<float, Size> load_constant(const float* p) {
  using Word = WordOf<4 * Size>;
  const Word v = __ldg(reinterpret_cast<const Word*>(p));
  return reinterpret_cast<const Vector<float, Size>&>(v);
}
template <int Size, typename T>
__device__ __forceinline__ Vector<float, Size> load_vector(const T* p) {
  const auto v = *reinterpret_cast<const Vector<T, Size>*>(p);
  Vector<float, Size> to;
#pragma unroll
  for (int e = 0; e < Size; ++e) to.at[e] = load(v.at[e]);
  return to;
}

}  // namespace my_ops::cuda
