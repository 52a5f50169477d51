// The parameters of the kernel in warpgroup/backward.cuh, and what a block has in shared memory:
// its share of W_h, and for each of its two warpgroups a ring, partial sums and the state of its
// tiles.
#pragma once

#include "ptx/mbarrier.cuh"
#include "recurrent/warpgroup/parts.cuh"

namespace my_ops::cuda {

template <typename T>
struct WarpgroupBackwardParams {
  CUtensorMap grad_z;  // [steps, batch, kGates * hidden], in grad_terms; in float, the exchange
  GradPartsExchange exchange;  // in float
  RecurrentSequenceBackward<T> seq;
  uint32_t* arrived;  // [tiles of rows][kArrivedStride]: blocks that have finished a step
  WarpgroupBackwardPlan plan;
};

template <typename Cell>
constexpr int kBackwardTileK = backward_tile_k(Cell::kGates);

// A quad is four units of a row.
constexpr int kRowQuads = kBackwardUnits / 4;
template <int Split>
constexpr int kOwnRows = kWarpgroupRows / Split;  // of a tile, whose sums a block adds
template <int Split>
constexpr int kOwnQuads = kOwnRows<Split> * kRowQuads;  // of these rows
template <int Split>
constexpr int kThreadQuads = (kOwnQuads<Split> + 127) / 128;  // of a thread

// The gradients of a tile's state that stay in its block.
template <typename Cell, int Split>
using BackwardState = Vector<float, 4>[kStateRoom<Cell>][kOwnQuads<Split>];

// The sums of a tile over a block's share of k, in the memory of its ring. In every round the
// warpgroups of the cluster's blocks that run the tile meet twice: when these sums are written, and
// when they have been read.
struct PartialSums {
  float* sums;  // [kWarpgroupRows][kBackwardUnits]
  uint64_t *written, *read;
  uint32_t phase = 0;

  // Called by one thread.
  __device__ __forceinline__ void init(int blocks) const {
    ptx::mbarrier_init(written, blocks);
    ptx::mbarrier_init(read, blocks);
  }
  // Called when the warpgroup's threads have met after they wrote the sums: waits for those of all
  // blocks.
  template <int Split>
  __device__ __forceinline__ void exchange(int thread) {
    if (thread < Split) ptx::mbarrier_release_cluster(written, thread);
    ptx::mbarrier_wait<ptx::Scope::kCluster>(written, phase);
    phase ^= 1;
  }
  // Called when the warpgroup's threads have met after they stored what they made of the sums: so
  // these have been read, and nothing is published. At cluster scope it would take 3 to 10 % of a
  // step in 16 bits.
  template <int Split>
  __device__ __forceinline__ void release(int thread) const {
    if (thread < Split) ptx::mbarrier_arrive_cluster(read, thread);
  }
  // Run by the thread that fills the ring.
  __device__ __forceinline__ void wait_until_read() {
    ptx::mbarrier_wait(read, phase ^ 1);
    phase ^= 1;
  }
};

// A block's dynamic shared memory.
template <typename Cell, typename T, int Split>
struct WarpgroupBackwardShared {
  using State = BackwardState<Cell, Split>;
  unsigned char *weights, *rings;
  uint64_t* barriers;
  State* state;  // one for each tile in flight, those of a warpgroup together
  // In float.
  float* of_column;  // [kBackwardUnits]: powers of two of W_h, times 2^kGradPartShift
  int* largest;      // [2][kOwnRows]: the largest gradient of a row, of each warpgroup
  int stages;

