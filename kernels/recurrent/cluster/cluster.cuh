// The shared parts of the forward and the backward cluster kernels, for small hidden sizes and few
// rows.
//
// A cluster holds W_h in registers as float and runs 1, 2 or 4 rows of the batch on its own; the
// grid may have any number of clusters. There is no block-wide barrier in the loop. The exchanged
// vector is in shared memory, double-buffered. Each warp pushes its new values into every block of
// the cluster (st.async), and the bytes that arrive complete an mbarrier on which all threads wait.
//
// A buffer may be overwritten once its step has been read everywhere. This needs no extra wait:
// step t + 1 is pushed after all of step t has arrived, and a warp pushes step t after it has read
// step t - 1, which is in the buffer that t + 1 goes into.
//
// Lanes: sixteen lanes share a pair of units and divide K. Lane k takes the float4s k, k + 16, ...
// of the vector, so that shared memory is read without bank conflicts. Shuffles add their sums and
// halve the number of (unit, row) items per lane, until a lane owns one item.
#pragma once

#include <algorithm>

#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "recurrent/cells/cell.h"
#include "recurrent/cluster/plan.h"
#include "recurrent/shared/heads.cuh"
#include "recurrent/shared/lanes.cuh"
#include "recurrent/shared/sizes.h"

namespace my_ops::cuda {

constexpr int kClusterChunkUnits = 64;  // 16 lanes of a float4 each
constexpr int kClusterAhead = 4;        // steps between the prefetch of a value and its load
constexpr int kLaneUnits = 2;           // of sixteen lanes
constexpr int kClusterWarpUnits = 2 * kLaneUnits;
static_assert(kRecurrentWarps * kClusterWarpUnits == kClusterBlockUnits);

// Vectors: how many hidden-sized vectors are exchanged (1 forward, the gates' gradients backward).
template <int Vectors, int Rows, int Chunks>
struct Exchange {
  static constexpr int kItems = kLaneUnits * Rows;  // per sixteen lanes
  static constexpr int kLanes = 16;
  static constexpr int kPadded = Chunks * kClusterChunkUnits;

  using Buffer = float4[Rows][Vectors][kPadded / 4];
  struct Shared {
    Buffer vector[2];
    uint64_t arrived[2];  // one arrival, which announces the bytes, and the bytes
  };

  // The lane's item after sum_items: unit first, then row.
  __device__ __forceinline__ static int item() { return item_of<kLanes, kItems>(); }
  __device__ __forceinline__ static int item_unit() {
    return threadIdx.x / 32 * kClusterWarpUnits + threadIdx.x % 32 / kLanes * kLaneUnits +
           item() / Rows;
  }
  __device__ __forceinline__ static int item_row() { return item() % Rows; }

#if __CUDA_ARCH__ >= 900
  __device__ __forceinline__ static uint32_t bytes(uint32_t blocks) {
    return blocks * kClusterBlockUnits * Rows * Vectors * sizeof(float);
  }

  // Zeroes both buffers (units past the last block stay zero) and arms both barriers.
  __device__ __forceinline__ static void init(Shared& shared, uint32_t blocks) {
    float4* all = &shared.vector[0][0][0][0];
    for (int i = threadIdx.x; i < 2 * Rows * Vectors * kPadded / 4; i += blockDim.x) all[i] = {};
    if (threadIdx.x == 0) {
      for (auto& barrier : shared.arrived) ptx::mbarrier_init(&barrier, 1);
    }
    __syncthreads();  // the barriers are initialised
    if (threadIdx.x == 0) {
      for (auto& barrier : shared.arrived) {
        ptx::mbarrier_arrive_expect_tx(&barrier, bytes(blocks));
      }
    }
    ptx::barrier_cluster_arrive();  // no block pushes into one that is not ready
    ptx::barrier_cluster_wait();
  }

  // Waits for the exchange of `step` >= 1 into buffer step % 2, and arms its barrier for step + 2.
  __device__ __forceinline__ static void wait(Shared& shared, uint32_t step, uint32_t blocks) {
    uint64_t* barrier = &shared.arrived[step & 1];
    ptx::mbarrier_wait(barrier, (step - 1) >> 1 & 1);
    // The bytes of step + 2 cannot have completed the phase before this call: its arrival is
    // missing.
    if (threadIdx.x == 0) ptx::mbarrier_arrive_expect_tx(barrier, bytes(blocks));
  }

  // A message is a warp's units of one row and vector for one block. Four lanes send a block's,
  // those of kVectorsAtOnce vectors and kRowsAtOnce rows at a time. All lanes that own an item have
  // its values, so each can give another vector's.
  static constexpr int kBlockLanes = 32 / kMostClusterBlocks, kOwners = kLanes / kItems;
  static constexpr int kVectorsAtOnce = std::min(Vectors > 2 ? kBlockLanes : Vectors, kOwners);
  static constexpr int kRowsAtOnce = std::min(Rows, kBlockLanes / kVectorsAtOnce);

