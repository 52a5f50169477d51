// The shared parts of the forward and the backward block kernels, for small hidden sizes: a block
// holds all of W_h and runs 4 or 8 rows of the batch on its own. Blocks never communicate, so any
// number of rows is possible.
//
// Weights are the A operand of mma, in registers, and the block's rows are N = 8. A warp has 16
// units with all that it sums for them, so sums stay in the registers of the thread that applies
// the cell. The vector of the step (h, or the gradients of the gates) is in shared memory,
// double-buffered, with one barrier per step.
#pragma once

#include "common/launch.cuh"
#include "recurrent/block/plan.h"
#include "recurrent/shared/heads.cuh"
#include "recurrent/shared/slab.cuh"
#include "recurrent/shared/terms.cuh"

namespace my_ops::cuda {

constexpr int kBlockAhead = 4;  // steps between the prefetch of a value and its load

// Two adjacent units.
template <typename T>
using Pair = Vector<T, 2>;
template <typename T>
__device__ __forceinline__ float2 load_pair(const T* p) {
  const auto v = *reinterpret_cast<const Pair<T>*>(p);
  return {load(v.at[0]), load(v.at[1])};
}
template <typename T>
__device__ __forceinline__ void store_pair(T* p, float first, float second) {
  *reinterpret_cast<Pair<T>*>(p) = {store<T>(first), store<T>(second)};
}
__device__ __forceinline__ float element(float2 pair, int unit) {
  return unit == 0 ? pair.x : pair.y;
}

// A block's vector of one step: by column of mma, the hidden-sized vectors one after the other, in
// chunks.
template <typename T, int Vectors, int Units>
struct BlockVector {
  static constexpr int kUnitChunks = Units / kChunkUnits<T>;
  static constexpr int kChunks = Vectors * kUnitChunks;
  uint8_t bytes[kBlockRows][block_row_bytes(kChunks)];

  __device__ __forceinline__ void put(int column, int vector, int unit, float first, float second) {
    store_pair(reinterpret_cast<T*>(bytes[column]) + vector * Units + unit, first, second);
  }
  // The lane's 16 bytes of a chunk of column lane / 4.
  __device__ __forceinline__ uint4 fragments(int chunk) const {
    const int lane = threadIdx.x % 32;
    return *reinterpret_cast<const uint4*>(&bytes[lane / 4][chunk * kChunkBytes + lane % 4 * 16]);
  }
};

// A warp's weights, MTiles tiles of 16 rows, and their product with the block's vector. Sums: how
// many partial sums take chunks in turn, so that mmas overlap.
template <typename T, int MTiles, int Sums, typename Vector>
struct BlockWeights {
  static constexpr int kChunks = Vector::kChunks;
  // Whether the registers hold the two tf32 parts of a float.
  static constexpr bool kSplit = sizeof(T) == 4 && 16 * MTiles * kChunks <= 128;

  uint4 weights[kChunks][MTiles][2];
  uint4 low[kSplit ? kChunks : 1][MTiles][2];

  // fill(m, half, chunk): the lane's 16 bytes of row (lane / 4 + 8 * half) of tile m.
  template <typename Fill>
  __device__ __forceinline__ void load(Fill fill) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int m = 0; m < MTiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          uint4& high = weights[c][m][half];
          high = fill(m, half, c);
          if constexpr (kSplit) {
            const uint4 v = high;
            uint4& rest = low[c][m][half];
            split_tf32(v.x, high.x, rest.x);
            split_tf32(v.y, high.y, rest.y);
            split_tf32(v.z, high.z, rest.z);
            split_tf32(v.w, high.w, rest.w);
          }
        }
      }
    }
  }

  // total[m]: the sums of the tile's rows r and r + 8, r = lane / 4, with columns 2q and 2q + 1,
  // q = lane % 4: (r, 2q), (r, 2q + 1), (r + 8, 2q), (r + 8, 2q + 1).
  // The first half of a vector's chunks, and one more, always have units.
  __device__ __forceinline__ void multiply(const Vector& vector, int64_t units,
                                           float (&total)[MTiles][4]) const {
    float sum[Sums][MTiles][1][4] = {};
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int of_vector = c % Vector::kUnitChunks;
      if (of_vector > Vector::kUnitChunks / 2 && of_vector * kChunkUnits<T> >= units) continue;
      const uint4 b[1] = {vector.fragments(c)};
      if constexpr (kSplit) {
        multiply_chunk_split(sum[c % Sums], weights[c], low[c], b);
      } else {
        multiply_chunk_any<T>(sum[c % Sums], weights[c], b);
      }
    }