  __device__ __forceinline__ WarpgroupBackwardShared(unsigned char* bytes,
                                                     const WarpgroupBackwardPlan& plan)
      : weights(bytes),
        rings(bytes + plan.k_blocks * kBackwardUnits * 128 * kParts<T>),
        barriers(reinterpret_cast<uint64_t*>(rings + 2 * plan.stages * kWarpgroupStageBytes)),
        state(reinterpret_cast<State*>(barriers + 4 * plan.stages + 4)),
        of_column(reinterpret_cast<float*>(state + 2 * plan.turns)),
        largest(reinterpret_cast<int*>(of_column + kBackwardUnits)),
        stages(plan.stages) {}
  __device__ __forceinline__ TileRing ring(int which) const {
    uint64_t* const full = barriers + which * 2 * stages;
    return {rings + which * stages * kWarpgroupStageBytes, full, full + stages, stages};
  }
  __device__ __forceinline__ PartialSums partial_sums(int which) const {
    uint64_t* const written = barriers + 4 * stages + 2 * which;
    return {reinterpret_cast<float*>(ring(which).stages_at), written, written + 1};
  }
};

// A block's share of W_h, transposed, in the layout of the 128-byte swizzle. Threads next to each
// other read units next to each other.
template <typename Cell, typename T, int Split>
__device__ __forceinline__ void load_weights(const RecurrentSequenceBackward<T>& seq,
                                             const WarpgroupBackwardPlan& plan,
                                             const WarpgroupBackwardShared<Cell, T, Split>& shared,
                                             int64_t first_unit, int rank) {
  const int64_t first_k = int64_t{rank} * plan.k_blocks * kWarpgroupK, hidden = seq.hidden;
  const auto place = [](int chunk, int column) {
    return (chunk / 8 * kParts<T> * kBackwardUnits + column) * 128 + (chunk % 8 ^ column % 8) * 16;
  };
  const int chunks = plan.k_blocks * 8;  // of 8 rows of W_h
  if constexpr (kParts<T> == 2) {
    // The element of the block's row k, in the order of the exchange.
    const auto element = [&](int64_t k, int column) {
      constexpr int kTileK = kBackwardTileK<Cell>;
      const int64_t tile = k / kTileK, of_tile = k % kTileK;
      const int64_t gate = of_tile / kBackwardUnits,
                    unit = tile * kBackwardUnits + of_tile % kBackwardUnits;
      const bool exists = gate < Cell::kGates && unit < hidden && first_unit + column < hidden;
      return exists ? __ldg(seq.w_h + (gate * hidden + unit) * seq.w_row + first_unit + column)
                    : 0.0f;
    };
    auto* const largest = reinterpret_cast<int*>(shared.of_column);
    if (threadIdx.x < kBackwardUnits) largest[threadIdx.x] = 0;
    if (threadIdx.x < 2 * kOwnRows<Split>) shared.largest[threadIdx.x] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < chunks * kBackwardUnits; i += kWarpgroupThreads) {
      const int column = i % kBackwardUnits, chunk = i / kBackwardUnits;
      float of_chunk = 0.0f;
      for (int e = 0; e < 8; ++e) {
        of_chunk = fmaxf(of_chunk, fabsf(element(first_k + chunk * 8 + e, column)));
      }
      atomicMax(largest + column, __float_as_int(of_chunk));
    }
    __syncthreads();
    for (int i = threadIdx.x; i < chunks * kBackwardUnits; i += kWarpgroupThreads) {
      const int column = i % kBackwardUnits, chunk = i / kBackwardUnits;
      const float scale = pow2(kPartShift - part_exponent(__int_as_float(largest[column])));
      Vector<__half, 8> high, low;
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const Parts of(element(first_k + chunk * 8 + e, column) * scale);
        high.at[e] = of.high;
        low.at[e] = of.low;
      }
      unsigned char* const to = shared.weights + place(chunk, column);
      *reinterpret_cast<Vector<__half, 8>*>(to) = high;
      *reinterpret_cast<Vector<__half, 8>*>(to + kBackwardUnits * 128) = low;
    }
    __syncthreads();
    if (threadIdx.x < kBackwardUnits) {
      const int exponent = part_exponent(__int_as_float(largest[threadIdx.x]));
      shared.of_column[threadIdx.x] = pow2(exponent - kPartShift + kGradPartShift);
    }
  } else {
    for (int i = threadIdx.x; i < chunks * kBackwardUnits; i += kWarpgroupThreads) {
      const int column = i % kBackwardUnits, chunk = i / kBackwardUnits;
      const int64_t k = first_k + chunk * 8, unit = first_unit + column;
      *reinterpret_cast<uint4*>(shared.weights + place(chunk, column)) = gather(
          seq.w_h + k * seq.w_row + unit, seq.w_row, unit < hidden ? Cell::kGates * hidden - k : 0);
    }
  }
}

}  // namespace my_ops::cuda