  struct Target {
    uint32_t address = 0;  // in the target's first buffer, of the lane's first message; 0 if none
    uint32_t barrier = 0;

    __device__ __forceinline__ Target(Shared& shared, uint32_t rank, uint32_t blocks) {
      const uint32_t target = threadIdx.x % 32 / kBlockLanes;
      if (target >= blocks || threadIdx.x % kBlockLanes >= kVectorsAtOnce * kRowsAtOnce) return;
      const int unit = rank * kClusterBlockUnits + threadIdx.x / 32 * kClusterWarpUnits;
      const auto& vector = shared.vector[0][first_row()][min(first_vector(), Vectors - 1)];
      address = ptx::mapa(reinterpret_cast<const float*>(vector) + unit, target);
      barrier = ptx::mapa(&shared.arrived[0], target);
    }
  };
  __device__ __forceinline__ static int first_vector() { return threadIdx.x % kVectorsAtOnce; }
  __device__ __forceinline__ static int first_row() {
    return threadIdx.x % kBlockLanes / kVectorsAtOnce % kRowsAtOnce;
  }

  // Pushes every lane's own value[Vectors] to all blocks, as the exchange for `step`.
  __device__ __forceinline__ static void push(const Target& target, uint32_t step,
                                              const float (&value)[Vectors]) {
    const uint32_t buffer = step & 1;
#pragma unroll
    for (int vector = 0; vector < Vectors; vector += kVectorsAtOnce) {
      float given = value[vector];
#pragma unroll
      for (int i = 1; i < kVectorsAtOnce && vector + i < Vectors; ++i) {
        if (first_vector() == i) given = value[vector + i];
      }
#pragma unroll
      for (int row = 0; row < Rows; row += kRowsAtOnce) {
        float v[kClusterWarpUnits];
#pragma unroll
        for (int u = 0; u < kClusterWarpUnits; ++u) {
          const int item = u % kLaneUnits * Rows + row + first_row();
          v[u] = __shfl_sync(0xFFFFFFFFu, given,
                             u / kLaneUnits * kLanes + item * kOwners + first_vector());
        }
        if (target.address == 0 || vector + first_vector() >= Vectors) continue;
        const uint32_t address =
            target.address + buffer * static_cast<uint32_t>(sizeof(Buffer)) +
            (row * Vectors + vector) * static_cast<uint32_t>(sizeof(float) * kPadded);
        const uint32_t barrier = target.barrier + buffer * static_cast<uint32_t>(sizeof(uint64_t));
        ptx::st_async(address, barrier, v[0], v[1], v[2], v[3]);
      }
    }
  }
#endif
};

// The weights of a thread's units, in registers as float, and their product with the exchanged
// vectors, for the lane's share of K. Gates that share a vector (forward) and gates that have one
// each (backward) have separate sums, so that the chains of multiply-adds stay short.
template <int Gates, int Vectors, int Rows, int Chunks>
struct ClusterWeights {
  using Shared = typename Exchange<Vectors, Rows, Chunks>::Shared;
  static_assert(Vectors == 1 || Vectors == Gates);

  float4 weights[kLaneUnits][Gates][Chunks];

  // weights_of(unit): its UnitWeights, for units from first_unit on.
  template <typename WeightsOf>
  __device__ __forceinline__ void load(int64_t first_unit, WeightsOf weights_of) {
    const int64_t unit =
        first_unit + threadIdx.x / 32 * kClusterWarpUnits + threadIdx.x % 32 / 16 * kLaneUnits;
#pragma unroll
    for (int j = 0; j < kLaneUnits; ++j) {
      weights_of(unit + j).template load<kClusterChunkUnits, Gates>(threadIdx.x % 16 * 4,
                                                                    weights[j]);
    }
  }

  // The first chunks / 2 + 1 always have units.
  __device__ __forceinline__ void multiply(const Shared& shared, int buffer, int64_t units,
                                           float (&sum)[Gates][kLaneUnits * Rows]) const {
#pragma unroll
    for (int p = 0; p < Chunks; ++p) {
      if (p > Chunks / 2 && p * kClusterChunkUnits >= units) break;
#pragma unroll
      for (int r = 0; r < Rows; ++r) {
#pragma unroll
        for (int gate = 0; gate < Gates; ++gate) {
          const float4 v =
              shared.vector[buffer][r][Vectors == 1 ? 0 : gate][p * 16 + threadIdx.x % 16];
#pragma unroll
          for (int j = 0; j < kLaneUnits; ++j) {
            float& s = sum[gate][j * Rows + r];
            s = fmaf(weights[j][gate][p].x, v.x, s);
            s = fmaf(weights[j][gate][p].y, v.y, s);
            s = fmaf(weights[j][gate][p].z, v.z, s);
            s = fmaf(weights[j][gate][p].w, v.w, s);
          }
        }
      }
    }
  }
};

// A block of a cluster, and the lane's item, which is a unit of a row.
template <typename Cell, typename Exchange, int Rows>
struct ClusterBlock : Head<Cell> {
  using Base = Head<Cell>;
  int64_t batch, hidden, first_unit, first_row, unit, row;
  bool real;
  bool writes;  // whether this lane writes the item

