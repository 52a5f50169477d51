// The shared parts of the forward and the backward warp kernels, for up to 96 units: a block runs
// 1, 2 or 4 rows of the batch on its own, so any number of rows is possible. Up to 32 units, a
// block is a warp, with a row.
//
// Weights are in registers as float. A lane has a unit with all weights of its sums, or two or four
// lanes share it and divide K. The vector of the step (h, or the gradients of the gates) is in
// shared memory, double-buffered, with one barrier per step. All units read the same float4s at a
// time.
#pragma once

#include "common/launch.cuh"
#include "recurrent/shared/heads.cuh"
#include "recurrent/shared/lanes.cuh"
#include "recurrent/shared/terms.cuh"
#include "recurrent/shared/weights.cuh"
#include "recurrent/warp/plan.h"

namespace my_ops::cuda {

constexpr int kWarpAhead = 4;  // steps between the prefetch of a value and its load

// Vectors: 1 if all gates multiply the same, else one for each gate.
template <int Vectors, int Units, int Rows>
struct __align__(16) WarpVector {
  float at[Rows][Vectors][Units];
};

template <int Units>
__device__ __forceinline__ void warp_kernel_barrier() {
  if constexpr (Units == 32) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

// A lane's share of the weights of a unit, and its product with the vectors of all rows.
template <int Gates, int Vectors, int Units, int Rows>
struct WarpWeights {
  static constexpr int kLanes = warp_lanes(Units), kQuads = Units / kLanes / 4;

  float4 at[Gates][kQuads];

  // The first element of K of the lane's quad i.
  __device__ __forceinline__ static int first_of(int i) {
    return (i * kLanes + static_cast<int>(threadIdx.x) % kLanes) * 4;
  }

  template <typename T>
  __device__ __forceinline__ void load(const UnitWeights<T>& unit) {
    unit.template load<kLanes * 4, Gates>(first_of(0), at);
  }

  __device__ __forceinline__ void multiply(const WarpVector<Vectors, Units, Rows>& vector,
                                           float (&sum)[Gates][Rows]) const {
#pragma unroll
    for (int gate = 0; gate < Gates; ++gate) {
#pragma unroll
      for (int r = 0; r < Rows; ++r) sum[gate][r] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
#pragma unroll
      for (int r = 0; r < Rows; ++r) {
#pragma unroll
        for (int gate = 0; gate < Gates; ++gate) {
          const float* const from = &vector.at[r][Vectors > 1 ? gate : 0][first_of(i)];
          const float4 v = *reinterpret_cast<const float4*>(from), w = at[gate][i];
          float& s = sum[gate][r];
          s = fmaf(w.x, v.x, s);
          s = fmaf(w.y, v.y, s);
          s = fmaf(w.z, v.z, s);
          s = fmaf(w.w, v.w, s);
        }
      }
    }
  }
};

// What a lane works on: a unit of a row, its item once the lanes' sums are added.
template <typename Cell, int Units, int Rows>
struct WarpPlace : Head<Cell> {
  using Base = Head<Cell>;
  static constexpr int kLanes = warp_lanes(Units);

  int64_t batch, hidden, first_row;
  int rows;  // of the block
  int unit, row;
  bool real;
  bool writes;  // whether this lane writes the item

  template <typename Sequence>
  __device__ __forceinline__ explicit WarpPlace(const Sequence& seq)
      : Base(seq.hidden),
        batch(seq.batch),
        hidden(seq.hidden),
        first_row(int64_t{blockIdx.x} * Rows),
        rows(static_cast<int>(min(int64_t{Rows}, batch - first_row))),
        unit(threadIdx.x / kLanes),
        row(item_of<kLanes, Rows>()),
        real(unit < Base::head_units(hidden) && row < rows),
        writes(real && writes_item<kLanes, Rows>()) {}

  // Indices, also for rows and units that do not exist: those of the last that do, so that loads
  // need no branch.
  //
  // Of the row in [steps, batch].
  __device__ __forceinline__ int64_t line(int64_t t) const {
    return t * batch + first_row + min(row, rows - 1);
  }
  // Of the first of the unit's `values` values in [steps, batch, values, hidden].
  __device__ __forceinline__ int64_t at(int64_t t, int values) const {
    const auto units = static_cast<int>(Base::head_units(hidden));
    const int width = units * Base::heads * values;
    return line(t) * width + min(unit, units - 1) + Base::first_of_head;
  }
  // Requests the block's values of a step: a sector of memory for each thread, which are enough for
  // eight values of 4 bytes a unit. Those of a head are apart from each other.
  template <typename T>
  __device__ __forceinline__ void prefetch(const T* p, int64_t t, int values) const {
    constexpr int kSector = 32 / sizeof(T);
    if constexpr (kHeaded<Cell>) {
      if (!writes || unit % kSector != 0) return;
#pragma unroll
      for (int k = 0; k < values; ++k) ptx::prefetch_l2(p + at(t, values) + k * hidden);
    } else {
      const int width = static_cast<int>(hidden) * values;
      ptx::prefetch_l2(p + (t * batch + first_row) * width +
                       min(static_cast<int>(threadIdx.x) * kSector, rows * width - 1));
    }
  }
};

// ---- host ----
#ifndef __CUDACC_RTC__

template <typename Sequence>
cudaError_t launch_warp(void (*kernel)(Sequence), const WarpPlan& plan, int heads,
                        const Sequence& args, cudaStream_t stream) {
  if (kernel == nullptr) return cudaErrorNotSupported;
  Blocks blocks(ceil_div(args.batch, plan.rows));
  blocks.y = heads;
  return launch(kernel, blocks, plan.threads, 0, stream, args);
}

// Calls visit<units, rows>() for the plan's instantiation; null if there is none.
template <typename Visit>
auto visit_warp_plan(const WarpPlan& plan, Visit visit) {
  using Kernel = decltype(visit.template operator()<32, 1>());
  const auto rows = [&]<int Units>() -> Kernel {
    switch (plan.rows) {
      case 1:
        return visit.template operator()<Units, 1>();
      case 2:
        return visit.template operator()<Units, 2>();
      case 4:
        return visit.template operator()<Units, 4>();
      default:
        return {};
    }
  };
  switch (plan.units) {
    case 32:
      return visit.template operator()<32, 1>();
    case 64:
      return rows.template operator()<64>();
    case 96:
      return rows.template operator()<96>();
    default:
      return Kernel{};
  }
}

#endif

}  // namespace my_ops::cuda
