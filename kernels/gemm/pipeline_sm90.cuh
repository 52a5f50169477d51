// What Hopper's products share: the walk of clusters over tiles of the output, and the ring of
// k-blocks in shared memory that one producer thread fills by TMA and warpgroups of consumers read.
// Tile: half_sm90_plan.h and fp32_sm90_tile.cuh say what a tile has.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

namespace my_ops::cuda {

// ---- tiles ----

// A block's place in its cluster, a line of tiles. Along m they share their columns of b, along n
// their rows of a: each block loads an equal part of these and sends it to the others.
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

// Units, a cluster's tiles each, are taken in turn: the first one, and how far it is to the next.
template <typename Tile>
__device__ __forceinline__ int first_unit() {
  return blockIdx.x / Tile::kCluster;
}
template <typename Tile>
__device__ __forceinline__ int unit_step() {
  return gridDim.x / Tile::kCluster;
}

// The tile of a block in a unit: its first row and column, in one of several planes of outputs.
struct TilePlace {
  int m, n, plane;
};

// Units in groups of kGroupM along m, so that blocks at work share operands in L2.
template <typename Tile>
__device__ __forceinline__ TilePlace tile_place(int units_m, int units_n, int unit,
                                                ClusterPlace place) {
  const int plane_units = units_m * units_n;
  const int plane = unit / plane_units, in_plane = unit % plane_units;
  const int group = in_plane / (Tile::kGroupM * units_n);
  const int in_group = in_plane % (Tile::kGroupM * units_n);
  const int first = group * Tile::kGroupM, rows = min(Tile::kGroupM, units_m - first);
  return {(first + in_group % rows) * Tile::kUnitM + place.m * Tile::kM,
          in_group / rows * Tile::kUnitN + place.n * Tile::kN, plane};
}

// ---- the ring ----

// A place in a ring of stages, with the parity of its barriers.
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

// full: the loads have landed, one arrival and their bytes. empty: the consumers have read, in
// every block of the cluster. By one thread.
template <typename Tile>
__device__ __forceinline__ void init_ring(int stages, uint64_t* full, uint64_t* empty) {
  for (int i = 0; i < stages; ++i) {
    ptx::mbarrier_init(&full[i], 1);
    ptx::mbarrier_init(&empty[i], Tile::kConsumers * Tile::kCluster);
  }
}

// Every block of the cluster has come here: before the first load the barriers of all are ready, at
// the end no block leaves while another may write to it.
__device__ __forceinline__ void cluster_sync() {
  ptx::barrier_cluster_arrive();
  ptx::barrier_cluster_wait();
}

// The producer's turn: waits for the next stage and lets load(stage, full) fill it with kBytes.
template <int kBytes, int kStages, typename Load>
__device__ __forceinline__ void fill_stage(RingPlace<kStages>& at, uint64_t* full, uint64_t* empty,
                                           Load load) {
  ptx::mbarrier_wait(&empty[at.stage], at.phase ^ 1);
  ptx::mbarrier_arrive_expect_tx(&full[at.stage], kBytes);
  load(at.stage, &full[at.stage]);
  at.advance();
}

// A box for this block alone or, of kSharers, for all named in `blocks`.
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

// Frees a stage, for a warpgroup, in every block that loads into this one: one thread for each.
template <typename Tile>
struct Releaser {
  uint64_t* empty;
  int thread = threadIdx.x % 128;

  __device__ __forceinline__ void operator()(int stage) const {
    if (thread < Tile::kCluster) ptx::mbarrier_arrive_cluster(&empty[stage], thread);
  }
};

// A consumer's sums over k_blocks stages, left in the tensor core: multiply(stage, first) starts
// the products of one, from zero if it is the first. A stage is freed when the next one's have
// started.
template <typename Tile, int kStages, int kCount, typename Multiply>
__device__ __forceinline__ void sum_stages(RingPlace<kStages>& at, uint64_t* full,
                                           const Releaser<Tile>& release, int k_blocks,
                                           float (&sum)[kCount], Multiply multiply) {
  int previous = -1;
  for (int block = 0; block < k_blocks; ++block) {
    ptx::mbarrier_wait(&full[at.stage], at.phase);
    ptx::wgmma_fence();
    multiply(at.stage, block == 0);
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