  __device__ __forceinline__ ClusterBlock(int64_t batch, int64_t hidden, uint32_t blocks,
                                          uint32_t rank)
      : Base(hidden), batch(batch), hidden(hidden) {
    first_unit = int64_t{rank} * kClusterBlockUnits;
    first_row = int64_t{blockIdx.x / blocks} * Rows;
    unit = first_unit + Exchange::item_unit();
    row = first_row + Exchange::item_row();
    real = unit < Base::head_units(hidden) && row < batch;
    writes = real && writes_item<Exchange::kLanes, Exchange::kItems>();
  }

  // The index of the first of the item's `values` values in [steps, batch, values, hidden].
  __device__ __forceinline__ int64_t at(int64_t t, int values) const {
    return (t * batch + row) * values * hidden + (Base::first_of_head + unit);
  }
};

// ---- host ----
#ifndef __CUDACC_RTC__

// A launch of clusters.
struct ClusterLaunch {
  cudaLaunchAttribute attribute{};
  cudaLaunchConfig_t config{};
  int64_t clusters;

  ClusterLaunch(const ClusterPlan& plan, int heads, int64_t batch, cudaStream_t stream)
      : clusters((batch + plan.rows - 1) / plan.rows * heads) {
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = static_cast<unsigned>(plan.blocks);
    attribute.val.clusterDim.y = 1;
    attribute.val.clusterDim.z = 1;
    config.gridDim = dim3(static_cast<unsigned>(clusters / heads * plan.blocks), heads);
    config.blockDim = dim3(kRecurrentThreads);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
  }
  ClusterLaunch(const ClusterLaunch&) = delete;

  // How many clusters the device can hold, with this much dynamic shared memory per block. The
  // attributes belong to the kernel, in all threads; each is only ever set to one value.
  cudaError_t resident(const void* kernel, int shared_bytes, int& count) {
    config.dynamicSmemBytes = shared_bytes;
    if (shared_bytes > 0) {
      if (auto err = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                          kSpreadBytes);
          err != cudaSuccess) {
        return err;
      }
    }
    return cudaOccupancyMaxActiveClusters(&count, kernel, &config);
  }
};

// The number of clusters of this plan's kernel that the device can hold; 0 if none.
inline int count_resident(const void* kernel, const ClusterPlan& plan) {
  if (kernel == nullptr) return 0;
  ClusterLaunch launch(plan, 1, plan.rows, nullptr);
  int count = 0;
  if (launch.resident(kernel, 0, count) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());  // the refusal is the answer; clear the error
    return 0;
  }
  return count;
}

template <typename Sequence>
cudaError_t launch_cluster(const void* kernel, const ClusterPlan& plan, int heads,
                           const Sequence& args, cudaStream_t stream) {
  if (kernel == nullptr) return cudaErrorNotSupported;
  ClusterLaunch launch(plan, heads, args.batch, stream);
  int count = 0;
  if (auto err = launch.resident(kernel, plan.spread_bytes, count); err != cudaSuccess) return err;
  // By default the scheduler puts two blocks on one SM before it uses the next.
  if (count < launch.clusters) launch.config.dynamicSmemBytes = 0;
  Sequence params = args;
  void* arguments[] = {&params};
  return cudaLaunchKernelExC(&launch.config, kernel, arguments);
}

// Calls visit<rows, chunks>() for the plan's instantiation; null if there is none.
template <typename Visit>
const void* visit_cluster_plan(const ClusterPlan& plan, Visit visit) {
  const auto rows = [&]<int Chunks>() -> const void* {
    switch (plan.rows) {
      case 1:
        return visit.template operator()<1, Chunks>();
      case 2:
        return visit.template operator()<2, Chunks>();
      case 4:
        return visit.template operator()<4, Chunks>();
      default:
        return nullptr;
    }
  };
  switch (plan.chunks) {
    case 1:
      return rows.template operator()<1>();
    case 2:
      return rows.template operator()<2>();
    case 4:
      return rows.template operator()<4>();
    default:
      return nullptr;
  }
}

#endif

}  // namespace my_ops::cuda