#pragma unroll
    for (int m = 0; m < MTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        total[m][i] = sum[0][m][0][i];
#pragma unroll
        for (int s = 1; s < Sums; ++s) total[m][i] += sum[s][m][0][i];
      }
    }
  }
};

template <typename Sequence>
struct BlockParams {
  Sequence seq;
  int rows;  // of a block
};

// What a thread works on: a pair of units in up to two rows, j = 0 and 1. A tile's rows r and r + 8
// are the warp's units 2r and 2r + 1. Columns 2q and 2q + 1 of mma are rows q and q + 4, so that
// with up to 4 rows nobody has a second.
template <typename Cell>
struct BlockPlace : Head<Cell> {
  using Base = Head<Cell>;
  int64_t batch, hidden, first_row;
  int rows;  // of the block
  int unit;  // the first of the pair

  template <typename Sequence>
  __device__ __forceinline__ explicit BlockPlace(const BlockParams<Sequence>& params)
      : Base(params.seq.hidden),
        batch(params.seq.batch),
        hidden(params.seq.hidden),
        first_row(int64_t{blockIdx.x} * params.rows),
        rows(static_cast<int>(min(int64_t{params.rows}, batch - first_row))),
        unit(threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 * 2) {}

  __device__ __forceinline__ int row(int j) const { return threadIdx.x % 4 + 4 * j; }
  __device__ __forceinline__ int column(int j) const { return threadIdx.x % 4 * 2 + j; }
  __device__ __forceinline__ bool has_unit() const { return unit < Base::head_units(hidden); }
  // The same in the whole block.
  __device__ __forceinline__ bool any(int j) const { return 4 * j < rows; }
  __device__ __forceinline__ bool real(int j) const { return has_unit() && row(j) < rows; }

  // Indices, also for rows and units that do not exist: those of the last that do. So loads need no
  // branch, around which the compiler could move nothing.
  //
  // Of row j in [steps, batch].
  __device__ __forceinline__ int64_t line(int64_t t, int j) const {
    return t * batch + first_row + min(row(j), rows - 1);
  }
  // Of the first of the unit's `values` values in [steps, batch, values, hidden].
  __device__ __forceinline__ int64_t at(int64_t t, int j, int values) const {
    const auto units = static_cast<int>(Base::head_units(hidden));
    const int width = units * Base::heads * values;
    return (t * batch + first_row) * width +
           (min(row(j), rows - 1) * width + min(unit, units - 2)) + Base::first_of_head;
  }
};

// ---- host ----
#ifndef __CUDACC_RTC__

template <typename Sequence>
cudaError_t launch_block(void (*kernel)(BlockParams<Sequence>), const BlockPlan& plan, int heads,
                         const Sequence& args, cudaStream_t stream) {
  if (kernel == nullptr) return cudaErrorNotSupported;
  Blocks blocks(ceil_div(args.batch, plan.rows));
  blocks.y = heads;
  return launch(kernel, blocks, plan.threads, 0, stream, {args, plan.rows});
}

// Calls visit<units>() for the plan's instantiation; null if there is none.
template <typename Visit>
auto visit_block_plan(const BlockPlan& plan, Visit visit) {
  switch (plan.units) {
    case 32:
      return visit.template operator()<32>();
    case 64:
      return visit.template operator()<64>();
    case 128:
      return visit.template operator()<128>();
    default:
      return decltype(visit.template operator()<32>()) {};
  }
}

#endif

}  // namespace my_ops::cuda
