// What the Hopper kernels share: how clusters walk over the tiles of the output, and the ring of
// stages in shared memory. A stage holds one k-block; one producer thread fills the ring by TMA,
// and the consumer warpgroups read it. Tile is one of the tiles of half_sm90/plan.h or
// fp32_sm90/plan.h.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

namespace my_ops::cuda {

// ---- tiles ----

// A block's place in its cluster, whose blocks take adjacent tiles in a line. In a line along m
// they share their columns of b, along n their rows of a: each block loads an equal share and
// multicasts it.
struct ClusterPlace {
  int m, n;
};

template <typename Tile>
__device__ __forceinline__ ClusterPlace cluster_place() {
  static_assert(Tile::kClusterM == 1 || Tile::kClusterN == 1);
  if constexpr (Tile::kClusterM > 1) {
    return {ptx::cluster_ctarank(), 0};
  } else if constexpr (Tile::kClusterN > 1) {
    return {0, ptx::cluster_ctarank()};
  } else {
    return {0, 0};
  }
}

// A cluster tile is what a cluster computes at a time: the tiles of its blocks. These two functions
// give a cluster's first cluster tile, and the step to its next.
template <typename Tile>
__device__ __forceinline__ int first_cluster_tile() {
  return blockIdx.x / Tile::kCluster;
}
template <typename Tile>
__device__ __forceinline__ int cluster_tile_step() {
  return gridDim.x / Tile::kCluster;
}

// The tile of one block: its first row and column, and its plane, which is a matrix of the batch or
// one k-slice of it.
struct TilePlace {
  int m, n, plane;
};

// Cluster tiles are walked in groups of kGroupM along m, so that concurrent blocks share operands
// in L2.
template <typename Tile>
__device__ __forceinline__ TilePlace tile_place(int cluster_tiles_m, int cluster_tiles_n,
                                                int cluster_tile, ClusterPlace place) {
  const int plane_tiles = cluster_tiles_m * cluster_tiles_n;
  const int plane = cluster_tile / plane_tiles, in_plane = cluster_tile % plane_tiles;
  const int group = in_plane / (Tile::kGroupM * cluster_tiles_n);
  const int in_group = in_plane % (Tile::kGroupM * cluster_tiles_n);
  const int first = group * Tile::kGroupM, rows = min(Tile::kGroupM, cluster_tiles_m - first);
  return {(first + in_group % rows) * Tile::kClusterTileM + place.m * Tile::kM,
          in_group / rows * Tile::kClusterTileN + place.n * Tile::kN, plane};
}

// ---- the ring ----

// A position in the ring: the stage, and the phase of its barriers.
template <int kStages>
struct RingPlace {
  int stage = 0;
  uint32_t phase = 0;
  __device__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// full: a stage's loads have landed (one arrival and their bytes). empty: the consumers of every
// block of the cluster have read the stage. Must be called by one thread.
template <typename Tile>
__device__ __forceinline__ void init_ring(int stages, uint64_t* full, uint64_t* empty) {
  for (int i = 0; i < stages; ++i) {
    ptx::mbarrier_init(&full[i], 1);
    ptx::mbarrier_init(&empty[i], Tile::kConsumers * Tile::kCluster);
  }
}

// Waits for all blocks of the cluster: at the start, so that every barrier is initialised before
// the first load, and at the end, so that no block exits while another may still write to it.
__device__ __forceinline__ void cluster_sync() {
  ptx::barrier_cluster_arrive();
  ptx::barrier_cluster_wait();
}

// The producer's side. Waits until the next stage is empty; then load(stage, full) fills it with so
// many bytes.
template <int kStages, typename Load>
__device__ __forceinline__ void fill_stage(RingPlace<kStages>& at, uint64_t* full, uint64_t* empty,
                                           int bytes, Load load) {
  ptx::mbarrier_wait(&empty[at.stage], at.phase ^ 1);
  ptx::mbarrier_arrive_expect_tx(&full[at.stage], bytes);
  load(at.stage, &full[at.stage]);
  at.advance();
}

// Loads a box for this block or, with several sharers, for every block whose bit is set in
// `blocks`.
template <int kSharers>
__device__ __forceinline__ void load_box(void* smem, const CUtensorMap* map, uint64_t* full, int x,
                                         int y, uint16_t blocks) {
  if constexpr (kSharers == 1) {
    ptx::tma_load_2d(smem, map, full, x, y);
  } else {
    ptx::tma_load_2d_multicast(smem, map, full, x, y, blocks);
  }
}
template <int kSharers>
__device__ __forceinline__ void load_box(void* smem, const CUtensorMap* map, uint64_t* full, int x,
                                         int y, int z, uint16_t blocks) {
  if constexpr (kSharers == 1) {
    ptx::tma_load_3d(smem, map, full, x, y, z);
  } else {
    ptx::tma_load_3d_multicast(smem, map, full, x, y, z, blocks);
  }
}

// Releases a stage for a warpgroup, in every block that loads into this one. Each signalling thread
// signals one block.
template <typename Tile>
struct Releaser {
  uint64_t* empty;
  int thread = threadIdx.x % 128;

  __device__ __forceinline__ void operator()(int stage) const {
    if (thread < Tile::kCluster) ptx::mbarrier_arrive_cluster(&empty[stage], thread);
  }
};

// A consumer's sums over k_blocks stages, without promotion. multiply(stage, first) issues the
// products of one stage, from zero if it is the first. A stage is released once the products of the
// next stage have been issued.
template <typename Tile, int kStages, int kCount, typename Multiply>
__device__ __forceinline__ void sum_stages(RingPlace<kStages>& at, uint64_t* full,
                                           const Releaser<Tile>& release, int k_blocks,
                                           float (&sum)[kCount], Multiply multiply) {
  int previous = -1;
  for (int k_block = 0; k_block < k_blocks; ++k_block) {
    ptx::mbarrier_wait(&full[at.stage], at.phase);
    ptx::wgmma_fence();
    multiply(at.stage, k_block == 0);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<1>();  // the previous stage has been read
    if (previous >= 0) release(previous);
    previous = at.stage;
    at.advance();
  }
  ptx::wgmma_wait_group<0>();
  ptx::wgmma_fence_operand(sum);
  release(previous);
}

}  // namespace my_ops::cuda
